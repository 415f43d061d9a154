"""Kernels: one batch's tokens through other implementations of the same policy, in FP32, BF16 and FP8.

    Δ = log-prob by labkit's decoder in FP32 - log-prob by the implementation        same tokens, same BF16 weights

    FP32    labkit, transformers, vLLM    Δ of the order of the type's rounding (1e-7 on the tiny policy): one model
    BF16    the same three                what rounding alone does, differently in each: the floor of every FP8 figure
    FP8     embedded engine, vLLM         each part of the rollout that the batch's recipe has in FP8, and all of them

"math" and "sdpa" are the attention kernels of trainer_attention, "eager" and "sdpa" those of transformers. All score at
temperature 1 over the whole vocabulary. Log-probs in nats; generation KL = mean k3(Δ), over tokens that the batch's own
engine drew, so it estimates a divergence for that engine's row and is a distance for the others.

What is not installed, or can't run this policy, is listed in `missing` with the reason. vLLM's FP8 is what
`labkit.rollout.vllm` makes of it. Raises ValueError for a batch of stale weights, of which two sets would be needed,
and for adapters.
"""

import dataclasses
import importlib.util
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from labkit.analysis.batch import Batch
from labkit.config import Recipe, Sampling
from labkit.config.cluster import Cluster
from labkit.config.recipe import Rollout
from labkit.hardware.packages import vllm as vllm_package
from labkit.models.attention import PaddedAttention
from labkit.models.huggingface import write_folder
from labkit.models.policy import Policy
from labkit.models.rollouts import Rollouts
from labkit.rl.kl import k3
from labkit.rollout import Engine, build_engine
from labkit.rollout.scoring import teacher_forced

if TYPE_CHECKING:
    from rich.table import Table

DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16}
REFERENCE = ("FP32", "labkit, math")
_ROWS = 8  # of a forward of transformers, whose logits are [rows, tokens, vocabulary]


@dataclass(frozen=True)
class Row:
    precision: str
    implementation: str
    logprobs_BR: Tensor = field(repr=False)
    mean_abs: float
    max_abs: float
    gen_kl: float


@dataclass(frozen=True)
class Kernels:
    rows: list[Row]
    missing: dict[str, str]  # implementation -> reason
    num_tokens: int
    seconds: float

    def table(self) -> "Table":
        from rich.table import Table

        notes = [f"{name}: not available here: {why}" for name, why in self.missing.items()]
        notes.append(f"{self.num_tokens} tokens, {self.seconds:.0f} s")
        title = f"against {REFERENCE[1]} in {REFERENCE[0]}"
        table = Table(title=title, caption="\n".join(notes), title_justify="left", caption_justify="left")
        table.add_column("precision", no_wrap=True)
        table.add_column("implementation", no_wrap=True)
        for heading in ("mean |Δ|", "largest |Δ|", "generation KL"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self.rows:
            numbers = (f"{value:.1e}" for value in (row.mean_abs, row.max_abs, row.gen_kl))
            table.add_row(row.precision, row.implementation, *numbers)
        return table


def kernels(batch: Batch) -> Kernels:
    start = time.perf_counter()
    if batch.sampled_with is not None:
        raise ValueError("the engine of this batch held other weights than the trainer: collect one with staleness 0")
    if batch.experiment.lora.rank:
        raise ValueError("other implementations get this policy without its adapters: collect one with lora.rank 0")
    policy = dataclasses.replace(batch.policy, weights=batch.weights)
    missing = dict(_missing(batch))
    mask_BR = batch.rollouts.mask_BR
    reference_BR: Tensor | None = None
    rows = []
    for precision, implementation, logprobs_BR in _scored(batch, policy, missing):
        reference_BR = logprobs_BR if reference_BR is None else reference_BR
        delta_N = (reference_BR - logprobs_BR)[mask_BR].double()
        apart_N = delta_N.abs()
        numbers = (float(apart_N.mean()), float(apart_N.max()), float(k3(delta_N).mean()))
        rows.append(Row(precision, implementation, logprobs_BR, *numbers))
    return Kernels(rows, missing, batch.rollouts.num_tokens, time.perf_counter() - start)


def _missing(batch: Batch) -> Iterator[tuple[str, str]]:
    if importlib.util.find_spec("transformers") is None:
        yield "transformers", "it is not installed: pip install transformers"
    there, why = vllm_package()
    if not there:
        yield "vLLM", why
    elif batch.policy.config.moe:
        yield "vLLM", "it gets dense models only from labkit"


def _scored(batch: Batch, policy: Policy, missing: dict[str, str]) -> Iterator[tuple[str, str, Tensor]]:
    """(precision, implementation, log-probs [B, R]), the reference first."""
    rollouts = batch.rollouts
    for precision, dtype in DTYPES.items():
        decoder = policy.decoder(dtype)
        for kernel in ("math", "sdpa"):
            attention = partial(PaddedAttention, kernel=kernel)
            yield precision, f"labkit, {kernel}", teacher_forced(decoder, rollouts, Sampling(), attention)
        if "transformers" not in missing:
            for kernel in ("eager", "sdpa"):
                yield precision, f"transformers, {kernel}", _by_transformers(policy, rollouts, dtype, kernel)
        if "vLLM" not in missing:
            yield from _by_vllm(batch, policy, Recipe(), precision, missing, dtype)
    for parts in _fp8_parts(batch.experiment.recipe):
        recipe = _with(batch.experiment.recipe, parts)
        precision = "FP8 " + " + ".join(part.replace("kv_cache", "KV cache") for part in parts)
        yield precision, "embedded engine", _by_engine(batch, policy, "local", recipe)
        if "vLLM" not in missing and "attention" not in parts:  # on a CPU its attention multiplies in BF16
            yield from _by_vllm(batch, policy, recipe, precision, missing)


def _fp8_parts(recipe: Recipe) -> list[tuple[str, ...]]:
    """Each part of the rollout that is FP8, then all; attention is nothing without its cache."""
    on = tuple(name for name, switch in recipe.rollout if switch)
    alone = [("kv_cache", "attention") if part == "attention" else (part,) for part in on]
    return list(dict.fromkeys([*alone, tuple(part for part in on if part != "attention"), on])) if on else []


def _with(recipe: Recipe, parts: tuple[str, ...]) -> Recipe:
    scaling = recipe.scaling if "kv_cache" in parts else recipe.scaling.override({"kv_format": "e4m3"})
    rollout = Rollout(**dict.fromkeys(parts, True))
    return Recipe(rollout=rollout, scaling=scaling, keep_bf16=recipe.keep_bf16, router=recipe.router)


def _by_vllm(
    batch: Batch,
    policy: Policy,
    recipe: Recipe,
    precision: str,
    missing: dict[str, str],
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[tuple[str, str, Tensor]]:
    """Its row, or the reason why it has none: vLLM can't do all that a recipe of the embedded engine can."""
    try:
        logprobs_BR = _by_engine(batch, policy, "vllm", recipe, dtype)
    except ValueError as error:
        missing[f"vLLM, {precision}"] = str(error)
    else:
        yield precision, "vLLM", logprobs_BR


def _by_engine(
    batch: Batch, policy: Policy, engine: Literal["local", "vllm"], recipe: Recipe, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    plain = {"faults": (), "sampling": Sampling(), "cluster": Cluster(), "eval_engine": False}
    experiment = batch.experiment.override({**plain, "engine": engine, "recipe": recipe})
    if engine == "vllm":
        from labkit.rollout.vllm import VLLMEngine

        built: Engine = VLLMEngine(policy, experiment, lambda: None, dtype)
    else:
        built = build_engine(policy, experiment, lambda: None)
    try:
        built.refit(batch.weights, batch.scales if recipe.rollout.kv_cache else None, batch.version)
        return built.score(batch.rollouts, Sampling())
    finally:
        built.close()


@torch.no_grad()
def _by_transformers(policy: Policy, rollouts: Rollouts, dtype: torch.dtype, kernel: str) -> Tensor:
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory(prefix="labkit-") as folder:
        write_folder(policy, folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=kernel)
    P, mask_BR = rollouts.prompt_width, rollouts.mask_BR
    logprobs_BR = torch.zeros(mask_BR.shape)
    for rows_b in torch.arange(len(rollouts)).split(_ROWS):
        tokens_bT, starts_b = rollouts.tokens_BT[rows_b], rollouts.starts_B[rows_b]
        columns_T = torch.arange(tokens_bT.shape[1])
        logits_brV = model.eval()(
            input_ids=tokens_bT,
            attention_mask=(columns_T >= starts_b[:, None]).long(),
            position_ids=(columns_T - starts_b[:, None]).clamp(min=0),
            logits_to_keep=mask_BR.shape[1] + 1,
        ).logits[:, :-1]
        picked_br1 = logits_brV.float().log_softmax(-1).gather(-1, tokens_bT[:, P:, None])
        logprobs_BR[rows_b] = picked_br1[..., 0].where(mask_BR[rows_b], 0.0)
    return logprobs_BR
