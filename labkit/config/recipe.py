"""Recipe: what is FP8 and how, what stays BF16, how experts are chosen, how Q/K/V scales are made, which correction."""

from contextlib import suppress
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from labkit.config import own
from labkit.config.correction import Correction
from labkit.config.errors import ConfigError, wrong
from labkit.config.own import Formula
from labkit.config.settings import Float, Int, Name, Settings

Format = Literal["e4m3", "e5m2"]


class Rollout(Settings):
    """What is FP8 while the engine generates."""

    linears: bool = False
    kv_cache: bool = False
    attention: bool = False  # both attention matmuls on FP8 operands

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.attention and not self.kv_cache:
            raise wrong("attention", "needs kv_cache and its FP8 keys and values; turn that on or this off")
        return self


class Train(Settings):
    """Which of the three GEMMs of every linear are FP8 in the trainer: y = x·Wᵀ, dx = dy·W, dW = dyᵀ·x."""

    fprop: bool = False
    dgrad: bool = False
    wgrad: bool = False


class Scaling(Settings):
    """Block is DeepSeek's: activations and gradients 1x128, weights 128x128. Row: per token and per output
    channel. Mx: 1x32. `formula` is the rule that turns an amax into a scale: te, deepgemm and vllm, which differ in the
    last bits, or one of the user's (labkit.config.own)."""

    format: Format = "e4m3"
    grad_format: Format = "e4m3"
    kv_format: Format = "e4m3"
    granularity: Literal["block", "tensor", "row", "mx"] = "block"
    scale: Literal["pow2", "fp32"] = "pow2"
    formula: Formula = "te"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.granularity == "mx" and self.scale != "pow2":
            raise wrong("scale", "mx has power-of-2 scales by definition; set scale to pow2, or another granularity")
        return self

    def short_str(self) -> str:
        formula = "" if self.formula == "te" else f"/{own.short(self.formula)}"
        return f"{self.format}/{self.granularity}/{self.scale}{formula}"


class KeepBF16(Settings):
    """Linears that stay BF16 on both sides."""

    lm_head: bool = True
    first_layers: Int = Field(default=0, ge=0)
    last_layers: Int = Field(default=0, ge=0)


class Recalibration(Settings):
    """When the Q/K/V scales of the FP8 cache are made anew.

    scale = margin · percentile of the amaxes / FP8 max.

    Policy unit: always 1.0. engine: by the engine, on its first forward after each refit.
    """

    policy: Literal["every-step", "every-k-steps", "first-step", "unit", "engine"] = "every-step"
    every: Int = Field(default=1, ge=1)  # steps, of every-k-steps
    margin: Float = Field(default=1.05, ge=0.01, le=100)
    percentile: Float = Field(default=99.9, gt=0, le=100)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.every != 1 and self.policy != "every-k-steps":
            raise wrong("every", f"belongs to policy every-k-steps, not {self.policy}; set that policy or drop it")
        return self

    def _merged(self, changes: dict[str, Any]) -> dict[str, Any]:
        if changes.get("policy", self.policy) != self.policy:
            changes = {"every": 1} | changes
        return super()._merged(changes)


class Router(Settings):
    """Of a mixture of experts; a dense model has none. Never FP8, and the same type on both sides.

    Replay: whose choice of experts the trainer takes instead of its own. r2: in the update, that of its own scoring
    pass. r3: in scoring and update, that of the engine.
    """

    dtype: Literal["bf16", "fp32"] = "bf16"
    replay: Literal["off", "r2", "r3"] = "off"


class Recipe(Settings):
    label: ClassVar[str] = "name"

    name: Name = Field(default="custom", min_length=1)
    rollout: Rollout = Rollout()
    train: Train = Train()
    scaling: Scaling = Scaling()
    keep_bf16: KeepBF16 = KeepBF16()
    router: Router = Router()
    recalibration: Recalibration = Recalibration()
    correction: Correction = Correction()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rollout.kv_cache:
            return self
        for key, value, default in (
            ("recalibration.policy", self.recalibration.policy, "every-step"),
            ("scaling.kv_format", self.scaling.kv_format, "e4m3"),
        ):
            if value != default:
                what = f"{value} has no effect while rollout.kv_cache is off"
                raise wrong(key, f"{what}; turn that on, or set this back to {default}")
        return self

    @property
    def uses_fp8(self) -> bool:
        return any(switch for _, switch in self.rollout) or any(switch for _, switch in self.train)

    def covers(self, layer: int | None, num_layers: int) -> bool:
        """Whether the FP8 switches reach the linears of a layer; None is the lm_head."""
        keep = self.keep_bf16
        if layer is None:
            return not keep.lm_head
        return keep.first_layers <= layer < num_layers - keep.last_layers

    def _merged(self, changes: dict[str, Any]) -> dict[str, Any]:
        """A changed preset is no longer the preset: fp8-e2e becomes fp8-e2e* unless it is given a name."""
        data = super()._merged(changes)
        if "name" not in changes and not self.name.endswith("*") and self.name != "custom":
            with suppress(ConfigError):  # whoever asked for the change meets the error, with its whole key
                data["name"] = f"{self.name}*" if self.diff(Recipe(**data)) else self.name
        return data

    def short_str(self) -> str:
        """One line: "r:lin+kv t:fprop+dgrad+wgrad e4m3/block/pow2 tis2"; defaults are left out."""
        precision = self._fp8_parts() if self.uses_fp8 else ["bf16"]
        router = "router:fp32" if self.router.dtype == "fp32" else ""
        replay = "" if self.router.replay == "off" else f"replay:{self.router.replay}"
        return " ".join(part for part in [*precision, router, replay, self.correction.short_str()] if part)

    def _fp8_parts(self) -> list[str]:
        names = {"linears": "lin", "kv_cache": "kv", "attention": "attn"}
        scaling, keep, recalibration = self.scaling, self.keep_bf16, self.recalibration
        rollout = "+".join(names[name] for name, on in self.rollout if on)
        train = "+".join(name for name, on in self.train if on)
        ends = {"first": keep.first_layers, "last": keep.last_layers}
        kept = "+".join(f"{end}{layers}" for end, layers in ends.items() if layers)
        parts = [rollout and f"r:{rollout}", train and f"t:{train}", scaling.short_str()]
        if scaling.grad_format != "e4m3" and (self.train.dgrad or self.train.wgrad):
            parts.append(f"grad:{scaling.grad_format}")
        if self.rollout.kv_cache:
            parts.append(f"kv:{scaling.kv_format}" if scaling.kv_format != "e4m3" else "")
            parts.append(_scales(recalibration))
        return [*parts, kept and f"bf16:{kept}", "" if keep.lm_head else "+lm_head"]


def _scales(recalibration: Recalibration) -> str:
    policy = recalibration.policy
    when = f"every-{recalibration.every}-steps" if policy == "every-k-steps" else policy
    margin = "" if recalibration.margin == 1.05 else f"x{recalibration.margin:g}"
    return "" if (when, margin) == ("every-step", "") else f"scales:{when}{margin}"
