import errno
from pathlib import Path

import pytest

from labkit.runs.jsonl import append_line, complete_lines


def lines(path: Path) -> list[bytes]:
    return [line for _, line in complete_lines(path)]


def test_an_unfinished_line_is_not_read_and_is_cut_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append_line(path, '{"a": 1}')
    with path.open("ab") as file:
        file.write(b'{"a": 2, "b')
    assert lines(path) == [b'{"a": 1}\n']
    append_line(path, '{"a": 3}')
    assert path.read_bytes() == b'{"a": 1}\n{"a": 3}\n'


def test_a_file_of_one_unfinished_line_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a"')
    append_line(path, '{"a": 3}')
    assert path.read_bytes() == b'{"a": 3}\n'


def test_reading_goes_on_from_an_offset(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append_line(path, '"é"')
    append_line(path, "2")
    (first, _), _ = complete_lines(path)
    assert [line for _, line in complete_lines(path, first)] == [b"2\n"]


def test_no_file_reads_as_no_lines(tmp_path: Path) -> None:
    assert lines(tmp_path / "none") == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        append_line(path, "1")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))


def test_an_append_that_does_not_fit_is_taken_back_whole(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path = tmp_path / "x.jsonl"
    append_line(path, "1")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            append_line(path, '"longer than the limit"')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"1\n"
