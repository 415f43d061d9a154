"""Group-relative advantages: how much better an answer is than the other answers to the same prompt.

rewards_B holds N prompts of G answers each, the answers to one prompt side by side (B = N * G). Per group:

    group           b_i = mean of all G rewards             s_i = their standard deviation
    leave-one-out   b_i = mean of the other G - 1 rewards   s_i = standard deviation of those others

    A_i = R_i - b_i                          not normalised
    A_i = (R_i - b_i) / (s_i + 1e-6)         normalised, where s_i > 0; else R_i - b_i

Standard deviations are unbiased (divided by n - 1, n = G or G - 1). A group whose rewards are all equal, and
a group of one, has advantage exactly 0 and so no gradient. Equality is tested on the rewards themselves: the
rounding error of a mean divided by 1e-6 would be a large advantage.

Leave-one-out with normalisation has a quirk, kept because the published curves have it: with one right answer
of four the others of the right one have no spread, so it gets the unnormalised 1.0, and the wrong ones
-0.577.

Computed in FP64, returned as FP32 [B]. Raises ValueError for a reward that isn't finite, for a batch which
isn't whole groups and for an unknown baseline. Sources: Shao et al. 2024 (DeepSeekMath, GRPO); Ahmadian et
al. 2024 (RLOO); NeMo RL, calculate_baseline_and_std_per_prompt.
``normalize=False`` is what Dr. GRPO does. Left out: resampling of groups without spread (DAPO).
"""

import torch
from torch import Tensor

EPSILON = 1e-6
BASELINES = ("group", "leave-one-out")


def group_advantages(rewards_B: Tensor, group_size: int, baseline: str = "group", normalize: bool = True) -> Tensor:
    _check(rewards_B, group_size, baseline)
    rewards_NG = rewards_B.detach().double().view(-1, group_size)
    compared_NGK = _compared_with(rewards_NG, baseline)
    advantages_NG = rewards_NG - compared_NGK.mean(-1)
    if normalize:
        deviation_NG = _deviation(compared_NGK)
        advantages_NG = torch.where(deviation_NG > 0, advantages_NG / (deviation_NG + EPSILON), advantages_NG)
    return torch.where(_all_equal(rewards_NG)[:, None], 0.0, advantages_NG).flatten().float()


def _check(rewards_B: Tensor, group_size: int, baseline: str) -> None:
    if baseline not in BASELINES:
        raise ValueError(f"unknown baseline {baseline!r}: choose one of {', '.join(BASELINES)}")
    if group_size < 1 or rewards_B.numel() % group_size:
        raise ValueError(f"{rewards_B.numel()} rewards don't make whole groups of {group_size}")
    if not torch.isfinite(rewards_B).all():
        rows = torch.nonzero(~torch.isfinite(rewards_B)).flatten().tolist()
        raise ValueError(f"rewards must be finite numbers; look at the task's reward for rows {rows[:8]}")


def _compared_with(rewards_NG: Tensor, baseline: str) -> Tensor:
    """For each answer the K rewards which it's compared with: its whole group, or the others of its group."""
    G = rewards_NG.shape[1]
    if baseline == "group" or G == 1:
        return rewards_NG[:, None, :].expand(-1, G, -1)
    others_GK = [[other for other in range(G) if other != answer] for answer in range(G)]
    return rewards_NG[:, others_GK]


def _deviation(values_NGK: Tensor) -> Tensor:
    """Unbiased standard deviation; exactly 0 for equal values and for a single one."""
    squares_NG = (values_NGK - values_NGK.mean(-1, keepdim=True)).square().sum(-1)
    deviation_NG = (squares_NG / max(values_NGK.shape[-1] - 1, 1)).sqrt()
    return torch.where(_all_equal(values_NGK), 0.0, deviation_NG)


def _all_equal(values: Tensor) -> Tensor:
    return values.amax(-1) == values.amin(-1)
