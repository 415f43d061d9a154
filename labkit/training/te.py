"""The trainer whose linears are Transformer Engine's, on a GPU; all else is the embedded trainer's.

Each linear layer of the decoder becomes a `TELinear`, which keeps the layer's parameters and with them their Hugging
Face names (Transformer Engine's own `_extra_state` is no part of the model). In FP8 it calls `te.Linear` inside
`te.autocast` with the recipe of `labkit.training.te_plan`; a layer that the Recipe keeps in BF16, and every layer of
the shadow forward, computes `F.linear`.

    x [..., K] --> tokens padded with zeros to a multiple of 16 (32 for mx) --> te.Linear --> [..., N]

The FP8 weight is kept over the micro-batches of an update, as long as the weight itself doesn't change. Two traps of
Transformer Engine 2.20 are avoided: a module keeps its quantisers when only the scales of a recipe change, so
another recipe gets another `te.Linear`; and a weight that was quantised without autograd has no transpose for dgrad, so
nothing is kept from such a forward.

This is the only file that imports transformer_engine, and it does so late: the scales are chosen by environment
variables that are read at import.
"""

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.fp8 import Float8Linear
from labkit.fp8.linear import WeightState
from labkit.fp8.scaled_mm import Choice, Choices
from labkit.models.decoder import Decoder
from labkit.models.policy import Policy
from labkit.training.local import LocalTrainer
from labkit.training.te_plan import RecipePlan, recipe_plan


def available(plan: RecipePlan | None) -> tuple[bool, str]:
    """Whether Transformer Engine works here, and has kernels for the plan on this GPU; else why not."""
    try:
        te = _pytorch(plan)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # the ways in which its libraries are missing
        what = (str(error).splitlines() or [type(error).__name__])[0]
        return False, f"Transformer Engine can't be imported ({what}): run labkit gpu-setup"
    if plan is None:
        return True, ""
    if plan.kind == "Float8BlockScaling" and torch.cuda.get_device_capability() >= (10, 0):
        return False, "only Hopper has block scaling: set recipe.scaling.granularity to mx or tensor"
    probe = {
        "Float8BlockScaling": "is_fp8_block_scaling_available",
        "Float8CurrentScaling": "is_fp8_available",
        "MXFP8BlockScaling": "is_mxfp8_available",
    }[plan.kind]
    there, why = getattr(te, probe)(return_reason=True)
    return there, why


def te_recipe(plan: RecipePlan) -> Any:
    """Transformer Engine's recipe object; raises RuntimeError if it isn't what the plan says."""
    _prepare(plan)
    from transformer_engine.common import recipe as recipes

    made = getattr(recipes, plan.kind)(
        fp8_format=recipes.Format[plan.fp8_format], backward_override=plan.backward_override
    )
    if plan.kind != "MXFP8BlockScaling":
        scale = recipes.QParams(power_2_scale=plan.power_2_scale)
        made.fp8_quant_fwd_inp = made.fp8_quant_fwd_weight = made.fp8_quant_bwd_grad = scale
        # by these two, which are fields, Transformer Engine tells one recipe from another
        if plan.kind == "Float8BlockScaling":
            made.use_f32_scales = not plan.power_2_scale
        else:
            made.use_power_2_scales = plan.power_2_scale
    if (found := _read_back(made)) != (wanted := _wanted(plan)):
        raise RuntimeError(f"Transformer Engine made the recipe {found} where {wanted} was asked for")
    return made


def _wanted(plan: RecipePlan) -> dict[str, Any]:
    return {
        "kind": plan.kind,
        "format": plan.fp8_format,
        "backward_override": plan.backward_override,
        "power_2_scale": {plan.power_2_scale},
    }


def _read_back(made: Any) -> dict[str, Any]:
    names = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
    scales = {getattr(made, name).power_2_scale if hasattr(made, name) else True for name in names}  # mx: always
    return {
        "kind": type(made).__name__,
        "format": made.fp8_format.name,
        "backward_override": made.backward_override,
        "power_2_scale": scales,
    }


def _prepare(plan: RecipePlan | None) -> None:
    if plan and "transformer_engine" not in sys.modules:
        os.environ.update(plan.environment)


def _pytorch(plan: RecipePlan | None) -> Any:
    _prepare(plan)
    import transformer_engine.pytorch as te

    return te


@dataclass
class _Held:
    """What a layer computes with."""

    plan: RecipePlan
    linear: Any  # te.Linear
    recipe: Any
    checked: bool = False


class TELinear(Float8Linear):
    """A linear layer that computes with Transformer Engine where it is FP8, with the parameters of another layer."""

    def __init__(self, layer: Float8Linear, plan: RecipePlan | None) -> None:
        with torch.device("meta"):  # parameters of its own would be thrown away at once
            super().__init__(layer.in_features, layer.out_features, layer.bias is not None, layer.precision)
        self.weight, self.bias = layer.weight, layer.bias
        self.plan = plan
        self._held: _Held | None = None
        self._quantised: WeightState | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.precision.inactive or self.plan is None:
            return F.linear(x, self.weight, self.bias)
        held = self._current(self.plan)
        x_TK = x.reshape(-1, self.in_features)
        padded = F.pad(x_TK, (0, 0, 0, -len(x_TK) % held.plan.alignment))
        first = None
        if torch.is_grad_enabled() and self.weight.requires_grad:
            first = self._quantised is None or not self._quantised.matches(self.weight)
            self._quantised = WeightState.of(self.weight)
        with _pytorch(held.plan).autocast(enabled=True, recipe=held.recipe):
            y = held.linear(padded, is_first_microbatch=first)
        if not held.checked:
            self._check_scales(held)
        return y[: len(x_TK)].view(*x.shape[:-1], self.out_features)

    def kernels(self) -> Choices:
        p = self.precision
        kernel = Choice(kernel=f"Transformer Engine {self.plan.short_str()}" if self.plan else "")
        fprop, dgrad, wgrad = (kernel if on else Choice() for on in (p.fprop, p.dgrad, p.wgrad))
        return Choices(fprop, dgrad, wgrad)

    def _current(self, plan: RecipePlan) -> _Held:
        if self._held is None or self._held.plan != plan:
            linear = _pytorch(plan).Linear(
                self.in_features, self.out_features, bias=self.bias is not None,
                params_dtype=self.weight.dtype, device=self.weight.device,
            )  # fmt: skip
            linear.weight = self.weight
            if self.bias is not None:
                linear.bias = self.bias
            self._held, self._quantised = _Held(plan, linear, te_recipe(plan)), None
        return self._held

    def _check_scales(self, held: _Held) -> None:
        """The quantisers themselves, which exist after the first forward; those of mx have no choice."""
        quantizers = [q for of_pass in held.linear.quantizers.values() for q in of_pass]
        found = {q.force_pow_2_scales for q in quantizers if hasattr(q, "force_pow_2_scales")}
        if found - {held.plan.power_2_scale}:
            raise RuntimeError(f"Transformer Engine doesn't scale as asked for ({held.plan.short_str()})")
        held.checked = True


class TETrainer(LocalTrainer):
    """Raises ValueError, with the way out, where Transformer Engine or its kernels aren't there."""

    def _build(self, policy: Policy) -> Decoder:
        model = super()._build(policy)
        layers = [(path, module) for path, module in model.named_modules() if isinstance(module, Float8Linear)]
        for path, layer in layers:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, TELinear(layer, recipe_plan(self.experiment.recipe)))
        return model

    def _set_precision(self, model: Decoder) -> None:
        plan = recipe_plan(self.experiment.recipe)
        there, why = available(plan)
        if not there:
            raise ValueError(f"trainer: not available here: {why}; or set trainer to local")
        super()._set_precision(model)
        for _, name, linear in model.linears():
            size = linear.out_features, linear.in_features
            if plan and not linear.precision.inactive and any(n % plan.alignment for n in size):
                raise ValueError(
                    f"trainer: {name} is {size[0]} x {size[1]}, and Transformer Engine wants multiples of "
                    f"{plan.alignment} for {plan.kind}; set trainer to local"
                )
            if isinstance(linear, TELinear):
                linear.plan = plan
