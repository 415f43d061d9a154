"""JSON Lines that survive crashes, full disks and concurrent readers.

A line counts once its newline is there. Writers append whole lines or nothing; readers skip a last line
that has no newline, because its writer is still busy or was killed.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def dump_json(value: Any) -> str:
    """Strict JSON on one line; non-finite floats become the strings "nan", "inf", "-inf"."""
    return json.dumps(_finite(value), allow_nan=False, ensure_ascii=False)


def load_object(line: str | bytes) -> dict[str, Any]:
    """The JSON object on a line; ValueError when it is anything else."""
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"a JSON object is expected, this is {type(content).__name__}")
    return content


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def append_line(path: Path, line: str) -> None:
    """Append a line whole or not at all, cutting off first what an earlier crash left unfinished."""
    data = line.encode() + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            size = _end_of_last_line(path)
            os.ftruncate(descriptor, size)
        try:
            written = os.write(descriptor, data)
            while written < len(data):
                written += os.write(descriptor, data[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from None
    finally:
        os.close(descriptor)


def complete_lines(path: Path, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """(offset after the line, line) for each line that has its newline; nothing if there is no file."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield offset, line


def _end_of_last_line(path: Path) -> int:
    return max((end for end, _ in complete_lines(path)), default=0)


def replace_lines(path: Path, lines: list[bytes]) -> None:
    """Replace the file by these lines in one piece: a reader sees the old file or the new one."""
    draft = path.with_suffix(".cut")
    draft.write_bytes(b"".join(lines))
    draft.replace(path)
