"""From a task's problems to prompts of tokens, and from sampled tokens to rewards."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.models import Tokenizer
from labkit.models.rollouts import Rollouts
from labkit.tasks import DatasetTask, Problem, Task


@dataclass(frozen=True)
class Scored:
    completions: list[str]
    rewards_B: Tensor  # FP32 in [0, 1]


class Prompter:
    def __init__(self, task: Task, tokenizer: Tokenizer) -> None:
        self.task, self.tokenizer = task, tokenizer
        stop = tokenizer.ids_containing(task.stop) if task.stop else frozenset()
        self.stop_ids = frozenset(tokenizer.eos_ids) | stop

    def check(self, max_prompt_tokens: int) -> None:
        """Refuse, before anything runs, a row of a data set that the model can't take: a step may draw it late."""
        if not isinstance(self.task, DatasetTask):
            return
        for place, problem in self.task.problems():
            try:
                num_tokens = len(self.encode(problem))
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
            if num_tokens > max_prompt_tokens:
                raise ValueError(
                    f"{place}: the prompt has {num_tokens} tokens, the model has room for {max_prompt_tokens} before "
                    "the answer; shorten it, or lower task_options.max_new_tokens"
                )

    def encode(self, problem: Problem) -> list[int]:
        if problem.chat is not None:
            return self.tokenizer.encode_chat(problem.chat.messages, problem.chat.options)
        return self.tokenizer.encode(problem.prompt)

    def score(self, rollouts: Rollouts, problems: Sequence[Problem]) -> Scored:
        """`problems` has one entry per prompt; its samples are adjacent rows."""
        samples = len(rollouts) // len(problems)
        completions = [self._completion(rollouts, row) for row in range(len(rollouts))]
        rewards = [
            self.task.reward(problems[row // samples], text, bool(rollouts.finished_B[row]))
            for row, text in enumerate(completions)
        ]
        return Scored(completions, torch.tensor(rewards, dtype=torch.float32))

    def _completion(self, rollouts: Rollouts, row: int) -> str:
        """The text before the token that ended it."""
        tokens = rollouts.response(row)
        if rollouts.finished_B[row] and tokens[-1] in self.tokenizer.eos_ids:
            tokens = tokens[:-1]
        text = self.tokenizer.decode(tokens)
        return text.split(self.task.stop)[0] if self.task.stop else text
