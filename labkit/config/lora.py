"""Lora: what is trained. With a rank, small adapters beside the linear layers of a frozen base (`labkit.models.lora`).

What they can't be combined with is refused here, each with the way out.
"""

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from labkit.config.errors import wrong
from labkit.config.settings import Float, Int, Settings

if TYPE_CHECKING:
    from labkit.config.experiment import Experiment

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_ALL: tuple[Projection, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Lora(Settings):
    """y = linear(x) + alpha / rank · B(A x) in the target layers. Rank 0: off, all weights are trained."""

    rank: Int = Field(default=0, ge=0, le=4096)
    alpha: Float = Field(default=32.0, gt=0)
    targets: tuple[Projection, ...] = _ALL

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.targets:
            raise wrong("targets", "names no layer to adapt; name some, or set rank to 0")
        if not self.rank and (self.alpha, self.targets) != (32.0, _ALL):
            raise wrong("rank", "0 trains all weights, so alpha and targets have no effect; set a rank or drop them")
        return self

    def short_str(self) -> str:
        return f"lora{self.rank}" if self.rank else ""

    def _merged(self, changes: dict[str, Any]) -> dict[str, Any]:
        if changes.get("rank", self.rank) == 0:
            changes = {"alpha": 32.0, "targets": _ALL} | changes
        return super()._merged(changes)


def check(experiment: "Experiment") -> None:
    """For a validator of Experiment."""
    if not experiment.lora.rank:
        return
    if experiment.recipe.train.wgrad:
        what = "the base is frozen under lora, so its weights have no gradient to compute"
        raise wrong("recipe.train.wgrad", f"{what}; set it to false, or lora.rank to 0")
    for key, value in (("engine", experiment.engine), ("trainer", experiment.trainer)):
        if value != "local":
            raise wrong(key, f"adapters are built into local, not {value}; set it to local, or lora.rank to 0")
