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
