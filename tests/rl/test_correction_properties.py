"""What holds for every named correction, and for those composed of filters at random."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from labkit.config import CORRECTIONS, Correction, Filter
from labkit.rl import Weights, correction, correction_from, weight_statistics

NAN = math.nan


def weigh(name, g, p, mask, current=None, **bounds) -> Weights:
    """With advantages 1, -1, 1, ... for those that ask."""
    advantages = torch.where(torch.arange(len(g)) % 2 == 0, 1.0, -1.0) if g.dim() == 2 else torch.tensor(1.0)
    return correction(name, **bounds)(g, p, mask, advantages, current)


def assert_same(one: Weights, other: Weights) -> None:
    for entry in dataclasses.fields(Weights):
        a, b = getattr(one, entry.name), getattr(other, entry.name)
        if isinstance(a, torch.Tensor):
            a, b = {"": a}, {"": b}
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            assert all(torch.equal(a[key], b[key]) for key in a), entry.name
        else:
            assert a == b, entry.name


deltas = st.lists(st.lists(st.floats(-60, 60), min_size=4, max_size=4), min_size=1, max_size=5)
moves = st.lists(st.floats(-3, 3), min_size=4, max_size=4)
names = st.sampled_from(list(CORRECTIONS))
FILTERS = [
    Filter(low=0.5, high=5.0), Filter(over="mean", low=0.9, high=1.1), Filter(over="sum", high=3.0),
    Filter(over="max", low=1e-4), Filter(statistic="k1", over="mean", high=0.5, when="negative"),
    Filter(statistic="k3", over="mean", high=0.01), Filter(statistic="mult-error", over="max", high=2.0),
    Filter(statistic="probability", low=-0.2, high=0.2, when="outward"), Filter(statistic="binary-kl", high=0.1),
]  # fmt: skip
several = st.lists(st.sampled_from(FILTERS), min_size=1, max_size=4, unique_by=lambda each: each.key)


def log_probs(rows):
    """g, p and a mask that leaves out the last token of every other response; p - g are the rows, both below 0."""
    delta = torch.tensor(rows, dtype=torch.float64)
    mask = torch.ones_like(delta, dtype=torch.bool)
    mask[::2, -1] = False
    return -1.0 - delta.clamp(min=0), -1.0 + delta.clamp(max=0), mask


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_perfect_match_is_left_alone(name):
    _, p, mask = log_probs([[-0.1, 0.5, 0.0], [0.0, -1.5, 1.0]])
    weights = weigh(name, p, p, mask)
    assert weights.keep.equal(mask)
    assert weights.applied.equal(mask.float())
    assert not weights.outside.any()


@settings(max_examples=150)
@given(deltas, moves, names, st.integers(1, 3))
def test_rows_are_independent_and_padding_changes_nothing(rows, move, name, padding):
    g, p, mask = log_probs(rows)
    c = p + torch.tensor(move, dtype=torch.float64)
    weights = weigh(name, g, p, mask, c)
    wide = [pad(g, (0, padding), value=NAN), pad(p, (0, padding), value=3.0), pad(mask, (0, padding), value=False)]
    padded = weigh(name, *wide, pad(c, (0, padding), value=-math.inf))
    torch.testing.assert_close(padded.applied[:, :4], weights.applied)
    assert padded.keep[:, :4].equal(weights.keep)
    assert not padded.valid[:, 4:].any()
    assert not padded.counting[:, 4:].any()
    assert weight_statistics(padded, wide[2]) == pytest.approx(weight_statistics(weights, mask), nan_ok=True)
    for row in range(0, len(rows), 2):  # rows with advantage 1
        alone = weigh(name, g[[row]], p[[row]], mask[[row]], c[[row]])
        if not Correction(name=name).normalize:
            assert_same(alone, weights[[row]])


@settings(max_examples=150)
@given(deltas, moves, names)
def test_weights_are_finite_and_within_their_bounds(rows, move, name):
    g, p, mask = log_probs(rows)
    weights, chosen = weigh(name, g, p, mask, p + torch.tensor(move)), Correction(name=name)
    assert torch.isfinite(weights.applied).all()
    assert torch.isfinite(weights.raw).all()
    assert (weights.applied[~weights.keep] == 0).all()
    assert weights.valid.equal(mask)
    assert (weights.raw[~mask] == 0).all()
    if not chosen.normalize:
        kept = weights.applied[weights.keep]
        assert (kept <= (math.inf if chosen.cap is None else chosen.cap)).all()
        assert (kept >= (chosen.floor or 0)).all()
    assert 0.0 <= weight_statistics(weights, mask)["ess"] <= 1 + 1e-9


@settings(max_examples=100)
@given(deltas, several)
def test_a_token_counts_if_every_filter_keeps_it(rows, chosen):
    batch = log_probs(rows)
    advantages = torch.ones(len(rows)) - 2 * (torch.arange(len(rows)) % 2)
    together = correction_from(Correction(weight="token", filters=tuple(chosen)))(*batch, advantages)
    turned = correction_from(Correction(weight="token", filters=tuple(reversed(chosen))))(*batch, advantages)
    alone = [correction_from(Correction(weight="token", filters=(one,)))(*batch, advantages) for one in chosen]
    assert together.keep.equal(torch.stack([each.keep for each in alone]).all(0))
    assert together.keep.equal(turned.keep)
    for one, each in zip(chosen, alone, strict=True):
        assert together.rejected[one.key].equal(each.rejected[one.key])
        assert together.judged[one.key].equal(each.judged[one.key])
    assert together.applied.equal(torch.where(together.keep, together.raw, 0.0))


@settings(max_examples=100)
@given(deltas, several, st.sampled_from(["none", "token", "sequence", "geometric"]))
def test_the_denominator_is_all_that_drop_changes(rows, chosen, weight):
    batch = (*log_probs(rows), torch.ones(len(rows)))
    keep, drop = (
        correction_from(Correction(weight=weight, filters=tuple(chosen), denominator=denominator))(*batch)
        for denominator in ("keep", "drop")
    )
    assert_same(dataclasses.replace(drop, counting=keep.counting), keep)
    assert keep.counting.equal(keep.valid)
    assert drop.counting.equal(drop.keep)


@settings(max_examples=100)
@given(deltas, several, st.sampled_from(["token", "sequence", "geometric"]), st.sampled_from([None, 2.0]))
def test_normalised_weights_average_to_1_rejected_ones_included(rows, chosen, weight, cap):
    g, p, mask = log_probs(rows)
    chosen = tuple(one for one in chosen if one.when == "always")
    alone, filtered = (
        correction_from(Correction(weight=weight, cap=cap, normalize=True, filters=filters))(g, p, mask)
        for filters in ((), chosen)
    )
    mean = alone.applied[mask].mean() if weight == "token" else alone.applied[:, 0].mean()
    assert mean.item() == pytest.approx(1.0, rel=1e-5)
    assert filtered.applied.equal(torch.where(filtered.keep, alone.applied, 0.0))


def test_a_batch_without_any_weight_is_normalised_to_nothing():
    rule = correction_from(Correction(weight="sequence", cap=2.0, normalize=True))
    assert rule(torch.zeros(1, 2), torch.tensor([[-800.0, -800.0]]), torch.ones(1, 2)).applied.tolist() == [[0.0, 0.0]]
    assert rule(torch.zeros(1, 3), torch.zeros(1, 3), torch.zeros(1, 3)).applied.tolist() == [[0.0] * 3]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_verdict_follows_the_update_exactly_where_it_should(name):
    generator = torch.Generator().manual_seed(0)
    g = -3 * torch.rand(40, 3, generator=generator) - 0.2
    p = g + 0.3 * torch.randn(40, 3, generator=generator)
    c = p + 0.5 * torch.randn(40, 3, generator=generator)
    mask, chosen = torch.ones(40, 3), Correction(name=name)
    before, after, afresh = weigh(name, g, p, mask), weigh(name, g, p, mask, c), weigh(name, g, c, mask)
    if not chosen.judges_current:
        assert_same(after, before)
    elif chosen.old_policy == "rollout":
        assert_same(after, afresh)
    else:
        assert after.keep.equal(afresh.keep)
        assert not after.keep.equal(before.keep)
        assert after.raw.equal(before.raw)


def test_some_sequences_of_a_batch():
    weights = weigh("slime/mis", *log_probs([[-0.1, 0.5, 0.0], [0.0, -1.5, 1.0]]))
    some = weights[torch.tensor([1])]
    assert some.applied.equal(weights.applied[1:])
    assert some.valid.equal(weights.valid[1:])
    assert {key: value.shape for key, value in some.rejected.items()} == {"ratio": (1, 3), "max_ratio": (1, 3)}
    assert some.per_sequence
