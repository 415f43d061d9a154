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

With `cluster.overlap` the engine samples the next batch while this one is trained (`labkit.rl.batches`); the records
are the same.

Between steps the Recipe may be switched: weights, optimizer, data order and random numbers go on, so what bends a
curve is the switch.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from labkit import models, tasks
from labkit.config import ConfigError, Experiment, Recipe, own
from labkit.config.experts import check_dense
from labkit.config.words import said_changes
from labkit.fp8 import KVScales
from labkit.models.rollouts import Rollouts
from labkit.rl import routing
from labkit.rl.advantages import group_advantages
from labkit.rl.batches import Batches
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
from labkit.rl.refits import NOTHING_IN_FLIGHT, Refits, scales_from_dict, scales_to_dict
from labkit.rollout import Delivery, Engine, EngineBuilder, LocalEngine, Overlapping, Request, build_engine
from labkit.runs.record import StepRecord
from labkit.training import Update, build_trainer


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

    def __init__(
        self,
        experiment: Experiment,
        on_microstep: Callable[[], None] = _nothing,
        build_engine: EngineBuilder = build_engine,
    ) -> None:
        own.forget()
        self.experiment, self._build_engine = experiment, build_engine
        self.recipe, self.settings = experiment.recipe, experiment.grpo
        self.correction = self.recipe.correction
        self.faults = Faults(experiment.faults)
        policy = self.faults.policy(models.load(experiment.model))
        task = tasks.load_task(experiment.task, experiment.task_options)
        _check_layers(self.recipe, policy.config.num_layers)
        if policy.config.moe is None:
            check_dense(experiment)
        self.prompter = Prompter(task, policy.tokenizer)
        max_new_tokens = experiment.sampling.max_new_tokens or task.max_new_tokens
        self.prompter.check(policy.config.max_positions - max_new_tokens)
        request = Request(
            experiment.sampling, max_new_tokens, self.prompter.stop_ids, self.settings.group_size,
            routes=policy.config.moe is not None,
        )  # fmt: skip
        self.request = self.faults.request(request)
        self.trainer = build_trainer(policy, self.faults.trainer(experiment), on_microstep)
        self.on_microstep, self.policy = on_microstep, policy
        self.model_config = policy.config
        one_each = Request(experiment.sampling, max_new_tokens, self.prompter.stop_ids)
        self.held_out = HeldOut(
            policy, self.prompter, one_each, experiment.eval_prompts, on_microstep, experiment.lora
        )  # fmt: skip

        self.correct = correction_from(self.correction)
        self.clip = clip_of(self.settings, self.correction)
        self.recipe_version = 0
        self.notices: list[str] = []  # for the next record
        self.batches = Batches(self.prompter, self.request, self.settings.prompts_per_step, experiment.seed)
        self.step_index = 0
        self.version = 0
        self.elapsed = 0.0
        self.scales = initial_scales(self.recipe, policy.config.num_layers, self._calibrate_on_prompts)
        self.refits = Refits(self._new_engine(), self.recipe, self.faults, self.settings.staleness)
        self._send(Stopwatch())

    @property
    def engine(self) -> Engine:
        return self.refits.engine

    def _new_engine(self) -> Engine:
        engine = self._build_engine(self.policy, self.experiment, self.on_microstep)
        return self.faults.engine(engine) if isinstance(engine, LocalEngine) else engine  # the only one with faults

    def steps(self) -> Iterator[StepRecord]:
        while self.step_index <= self.experiment.steps:
            record = self._step() if self.step_index else self._evaluate_start()
            self.step_index += 1
            yield record

    # ---- one step

    def sample(self, watch: Stopwatch) -> Sampled:
        """The batch of a step, before anything is trained on it."""
        return self._judge(*self._take(watch), watch)

    def _take(self, watch: Stopwatch) -> tuple[list[tasks.Problem], Rollouts]:
        with watch("generate"):
            problems, rollouts = self.batches.take(self.engine)
            return problems, self.faults.rollouts(rollouts, self.engine)

    def _begin_next(self, watch: Stopwatch) -> None:
        """Have the next batch sampled while this one is trained, where that was asked for and the engine can."""
        due = self.experiment.cluster.overlap and self.step_index < self.experiment.steps
        if due and isinstance(self.engine, Overlapping):
            self.refits.advance(watch)
            self.batches.begin(self.engine)

    def _judge(self, problems: list[tasks.Problem], rollouts: Rollouts, watch: Stopwatch) -> Sampled:
        with watch("reward"):
            scored = self.prompter.score(rollouts, problems)
            advantages_B = group_advantages(
                scored.rewards_B, self.settings.group_size, self.settings.baseline, self.settings.normalize
            )
        pulled = bool(self.settings.kl_coef or self.correction.anchor)
        mini_batches = plan((advantages_B != 0) | pulled, rollouts.lengths_B, self.settings)
        everything = [rows for mini_batch in mini_batches for rows in mini_batch.micro_batches]
        rollouts = routing.for_scoring(rollouts, self.recipe)
        with watch("logprobs"):
            p_BR, entropy_BR = self.trainer.logprobs(rollouts, everything)
        own_routes = self.trainer.routes()
        routers = routing.router_metrics(rollouts, own_routes, self.model_config.moe)
        rollouts = routing.for_update(self.faults.logprobs(rollouts, p_BR), self.recipe, own_routes)
        return Sampled(problems, rollouts, scored, advantages_B, mini_batches, everything, p_BR, entropy_BR, routers)

    def _step(self) -> StepRecord:
        watch = Stopwatch()
        problems, rollouts = self._take(watch)
        sampled_by = self.engine.state()
        by_engine = engine_metrics(self.engine, self.refits.codes_changed, self.version - rollouts.weight_version)
        if self.batches.hidden is not None:
            by_engine["generation_hidden"] = self.batches.hidden
        self._begin_next(watch)
        batch = self._judge(problems, rollouts, watch)
        rollouts, advantages_B, p_BR, everything = batch.rollouts, batch.advantages_B, batch.p_BR, batch.everything
        with watch("logprobs"):
            reference_BR = self.trainer.reference_logprobs(rollouts, everything) if self.settings.kl_coef else None
            shadow_BR = self.trainer.shadow_logprobs(rollouts, everything) if self._clip_due() else None
        weights = self.correct(rollouts.logprobs_BR, p_BR, rollouts.mask_BR, advantages_B)
        mask_BR = rollouts.mask_BR & weights.valid
        updates: list[Update] = []
        losses: list[LossTerms] = []
        with watch("update"):
            for mini_batch in batch.mini_batches:
                in_force = weights
                if updates and self.correction.judges_current:  # the weights moved, but don't within an update
                    current_BR, _ = self.trainer.logprobs(rollouts, mini_batch.micro_batches)
                    in_force = self.correct(rollouts.logprobs_BR, p_BR, mask_BR, advantages_B, current_BR)
                update, terms = self._update(mini_batch, batch, mask_BR, in_force, reference_BR)
                updates.append(update)
                losses += terms
            clip = self.clip
            if shadow_BR is not None:
                self.clip = self._calibrated_clip(rollouts, everything, p_BR, shadow_BR)
        self.version += 1
        with watch("recalibrate"):
            self.scales = next_scales(
                self.recipe, self.scales, self.step_index,
                lambda: self.trainer.calibrate(rollouts, everything, self.version),
            )  # fmt: skip
        metrics = step_metrics(batch, weights, updates, losses) | by_engine
        if self.correction.calibrate_clip_every:
            metrics |= {"clip_low": clip.low, "clip_high": clip.high}
        self._send(watch)

        metrics |= self._held_out(watch) if self._evaluation_due() else {"heldout_accuracy": None}
        self.elapsed += watch.total
        return self._record(
            watch, metrics,
            weight_version=rollouts.weight_version, scales=sampled_by.kv_scales,
            scale_version=rollouts.scale_version, tokens=step_tokens(rollouts, batch.mini_batches),
            events=[*self._noticed(), *(f"update skipped: {update.skipped}" for update in updates if update.skipped)],
            samples=step_samples(self.experiment.keep_rollouts, batch, weights),
        )  # fmt: skip

    def _update(
        self, mini_batch: MiniBatch, batch: Sampled, mask_BR: Tensor, weights: Weights, reference_BR: Tensor | None
    ) -> tuple[Update, list[LossTerms]]:
        """One optimizer update. `weights` is the verdict on the policy that it starts from."""
        g_BR, p_BR, advantages_B = batch.rollouts.logprobs_BR, batch.p_BR, batch.advantages_B
        counting_bR = (mask_BR & weights.counting)[mini_batch.rows]
        num_sequences = len(mini_batch.rows)
        if self.correction.denominator == "drop":
            num_sequences = int(counting_bR.any(-1).sum())
        terms: list[LossTerms] = []

        def loss(rows: Tensor, current_bR: Tensor) -> Tensor:
            term = grpo_loss(
                current_bR, g_BR[rows], p_BR[rows], advantages_B[rows], weights[rows], mask_BR[rows],
                reference=None if reference_BR is None else reference_BR[rows],
                settings=self.settings, correction=self.correction, clip=self.clip,
                num_tokens=int(counting_bR.sum()), num_sequences=num_sequences,
            )  # fmt: skip
            terms.append(term)
            return term.loss

        pulled = self.settings.kl_coef or self.correction.anchor
        counting = [rows for rows in mini_batch.carrying if pulled or weights.applied[rows].any()]
        update = self.trainer.update(batch.rollouts, counting, loss)
        if mini_batch.carrying and not counting:
            why = f"every sequence was rejected by {self.correction.short_str()}"
            update = dataclasses.replace(update, skipped=why)
        return update, terms

    def _clip_due(self) -> bool:
        every = self.correction.calibrate_clip_every
        return every > 0 and (self.step_index - 1) % every == 0

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

    # ---- another Recipe

    def switch(self, recipe: Recipe) -> dict[str, tuple[Any, Any]]:
        """Go on under another Recipe from the next step on: what changes, by setting.

        Raises ValueError, and changes nothing, if the Recipe can't be carried out.
        """
        before, scales, clip = self.recipe, self.scales, self.clip
        changes = before.diff(recipe)
        if not changes:
            return changes
        _check_layers(recipe, self.model_config.num_layers)
        if self.model_config.moe is None:
            check_dense(self.experiment.override({"recipe": recipe}))
        self.batches.drop()  # sampled under the Recipe before
        try:
            self._adopt(recipe)
            self.scales = self._scales_after(before, scales)
            self.refits.switch(self._new_engine(), recipe, self.scales)
        except BaseException:
            self._adopt(before)
            self.scales, self.clip = scales, clip
            self.refits.switch(self._new_engine(), before, scales)
            raise
        self.recipe_version += 1
        self.notices.append(f"recipe v{self.recipe_version}: {', '.join(said_changes(changes))}")
        return changes

    def _adopt(self, recipe: Recipe) -> None:
        self.experiment = self.experiment.override({"recipe": recipe})
        self.recipe = recipe
        if recipe.correction != self.correction:  # else a calibrated clip stays
            self.correction = recipe.correction
            self.correct = correction_from(self.correction)
            self.clip = clip_of(self.settings, self.correction)
        self.trainer.switch(self.faults.trainer(self.experiment))

    def _scales_after(self, before: Recipe, scales: KVScales | None) -> KVScales | None:
        """Calibrated scales stay as they are; where there were none, the first prompts give them."""

        def how(recipe: Recipe) -> tuple[Any, ...]:
            made_by = {"unit": "unit", "engine": "engine"}.get(recipe.recalibration.policy, "trainer")
            return recipe.rollout.kv_cache, recipe.scaling.kv_format, made_by

        if how(before) == how(self.recipe):
            return scales
        return initial_scales(self.recipe, self.model_config.num_layers, self._calibrate_on_prompts)

    def _noticed(self) -> list[str]:
        notices, self.notices = self.notices, []
        return notices

    # ---- weights and scales

    def _send(self, watch: Stopwatch) -> None:
        self.refits.send(self.trainer.weights(), self.scales, self.version, watch)

    def _calibrate_on_prompts(self) -> KVScales:
        """Where no batch was trained yet: the prompts of step 1, without disturbing the order of the data."""
        only_prompts = self.batches.first_prompts(self.policy.tokenizer.pad_id)
        rows = list(torch.arange(len(only_prompts)).split(self.settings.micro_batch))
        return self.trainer.calibrate(only_prompts, rows, self.version)

    # ---- held-out accuracy and records

    def _evaluation_due(self) -> bool:
        every = self.experiment.eval_every
        return self.step_index == self.experiment.steps or self.step_index % every == 0

    def _held_out(self, watch: Stopwatch) -> dict[str, float]:
        with watch("evaluate"):
            weights = self.trainer.weights()
            found = {"heldout_accuracy": self.held_out.accuracy(weights, self.version)}
            if self.experiment.eval_engine:
                engine = self._new_engine()
                found["heldout_accuracy_engine"] = self.held_out.through(engine, weights, self.scales, self.version)
        return found

    def _evaluate_start(self) -> StepRecord:
        watch = Stopwatch()
        metrics: dict[str, float | None] = {**self._held_out(watch)}
        self.elapsed += watch.total
        state = self.engine.state()
        scale_version = state.kv_scales.version if state.kv_scales else state.weight_version
        return self._record(
            watch, metrics, weight_version=state.weight_version, scales=state.kv_scales,
            scale_version=scale_version, tokens={}, samples=[],
            events=[*self._noticed(), *self.held_out.shortage(), *self.faults.events()],
        )  # fmt: skip

    def _record(
        self, watch: Stopwatch, metrics: dict[str, float | None], *, weight_version: int, scales: KVScales | None,
        scale_version: int, tokens: dict[str, int], events: list[str], samples: list[dict[str, Any]],
    ) -> StepRecord:  # fmt: skip
        return StepRecord(
            step=self.step_index, weight_version=weight_version, time=time.time(), elapsed=self.elapsed,
            recipe_version=self.recipe_version,
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
            **self.batches.state_dict(),
            "scales": scales_to_dict(self.scales),
            "step_index": self.step_index,
            "version": self.version,
            "elapsed": self.elapsed,
            "recipe": self.recipe.model_dump(mode="json"),
            "recipe_version": self.recipe_version,
            "clip": dataclasses.astuple(self.clip),
            "refits": self.refits.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken, under the Recipe of then. States without the later keys load too."""
        recipe = Recipe(**state["recipe"]) if "recipe" in state else self.recipe
        if recipe != self.recipe:
            self._adopt(recipe)
            self.refits.replace(self._new_engine(), recipe)
        self.recipe_version = state.get("recipe_version", 0)
        self.trainer.load_state_dict(state["trainer"])
        self.batches.load_state_dict(state)
        self.scales = scales_from_dict(state["scales"])
        self.step_index, self.version, self.elapsed = state["step_index"], state["version"], state["elapsed"]
        if "clip" in state:
            self.clip = Clip(*state["clip"])
        latest = Delivery(self.trainer.weights(), self.scales, self.version)
        self.refits.load_state_dict(state.get("refits", NOTHING_IN_FLIGHT), latest)
