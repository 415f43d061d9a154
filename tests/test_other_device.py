"""An engine and a trainer on another device: nothing of theirs stays behind, and the numbers are those of the CPU.

There needn't be a GPU: tensors of "cuda" are CPU tensors here with a mark, and mixing both kinds is an
error, as it is on a GPU. What autograd makes has no mark and may meet either kind.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from labkit import models
from labkit.config import Experiment, Sampling, preset
from labkit.fp8 import KVScales, scaled_mm
from labkit.fp8.scaled_mm import Machine
from labkit.models.rollouts import Rollouts
from labkit.rl.loop import Loop
from labkit.rollout import Delivery, LocalEngine, Request, verify
from labkit.training import LocalTrainer

CUDA = torch.device("cuda")
FACTORIES = {torch.zeros, torch.ones, torch.empty, torch.full, torch.arange, torch.tensor, torch.rand, torch.randn}
ACROSS = {Tensor.copy_, Tensor.to, Tensor.cpu, Tensor.cuda}  # what may read from one device and write to the other
GETITEM, SETITEM = Tensor.__getitem__, Tensor.__setitem__


def home(x: Tensor) -> str:
    return getattr(x, "home", "")


def marked(result: Any, where: str) -> Any:
    def mark(x: Any) -> Any:
        if isinstance(x, Tensor) and where:
            x.home = where  # type: ignore[attr-defined]
        return x

    return tree_map(mark, result)


class Elsewhere(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return CUDA if home(args[0]) == "cuda" else func(*args)
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            marked(args[0], home(args[1]))
            return func(*args)
        if func in FACTORIES:
            where = torch.device(kwargs.pop("device", None) or "cpu").type
            return marked(func(*args, **kwargs), where)
        target = "cpu" if func is Tensor.cpu else self._target(args, kwargs) if func is Tensor.to else ""
        if target:
            args, kwargs = tree_map(lambda x: "cpu" if isinstance(x, torch.device | str) else x, (args, kwargs))
            moved = func(*args, **kwargs)
            return marked(moved if (home(args[0]) or "cpu") == target else moved.clone(), target)
        homes = {home(x) for x in self._meeting(func, args, kwargs)} - {""}
        if len(homes) == 2 and func not in ACROSS:
            raise RuntimeError(f"{name}: tensors on cuda and cpu")
        if "device" in kwargs:  # new_zeros and the like
            homes = {torch.device(kwargs.pop("device")).type}
        where = home(args[0]) if func in ACROSS else ("cuda" if "cuda" in homes else next(iter(homes), ""))
        result = func(*args, **kwargs)
        return result if func is SETITEM else marked(result, where)

    @staticmethod
    def _target(args: Any, kwargs: dict[str, Any]) -> str:
        named = [x for x in (*args[1:], kwargs.get("device")) if isinstance(x, torch.device | str)]
        return torch.device(named[0]).type if named else ""

    @staticmethod
    def _meeting(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
        """The tensors that must be on one device: numbers may come from the CPU, and so may an index into a GPU."""
        if func in (GETITEM, SETITEM) and home(args[0]) == "cuda":
            args = (args[0], *args[2:])
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and (x.dim() or home(x) == "cuda"):
                yield x


AMPERE = Machine("cuda", (8, 0), (13, 0))  # no FP8 kernels, so all of it is emulated
HOPPER = Machine("cuda", (9, 0), (13, 0))
ROWS = [torch.tensor([0, 1, 2]), torch.tensor([3])]
PROMPTS = [[3, 4, 5], [6, 7], [3, 9, 4, 5], [8]]


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def device(name: str) -> torch.device:
        return torch.device(name)

    monkeypatch.setattr("labkit.rollout.local.torch_device", device)
    monkeypatch.setattr("labkit.training.local.torch_device", device)
    monkeypatch.setattr(scaled_mm, "machine", lambda device: AMPERE if device.type == "cuda" else Machine("cpu"))
    with Elsewhere():
        yield


def test_the_pretended_device_is_strict(elsewhere: None) -> None:
    x = torch.zeros(3, device="cuda")
    assert x.device.type == "cuda"
    assert (x + 1).mul(2).device.type == "cuda"
    with pytest.raises(RuntimeError, match="cuda and cpu"):
        x + torch.zeros(3)
    with pytest.raises(RuntimeError, match="cuda and cpu"):
        torch.zeros(3)[x.long()]
    assert (x.cpu() + torch.zeros(3)).device.type == "cpu"


def generate(experiment: Experiment, device: str) -> tuple[LocalEngine, Rollouts]:
    policy = models.load("tiny")
    engine = LocalEngine(policy.config, experiment.recipe, policy.tokenizer.pad_id, device=device)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in policy.weights.items()}
    scales = KVScales(1, *[(0.02,) * policy.config.num_layers] * 3) if experiment.recipe.rollout.kv_cache else None
    sent = Delivery({name: tensor.to(device) for name, tensor in weights.items()}, scales, 1)
    engine.refit(sent.weights, sent.scales, 1)
    verify(engine, experiment.recipe, sent)
    request = Request(Sampling(), 8, frozenset(policy.tokenizer.eos_ids), 2)
    rollouts = engine.generate(PROMPTS, request, torch.Generator().manual_seed(0))
    return engine, rollouts


@pytest.mark.parametrize("name", ["bf16", "fp8-rollout", "fp8-rollout-kv", "fp8-e2e-kv"])
def test_an_engine_elsewhere_samples_the_same(name: str, elsewhere: None) -> None:
    experiment = preset(name)
    here, there = (generate(experiment, device) for device in ("cpu", "cuda"))
    assert torch.equal(here[1].tokens_BT, there[1].tokens_BT)
    assert torch.equal(here[1].logprobs_BR, there[1].logprobs_BR)
    assert here[0].saturation == there[0].saturation
    g = there[0].score(there[1], Sampling())
    assert g.device.type == "cpu"
    assert torch.equal(g, here[0].score(here[1], Sampling()))


def train(experiment: Experiment, rollouts: Rollouts, device: str) -> tuple[LocalTrainer, list[object]]:
    trainer = LocalTrainer(models.load("tiny"), experiment.override({"device": device, "grpo.kl_coef": 0.1}))
    before = trainer.logprobs(rollouts, ROWS), trainer.reference_logprobs(rollouts, ROWS)
    assert all(x.device.type == "cpu" for x in [*before[0], before[1]])
    g_BR = rollouts.logprobs_BR
    updates = [trainer.update(rollouts, ROWS, lambda rows, c_bR: (c_bR * g_BR[rows]).sum()) for _ in range(2)]
    shadow = trainer.shadow_logprobs(rollouts, ROWS)
    scales = trainer.calibrate(rollouts, ROWS, version=2)
    return trainer, [*before[0], before[1], updates, shadow, scales, trainer.logprobs(rollouts, ROWS)[0]]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("name", ["bf16", "fp8-e2e-kv"])
def test_a_trainer_elsewhere_learns_the_same(name: str, packing: bool, elsewhere: None) -> None:
    experiment = preset(name).override({"grpo.packing": packing, "grpo.lr": 1e-3})
    _, rollouts = generate(experiment, "cpu")
    (_, here), (there, found) = (train(experiment, rollouts, device) for device in ("cpu", "cuda"))
    assert {weight.device.type for weight in there.weights().values()} == {"cuda"}
    for one, other in zip(here, found, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other
    state = dict(there.state_dict())
    state["parameters"] = {
        name: tensor.cpu() for name, tensor in state["parameters"].items()
    }  # as a checkpoint holds it
    again = LocalTrainer(models.load("tiny"), experiment.override({"device": "cuda"}))
    again.load_state_dict(state)
    assert torch.equal(again.logprobs(rollouts, ROWS)[0], found[-1])


@pytest.mark.parametrize("changes", [{}, {"lora.rank": 8, "recipe.train.wgrad": False}], ids=["all", "adapters"])
def test_a_whole_run_elsewhere_has_the_same_records(changes: dict[str, Any], elsewhere: None) -> None:
    small = {"steps": 2, "grpo.prompts_per_step": 4, "grpo.group_size": 2, "grpo.micro_batch": 4}
    experiment = preset("fp8-e2e-kv").override({**small, "eval_every": 2, "eval_prompts": 8, **changes})
    here, there = (
        list(Loop(experiment.override({"device": device})).steps()) for device in ("cpu", "cuda")
    )  # fmt: skip
    assert [record.metrics for record in there] == [record.metrics for record in here]
    assert [record.kv_scales for record in there] == [record.kv_scales for record in here]
    assert there[-1].active["rollout.kv_cache"]["state"] == "fp8"


def test_kernels_are_used_where_the_device_has_them(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_mm, "machine", lambda device: HOPPER if device.type == "cuda" else Machine("cpu"))
    experiment = preset("fp8-e2e").override({"recipe.scaling.granularity": "row"})
    (_, here), (engine, found) = (generate(experiment, device) for device in ("cpu", "cuda"))
    assert engine.active()["rollout.linears"] == {
        "state": "fp8",
        "detail": "28 of 29 layers, e4m3/row/pow2, scaled_mm row",
    }
    first = here.logprobs_BR[:, 0], found.logprobs_BR[:, 0]
    torch.testing.assert_close(*first, rtol=0, atol=0.1)
    trainer, (p_BR, *_) = train(experiment, here, "cuda")
    assert trainer.active()["train.wgrad"]["state"] == "fp8"
    torch.testing.assert_close(p_BR[:4], here.logprobs_BR[:4], rtol=0, atol=0.1)


def test_what_is_emulated_on_a_gpu_says_why(elsewhere: None) -> None:
    engine, _ = generate(preset("fp8-rollout-kv"), "cuda")
    active = engine.active()
    assert active["rollout.linears"]["state"] == "emulated"
    assert active["rollout.linears"]["detail"].endswith("torch quantiser: no block kernel for compute capability 8.0")
    assert active["rollout.kv_cache"] == {"state": "fp8", "detail": "e4m3 bytes, scales of version 1"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_device_that_is_not_there_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"device: not available here: .* finds no GPU; set it to cpu"):
        LocalTrainer(models.load("tiny"), Experiment(device="cuda"))
    with pytest.raises(ValueError, match="device: not available here"):
        LocalEngine(models.load("tiny").config, Experiment().recipe, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "fp8-e2e", "fp8-e2e-kv"])
def test_a_step_on_a_gpu_agrees_with_the_cpu(name: str) -> None:
    experiment = preset(name)
    engine, rollouts = generate(experiment, "cuda")
    _, expected = generate(experiment, "cpu")
    assert bool((rollouts.tokens_BT[:, rollouts.prompt_width] == expected.tokens_BT[:, rollouts.prompt_width]).all())
    torch.testing.assert_close(rollouts.logprobs_BR[:, 0], expected.logprobs_BR[:, 0], rtol=0, atol=0.1)
    torch.testing.assert_close(engine.score(rollouts, Sampling()), rollouts.logprobs_BR, rtol=0, atol=0.1)
    trainer, (p_BR, *_) = train(experiment, rollouts, "cuda")
    torch.testing.assert_close(p_BR[:4], rollouts.logprobs_BR[:4], rtol=0, atol=0.2)
    assert trainer.state_dict()["updates"] == 2
