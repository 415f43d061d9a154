"""The Transformer Engine trainer: its recipes as that package makes them, its layers, and, on a GPU, its numbers."""

import ast
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from labkit import models
from labkit.config import Experiment, Recipe, preset
from labkit.fp8 import Float8Linear, LinearFormat
from labkit.training import LocalTrainer, te
from labkit.training.te_plan import recipe_plan

SPEC = importlib.util.find_spec("transformer_engine")
needs_package = pytest.mark.skipif(SPEC is None, reason="transformer-engine is not installed, not even its Python part")
ALL = {"fprop": True, "dgrad": True, "wgrad": True}
SCALINGS: list[dict[str, str]] = [
    {},
    {"scale": "fp32"},
    {"grad_format": "e5m2"},
    {"granularity": "tensor"},
    {"granularity": "tensor", "scale": "fp32", "grad_format": "e5m2"},
    {"granularity": "mx"},
]

# ---- what the package itself says


MAKE = """
import dataclasses, json, sys
from labkit.config import Recipe
from labkit.training import te
from labkit.training.te_plan import recipe_plan
for settings in json.loads(sys.argv[1]):
    made = te.te_recipe(recipe_plan(Recipe(**settings)))
    scales = [getattr(made, f"fp8_quant_{name}", None) for name in ("fwd_inp", "fwd_weight", "bwd_grad")]
    print(json.dumps([type(made).__name__, made.fp8_format.name, made.backward_override,
                      [scale and scale.power_2_scale for scale in scales]]))
"""


@needs_package
@pytest.mark.parametrize("misleading", [{}, {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}])
def test_transformer_engine_makes_the_recipes_that_are_planned(misleading: dict[str, str]) -> None:
    settings = [{"train": ALL, "scaling": scaling} for scaling in SCALINGS] + [{"train": {"fprop": True}}]
    environment = {**os.environ, "NVTE_PROJECT_BUILDING": "1", **misleading}
    done = subprocess.run(
        [sys.executable, "-c", MAKE, json.dumps(settings)], capture_output=True, text=True, env=environment
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        ["Float8BlockScaling", "E4M3", None, [True] * 3],
        ["Float8BlockScaling", "E4M3", None, [False] * 3],
        ["Float8BlockScaling", "HYBRID", None, [True] * 3],
        ["Float8CurrentScaling", "E4M3", None, [True] * 3],
        ["Float8CurrentScaling", "HYBRID", None, [False] * 3],
        ["MXFP8BlockScaling", "E4M3", None, [None] * 3],
        ["Float8BlockScaling", "E4M3", "high_precision", [True] * 3],
    ], done.stderr


def arguments(file: str, name: str, inside: str = "") -> set[str]:
    """The parameters of a function in the package's source, which can't be imported without a GPU's libraries."""
    assert SPEC is not None
    assert SPEC.origin is not None
    scope: Any = ast.parse((Path(SPEC.origin).parent / file).read_text())
    if inside:
        scope = next(node for node in scope.body if isinstance(node, ast.ClassDef) and node.name == inside)
    function = next(node for node in scope.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return {argument.arg for argument in function.args.args}


@needs_package
def test_what_is_called_is_there() -> None:
    linear = "pytorch/module/linear.py"
    assert {"in_features", "out_features", "bias", "params_dtype", "device"} <= arguments(linear, "__init__", "Linear")
    assert "is_first_microbatch" in arguments(linear, "forward", "Linear")
    assert {"enabled", "recipe"} <= arguments("pytorch/quantization.py", "__init__", "autocast")
    for probe in ("is_fp8_available", "is_fp8_block_scaling_available", "is_mxfp8_available"):
        assert arguments("pytorch/quantization.py", probe) == {"return_reason"}
    for quantizer in ("float8_blockwise_tensor.py", "float8_tensor.py"):
        assert SPEC is not None
        assert SPEC.origin is not None
        assert "force_pow_2_scales" in (Path(SPEC.origin).parent / "pytorch/tensor" / quantizer).read_text()


# ---- the layers, on a stand-in for te.Linear that computes in BF16 and writes down how it is called


class StandIn(nn.Linear):
    calls: list[tuple[tuple[int, ...], bool | None]] = []  # noqa: RUF012
    pow2 = True

    def __init__(self, in_features: int, out_features: int, bias: bool, params_dtype: torch.dtype, device: Any) -> None:
        super().__init__(in_features, out_features, bias, device, params_dtype)
        quantizer = types.SimpleNamespace(force_pow_2_scales=self.pow2)
        self.quantizers = {"scaling_fwd": [quantizer], "scaling_bwd": [quantizer]}

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:  # type: ignore[override]
        self.calls.append((tuple(x.shape), is_first_microbatch))
        return super().forward(x)


@contextlib.contextmanager
def autocast(enabled: bool, recipe: Any) -> Iterator[None]:
    assert enabled
    assert recipe is not None
    yield


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    package = types.SimpleNamespace(
        Linear=StandIn, autocast=autocast, is_fp8_block_scaling_available=lambda return_reason: (True, "")
    )
    monkeypatch.setattr(te, "_pytorch", lambda plan: package)
    monkeypatch.setattr(te, "te_recipe", lambda plan: plan)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("labkit.training.local.torch_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(StandIn, "calls", [])
    return StandIn


PLAN = recipe_plan(Recipe(train=ALL))
FP8 = LinearFormat(fprop=True, dgrad=True, wgrad=True)


def test_a_layer_keeps_its_parameters_and_pads_its_tokens(stand_in: type[StandIn]) -> None:
    layer = Float8Linear(32, 48, bias=True, precision=FP8)
    ours = te.TELinear(layer, PLAN)
    assert dict(ours.named_parameters()).keys() == {"weight", "bias"}
    assert ours.state_dict().keys() == {"weight", "bias"}
    assert ours.weight is layer.weight
    x = torch.randn(3, 7, 32).bfloat16()
    y = ours(x)
    torch.testing.assert_close(y, nn.functional.linear(x, layer.weight, layer.bias))
    assert stand_in.calls == [((32, 32), True)]
    y.sum().backward()
    assert layer.weight.grad is not None


def test_the_quantised_weight_is_kept_until_the_weight_changes(stand_in: type[StandIn]) -> None:
    ours, x = te.TELinear(Float8Linear(32, 48, precision=FP8), PLAN), torch.randn(16, 32).bfloat16()
    ours(x), ours(x)
    with torch.no_grad():
        ours(x)
        ours.weight.mul_(2)
    ours(x)
    ours.plan = recipe_plan(Recipe(train=ALL, scaling={"grad_format": "e5m2"}))
    ours(x)
    assert [first for _, first in stand_in.calls] == [True, False, None, True, True]


def test_scales_that_did_not_take_effect_are_noticed(stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "pow2", False)
    with pytest.raises(RuntimeError, match="doesn't scale as asked for"):
        te.TELinear(Float8Linear(32, 48, precision=FP8), PLAN)(torch.randn(16, 32).bfloat16())


def test_the_trainer_swaps_the_layers_and_nothing_else(stand_in: type[StandIn]) -> None:
    experiment = preset("fp8-e2e").override(
        {"trainer": "te", "device": "cuda", "recipe.keep_bf16.first_layers": 1, "grpo.kl_coef": 0.1}
    )
    policy = models.load("tiny")
    trainer = te.TETrainer(policy, experiment)
    assert {type(linear) for _, _, linear in trainer.model.linears()} == {te.TELinear}
    assert trainer.weights().keys() == policy.weights.keys()
    tokens = torch.arange(8)[None]
    trainer.model(tokens, tokens, lambda layer, q, k, v: q)
    per_layer = 7
    assert len(stand_in.calls) == (policy.config.num_layers - 1) * per_layer
    active = trainer.active()
    wgrad = "e4m3/block/pow2, Transformer Engine Float8BlockScaling, E4M3, power-of-2 scales"
    assert active["train.wgrad"]["detail"].endswith(wgrad)
    trainer.switch(experiment.override({"recipe.train": {"dgrad": False, "wgrad": False}}))
    assert trainer.active()["train.wgrad"]["state"] == "bf16"


def test_a_layer_that_does_not_fit_is_named(stand_in: type[StandIn]) -> None:
    trainer = te.TETrainer(models.load("tiny"), preset("fp8-e2e").override({"trainer": "te", "device": "cuda"}))
    trainer.model.model.layers[0].mlp.up_proj.out_features = 200  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj\.weight is 200 x .* multiples of 16"):
        trainer.switch(trainer.experiment)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    experiment = Experiment(trainer="te", device="cuda")
    with pytest.raises(ValueError, match="device: not available here"):
        te.TETrainer(models.load("tiny"), experiment)
    there, why = te.available(PLAN)
    assert not there
    assert "run labkit gpu-setup" in why


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_transformer_engine_computes_what_is_emulated(scaling: dict[str, str]) -> None:
    recipe = Recipe(train=ALL, scaling=scaling)
    plan = recipe_plan(recipe)
    there, why = te.available(plan)
    if not there:
        pytest.skip(why)
    emulated = Float8Linear(256, 384, precision=LinearFormat.from_recipe(recipe, side="train"))
    real = te.TELinear(Float8Linear(256, 384, precision=emulated.precision).cuda(), plan)
    random = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(3, 50, n, generator=random).bfloat16() for n in (256, 384))
    with torch.no_grad():
        real.weight.copy_(emulated.weight)
    found = _pass(real, x.cuda(), dy.cuda())
    for one, other in zip(found, _pass(emulated, x, dy), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=2**-6, atol=5e-3 * float(other.abs().max()))


def _pass(layer: Float8Linear, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    assert layer.weight.grad is not None
    return [y.detach(), x.grad, layer.weight.grad]


@pytest.mark.gpu
def test_a_trainer_on_transformer_engine_agrees_with_the_embedded_one() -> None:
    experiment = preset("fp8-e2e").override({"device": "cuda"})
    there, why = te.available(recipe_plan(experiment.recipe))
    if not there:
        pytest.skip(why)
    policy = models.load("tiny")
    ours = te.TETrainer(policy, experiment.override({"trainer": "te"}))
    embedded = LocalTrainer(policy, experiment)
    tokens = torch.arange(3, 19, device="cuda")[None]
    for trainer in (ours, embedded):
        assert trainer.active()["train.fprop"]["state"] == "fp8"

    def logits(trainer: LocalTrainer) -> Tensor:
        hidden = trainer.model(tokens, tokens - 3, lambda layer, q, k, v: q)
        return trainer.model.logits(hidden).detach()

    torch.testing.assert_close(logits(ours), logits(embedded), rtol=0, atol=0.2)
