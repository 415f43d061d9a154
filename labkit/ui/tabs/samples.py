"""Rollouts that a run kept, as answers of tokens with what both sides thought of them.

    g, p      engine's and trainer's log-prob of a sampled token, nats
    delta     p - g
    weight    what the correction multiplied the token's loss by; 0: it was rejected

The text of a single token comes from the tokenizer of the run's model, where that is on this machine; otherwise its
number stands for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from labkit.config.locations import model_folder
from labkit.runs.record import StepRecord
from labkit.runs.store import RunDirectory
from labkit.ui.tabs.view import OpenRun


@dataclass(frozen=True)
class Token:
    text: str
    g: float
    p: float
    weight: float

    @property
    def delta(self) -> float:
        return self.p - self.g

    @property
    def size(self) -> float:
        """|delta|; infinite where a side has no number, so that such tokens come first."""
        return abs(self.delta) if math.isfinite(self.delta) else math.inf


@dataclass(frozen=True)
class Answer:
    prompt: str
    right: str  # the answer that the task expects
    reward: float
    advantage: float
    finished: bool
    tokens: Sequence[Token]

    @property
    def worst(self) -> float:
        return max((token.size for token in self.tokens), default=0.0)

    @property
    def sum_delta(self) -> float:
        return sum(token.delta for token in self.tokens)

    @property
    def rejected(self) -> bool:
        return bool(self.tokens) and all(token.weight == 0 for token in self.tokens)


def sampled_steps(view: OpenRun) -> list[int]:
    """The steps that kept rollouts."""
    return [record.step for record in view.records if record.tokens] if view.experiment.keep_rollouts else []


def answers(view: OpenRun, step: int) -> list[Answer]:
    """What was kept of a step; nothing where the file is not there."""
    record = next((record for record in reversed(view.records) if record.step == step), None)
    return _answers(view.path, view.experiment.model, step, _when(record))


def _when(record: StepRecord | None) -> float:
    return record.time if record else 0.0


@lru_cache(maxsize=32)
def _answers(path: Path, model: str, step: int, when: float) -> list[Answer]:
    """`when` tells a step that was done again after a resume from its first time."""
    return [_answer(sample, model) for sample in RunDirectory(path).samples(step)]


def _answer(sample: dict[str, Any], model: str) -> Answer:
    rows = zip(sample["tokens"], sample["g"], sample["p"], sample["weight"], strict=True)
    tokens = [Token(text_of(token, model), float(g), float(p), float(weight)) for token, g, p, weight in rows]
    return Answer(
        str(sample["prompt"]), str(sample["answer"]), float(sample["reward"]), float(sample["advantage"]),
        bool(sample["finished"]), tokens,
    )  # fmt: skip


def text_of(token: int, model: str) -> str:
    tokenizer = _tokenizer(model)
    text = tokenizer.decode([token], skip_special_tokens=False) if tokenizer else ""
    return text or f"‹{token}›"


@lru_cache(maxsize=4)
def _tokenizer(model: str) -> Any:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(model_folder(model) / "tokenizer.json"))
    except Exception:  # the library raises nothing more special; a run may come from a machine with other models
        return None
