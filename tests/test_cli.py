import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit.config.locations import TINY_FOLDER
from labkit.runs.process import Run
from labkit.runs.store import RunDirectory

SMALL = [
    *["eval_every=2", "eval_prompts=4", "threads=1", "sampling.max_new_tokens=8"],
    *["grpo.prompts_per_step=2", "grpo.group_size=2"],
]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "runs"
    yield root
    for run in Run.all(root):
        run.kill()


def labkit(*arguments: str, runs: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "labkit.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "LABKIT_RUNS": str(runs), "COLUMNS": "160", **environment},
        check=False,
    )


def refused(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 2, result
    assert "Traceback" not in result.stderr
    return result.stderr


def test_doctor_says_what_is_there_and_fails_for_what_will_fail(runs: Path) -> None:
    well = labkit("doctor", runs=runs)
    assert well.returncode == 0, well
    for name in ("packages", "memory", "FP8 on the CPU", "vLLM", "Ray", "models in the cache"):
        assert name in well.stdout
    ill = labkit("doctor", runs=Path("/proc/labkit"))
    assert ill.returncode == 1
    assert "✗ problem" in ill.stdout
    assert "set LABKIT_RUNS to another folder" in ill.stdout


def test_help_is_fast_and_names_the_commands(runs: Path) -> None:
    code = "import sys, labkit.cli; sys.exit(any(m in sys.modules for m in ('torch', 'plotly', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    shown = labkit("--help", runs=runs).stdout
    for command in (
        "run",
        "demo",
        "list",
        "show",
        "compare",
        "resume",
        "stop",
        "fetch",
        "warmstart",
        "presets",
    ):
        assert command in shown


def test_mistakes_are_one_line_with_a_way_out(runs: Path) -> None:
    assert "fp8-e2e" in refused(labkit("run", "fp8-e2", runs=runs))
    assert "no file nowhere.yaml" in refused(labkit("run", "nowhere.yaml", runs=runs))
    assert "steps" in refused(labkit("run", "bf16", "stepz=3", runs=runs))
    assert "no run 'x'" in refused(labkit("show", "x", runs=runs))
    assert "smollm2" in refused(labkit("fetch", "gpt-5", runs=runs))
    for page in (["demo", "--json"], ["demo", "--html"], ["compare", "x", "--html"]):
        assert "there is no folder nodir" in refused(labkit(*page, "nodir/x", runs=runs))
    assert "is a folder" in refused(labkit("demo", "--json", ".", runs=runs))
    assert not runs.exists(), "a refused experiment leaves nothing behind"


def test_debug_shows_the_traceback(runs: Path) -> None:
    assert "Traceback" in labkit("show", "x", runs=runs, LABKIT_DEBUG="1").stderr


def test_presets_are_listed_with_what_they_are_for(runs: Path) -> None:
    from labkit.config.presets import DESCRIPTIONS

    shown = " ".join(labkit("presets", runs=runs, COLUMNS="300").stdout.split())
    assert "fp8-e2e-kv" in shown
    assert DESCRIPTIONS["bf16"] in shown


def test_a_run_from_start_to_comparison(runs: Path, tmp_path: Path) -> None:
    done = labkit("run", "fp8-e2e", "name=first", "steps=2", *SMALL, runs=runs)
    assert done.returncode == 0, done
    assert "step 2/2" in done.stdout
    assert "done" in labkit("list", runs=runs).stdout
    shown = labkit("show", "first", runs=runs).stdout
    assert "emulated" in shown
    assert "2/2" in shown

    saved = next(runs.glob("first-*")) / "experiment.yaml"
    again = labkit("run", str(saved), "name=second", "seed=1", runs=runs)
    assert again.returncode == 0, again
    page = tmp_path / "x.html"
    compared = labkit("compare", "first", "second", "--html", str(page), runs=runs)
    assert "seed 1" in compared.stdout
    assert page.stat().st_size > 1_000_000
    assert "is done" in refused(labkit("resume", "first", runs=runs))


def test_a_detached_run_is_stopped_and_resumed_from_other_commands(runs: Path) -> None:
    started = labkit("run", "bf16", "name=far", *SMALL, "steps=100000", "--detach", runs=runs)
    assert started.returncode == 0, started
    assert labkit("stop", "far", runs=runs).stdout.strip().endswith("stopping")
    path = next(runs.glob("far-*"))
    wait_for(path / "state.json", b'"stopped"')
    assert labkit("resume", "far", "--detach", runs=runs).returncode == 0
    labkit("stop", "far", runs=runs)
    wait_for(path / "state.json", b'"stopped"')


def test_ctrl_c_stops_the_run_it_watches(runs: Path) -> None:
    watching = subprocess.Popen(
        [sys.executable, "-m", "labkit.cli", "run", "bf16", "name=near", *SMALL, "steps=100000"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "LABKIT_RUNS": str(runs)},
    )
    assert watching.stdout is not None
    for line in watching.stdout:
        if "step 1/" in line:
            break
    watching.send_signal(signal.SIGINT)
    output = watching.stdout.read()
    assert watching.wait(60) == 130
    assert "labkit resume near-" in output
    assert b'"stopped"' in (next(runs.glob("near-*")) / "state.json").read_bytes()


def test_a_model_and_a_data_set_of_one_s_own(runs: Path, tmp_path: Path) -> None:
    """The README's line, and a damaged run beside it that `labkit list` lists too."""
    shutil.copytree(TINY_FOLDER, tmp_path / "model")
    rows = [{"question": f"{a}+{b}=", "answer": str((a + b) % 10)} for a in range(10) for b in range(10)]
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [f"model={tmp_path / 'model'}", f"task=dataset:{data}", "task_options.prompt_column=question"]
    done = labkit("run", "fp8-e2e", "name=own", "steps=1", *own, *SMALL, runs=runs)
    assert done.returncode == 0, done

    for name, file, content in (
        *[("bad-yaml", "experiment.yaml", "steps: [\n"), ("bad-line", "metrics.jsonl", "nonsense\n")],
        ("bad-state", "state.json", '{"name": "running", "pid": "x"}'),
    ):
        damaged = RunDirectory.create(Run.open("own", runs).experiment.override({"name": name}), runs)
        (damaged.path / file).write_text(content)
    listed = " ".join(labkit("list", runs=runs, COLUMNS="300").stdout.split())
    assert "4 runs" in listed
    assert "done" in listed
    assert listed.count("unreadable: ") == 2
    assert "metrics.jsonl, line 1: not JSON" in listed
    assert "state.json cannot be read: pid" in listed
    assert "it is failed" not in refused(labkit("resume", "bad-line", runs=runs))


def test_ctrl_c_before_the_first_step_and_in_a_demo_ends_with_130(runs: Path) -> None:
    never = ["eval_prompts=4000", "steps=100000", "threads=1"]  # the first step takes long
    for command, started in ((["run", "bf16", "name=early", *never], 1), (["demo", "--steps", "100000"], 3)):
        folder = runs.with_name(command[0])
        client = subprocess.Popen(
            [sys.executable, "-m", "labkit.cli", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "LABKIT_RUNS": str(folder), "COLUMNS": "160"},
        )
        try:
            deadline = time.monotonic() + 60
            while len(list(folder.glob("*/worker.log"))) < started:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            time.sleep(1.0)  # the last worker is on its way, the client in its loop
            client.send_signal(signal.SIGINT)
            output, errors = client.communicate(timeout=120)
            assert client.returncode == 130, (output, errors)
            assert errors == ""
            said = "stopped before step 0; go on with: labkit resume early-" if started == 1 else "was interrupted"
            assert said in output
            assert [run.state for run in Run.all(folder)] == ["stopped"] * started
        finally:
            client.kill()
            for run in Run.all(folder):
                run.kill()


def wait_for(path: Path, content: bytes) -> None:
    deadline = time.monotonic() + 60
    while content not in path.read_bytes():
        assert time.monotonic() < deadline, path.read_bytes()
        time.sleep(0.05)
