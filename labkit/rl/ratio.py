"""The importance ratio exp(a - b) of two log-probabilities of a sampled token, without overflow or NaN.

Two names of log-probability meet here (nats, [B, T] sequences by response tokens):

    delta = p - g    r   = exp(delta)    trainer before the update against engine: the mismatch
    delta = c - p    rho = exp(delta)    trainer now against trainer before the update: PPO's ratio

Three rules keep every later sum finite, and everything in labkit.rl goes through them:

1. A token counts when the mask says that it was sampled and all of its log-probs are finite (an engine that
   returns NaN or -inf for a token must not poison a batch; such tokens are counted as nan_count).
2. Tokens that don't count get delta = 0 by torch.where *before* any exponential or product, so that neither a
   value nor a gradient is ever inf * 0 = NaN.
3. exp saturates at exp(40) = 2.4e17, whose square still fits FP32. No ratio of a working system comes near;
   one that does stays visibly absurd instead of becoming inf.

Raises ValueError when shapes differ: broadcasting [B] against [B, T] would give a number, and a wrong one.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 40.0


def counted(mask: Tensor, *logprobs: Tensor) -> Tensor:
    """True on the tokens that count: sampled (mask, bool or 0/1) and every log-prob finite."""
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("the mask holds other values than 0 and 1: pass a bool mask, True on sampled tokens")
    count = mask.bool()
    for values in logprobs:
        if values.shape != mask.shape:
            raise ValueError(
                f"log-probs of shape {list(values.shape)} don't match the mask {list(mask.shape)}: "
                "pass both as [sequences, response tokens]"
            )
        count = count & torch.isfinite(values)
    return count


def log_ratio(numerator: Tensor, denominator: Tensor, count: Tensor) -> Tensor:
    """numerator - denominator where the token counts, 0 elsewhere."""
    return torch.where(count, numerator - denominator, 0.0)


def ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()
