"""The batches of a run, in their order: which problems a step draws, and what the engine samples for them.

    step t, one after the other    draw and sample batch t | train on it | send version t
    step t, overlapped             take batch t | begin batch t + 1 | train on batch t | send version t

Both draw the same random numbers in the same order, so a batch doesn't depend on when it was begun. The weights are
the same too: with a staleness of s, batch t + 1 is sampled with version max(0, t - s), which for s >= 1 is there
before step t trains.

A batch that was begun ahead belongs to the next step. Until it is taken, the state kept in checkpoints is that from
before its first random number, and `drop` goes back there: after a stop or a switch it is drawn and sampled again.
"""

import random
import time
from dataclasses import dataclass
from typing import Any

import torch

from labkit.models.rollouts import Rollouts
from labkit.rl.episodes import Prompter
from labkit.rollout import Engine, Overlapping, Pending, Request
from labkit.rollout.local import left_pad
from labkit.tasks import Problem


@dataclass(frozen=True)
class Begun:
    problems: list[Problem]
    pending: Pending
    before: dict[str, Any]  # the random numbers


class Batches:
    def __init__(self, prompter: Prompter, request: Request, num_prompts: int, seed: int) -> None:
        self._prompter, self.request, self._num_prompts = prompter, request, num_prompts
        self._seed = seed
        self._prompt_rng = random.Random(seed)
        self._sample_rng = torch.Generator().manual_seed(seed)
        self._begun: Begun | None = None
        self.hidden: float | None = None  # share of the last batch's sampling that passed behind the training before it

    def take(self, engine: Engine) -> tuple[list[Problem], Rollouts]:
        """The next batch: the one begun ahead, or one sampled now."""
        if self._begun is None:
            self.hidden = None
            problems, prompts = self._draw()
            return problems, engine.generate(prompts, self.request, self._sample_rng)
        start = time.perf_counter()
        rollouts, seconds = self._begun.pending.result()
        waited = time.perf_counter() - start
        self.hidden = max(0.0, 1 - waited / seconds)
        problems, self._begun = self._begun.problems, None
        return problems, rollouts

    def begin(self, engine: Overlapping) -> None:
        """Have the engine sample the batch after the one that was taken, and return at once."""
        before = self._states()
        problems, prompts = self._draw()
        self._begun = Begun(problems, engine.begin(prompts, self.request, self._sample_rng), before)

    def first_prompts(self, pad_id: int) -> Rollouts:
        """The prompts of batch 1, without a response. Nothing is drawn from the run's own random numbers."""
        rng = random.Random(self._seed)
        prompts = [self._prompter.encode(self._prompter.task.sample(rng)) for _ in range(self._num_prompts)]
        tokens_BT, starts_B = left_pad(prompts, pad_id)
        B, P = tokens_BT.shape
        nothing_B = torch.zeros(B, dtype=torch.int64)
        return Rollouts(tokens_BT, starts_B, nothing_B, torch.zeros(B, 0), nothing_B.bool(), P, 0, 0)

    def drop(self) -> None:
        """Take back what was begun."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            begun.pending.drop()
            self.load_state_dict(begun.before)

    def _draw(self) -> tuple[list[Problem], list[list[int]]]:
        problems = [self._prompter.task.sample(self._prompt_rng) for _ in range(self._num_prompts)]
        return problems, [self._prompter.encode(problem) for problem in problems]

    def _states(self) -> dict[str, Any]:
        return {"prompt_rng": self._prompt_rng.getstate(), "sample_rng": self._sample_rng.get_state()}

    def state_dict(self) -> dict[str, Any]:
        return self._begun.before if self._begun else self._states()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kind, words, gauss = state["prompt_rng"]
        self._prompt_rng.setstate((kind, tuple(words), gauss))
        self._sample_rng.set_state(state["sample_rng"])
