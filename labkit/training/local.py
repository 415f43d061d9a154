"""The embedded trainer: one torch model on a CPU, its FP8 emulated bit for bit, or on a GPU with FP8 kernels.

p (scoring), c (update) and the calibration pass all run through `_forward`, so they share weights, quantised
operands, kernels and micro-batches. With the engine's own attention kernel ("math") and a Recipe that treats
rollout and training alike, p equals g exactly on a CPU. Rollouts come from the CPU, log-probabilities go back to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.config import Experiment
from labkit.config.own import KINDS, short
from labkit.fp8 import AmaxObserver, KVScales, LinearFormat, scaled_mm
from labkit.models import lora
from labkit.models.attention import ObservedAttention
from labkit.models.decoder import Decoder
from labkit.models.device import torch_device
from labkit.models.logprobs import token_logprobs
from labkit.models.moe import set_router
from labkit.models.policy import Policy
from labkit.models.rollouts import Rollouts
from labkit.models.routing import Routes
from labkit.runs.record import Active
from labkit.training import micro_batch
from labkit.training.master_weights import MasterWeights
from labkit.training.trainer import LossFn, Rows, Update


def _nothing() -> None:
    pass


class _Pass(NamedTuple):
    """The forward of one micro-batch."""

    logprobs_bR: Tensor
    entropy_bR: Tensor
    batch: micro_batch.MicroBatch
    routes: Routes


class LocalTrainer:
    def __init__(self, policy: Policy, experiment: Experiment, on_microstep: Callable[[], None] = _nothing) -> None:
        self.experiment, self.on_microstep = experiment, on_microstep
        self.num_layers = policy.config.num_layers
        self.device = torch_device(experiment.device)
        self.model = self._with_adapters(self._build(policy), policy)
        updates = experiment.steps * experiment.grpo.minibatches
        self.master = MasterWeights(self.model, experiment.grpo, updates)
        self.reference = self._build(policy).requires_grad_(False) if experiment.grpo.kl_coef > 0 else None
        self._routes_BTLK: Tensor | None = None

    def _build(self, policy: Policy) -> Decoder:
        model = Decoder(policy.config)
        model.load_weights(lora.base(policy.weights))
        model.to(self.device)
        self._set_precision(model)
        return model

    def _with_adapters(self, model: Decoder, policy: Policy) -> Decoder:
        """Those that the policy has, else new ones; nothing where all weights are trained."""
        lora.attach(model, self.experiment.lora, self.experiment.seed).to(self.device)
        if trained := lora.adapters(policy.weights):
            model.load_weights({**model.weights(), **trained})
        return model

    def _set_precision(self, model: Decoder) -> None:
        recipe = self.experiment.recipe
        train_format = LinearFormat.from_recipe(recipe, side="train")
        for layer, _, linear in model.linears():
            linear.precision = train_format if recipe.covers(layer, self.num_layers) else LinearFormat.off()
        set_router(model, recipe)

    def switch(self, experiment: Experiment) -> None:
        """Go on in the precision of another Recipe. Weights, optimizer and schedule stay."""
        self.experiment = experiment
        for model in (self.model, self.reference):
            if model is not None:
                self._set_precision(model)

    # ---- log-probabilities

    def logprobs(self, rollouts: Rollouts, micro_batches: Sequence[Rows]) -> tuple[Tensor, Tensor]:
        logprobs_BR, entropy_BR, self._routes_BTLK = self._score(self.model, rollouts, micro_batches)
        return logprobs_BR, entropy_BR

    def routes(self) -> Tensor | None:
        return self._routes_BTLK

    def reference_logprobs(self, rollouts: Rollouts, micro_batches: Sequence[Rows]) -> Tensor:
        assert self.reference is not None, "no reference policy: kl_coef is 0"
        return self._score(self.reference, replace(rollouts, replay_BTLK=None), micro_batches)[0]

    def shadow_logprobs(self, rollouts: Rollouts, micro_batches: Sequence[Rows]) -> Tensor:
        """p as BF16 linears would give it, from the same weights."""
        linears = [linear for _, _, linear in self.model.linears()]
        precisions = [linear.precision for linear in linears]
        try:
            for linear in linears:
                linear.precision = LinearFormat.off()
            return self._score(self.model, rollouts, micro_batches)[0]
        finally:
            for linear, precision in zip(linears, precisions, strict=True):
                linear.precision = precision

    @torch.no_grad()
    def _score(
        self, model: Decoder, rollouts: Rollouts, micro_batches: Sequence[Rows]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """p, entropy and, of a mixture of experts, what its routers would choose."""
        logprobs_BR = torch.zeros_like(rollouts.logprobs_BR)
        entropy_BR = torch.zeros_like(rollouts.logprobs_BR)
        routes_BTLK = None
        if (moe := model.config.moe) is not None:
            shape = *rollouts.tokens_BT.shape, len(moe.layers), moe.experts_per_token
            routes_BTLK = torch.full(shape, -1, dtype=moe.index_dtype)
        for rows in micro_batches:
            done = self._forward(model, rollouts, rows)
            logprobs_BR[rows], entropy_BR[rows] = done.logprobs_bR, done.entropy_bR
            if routes_BTLK is not None:
                own_bTLK = done.batch.unpack(done.routes.own())
                routes_BTLK[rows, : own_bTLK.shape[1]] = own_bTLK.to(routes_BTLK)
            self.on_microstep()
        return logprobs_BR, entropy_BR, routes_BTLK

    def _forward(self, model: Decoder, rollouts: Rollouts, rows: Rows) -> _Pass:
        batch = self._micro_batch(rollouts, rows)
        routes = Routes(batch.replay)
        hidden_ND = model(batch.tokens, batch.positions, batch.attention, routes).flatten(0, 1)
        logits_nV = model.logits(hidden_ND[batch.predicting_n])
        logprobs_n, entropy_n = token_logprobs(logits_nV, batch.targets_n, self.experiment.sampling)
        return _Pass(batch.scatter(logprobs_n).cpu(), batch.scatter(entropy_n).cpu(), batch, routes)

    def _micro_batch(self, rollouts: Rollouts, rows: Rows, whole: bool = False) -> micro_batch.MicroBatch:
        return micro_batch.build(
            rollouts, rows, self.device,
            packing=self.experiment.grpo.packing, kernel=self.experiment.trainer_attention, whole=whole,
        )  # fmt: skip

    # ---- update

    def current_logprobs(self, rollouts: Rollouts, rows: Rows) -> Tensor:
        """c of one micro-batch [b, R], with the graph behind it."""
        return self._forward(self.model, rollouts, rows).logprobs_bR

    def update(self, rollouts: Rollouts, micro_batches: Sequence[Rows], loss: LossFn) -> Update:
        num_sequences = sum(map(len, micro_batches))
        for rows in micro_batches:
            done = self._forward(self.model, rollouts, rows)
            total = loss(rows, done.logprobs_bR)
            if coefficient := self.experiment.grpo.aux_loss_coef:
                total = total + coefficient * len(rows) / num_sequences * done.routes.balance(done.batch.real)
            total.backward()
            self.master.accumulate()
            self.on_microstep()
        learning_rate = self.master.learning_rate()
        if not micro_batches:
            self.master.skip()
            return Update(learning_rate, 0.0, skipped="no sequence of this mini-batch carries a gradient")
        norm, culprit = self.master.step()
        return Update(learning_rate, norm, f"the gradient of {culprit} is not finite" if culprit else "")

    # ---- recalibration and refit

    @torch.no_grad()
    def calibrate(self, rollouts: Rollouts, micro_batches: Sequence[Rows], version: int) -> KVScales:
        observer = AmaxObserver()
        for rows in micro_batches:
            batch = self._micro_batch(rollouts, rows, whole=True)
            self.model(batch.tokens, batch.positions, ObservedAttention(batch.attention, observer))
            observer.end_microbatch()
            self.on_microstep()
        recipe = self.experiment.recipe
        return observer.scales(
            version, recipe.scaling.kv_format, recipe.recalibration.percentile, recipe.recalibration.margin
        )

    def weights(self) -> dict[str, Tensor]:
        return self.model.weights()

    def active(self) -> dict[str, Active]:
        linears = [linear for _, _, linear in self.model.linears()]
        kernel_name = self.experiment.trainer_attention
        same = kernel_name == "math" and self.experiment.engine == "local"
        attention = "the rollout's own arithmetic" if same else "another kernel than the rollout's"
        if KINDS["engine"].owns(self.experiment.engine):
            attention = f"the rollout's is up to {short(self.experiment.engine)}"
        report = {"train.attention": Active(state="bf16", detail=f"{kernel_name}: {attention}")}
        if adapted := [linear for linear in linears if isinstance(linear, lora.LoRALinear)]:
            rank, trained = self.experiment.lora.rank, sum(p.numel() for p in self.master.parameters.values())
            detail = f"rank {rank} on {len(adapted)} of {len(linears)} layers, {trained:,} numbers; the base is frozen"
            report["train.adapters"] = Active(state="bf16", detail=detail)
        for gemm in ("fprop", "dgrad", "wgrad"):
            report[f"train.{gemm}"] = Active(state="bf16", detail="")
            if fp8 := [getattr(linear.kernels(), gemm) for linear in linears if getattr(linear.precision, gemm)]:
                state, how = scaled_mm.described(fp8, scaled_mm.machine(self.device))
                layers = f"{len(fp8)} of {len(linears)} layers"
                detail = f"{layers}, {self.experiment.recipe.scaling.short_str()}, {how}"
                report[f"train.{gemm}"] = Active(state=state, detail=detail)
        return report

    def state_dict(self) -> dict[str, Any]:
        return self.master.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.master.load_state_dict(state)
