"""One Ray on this machine for all tests here, and actors of the kind that a run uses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from labkit.config import Experiment, preset
from labkit.hardware import packages
from labkit.runs.record import StepRecord

SMALL = {
    "steps": 5,
    "eval_every": 5,
    "eval_prompts": 8,
    "checkpoint_every": 2,
    "keep_rollouts": 2,
    "threads": 1,
    "sampling.max_new_tokens": 12,
    "grpo.prompts_per_step": 4,
    "grpo.group_size": 4,
    "grpo.lr": 1e-3,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    there, why = packages.ray()
    for item in items:
        if not there and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def small() -> Experiment:
    return preset("fp8-e2e-kv").override(SMALL)


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Of a Ray that has room for one trainer, one rollout actor and the test's own."""
    from labkit.cluster.actors import cluster
    from labkit.cluster.plan import Reservation

    with cluster("", [Reservation(4, 0)], 200 << 20):
        import ray

        yield ray.get_runtime_context().gcs_address


def comparable(record: StepRecord) -> dict[str, Any]:
    """Everything that is not a time."""
    timed = ("time", "elapsed", "timings", "samples", "metrics")
    content = {name: value for name, value in vars(record).items() if name not in timed}
    metrics = {name: value for name, value in record.metrics.items() if name != "generation_hidden"}
    return content | {"events": tuple(record.events), "metrics": metrics}
