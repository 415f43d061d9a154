import pytest
import torch

from labkit.explorer import AttentionExplorer
from labkit.explorer.attention import measure, probabilities, scales_of, tensors

ALL = frozenset("qkvp")


def found(size=20.0, channel="none", kind="calibrated", growth=1.0, parts=ALL, sharpness=2.0, keys=128):
    t = tensors(keys, size, sharpness, channel)
    return measure(t, parts, scales_of(t, kind, growth, "e4m3"), "e4m3")


def test_nothing_in_fp8_is_exact_softmax():
    t = tensors(64, 20.0, 2.0, "none")
    scores = t.q.float() @ t.k.float().mT * t.sm_scale
    assert float(scores.std(-1).mean()) == pytest.approx(2.0, rel=1e-3)
    p = probabilities(t, frozenset(), scales_of(t, "unit", 1.0, "e4m3"), "e4m3")
    torch.testing.assert_close(p, scores.softmax(-1)[0])
    nothing = found(parts=frozenset())
    assert (nothing.ticked, nothing.moved) == (0.0, 0.0)


def test_each_part_alone_and_all_together():
    alone = found().alone
    assert alone["v"] == pytest.approx(0.0265, rel=0.1)
    assert alone["p"] < alone["v"] < alone["q"]
    together = sum(error**2 for error in alone.values()) ** 0.5
    assert found().ticked == pytest.approx(together, rel=0.15)
    assert found(parts=frozenset("v")).ticked == alone["v"]
    assert found(parts=frozenset("v")).moved == 0


def test_sharper_attention_pays_more_for_q_and_k():
    flat, usual, sharp = (found(sharpness=s).alone for s in (0.0, 1.0, 6.0))
    assert flat["q"] == flat["k"] == flat["p"] == 0  # every weight is 1, and the mean of v remains
    assert sharp["k"] > 2 * usual["k"]
    assert sharp["q"] > 2 * usual["q"]
    assert sharp["v"] == pytest.approx(usual["v"], rel=0.1)


def test_a_missing_scale_shows_beyond_448_and_for_tiny_values_only():
    """Unit scale: harmless inside the format, so models with QK-norm look fine without calibration."""
    for size in (1.0, 20.0, 448.0):
        assert found(size, kind="unit").ticked == pytest.approx(found(size).ticked, rel=0.25)
    assert found(900.0, kind="unit").ticked > 2.5 * found(900.0).ticked
    assert found(900.0, kind="unit").clipped["k"] > 0.02
    assert found(0.01, kind="unit").ticked > 0.3
    assert found(900.0).clipped == {"k": 0.0, "v": 0.0}


def test_a_stale_scale_clips_an_outlier_channel_that_varies_and_attention_moves():
    moved = [found(channel="varies", growth=growth).moved for growth in (1.0, 1.5, 2.0, 4.0, 8.0)]
    assert moved == sorted(moved)
    assert moved[2] > 2 * moved[0]


def test_a_constant_channel_may_be_clipped_for_nothing():
    fresh, stale = found(channel="constant"), found(channel="constant", growth=8.0)
    assert stale.clipped["k"] > 0.01
    assert stale.alone["k"] == pytest.approx(fresh.alone["k"], rel=0.1)
    assert stale.moved == pytest.approx(fresh.moved, rel=0.1)


def test_explorer_reads_its_own_numbers():
    explorer = AttentionExplorer()
    assert "V costs its own rounding" in explorer.view.reading
    explorer.set(scales="unit", size=900.0)
    assert "ends at 448" in explorer.view.reading
    growth = explorer.controls["growth"]
    assert (growth.disabled, growth.description) == (True, "scale 1 isn't stale")
    explorer.set(size=20.0)
    assert "do no harm" in explorer.view.reading
    explorer.set(scales="calibrated", growth=2.0)
    assert (growth.disabled, growth.description) == (False, "growth since cal.")
    assert "grew by 2.00" in explorer.view.reading
    explorer.set(channel="constant")
    assert "cancels in softmax" in explorer.view.reading
    explorer.set(q=False, k=False, v=False, p=False)
    assert "Tick Q, K, V or P" in explorer.view.reading
