"""reasoning-gym:NAME: any procedural dataset of the reasoning_gym package, scored by its own rule.

The answer is what stands between the last <answer> and </answer> of a finished completion; without it, or
cut off, the reward is 0. `is_heldout` holds out half of all prompts. Seeds alone would not part the two sets:
reasoning_gym makes item i of seed s from s + i, and small or fixed pools give the same problem again.
"""

import random
from importlib.util import find_spec
from typing import Any

from pydantic import Field, field_validator

from labkit.config.errors import ConfigError, did_you_mean
from labkit.config.settings import Int, Settings
from labkit.tasks.task import Problem, TaskError, draw

HELDOUT_FRACTION = 0.5
_ITEMS = 10_000  # items of one dataset that problems are drawn from
_TRIES = 50  # some datasets need a second an item


class ReasoningGymOptions(Settings):
    template: str = "{question}\nGive the final answer between <answer> and </answer>.\n"
    params: dict[str, Any] = Field(default={})  # the dataset's own, such as min_terms
    seed: Int = Field(default=0, ge=0)
    max_new_tokens: Int = Field(default=256, ge=1)

    @field_validator("template")
    @classmethod
    def _holds_the_question(cls, template: str) -> str:
        if "{question}" not in template:
            raise ValueError("must hold {question}")
        return template


def available() -> tuple[bool, str]:
    if find_spec("reasoning_gym") is None:
        return False, "the package reasoning-gym is not installed: pip install reasoning-gym"
    return True, "installed"


class ReasoningGym:
    stop = ""

    def __init__(self, dataset: str, options: ReasoningGymOptions | None = None) -> None:
        ok, reason = available()
        if not ok:
            raise TaskError(f"reasoning-gym:{dataset}: {reason}")
        self.name = f"reasoning-gym:{dataset}"
        self.options = options or ReasoningGymOptions()
        self.max_new_tokens = self.options.max_new_tokens
        self._dataset = _create(dataset, self.options)

    def sample(self, rng: random.Random) -> Problem:
        return draw(lambda: self._problem(rng), heldout=False, fraction=HELDOUT_FRACTION, tries=_TRIES)

    def heldout(self, n: int, seed: int = 0) -> list[Problem]:
        rng = random.Random(seed)
        return [
            draw(lambda: self._problem(rng), heldout=True, fraction=HELDOUT_FRACTION, tries=_TRIES) for _ in range(n)
        ]

    def reward(self, problem: Problem, completion: str, finished: bool) -> float:
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(completion) if finished else None
        if answer is None:
            return 0.0
        score = float(self._dataset.score_answer(answer, problem.metadata["entry"]))
        return min(1.0, max(0.0, score))

    def _problem(self, rng: random.Random) -> Problem:
        entry = self._dataset[rng.randrange(_ITEMS)]
        prompt = self.options.template.replace("{question}", entry["question"])
        # Puzzles with many solutions have no one answer; their score_answer checks the entry's metadata.
        return Problem(prompt, str(entry["answer"] or ""), {"entry": entry})


def _create(name: str, options: ReasoningGymOptions) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        known = sorted(DATASETS)
        way_out = did_you_mean(name, known, otherwise=f"the {len(known)} it has are ")
        raise TaskError(f"reasoning-gym: no dataset {name!r}; {way_out}")
    parameters = sorted(set(DATASETS[name][1].__dataclass_fields__) - {"seed", "size"})
    if unknown := sorted(set(options.params) - set(parameters)):
        way_out = did_you_mean(unknown[0], parameters)
        raise ConfigError(f"params.{unknown[0]}: {name} has no such parameter; {way_out}")
    try:
        return create_dataset(name, seed=options.seed, size=_ITEMS, **options.params)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"params: {name} does not accept {options.params}: {error}") from None
