"""What stands in a column of a row: text, or a list of chat messages. A column inside another is named with dots."""

from typing import Any

from labkit.config.errors import did_you_mean
from labkit.tasks.task import TaskError


def text(place: str, row: dict[str, Any], column: str, option: str) -> str:
    try:
        value = _value(row, column)
    except KeyError:
        way_out = did_you_mean(column, _names(row), otherwise="it has ")
        raise TaskError(f"{place}: no column {column!r}; {way_out} (set the task option {option})") from None
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


def messages(row: dict[str, Any], column: str) -> list[dict[str, str]] | None:
    """A copy of the chat in a column; None if there is none."""
    try:
        value = _value(row, column)
    except KeyError:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        return None
    said = [{key: message.get(key) for key in ("role", "content")} for message in value]
    return said if all(isinstance(part, str) for message in said for part in message.values()) else None


def _value(row: dict[str, Any], column: str) -> Any:
    if column in row:  # a name may have dots itself
        return row[column]
    outer, dot, inner = column.partition(".")
    if dot and isinstance(row.get(outer), dict):
        return _value(row[outer], inner)
    raise KeyError(column)


def _names(row: dict[str, Any]) -> list[str]:
    """The columns, and those inside them."""
    return [
        name
        for column, value in row.items()
        for name in ([f"{column}.{inner}" for inner in _names(value)] if isinstance(value, dict) else [str(column)])
    ]
