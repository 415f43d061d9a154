"""What seeds can show: paired differences with intervals, tests, and verdicts in words.

Two arms with the same seed see the same prompts in the same order, so what the seed does to both cancels in their
difference. For the n seeds that both have, with d_i = arm_i - baseline_i:

    mean      m = sum d_i / n,    s^2 = sum (d_i - m)^2 / (n - 1)
    interval  m ± t* s / sqrt n,  t* the 97.5 % quantile of Student's t with n - 1 degrees of freedom
    t test    T = m sqrt n / s, two-sided: right where the d_i are normal                    (Student 1908)
    sign flip the share of the 2^n ways to sign the d_i whose |mean| is at least |m|: exact for any symmetric
              distribution, and never below 2 / 2^n, so 5 % is out of reach under 6 seeds    (Fisher 1935, section 21)
    bootstrap m of n draws with replacement, 10,000 times, 2.5 and 97.5 % quantiles; too narrow where n is
              small (about sqrt((n - 1) / n) of it and no t*), shown for comparison          (Efron 1979)

Quantities that span decades (TMPE - 1, KL) are compared as logarithms: m is then the logarithm of a ratio. Exactly 0
has no logarithm; it is counted and said, not dropped.

A verdict is "lower by .021 [.004, .038], n = 5" where the interval leaves out 0, and otherwise "no difference shown at
n = 3 (could have missed up to .05)": an interval that holds 0 excludes only what lies beyond its ends, and is no proof
of equality. Each interval stands for itself: of twenty true nulls one is expected to look like a difference.

Held-out accuracy itself is a share of N prompts, so one evaluation has a standard error sqrt(a (1 - a) / N) of its own
(.016 for a = .93, N = 256). It is part of s already; it is shown so that nobody reads more digits than there are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.sweeps import student

RESAMPLES = 10_000
_EXACT = 16  # seeds up to which all sign flips are tried; beyond, as many random ones


@dataclass(frozen=True)
class Interval:
    """Mean and its 95 % interval; NaN ends where fewer than two values leave nothing to judge the spread by."""

    mean: float
    low: float
    high: float
    std: float
    n: int


@dataclass(frozen=True)
class Paired:
    """An arm against a baseline, over the seeds that both have; in logarithms where `log`."""

    seeds: tuple[int, ...]
    unpaired: tuple[int, ...]  # seeds that only one of the two has
    differences: tuple[float, ...]
    difference: Interval
    bootstrap: tuple[float, float]
    p_t: float
    p_flip: float
    log: bool
    zeros: tuple[int, int]  # pairs in which the arm, the baseline is exactly 0: without a logarithm

    @property
    def n(self) -> int:
        return len(self.seeds)

    @property
    def shown(self) -> int:
        """-1 lower, 1 higher, 0 no difference shown."""
        low, high = self.difference.low, self.difference.high
        if sum(self.zeros):
            return 0 if self.zeros[0] == self.zeros[1] else (-1 if self.zeros[0] > self.zeros[1] else 1)
        return 1 if low > 0 else -1 if high < 0 else 0

    @property
    def missed(self) -> float:
        """The largest difference, either way, that the interval doesn't exclude."""
        return max(abs(self.difference.low), abs(self.difference.high))

    def needed(self, effect: float) -> int | None:
        """Seeds that would find a difference of `effect` with power 0.8, if the spread is what it is here.

        None: more than a thousand, or unknown: of two differences the spread is hardly known.
        """
        std = self.difference.std
        if self.n < 3 or not std > 0:  # NaN as well
            return None
        return student.pairs_needed(effect / std)


def interval(values: Sequence[float]) -> Interval:
    n = len(values)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, math.nan, 0)
    mean = float(np.mean(values))
    if n == 1:
        return Interval(mean, math.nan, math.nan, math.nan, 1)
    std = float(np.std(values, ddof=1))
    half = student.quantile(0.975, n - 1) * std / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, std, n)


def paired(arm: Mapping[int, float], baseline: Mapping[int, float], log: bool = False) -> Paired:
    """By seed. Values that aren't finite count as missing."""
    mine, theirs = (({s: v for s, v in side.items() if math.isfinite(v)}) for side in (arm, baseline))
    seeds = tuple(sorted(mine.keys() & theirs.keys()))
    zeros = (sum(mine[s] <= 0 for s in seeds), sum(theirs[s] <= 0 for s in seeds)) if log else (0, 0)
    usable = [s for s in seeds if not log or (mine[s] > 0 and theirs[s] > 0)]
    differences = [math.log(mine[s] / theirs[s]) if log else mine[s] - theirs[s] for s in usable]
    found = interval(differences)
    spread = found.std > 0
    return Paired(
        seeds=seeds,
        unpaired=tuple(sorted(mine.keys() ^ theirs.keys())),
        differences=tuple(differences),
        difference=found,
        bootstrap=bootstrap(differences),
        p_t=student.two_sided(found.mean * math.sqrt(found.n) / found.std, found.n - 1) if spread else math.nan,
        p_flip=sign_flip(differences),
        log=log,
        zeros=zeros,
    )


def bootstrap(differences: Sequence[float]) -> tuple[float, float]:
    """Percentile interval of the mean, from the same random numbers every time."""
    if len(differences) < 2:
        return math.nan, math.nan
    values = np.asarray(differences)
    drawn = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(values[drawn].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def sign_flip(differences: Sequence[float]) -> float:
    """The two-sided p-value; NaN without differences."""
    n = len(differences)
    if n == 0:
        return math.nan
    values = np.asarray(differences)
    if n <= _EXACT:
        signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    else:
        signs = np.random.default_rng(0).choice([-1, 1], (2**_EXACT, n))
        signs[0] = 1  # what was seen is one of the ways
    means = np.abs(signs @ values)
    return float(np.mean(means >= abs(values.sum()) * (1 - 1e-12)))


def evaluation_error(accuracy: float, prompts: int) -> float:
    """Standard error of one held-out accuracy: that of a binomial share."""
    return math.sqrt(max(0.0, accuracy * (1 - accuracy)) / prompts)


def verdict(found: Paired, baseline: str) -> str:
    """One clause: what was shown about the arm, against the baseline."""
    n, difference = found.n, found.difference
    if n == 0:
        return f"not comparable with {baseline}: no seed in common"
    if sum(found.zeros):
        return _exactness(found, baseline)
    if all(value == 0 for value in found.differences):
        return f"the same as {baseline} in all of n = {n}"
    size = amount(difference.mean, found.log)
    if n == 1:
        return f"{_way(difference.mean)} than {baseline} by {size} in the one seed there is, which shows nothing"
    if not found.shown:
        return f"no difference from {baseline} shown at n = {n} (could have missed up to {_missed(found)})"
    ends = sorted([difference.low, difference.high], key=abs)
    inside = ", ".join(amount(end, found.log) for end in ends)
    return f"{_way(difference.mean)} than {baseline} by {size} [{inside}], n = {n}"


def signed(found: Paired, baseline: str) -> str:
    """The difference with its interval: "−.021 [−.039, −.003]", "×3.1 [2.2, 4.4]", or words where there is none."""
    difference, n = found.difference, found.n
    if n == 0:
        return "–"
    if sum(found.zeros):
        return _exactness(found, baseline).partition(", ")[0]
    show = (lambda value: f"{math.exp(value):.3g}") if found.log else (lambda value: short(value, sign="+"))
    ends = f" [{show(difference.low)}, {show(difference.high)}]" if n > 1 else ""
    return f"{'×' if found.log else ''}{show(difference.mean)}{ends}"


def amount(value: float, log: bool) -> str:
    """The size of a difference: ".021", or "a factor 3.1" of a logarithm."""
    if log:
        return f"×{math.exp(abs(value)):.3g}"
    return short(abs(value))


def short(value: float, digits: int = 3, sign: str = "-") -> str:
    """ ".021": a share has no leading zero, and a real minus. `sign` "+" gives positive ones theirs."""
    if not math.isfinite(value):
        return "–"
    text = f"{abs(value):.{digits}f}"
    before = "−" if value < 0 and float(text) else "+" if sign == "+" else ""
    return before + (text[1:] if text.startswith("0.") else text)


def _missed(found: Paired) -> str:
    return amount(found.missed, found.log)


def _way(value: float) -> str:
    return "lower" if value < 0 else "higher"


def _exactness(found: Paired, baseline: str) -> str:
    n, (mine, theirs) = found.n, found.zeros
    if mine == theirs == n:
        return f"exactly 0 as {baseline} is, n = {n}"
    if (mine, theirs) == (n, 0):
        return f"exactly 0 where {baseline} is not, in all of n = {n}"
    if (mine, theirs) == (0, n):
        return f"above 0 where {baseline} is exactly 0, in all of n = {n}"
    return f"exactly 0 in {mine} of {n} seeds, {baseline} in {theirs} of {n}: no ratio to give"
