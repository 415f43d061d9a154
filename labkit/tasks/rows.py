"""Rows of a data set as (place, row) pairs; a place names file and line, so that a mistake can be found.

JSONL is read here line by line, so that a bad line is named. The rest goes through `datasets`.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.tasks.task import TaskError

_HUB_TIMEOUT = 10  # seconds to find out whether the hub can be reached
_BATCH = 1000
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
    rows = _from_folder(path, split, subset) if path.is_dir() else _from_hub(source, split, subset)
    return _numbered(f"{source}, split {split}", rows)


def is_file(source: str) -> bool:
    return Path(os.path.expanduser(source)).is_file()


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


def _numbered(source: str, dataset: Any) -> Iterator[tuple[str, Any]]:
    """Through Arrow, batch by batch: row by row takes many times as long."""
    batches = dataset.with_format("arrow").iter(_BATCH)
    rows = (row for batch in batches for row in batch.to_pylist())
    return ((f"{source}, row {number}", row) for number, row in enumerate(rows, start=1))


def _parquet(path: Path) -> Any:
    import datasets

    try:
        return datasets.Dataset.from_parquet(str(path))
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        cause = error.__cause__ or error
        raise TaskError(f"{path}: not a Parquet file that can be read: {_one_line(cause)}") from None


def _from_folder(folder: Path, split: str, subset: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(str(folder), subset or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise TaskError(f"{folder}: can't be loaded (split {split}): {_one_line(error)}; {_NAMES}") from None


def _from_hub(name: str, split: str, subset: str) -> Any:
    """The cached copy, so that a run needs no network and its data stay; without one, the hub's."""
    import datasets

    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity_error()  # it warns of the very thing that is asked for
    try:
        return _cached(name, subset).as_dataset(split=split)
    except (OSError, ValueError) as error:
        cached = _one_line(error)
    finally:
        datasets.logging.set_verbosity(verbosity)
    try:
        return fetch(name, subset, split)
    except TaskError as error:
        raise TaskError(f"{error} (in the cache: {cached})") from None


def _cached(name: str, subset: str) -> Any:
    """What `datasets` itself takes when the hub can't be reached, which would cost it half a minute to find out."""
    from datasets.packaged_modules.cache.cache import Cache

    return Cache(
        repo_id=name, dataset_name=name.split("/")[-1], config_name=subset or None, version="auto", hash="auto"
    )


def fetch(name: str, subset: str, split: str | None = None) -> Any:
    """A data set of the hub, in its newest version, into the cache of `datasets`."""
    import datasets

    _check_hub(name)
    try:
        return datasets.load_dataset(name, subset or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        way_out = _OFFLINE if isinstance(error, ConnectionError) else _NAMES
        raise TaskError(f"{name}: can't be loaded: {_one_line(error)}; {way_out}") from None


_NAMES = "check the name, its splits and subsets"
_OFFLINE = (
    "give the path of a local .jsonl or .parquet file, or run `labkit fetch` for it once where there is a network"
)


def _check_hub(name: str) -> None:
    """Ask once, briefly: `datasets` itself retries for half a minute when there is no network."""
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if datasets.config.HF_HUB_OFFLINE:
        raise TaskError(f"{name}: no such file, and HF_HUB_OFFLINE is set; {_OFFLINE}")
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
