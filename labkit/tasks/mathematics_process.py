"""The process that compares mathematical answers: `python -m labkit.tasks.mathematics_process`.

One JSON line [reference, answer] in, one line out: 1 if they are the same, 0 if not. It dies, and so says 0, when one
comparison takes more than SECONDS of CPU time; a comparison that needs more than MEMORY is a 0 as well.
"""

import contextlib
import json
import logging
import os
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

SECONDS = 2.0
MEMORY = 4 * 2**30  # bytes of address space; powers of powers would take all there is


def main() -> None:
    logging.disable(logging.CRITICAL)
    with contextlib.suppress(ValueError, OSError):  # a smaller limit is in force, or the system knows none
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # what a library prints is no answer
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        # Not math-verify's own limit, an alarm by the wall clock that Python code sees: a busy machine would lower
        # rewards, and one product of huge numbers outlasts it. This one ends the process in the middle of anything.
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        same = equal(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(int(same), file=out, flush=True)


def equal(reference: str, answer: str) -> bool:
    try:
        return verify(_reference(reference), _answer(answer), timeout_seconds=None)
    except Exception:  # the parser and sympy raise anything, for text that means nothing
        return False


@lru_cache(maxsize=1024)
def _reference(text: str) -> list[Any]:
    """It is an answer and nothing else, so all of it is mathematics, unless it says itself where that stands."""
    marked = "\\boxed" in text or "$" in text
    return parse(text if marked else f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None)


def _answer(text: str) -> list[Any]:
    """In order of preference \\boxed, other LaTeX, the last number; or all of a line that is LaTeX by itself."""
    found = parse(text, [LatexExtractionConfig(), ExprExtractionConfig()], parsing_timeout=None)
    if not found and "\n" not in text.strip():
        found = parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None)
    return found


if __name__ == "__main__":
    main()
