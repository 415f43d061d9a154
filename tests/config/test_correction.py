"""Composing a correction: what is refused and how, short bounds, overrides, YAML."""

import pytest

from labkit.config import CORRECTIONS, ConfigError, Correction, Experiment, Filter, Recipe, preset
from labkit.config.overrides import apply

COMPOSED = Correction(
    weight="geometric", floor=0.5, cap=3.0, normalize=True, denominator="drop", objective="cispo",
    clip_low=1.0, clip_high=4.0, anchor=0.01,
    filters=[
        {"statistic": "k3", "over": "mean", "high": 0.01},
        {"over": "max", "low": 1e-4},
        {"statistic": "binary-kl", "high": 0.1},
    ],
)  # fmt: skip


def custom(**fields):
    return lambda: Correction(name="custom", **fields)


def filtering(**fields):
    return custom(filters=[fields])


def named(name, **fields):
    return lambda: Correction(name=name, **fields)


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("none", {}),
        ("tis", {"cap": 2.0}),
        ("icepop", {"low": 0.5, "high": 5.0}),
        ("sequence-tis", {"cap": 2.0}),
        ("sequence-mask", {"low": 0.5, "high": 2.0}),
        ("geometric-mask", {"low": 0.999, "high": 1.002}),
        ("veto", {"cap": 2.0, "low": 1e-4}),
        ("k3-mask", {"high": 0.01}),
        ("dppo", {"low": -0.2, "high": 0.2}),
        ("openrlhf/tis", {"floor": 0.5, "cap": 5.0}),
        ("verl/decoupled_seq_is_rs", {"cap": 2.0, "low": 0.5, "high": 2.0}),
        ("slime/mis", {"cap": 2.0, "low": 0.5, "high": 2.0}),
    ],
)
def test_a_correction_fills_in_its_own_bounds(name, bounds):
    assert Correction(name=name).bounds == bounds


def test_a_bound_that_is_given_is_kept():
    assert Correction(name="tis", cap=3).cap == 3.0
    assert Correction(name="icepop", low=0.9) == Correction(name="icepop", low=0.9, high=5.0)
    assert Correction(name="icepop", low=0.9).filters == (Filter(low=0.9, high=5.0),)
    assert Correction(name="slime/mis", low=0.9).filters == (Filter(low=0.9, high=2.0), Filter(over="max", low=1e-4))
    assert Correction(name="tis", cap=None) == Correction(name="tis")


def test_without_a_name_it_is_composed():
    assert Correction().name == "none"
    assert Correction(weight="token").name == "custom"
    assert Correction(weight="token", cap=2.0).bounds == {}
    assert Correction(name=" tis ") == Correction(name="tis")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        # names
        (named("ice-pop"), "name: no correction 'ice-pop'; did you mean icepop or slime/icepop?"),
        (named("verl/decoupled_token_tis"), "name: no correction 'verl/decoupled_token_tis'; did you mean verl/"),
        (named("zzz"), "name: no correction 'zzz'; `labkit corrections` lists"),
        (named(3), "name: must be a valid string"),
        # bounds of a name
        (named("icepop", cap=2.0), "cap: belongs to tis, sequence-tis, veto, on-policy, calibrated-clip; icepop"),
        (named("none", low=0.5), "low: belongs to icepop, sequence-mask, geometric-mask, veto, dppo; none has no"),
        (named("tis", floor=0.5), "floor: belongs to custom corrections; tis has cap: drop it or change the"),
        (named("tis", cap="two"), "cap: must be a number"),
        (named("tis", cap=True), "cap: must be a number"),
        (named("tis", cap=float("nan")), "cap: must be a finite number, got nan"),
        (named("icepop", low="two"), "filters.0.low: must be a number"),
        (named("icepop", low=3.0, high=2.0), "filters.0.low: 3 is above high 2; swap them"),
        (named("icepop", low=1.5), "filters.0.low: 1.5..5 leaves out 1, so even a perfect match would be rejected"),
        (named("geometric-mask", high=0.9995), "filters.0.high: 0.999..0.9995 leaves out 1"),
        # a name promises what it is composed of
        (named("tis", weight="sequence"), "weight: is not what tis has; set name to custom to compose your own"),
        (named("icepop", filters=[{"low": 0.5, "high": 5.0, "over": "mean"}]), "filters: is not what icepop has"),
        (named("none", denominator="drop"), "denominator: is not what none has; set name to custom"),
        (named("bypass", objective="ratio"), "objective: is not what bypass has"),
        (named("gspo", clip_low=0.2), "clip_low: is not what gspo has"),
        (named("prime-rl/ipo", anchor=0.0), "anchor: is not what prime-rl/ipo has"),
        (lambda: Correction(low=0.5), "low: belongs to icepop"),
        # truncation
        (named("tis", cap=0.5), "cap: 0.5 would weight even a perfect match below 1; choose cap >= 1"),
        (named("sequence-tis", cap=0), "cap: 0 would weight even a perfect match below 1"),
        (custom(weight="token", cap=0.5), "cap: 0.5 would weight even a perfect match below 1; choose cap >= 1"),
        (custom(weight="token", cap=0.0), "cap: 0 would weight even a perfect match below 1"),
        (custom(weight="token", floor=1.5), "floor: 1.5 would weight even a perfect match above 1; choose floor <= 1"),
        (custom(weight="token", floor=-0.5), "floor: must be greater than or equal to 0"),
        (custom(cap=2.0), "cap: has nothing to act on while weight is none; choose a weight or drop it"),
        (custom(floor=0.5), "floor: has nothing to act on while weight is none; choose a weight or drop it"),
        (custom(normalize=True), "normalize: has nothing to act on while weight is none"),
        # filters
        (filtering(), "filters.0.high: ratio has no bound and keeps everything; give low or high"),
        (custom(filters=[{"low": 0.5}, {"statistic": "k1", "low": 2.0, "high": 1.0}]), "filters.1.low: 2 is above"),
        (filtering(high=0.5), "filters.0.high: ..0.5 leaves out 1, so even a perfect match would be"),
        (filtering(statistic="mult-error", low=2.0), "filters.0.low: 2.. leaves out 1"),
        (filtering(statistic="k3", low=0.5), "filters.0.low: 0.5.. leaves out 0"),
        (filtering(statistic="k1", high=-0.1), "filters.0.high: ..-0.1 leaves out 0, so even a perfect"),
        (filtering(high=2.0, when="outward"), "filters.0.when: outward judges single tokens between two"),
        (filtering(low=0.5, high=2.0, over="mean", when="outward"), "filters.0.when: outward judges"),
        (filtering(statistic="probability", over="mean", high=0.1), "filters.0.over: probability judges"),
        (filtering(statistic="binary-kl", over="sum", high=0.1), "filters.0.over: binary-kl judges"),
        (custom(filters=[{"low": 0.5}, {"high": 2.0}]), "filters: two filters on ratio; join them to one with both"),
        (filtering(high=2.0, hihg=1), "filters.0.hihg: no such setting; did you mean filters.0.high"),
        (filtering(over="token-wise", high=2.0), "filters.0.over: must be 'token', 'sum', 'mean' or 'max'"),
        (custom(filters=["ratio"]), "filters.0: is a group of settings (statistic, over, low, high, when), got"),
        # what an objective can't be joined with
        (custom(old_policy="rollout", weight="token"), "weight: ppo against the rollout policy has the ratio to it"),
        (custom(old_policy="rollout", weight="token", objective="gspo"), "weight: gspo against the rollout policy has"),
        (
            custom(old_policy="rollout", weight="token", objective="reinforce", normalize=True),
            "normalize: needs the weights of the whole batch before its update, but here they follow the update",
        ),
        (
            custom(weight="token", normalize=True, filters=[{"statistic": "k1", "high": 0.5, "when": "negative"}]),
            "normalize: needs the weights of the whole batch before its update",
        ),
        (custom(objective="ratio", clip_low=0.2), "clip_low: ratio clips nothing; drop it, or choose another"),
        (custom(objective="ratio", clip_high=0.2), "clip_high: ratio clips"),
        (custom(objective="reinforce", clip_low=0.2), "clip_low: reinforce clips nothing; drop it"),
        (custom(objective="cispo", clip_low=1.5), "clip_low: must be less than or equal to 1"),
        (custom(objective="gspo", calibrate_clip_every=4), "calibrate_clip_every: adapts the clip of ppo, gspo"),
        (custom(calibrate_clip_every=-1), "calibrate_clip_every: must be greater than or equal to 0"),
        (custom(anchor=-0.1), "anchor: must be greater than or equal to 0"),
        (custom(objective="dapo"), "objective: must be 'ppo', 'ratio', 'reinforce', 'cispo' or 'gspo', got 'dapo'"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_key_and_the_way_out(build, message):
    with pytest.raises(ConfigError) as caught:
        build()
    assert str(caught.value).startswith(message)
    assert len(caught.value.problems) == 1


def test_reinforce_against_the_rollout_policy_may_be_weighted():
    assert Correction(old_policy="rollout", objective="reinforce", weight="sequence", cap=2.0).judges_current


@pytest.mark.parametrize("name", CORRECTIONS)
def test_which_verdicts_follow_the_update(name):
    """Those against the rollout policy; DPPO's and the off-policy masks."""
    two_policies = ("bypass", "pg_", "rollout_is", "prime-rl", "openrlhf/gspo")
    assert Correction(name=name).judges_current == any(
        part in name for part in (*two_policies, "dppo", "off-policy-mask", "off_policy_mask", "opsm")
    )


@pytest.mark.parametrize(
    ("correction", "text"),
    [
        (Correction(), ""),
        (Correction(name="tis"), "tis2"),
        (Correction(name="tis", cap=1.5), "tis1.5"),
        (Correction(name="icepop"), "icepop0.5..5"),
        (Correction(name="veto"), "veto2/0.0001.."),
        (Correction(name="bypass"), "bypass"),
        (Correction(name="k3-mask"), "k3-mask..0.01"),
        (Correction(name="openrlhf/tis"), "openrlhf/tis0.5..5"),
        (Correction(weight="token", cap=2.0), "token..2"),
        (Correction(weight="sequence", filters=[{"low": 0.5, "high": 5.0}]), "sequence+ratio0.5..5"),
        (Correction(filters=[{"statistic": "k1", "over": "mean", "high": 0.5, "when": "negative"}]),
         "mean-k1-negative..0.5"),
        (Correction(old_policy="rollout", objective="ratio", denominator="drop"), "drop+vs-rollout+ratio"),
        (Correction(weight="token", calibrate_clip_every=5, clip_high=0.5),
         "token+calibrated-clip-every5+clip..0.5"),
        (COMPOSED,
         "geometric0.5..3+mean-k3..0.01+max-ratio0.0001..+binary-kl..0.1+normalized+drop+cispo+anchor0.01+clip1..4"),
    ],
)  # fmt: skip
def test_short_str(correction, text):
    assert correction.short_str() == text


def test_two_corrections_are_told_apart_by_their_text():
    assert len({Correction(name=name).short_str() for name in CORRECTIONS}) == len(CORRECTIONS)


def test_filters_are_recorded_without_their_bounds():
    assert [each.key for each in COMPOSED.filters] == ["mean_k3", "max_ratio", "binary_kl"]


# ---- overrides and YAML


@pytest.mark.parametrize("name", CORRECTIONS)
def test_yaml_round_trip(name):
    recipe = Recipe(name="one", correction=name)
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe
    changed = Recipe(correction=Correction(name=name).override({"name": "custom"}))
    assert Recipe.from_yaml(changed.to_yaml()) == changed
    assert changed.correction.name == "custom"


def test_yaml_round_trip_of_changed_bounds_and_of_a_composition():
    for correction in (Correction(name="slime/mis", cap=3.0, low=0.25), COMPOSED):
        recipe = Recipe(correction=correction)
        assert Recipe.from_yaml(recipe.to_yaml()) == recipe
        assert Experiment.from_yaml(Experiment(recipe=recipe).to_yaml()).recipe == recipe


def test_yaml_needs_no_more_than_a_name_or_its_bounds():
    assert Recipe.from_yaml("correction: icepop\n").correction == Correction(name="icepop")
    assert Recipe.from_yaml("correction: {name: icepop, low: 0.25, cap: null}\n").correction.bounds["low"] == 0.25
    assert Recipe.from_yaml("correction: {filters: [{high: 3}], weight: token}\n").correction == Correction(
        weight="token", filters=(Filter(high=3.0),)
    )


def overridden(start, *assignments):
    return apply(preset(start), assignments).recipe.correction


@pytest.mark.parametrize(
    ("start", "assignments", "wanted"),
    [
        ("fp8-rollout", ["recipe.correction=icepop"], Correction(name="icepop")),
        ("fp8-rollout-tis", ["recipe.correction=verl/bypass_pg_is"], Correction(name="verl/bypass_pg_is")),
        ("fp8-rollout-tis", ["recipe.correction.cap=3"], Correction(name="tis", cap=3.0)),
        ("fp8-rollout-tis", ["recipe.correction={cap: 3}"], Correction(name="tis", cap=3.0)),
        ("fp8-rollout-tis", ["recipe.correction={name: icepop, low: 0.6}"], Correction(name="icepop", low=0.6)),
        ("fp8-rollout-icepop", ["recipe.correction.low=0.6"], Correction(name="icepop", low=0.6)),
        ("fp8-rollout-icepop", ["recipe.correction.filters.0.low=0.6"], Correction(name="icepop", low=0.6)),
        ("fp8-rollout-icepop", ["recipe.correction.name=icepop", "recipe.correction.low=0.6"],
         Correction(name="icepop", low=0.6)),
        ("fp8-rollout-tis", ["recipe.correction.name=sequence-mask", "recipe.correction.high=3"],
         Correction(name="sequence-mask", high=3.0)),
        ("fp8-rollout-tis", ["recipe.correction.name=custom", "recipe.correction.weight=sequence"],
         Correction(weight="sequence", cap=2.0)),
        ("fp8-rollout-tis", ["recipe.correction.name=custom", "recipe.correction.filters=[{low: 0.5}]"],
         Correction(weight="token", cap=2.0, filters=(Filter(low=0.5),))),
        ("fp8-rollout-icepop", ["recipe.correction.name=custom", "recipe.correction.filters.0.low=0.6",
                                "recipe.correction.filters.0.over=mean"],
         Correction(weight="token", filters=(Filter(low=0.6, high=5.0, over="mean"),))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_overrides(start, assignments, wanted):
    assert overridden(start, *assignments) == wanted


def test_a_changed_name_resets_all_that_belonged_to_the_other():
    mis = Correction(name="slime/mis", cap=3.0)
    assert mis.override({"name": "tis"}) == Correction(name="tis")
    assert mis.override({"name": "slime/mis"}) == mis
    assert COMPOSED.override({"name": "icepop"}) == Correction(name="icepop")
    assert mis.override({"name": "custom", "cap": None}).filters == mis.filters


@pytest.mark.parametrize(
    ("start", "assignments", "message"),
    [
        ("fp8-rollout-tis", ["recipe.correction.weight=sequence"],
         "recipe.correction.weight: is not what tis has; set name to custom"),
        ("fp8-rollout-icepop", ["recipe.correction.filters.0.over=mean"],
         "recipe.correction.filters: is not what icepop has; set name to custom"),
        ("fp8-rollout-tis", ["recipe.correction.low=0.5"], "recipe.correction.low: belongs to icepop"),
        ("fp8-rollout", ["recipe.correction.cap=3"], "recipe.correction.cap: belongs to tis"),
        ("fp8-rollout", ["recipe.correction=icpop"], "recipe.correction.name: no correction 'icpop'; did you mean"),
        ("fp8-rollout", ["recipe.correction=5"], "recipe.correction: is a group of settings (name, weight"),
        ("fp8-rollout", ["recipe.correction=icepop", "recipe.correction.low=0.6"],
         "recipe.correction.low: recipe.correction is given as well; keep one of the two"),
        ("fp8-rollout-icepop", ["recipe.correction.low=6"],
                     "recipe.correction.filters.0.low: 6 is above high 5"),
        ("fp8-rollout-icepop", ["recipe.correction.filters.0.lo=0.6"],
                     "recipe.correction.filters.0.lo: no such setting"),
        ("fp8-rollout-icepop", ["recipe.correction.filters.1.low=0.6"],
                     "recipe.correction.filters.1: there is no such entry; it has 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_overrides_that_are_refused(start, assignments, message):
    with pytest.raises(ConfigError) as caught:
        overridden(start, *assignments)
    assert str(caught.value).startswith(message)


def test_a_bound_that_is_taken_away_comes_back_as_the_default():
    assert Correction(name="tis").override({"cap": None}) == Correction(name="tis")
    assert Correction(name="icepop").override({"high": None}) == Correction(name="icepop", high=None)


def test_a_bound_given_twice_is_refused():
    with pytest.raises(ConfigError, match="low"):
        Correction(name="icepop", low=0.6, filters=[{"low": 0.5, "high": 5.0}])
