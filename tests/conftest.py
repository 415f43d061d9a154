"""Tests compute as workers do: kernels whose bits don't depend on the batch, threads that sleep while they wait."""

import os

from labkit.runs.process import BATCH_INVARIANT_KERNELS, SLEEPING_THREADS

for _name, _value in {**SLEEPING_THREADS, **BATCH_INVARIANT_KERNELS}.items():
    os.environ.setdefault(_name, _value)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
