"""Curves as numbers: from step records to the points of a line.

    points     (x, y) of a metric          x: step, cumulative generated tokens, or minutes of work
    smooth     bias-corrected exponential moving average
                   m_t = weight m_(t-1) + (1 - weight) y_t,  m_0 = 0,  smooth_t = m_t / (1 - weight^t)
               so that the first value is y_1, and a weight of 0 leaves y as it is
    decimate   at most `limit` points; a spike that one step had stays
    band       mean and standard deviation (n - 1) of the same curve over several seeds

A step that did not measure a metric (None) has no point; one that measured NaN or infinity has a NaN, which draws as a
gap. Arrays are float64 of shape [points].
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from labkit.config import Recipe
from labkit.runs.metrics import Metric, describe
from labkit.runs.record import StepRecord
from labkit.runs.report import PANELS

Array = NDArray[np.float64]
Points = tuple[Array, Array]
X = Literal["step", "tokens", "time"]

# Curves that are no metric of a record but follow from one.
DERIVED = {
    "tmpe": Metric("token_mult_prob_error - 1: mean exp|delta| - 1", "share", "lower", "NeMo RL", (0.0, 0.05)),
    "throughput": Metric(
        "prompt and generated tokens over the seconds of a step without evaluation", "tokens/s", "higher", "labkit"
    ),
    "modelled": Metric(
        "what labkit.hardware expects of the recipe on a GPU for a workload of its own; nothing of it was measured",
        *("tokens/s/GPU", "higher", "labkit"),
    ),
}
_BLOCK = 64  # steps that `smooth` does at once


class SwitchMark(Protocol):
    """What a curve needs of a switch: the first step under the recipe, {setting: (before, after)}, the recipe."""

    @property
    def step(self) -> int: ...
    @property
    def changes(self) -> Mapping[str, Sequence[Any]]: ...
    @property
    def recipe(self) -> Recipe: ...


def meaning(name: str) -> Metric:
    """The description of a curve. Raises ValueError for a name that no record can hold."""
    return DERIVED[name] if name in DERIVED else describe(name)


def value_of(record: StepRecord, metric: str) -> float | None:
    """The value of a curve at one step; None where the step did not measure it."""
    if metric == "throughput":
        return PANELS["throughput"].value(record) if record.tokens else None
    value = record.metrics.get("token_mult_prob_error" if metric == "tmpe" else metric)
    return value if metric != "tmpe" or value is None else value - 1.0


def points(records: Sequence[StepRecord], metric: str, x: X = "step") -> Points:
    """The steps that measured `metric`."""
    return History().points(records, metric, x)


class History:
    """`points` for a run that grows: what was read of a record is not read again."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}

    def points(self, records: Sequence[StepRecord], metric: str, x: X = "step") -> Points:
        measured, y = self._column(metric).read(records)
        return self.positions(records, x)[measured.astype(np.intp)], y

    def positions(self, records: Sequence[StepRecord], x: X) -> Array:
        """Where each record stands on the x axis."""
        _, values = self._column(f"x:{x}").read(records)
        return np.cumsum(values) if x == "tokens" else values

    def _column(self, name: str) -> "_Column":
        if name not in self._columns:
            self._columns[name] = _Column(_X[name[2:]] if name.startswith("x:") else partial(value_of, metric=name))
        return self._columns[name]


class _Column:
    """The values of one curve and the indices of the records that have one, in arrays with room to grow."""

    def __init__(self, value: Callable[[StepRecord], float | None]) -> None:
        self._value = value
        self._table = np.empty((2, 64))
        self._filled = self._seen = 0
        self._last: StepRecord | None = None

    def read(self, records: Sequence[StepRecord]) -> Points:
        if self._seen > len(records) or (self._seen and records[self._seen - 1] is not self._last):
            self._filled = self._seen = 0  # cut and done again from a checkpoint, or another run
        for index in range(self._seen, len(records)):
            value = self._value(records[index])
            if value is not None:
                self._append(index, value if math.isfinite(value) else math.nan)
        self._seen, self._last = len(records), records[-1] if records else None
        index_y = self._table[:, : self._filled].copy()
        return index_y[0], index_y[1]

    def _append(self, index: int, value: float) -> None:
        if self._filled == self._table.shape[1]:
            self._table = np.concatenate([self._table, np.empty_like(self._table)], axis=1)
        self._table[:, self._filled] = index, value
        self._filled += 1


_X: dict[str, Callable[[StepRecord], float | None]] = {
    "step": lambda record: float(record.step),
    "tokens": lambda record: float(record.tokens.get("generated", 0)),
    "time": lambda record: record.elapsed / 60,
}


def smooth(y: Array, weight: float) -> Array:
    """NaN stays where it is and does not enter the average."""
    if not 0 <= weight < 1:
        raise ValueError(f"a smoothing weight is at least 0 and below 1, got {weight}")
    if weight == 0:
        return y
    known = np.isfinite(y)
    values = y[known]
    age = np.arange(_BLOCK)[:, None] - np.arange(_BLOCK)[None, :]
    within = (1 - weight) * np.where(age >= 0, weight ** np.maximum(age, 0), 0.0)
    decay = weight ** np.arange(1, _BLOCK + 1)
    mean, carried = np.empty_like(values), 0.0
    for start in range(0, len(values), _BLOCK):  # a matrix product a block: no loop over single steps
        block = values[start : start + _BLOCK]
        n = len(block)
        mean[start : start + n] = within[:n, :n] @ block + decay[:n] * carried
        carried = float(mean[start + n - 1])
    mean /= 1 - weight ** np.arange(1, len(values) + 1)
    result = np.full_like(y, np.nan)
    result[known] = mean
    return result


def decimate(x: Array, y: Array, limit: int = 500) -> Points:
    """The first and the last point, and the lowest and the highest of each of the stretches between them."""
    if len(x) <= limit:
        return x, y
    stretches = limit // 2 - 1
    inner = np.arange(1, len(x) - 1)
    size = math.ceil(len(inner) / stretches)
    padded = np.pad(inner, (0, stretches * size - len(inner)), mode="edge").reshape(stretches, size)
    values = y[padded]
    lowest = np.nanargmin(np.where(np.isnan(values), np.inf, values), axis=1)
    highest = np.nanargmax(np.where(np.isnan(values), -np.inf, values), axis=1)
    rows = np.arange(stretches)
    kept = np.unique(np.concatenate([[0], padded[rows, lowest], padded[rows, highest], [len(x) - 1]]))
    return x[kept], y[kept]


def band(curves: Sequence[Points]) -> tuple[Array, Array, Array]:
    """x, mean, std. Between its own points a curve is a straight line; beyond its ends it has no say."""
    if not curves:
        raise ValueError("no curves to average: give at least one")
    known = [(x[np.isfinite(y)], y[np.isfinite(y)]) for x, y in curves]
    grid = np.unique(np.concatenate([x for x, _ in known]))
    rows = [np.interp(grid, x, y, left=np.nan, right=np.nan) for x, y in known if len(x)]
    if not rows:
        return grid, grid, grid
    values = np.stack(rows)
    count = np.isfinite(values).sum(axis=0)
    mean = np.nansum(values, axis=0) / count
    squares = np.nansum((values - mean) ** 2, axis=0)
    return grid, mean, np.sqrt(squares / np.maximum(count - 1, 1))
