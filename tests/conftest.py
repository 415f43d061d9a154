"""Tests compute as workers do: importing labkit before torch sees to threads and kernels."""

import os

import labkit  # noqa: F401

os.environ.setdefault("HF_HUB_OFFLINE", "1")
