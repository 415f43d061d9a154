"""A RemoteEngine beside a LocalEngine that does the same in this process."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from labkit import models
from labkit.cluster.losses import Losses
from labkit.cluster.trainer import Rollouts as Host
from labkit.config import Experiment
from labkit.models import Decoder, Policy
from labkit.models.lora import adapters, attach, is_adapter
from labkit.models.rollouts import Rollouts
from labkit.rl.recalibration import initial_scales
from labkit.rollout import Delivery, RefitError, Request, build_engine, verify
from labkit.runs.store import RunDirectory, RunError

if TYPE_CHECKING:
    from labkit.cluster.engine import RemoteEngine

PROMPTS = [[1, 5, 3], [1, 4, 4, 6, 3], [1, 7, 3]]


class StopIt(Exception):
    pass


class Hook:
    """What the caller does while it waits."""

    def __init__(self) -> None:
        self.act: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        self.act()


@pytest.fixture(scope="module")
def directory(small: Experiment, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return RunDirectory.create(separate(small), tmp_path_factory.mktemp("runs"))


def separate(experiment: Experiment) -> Experiment:
    return experiment.override({"cluster.placement": "separate"})


@pytest.fixture(scope="module")
def host(address: str, small: Experiment, directory: RunDirectory) -> Iterator[Host]:
    host = Host(directory, separate(small), since=time.time())
    yield host
    host.end()


@pytest.fixture(scope="module")
def policy() -> Policy:
    return models.load("tiny")


@pytest.fixture
def delivery(policy: Policy, small: Experiment) -> Delivery:
    unit = small.recipe.override({"recalibration.policy": "unit"})
    scales = initial_scales(unit, policy.config.num_layers, lambda: pytest.fail("not needed"))
    return Delivery(policy.to(torch.bfloat16).weights, scales, 3)


@pytest.fixture
def hook() -> Hook:
    return Hook()


@pytest.fixture
def remote(host: Host, policy: Policy, small: Experiment, hook: Hook, delivery: Delivery) -> "RemoteEngine":
    from labkit.cluster.engine import RemoteEngine

    engine = RemoteEngine(host, separate(small), hook)
    engine.refit(delivery.weights, delivery.scales, delivery.version)
    return engine


@pytest.fixture
def local(policy: Policy, small: Experiment, delivery: Delivery):
    engine = build_engine(policy, small, lambda: None)
    engine.refit(delivery.weights, delivery.scales, delivery.version)
    return engine


def request(small: Experiment, tokens: int = 12) -> Request:
    return Request(small.sampling, tokens, frozenset(), 4)


def same(rollouts: Rollouts, other: Rollouts) -> bool:
    pairs = [(getattr(rollouts, each.name), getattr(other, each.name)) for each in fields(Rollouts)]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def test_it_samples_scores_and_reports_as_the_engine_itself(remote: "RemoteEngine", local, small: Experiment) -> None:
    here, there = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    for _ in range(2):
        sampled = local.generate(PROMPTS, request(small), here)
        assert same(remote.generate(PROMPTS, request(small), there), sampled)
        assert torch.equal(here.get_state(), there.get_state())
    assert torch.equal(remote.score(sampled, small.sampling), local.score(sampled, small.sampling))
    assert (remote.state(), remote.active(), remote.saturation) == (local.state(), local.active(), local.saturation)


def test_a_refit_is_proved_by_the_bits_that_come_back(
    remote: "RemoteEngine", local, small: Experiment, delivery: Delivery
) -> None:
    verify(remote, small.recipe, delivery)
    changed = {name: weight + (0.01 if "q_proj" in name else 0) for name, weight in delivery.weights.items()}
    with pytest.raises(RefitError, match="q_proj"):
        verify(remote, small.recipe, Delivery(changed, delivery.scales, delivery.version))
    for engine in (remote, local):
        engine.refit(changed, delivery.scales, 4)
    assert 0 < remote.codes_changed == local.codes_changed
    with pytest.raises(RefitError, match="the engine says weight version 4"):
        verify(remote, small.recipe, delivery)


def test_an_error_of_the_engine_is_raised_as_it_was(remote: "RemoteEngine", small: Experiment) -> None:
    with pytest.raises(ValueError, match="positions: shorten the prompts"):
        remote.generate(PROMPTS, request(small, 100_000), torch.Generator())


def test_what_the_caller_raises_while_it_waits_ends_the_call(
    remote: "RemoteEngine", local, small: Experiment, hook: Hook
) -> None:
    def stop() -> None:
        raise StopIt

    generator = torch.Generator().manual_seed(1)
    hook.act = stop
    start = time.monotonic()
    with pytest.raises(StopIt):
        remote.generate(PROMPTS * 8, request(small, 100), generator)
    took = time.monotonic() - start
    hook.act = lambda: None
    begun = remote.begin(PROMPTS * 8, request(small, 100), generator)
    begun.drop()
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(1).get_state())
    _, whole = remote.begin(PROMPTS * 8, request(small, 100), torch.Generator()).result()
    assert took < whole / 2, "it was waited for"
    again = torch.Generator().manual_seed(1)
    assert same(remote.generate(PROMPTS, request(small), generator), local.generate(PROMPTS, request(small), again))


def placed(directory: RunDirectory) -> list[int]:
    return [event["pid"] for event in directory.events() if event["event"] == "placed"]


def test_a_lost_actor_is_replaced_and_nothing_else_changes(
    remote: "RemoteEngine", local, small: Experiment, hook: Hook, directory: RunDirectory, delivery: Delivery
) -> None:
    changed = {name: weight * 1.5 for name, weight in delivery.weights.items()}
    for engine in (remote, local):
        engine.refit(changed, delivery.scales, 5)
    pid = placed(directory)[-1]
    long = request(small, 60)

    def kill() -> None:
        hook.act = lambda: None
        os.kill(pid, signal.SIGKILL)

    hook.act = kill
    sampled = remote.generate(PROMPTS * 8, long, torch.Generator().manual_seed(2))
    assert same(sampled, local.generate(PROMPTS * 8, long, torch.Generator().manual_seed(2)))
    assert placed(directory)[-1] != pid
    (lost,) = (event for event in directory.events() if event["event"] == "lost")
    assert lost["actor"] == "rollout"
    assert lost["reason"]
    assert remote.codes_changed == local.codes_changed
    verify(remote, small.recipe, Delivery(changed, delivery.scales, 5))


def test_an_actor_that_takes_anothers_place_gets_the_base_before_the_adapters(
    host: Host, policy: Policy, small: Experiment, hook: Hook, directory: RunDirectory, delivery: Delivery
) -> None:
    from labkit.cluster.engine import RemoteEngine

    frozen = small.override({"recipe.train.wgrad": False, "lora.rank": 4})
    model = attach(Decoder(policy.config), frozen.lora)
    model.load_weights({**model.weights(), **delivery.weights})
    moved = {name: weight + 0.01 if is_adapter(name) else weight for name, weight in model.weights().items()}
    remote = RemoteEngine(host, separate(frozen), hook)
    remote.refit(model.weights(), delivery.scales, 3)
    for version in (4, 5):
        remote.refit(adapters(moved), delivery.scales, version)
    assert remote.codes_changed == 0.0
    os.kill(placed(directory)[-1], signal.SIGKILL)
    verify(remote, frozen.recipe, Delivery(moved, delivery.scales, 5))


def test_losses_of_this_life_are_counted_and_limited(small: Experiment, tmp_path: Path) -> None:
    directory = RunDirectory.create(small, tmp_path)
    Losses(directory, 0, since=time.time() + 60).count("rollout", "of a life before")
    losses = Losses(directory, 1, since=time.time())
    losses.count("trainer", "the first")
    with pytest.raises(RunError, match=r"lost the rollout actor \(no memory\), the second loss where .* allows 1"):
        losses.count("rollout", "no memory")
    assert [event["reason"] for event in directory.events()] == ["of a life before", "the first", "no memory"]
