"""The decoder, its weights and its tokenizer: `load("tiny")`, `load("smollm2")`, `load("a/folder")`."""

from labkit.models.decoder import Decoder, DecoderConfig
from labkit.models.policy import Policy, load
from labkit.models.tokenizer import Tokenizer

__all__ = ["Decoder", "DecoderConfig", "Policy", "Tokenizer", "load"]
