"""What the worker process of a run over Ray does: it connects, starts the trainer actor, and minds it.

    SIGTERM                      becomes the command stop, which the trainer obeys
    the trainer actor is lost    another one resumes from the last checkpoint; switches since then are made again
    the end                      however it comes, the actors end before state.json says so

What clients asked for is in commands.jsonl, which a new trainer reads from its beginning; so that nothing is done
twice, what was answered is taken out of it first.
"""

import time
from collections.abc import Callable

from labkit.cluster import plan, surroundings
from labkit.cluster.actors import Actor, Lost, cluster
from labkit.cluster.losses import Losses
from labkit.cluster.trainer import TrainerActor
from labkit.config import Experiment
from labkit.config.locations import model_folder
from labkit.runs.state import RunState
from labkit.runs.store import RunDirectory
from labkit.runs.worker import Outcome

_POLL = 0.2
_STORE = 128 << 20  # bytes; Ray takes no less than 75 MiB


def supervise(
    directory: RunDirectory, experiment: Experiment, signed: RunState, terminated: Callable[[], bool]
) -> Outcome:
    """Carry the run out over Ray. What keeps it from starting, and one loss too many, is raised."""
    needed = list(plan.actors(experiment).values())
    with cluster(experiment.cluster.address, needed, _store_bytes(experiment)):
        return _Supervisor(directory, experiment, signed, terminated).outcome()


def _store_bytes(experiment: Experiment) -> int | None:
    """Two deliveries and what is read back of them. Past what a machine surely has, Ray is left to decide."""
    weights = sum(file.stat().st_size for file in model_folder(experiment.model).glob("*.safetensors"))
    size = _STORE + (4 * weights if experiment.cluster.placement == "separate" else 0)
    return size if size < 4 << 30 else None


class _Supervisor:
    def __init__(
        self, directory: RunDirectory, experiment: Experiment, signed: RunState, terminated: Callable[[], bool]
    ) -> None:
        self._directory, self._experiment, self._signed = directory, experiment, signed
        self._terminated, self._told = terminated, False
        self._losses = Losses(directory, experiment.cluster.restarts, time.time())

    def outcome(self) -> Outcome:
        recovering = False
        while True:
            reserved = plan.actors(self._experiment)[plan.TRAINER]
            trainer = Actor(
                TrainerActor, reserved, surroundings.for_actor(self._experiment),
                self._directory.path, surroundings.threads_asked(),
            )  # fmt: skip
            try:
                return self._carried_out(trainer, recovering)
            except Lost as lost:
                self._losses.count(plan.TRAINER, str(lost))
                _keep_unanswered(self._directory)
                recovering = True
            finally:
                trainer.end()

    def _carried_out(self, trainer: Actor, recovering: bool) -> Outcome:
        placed = trainer.call("where")
        while not placed.done(_POLL):  # a busy cluster may keep it waiting
            self._pass_on_signal()
            if any(entry.get("command") == "stop" for entry in self._directory.commands()[0]):
                return "stopped", ""
        pid, host = placed.result()
        transfer = plan.transfer(self._experiment)
        detail = {"transfer": str(transfer)} if transfer else {}
        self._directory.append_event("placed", actor=plan.TRAINER, pid=pid, host=host, **detail)
        outcome = trainer.call("carry_out", self._signed, self._losses.since, recovering)
        while not outcome.done(_POLL):
            self._pass_on_signal()
        return outcome.result()

    def _pass_on_signal(self) -> None:
        if self._terminated() and not self._told:
            self._told = True
            self._directory.append_command("stop")


def _keep_unanswered(directory: RunDirectory) -> None:
    """Of the commands, those that a new trainer has to act on."""
    commands, _ = directory.commands()
    answers = [event["time"] for event in directory.events() if event["event"] in ("switched", "refused", "checkpoint")]
    answered = max(answers, default=0.0)
    held = [entry["command"] for entry in commands if entry.get("command") in ("pause", "resume")][-1:]
    directory.clear_commands()
    for entry in commands:
        match entry:
            case {"command": "stop"}:
                directory.append_command("stop")
            case {"command": "checkpoint", "time": when} if when > answered:
                directory.append_command("checkpoint")
            case {"command": "switch", "time": when, "recipe": recipe} if when > answered:
                directory.append_command("switch", recipe=recipe)
    if held == ["pause"]:
        directory.append_command("pause")
