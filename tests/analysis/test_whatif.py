"""Every cell of the what-if table is what a run with that recipe and correction would compute on these tokens."""

import dataclasses
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from labkit.analysis import Batch, WhatIf, attribute, whatif
from labkit.analysis.batch import _next_batch as batch_of_loop
from labkit.config import CORRECTIONS, RECIPES, ConfigError, Correction
from labkit.rl.loop import Loop
from labkit.runs.record import StepRecord

from .conftest import small

BatchOf = Callable[[str], Batch]


def text(result: WhatIf) -> str:
    screen = io.StringIO()
    Console(width=200, file=screen).print(result.table())
    return screen.getvalue()


@pytest.mark.parametrize("recipe", ["fp8-rollout-tis", "fp8-rollout-kv", "fp8-e2e", "fp8-rollout-icepop"])
def test_the_own_recipe_gives_the_metrics_and_the_gradient_of_the_runs_own_step(recipe: str, batch_of: BatchOf) -> None:
    stream = Loop(small(recipe)).steps()
    next(stream)
    metrics = next(stream).metrics
    batch = batch_of(recipe)
    (cell,) = whatif(batch, corrections=[batch.experiment.recipe.correction]).rows
    assert cell.tmpe == metrics["token_mult_prob_error"]
    assert cell.gen_kl == metrics["gen_kl_error"]
    assert (cell.mean_weight, cell.max_weight, cell.ess) == tuple(
        metrics[name] for name in ("mean_applied", "max_applied", "ess")
    )
    assert 1 - cell.rejected == pytest.approx(metrics["kept_share"])
    assert cell.grad_norm == pytest.approx(metrics["grad_norm"], rel=1e-4)


def test_recipes_that_treat_both_sides_alike_agree_on_any_tokens(batch_of: BatchOf) -> None:
    result = whatif(batch_of("fp8-rollout"), ["bf16", "fp8-rollout", "fp8-e2e", "fp8-rollout-kv"], ["none"])
    by_recipe = {cell.recipe: cell for cell in result.rows}
    assert by_recipe["bf16"].tmpe == by_recipe["fp8-e2e"].tmpe == 1.0
    assert 1.0 < by_recipe["fp8-rollout"].tmpe < 1.1
    assert by_recipe["fp8-rollout-kv"].gen_kl != by_recipe["fp8-rollout"].gen_kl > 0
    assert by_recipe["bf16"].cosine == pytest.approx(1.0, abs=1e-9)
    assert by_recipe["bf16"].grad_norm == by_recipe["fp8-rollout"].grad_norm  # no weight, so g plays no part
    assert 0.95 < by_recipe["fp8-e2e"].cosine < 1.0  # its gradient is computed in FP8
    assert result.drawn_by == "fp8-rollout"


def test_recorded_g_is_used_where_the_rollout_side_is_the_batchs_own(batch_of: BatchOf) -> None:
    """Were it scored anew, a g that was tampered with would not be noticed."""
    batch = batch_of("fp8-rollout")
    shifted = dataclasses.replace(batch.rollouts, logprobs_BR=batch.p_BR - math.log(2))
    tampered = dataclasses.replace(batch, rollouts=shifted)
    own, other = whatif(tampered, ["fp8-rollout-tis", "bf16"], ["none"]).rows
    assert own.tmpe == pytest.approx(2.0, rel=1e-5)
    assert other.tmpe == 1.0


def planted(batch: Batch) -> tuple[Batch, float]:
    """r = 4 on every third token and 1 on the others; the share of the former."""
    mask_BR = batch.rollouts.mask_BR
    off_BR = mask_BR & (torch.arange(mask_BR.shape[1]) % 3 == 0)
    g_BR = torch.where(off_BR, batch.p_BR - math.log(4), batch.p_BR)
    rollouts = dataclasses.replace(batch.rollouts, logprobs_BR=g_BR)
    return dataclasses.replace(batch, rollouts=rollouts), float(off_BR.sum() / mask_BR.sum())


def test_weights_clips_and_rejections_of_a_planted_mismatch(batch_of: BatchOf) -> None:
    batch, share = planted(batch_of("bf16"))
    icepop = Correction(name="icepop", low=0.5, high=3.0)
    none, tis, window, nothing = whatif(
        batch, corrections=["none", "tis", icepop, Correction(name="sequence-mask", low=1.0, high=1.0)]
    ).rows
    assert none.tmpe == pytest.approx(1 + 3 * share, rel=1e-5)
    assert (none.mean_weight, none.clipped, none.rejected) == (1.0, 0.0, 0.0)
    assert tis.max_weight == 2.0
    assert tis.mean_weight == pytest.approx(1 + share, rel=1e-5)
    assert tis.clipped == pytest.approx(share)
    assert tis.rejected == 0.0
    assert window.rejected == pytest.approx(share)
    assert window.kept_sequences == int((batch.rollouts.lengths_B > 1).sum())
    assert window.grad_norm < none.grad_norm < tis.grad_norm or window.cosine < 1  # other tokens, other gradient
    assert nothing.rejected == 1.0
    assert nothing.kept_sequences == 0
    assert nothing.grad_norm == 0.0
    assert math.isnan(nothing.cosine)


def test_the_gradient_is_linear_in_the_weights(batch_of: BatchOf) -> None:
    """With r = 4 on all tokens importance sampling weighs all by 4 and TIS by its cap."""
    batch = batch_of("bf16")
    shifted = dataclasses.replace(batch.rollouts, logprobs_BR=batch.p_BR - math.log(4))
    none, unbounded, tis = whatif(
        dataclasses.replace(batch, rollouts=shifted), corrections=["none", "importance-sampling", "tis"]
    ).rows
    assert unbounded.grad_norm == pytest.approx(4 * none.grad_norm, rel=1e-2)  # BF16 gradients
    assert tis.grad_norm == pytest.approx(2 * none.grad_norm, rel=1e-2)
    assert tis.clipped == 1.0


def test_all_corrections_but_those_that_follow_a_run_are_compared(batch_of: BatchOf) -> None:
    result = whatif(batch_of("fp8-rollout"))
    expected = [name for name, known in CORRECTIONS.items() if not known.composition.calibrate_clip_every]
    assert [cell.correction for cell in result.rows] == expected
    assert len(expected) > 50
    by_name = {cell.correction: cell for cell in result.rows}
    assert by_name["bypass"].grad_norm == pytest.approx(by_name["importance-sampling"].grad_norm, rel=1e-3)
    assert by_name["nemo-rl/tis"].grad_norm == by_name["tis"].grad_norm
    drawn = text(result)
    assert "and " in drawn
    assert f"drawn by {RECIPES['fp8-rollout'].name}" in drawn
    lines = [line for line in drawn.splitlines() if line.startswith("│") and "%" in line]
    assert len(lines) < len(expected) / 2  # those that act alike share one


def test_the_batch_is_left_as_it_was(batch_of: BatchOf) -> None:
    batch = batch_of("fp8-e2e")
    before = {name: tensor.clone() for name, tensor in batch.weights.items()}
    p_BR = batch.p_BR.clone()
    first = whatif(batch, corrections=["none", "tis"])
    second = whatif(batch, corrections=["none", "tis"])
    assert first.rows == second.rows
    assert torch.equal(batch.p_BR, p_BR)
    assert all(torch.equal(tensor, before[name]) for name, tensor in batch.weights.items())


def test_mistakes_are_named(batch_of: BatchOf) -> None:
    batch = batch_of("bf16")
    with pytest.raises(ConfigError, match="did you mean fp8-e2e"):
        whatif(batch, recipes=["fp8-e2"])
    with pytest.raises(ConfigError, match="no correction 'tsi'"):
        whatif(batch, corrections=["tsi"])
    with pytest.raises(ValueError, match="one batch can't show it: leave it out"):
        whatif(batch, corrections=["calibrated-clip"])


def test_scales_are_calibrated_as_the_recipe_says(batch_of: BatchOf) -> None:
    kv = RECIPES["fp8-rollout-kv"]
    tight, roomy = kv.override({"recalibration.margin": 0.3}), kv.override({"recalibration.margin": 2.0})
    first, second = whatif(batch_of("fp8-rollout-kv"), [tight, roomy], ["none"]).rows
    assert first.gen_kl > 10 * second.gen_kl, "a margin of 0.3 clips"


def test_a_batch_that_vllm_drew_is_said_to_meet_other_kernels(batch_of: BatchOf) -> None:
    batch = batch_of("bf16")
    drawn_by_vllm = dataclasses.replace(batch, experiment=batch.experiment.override({"engine": "vllm"}))
    assert "not vLLM's" in whatif(drawn_by_vllm, corrections=["none"]).left_out
    assert "vLLM" not in whatif(batch, corrections=["none"]).left_out
    assert any("the engine's kernels" in note for note in attribute(drawn_by_vllm).notes)


def test_adapters_are_part_of_what_a_batch_is_computed_again_with(tmp_path: Path) -> None:
    def after_a_step() -> tuple[Loop, Iterator[StepRecord]]:
        loop = Loop(small("fp8-rollout", **{"lora.rank": 8, "grpo.lr": 1e-2, "grpo.warmup_steps": 0}))
        stream = loop.steps()
        next(stream), next(stream)
        return loop, stream

    metrics = next(after_a_step()[1]).metrics
    batch_of_loop(after_a_step()[0]).save(tmp_path / "batch.safetensors")
    batch = Batch.load(tmp_path / "batch.safetensors")
    (own, alike) = whatif(batch, ["fp8-rollout", "fp8-frozen-base"], ["none"]).rows
    assert own.tmpe == metrics["token_mult_prob_error"] > 1
    assert own.grad_norm == pytest.approx(metrics["grad_norm"], rel=1e-4)
    assert alike.tmpe == 1.0
    found = attribute(batch, "bf16")
    assert found.together == found.recorded
    with pytest.raises(ConfigError, match=r"recipe\.train\.wgrad: the base is frozen"):
        whatif(batch, ["fp8-e2e"], ["none"])


def test_corrections_and_rules_of_ones_own_take_part(batch_of: BatchOf, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def token(delta, mask): return delta.exp()\ndef half(amax, fp8_max): return amax / fp8_max / 2\n")
    batch = batch_of("fp8-rollout-tis")
    coarse = batch.experiment.recipe.override({"scaling.formula": f"{mine}:half", "name": "coarse"})
    result = whatif(batch, [batch.experiment.recipe, coarse], ["importance-sampling", f"{mine}:token"])
    theirs, own, *clipped = result.rows
    assert own.correction == "mine.py:token"
    assert own.numbers() == theirs.numbers()
    assert clipped[0].tmpe - 1 > 3 * (theirs.tmpe - 1)  # half of the range is cut off
    mine.write_text("def token(delta, mask): return 0 * delta\n")  # another look after an edit
    assert whatif(batch, corrections=[f"{mine}:token"]).rows[0].max_weight == 0
