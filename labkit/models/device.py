"""Where the tensors of an engine or a trainer are: what `Experiment.device` names, as torch takes it.

Rollouts and everything the loop computes stay on the CPU. An engine and a trainer move what they get to their device
and what they return back, so the rest needn't know where they compute.
"""

import torch


def torch_device(name: str) -> torch.device:
    """Raises ValueError, with the way out, where torch finds no such device."""
    if name == "cuda" and not torch.cuda.is_available():
        built = f"built with CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise ValueError(f"device: not available here: torch {torch.__version__}, {built}, finds no GPU; set it to cpu")
    return torch.device(name)
