"""What a placement asks of a cluster: its actors, what they reserve, and how weights get from one to the other.

    device cpu     trainer 1 CPU (or `threads`)            rollout the same
    device cuda    trainer 1 GPU                           rollout 1 GPU

Weights that change processes go through host memory: the trainer puts one buffer into Ray's object store, the rollout
actor copies it out. On GPUs that is the slow way. The fast one is written down here as a `Transfer`, and said to be
unavailable until it has run.
"""

from dataclasses import dataclass

from labkit.config import Experiment

TRAINER, ROLLOUT = "trainer", "rollout"


@dataclass(frozen=True)
class Reservation:
    cpus: int
    gpus: int
    memory: int = 0  # bytes; 0 reserves none


@dataclass(frozen=True)
class Transfer:
    """One broadcast per refit: `ranks` by actor, the tensors of a state dict in order, packed to `bucket_bytes`."""

    backend: str
    ranks: dict[str, int]
    dtype: str
    bucket_bytes: int
    unavailable: str  # why it is not what is used

    def __str__(self) -> str:
        return f"{self.backend}: not available here: {self.unavailable}; the object store carries the weights"


def actors(experiment: Experiment) -> dict[str, Reservation]:
    """The actors of a placement, by name."""
    each = Reservation(experiment.threads or 1, 1 if experiment.device == "cuda" else 0)
    names = (TRAINER, ROLLOUT) if experiment.cluster.placement == "separate" else (TRAINER,)
    return dict.fromkeys(names, each)


def transfer(experiment: Experiment) -> Transfer | None:
    """The transfer that would suit the hardware better than the object store, if any."""
    if experiment.device != "cuda" or experiment.cluster.placement != "separate":
        return None
    why = "no two GPUs were at hand to prove it bit for bit"
    return Transfer("nccl", {TRAINER: 0, ROLLOUT: 1}, "bfloat16", 512 << 20, why)
