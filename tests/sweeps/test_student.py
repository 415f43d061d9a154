import math

import pytest

from labkit.sweeps import student

# From printed tables (Abramowitz & Stegun 26.10): the 97.5 % and 99.5 % quantiles.
TABLE = {1: (12.706, 63.657), 2: (4.303, 9.925), 4: (2.776, 4.604), 9: (2.262, 3.250), 30: (2.042, 2.750)}


@pytest.mark.parametrize(("df", "quantiles"), TABLE.items())
def test_quantiles_are_those_of_the_printed_tables(df: int, quantiles: tuple[float, float]) -> None:
    assert [student.quantile(p, df) for p in (0.975, 0.995)] == pytest.approx(quantiles, abs=6e-4)
    assert student.quantile(0.025, df) == -student.quantile(0.975, df)


def test_distributions_that_have_a_closed_form() -> None:
    assert student.cdf(1, 1) == pytest.approx(0.75)  # Cauchy
    assert student.cdf(1, 2) == pytest.approx(0.5 + 1 / (2 * math.sqrt(3)))
    assert student.cdf(-1.5, 3) + student.cdf(1.5, 3) == pytest.approx(1)
    assert student.two_sided(2, 400) == pytest.approx(0.04617594517356813, abs=1e-12)


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10), (2.0, 5)])
def test_pairs_needed_are_those_of_g_power(effect: float, pairs: int) -> None:
    assert student.pairs_needed(effect) == pairs
    assert student.power(effect, pairs) >= 0.8 > student.power(effect, pairs - 1)


def test_without_an_effect_power_is_the_level_and_no_number_of_pairs_is_enough() -> None:
    assert student.power(0, 5) == pytest.approx(0.05, abs=1e-4)
    assert student.pairs_needed(0) is None
    assert student.pairs_needed(0.01) is None


def test_against_scipy_where_it_is_installed() -> None:
    stats = pytest.importorskip("scipy.stats")
    for df in (1, 2, 3, 7, 50, 201):
        for t in (-3.3, -0.2, 0, 1.1, 6):
            assert student.cdf(t, df) == pytest.approx(stats.t.cdf(t, df), abs=1e-12)
        for effect in (0.3, 1.2):
            delta, limit = effect * math.sqrt(df + 1), stats.t.ppf(0.975, df)
            exact = stats.nct.sf(limit, df, delta) + stats.nct.cdf(-limit, df, delta)
            assert student.power(effect, df + 1) == pytest.approx(exact, abs=2e-4)


def test_what_has_no_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        student.quantile(1, 3)
    with pytest.raises(ValueError, match="at least 1"):
        student.cdf(1, 0)
