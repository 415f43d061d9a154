"""Attribution: which component of the rollout a batch's mismatch comes from.

A component is a part of the forward pass that the engine computes otherwise than the trainer. Each can take either
side's numerics in one and the same teacher-forced pass, so for every component two mismatches are measured, both
against the trainer's p and on the tokens that the batch's own sampler drew:

    alone      only this component takes the engine's numerics
    left out   all of them but this one do

Effects don't add up: two errors may cancel or feed each other, which is why both are shown. Components:

    linears    the FP8 linears of the body: all, their weights or activations only, by projection, by layer; of a
               mixture of experts those of all experts
    lm_head    the output projection
    K, V       the FP8 cache, all layers and by layer (K and V apart); Q and P: the operands of FP8 attention
    kernel     the engine's attention kernel instead of the trainer's, in the same precision (trainer_attention sdpa)
    weights    what the engine held where that is not what the trainer holds: staleness, or a fault

Only components in which the two sides of this batch's recipe differ are listed: with one recipe and one kernel on
both sides there are none, and the mismatch is exactly 0.

compute "fp32": everything that is not FP8 runs in FP32, from the same BF16 weights. In BF16, as the run computes,
any difference at all changes roundings everywhere, and this floor (gen KL about 1e-5 on the tiny policy) hides
single layers; "bf16" shows it as it is. Beyond that: FP8 K, V or Q inside the trainer's sdpa kernel are dequantised
to the compute type first; FP8 P needs the engine's kernel, and takes it along.

Every pass goes by its own routers, so that flips are part of what a component does. Not reproduced by teacher forcing:
router replay, and activation scales per tensor, which depend on what shared the pass. Compare `together` with
`recorded`.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from labkit.analysis.batch import Batch
from labkit.config.own import forget
from labkit.fp8 import Float8Linear, LinearFormat, fake_quantize, to_grid
from labkit.models.attention import PaddedAttention
from labkit.models.decoder import Attention, Decoder
from labkit.models.lora import LoRALinear, attach
from labkit.models.moe import set_router
from labkit.rl.metrics import mismatch
from labkit.rollout.kv_cache import KVCache, KVPrecision
from labkit.rollout.scoring import teacher_forced

if TYPE_CHECKING:
    from rich.table import Table

Atom = tuple[str, ...]
"""What takes one side's numerics as a whole: ("linear", module, x or w), ("attention", layer, part) or one of these."""
KERNEL: Atom = ("kernel",)
WEIGHTS: Atom = ("weights",)
Atoms = frozenset[Atom]
COMPUTE = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Mismatch:
    tmpe: float
    gen_kl: float  # nats


@dataclass(frozen=True)
class Component:
    name: str
    alone: Mismatch
    left_out: Mismatch


@dataclass(frozen=True)
class Attribution:
    rows: list[Component]
    recorded: Mismatch  # of the batch: the engine's own g against the trainer's p
    together: Mismatch  # all components, in this compute type
    compute: str
    notes: list[str]
    seconds: float

    def table(self) -> "Table":
        from rich.table import Table

        title = (
            f"recorded TMPE {self.recorded.tmpe:.5g}, gen KL {self.recorded.gen_kl:.1e}; "
            f"all components in {self.compute}: {self.together.tmpe:.5g}, {self.together.gen_kl:.1e}"
        )
        caption = "\n".join([*self.notes, f"{self.seconds:.1f} s"])
        table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
        table.add_column("component", no_wrap=True)
        for heading in ("alone\nTMPE − 1", "alone\ngen KL", "left out\nTMPE − 1", "left out\ngen KL"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self.rows:
            values = (f"{value:.1e}" for each in (row.alone, row.left_out) for value in (each.tmpe - 1, each.gen_kl))
            table.add_row(row.name, *values)
        return table


def attribute(batch: Batch, compute: str = "fp32") -> Attribution:
    """`compute`: "fp32", which shows single layers, or "bf16", as the run was."""
    if compute not in COMPUTE:
        raise ValueError(f"compute is {compute!r}: choose one of {', '.join(COMPUTE)}")
    start = time.perf_counter()
    forget()
    hybrid = _Hybrid(batch, COMPUTE[compute])
    components = list(_components(batch, hybrid.atoms))
    rows = [
        Component(name, hybrid.mismatch(atoms), hybrid.mismatch(hybrid.atoms - atoms)) for name, atoms in components
    ]
    recorded, together = _mismatch(batch, batch.rollouts.logprobs_BR, batch.p_BR), hybrid.mismatch(hybrid.atoms)
    return Attribution(
        rows,
        recorded,
        together,
        compute,
        [*_notes(batch), *_unexplained(recorded, together)],
        time.perf_counter() - start,
    )


def _notes(batch: Batch) -> Iterator[str]:
    recipe = batch.experiment.recipe
    yield "alone: only this is the engine's; left out: all but this. Effects don't add up"
    if recipe.rollout.linears and recipe.train.fprop:
        yield "linears: FP8 on both sides alike, so they are not listed"
    if batch.rollouts.weight_version < batch.version and batch.sampled_with is None:
        yield "staleness: not in this batch, which holds no weights but the trainer's"
    if batch.experiment.engine != "local":
        yield "what was recorded beyond all components together is the other arithmetic of the engine's kernels"
    if recipe.router.replay == "r3":
        yield "router replay r3: not in these passes, so the recorded mismatch has fewer flips than they have"
    if batch.experiment.recipe.scaling.granularity == "tensor":
        yield "scales per tensor depend on what shared the pass: that part of the recorded mismatch isn't shown"


def _unexplained(recorded: Mismatch, together: Mismatch) -> Iterator[str]:
    small, large = sorted((recorded.gen_kl, together.gen_kl))
    if large > 1e-6 and large > 4 * small:
        yield (
            "the components do not make up what was recorded: something else is at work, such as a fault, log-probs "
            "that are not the engine's, or scales per tensor"
        )


def _mismatch(batch: Batch, g_BR: Tensor, p_BR: Tensor) -> Mismatch:
    found = mismatch(g_BR, p_BR, batch.rollouts.mask_BR)
    return Mismatch(found["token_mult_prob_error"], found["gen_kl_error"])


# ---- what differs


def _components(batch: Batch, atoms: Atoms) -> Iterator[tuple[str, Atoms]]:
    """Named sets of atoms, those without any left out."""

    def named(name: str, *wanted: str) -> Iterator[tuple[str, Atoms]]:
        """The linears of the body that have every wanted part."""
        if chosen := frozenset(atom for atom in body if set(wanted) <= _parts(atom)):
            yield name, chosen

    config = batch.policy.config
    linears = frozenset(atom for atom in atoms if atom[0] == "linear")
    head = frozenset(atom for atom in linears if atom[1] == "lm_head")
    body = linears - head
    yield from named("linears")
    yield from named("linears: weights", "w")
    yield from named("linears: activations", "x")
    yield from named("linears: experts", "experts")
    for projection in ("q", "k", "v", "o", "gate", "up", "down"):
        yield from named(f"linears: {projection}_proj", f"{projection}_proj")
    for layer in range(config.num_layers):
        yield from named(f"linears: layer {layer}", f"layer {layer}")
    if head:
        yield "lm_head", head
    for part in ("k", "v", "q", "p"):
        of_part = {atom for atom in atoms if atom[0] == "attention" and atom[2] == part}
        if of_part:
            yield part.upper(), frozenset(of_part)
        for layer in range(config.num_layers if of_part and part in "kv" else 0):
            yield f"{part.upper()}: layer {layer}", frozenset({("attention", str(layer), part)})
    if KERNEL in atoms:
        yield "kernel", frozenset({KERNEL})
    if WEIGHTS in atoms:
        lag = batch.version - batch.rollouts.weight_version
        yield f"weights: {lag} steps older" if lag else "weights: not the trainer's", frozenset({WEIGHTS})


def _parts(atom: Atom) -> set[str]:
    """The names in a linear's module path, its operand, and its layer, whose number an expert may have too."""
    _, path, operand = atom
    names = path.split(".")
    return {*names, operand, f"layer {names[2]}"}


class _Hybrid:
    """The policy, with the engine's numerics for any set of atoms and the trainer's for the rest."""

    def __init__(self, batch: Batch, dtype: torch.dtype) -> None:
        self.batch, self.dtype, self.config = batch, dtype, batch.policy.config
        recipe = batch.experiment.recipe
        self.trainer_fp8, engine_fp8 = recipe.train.fprop, recipe.rollout.linears
        self.precision = KVPrecision.from_recipe(recipe, self.config.num_layers)
        self.model = _Model(batch, batch.weights, dtype)
        atoms: set[Atom] = set()
        if self.trainer_fp8 != engine_fp8:
            atoms |= {("linear", name, operand) for name in self.model.linears for operand in ("w", "x")}
        for layer, parts in enumerate(self.precision.parts):
            atoms |= {("attention", str(layer), part) for part in parts}
        if batch.experiment.trainer_attention != "math":
            atoms.add(KERNEL)
        if batch.sampled_with is not None:
            atoms.add(WEIGHTS)
            self.engine_model = _Model(batch, batch.sampled_with, dtype)
        self.atoms: Atoms = frozenset(atoms)
        self._found: dict[Atoms, Mismatch] = {}
        self.p_BR = self.score(frozenset())

    def mismatch(self, atoms: Atoms) -> Mismatch:
        if atoms not in self._found:
            self._found[atoms] = _mismatch(self.batch, self.score(atoms), self.p_BR)
        return self._found[atoms]

    def score(self, atoms: Atoms) -> Tensor:
        """Log-probs [B, R] of the batch's tokens with the engine's numerics for `atoms`."""
        model = self.engine_model if WEIGHTS in atoms else self.model
        for name, linear in model.linears.items():
            linear.fp8_weight = self.trainer_fp8 != (("linear", name, "w") in atoms)
            linear.fp8_input = self.trainer_fp8 != (("linear", name, "x") in atoms)
        parts = tuple(
            frozenset(part for part in held if ("attention", str(layer), part) in atoms)
            for layer, held in enumerate(self.precision.parts)
        )
        precision = KVPrecision(self.precision.fmt, self.batch.scales, parts)
        sampling = self.batch.experiment.sampling

        def attention(starts_b: Tensor, num_columns: int) -> Attention:
            cache = KVCache(self.config, starts_b, num_columns, precision, self.dtype)
            if KERNEL not in self.atoms or KERNEL in atoms:
                return cache.attend
            kernel = PaddedAttention(starts_b, num_columns, self.batch.experiment.trainer_attention)
            return _TrainerKernel(kernel, cache)

        return teacher_forced(model.decoder, self.batch.rollouts, sampling, attention)


class _Model:
    """A decoder whose covered linears can quantise either operand."""

    def __init__(self, batch: Batch, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        recipe, config = batch.experiment.recipe, batch.policy.config
        self.decoder = attach(Decoder(config, dtype), batch.experiment.lora).requires_grad_(False)
        self.decoder.load_weights(weights)
        set_router(self.decoder, recipe)
        fmt = LinearFormat.from_recipe(recipe, side="rollout")
        self.linears: dict[str, _Operands] = {}
        for layer, weight_name, linear in list(self.decoder.linears()):
            if recipe.covers(layer, config.num_layers):
                name = weight_name.removesuffix(".weight")
                self.linears[name] = _Operands(linear, fmt)
                parent, _, leaf = name.rpartition(".")
                setattr(self.decoder.get_submodule(parent), leaf, self.linears[name])


class _Operands(nn.Module):
    """`Float8Linear` in its forward, with a switch for each operand. With both on, or both off, the same bits."""

    def __init__(self, linear: Float8Linear, fmt: LinearFormat) -> None:
        super().__init__()
        self.linear, self.fmt = linear, fmt
        self.tile = fmt.tiles(1, linear.in_features, linear.out_features).x
        self.quantized = fmt.weight_operand(linear.weight)
        self.fp8_weight = self.fp8_input = False

    def forward(self, x: Tensor) -> Tensor:
        fmt, bias = self.fmt, self.linear.bias
        weight = self.quantized if self.fp8_weight else self.linear.weight
        x_used = fake_quantize(x, fmt.fmt, self.tile, fmt.scale, fmt.formula) if self.fp8_input else x
        dtype = torch.promote_types(x_used.dtype, weight.dtype)  # FP32 scales give FP32 operands
        y = F.linear(x_used.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)).to(x.dtype)
        return y + self.linear.adapted(x) if isinstance(self.linear, LoRALinear) else y


@dataclass(frozen=True)
class _TrainerKernel:
    """Q, K and V rounded as the engine rounds them, in the trainer's own kernel."""

    kernel: PaddedAttention
    cache: KVCache

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.cache.precision.quantizes_p(layer):
            return self.cache.attend(layer, q, k, v)
        return self.kernel(layer, *(self._rounded(layer, part, x) for part, x in (("q", q), ("k", k), ("v", v))))

    def _rounded(self, layer: int, part: str, x: Tensor) -> Tensor:
        scale = self.cache.precision.scale(layer, part)
        return x if scale is None else to_grid(x, scale, self.cache.precision.fmt) * scale
