"""Rows of a data set as (place, row) pairs; a place names file and line, so that a mistake can be found.

JSONL is read here line by line, so that a bad line is named. The rest goes through `datasets`.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from labkit.tasks.task import TaskError

_HUB_TIMEOUT = 10  # seconds to find out whether the hub can be reached
_LOCAL_SUFFIXES = {".jsonl", ".parquet"}


def read_rows(source: str, split: str, subset: str) -> Iterator[tuple[str, Any]]:
    path = Path(os.path.expanduser(source))  # Path.expanduser raises for an unknown ~user
    if path.suffix == ".jsonl" and path.is_file():
        return _jsonl(path)
    if path.suffix == ".parquet" and path.is_file():
        return _numbered(source, _parquet(path))
    if path.is_file():
        raise TaskError(f"{source}: can read .jsonl and .parquet files; convert it to one of them")
    if path.suffix in _LOCAL_SUFFIXES or (source.startswith((".", "/", "~")) and not path.is_dir()):
        raise TaskError(f"{source}: no such file; give the path of a .jsonl or .parquet file")
    return _numbered(source, _from_datasets(str(path) if path.is_dir() else source, split, subset))


def _jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        place = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            yield place, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except json.JSONDecodeError as error:
            raise TaskError(f"{place}, column {error.colno}: not JSON: {error.msg}; mend or drop the line") from None
        except UnicodeDecodeError as error:
            raise TaskError(f"{place}: not UTF-8 text at byte {error.start}; save the file as UTF-8") from None
        except (ValueError, RecursionError):  # what Python raises for JSON beyond its own limits
            raise TaskError(f"{place}: a number too long or brackets too deep to read; mend or drop the line") from None


def _numbered(source: str, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{source}, row {number}", row) for number, row in enumerate(rows, start=1))


def _parquet(path: Path) -> Iterable[Any]:
    import datasets

    try:
        return datasets.Dataset.from_parquet(str(path))
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        cause = error.__cause__ or error
        raise TaskError(f"{path}: not a Parquet file that can be read: {_one_line(cause)}") from None


def _from_datasets(source: str, split: str, subset: str) -> Iterable[Any]:
    import datasets

    if not Path(source).is_dir():
        _check_hub(source)
    try:
        return datasets.load_dataset(source, subset or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        way_out = "check the name and the task options split and subset"
        if isinstance(error, ConnectionError):
            way_out = _OFFLINE
        raise TaskError(f"{source}: can't be loaded (split {split}): {_one_line(error)}; {way_out}") from None


_OFFLINE = (
    "give the path of a local .jsonl or .parquet file, or download it once where there is a network; "
    "HF_HUB_OFFLINE=1 uses what is in the Hugging Face cache"
)


def _check_hub(name: str) -> None:
    """Ask once, briefly: `datasets` itself retries for half a minute when there is no network."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return
    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=_HUB_TIMEOUT)
    except (HfHubHTTPError, HFValidationError) as error:
        raise TaskError(
            f"{name}: not found, neither as a file nor on the Hugging Face hub ({_one_line(error)})"
        ) from None
    except Exception as error:  # the HTTP library's own kinds of "no network"
        raise TaskError(f"{name}: no such file, and the Hugging Face hub can't be reached; {_OFFLINE}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
