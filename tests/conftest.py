"""Tests compute as workers do: kernels whose bits don't depend on the batch, threads that sleep while they wait."""

import os

from labkit.runs.process import KERNEL_ENVIRONMENT

for _name, _value in KERNEL_ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
