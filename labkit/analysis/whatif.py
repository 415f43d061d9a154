"""What if: the tokens of one batch under every recipe and correction, side by side, without new rollouts.

The tokens stay those that the batch's own sampler drew. For a recipe R two log-probs of each are computed:

    g'    the engine in R's rollout precision, teacher-forced; where that is the batch's own, the g it recorded
    p'    the trainer in R's training precision, from the batch's weights

and for a correction C the weights and the gradient of the one update that R and C would make of the whole batch:

    cotangent_BR = dL / dc at c = p'       the loss of `labkit.rl.loss` with c as a leaf: cheap
    gradient     = sum over micro-batches of  cotangent . dc/dtheta       one backward for each distinct cotangent

Corrections which act alike on this batch share a cotangent, and so a backward. cosine compares the gradient with
that of training in BF16 without correction on the same tokens. Norms are before clipping, in FP32.

What this can't say: which tokens R's own sampler would have drawn, and what later updates on the batch would do,
when c has left p' and clips begin to act. The KL penalty to a reference policy, which no correction touches, is left
out. Q/K/V scales are the batch's own where R makes them the same way; else they are calibrated on this batch.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit.analysis.batch import Batch
from labkit.config import CORRECTIONS, RECIPES, Correction, Recipe, Router, Scaling, Train
from labkit.config.own import forget, short
from labkit.config.presets import recipe as named_recipe
from labkit.fp8 import KVScales
from labkit.rl.corrections import Weights, correction_from
from labkit.rl.faults import Faults
from labkit.rl.loss import grpo_loss
from labkit.rl.metrics import mismatch, weight_statistics
from labkit.rl.routing import for_scoring
from labkit.rollout import LocalEngine
from labkit.runs.compare import tmpe_text
from labkit.training import LocalTrainer

if TYPE_CHECKING:
    from rich.table import Table


LISTED = 6  # names on a line of the table


@dataclass(frozen=True)
class Cell:
    """One recipe and one correction. Shares are of the tokens with finite log-probs."""

    recipe: str
    correction: str
    tmpe: float
    gen_kl: float  # nats
    mean_weight: float
    max_weight: float
    ess: float
    clipped: float  # share whose weight was truncated
    rejected: float  # share that a filter dropped
    kept_sequences: int  # with at least one token left
    grad_norm: float
    cosine: float  # NaN where a gradient is 0

    def heading(self) -> str:
        return f"{self.recipe}\nTMPE {tmpe_text(self.tmpe)}\ngen KL {_short(self.gen_kl)}"

    def numbers(self) -> list[str]:
        return [
            f"{self.mean_weight:.3f}", f"{self.max_weight:.3g}", f"{self.ess:.3f}", f"{self.clipped:.1%}",
            f"{1 - self.rejected:.1%}", f"{self.kept_sequences}", f"{self.grad_norm:.3g}", f"{self.cosine:.4f}",
        ]  # fmt: skip


@dataclass(frozen=True)
class WhatIf:
    rows: list[Cell]
    drawn_by: str  # the recipe whose sampler drew the tokens
    num_sequences: int
    num_tokens: int
    seconds: float
    left_out: str = ""  # of what the run itself would do with the batch

    def table(self) -> "Table":
        from rich.box import SIMPLE
        from rich.table import Table

        title = f"{self.num_sequences} responses, {self.num_tokens} tokens, drawn by {self.drawn_by}"
        caption = (
            "w: applied weight; ESS: effective share of the sample; capped, kept: by the correction; |grad|, cosine: "
            "the gradient, and its angle to that of BF16 training without correction (1: the same, not: the best). "
            f"Corrections that act alike on this batch share a line; .rows has all. {self.left_out}{self.seconds:.1f} s"
        )
        table = Table(
            title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE, padding=(0, 1, 0, 0)
        )
        table.add_column("recipe, corrections", min_width=18, overflow="fold")
        for heading in ("mean w", "max w", "ESS", "capped", "kept tokens", "kept resp.", "|grad|", "cosine"):
            table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
        lines: dict[str, dict[tuple[str, ...], list[str]]] = {}
        for cell in self.rows:
            lines.setdefault(cell.heading(), {}).setdefault(tuple(cell.numbers()), []).append(cell.correction)
        for heading, corrections in lines.items():
            table.add_section()
            table.add_row(f"[bold]{heading}[/bold]")
            for numbers, names in corrections.items():
                table.add_row(_listed(names), *numbers)
        return table


def whatif(
    batch: Batch,
    recipes: Sequence[str | Recipe] | None = None,
    corrections: Sequence[str | Correction] | None = None,
) -> WhatIf:
    """Recipes by preset name or as Recipe (None: the batch's own); corrections by name, as Correction or as a weight of
    the user's, mine.py:my_weight (None: all). A project's name, such as "verl", stands for all of its corrections."""
    start = time.perf_counter()
    forget()
    own = batch.experiment.recipe
    asked = [own] if recipes is None else recipes
    compared = [named_recipe(each) if isinstance(each, str) else each for each in asked]
    chosen = _chosen(corrections, own.correction)
    pulled = any(each.anchor for each in chosen)

    trained = _Trained(batch, RECIPES["bf16"], pulled)
    uncorrected = _cotangent(batch, trained.p_BR, trained.p_BR, Correction())[1]
    reference = trained.gradient(uncorrected)
    rows = []
    for recipe in compared:
        if _train_side(recipe) != _train_side(trained.recipe):
            trained = _Trained(batch, recipe, pulled)
        g_BR = _sampled(batch, recipe, trained)
        rows += _cells(batch, recipe.name, g_BR, trained, chosen, reference)
    seconds = time.perf_counter() - start
    return WhatIf(rows, own.name, len(batch.rollouts), batch.rollouts.num_tokens, seconds, _left_out(batch))


def _left_out(batch: Batch) -> str:
    settings = batch.experiment.grpo
    engine = "vLLM" if batch.experiment.engine == "vllm" else short(batch.experiment.engine)
    kernels = f"Other rollout recipes in the embedded engine's kernels, not {engine}'s. "
    several = f"One update of the whole batch, the run makes {settings.minibatches}. " * (settings.minibatches > 1)
    penalty = "Without the run's KL penalty. " * (settings.kl_coef > 0)
    return several + penalty + kernels * (batch.experiment.engine != "local")


def _chosen(corrections: Sequence[str | Correction] | None, own: Correction) -> list[Correction]:
    """By name: the batch's own under its name, and all of a project under the project's."""
    if corrections is None:
        named = [Correction(name=name) for name in CORRECTIONS]
        every = named if own in named else [own, *named]
        return [each for each in every if not each.calibrate_clip_every]
    chosen = []
    for each in corrections:
        if not isinstance(each, str):
            chosen.append(each)
        elif each == own.name:
            chosen.append(own)
        elif of_project := [name for name in CORRECTIONS if name.startswith(f"{each}/")]:
            chosen += [Correction(name=name) for name in of_project]
        else:
            chosen.append(Correction(name=each))
    for each in chosen:
        if each.calibrate_clip_every:
            raise ValueError(
                f"{each.name} moves its clip over the steps of a run, so one batch can't show it: leave it out, or "
                "compose a custom one without calibrate_clip_every"
            )
    return chosen


def _cells(
    batch: Batch, recipe: str, g_BR: Tensor, trained: "_Trained", corrections: Sequence[Correction], reference: Tensor
) -> list[Cell]:
    mask_BR, p_BR = batch.rollouts.mask_BR, trained.p_BR
    apart = mismatch(g_BR, p_BR, mask_BR)
    done: dict[bytes, tuple[float, float]] = {}  # cotangent -> (norm, cosine)
    cells = []
    for each in corrections:
        weights, cotangent_BR = _cotangent(batch, g_BR, p_BR, each)
        key = cotangent_BR.numpy().tobytes()
        if key not in done:
            gradient = trained.gradient(cotangent_BR)
            done[key] = float(gradient.double().norm()), _cosine(gradient, reference)
        statistics = weight_statistics(weights, mask_BR)
        valid = weights.valid
        cells.append(
            Cell(
                recipe=recipe, correction=_label(each),
                tmpe=apart["token_mult_prob_error"], gen_kl=apart["gen_kl_error"],
                mean_weight=statistics["mean_applied"], max_weight=statistics["max_applied"], ess=statistics["ess"],
                clipped=_share(weights.clipped, valid), rejected=_share(~weights.keep, valid),
                kept_sequences=int(weights.keep.any(-1).sum()),
                grad_norm=done[key][0], cosine=done[key][1],
            )
        )  # fmt: skip
    return cells


def _label(correction: Correction) -> str:
    """The name, with its bounds if they aren't the usual ones."""
    usual = correction.name in CORRECTIONS and correction == Correction(name=correction.name)
    return correction.name if usual else correction.short_str()


def _cosine(a: Tensor, b: Tensor) -> float:
    """In FP64: FP32 sums over all parameters are off in the fifth digit."""
    a, b = a.double(), b.double()
    return float(a @ b / (a.norm() * b.norm()))


def _listed(names: list[str]) -> str:
    more = len(names) - LISTED
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:LISTED])} and {more} more"


def _short(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _share(tokens_BR: Tensor, valid_BR: Tensor) -> float:
    return float((tokens_BR & valid_BR).sum() / valid_BR.sum())


def _cotangent(batch: Batch, g_BR: Tensor, p_BR: Tensor, correction: Correction) -> tuple[Weights, Tensor]:
    """The correction's weights, and dL/dc [B, R] of one update on the whole batch, at c = p."""
    rollouts, settings = batch.rollouts, batch.experiment.grpo.override({"kl_coef": 0.0})
    weights = correction_from(correction)(g_BR, p_BR, rollouts.mask_BR, batch.advantages_B)
    mask_BR = rollouts.mask_BR & weights.valid
    counting_BR = mask_BR & weights.counting
    dropped = correction.denominator == "drop"
    current_BR = p_BR.clone().requires_grad_()
    terms = grpo_loss(
        current_BR, g_BR, p_BR, batch.advantages_B, weights, mask_BR, settings=settings, correction=correction,
        num_tokens=int(counting_BR.sum()),
        num_sequences=int(counting_BR.any(-1).sum()) if dropped else len(rollouts),
    )  # fmt: skip
    (cotangent_BR,) = torch.autograd.grad(terms.loss, current_BR)
    return weights, cotangent_BR


class _Trained:
    """The trainer of a recipe on the batch: p, and the graph behind c that gradients go back through."""

    def __init__(self, batch: Batch, recipe: Recipe, pulled: bool) -> None:
        """`pulled`: sequences without advantage have a gradient too."""
        self.recipe = recipe
        experiment = batch.experiment.override({"recipe": recipe, "grpo.kl_coef": 0.0, "faults": ()})
        faults = Faults(batch.experiment.faults)  # a trainer that is broken on purpose stays so
        self.trainer = LocalTrainer(batch.policy, faults.trainer(experiment))
        rollouts = for_scoring(batch.rollouts, recipe)  # at c = p an r2 replay changes nothing
        self.parameters = [each for each in self.trainer.model.parameters() if each.requires_grad]
        carrying, idle = batch.micro_batches()
        if pulled:
            carrying, idle = [*carrying, *idle], []
        self.p_BR, _ = self.trainer.logprobs(rollouts, idle)
        self.graphs = []
        for rows in carrying:
            current_bR = self.trainer.current_logprobs(rollouts, rows)
            self.p_BR[rows] = current_bR.detach()
            self.graphs.append((rows, current_bR))

    def gradient(self, cotangent_BR: Tensor) -> Tensor:
        """All that is trained in one FP32 vector; as in training, micro-batches in BF16, their sum in FP32."""
        total = torch.zeros(sum(parameter.numel() for parameter in self.parameters))
        for rows, current_bR in self.graphs:
            grads = torch.autograd.grad(
                current_bR, self.parameters, cotangent_BR[rows], retain_graph=True, materialize_grads=True
            )
            total += torch.cat([grad.flatten() for grad in grads])
        return total


def _sampled(batch: Batch, recipe: Recipe, trained: _Trained) -> Tensor:
    """g' [B, R]."""
    if _rollout_side(recipe) == _rollout_side(batch.experiment.recipe):
        return batch.rollouts.logprobs_BR
    engine = LocalEngine(batch.policy.config, recipe, lora=batch.experiment.lora)
    engine.refit(batch.engine_weights, _scales_for(batch, recipe, trained), batch.rollouts.weight_version)
    return engine.score(batch.rollouts, batch.experiment.sampling)


def _scales_for(batch: Batch, recipe: Recipe, trained: _Trained) -> KVScales | None:
    policy, own = recipe.recalibration.policy, batch.experiment.recipe
    if not recipe.rollout.kv_cache or policy == "engine":
        return None
    if policy == "unit":
        return KVScales.unit(batch.policy.config.num_layers, batch.version)
    made_alike = recipe.recalibration == own.recalibration and recipe.scaling.kv_format == own.scaling.kv_format
    if batch.scales is not None and made_alike:
        return batch.scales
    carrying, idle = batch.micro_batches()
    trained.trainer.switch(batch.experiment.override({"recipe": recipe, "grpo.kl_coef": 0.0, "faults": ()}))
    return trained.trainer.calibrate(batch.rollouts, [*carrying, *idle], batch.version)


def _rollout_side(recipe: Recipe) -> Recipe:
    """What decides g."""
    if not any(switch for _, switch in recipe.rollout):
        return Recipe(router=_own_choice(recipe))
    neutral = {"name": "custom", "train": Train(), "correction": Correction(), "router": _own_choice(recipe)}
    return Recipe(**{**dict(recipe), **neutral})


def _train_side(recipe: Recipe) -> Recipe:
    """What decides p and the gradient."""
    if not any(switch for _, switch in recipe.train):
        return Recipe(router=recipe.router)
    scaling = recipe.scaling.override({"kv_format": Scaling().kv_format})
    return Recipe(train=recipe.train, scaling=scaling, keep_bf16=recipe.keep_bf16, router=recipe.router)


def _own_choice(recipe: Recipe) -> Router:
    """Replay is the trainer's business."""
    return Router(dtype=recipe.router.dtype)
