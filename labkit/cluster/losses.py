"""Lost actors: each is an event of the run, and more of them than `cluster.restarts` end it."""

from dataclasses import dataclass

from labkit.runs.store import RunDirectory, RunError


@dataclass(frozen=True)
class Losses:
    """Of both kinds of actors together, in one life of the worker: supervisor and trainer count the same events."""

    directory: RunDirectory
    restarts: int
    since: float  # seconds since 1970

    def count(self, actor: str, why: str) -> None:
        """One more; RunError when it was one too many."""
        self.directory.append_event("lost", actor=actor, reason=why)
        events = self.directory.events()
        number = sum(event["event"] == "lost" and event["time"] >= self.since for event in events)
        if number > self.restarts:
            raise RunError(
                f"lost the {actor} actor ({why}), the {_ordinal(number)} loss where cluster.restarts allows "
                f"{self.restarts}: look into worker.log for what ends it, then resume from the last checkpoint"
            )


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
