import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from labkit.config import ConfigError, Experiment, preset
from labkit.sweeps.plan import CHECKPOINT_EVERY, Plan, content

FILE = """
question: Does importance sampling repair FP8 rollouts?
preset: bf16
experiment:
  steps: 40
  grpo.lr: 1e-4
arms:
  bf16:
  rollout: {preset: fp8-rollout}
  repaired: {preset: fp8-rollout, recipe.correction: tis}
seeds: 2
baseline: bf16
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "repair.yaml"
    path.write_text(FILE)
    return path


def test_a_file_gives_arms_crossed_with_seeds_seed_by_seed(file: Path) -> None:
    plan = Plan.from_file(file)
    assert (plan.name, plan.baseline, plan.seeds) == ("repair", "bf16", (0, 1))
    cells = plan.cells()
    assert [cell.id for cell in cells] == [f"{arm}-s{s}" for s in (0, 1) for arm in ("bf16", "rollout", "repaired")]
    repaired = cells[5].experiment
    assert (repaired.seed, repaired.steps, repaired.grpo.lr, repaired.name) == (1, 40, 1e-4, "repaired-s1")
    assert repaired.recipe.rollout.linears
    assert repaired.recipe.correction.name == "tis"
    assert all((cell.experiment.threads, cell.experiment.checkpoint_every) == (1, CHECKPOINT_EVERY) for cell in cells)


def test_what_was_written_is_read_again_as_the_same_plan(file: Path, tmp_path: Path) -> None:
    plan = Plan.from_file(file)
    (tmp_path / "sweep.yaml").write_text(plan.to_yaml())
    assert Plan.from_file(tmp_path / "sweep.yaml") == plan


def test_axes_are_crossed_and_named_by_what_tells_them_apart() -> None:
    axes = {"preset": ["bf16", "fp8-rollout"], "grpo.lr": [1e-4, 2e-4]}
    plan = Plan(experiment=preset("bf16"), axes=axes, seeds=[7])
    assert [cell.arm for cell in plan.cells()] == [
        *("bf16 lr=0.0001", "bf16 lr=0.0002", "fp8-rollout lr=0.0001", "fp8-rollout lr=0.0002"),
    ]
    assert plan.cells()[3].id == "fp8-rollout-lr-0.0002-s7"
    assert plan.baseline == "bf16 lr=0.0001"
    crossed = Plan(experiment=preset("bf16"), arms={"a": {}, "b": {"steps": 30}}, axes={"grpo.lr": [1e-4, 2e-4]})
    assert len(crossed.cells()) == 12


def test_threads_and_checkpoints_that_are_given_stay() -> None:
    cells = Plan(experiment=preset("bf16", threads=2, checkpoint_every=7), seeds=1).cells()
    assert (cells[0].experiment.threads, cells[0].experiment.checkpoint_every) == (2, 7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seedz": 3}, "seedz: no such setting; did you mean seeds"),
        ({"seeds": 0}, "seeds: none is given"),
        ({"seeds": [1, 1]}, "1 is given twice"),
        ({"baseline": "b", "arms": {"a": {}}}, "no arm 'b'"),
        ({"arms": {"a": {}, "b": {}}}, "a and b are the same experiment"),
        ({"arms": {"a": {"preset": "fp8-rollout"}, "b": {"recipe.rollout.linears": True}}}, "are the same experiment"),
        ({"arms": {"a": {"grpo.lrr": 3}}}, "arms.a: grpo.lrr: no such setting; did you mean grpo.lr"),
        ({"arms": {"a": {"preset": "fp9"}}}, "no preset 'fp9'"),
        ({"arms": {"a": {"seed": 3}}}, "seed: is set by the sweep itself; use seeds"),
        ({"arms": {"a b": {}, "a-b": {"steps": 30}}}, "would share the folder a-b-s0"),
        ({"arms": {"a": {"grpo.lr": 1e-4}}, "axes": {"grpo.lr": [2e-4]}}, "is an axis as well"),
        ({"axes": {"grpo.lr": [1e-4, 1e-4]}}, "is there twice"),
        ({"axes": {"grpo.lr": []}}, "has no values"),
        ({"axes": {"recipe.rollout.attention": [True]}}, "needs kv_cache"),
        ({"effect": 0}, "effect"),
    ],
)
def test_what_can_not_be_carried_out_is_refused_before_anything_starts(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan(experiment=preset("bf16"), **given)


def test_a_file_without_a_start_or_with_a_wrong_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("seeds: 2\n")
    with pytest.raises(ConfigError, match="give a preset or an experiment"):
        Plan.from_file(path)
    path.write_text("preset: bf16\nexperiment: {stepz: 4}\n")
    with pytest.raises(ConfigError, match=r"experiment\.stepz: no such setting; did you mean steps"):
        Plan.from_file(path)


def test_names_do_not_change_the_content_everything_else_does() -> None:
    experiment: Experiment = preset("fp8-e2e")
    assert content(experiment) == content(experiment.override({"name": "x", "recipe.name": "y"}))
    assert content(experiment) != content(experiment.override({"threads": 2}))
    assert content(experiment) != content(experiment.override({"recipe.correction.cap": 3}))
    said = [{"name": "any", "recipe": {"name": "any"}, "task": "arithmetic"}]  # no default, so later settings fit in
    assert content(Experiment()) == hashlib.sha256(json.dumps(said).encode()).hexdigest()
