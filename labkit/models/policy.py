"""A policy: weights, what they mean (config, tokenizer, family), and where to find one by name."""

import os
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from labkit.models.decoder import Decoder, DecoderConfig
from labkit.models.tokenizer import Tokenizer

Family = Literal["llama", "qwen2", "qwen3"]
TINY_FOLDER = Path(__file__).parent / "tiny"


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


def cache_folder() -> Path:
    """Where fetched models are kept: $LABKIT_CACHE, or ~/.cache/labkit."""
    return Path(os.environ.get("LABKIT_CACHE") or Path.home() / ".cache" / "labkit")


def load(name_or_path: str | PathLike[str], dtype: torch.dtype = torch.float32) -> Policy:
    """ "tiny" (shipped with labkit), "smollm2" (fetched before), or the path of a Hugging Face folder."""
    from labkit.models.huggingface import read_folder

    if name_or_path == "tiny":
        return replace(read_folder(TINY_FOLDER, dtype), name="tiny")
    if name_or_path == "smollm2":
        folder = cache_folder() / "smollm2"
        if not folder.is_dir():
            raise ValueError(f"SmolLM2 is not in {cache_folder()}; run `labkit fetch smollm2` (98 MB) once")
        return replace(read_folder(folder, dtype), name="smollm2")
    if not Path(name_or_path).is_dir():
        raise ValueError(
            f'there is no model {str(name_or_path)!r}: give "tiny", "smollm2" or the path of a Hugging Face '
            "folder (config.json, model.safetensors, tokenizer.json)"
        )
    return read_folder(name_or_path, dtype)
