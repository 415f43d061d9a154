"""What needs no Ray; whole sweeps over it are in tests/cluster/test_cells.py."""

import pytest

from labkit.config import preset
from labkit.hardware import packages
from labkit.runs.store import RunError
from labkit.sweeps.executor import at_once, executor_for

there, why = packages.ray()


def test_the_least_decides_and_is_named() -> None:
    bounds = {"4 cores": 4, "3 GiB free": 2}
    assert at_once(bounds, None).slots == 2
    assert at_once(bounds, None).why == "2 at once: 3 GiB free (4 cores)"
    assert at_once(bounds, 1).why == "1 at once: 1 asked for (4 cores; 3 GiB free)"


@pytest.mark.skipif(there, reason="Ray is installed")
def test_without_ray_the_way_out_is_named() -> None:
    with (
        pytest.raises(RunError, match="not available here: Ray is not installed: pip install"),
        executor_for(None, "local"),
    ):
        pass


@pytest.mark.skipif(not there, reason=why)
def test_a_cell_reserves_threads_memory_and_a_gpu_and_fits_as_often_as_the_scarcest_allows() -> None:
    from labkit.cluster.plan import Reservation
    from labkit.sweeps.over_ray import _fits, _largest, reservation

    cpu, gpu = preset("bf16", threads=2), preset("bf16", device="cuda")
    assert (reservation(cpu).cpus, reservation(cpu).gpus, reservation(gpu).gpus) == (2, 0, 1)
    assert reservation(cpu).memory > 1 << 30
    assert _largest([Reservation(2, 0, 5), Reservation(1, 1, 7)]) == Reservation(2, 1, 7)
    assert _fits(Reservation(2, 0, 10), {"CPU": 9.0, "memory": 35.0}) == 3
    assert _fits(Reservation(2, 1, 10), {"CPU": 9.0, "memory": 35.0}) == 0
    with pytest.raises(ValueError, match="would start a Ray inside Ray"):
        reservation(preset("bf16", **{"cluster.placement": "colocated"}))
