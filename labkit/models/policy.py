"""A policy: weights, what they mean (config, tokenizer, family), and where to find one by name."""

from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from labkit.config.locations import model_folder
from labkit.models.decoder import Decoder, DecoderConfig
from labkit.models.tokenizer import Tokenizer

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]


@dataclass
class Policy:
    config: DecoderConfig
    weights: dict[str, Tensor]  # Hugging Face names, as `Decoder.weights()`
    tokenizer: Tokenizer
    name: str
    family: Family

    def to(self, dtype: torch.dtype) -> "Policy":
        """The same policy with its weights rounded to `dtype`."""
        return replace(self, weights={name: tensor.to(dtype) for name, tensor in self.weights.items()})

    def decoder(self, dtype: torch.dtype = torch.bfloat16) -> Decoder:
        decoder = Decoder(self.config, dtype)
        decoder.load_weights(self.weights)
        return decoder


def load(name_or_path: str | PathLike[str], dtype: torch.dtype = torch.float32) -> Policy:
    """ "tiny" and "tiny-moe" (shipped), "smollm2" or a model of the hub (fetched before), or a Hugging Face folder."""
    from labkit.models.huggingface import read_folder

    folder = model_folder(name_or_path)
    policy = read_folder(folder, dtype)
    return policy if folder == Path(name_or_path).expanduser() else replace(policy, name=str(name_or_path))
