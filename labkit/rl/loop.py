"""GRPO, one step at a time: a generator of StepRecords that does no I/O and prints nothing.

    prompts ──> Engine.generate ──> rollouts (tokens, g, versions)
            ──> task reward ──> advantages
            ──> Trainer.logprobs (p: pre-update weights, the same FP8 forward as training)
            ──> correction weights w(p - g), mismatch metrics
            ──> Trainer.update per mini-batch (c; clipped loss x w)
            ──> recalibrate Q/K/V scales on this batch with the UPDATED weights
            ──> Engine.refit ──> read back and compare ──> StepRecord

Step 0 trains nothing: it is the held-out accuracy of the policy as loaded. Weights reach the engine `staleness` steps
after they were made: at once with 0, so that the engine then always holds the trainer's latest; later ones are in
flight. Those are kept, so a checkpoint needs no engine state: loading one refits.
"""

import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from labkit import models, tasks
from labkit.config import ConfigError, Experiment, Recipe
from labkit.fp8 import KVScales
from labkit.models.rollouts import Rollouts
from labkit.rl.advantages import group_advantages
from labkit.rl.batching import MiniBatch, plan
from labkit.rl.corrections import Weights, correction_from
from labkit.rl.episodes import Prompter
from labkit.rl.evaluation import HeldOut
from labkit.rl.faults import Faults
from labkit.rl.loss import LossTerms, clip_of, grpo_loss
from labkit.rl.measure import Sampled, Stopwatch, engine_metrics, step_metrics, step_samples, step_tokens
from labkit.rl.objectives import Clip, calibrated
from labkit.rl.ratio import log_ratio
from labkit.rl.recalibration import initial_scales, next_scales
from labkit.rollout import Delivery, LocalEngine, Request, verify
from labkit.rollout.local import left_pad
from labkit.runs.record import StepRecord
from labkit.training import LocalTrainer, Update


def _nothing() -> None:
    pass


def _check_layers(recipe: Recipe, num_layers: int) -> None:
    """An FP8 recipe that keeps every layer in BF16 would run as BF16 under another name."""
    linears = recipe.rollout.linears or recipe.train.fprop or recipe.train.dgrad or recipe.train.wgrad
    if linears and not any(recipe.covers(layer, num_layers) for layer in [None, *range(num_layers)]):
        raise ConfigError(
            f"recipe.keep_bf16: first_layers {recipe.keep_bf16.first_layers} and last_layers "
            f"{recipe.keep_bf16.last_layers} leave none of the model's {num_layers} layers in FP8; lower them"
        )


class Loop:
    """Raises ConfigError or ValueError, naming the way out, for an Experiment that can't be carried out."""

    def __init__(self, experiment: Experiment, on_microstep: Callable[[], None] = _nothing) -> None:
        self.experiment = experiment
        self.recipe, self.settings = experiment.recipe, experiment.grpo
        self.correction = self.recipe.correction
        self.faults = Faults(experiment.faults)
        policy = self.faults.policy(models.load(experiment.model))
        task = tasks.load_task(experiment.task, experiment.task_options)
        _check_layers(self.recipe, policy.config.num_layers)
        self.prompter = Prompter(task, policy.tokenizer)
        max_new_tokens = experiment.sampling.max_new_tokens or task.max_new_tokens
        self.prompter.check(policy.config.max_positions - max_new_tokens)
        request = Request(experiment.sampling, max_new_tokens, self.prompter.stop_ids, self.settings.group_size)
        self.request = self.faults.request(request)
        self.trainer = LocalTrainer(policy, self.faults.trainer(experiment), on_microstep)
        engine = LocalEngine(policy.config, self.recipe, policy.tokenizer.pad_id, on_microstep)
        self.engine = self.faults.engine(engine)
        one_each = Request(experiment.sampling, max_new_tokens, self.prompter.stop_ids)
        self.held_out = HeldOut(policy, self.prompter, one_each, experiment.eval_prompts, on_microstep)

        self.correct = correction_from(self.correction)
        self.clip = clip_of(self.settings, self.correction)
        self.prompt_rng = random.Random(experiment.seed)
        self.sample_rng = torch.Generator().manual_seed(experiment.seed)
        self.step_index = 0
        self.version = 0
        self.elapsed = 0.0
        self.scales = initial_scales(self.recipe, policy.config.num_layers, self._calibrate_on_prompts)
        self.in_flight: list[Delivery] = []
        self.codes_changed = math.nan  # share of FP8 weight values that the last delivery changed
        self._send(Stopwatch())

    def steps(self) -> Iterator[StepRecord]:
        while self.step_index <= self.experiment.steps:
            record = self._step() if self.step_index else self._evaluate_start()
            self.step_index += 1
            yield record

    # ---- one step

    def sample(self, watch: Stopwatch) -> Sampled:
        """The batch of a step, before anything is trained on it."""
        with watch("generate"):
            problems = [self.prompter.task.sample(self.prompt_rng) for _ in range(self.settings.prompts_per_step)]
            prompts = [self.prompter.encode(problem) for problem in problems]
            rollouts = self.engine.generate(prompts, self.request, self.sample_rng)
            rollouts = self.faults.rollouts(rollouts, self.engine)
        with watch("reward"):
            scored = self.prompter.score(rollouts, problems)
            advantages_B = group_advantages(
                scored.rewards_B, self.settings.group_size, self.settings.baseline, self.settings.normalize
            )
        pulled = bool(self.settings.kl_coef or self.correction.anchor)
        mini_batches = plan((advantages_B != 0) | pulled, rollouts.lengths_B, self.settings)
        everything = [rows for mini_batch in mini_batches for rows in mini_batch.micro_batches]
        with watch("logprobs"):
            p_BR, entropy_BR = self.trainer.logprobs(rollouts, everything)
        rollouts = self.faults.logprobs(rollouts, p_BR)
        return Sampled(problems, rollouts, scored, advantages_B, mini_batches, everything, p_BR, entropy_BR)

    def _step(self) -> StepRecord:
        watch = Stopwatch()
        batch = self.sample(watch)
        sampled_by = self.engine.state()
        rollouts, advantages_B, p_BR, everything = batch.rollouts, batch.advantages_B, batch.p_BR, batch.everything
        with watch("logprobs"):
            reference_BR = self.trainer.reference_logprobs(rollouts, everything) if self.settings.kl_coef else None
            shadow_BR = self.trainer.shadow_logprobs(rollouts, everything) if self._clip_due() else None
        weights = self.correct(rollouts.logprobs_BR, p_BR, rollouts.mask_BR, advantages_B)
        updates: list[Update] = []
        losses: list[LossTerms] = []
        with watch("update"):
            for mini_batch in batch.mini_batches:
                update, terms = self._update(mini_batch, rollouts, p_BR, advantages_B, weights, reference_BR)
                updates.append(update)
                losses += terms
            if shadow_BR is not None:
                self.clip = self._calibrated_clip(rollouts, everything, p_BR, shadow_BR)
        self.version += 1
        with watch("recalibrate"):
            self.scales = next_scales(
                self.recipe, self.scales, self.step_index,
                lambda: self.trainer.calibrate(rollouts, everything, self.version),
            )  # fmt: skip
        metrics = step_metrics(batch, weights, updates, losses)
        metrics |= engine_metrics(self.engine, self.codes_changed, self.version - 1 - rollouts.weight_version)
        if self.correction.calibrate_clip_every:
            metrics |= {"clip_low": self.clip.low, "clip_high": self.clip.high}
        self._send(watch)

        metrics["heldout_accuracy"] = self._held_out_accuracy(watch) if self._evaluation_due() else None
        self.elapsed += watch.total
        return self._record(
            watch, metrics,
            weight_version=rollouts.weight_version, scales=sampled_by.kv_scales,
            scale_version=rollouts.scale_version, tokens=step_tokens(rollouts, batch.mini_batches),
            events=[f"update skipped: {update.skipped}" for update in updates if update.skipped],
            samples=step_samples(self.experiment.keep_rollouts, batch, weights),
        )  # fmt: skip

    def _update(
        self, mini_batch: MiniBatch, rollouts: Rollouts, p_BR: Tensor, advantages_B: Tensor, weights: Weights,
        reference_BR: Tensor | None,
    ) -> tuple[Update, list[LossTerms]]:  # fmt: skip
        g_BR, mask_BR = rollouts.logprobs_BR, rollouts.mask_BR & weights.valid
        # The denominator has to be known before the first micro-batch, so with verdicts that follow the update it is
        # that of the policy before it.
        counting_bR = (mask_BR & weights.counting)[mini_batch.rows]
        num_sequences = len(mini_batch.rows)
        if self.correction.denominator == "drop":
            num_sequences = int(counting_bR.any(-1).sum())
        terms: list[LossTerms] = []

        def loss(rows: Tensor, current_bR: Tensor) -> Tensor:
            verdict = weights[rows]
            if self.correction.judges_current:
                verdict = self.correct(
                    g_BR[rows], p_BR[rows], mask_BR[rows], advantages_B[rows], current_bR.detach()
                )  # fmt: skip
            term = grpo_loss(
                current_bR, g_BR[rows], p_BR[rows], advantages_B[rows], verdict, mask_BR[rows],
                reference=None if reference_BR is None else reference_BR[rows],
                settings=self.settings, correction=self.correction, clip=self.clip,
                num_tokens=int(counting_bR.sum()), num_sequences=num_sequences,
            )  # fmt: skip
            terms.append(term)
            return term.loss

        pulled = self.settings.kl_coef or self.correction.anchor
        counting = [rows for rows in mini_batch.carrying if pulled or weights.applied[rows].any()]
        update = self.trainer.update(rollouts, counting, loss)
        if mini_batch.carrying and not counting:
            why = f"every sequence was rejected by {self.correction.short_str()}"
            update = dataclasses.replace(update, skipped=why)
        return update, terms

    def _clip_due(self) -> bool:
        every = self.correction.calibrate_clip_every
        return every > 0 and self.step_index % every == 0

    def _calibrated_clip(self, rollouts: Rollouts, everything: list[Tensor], p_BR: Tensor, shadow_BR: Tensor) -> Clip:
        """From how this step moved the ratio, in the trainer's precision and in BF16."""
        mask_BR = rollouts.mask_BR
        bypass = self.correction.old_policy == "rollout"
        noisy, shadow = (
            log_ratio(current_BR, rollouts.logprobs_BR if bypass else old_BR, mask_BR)[mask_BR]
            for current_BR, old_BR in [
                (self.trainer.logprobs(rollouts, everything)[0], p_BR),
                (self.trainer.shadow_logprobs(rollouts, everything), shadow_BR),
            ]
        )
        return calibrated(clip_of(self.settings, self.correction), noisy, shadow)

    # ---- weights and scales on their way to the engine

    def _send(self, watch: Stopwatch) -> None:
        """The trainer's weights set out; those that are `staleness` steps older arrive."""
        staleness = self.settings.staleness
        weights = self.trainer.weights()
        if staleness:  # the trainer goes on changing its own
            weights = {name: tensor.clone() for name, tensor in weights.items()}
        self.in_flight.append(Delivery(weights, self.scales, self.version))
        self.in_flight = self.in_flight[-1 - staleness :]
        if self.in_flight[0].version != self.engine.state().weight_version:
            self._refit(self.in_flight[0], watch)
            self.codes_changed = self.engine.codes_changed

    def _refit(self, sent: Delivery, watch: Stopwatch) -> None:
        with watch("refit"):
            arriving = self.faults.delivery(sent)
            self.engine.refit(arriving.weights, arriving.scales, arriving.version)
        with watch("verify"):
            if self.faults.verified:
                verify(self.engine, self.recipe, sent)

    def _calibrate_on_prompts(self) -> KVScales:
        """Before step 1: the prompts that step 1 will use, without disturbing the order of the data."""
        rng = random.Random(self.experiment.seed)
        prompts = [self.prompter.encode(self.prompter.task.sample(rng)) for _ in range(self.settings.prompts_per_step)]
        tokens_BT, starts_B = left_pad(prompts, self.engine.pad_id)
        B, P = tokens_BT.shape
        nothing_B = torch.zeros(B, dtype=torch.int64)
        only_prompts = Rollouts(tokens_BT, starts_B, nothing_B, torch.zeros(B, 0), nothing_B.bool(), P, 0, 0)
        rows = list(torch.arange(B).split(self.settings.micro_batch))
        return self.trainer.calibrate(only_prompts, rows, version=0)

    # ---- held-out accuracy and records

    def _evaluation_due(self) -> bool:
        every = self.experiment.eval_every
        return self.step_index == self.experiment.steps or self.step_index % every == 0

    def _held_out_accuracy(self, watch: Stopwatch) -> float:
        with watch("evaluate"):
            return self.held_out.accuracy(self.trainer.weights(), self.version)

    def _evaluate_start(self) -> StepRecord:
        watch = Stopwatch()
        metrics: dict[str, float | None] = {"heldout_accuracy": self._held_out_accuracy(watch)}
        self.elapsed += watch.total
        state = self.engine.state()
        scale_version = state.kv_scales.version if state.kv_scales else state.weight_version
        return self._record(
            watch, metrics, weight_version=state.weight_version, scales=state.kv_scales,
            scale_version=scale_version, tokens={}, events=[*self.held_out.shortage(), *self.faults.events()],
            samples=[],
        )  # fmt: skip

    def _record(
        self, watch: Stopwatch, metrics: dict[str, float | None], *, weight_version: int, scales: KVScales | None,
        scale_version: int, tokens: dict[str, int], events: list[str], samples: list[dict[str, Any]],
    ) -> StepRecord:  # fmt: skip
        return StepRecord(
            step=self.step_index, weight_version=weight_version, time=time.time(), elapsed=self.elapsed,
            metrics=metrics, timings=watch.seconds, tokens=tokens,
            active={**self.engine.active(), **self.trainer.active(), **self.faults.active()},
            engine={"weight_version": weight_version, "scale_version": scale_version},
            kv_scales=None if scales is None else {"q": list(scales.q), "k": list(scales.k), "v": list(scales.v)},
            events=events, samples=samples,
        )  # fmt: skip

    # ---- resuming

    def state_dict(self) -> dict[str, Any]:
        return {
            "trainer": self.trainer.state_dict(),
            "prompt_rng": self.prompt_rng.getstate(),
            "sample_rng": self.sample_rng.get_state(),
            "scales": self.scales and dataclasses.asdict(self.scales),
            "step_index": self.step_index,
            "version": self.version,
            "elapsed": self.elapsed,
            "clip": dataclasses.astuple(self.clip),
            "codes_changed": self.codes_changed,
            "in_flight": [_to_dict(delivery) for delivery in self.in_flight if self.settings.staleness],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trainer.load_state_dict(state["trainer"])
        kind, words, gauss = state["prompt_rng"]
        self.prompt_rng.setstate((kind, tuple(words), gauss))
        self.sample_rng.set_state(state["sample_rng"])
        self.scales = _scales(state["scales"])
        self.step_index, self.version, self.elapsed = state["step_index"], state["version"], state["elapsed"]
        self.clip, self.codes_changed = Clip(*state["clip"]), state["codes_changed"]
        self.in_flight = [_from_dict(delivery) for delivery in state["in_flight"]]
        if not self.in_flight:
            self.in_flight = [Delivery(self.trainer.weights(), self.scales, self.version)]
        self._refit(self.in_flight[0], Stopwatch())


def _to_dict(delivery: Delivery) -> dict[str, Any]:
    scales = delivery.scales and dataclasses.asdict(delivery.scales)
    return {"weights": dict(delivery.weights), "scales": scales, "version": delivery.version}


def _from_dict(state: dict[str, Any]) -> Delivery:
    return Delivery(state["weights"], _scales(state["scales"]), state["version"])


def _scales(state: dict[str, Any] | None) -> KVScales | None:
    return None if state is None else KVScales(**state)
