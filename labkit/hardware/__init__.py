"""What a recipe would do on real FP8 hardware: modelled seconds and tokens/s of one GRPO step. Imports no torch."""

from labkit.hardware.cost import PUBLISHED, Modelled, Workload, modelled
from labkit.hardware.devices import DEVICES, Device
from labkit.hardware.shapes import SHAPES, Shape

__all__ = ["DEVICES", "PUBLISHED", "SHAPES", "Device", "Modelled", "Shape", "Workload", "modelled"]
