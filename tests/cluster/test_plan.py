import pytest

from labkit.cluster import plan
from labkit.config import Experiment, preset


def experiment(**changes) -> Experiment:
    return preset("fp8-e2e").override(
        {f"cluster.{key}" if key == "placement" else key: v for key, v in changes.items()}
    )


def test_a_placement_names_its_actors_and_what_they_reserve() -> None:
    on_cpu, on_gpu = plan.Reservation(1, 0), plan.Reservation(2, 1)
    assert plan.actors(experiment(placement="colocated")) == {"trainer": on_cpu}
    assert plan.actors(experiment(placement="separate", device="cuda", threads=2)) == {
        "trainer": on_gpu,
        "rollout": on_gpu,
    }


@pytest.mark.parametrize(
    ("placement", "device", "planned"),
    [("separate", "cpu", False), ("colocated", "cuda", False), ("separate", "cuda", True)],
)
def test_only_between_gpus_would_another_way_be_faster(placement: str, device: str, planned: bool) -> None:
    found = plan.transfer(experiment(placement=placement, device=device))
    assert bool(found) == planned
    if found:
        assert found.ranks.keys() == plan.actors(experiment(placement=placement, device=device)).keys()
        assert str(found).startswith("nccl: not available here: ")
