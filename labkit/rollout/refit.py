"""Refit the engine and prove it: what the engine holds afterwards is read back and compared.

Silent refit failures are common and expensive: calibrated scales that never arrive and default to 1.0, experts
that load with an identity scale, weights one version behind. So after every refit

* the weight version and the whole set of Q/K/V scales must equal what was sent;
* every BF16 weight must equal the trainer's, bit for bit;
* every FP8 weight must dequantise to within half a unit in the last place of the trainer's BF16 weight:
      |w - dequant(q)| <= max(|w| * 2^-(m+1), s * 2^(emin - m - 1)) ,   m mantissa bits, s the block's scale.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from labkit.fp8 import FORMATS, KVScales, Quantized
from labkit.rollout.engine import Engine


class RefitError(RuntimeError):
    """The engine does not hold what the trainer sent."""


def verify(engine: Engine, weights: Mapping[str, Tensor], kv_scales: KVScales | None, version: int) -> None:
    state = engine.state()
    if state.weight_version != version:
        raise RefitError(f"the engine says weight version {state.weight_version}, the trainer sent {version}")
    if state.kv_scales != kv_scales:
        raise RefitError(f"the engine holds scales {state.kv_scales}, the trainer sent {kv_scales}")
    for name, held in engine.read_back():
        sent = weights.get(name, weights["model.embed_tokens.weight"])
        if isinstance(held, Quantized):
            _check_quantised(name, held, sent)
        elif not torch.equal(held, sent):
            raise RefitError(f"{name} in the engine differs from the trainer's BF16 copy")


def _check_quantised(name: str, held: Quantized, sent: Tensor) -> None:
    fmt = FORMATS[held.fmt]
    error = (held.dequantize() - sent.float()).abs()
    half_ulp = torch.maximum(
        sent.float().abs() * 2.0 ** -(fmt.mantissa_bits + 1),
        held.element_scales() * 2.0 ** (fmt.min_exponent - fmt.mantissa_bits - 1),
    )
    # An FP32 scale is itself rounded, which can move a tie by a few FP32 roundings.
    if bool((error > half_ulp * (1 + 2.0**-20)).any()):
        worst = int((error / half_ulp.clamp(min=1e-38)).argmax())
        raise RefitError(
            f"{name} in the engine is not the trainer's weight quantised: element {worst} is off by "
            f"{error.flatten()[worst]:.3g}, half a unit in the last place is {half_ulp.flatten()[worst]:.3g}"
        )
