"""StepRecord: everything that is known about one step of a run, one line of metrics.jsonl.

The line is strict JSON (any reader, any language). Three values have no JSON number, and none may be
confused with another:

    not measured in this step (None)    null
    not a number                        "nan"
    infinite                            "inf" / "-inf"

so a run that diverged still writes valid lines and a curve can tell a gap from a NaN. `samples` (the
rollouts of the step) belong to the record in memory and go to rollouts.jsonl, not to metrics.jsonl.

Units: `time` seconds since 1970, `elapsed` and `timings` seconds, `tokens` counts summed over the batch.
Raises ValueError for a line that is no record, NewerSchemaError for one written by a later version of
labkit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict

from labkit.runs.jsonl import dump_json, load_object

SCHEMA = 1
_OPTIONAL = ("samples", "recipe_version", "kv_scales", "events")  # a line may lack them
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class NewerSchemaError(ValueError):
    """The line was written by a newer labkit than this one."""


class Active(TypedDict):
    """What a component really did in this step, and why: not what the recipe asked for."""

    state: Literal["fp8", "emulated", "bf16", "off", "fault"]
    detail: str


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    step: int
    weight_version: int
    time: float
    elapsed: float
    metrics: dict[str, float | None]
    timings: dict[str, float]
    tokens: dict[str, int]
    active: dict[str, Active]
    engine: dict[str, int]
    recipe_version: int = 0  # how often the Recipe was switched before this step
    kv_scales: dict[str, list[float]] | None = None
    events: Sequence[str] = ()
    samples: Sequence[dict[str, Any]] = field(default=(), compare=False, repr=False)

    def metric(self, name: str) -> float:
        """The value of a metric, NaN where this step did not measure it."""
        value = self.metrics.get(name)
        return math.nan if value is None else value

    def to_json(self) -> str:
        """One line of metrics.jsonl, without the newline."""
        content = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "samples"}
        return dump_json({"schema": SCHEMA, **content})

    @classmethod
    def from_json(cls, line: str | bytes) -> "StepRecord":
        content = load_object(line)
        schema = content.get("schema")
        if isinstance(schema, int) and schema > SCHEMA:
            raise NewerSchemaError(
                f"record schema {schema} was written by a newer labkit (this one reads up to {SCHEMA}): "
                "update labkit to open this run"
            )
        names = [f.name for f in fields(cls) if f.name not in _OPTIONAL]
        missing = [name for name in ["schema", *names] if name not in content]
        if missing:
            raise ValueError(f"no step record: {', '.join(missing)} missing")
        for name, kind in (("step", int), ("metrics", dict), ("timings", dict), ("tokens", dict), ("active", dict)):
            if not isinstance(content[name], kind):
                raise ValueError(f"no step record: {name} is a {type(content[name]).__name__}, not a {kind.__name__}")
        metrics = {name: _NON_FINITE.get(value, value) for name, value in content["metrics"].items()}
        return cls(
            **{name: content[name] for name in names if name != "metrics"},
            metrics=metrics,
            recipe_version=content.get("recipe_version", 0),
            kv_scales=content.get("kv_scales"),
            events=tuple(content.get("events", ())),
        )
