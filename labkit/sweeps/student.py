"""Student's t distribution for whole degrees of freedom v, and the power of a t test. Needs numpy alone.

With theta = arctan(t / sqrt v), the probability A(t) of |T| <= t is a finite sum (Abramowitz & Stegun 26.7.3, 26.7.4):

    v = 1      A = 2 theta / pi
    v odd      A = 2/pi {theta + sin theta [c + 2/3 c^3 + ... + (2·4···(v-3))/(3·5···(v-2)) c^(v-2)]},  c = cos theta
    v even     A = sin theta {1 + 1/2 c^2 + (1·3)/(2·4) c^4 + ... + (1·3···(v-3))/(2·4···(v-2)) c^(v-2)}

The paired t test with n differences of mean m and standard deviation s rejects where |sqrt n · m / s| > t*, the
1 - alpha/2 quantile. If m and s are the true ones, its power is that of a noncentral t with v = n - 1 and
delta = sqrt n · m / s (Cohen 1988, chapter 2):

    power = E over U of [Phi(delta - t* U) + Phi(-delta - t* U)],    U = sqrt(chi2_v / v)

The expectation is a sum over a fine grid of U.
"""

import math

import numpy as np

LEVEL = 0.95
MOST_SEEDS = 1000
_GRID = 2000


def cdf(t: float, df: int) -> float:
    """P(T <= t)."""
    inside = _within(abs(t), df)
    return 0.5 * (1 + inside) if t >= 0 else 0.5 * (1 - inside)


def two_sided(t: float, df: int) -> float:
    """P(|T| >= |t|): the p-value of a two-sided test."""
    return 1.0 - _within(abs(t), df)


def quantile(p: float, df: int) -> float:
    """The t with P(T <= t) = p, by bisection."""
    if not 0 < p < 1:
        raise ValueError(f"p must lie between 0 and 1, not {p}")
    if p < 0.5:
        return -quantile(1 - p, df)
    low, high = 0.0, 1.0
    while cdf(high, df) < p:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def power(effect: float, n: int, level: float = LEVEL) -> float:
    """Of a two-sided paired t test with n pairs; `effect` is the mean difference over its standard deviation."""
    df = n - 1
    limit = quantile((1 + level) / 2, df)
    delta = abs(effect) * math.sqrt(n)
    spread = 8 / math.sqrt(2 * df)
    edges = np.linspace(max(0.0, 1 - spread), 1 + spread, _GRID + 1)
    u = (edges[1:] + edges[:-1]) / 2
    log_density = df * np.log(u) - np.log(u) - df * u**2 / 2  # of U, up to a factor
    weight = np.exp(log_density - log_density.max())
    weight /= weight.sum()
    inside = np.array([_phi(delta - limit * x) + _phi(-delta - limit * x) for x in u])
    return float((weight * inside).sum())


def pairs_needed(effect: float, wanted: float = 0.8, level: float = LEVEL) -> int | None:
    """The least n at which the test finds `effect` (in standard deviations) with that power; None: over a thousand."""
    if effect == 0 or power(effect, MOST_SEEDS, level) < wanted:
        return None
    low, high = 1, MOST_SEEDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(effect, middle, level) >= wanted else (middle, high)
    return high


def _within(t: float, df: int) -> float:
    if df < 1:
        raise ValueError(f"degrees of freedom must be at least 1, not {df}")
    theta = math.atan(t / math.sqrt(df))
    cos, sin = math.cos(theta), math.sin(theta)
    if df % 2:
        total, term = 0.0, cos
        for k in range(1, df - 1, 2):
            total += term
            term *= cos * cos * (k + 1) / (k + 2)
        return 2 / math.pi * (theta + sin * total)
    total, term = 0.0, 1.0
    for k in range(0, df, 2):
        total += term
        term *= cos * cos * (k + 1) / (k + 2)
    return sin * total


def _phi(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))
