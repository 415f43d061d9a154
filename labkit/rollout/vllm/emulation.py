"""FP8 linears inside vLLM by labkit's own quantiser, for machines on which vLLM has no kernel for the Recipe.

    y = Q(x) Q(w_i)^T        for each projection i that vLLM has fused: q, k, v; gate, up; o; down

vLLM loads BF16 shards with its own loaders, into one tensor for each fused layer. When a layer is complete, every
projection in it is quantised on its own: tiles that ran across two projections would not be the trainer's. Activations
are quantised in every call. Operands are held dequantised, as `labkit.fp8` does, so the layer multiplies with the very
values that the trainer's quantiser gives: true W8A8, at the speed of emulation.

vLLM's CPU kernels know FP8 as well, with AMX, but keep activations in BF16 (W8A16): another recipe than the one asked
for. This is a plugin of vLLM's public kind (`register_quantization_config`), found through the entry point, so that
vLLM's own processes have it too.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.models.utils import extract_layer_index

from labkit.fp8 import LinearFormat, fake_quantize


@register_quantization_config("labkit")
class LabkitConfig(QuantizationConfig):
    def __init__(self, precision: LinearFormat, layers: frozenset[int]) -> None:
        super().__init__()
        self.precision, self.layers = precision, layers

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LabkitConfig":
        precision = LinearFormat(
            fprop=True,
            fmt=config["format"],
            granularity=config["granularity"],
            scale=config["scale"],
            formula=config["formula"],
        )
        return cls(precision, frozenset(config["layers"]))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if not isinstance(layer, LinearBase):
            return None  # attention, embedding and lm_head: vLLM's own
        covered = extract_layer_index(prefix) in self.layers
        return EmulatedLinear(self.precision) if covered else UnquantizedLinearMethod()

    def get_name(self) -> Any:
        return "labkit"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []


class EmulatedLinear(UnquantizedLinearMethod):
    """Loads as vLLM's BF16 linear does; then `layer.weight` becomes what it multiplies with."""

    def __init__(self, precision: LinearFormat) -> None:
        super().__init__()
        self.precision = precision

    def create_weights(
        self, layer: Any, input_size_per_partition: int, output_partition_sizes: list[int], *args: Any, **kw: Any
    ) -> None:
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, *args, **kw)
        layer.logical_widths = output_partition_sizes

    def process_weights_after_loading(self, layer: Any) -> None:
        parts = layer.weight.data.split(layer.logical_widths)
        operand = torch.cat([self.precision.weight_operand(part) for part in parts])
        layer.weight = nn.Parameter(operand, requires_grad=False)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        p, operand = self.precision, layer.weight
        tile = p.tiles(1, operand.shape[1], operand.shape[0]).x
        x_q = fake_quantize(x, p.fmt, tile, p.scale, p.formula)
        return F.linear(x_q, operand, None if bias is None else bias.to(x_q.dtype)).to(x.dtype)


def register() -> None:
    """The entry point: importing this module is what registers the method, and it counts once."""
