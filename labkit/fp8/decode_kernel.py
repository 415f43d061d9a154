"""Whether a decode step reads an FP8 key/value cache with the Triton kernel, or else why not."""

import importlib.util

from labkit.fp8.scaled_mm import Choice, Machine


def available() -> tuple[bool, str]:
    """Triton comes with torch's CUDA builds."""
    there = importlib.util.find_spec("triton") is not None
    return (True, "") if there else (False, "Triton is not installed: pip install triton")


def choose(where: Machine) -> Choice:
    """The kernel for decode steps on a machine; prefill and scoring, with many queries at once, have none."""
    if where.device != "cuda":
        return Choice(reason=f"no FP8 attention kernel on a {where.device}")
    if where.capability < (8, 9):
        return Choice(reason=f"compute capability {where.capability[0]}.{where.capability[1]} has no FP8")
    there, why = available()
    return Choice(kernel="Triton") if there else Choice(reason=why)
