import math

import numpy as np
import pytest

from labkit.sweeps import statistics
from labkit.sweeps.statistics import evaluation_error, interval, paired, sign_flip, verdict

# By hand: d = -.01, -.03, -.02, -.04, -.005; sum -.105, m = -.021; deviations .011, -.009, .001, -.019, .016;
# squares sum to 8.20e-4, s^2 = 2.05e-4, s = .0143178; s / sqrt 5 = .0064031; t*(4) = 2.776445; half width .0177779.
BASE = {0: 0.93, 1: 0.95, 2: 0.94, 3: 0.96, 4: 0.90}
ARM = {seed: BASE[seed] + d for seed, d in enumerate([-0.01, -0.03, -0.02, -0.04, -0.005])}


def test_an_interval_is_the_one_worked_out_by_hand() -> None:
    found = paired(ARM, BASE)
    assert found.difference.mean == pytest.approx(-0.021)
    assert found.difference.std == pytest.approx(0.0143178, abs=1e-7)
    assert (found.difference.low, found.difference.high) == pytest.approx((-0.0387779, -0.0032221), abs=1e-6)
    assert found.p_t == pytest.approx(0.03051, abs=1e-5)  # T = -3.2797, v = 4: 1 - T/√(4+T²) (1 + 2/(4+T²))
    assert found.p_flip == 2 / 32  # all five have one sign: only that and its mirror image are as extreme
    assert found.shown == -1
    assert verdict(found, "bf16") == "lower than bf16 by .021 [.003, .039], n = 5"


def test_an_interval_that_holds_zero_says_what_could_have_been_missed() -> None:
    # d = .02, -.01, .03: m = .0133333, s = .0208167, s / sqrt 3 = .0120185, t*(2) = 4.302653, half width .0517116
    found = paired({0: 0.92, 1: 0.89, 2: 0.93}, {0: 0.90, 1: 0.90, 2: 0.90})
    assert (found.difference.low, found.difference.high) == pytest.approx((-0.0383783, 0.0650450), abs=1e-6)
    assert found.shown == 0
    assert verdict(found, "bf16") == "no difference from bf16 shown at n = 3 (could have missed up to .065)"
    # of the 8 ways to sign, |sum| is at least .04 in +++ (.04), +-+ (.06) and their mirror images, and in no other
    assert found.p_flip == 4 / 8


def test_seeds_needed_follow_from_the_spread() -> None:
    found = paired(ARM, BASE)
    assert found.needed(0.0143178) == 10  # an effect of one standard deviation
    assert found.needed(0.0071589) == 34  # of half of one
    assert paired({0: 0.5}, {0: 0.4}).needed(0.02) is None


def test_only_seeds_that_both_have_count_and_the_others_are_named() -> None:
    found = paired({0: 0.9, 1: 0.8, 2: math.nan}, {1: 0.7, 2: 0.9, 3: 0.9})
    assert (found.seeds, found.unpaired, found.n) == ((1,), (0, 2, 3), 1)
    assert verdict(found, "b") == "higher than b by .100 in the one seed there is, which shows nothing"
    assert "no seed in common" in verdict(paired({0: 0.9}, {1: 0.9}), "b")


def test_the_same_number_in_every_seed_is_no_missing_difference() -> None:
    found = paired({0: 0.9, 1: 0.8}, {0: 0.9, 1: 0.8})
    assert verdict(found, "b") == "the same as b in all of n = 2"
    assert (found.shown, found.p_flip) == (0, 1.0)
    assert math.isnan(found.p_t)


def test_the_same_difference_in_every_seed_is_shown() -> None:
    found = paired({0: 0.75, 1: 0.5}, {0: 0.5, 1: 0.25})
    assert verdict(found, "b") == "higher than b by .250 [.250, .250], n = 2"


def test_quantities_that_span_decades_are_compared_as_ratios() -> None:
    found = paired({0: 2e-3, 1: 4e-3, 2: 3e-3}, {0: 1e-3, 1: 1e-3, 2: 1e-3}, log=True)
    assert found.difference.mean == pytest.approx(math.log(24) / 3)
    assert found.shown == 1
    assert verdict(found, "b").startswith("higher than b by ×2.88 [×1.2")
    # a ratio below one is said as how many times less
    assert verdict(paired({0: 1e-4, 1: 1e-4}, {0: 1e-2, 1: 1e-2}, log=True), "b").startswith("lower than b by ×100")


def test_exactly_zero_is_said_not_dropped() -> None:
    some, none = {0: 1e-3, 1: 2e-3}, {0: 0.0, 1: 0.0}
    assert verdict(paired(none, some, log=True), "b") == "exactly 0 where b is not, in all of n = 2"
    assert verdict(paired(some, none, log=True), "b") == "above 0 where b is exactly 0, in all of n = 2"
    assert verdict(paired(none, none, log=True), "b") == "exactly 0 as b is, n = 2"
    assert paired(none, some, log=True).shown == -1
    assert paired(some, none, log=True).shown == 1
    assert "in 1 of 2 seeds" in verdict(paired({0: 0.0, 1: 1e-3}, some, log=True), "b")


def test_the_bootstrap_is_the_same_every_time_and_lies_inside_what_was_seen() -> None:
    differences = paired(ARM, BASE).differences
    low, high = statistics.bootstrap(differences)
    assert (low, high) == statistics.bootstrap(differences)
    assert min(differences) <= low < -0.021 < high <= max(differences)
    assert all(map(math.isnan, statistics.bootstrap([0.1])))


def test_sign_flips_of_many_seeds_are_sampled_and_agree_with_the_t_test() -> None:
    differences = np.random.default_rng(1).normal(0.3, 1, 40).tolist()
    found = paired(dict(enumerate(differences)), dict.fromkeys(range(40), 0.0))
    assert sign_flip(differences) == pytest.approx(found.p_t, abs=0.02)


def test_the_error_of_one_evaluation_is_binomial() -> None:
    assert evaluation_error(0.93, 256) == pytest.approx(0.015947, abs=1e-6)
    assert evaluation_error(1.0, 256) == 0


def test_an_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    found = [interval(rng.normal(1, 2, 3).tolist()) for _ in range(2000)]
    assert np.mean([each.low <= 1 <= each.high for each in found]) == pytest.approx(0.95, abs=0.015)


def test_against_scipy_where_it_is_installed() -> None:
    stats = pytest.importorskip("scipy.stats")
    found = paired(ARM, BASE)
    test = stats.ttest_rel([ARM[s] for s in BASE], list(BASE.values()))
    assert found.p_t == pytest.approx(test.pvalue)
    assert tuple(test.confidence_interval(0.95)) == pytest.approx((found.difference.low, found.difference.high))
    flips = stats.permutation_test((list(found.differences),), np.mean, permutation_type="samples", n_resamples=np.inf)
    assert found.p_flip == pytest.approx(flips.pvalue)
