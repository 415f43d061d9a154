"""dataset:PATH_OR_HUB_NAME: questions and answers from JSONL, Parquet, a folder or the Hugging Face hub.

A column may be named with dots (reward_model.ground_truth). A prompt is text, or a list of chat messages with role and
content (as in DAPO's data); `chat` makes a message of text too. Messages reach the model through its own chat template.
A finished completion is right if `labkit.tasks.answers` says so, or is worth what the user's own function says; one
that was cut off is wrong.

Held out is the split `heldout_split`, else `heldout_fraction` of the rows by prompt (`is_heldout`). Either way equal
prompts are on the same side. A row that is there several times counts once.
"""

import random
import re
from collections.abc import Callable, Iterator
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from labkit.config.errors import wrong
from labkit.config.own import KINDS, Reward, load, short
from labkit.config.settings import Float, Int, Settings
from labkit.tasks import mathematics
from labkit.tasks.answers import Judge
from labkit.tasks.columns import messages, text
from labkit.tasks.rows import is_file, read_rows
from labkit.tasks.task import Chat, Problem, TaskError, is_heldout

Placed = tuple[str, Problem]  # file and line, or row; and what stands there


class DatasetOptions(Settings):
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    split: str = Field(default="train", min_length=1)  # of a folder or hub data set
    heldout_split: str = ""  # such as "test"; "": some rows of `split`
    subset: str = ""  # of a hub data set that has several, such as "main"
    template: str = "{prompt}"  # around text, or around the last message of a chat
    chat: bool = False  # text is what the user says in a chat
    chat_options: dict[str, Any] = Field(default={})  # the template's own variables, such as enable_thinking
    answer_pattern: str = ""  # a regular expression with at most one group
    reward: Reward = "match"  # match, math-verify, or a function of the user's
    heldout_fraction: Float = Field(default=0.1, gt=0, lt=1)
    max_new_tokens: Int = Field(default=256, ge=1)
    stop: str = ""

    @field_validator("template")
    @classmethod
    def _holds_the_prompt(cls, template: str) -> str:
        if "{prompt}" not in template:
            raise ValueError("must hold {prompt}")
        return template

    @model_validator(mode="after")
    def _own_reward_reads_itself(self) -> Self:
        if self.answer_pattern and KINDS["reward"].owns(self.reward):
            raise wrong("answer_pattern", f"{short(self.reward)} reads completions itself; drop the pattern")
        return self

    @field_validator("answer_pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"is no regular expression ({error})") from None
        if groups > 1:
            raise ValueError(f"has {groups} groups; mark the answer with one and write the others as (?:...)")
        return pattern


class DatasetTask:
    def __init__(self, source: str, options: DatasetOptions | None = None, name: str = "") -> None:
        self.name = name or f"dataset:{source}"
        self.options = options or DatasetOptions()
        if self.options.reward == "math-verify" and not (answer := mathematics.available())[0]:
            raise TaskError(f"{self.name}: {answer[1]}, or set task_options.reward to match")
        self.max_new_tokens = self.options.max_new_tokens
        self.stop = self.options.stop
        pattern = self.options.answer_pattern
        self._judge = Judge(self.options.reward, re.compile(pattern) if pattern else None)
        self._own_reward: Callable[[str, str], float] | None = None  # loaded when it is first needed
        training, heldout = self._sides(source)
        self._placed = [*training, *heldout]
        self._training, self._heldout = ([problem for _, problem in side] for side in (training, heldout))
        self._check_sizes(source)

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Every problem with its place (file and line, or row), so that a prompt that can't be used is named."""
        return iter(self._placed)

    def sample(self, rng: random.Random) -> Problem:
        return rng.choice(self._training)

    def heldout(self, n: int, seed: int = 0) -> list[Problem]:
        """n different rows, or all of the held-out ones when there are fewer."""
        return random.Random(seed).sample(self._heldout, min(n, len(self._heldout)))

    def reward(self, problem: Problem, completion: str, finished: bool) -> float:
        if not finished:
            return 0.0
        if not KINDS["reward"].owns(self.options.reward):
            return float(self._judge.right(completion, problem.answer))
        self._own_reward = self._own_reward or load("reward", self.options.reward)
        reward = float(self._own_reward(completion, problem.answer))
        if not 0 <= reward <= 1:
            raise TaskError(f"{short(self.options.reward)} gave a reward of {reward}; scale rewards to [0, 1]")
        return reward

    def _sides(self, source: str) -> tuple[list[Placed], list[Placed]]:
        """The training and the held-out problems."""
        rows = self._rows(source, self.options.split)
        if self.options.heldout_split:
            if is_file(source):
                raise TaskError(f"{source}: is one file, without splits; drop task_options.heldout_split")
            heldout = self._rows(source, self.options.heldout_split)
            known = {problem.prompt for _, problem in heldout}
        else:
            fraction = self.options.heldout_fraction
            known = {problem.prompt for _, problem in rows if is_heldout(problem.prompt, fraction)}
            heldout = [placed for placed in rows if placed[1].prompt in known]
        return [placed for placed in rows if placed[1].prompt not in known], heldout

    def _rows(self, source: str, split: str) -> list[Placed]:
        different: dict[tuple[str, str], Placed] = {}
        for place, row in read_rows(source, split, self.options.subset):
            problem = self._problem(place, row)
            different.setdefault((problem.prompt, problem.answer), (place, problem))
        return list(different.values())

    def _problem(self, place: str, row: Any) -> Problem:
        if not isinstance(row, dict):
            raise TaskError(f"{place}: is a {type(row).__name__}; every row is an object with named columns")
        options = self.options
        answer = text(place, row, options.answer_column, "answer_column")
        said = messages(row, options.prompt_column)
        if said is None:
            content = text(place, row, options.prompt_column, "prompt_column")
            prompt = options.template.replace("{prompt}", content)
            said = [{"role": "user", "content": prompt}] if options.chat else []
        else:
            said[-1]["content"] = options.template.replace("{prompt}", said[-1]["content"])
            prompt = "\n\n".join(message["content"] for message in said)
        return Problem(prompt, answer, chat=Chat(said, options.chat_options) if said else None)

    def _check_sizes(self, source: str) -> None:
        if not self._training and not self._heldout:
            raise TaskError(f"{source}: holds no rows")
        if not self._training or not self._heldout:
            side = "training" if self._heldout else "held-out"
            options, rows = self.options, len(self._placed)
            split = f"heldout_split {options.heldout_split}"
            how = split if options.heldout_split else f"heldout_fraction {options.heldout_fraction:g}"
            raise TaskError(f"{source}: no {side} rows, with {rows} in all and {how}; give more rows or another one")
