import json
from pathlib import Path

import pytest

from labkit import demo
from labkit.config.presets import preset
from labkit.runs.process import Run
from labkit.runs.record import StepRecord
from labkit.runs.state import RunState
from labkit.runs.store import RunDirectory


def finished(root: Path, recipe: str, seed: int, heldout: float, tmpe: float) -> Run:
    """A finished run of one step, written by hand."""
    directory = RunDirectory.create(preset(recipe, seed=seed, steps=1, eval_prompts=100), root)
    state = "bf16" if recipe == "bf16" else "emulated"
    for step in (0, 1):
        metrics = {"heldout_accuracy": 0.3 if step == 0 else heldout}
        directory.append_record(
            StepRecord(
                step=step,
                weight_version=0,
                time=0.0,
                elapsed=0.0,
                metrics=metrics | ({"token_mult_prob_error": tmpe} if step else {}),
                timings={"generate": 1.0} if step else {},
                tokens={"prompt": 10, "generated": 20} if step else {},
                active={"rollout.linears": {"state": state, "detail": ""}},
                engine={},
            )
        )
    directory.write_state(RunState("done"))
    return Run(directory)


def three(root: Path, seed: int, *heldout: float) -> list[Run]:
    cells = zip(demo.RECIPES, heldout, (1.0, 1.004, 1.0), strict=True)
    return [finished(root, recipe, seed, accuracy, tmpe) for recipe, accuracy, tmpe in cells]


def test_arms_average_over_seeds(tmp_path: Path) -> None:
    runs = three(tmp_path, 0, 0.5, 0.5, 0.6) + three(tmp_path, 1, 0.7, 0.5, 0.6)
    bf16, rollout, _ = demo.arms(runs)
    assert bf16.mean(lambda s: s.heldout_end) == pytest.approx(0.6)
    assert bf16.spread(lambda s: s.heldout_end) == pytest.approx(0.1 * 2**0.5)
    assert rollout.spread(lambda s: s.heldout_end) == 0.0
    assert [column.header for column in demo.table(runs).columns] == ["", *demo.RECIPES]


def test_the_reading_is_an_honest_null_where_nothing_differs(tmp_path: Path) -> None:
    mismatch, accuracy, speed = demo.reading(three(tmp_path, 0, 0.50, 0.52, 0.49))
    assert "bf16 1 (exact), fp8-rollout 1.00400, fp8-e2e 1 (exact)" in mismatch
    assert "no difference" in accuracy
    assert "not a speed-up" in speed


def test_the_reading_does_not_call_a_large_gap_a_null(tmp_path: Path) -> None:
    accuracy = demo.reading(three(tmp_path, 0, 0.9, 0.3, 0.9))[1]
    assert "no difference" not in accuracy
    assert "run more" in accuracy


def test_the_numbers_are_valid_json(tmp_path: Path) -> None:
    demo.write_json(tmp_path / "x.json", three(tmp_path, 0, 0.5, 0.5, 0.5))
    content = json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail)
    assert content["arms"]["fp8-rollout"]["tmpe_excess"] == {"mean": pytest.approx(0.004), "std": 0.0}
    assert content["arms"]["bf16"]["ess"]["mean"] is None
    assert content["runs"][0]["heldout_accuracy"] == [0.3, 0.5]


def test_seeds_must_be_positive() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        demo.run_demo(seeds=0)


def test_the_demo_runs_three_recipes_side_by_side(tmp_path: Path) -> None:
    seen = []
    runs = demo.run_demo(steps=1, progress=lambda run, record: seen.append((run.id, record.step)), root=tmp_path)
    assert [run.experiment.recipe.name for run in runs] == list(demo.RECIPES)
    assert sorted(seen) == sorted((run.id, step) for run in runs for step in (0, 1))
    assert all(run.state == "done" for run in runs)
    bf16, rollout, both = (arm.mean(lambda s: s.tmpe_median) for arm in demo.arms(runs))
    assert bf16 == both == 1.0 < rollout
