"""Cluster: whether engine and trainer work in one process or as Ray actors."""

from typing import Literal, Self

from pydantic import Field, model_validator

from labkit.config.errors import wrong
from labkit.config.settings import Int, Name, Settings


class Cluster(Settings):
    """process: both in the run's worker, without Ray. colocated: both in one actor. separate: an actor each."""

    placement: Literal["process", "colocated", "separate"] = "process"
    address: Name = ""  # of a Ray cluster that is there; "" starts one on this machine
    overlap: bool = False  # the engine samples the next batch while this one is trained
    restarts: Int = Field(default=3, ge=0)  # lost actors that are replaced before the run fails

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.address and self.placement == "process":
            raise wrong("address", "a run in one process uses no Ray; set placement to colocated or separate")
        if self.overlap and self.placement != "separate":
            raise wrong("overlap", f"needs an engine of its own, not placement {self.placement}; set it to separate")
        return self
