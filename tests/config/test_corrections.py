"""What every name stands for, in the words of the project that it comes from."""

import pytest

from labkit.config import CORRECTIONS, Correction, Filter

CUSTOM = "custom"


def window(low=None, high=None, over="token", statistic="ratio", when="always"):
    return Filter(statistic=statistic, over=over, low=low, high=high, when=when)


def weight(level, cap=None, floor=None, filters=(), **others):
    return {"weight": level, "cap": cap, "floor": floor, "filters": tuple(filters), **others}


def keeping(*filters, **others):
    return {"filters": filters, **others}


def nemo_rl(truncation, low=None, high=None):
    """truncated_importance_sampling_type; _ratio_min and _ratio."""
    if truncation == "tis":
        return weight("token", high, low)
    return weight("token", filters=[window(low, high, "token" if truncation == "icepop" else "mean")])


def verl(rollout_is, threshold, rollout_rs, rs_threshold, bypass=False, loss_type="ppo_clip"):
    """RolloutCorrectionConfig. A text "lo_hi" is a window; k1 is log(g / p), so that its window bounds 1 / r."""
    filters, cap = [], None
    if rollout_is and isinstance(threshold, str):
        filters.append(window(*map(float, threshold.split("_"))))
    elif rollout_is:
        cap = threshold
    if rollout_rs:
        over, statistic = rollout_rs.removeprefix("seq_").split("_")
        if statistic == "k1":
            low, high = (1 / float(bound) for bound in reversed(rs_threshold.split("_")))
            filters.append(window(low, high, over))
        else:
            filters.append(window(None, rs_threshold, over, statistic))
    return weight(
        rollout_is or "none", cap, filters=filters, old_policy="rollout" if bypass else "trainer",
        objective="reinforce" if loss_type == "reinforce" else "ppo",
    )  # fmt: skip


def trl(mode, clip_max=3.0, clip_min=None):
    """vllm_importance_sampling_mode, _clip_max and _clip_min."""
    level, action = mode.split("_")
    if action == "truncate":
        return weight(level, clip_max, clip_min)
    return weight(level, filters=[window(clip_min, clip_max, "sum" if level == "sequence" else "token")])


def openrlhf(kind, low=0.5, high=5.0):
    """is_correction_type and is_correction_threshold."""
    if kind == "tis":
        return weight("token", high, low)
    return weight("token", filters=[window(low, high, "token" if kind == "icepop" else "mean")])


def areal(level, action, upper=5.0, lower=None):
    """rejection_sampling with metric "ratio" and agg "mean"."""
    of_sequence = level == "sequence"
    if action == "clamp":
        return weight("geometric" if of_sequence else "token", upper, lower)
    return weight(
        "geometric" if of_sequence else "token", filters=[window(lower, upper, "mean" if of_sequence else "token")]
    )


BYPASS = {"old_policy": "rollout"}
OFF_POLICY = {"over": "mean", "statistic": "k1", "when": "negative"}
BINARY_TV = window(-0.2, 0.2, statistic="probability", when="outward")
GSPO = {"objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}
CISPO = {"objective": "cispo", "clip_low": 1.0, "clip_high": 4.0}  # from 0 to 5
GEO, K3 = ("seq_mean_k1", "0.999_1.001"), ("seq_mean_k3", 0.01)
SEQUENCE, TOKEN, NO = ("sequence", 2.0), ("token", 2.0), (None, None)
PPO, PG = (True, "ppo_clip"), (True, "reinforce")

METHODS = {
    "none": {},
    "tis": weight("token", 2.0),
    "icepop": weight("token", filters=[window(0.5, 5.0)]),
    "sequence-tis": weight("sequence", 2.0),
    "sequence-mask": weight("sequence", filters=[window(0.5, 2.0, "sum")]),
    "geometric-mask": weight("token", filters=[window(0.999, 1.002, "mean")]),
    "importance-sampling": weight("token"),
    "veto": weight("token", 2.0, filters=[window(1e-4, None, "max")]),
    "k3-mask": keeping(window(None, 0.01, "mean", "k3")),
    "kpop": keeping(window(None, 0.1, statistic="binary-kl")),
    "bypass": BYPASS,
    "on-policy": weight("token", 2.0, old_policy="current"),
    "off-policy-mask": keeping(window(None, 0.5, **OFF_POLICY)),
    "dppo": keeping(BINARY_TV, **BYPASS, objective="ratio"),
    "gspo": GSPO,
    "cispo": CISPO,
    "calibrated-clip": weight("token", 2.0, calibrate_clip_every=20),
}
NEMO_RL = {
    "nemo-rl/tis": nemo_rl("tis", None, 2.0),
    "nemo-rl/icepop": nemo_rl("icepop", 0.5, 5.0),
    "nemo-rl/seq-mask-tis": nemo_rl("seq-mask-tis", 0.999, 1.002),
    "nemo-rl/importance-sampling": weight("token"),
    "nemo-rl/sequence": weight("sequence", objective="gspo"),
    "nemo-rl/seq-logprob-error": keeping(window(None, 2.0, "mean", "mult-error"), denominator="drop"),
}
VERL = {  # verl/trainer/config/algorithm.py: rollout_is, rollout_rs, bypass_mode and loss_type
    "verl/decoupled_token_is": verl(*TOKEN, *NO),
    "verl/decoupled_seq_is": verl(*SEQUENCE, *NO),
    "verl/decoupled_token_icepop": verl("token", "0.5_5.0", *NO),
    "verl/decoupled_seq_is_rs": verl(*SEQUENCE, "seq_sum_k1", "0.5_2.0"),
    "verl/decoupled_geo_rs": verl(*NO, *GEO),
    "verl/decoupled_geo_rs_seq_tis": verl(*SEQUENCE, *GEO),
    "verl/decoupled_geo_rs_token_tis": verl(*TOKEN, *GEO),
    "verl/decoupled_k3_rs": verl(*NO, *K3),
    "verl/decoupled_k3_rs_seq_tis": verl(*SEQUENCE, *K3),
    "verl/decoupled_k3_rs_token_tis": verl(*TOKEN, *K3),
    "verl/bypass_ppo_clip": verl(*NO, *NO, *PPO),
    "verl/bypass_ppo_clip_geo_rs": verl(*NO, *GEO, *PPO),
    "verl/bypass_ppo_clip_k3_rs": verl(*NO, *K3, *PPO),
    "verl/bypass_pg_is": verl(*SEQUENCE, *NO, *PG),
    "verl/bypass_pg_token_icepop": verl("token", "0.5_5.0", *NO, *PG),
    "verl/bypass_pg_geo_rs": verl(*NO, *GEO, *PG),
    "verl/bypass_pg_geo_rs_seq_tis": verl(*SEQUENCE, *GEO, *PG),
    "verl/bypass_pg_geo_rs_token_tis": verl(*TOKEN, *GEO, *PG),
    "verl/disabled": verl(*NO, *NO),
}
TRL = {
    **{f"trl/{mode}": trl(mode) for mode in ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate")},
    "trl/off_policy_mask": keeping(window(None, 0.5, **OFF_POLICY)),
    "trl/gspo": GSPO,
    "trl/cispo": CISPO,
}
OPENRLHF = {
    **{f"openrlhf/{kind}": openrlhf(kind) for kind in ("tis", "icepop", "seq-mask-tis")},
    "openrlhf/gspo": {**BYPASS, "objective": "gspo"},
}
SKYRL = {
    "skyrl/token_tis": weight("token", 2.0),
    "skyrl/sequence_tis": weight("sequence", 5.0),
    "skyrl/geometric_mask": keeping(window(0.99, 1.01, "mean")),
    "skyrl/product_mask": keeping(window(0.5, 2.0, "sum")),
    "skyrl/outlier_mask": keeping(window(1e-4, 100.0, "max")),
    "skyrl/token_mask": keeping(window(0.5, 2.0)),
    "skyrl/rollout_is": weight("token", filters=[window(0.8, 1.2)], **BYPASS, objective="reinforce"),
    "skyrl/cispo": CISPO,
    "skyrl/dppo": keeping(BINARY_TV, **BYPASS, objective="ratio"),
}
PRIME_RL = {
    "prime-rl/dppo": keeping(BINARY_TV, **BYPASS, objective="ratio", anchor=1e-3),
    "prime-rl/ipo": keeping(window(-0.1, 0.1, statistic="probability"), **BYPASS, objective="ratio", anchor=1e-3),
    "prime-rl/icepop": keeping(window(0.2, 5.0), **BYPASS, objective="ratio"),
}
AREAL = {
    f"areal/{level}-{action}": areal(level, action) for level in ("token", "sequence") for action in ("mask", "clamp")
}
SLIME = {
    "slime/tis": weight("token", 2.0),
    "slime/icepop": weight("token", filters=[window(0.5, 2.0)]),
    "slime/mis": weight("token", 2.0, filters=[window(0.5, 2.0), window(1e-4, None, "max")], normalize=True),
    "slime/opsm": keeping(window(None, 1e-4, **OFF_POLICY)),
}  # fmt: skip
DOCUMENTED = METHODS | NEMO_RL | VERL | TRL | OPENRLHF | SKYRL | PRIME_RL | AREAL | SLIME


def test_every_name_is_documented_here():
    assert set(DOCUMENTED) == set(CORRECTIONS)
    assert len(VERL) == 19


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_name_is_composed_as_its_project_documents(name):
    documented = Correction(name=CUSTOM, **DOCUMENTED[name])
    assert Correction(name=name).override({"name": CUSTOM}) == documented
    assert CORRECTIONS[name].composition == documented


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_name_has_one_line_of_text_and_bounds_that_can_be_changed(name):
    known, correction = CORRECTIONS[name], Correction(name=name)
    assert known.text
    assert "\n" not in known.text
    assert known.source or "/" not in name
    assert list(correction.bounds) == list(known.bounds)
    for bound, value in correction.bounds.items():
        wider = value * (0.9 if value < 1 and bound in ("floor", "low") else 1.1)
        changed = Correction(name=name, **{bound: wider})
        assert changed.bounds == correction.bounds | {bound: wider}
        assert correction.override({bound: wider}) == changed


def test_a_project_has_no_two_names_for_one_composition():
    seen = {}
    for name, known in CORRECTIONS.items():
        project = name.partition("/")[0] if "/" in name else ""
        assert seen.setdefault((project, known.composition), name) == name
