"""Where the answer stands in a text, and whether two answers agree.

Without a pattern the answer is what follows the last "####" (as in GSM8K). A reference without one is an answer as a
whole. A completion without one is judged

    match          by its last number, if the reference is a number, else as a whole
    math-verify    by its last \\boxed, else its last LaTeX, else its last number

With a pattern the answer is its last match, or the group in it; a completion that has none is wrong, and a reference
that has none is an answer as a whole.

A function of the user's (labkit.config.own) gets the completion and the reference as they are, and no pattern.

"match" compares numbers as numbers (1,000.0 is 1000) and text without regard to case, spacing and a final full stop;
"math-verify" compares values (`labkit.tasks.mathematics`): 1/2 is 0.5.
"""

import re
from dataclasses import dataclass
from decimal import Decimal

from labkit.tasks import mathematics

_NUMBER = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_MARK = "####"


@dataclass(frozen=True)
class Judge:
    comparison: str  # match, math-verify
    pattern: re.Pattern[str] | None = None

    def right(self, completion: str, answer: str) -> bool:
        given, reference = self._found(completion), self._found(answer)
        if given is None and self.pattern is not None:
            return False
        reference = answer.strip() if reference is None else reference
        if self.comparison == "math-verify":
            return mathematics.equal(reference, completion if given is None else given)
        if given is None:
            is_number = _number(reference) is not None
            given = (_NUMBER.findall(completion) or [""])[-1] if is_number else completion
        return _equal(given, reference)

    def _found(self, text: str) -> str | None:
        if self.pattern is None:
            _, mark, answer = text.rpartition(_MARK)
            return answer.strip() if mark else None
        found = list(self.pattern.finditer(text))
        return (found[-1].group(self.pattern.groups) or "").strip() if found else None


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
