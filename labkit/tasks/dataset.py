"""dataset:PATH_OR_HUB_NAME: questions and answers from JSONL, Parquet, a folder or the Hugging Face hub.

The reference is the text after the answer's last "####", if it has one (as in GSM8K), else all of it.
A finished completion is right if the text after its own last "####" equals that; without a "####", if its
last number equals a reference that is a number, or else if all of it equals the reference. A completion that
was cut off is wrong. Numbers are compared as numbers (1,000.0 is 1000), text without regard to case, spacing
and a final full stop.

Rows are held out by prompt (`is_heldout`), so equal prompts are on the same side.
"""

import random
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from pydantic import Field, field_validator

from labkit.config.errors import did_you_mean
from labkit.config.settings import Float, Int, Settings
from labkit.tasks.rows import read_rows
from labkit.tasks.task import Problem, TaskError, is_heldout

_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_MARK = "####"


class DatasetOptions(Settings):
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    split: str = Field(default="train", min_length=1)  # of a folder or hub data set
    subset: str = ""  # of a hub data set that has several, such as "main"
    template: str = "{prompt}"
    heldout_fraction: Float = Field(default=0.1, gt=0, lt=1)
    max_new_tokens: Int = Field(default=256, ge=1)
    stop: str = ""

    @field_validator("template")
    @classmethod
    def _holds_the_prompt(cls, template: str) -> str:
        if "{prompt}" not in template:
            raise ValueError("must hold {prompt}")
        return template


class DatasetTask:
    def __init__(self, source: str, options: DatasetOptions | None = None) -> None:
        self.name = f"dataset:{source}"
        self.options = options or DatasetOptions()
        self.max_new_tokens = self.options.max_new_tokens
        self.stop = self.options.stop
        rows = read_rows(source, self.options.split, self.options.subset)
        self._placed = [(place, self._problem(place, row)) for place, row in rows]
        self._training: list[Problem] = []
        self._heldout: list[Problem] = []
        for _, problem in self._placed:
            held_out = is_heldout(problem.prompt, self.options.heldout_fraction)
            (self._heldout if held_out else self._training).append(problem)
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
        reference = _after_mark(problem.answer)
        if _MARK in completion:
            given = _after_mark(completion)
        elif _number(reference) is not None:
            given = (_NUMBER.findall(completion) or [""])[-1]
        else:
            given = completion
        return float(finished and _equal(given, reference))

    def _problem(self, place: str, row: Any) -> Problem:
        if not isinstance(row, dict):
            raise TaskError(f"{place}: is a {type(row).__name__}; every row is an object with named columns")
        prompt = _text(place, row, self.options.prompt_column, "prompt_column")
        answer = _text(place, row, self.options.answer_column, "answer_column")
        return Problem(self.options.template.replace("{prompt}", prompt), answer)

    def _check_sizes(self, source: str) -> None:
        if not self._training and not self._heldout:
            raise TaskError(f"{source}: holds no rows")
        if not self._training or not self._heldout:
            side = "training" if self._heldout else "held-out"
            rows = len(self._training) + len(self._heldout)
            raise TaskError(
                f"{source}: no {side} rows, with {rows} in all and heldout_fraction "
                f"{self.options.heldout_fraction:g}; give more rows or another fraction"
            )


def _text(place: str, row: dict[str, Any], column: str, option: str) -> str:
    if column not in row:
        way_out = did_you_mean(column, map(str, row), otherwise="it has ")
        raise TaskError(f"{place}: no column {column!r}; {way_out} (set the task option {option})")
    value = row[column]
    if not isinstance(value, str):
        found = "null" if value is None else f"{type(value).__name__} {str(value)[:40]}"
        raise TaskError(f"{place}, column {column!r}: must be text, got {found}; write it in quotes or drop the row")
    if not value.strip():
        raise TaskError(f"{place}, column {column!r}: is empty; fill it in or drop the row")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ascii(value[error.start])
        raise TaskError(f"{place}, column {column!r}: {half} is half a character; mend or drop the row") from None
    return value


def _after_mark(text: str) -> str:
    return text.rpartition(_MARK)[2].strip()


def _number(text: str) -> Decimal | None:
    plain = text.strip().removeprefix("$").rstrip(".")
    return Decimal(plain.replace(",", "")) if _NUMBER.fullmatch(plain) else None


def _equal(given: str, reference: str) -> bool:
    number = _number(reference)
    if number is not None:
        return _number(given) == number
    return _normal(given) == _normal(reference)


def _normal(text: str) -> str:
    return " ".join(text.split()).casefold().rstrip(".")
