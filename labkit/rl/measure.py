"""What a step reports: metrics, tokens of each kind, seconds per phase, sampled rollouts."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from labkit.models.rollouts import Rollouts
from labkit.rl.batching import MiniBatch
from labkit.rl.corrections import Weights
from labkit.rl.episodes import Scored
from labkit.rl.loss import LossTerms
from labkit.rl.metrics import mismatch, weight_statistics
from labkit.tasks import Problem
from labkit.training import Update


class Stopwatch:
    """Seconds per phase, by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - start

    @property
    def seconds(self) -> dict[str, float]:
        return dict(self._seconds)

    @property
    def total(self) -> float:
        return sum(self._seconds.values())


def step_metrics(
    rollouts: Rollouts, rewards_B: Tensor, advantages_B: Tensor, p_BR: Tensor, entropy_BR: Tensor,
    weights: Weights, updates: Sequence[Update], losses: Sequence[LossTerms],
) -> dict[str, float | None]:  # fmt: skip
    mask_BR = rollouts.mask_BR
    stepped = [update.grad_norm for update in updates if not update.skipped]
    return {
        "reward": float(rewards_B.mean()),
        "accuracy": float((rewards_B >= 1.0).float().mean()),
        "response_length": float(rollouts.lengths_B.float().mean()),
        "truncated_share": float((~rollouts.finished_B).float().mean()),
        "zero_advantage_share": float((advantages_B == 0).float().mean()),
        "entropy": float(entropy_BR[mask_BR].mean()),
        "lr": updates[-1].learning_rate,
        "grad_norm": sum(stepped) / len(stepped) if stepped else None,
        **LossTerms.summary(losses, num_updates=len(updates)),
        **mismatch(rollouts.logprobs_BR, p_BR, mask_BR),
        **weight_statistics(weights, mask_BR),
    }


def step_tokens(rollouts: Rollouts, mini_batches: Sequence[MiniBatch]) -> dict[str, int]:
    """Prompt and generated tokens of the batch; tokens that passed through the update; those plus padding."""
    prompt_B = rollouts.prompt_width - rollouts.starts_B
    trained = padded = 0
    for rows in (rows for mini_batch in mini_batches for rows in mini_batch.carrying):
        trained += int((prompt_B[rows] + rollouts.lengths_B[rows]).sum())
        padded += len(rows) * (rollouts.prompt_width + int(rollouts.lengths_B[rows].max()))
    return {
        "prompt": int(prompt_B.sum()),
        "generated": rollouts.num_tokens,
        "trained": trained,
        "padded": padded,
    }


def step_samples(
    count: int, problems: Sequence[Problem], rollouts: Rollouts, scored: Scored, advantages_B: Tensor,
    p_BR: Tensor, weights: Weights,
) -> list[dict[str, Any]]:  # fmt: skip
    """`count` rollouts spread evenly over the batch, with the log-probs of every response token."""
    samples_per_prompt = len(rollouts) // len(problems)
    chosen = torch.linspace(0, len(rollouts) - 1, min(count, len(rollouts))).long().tolist()
    samples = []
    for row in chosen:
        length = int(rollouts.lengths_B[row])
        problem = problems[row // samples_per_prompt]
        samples.append(
            {
                "prompt": problem.prompt,
                "answer": problem.answer,
                "completion": scored.completions[row],
                "reward": float(scored.rewards_B[row]),
                "finished": bool(rollouts.finished_B[row]),
                "advantage": float(advantages_B[row]),
                "tokens": rollouts.response(row),
                "g": rollouts.logprobs_BR[row, :length].tolist(),
                "p": p_BR[row, :length].tolist(),
                "weight": weights.applied[row, :length].tolist(),
            }
        )
    return samples
