"""Every named correction against a number: of its project's tests or documents, or worked out from its formula."""

import math
from dataclasses import dataclass, field

import pytest
import torch

from labkit.config import CORRECTIONS, GRPO, Correction
from labkit.rl import correction_from, grpo_loss


def padded(rows, value=0.0):
    """[B, T] FP64 from rows of different lengths."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=torch.float64)


def ones(rows):
    return [[1.0] * len(row) for row in rows]


def each(rows, *values):
    """One value for every token of a response."""
    return [[value] * len(row) for row, value in zip(rows, values, strict=True)]


# delta = p - g of four responses: the golden vector of peers-formulas-bugs.md 1.21 (two rows), SkyRL's base vector
# (test_off_policy_correction.py), the vector of nemo-rl.md 6; then r, the products W and the geometric means G.
KNOWN = [[-0.1, 0.5, 0.0], [0.0, -1.5], [0.5, -0.5, 1.0], [-0.5, 2.5, -0.2]]
# r  [.904837, 1.648721, 1]  [1, .223130]  [1.648721, .606531, 2.718282]  [.606531, 12.182494, .818731]
# W  1.491825                .223130       2.718282                       6.049647
# G  1.142631                .472367       1.395612                       1.822119
# mean exp|delta|  1.251298  2.740845      2.005241                       5.017539

# delta of three responses that verl's own functions were run on (rollout_corr_helper.py and core_algos.py, 2026-08).
VERL = [[0.1, -0.2, 0.3], [1.0, -0.5], [-0.05, 0.02, 0.0, 0.01]]
# r  [1.105171, .818731, 1.349859]  [2.718282, .606531]  [.951229, 1.020201, 1, 1.010050]
# W  1.221403                       1.648721             .980199
# G  1.068939                       1.284025             .995012
# mean k3  .024587                  .412406              .000370
VERL_TIS = [[1.105171, 0.818731, 1.2], [1.2, 0.606531], [0.951229, 1.020201, 1.0, 1.01005]]
VERL_GEO = {"low": 1 / 1.02, "high": 1 / 0.9}  # verl's "0.9_1.02" bounds 1 / G: drops the second response

# SkyRL's and Stable-RL's test of DPPO, one token each: from log-prob -1 to c
DPPO = {
    "delta": [[0.7], [-1.0], [0.1], [-1.0], [0.7], [-1.0]], "advantages": [1, -1, 1, 1, -1, 0],
    "applied": [[0], [0], [1], [1], [1], [0]],
}  # fmt: skip
CISPO = {
    "delta": [[0.0] * 3], "moved": [[math.log(0.5), 0.0, math.log(10)]],
    "applied": [[1] * 3], "push": [[0.5, 1.0, 5.0]],
}  # fmt: skip
GSPO = {
    "delta": [[0.0] * 2] * 4, "moved": [[0.0, 4e-4], [0.0, 1e-3], [-1e-3, 0.0], [1e-3, 0.0]],
    "advantages": [1, 1, -1, -1],
    "applied": [[1] * 2] * 4, "push": [[1.0002] * 2, [0] * 2, [0] * 2, [-1.0005001] * 2],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """`push` is -N dL/dc over N tokens: A w where the objective is PPO's and nothing has moved yet."""

    names: str
    delta: list[list[float]]  # p - g
    applied: list[list[float]]
    push: list[list[float]] | None = None
    moved: list[list[float]] | None = None  # c - p
    advantages: list[float] | None = None  # 1
    g: list[list[float]] | None = None  # -1
    bounds: dict[str, float] = field(default_factory=dict)


CASES = [
    # peers-formulas-bugs.md 1.21: without a correction; metrics only
    Case("none verl/disabled", KNOWN, ones(KNOWN)),
    # min(r, 2): 1.21 has the first two rows, SkyRL [1.6487, .6065, 2], NeMo RL the mean 1.141754
    Case(
        "tis nemo-rl/tis skyrl/token_tis slime/tis calibrated-clip verl/decoupled_token_is", KNOWN,
        [[0.904837, 1.648721, 1], [1, 0.22313], [1.648721, 0.606531, 2], [0.606531, 2, 0.818731]],
    ),
    # verl, token, threshold 1.2
    Case("tis verl/decoupled_token_is", VERL, VERL_TIS, bounds={"cap": 1.2}),
    # NeMo RL, tests of tis: q = .1, 1, 3 and max 2
    Case("nemo-rl/tis", [[math.log(0.1), 0.0, math.log(3)]], [[0.1, 1, 2]]),
    # slime, removed test_fsdp_mis.py: r = 2.7183, .6065, .6065
    Case("slime/tis", [[1.0, -0.5, -0.5]], [[2, 0.606531, 0.606531]]),
    Case("slime/icepop", [[1.0, -0.5, -0.5]], [[0, 0.606531, 0.606531]]),
    # the same and its second response r0 = exp(-5), and one with r < 1e-4: means over all eight tokens, .809318
    Case(
        "slime/mis", [[1.0, -0.5, -0.5], [-5.0, 0.3, -0.1], [-10.0, 0.0]],
        [[0, 0.749435, 0.749435], [0, 1.667897, 1.118025], [0, 0]],
    ),
    # r inside [.5, 5], else 0: 1.21 has mean .910712 for the first two rows, NeMo RL .475087 for the last
    Case(
        "icepop nemo-rl/icepop openrlhf/icepop verl/decoupled_token_icepop", KNOWN,
        [[0.904837, 1.648721, 1], [1, 0], [1.648721, 0.606531, 2.718282], [0.606531, 0, 0.818731]],
    ),
    # verl's test_rollout_corr.py: ratios .4, .8, 6
    Case("verl/decoupled_token_icepop", [[math.log(0.4), math.log(0.8), math.log(6)]], [[0, 0.8, 0]]),
    # verl, token "0.7_1.5"
    Case(
        "verl/decoupled_token_icepop verl/bypass_pg_token_icepop", VERL,
        [[1.105171, 0.818731, 1.349859], [0, 0], [0.951229, 1.020201, 1, 1.01005]], bounds={"low": 0.7, "high": 1.5},
    ),
    # min(W, 2)
    Case("sequence-tis verl/decoupled_seq_is verl/bypass_pg_is", KNOWN, each(KNOWN, 1.491825, 0.22313, 2, 2)),
    # verl, sequence, threshold 1.2
    Case("verl/decoupled_seq_is verl/bypass_pg_is", VERL, each(VERL, 1.2, 1.2, 0.980199), bounds={"cap": 1.2}),
    # verl, seq_sum_k1 "0.9_1.1" keeps the last response only
    Case(
        "verl/decoupled_seq_is_rs", VERL, each(VERL, 0, 0, 0.980199),
        bounds={"cap": 1.2, "low": 1 / 1.1, "high": 1 / 0.9},
    ),
    # W inside [.5, 2]
    Case("sequence-mask", KNOWN, each(KNOWN, 1.491825, 0, 0, 0)),
    # NeMo RL: G = 1.0005 is kept; its bounds are .999 and 1.002
    Case(
        "geometric-mask nemo-rl/seq-mask-tis", [[0.0005] * 3, [0.0021] * 3, [-0.0011] * 2, [0.4, -0.4]],
        [[1.0005] * 3, [0] * 3, [0] * 2, [1.491825, 0.67032]],
    ),
    # 1.21, r of a response kept by .9 <= G <= 1.2
    Case(
        "geometric-mask nemo-rl/seq-mask-tis", KNOWN,
        [[0.904837, 1.648721, 1], [0] * 2, [0] * 3, [0] * 3], bounds={"low": 0.9, "high": 1.2},
    ),
    # r, not bounded: NeMo RL's [.606531, 12.182494, .818731]
    Case(
        "importance-sampling nemo-rl/importance-sampling", KNOWN,
        [[0.904837, 1.648721, 1], [1, 0.22313], [1.648721, 0.606531, 2.718282], [0.606531, 12.182494, 0.818731]],
    ),
    # NeMo RL's test_loss_functions.py: W = .8187, GSPO's ratio .9086
    Case(
        "nemo-rl/sequence", [[-0.5, 0.5, -0.2]], [[0.818731] * 3], [[0.743866] * 3],
        moved=[[math.log(0.5), 0.0, math.log(1.5)]],
    ),
    # nemo-rl.md 6: mean exp|delta| 5.017539; those of the others are in 1.21
    Case("nemo-rl/seq-logprob-error", KNOWN, each(KNOWN, 1, 0, 0, 0)),
    # SkyRL's outlier test: r = 4.5e-5
    Case("veto", [[0.0, 0.0, -10.0], [0.5, -0.5, 1.0]], [[0] * 3, [1.648721, 0.606531, 2]]),
    # verl, seq_mean_k3 .01 and seq_mean_k1 "0.9_1.02", alone and with weights up to 1.2
    Case("k3-mask verl/decoupled_k3_rs", VERL, each(VERL, 0, 0, 1)),
    Case("verl/decoupled_k3_rs_seq_tis", VERL, each(VERL, 0, 0, 0.980199), bounds={"cap": 1.2}),
    Case("verl/decoupled_k3_rs_token_tis", VERL, [[0] * 3, [0] * 2, VERL_TIS[2]], bounds={"cap": 1.2}),
    Case("verl/decoupled_geo_rs verl/bypass_pg_geo_rs", VERL, each(VERL, 1, 0, 1), bounds=VERL_GEO),
    Case(
        "verl/decoupled_geo_rs_seq_tis verl/bypass_pg_geo_rs_seq_tis", VERL, each(VERL, 1.2, 0, 0.980199),
        bounds={**VERL_GEO, "cap": 1.2},
    ),
    Case(
        "verl/decoupled_geo_rs_token_tis verl/bypass_pg_geo_rs_token_tis", VERL, [VERL_TIS[0], [0] * 2, VERL_TIS[2]],
        bounds={**VERL_GEO, "cap": 1.2},
    ),
    # 1.21, bypass: rho = c / g, weight 1, clipped at 1.28
    Case(
        "bypass verl/bypass_ppo_clip", VERL, ones(VERL),
        [[1.105171, 0.818731, 0], [0, 0.606531], [0.951229, 1.020201, 1, 1.01005]],
    ),
    Case(
        "verl/bypass_ppo_clip_geo_rs", VERL, each(VERL, 1, 0, 1),
        [[1.105171, 0.818731, 0], [0, 0], [0.951229, 1.020201, 1, 1.01005]], bounds=VERL_GEO,
    ),
    Case(
        "verl/bypass_ppo_clip_k3_rs", VERL, each(VERL, 0, 0, 1),
        [[0] * 3, [0] * 2, [0.951229, 1.020201, 1, 1.01005]],
    ),
    # REINFORCE against g: the weight follows c, the push is A w
    Case(
        "verl/bypass_pg_is", [[0.0] * 3], [[1.491825] * 3], [[-1.491825] * 3], moved=[[-0.1, 0.5, 0.0]],
        advantages=[-1],
    ),
    # 1.21, exact on-policy: rho stays 1 wherever c goes, and nothing is clipped
    Case(
        "on-policy", KNOWN, [[0.904837, 1.648721, 1], [1, 0.22313], [1.648721, 0.606531, 2], [0.606531, 2, 0.818731]],
        moved=[[0.7, -0.7, 0], [0, 0], [1, 2, 3], [-1, -2, -3]],
    ),
    # TRL's test_grpo_trainer.py: rows at -2, -.5 and -2 under threshold 1; then its default .5, bound included
    Case(
        "off-policy-mask trl/off_policy_mask", each([[0] * 4] * 3, -2.0, -0.5, -2.0),
        each([[0] * 4] * 3, 1, 1, 0), advantages=[1, -1, -1], bounds={"high": 1.0},
    ),
    Case(
        "off-policy-mask trl/off_policy_mask", [[-0.5, -0.5], [-1.1, 0.0], [-1.1, 0.0]],
        [[1, 1], [0, 0], [1, 1]], advantages=[-1, -1, 1], g=[[-1, -1]] * 3,
    ),
    # slime's --opsm-delta 1e-4
    Case(
        "slime/opsm", [[-5e-5] * 2, [-2e-4] * 2, [-2e-4] * 2, [0.1, -0.1]], [[1] * 2, [0] * 2, [1] * 2, [1] * 2],
        advantages=[-1, -1, 1, -1],
    ),
    # SkyRL's test_losses.py, delta .2, and its A = 0 row, which has no gradient either way
    Case("dppo skyrl/dppo", **DPPO, push=[[0], [0], [1.105171], [0.367879], [-2.013753], [0]]),
    # the same with prime-rl's pull: minus 2e-3 (c - g), on rejected tokens too
    Case("prime-rl/dppo", **DPPO, push=[[-0.0014], [0.002], [1.104971], [0.369879], [-2.015153], [0.002]]),
    # |q_c - q_g| above .1 whatever the sign of A: .0387, .3729, -.2325, -.0953 from q = .367879
    Case(
        "prime-rl/ipo", [[0.1], [0.7], [-1.0], [-0.3]], [[1], [0], [0], [1]],
        [[1.104971], [-0.0014], [0.002], [-0.740218]], advantages=[1, -1, 1, -1],
    ),
    # prime-rl#3526, [.2, 5] and no pull: -A r
    Case(
        "prime-rl/icepop", KNOWN, [[1, 1, 1], [1, 1], [1, 1, 1], [1, 0, 1]],
        [[0.904837, 1.648721, 1], [1, 0.22313], [1.648721, 0.606531, 2.718282], [0.606531, 0, 0.818731]],
    ),
    # KL of "this token or another" both ways: .5 -> .75 .1438 and .1308; .5 -> .6 .0204; .001 <-> .05 .0463 and .1478
    Case(
        "kpop", [[math.log(1.5), math.log(1.2), math.log(50), -math.log(50)]], [[0, 1, 0, 0]],
        g=[[math.log(0.5), math.log(0.5), math.log(0.001), math.log(0.05)]],
    ),
    # Zheng et al. 2025, 3e-4 and 4e-4: s = exp(mean(c - p)), 1.0002 and .9995 and 1.0005
    Case("gspo trl/gspo", **GSPO),
    # OpenRLHF against the engine: s = G, clipped at 1.28
    Case("openrlhf/gspo", KNOWN, ones(KNOWN), each(KNOWN, 1.142631, 0.472367, 0, 0)),
    # SkyRL's test of CISPO: ratios .5, 1 and 10; TRL's and SkyRL's default range 0 to 5
    Case("cispo trl/cispo skyrl/cispo", **CISPO),
    # TRL, default clip_max 3
    Case("trl/sequence_mask", KNOWN, each(KNOWN, 1.491825, 0.22313, 2.718282, 0)),
    Case("trl/sequence_truncate", KNOWN, each(KNOWN, 1.491825, 0.22313, 2.718282, 3)),
    Case(
        "trl/token_mask", KNOWN,
        [[0.904837, 1.648721, 1], [1, 0.22313], [1.648721, 0.606531, 2.718282], [0.606531, 0, 0.818731]],
    ),
    Case(
        "trl/token_truncate", KNOWN,
        [[0.904837, 1.648721, 1], [1, 0.22313], [1.648721, 0.606531, 2.718282], [0.606531, 3, 0.818731]],
    ),
    # TRL#4772: delta = .012 goes past 3 at 92 tokens
    Case("trl/sequence_mask", [[0.012] * 91, [0.012] * 92], each([[0] * 91, [0] * 92], 2.980229, 0)),
    # OpenRLHF's .5 and 5 for all of its types: tis has a floor, seq-mask-tis doesn't bound r
    Case(
        "openrlhf/tis", KNOWN,
        [[0.904837, 1.648721, 1], [1, 0.5], [1.648721, 0.606531, 2.718282], [0.606531, 5, 0.818731]],
    ),
    Case(
        "openrlhf/seq-mask-tis", KNOWN,
        [[0.904837, 1.648721, 1], [0, 0], [1.648721, 0.606531, 2.718282], [0.606531, 12.182494, 0.818731]],
    ),
    # SkyRL's test_off_policy_correction.py
    Case("skyrl/sequence_tis", [[0.5, -0.5, 1.0], [1.0, 1.0, 1.0]], [[2.718282] * 3, [5] * 3]),
    Case("skyrl/geometric_mask", [[0.005] * 3, [0.1, -0.1, 0], [0.5] * 3], [[1] * 3, [1] * 3, [0] * 3]),
    Case("skyrl/product_mask", [[0.2, 0.1, 0], [1, 1, 1]], [[1] * 3, [0] * 3]),
    Case("skyrl/outlier_mask", [[0, 0, 5], [0, 0, -10], [0.5, -0.5, 1]], [[0] * 3, [0] * 3, [1] * 3]),
    Case("skyrl/token_mask", [[0, 2], [-2, 0]], [[1, 0], [0, 1]]),
    # GLM-5's f(r): r inside .8 and 1.2, and the push is A f(r)
    Case(
        "skyrl/rollout_is", [[0.0] * 3], [[1.105171, 0.904837, 0]], [[-1.105171, -0.904837, 0]],
        moved=[[0.1, -0.1, 0.3]], advantages=[-1],
    ),
    # AReaL's test_rejection_sampling.py: [0, .5, 1] weighs exp(.5) throughout; [0, 4, 0] is clamped to 3; D = 2 to 5
    Case("areal/sequence-mask", [[0, 0.5, 1], [2, 2, 2]], [[1.648721] * 3, [0] * 3]),
    Case("areal/sequence-clamp", [[0, 4, 0], [0, 0.5, 1]], [[3] * 3, [1.648721] * 3], bounds={"cap": 3.0}),
    Case("areal/token-clamp", [[2.0, 0.0]], [[5, 1]]),
    Case("areal/token-mask", [[0, 1, 0]], [[1, 0, 1]], bounds={"high": 2.0}),
]  # fmt: skip
NAMED_CASES = [(name, case) for case in CASES for name in case.names.split()]


def test_every_name_has_a_number():
    assert {name for name, _ in NAMED_CASES} == set(CORRECTIONS)


@pytest.mark.parametrize(("name", "case"), NAMED_CASES, ids=[name for name, _ in NAMED_CASES])
def test_a_known_number(name, case):
    delta, applied = padded(case.delta, 7.0), padded(case.applied)
    mask = padded(ones(case.delta)).bool()
    g = torch.full_like(delta, -1.0) if case.g is None else padded(case.g)
    p = g + delta
    c = p if case.moved is None else p + padded(case.moved)
    advantages = torch.ones(len(g)) if case.advantages is None else torch.tensor(case.advantages)
    weights, push = update(name, g, p, c, advantages, mask, **case.bounds)
    torch.testing.assert_close(weights.applied.double(), applied, atol=1e-6, rtol=1e-6)
    assert weights.keep.equal(mask & (applied != 0))
    expected = advantages[:, None] * applied if case.push is None else padded(case.push)
    torch.testing.assert_close(push.double(), expected.double(), atol=1e-6, rtol=2e-6)


def update(name, g, p, c, advantages, mask, **bounds):
    """The weights, and -N dL/dc."""
    chosen = Correction(name=name, **bounds)
    weights = correction_from(chosen)(g, p, mask, advantages, c)
    c = c.detach().clone().requires_grad_()
    terms = grpo_loss(
        c, g, p, advantages, weights, mask, settings=GRPO(), correction=chosen, num_tokens=1, num_sequences=1
    )
    terms.loss.backward()
    return weights, -c.grad
