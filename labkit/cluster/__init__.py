"""A run over Ray: the same Experiment, carried out by actors instead of by the worker's own process.

    placement     trainer actor           rollout actor       weights travel
    process       none: the worker itself                     by reference
    colocated     Worker, Loop, engine    none                by reference
    separate      Worker, Loop            the engine          as one buffer in Ray's object store

    client ── run directory ── worker process ── Ray ── trainer actor ── rollout actor
                               lock, heartbeat,         commands, events,     generate, score,
                               last state               records, checkpoints  refit, read_back

The worker process supervises: it connects to the cluster (or starts one that lives and dies with it), starts the
trainer actor, and starts another when that one is lost. The actor carries the run out in the run directory exactly as
a worker does, so the directory must be on a file system that all nodes share. Engine and trainer compute what they
compute in one process: random numbers travel with each call, so records are the same bit for bit.

Ray is imported in `labkit.cluster.actors` alone.
"""

from labkit.cluster.surroundings import prepare

prepare()
