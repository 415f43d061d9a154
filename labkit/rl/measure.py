"""What a step reports: metrics, tokens of each kind, seconds per phase, sampled rollouts."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.models.rollouts import Rollouts
from labkit.rl.batching import MiniBatch
from labkit.rl.corrections import Weights
from labkit.rl.episodes import Scored
from labkit.rl.loss import LossTerms
from labkit.rl.metrics import mismatch, weight_statistics
from labkit.rollout import Engine
from labkit.tasks import Problem
from labkit.training import Update


@dataclass(frozen=True)
class Sampled:
    """The batch of a step: B = prompts x group_size sequences, R response columns."""

    problems: list[Problem]
    rollouts: Rollouts
    scored: Scored
    advantages_B: Tensor
    mini_batches: list[MiniBatch]
    everything: list[Tensor]  # all their micro-batches
    p_BR: Tensor
    entropy_BR: Tensor
    routers: dict[str, float]  # their metrics (labkit.rl.routing)


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
    batch: Sampled, weights: Weights, updates: Sequence[Update], losses: Sequence[LossTerms]
) -> dict[str, float | None]:
    rollouts, rewards_B = batch.rollouts, batch.scored.rewards_B
    mask_BR = rollouts.mask_BR
    stepped = [update.grad_norm for update in updates if not update.skipped]
    return {
        "reward": float(rewards_B.mean()),
        "accuracy": float((rewards_B >= 1.0).float().mean()),
        "response_length": float(rollouts.lengths_B.float().mean()),
        "truncated_share": float((~rollouts.finished_B).float().mean()),
        "zero_advantage_share": float((batch.advantages_B == 0).float().mean()),
        "entropy": float(batch.entropy_BR[mask_BR].mean()),
        "lr": updates[-1].learning_rate,
        "grad_norm": sum(stepped) / len(stepped) if stepped else None,
        **LossTerms.summary(losses, num_updates=len(updates)),
        **mismatch(rollouts.logprobs_BR, batch.p_BR, mask_BR, entropy=batch.entropy_BR, weights=weights),
        **weight_statistics(weights, mask_BR, rewards_B >= 1.0),
        **batch.routers,
    }


def engine_metrics(engine: Engine, codes_changed: float | None, staleness: int) -> dict[str, float | None]:
    """What the engine noticed while it generated, and when it took the weights that it generated with."""
    saturation = {f"kv_saturation_{tensor}": share for tensor, share in engine.saturation.items()}
    return {**saturation, "codes_changed": codes_changed, "staleness": float(staleness)}


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


def step_samples(count: int, batch: Sampled, weights: Weights) -> list[dict[str, Any]]:
    """`count` rollouts spread evenly over the batch, with the log-probs of every response token."""
    rollouts, scored = batch.rollouts, batch.scored
    samples_per_prompt = len(rollouts) // len(batch.problems)
    chosen = torch.linspace(0, len(rollouts) - 1, min(count, len(rollouts))).long().tolist()
    samples = []
    for row in chosen:
        length = int(rollouts.lengths_B[row])
        problem = batch.problems[row // samples_per_prompt]
        samples.append(
            {
                "prompt": problem.prompt,
                "answer": problem.answer,
                "completion": scored.completions[row],
                "reward": float(scored.rewards_B[row]),
                "finished": bool(rollouts.finished_B[row]),
                "advantage": float(batch.advantages_B[row]),
                "tokens": rollouts.response(row),
                "g": rollouts.logprobs_BR[row, :length].tolist(),
                "p": batch.p_BR[row, :length].tolist(),
                "weight": weights.applied[row, :length].tolist(),
            }
        )
    return samples
