"""Values of settings in words."""

import pytest

from labkit.config import Filter
from labkit.config.words import said, said_changes


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, "on"), (False, "off"), (0, "0"), (0.5, "0.5"), ("row", "row"),
        (None, "–"), ("", "–"), ([], "–"), ((), "–"), (["a", "b"], "a, b"),
    ],
)  # fmt: skip
def test_a_value_in_words(value: object, words: str) -> None:
    assert said(value) == words


def test_filters_have_the_same_short_name_from_a_recipe_and_from_its_file() -> None:
    each = Filter(low=0.5, high=2.0)
    assert said((each,)) == said([each.model_dump(mode="json")]) == each.short_str()


def test_changes_say_both_sides() -> None:
    changes = {"rollout.linears": (False, True), "correction.cap": (None, 2.0)}
    assert said_changes(changes) == ["rollout.linears off → on", "correction.cap – → 2.0"]
