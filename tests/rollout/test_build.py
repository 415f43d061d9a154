from pathlib import Path

import pytest

from labkit.config import preset
from labkit.models import load
from labkit.rollout import LocalEngine, build_engine
from labkit.training import build_trainer


def nothing() -> None:
    pass


def test_a_mixture_of_experts_stays_with_the_engine_and_trainer_that_know_it() -> None:
    policy = load("tiny-moe")
    assert isinstance(build_engine(policy, preset("bf16", "tiny-moe"), nothing), LocalEngine)
    with pytest.raises(ValueError, match="set engine to local for a mixture of experts"):
        build_engine(policy, preset("bf16", "tiny-moe", engine="vllm"), nothing)
    with pytest.raises(ValueError, match="set trainer to local for a mixture of experts"):
        build_trainer(policy, preset("bf16", "tiny-moe", trainer="te", device="cuda"), nothing)


OWN = """
from labkit.rollout import LocalEngine

class Tempered(LocalEngine):
    def __init__(self, policy, experiment, on_microstep):
        super().__init__(policy.config, experiment.recipe, policy.tokenizer.pad_id, on_microstep)

class Half:
    saturation = {}
    def __init__(self, policy, experiment, on_microstep):
        pass
    def generate(self, prompts, request, generator):
        pass
"""


def test_an_engine_of_ones_own_is_built_if_it_is_one(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    policy, experiment = load("tiny"), preset("fp8-rollout", engine=f"{tmp_path}/mine.py:Tempered")
    engine = build_engine(policy, experiment, nothing)
    assert isinstance(engine, LocalEngine)
    assert type(engine).__name__ == "Tempered"
    half = experiment.override({"engine": f"{tmp_path}/mine.py:Half"})
    with pytest.raises(ValueError, match=r"engine: mine.py:Half lacks active, close, codes_changed, keep_scales"):
        build_engine(policy, half, nothing)
