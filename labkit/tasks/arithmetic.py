"""arithmetic: an expression worked out from left to right, modulo 10. The tiny policy's own task.

    7+2*3-8=     answered at once          #9
                 or with a scratchpad      7+2=9;9*3=7;7-8=9;#9

No operator precedence: (((7+2)*3)-8) mod 10 = 9. A finished completion is right if the text after its last "#"
is the answer; one that was cut off is wrong. `is_heldout` holds out a quarter of all expressions.
"""

import random
import re

from pydantic import Field, model_validator

from labkit.config.errors import wrong
from labkit.config.settings import Int, Settings
from labkit.tasks.task import Problem, draw

CHARACTERS = "0123456789+-*=;#()>:?,| "
HELDOUT_FRACTION = 0.25
_OPERATORS = "+-*"
_STEP = len("7+2=9;")


class ArithmeticOptions(Settings):
    min_operators: Int = Field(default=3, ge=1)
    max_operators: Int = Field(default=8, ge=1, le=16)

    @model_validator(mode="after")
    def _check(self) -> "ArithmeticOptions":
        if self.min_operators > self.max_operators:
            raise wrong("min_operators", f"{self.min_operators} is above max_operators {self.max_operators}")
        return self


class Arithmetic:
    name = "arithmetic"
    stop = ""

    def __init__(self, options: ArithmeticOptions | None = None) -> None:
        self.options = options or ArithmeticOptions()
        self.max_new_tokens = _STEP * self.options.max_operators + len("#9") + 2

    def sample(self, rng: random.Random) -> Problem:
        return draw(lambda: self._expression(rng), heldout=False, fraction=HELDOUT_FRACTION)

    def heldout(self, n: int, seed: int = 0) -> list[Problem]:
        rng = random.Random(seed)
        return [draw(lambda: self._expression(rng), heldout=True, fraction=HELDOUT_FRACTION) for _ in range(n)]

    def reward(self, problem: Problem, completion: str, finished: bool) -> float:
        _, mark, answer = completion.rpartition("#")
        return float(finished and bool(mark) and answer == problem.answer)

    def direct(self, problem: Problem) -> str:
        """The completion that answers at once."""
        return f"#{problem.answer}"

    def scratchpad(self, problem: Problem, noise: float, rng: random.Random) -> str:
        """The completion that works step by step.

        With probability `noise` the result of a step is a random digit, on which what follows builds.
        """
        first, terms = _parse(problem.prompt)
        text, left = "", first
        for operator, right in terms:
            result = rng.randrange(10) if rng.random() < noise else _apply(left, operator, right)
            text += f"{left}{operator}{right}={result};"
            left = result
        return f"{text}#{left}"

    def _expression(self, rng: random.Random) -> Problem:
        operators = rng.randint(self.options.min_operators, self.options.max_operators)
        value = rng.randrange(10)
        prompt = str(value)
        for _ in range(operators):
            operator, right = rng.choice(_OPERATORS), rng.randrange(10)
            prompt += f"{operator}{right}"
            value = _apply(value, operator, right)
        return Problem(f"{prompt}=", str(value))


def _apply(left: int, operator: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operator] % 10


def _parse(prompt: str) -> tuple[int, list[tuple[str, int]]]:
    terms = re.findall(r"([-+*])(\d)", prompt)
    return int(prompt[0]), [(operator, int(right)) for operator, right in terms]
