"""Devices: what a GPU can do at most, from its vendor's data sheet.

    bf16, fp8    dense peak of the tensor cores, FLOP/s (data sheets that give it "with sparsity" are halved)
    bandwidth    of its memory, bytes/s
    memory       bytes; a memory sold as 80 GB holds 80 GiB (an H200, sold as 141 GB, reports 139 to 140 GiB)
    link         to other GPUs, one direction, bytes/s

A GPU with FP8 tensor cores does not have kernels for every way of scaling: `rollout` and `train` name the
granularities of `Recipe.scaling` that vLLM and Transformer Engine have natively for it.
"""

from dataclasses import dataclass

from labkit.config.errors import did_you_mean

GIB = 2**30


@dataclass(frozen=True)
class Device:
    label: str
    bf16: float
    fp8: float | None
    bandwidth: float
    memory: float
    link: float
    rollout: frozenset[str] = frozenset()
    train: frozenset[str] = frozenset()
    fp8_attention: bool = False  # both matmuls of attention on FP8 operands


_HOPPER = frozenset({"tensor", "row", "block"})
# Transformer Engine's block scaling is native on Hopper only; vLLM's block GEMM (DeepGEMM) runs on Blackwell as well.
_BLACKWELL = frozenset({"tensor", "row", "mx"})
_ADA = frozenset({"tensor"})

DEVICES = {
    # NVIDIA A100 80GB SXM data sheet; NeMo RL flops_tracker.py (312e12). Ampere has no FP8.
    "a100": Device("A100 SXM 80 GB", 312e12, None, 2.04e12, 80 * GIB, 300e9),
    # NVIDIA L4 data sheet: 242 and 485 TFLOP/s with sparsity, 300 GB/s, PCIe 4 x16.
    "l4": Device("L4", 121e12, 242e12, 0.3e12, 24 * GIB, 32e9, _ADA, _ADA),
    # verl flops_counter.py (362.05e12); L40S data sheet: 733 TFLOP/s FP8 dense, 864 GB/s, PCIe 4 x16.
    "l40s": Device("L40S", 362e12, 733e12, 0.864e12, 48 * GIB, 32e9, _ADA, _ADA),
    # NVIDIA H100 SXM data sheet, halved; NeMo RL flops_tracker.py (989e12). NVLink 900 GB/s both ways.
    "h100": Device("H100 SXM", 989e12, 1979e12, 3.35e12, 80 * GIB, 450e9, _HOPPER, _HOPPER, fp8_attention=True),
    # NVIDIA H200 SXM data sheet, halved; the same chip as H100 with more and faster memory.
    "h200": Device("H200 SXM", 989e12, 1979e12, 4.8e12, 140 * GIB, 450e9, _HOPPER, _HOPPER, fp8_attention=True),
    # NVIDIA HGX B200 data sheet, per GPU; NeMo RL flops_tracker.py (2250e12). NVLink 1800 GB/s both ways.
    "b200": Device(
        *("B200 HGX", 2250e12, 4500e12, 8.0e12, 180 * GIB, 900e9, _BLACKWELL | {"block"}, _BLACKWELL),
        fp8_attention=True,
    ),
}


def device_named(name: str) -> Device:
    if name not in DEVICES:
        raise ValueError(f"device: no {name!r}; {did_you_mean(name, DEVICES)}")
    return DEVICES[name]
