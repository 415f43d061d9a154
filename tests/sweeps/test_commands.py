import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.sweeps.sweep import Sweep


def labkit(*arguments: str, root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "labkit.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "LABKIT_RUNS": str(root), "COLUMNS": "180"},
        check=False,
    )


def refused(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 2, result
    assert "Traceback" not in result.stderr
    return result.stderr


def test_a_file_is_carried_out_and_said_again_without_repeating_it(root: Path) -> None:
    file = root / "tiny.yaml"
    file.write_text(
        "question: Does it run?\n"
        "preset: bf16\n"
        "experiment: {steps: 2, eval_every: 2, eval_prompts: 8, sampling.max_new_tokens: 8, grpo.prompts_per_step: 2,\n"
        "             grpo.group_size: 4}\n"
        "arms:\n  bf16:\n  fp8: {preset: fp8-rollout}\n"
        "seeds: [3]\n"
    )
    first = labkit("sweep", "--parallel", "2", str(file), root=root)
    assert first.returncode == 0, first
    assert "at once" in first.stdout
    assert "done bf16-s3 held-out" in first.stdout
    assert "Does it run?" in first.stdout
    page = root / "page.html"
    again = labkit("sweep", str(file), "--html", str(page), root=root)
    assert "done before fp8-s3" in again.stdout
    assert page.stat().st_size > 1_000_000
    assert "Does it run?" in labkit("sweep", "report", "tiny", "--md", str(root / "x.md"), root=root).stdout
    assert "2 of 2 cells done" in (root / "x.md").read_text()


def test_mistakes_are_one_line_with_a_way_out(filled: Callable[..., Sweep], root: Path) -> None:
    filled({"bf16": {0: 0.9}})
    assert "no file nowhere.yaml" in refused(labkit("sweep", "nowhere.yaml", root=root))
    assert "there are filled" in refused(labkit("sweep", "report", "x", root=root))
    assert "there is no folder" in refused(labkit("sweep", "report", "filled", "--html", "nodir/x", root=root))
    bad = root / "bad.yaml"
    bad.write_text("preset: bf16\nseedz: 3\n")
    assert "did you mean seeds" in refused(labkit("sweep", str(bad), root=root))


@pytest.mark.parametrize("words", [["sweep", "--help"], ["sweep"]])
def test_help_names_both_commands(words: list[str], root: Path) -> None:
    shown = labkit(*words, root=root).stdout
    assert "report" in shown
    assert "run" in shown
