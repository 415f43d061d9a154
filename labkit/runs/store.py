"""RunDirectory: the files of a run, and the only code that reads or writes them.

    <root>/<id>/experiment.yaml    the Experiment, as it was started
                state.json         where the run stands (state.py)
                metrics.jsonl      one StepRecord a line, appended as steps complete
                rollouts.jsonl     {"step": n, "samples": [...]} for the rollouts that were kept
                events.jsonl       what the worker did besides steps: started, paused, checkpoint, ...
                commands.jsonl     what clients asked for: pause, resume, stop
                heartbeat          touched by the worker every second
                lock               held by the worker for as long as it lives (lock.py)
                trainer.lock       the same for the trainer of a run over Ray (labkit.cluster)
                worker.log         the worker's stdout and stderr
                own/mine-1f4c09d2.py   a copy of each file of the user's that the run names (labkit.config.own)
                checkpoints/step-00010/
                origin/                where a fork comes from (fork.py)

The default root is ./runs, or the folder named by LABKIT_RUNS. Any number of clients may read while one
worker writes: files are only appended to by whole lines, or replaced in one piece. A line without its
newline is still being written (or was cut short by a crash) and is not read. When the disk is full an
append is taken back whole.
"""

import contextlib
import difflib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from labkit.config import Experiment, Recipe, own
from labkit.runs import state as run_state
from labkit.runs.jsonl import append_line, complete_lines, dump_json, load_object, replace_lines
from labkit.runs.record import NewerSchemaError, StepRecord
from labkit.runs.state import RunState


class RunError(ValueError):
    """A run that is not there, cannot be read, or is not in the state a command needs."""


def runs_root(root: str | Path | None = None) -> Path:
    return Path(root or os.environ.get("LABKIT_RUNS") or "runs")


@dataclass(frozen=True)
class Switch:
    """Another Recipe, in force from `step` on."""

    step: int
    version: int
    changes: dict[str, tuple[Any, Any]]  # setting -> (before, after)
    recipe: Recipe
    time: float


@dataclass(frozen=True)
class RunDirectory:
    path: Path

    @classmethod
    def create(
        cls, experiment: Experiment, root: str | Path | None = None, run_id: str | None = None
    ) -> "RunDirectory":
        """A new directory under `run_id`, or a readable, unused id. It appears complete or not at all."""
        parent = runs_root(root)
        if run_id and (parent / run_id).exists():
            raise RunError(f"{parent / run_id} is there already: choose another id")
        try:
            return cls._create(experiment, parent, run_id)
        except OSError as error:
            why = f"{error.strerror or error}; choose another folder for the runs with LABKIT_RUNS"
            raise RunError(f"cannot make a run in {parent}: {why}") from None

    @classmethod
    def _create(cls, experiment: Experiment, parent: Path, run_id: str | None) -> "RunDirectory":
        parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".new-", dir=parent))
        try:
            draft.chmod(0o755)
            (draft / "checkpoints").mkdir()
            (draft / "experiment.yaml").write_text(experiment.to_yaml(), encoding="utf-8")
            cls(draft).keep(own.used(experiment))
            cls(draft).write_state(RunState("idle"))
            if run_id:
                path = draft.rename(parent / run_id)  # refused if it was taken meanwhile: a run is never empty
            else:
                path = _rename_to_unused(draft, parent, _readable_id(experiment.name))
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return cls(path.absolute())

    @classmethod
    def find(cls, run: str | Path, root: str | Path | None = None) -> "RunDirectory":
        """A run by its path, its id, or the beginning of its id if only one run begins so."""
        if (Path(run) / "experiment.yaml").is_file():
            return cls(Path(run).absolute())
        ids = [directory.id for directory in list_directories(root)]
        matches = [run_id for run_id in ids if run_id.startswith(str(run))] if str(run) else []
        if len(matches) == 1 or str(run) in matches:
            return cls((runs_root(root) / (matches[0] if len(matches) == 1 else str(run))).absolute())
        if matches:
            raise RunError(f"{run!s} is the beginning of {len(matches)} runs: {_some(matches)}")
        near = difflib.get_close_matches(str(run), ids, n=3, cutoff=0.4)
        hint = f"did you mean {_some(near)}?" if near else f"the latest are {_some(ids)}" if ids else "it is empty"
        raise RunError(f"no run {str(run)!r} in {runs_root(root)}: {hint}")

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def experiment(self) -> Experiment:
        return Experiment.from_yaml(self.path / "experiment.yaml")

    # state and heartbeat

    def write_state(self, state: RunState) -> None:
        run_state.write(self.path / "state.json", state)

    def read_state(self) -> RunState:
        """The state as it was last written, whether or not its writer still lives."""
        return run_state.read(self.path / "state.json")

    def beat(self) -> None:
        (self.path / "heartbeat").touch()

    def heartbeat_age(self) -> float:
        """Seconds since the worker last showed that it lives; infinite if it never did."""
        try:
            return time.time() - (self.path / "heartbeat").stat().st_mtime
        except FileNotFoundError:
            return float("inf")

    # files of the user's

    def owned(self) -> Iterator[tuple[own.KindName, str]]:
        """What the Experiment, and the Recipes that it was switched to, name of the user's."""
        yield from own.used(self.experiment)
        for switch in self.switches():
            yield from own.used_by_recipe(switch.recipe)

    def keep(self, references: Iterable[tuple[own.KindName, str]]) -> None:
        """Copy the files behind them. Raises RunError for one that is not what it was when it was copied before."""
        for kind, reference in references:
            file = own.check(kind, reference)
            copy = self.path / "own" / f"{file.stem}-{sha256(bytes(file)).hexdigest()[:8]}.py"
            if not copy.exists():
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
            elif copy.read_bytes() != file.read_bytes():
                raise RunError(
                    f"{file} has changed since {self.id} took it up: put its copy {copy} back in its place, or "
                    "start another run with the new one"
                )

    # what the worker appends

    def append_record(self, record: StepRecord) -> None:
        if record.samples:
            line = {"step": record.step, "samples": list(record.samples)}
            append_line(self.path / "rollouts.jsonl", dump_json(line))
        append_line(self.path / "metrics.jsonl", record.to_json())

    def append_event(self, event: str, **detail: Any) -> None:
        append_line(self.path / "events.jsonl", dump_json({"time": time.time(), "event": event, **detail}))

    def append_command(self, command: str, **detail: Any) -> None:
        append_line(self.path / "commands.jsonl", dump_json({"time": time.time(), "command": command, **detail}))

    def clear_commands(self) -> None:
        (self.path / "commands.jsonl").unlink(missing_ok=True)

    def cut_records(self, last: int) -> None:
        """Keep the records and rollouts up to step `last` (-1: none); a line that was cut short goes too."""
        metrics, rollouts = self.path / "metrics.jsonl", self.path / "rollouts.jsonl"
        lines = [line for _, line in complete_lines(metrics)]
        steps = [_record(metrics, number, line).step for number, line in enumerate(lines, start=1)]
        kept = [step for step in steps if step <= last]
        if kept != list(range(last + 1)):
            raise RunError(
                f"{metrics} has {len(kept)} steps up to step {last}, not {last + 1} in order, so it was changed by "
                f"hand: restore it, or start anew with `labkit run {self.path / 'experiment.yaml'}`"
            )
        replace_lines(metrics, [line for line, step in zip(lines, steps, strict=True) if step <= last])
        replace_lines(rollouts, [line for _, line in complete_lines(rollouts) if _step(line) <= last])

    def cut_switches(self, version: int) -> None:
        """Forget the switches after that version: they were made after the checkpoint that the run goes on from."""
        path = self.path / "events.jsonl"
        events = [line for _, line in complete_lines(path)]
        kept = [line for line in events if load_object(line).get("version", 0) <= version]
        if len(kept) < len(events):
            replace_lines(path, kept)

    # what clients read

    def records(self, since: int = 0) -> list[StepRecord]:
        """The completed steps from step `since` on."""
        return [record for record in Tail(self.path / "metrics.jsonl").read() if record.step >= since]

    def samples(self, step: int | None = None) -> list[dict[str, Any]]:
        """The rollouts that were kept of a step (of the latest step that kept any, for None)."""
        found = b""
        for _, line in complete_lines(self.path / "rollouts.jsonl"):
            if step is None or _step(line) == step:
                found = line
        return load_object(found)["samples"] if found else []

    def events(self) -> list[dict[str, Any]]:
        return [load_object(line) for _, line in complete_lines(self.path / "events.jsonl")]

    def commands(self, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
        """The commands written since byte `offset`, and the offset to go on from."""
        path = self.path / "commands.jsonl"
        if not path.exists() or path.stat().st_size <= offset:
            return [], offset
        commands = []
        for end, line in complete_lines(path, offset):
            offset = end
            with contextlib.suppress(ValueError):  # a line no client of ours wrote must not stop a run
                commands.append(load_object(line))
        return commands, offset

    def checkpoints(self) -> list[int]:
        """The steps of which there is a checkpoint."""
        names = [path.name for path in (self.path / "checkpoints").glob("step-*")]
        return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d{5,}", name))

    def switches(self) -> "list[Switch]":
        """The Recipes that the run was switched to, in order."""
        return [
            Switch(event["step"], event["version"], event["changes"], Recipe(**event["recipe"]), event["time"])
            for event in self.events()
            if event["event"] == "switched"
        ]

    def log(self, lines: int | None = None) -> str:
        """The worker's output: all of it, or its last `lines` lines."""
        try:
            text = (self.path / "worker.log").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""
        return text if lines is None else "\n".join(text.rstrip().splitlines()[-lines:])


class Tail:
    """Reads metrics.jsonl from where it last stopped, so that watching a long run stays cheap."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._lines = 0
        self._inode = -1

    def read(self) -> list[StepRecord]:
        """The records that are new since the last call.

        A step number not above one already returned means that the run was resumed from a checkpoint:
        records from that step on are taken back and follow anew.
        """
        try:
            inode = self._path.stat().st_ino
        except FileNotFoundError:
            return []
        if inode != self._inode:  # replaced when a resume cut it
            self._inode, self._offset, self._lines = inode, 0, 0
        records = []
        for end, line in complete_lines(self._path, self._offset):
            records.append(_record(self._path, self._lines + 1, line))
            self._offset, self._lines = end, self._lines + 1
        return records


def list_directories(root: str | Path | None = None) -> list[RunDirectory]:
    """All runs under the root, the newest first."""
    parent = runs_root(root)
    if not parent.exists():
        return []
    if not parent.is_dir():
        raise RunError(f"{parent} is no folder, so there are no runs in it; name another one with LABKIT_RUNS")
    paths = [path for path in parent.iterdir() if not path.name.startswith(".")]
    found = [(path / "experiment.yaml", path) for path in paths if (path / "experiment.yaml").is_file()]
    found.sort(key=lambda pair: (pair[0].stat().st_mtime_ns, pair[1].name), reverse=True)
    return [RunDirectory(path.absolute()) for _, path in found]


def _record(path: Path, number: int, line: bytes) -> StepRecord:
    try:
        return StepRecord.from_json(line)
    except NewerSchemaError as error:
        raise RunError(f"{path}, line {number}: {error}") from None
    except ValueError as error:
        raise RunError(f"{path}, line {number}: {error}; restore the line, or remove it if it is no step") from None


def _step(line: bytes) -> int:
    """The step of a line of rollouts.jsonl, without parsing its long remainder."""
    match = re.match(rb'\{"step": (\d+),', line)
    return int(match.group(1)) if match else -1


def _readable_id(name: str) -> str:
    slug = re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")[:60] or "run"
    return f"{slug}-{time.strftime('%Y%m%d-%H%M%S')}"


def _rename_to_unused(draft: Path, parent: Path, run_id: str) -> Path:
    attempt = 1
    while True:
        path = parent / (run_id if attempt == 1 else f"{run_id}-{attempt}")
        try:
            return draft.rename(path)  # refused if the name is taken: a run directory is never empty
        except OSError:
            if not path.exists():
                raise
        attempt += 1


def _some(ids: list[str]) -> str:
    return ", ".join(ids[:4]) + (", …" if len(ids) > 4 else "")
