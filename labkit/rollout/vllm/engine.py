"""The Engine protocol on a real vLLM.

generate   one request for each row with a seed of its own, drawn from the run's generator: which rows share a step
           with which does not change what is drawn
g          vLLM's processed log-probs: of temperature, top-k and top-p, as the token was really sampled
score      prompt log-probs, which vLLM gives for temperature 1 and the full vocabulary only
refit      checked as a whole, then reloaded, then the scales; a refit that fails in between leaves an engine without
           weights, never one with half of them
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from labkit.fp8 import KVScales, LinearFormat
from labkit.models.decoder import Decoder
from labkit.models.rollouts import Rollouts
from labkit.rollout.engine import EngineState, Request
from labkit.rollout.kv_cache import Saturation
from labkit.rollout.local import left_pad
from labkit.rollout.refit import check_complete, fp8_weights, share_changed
from labkit.rollout.vllm.cache import RoundedCache
from labkit.rollout.vllm.launch import launch
from labkit.rollout.vllm.plan import make_plan
from labkit.runs.record import Active

if TYPE_CHECKING:
    from labkit.config import Experiment, Sampling
    from labkit.models import Policy


class VLLMEngine:
    def __init__(
        self,
        policy: "Policy",
        experiment: "Experiment",
        on_microstep: Callable[[], None],
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """`dtype` of what is not FP8: FP32 is for comparing kernels, without FP8 and without reading back."""
        self.config, self.recipe, self.pad_id = policy.config, experiment.recipe, policy.tokenizer.pad_id
        self.on_microstep = on_microstep
        self.plan = make_plan(experiment, policy.config, str(dtype).removeprefix("torch."))
        self.precision = LinearFormat.from_recipe(self.recipe, side="rollout")
        with torch.device("meta"):
            self.placeholders = Decoder(policy.config).weights()
        self.fp8_names = fp8_weights(self.recipe, self.placeholders)
        self.weight_version = -1  # nothing loaded yet
        self.scale_version: int | None = None
        self.device = torch.device("cpu")  # of the weights that came last
        self.codes_changed = math.nan
        self.saturation: dict[str, float] = {}  # on a GPU what the cache clips can't be seen from outside
        self.serving = launch(self.plan, policy)
        self.cache: RoundedCache | None = None
        if self.plan.device == "cpu" and self.recipe.rollout.kv_cache:
            self.cache = RoundedCache(self.serving.attentions(), self.recipe.scaling.kv_format)

    # ---- sampling

    def generate(self, prompts: Sequence[Sequence[int]], request: Request, generator: torch.Generator) -> Rollouts:
        self._check_loaded("generate()")
        tokens_NP, starts_N = left_pad(prompts, self.pad_id)
        P, R = tokens_NP.shape[1], request.max_new_tokens
        self._check_length(P, R)
        sampling = request.sampling
        rows_B = torch.arange(len(prompts)).repeat_interleave(request.samples_per_prompt)
        seeds_B = torch.randint(0, 1 << 62, (len(rows_B),), generator=generator).tolist()
        common = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": R,
            "stop_token_ids": sorted(request.stop_ids),
            "ignore_eos": True,  # the request's stop tokens are all there are
            "logprobs": 0,
        }
        if self.cache:
            self.cache.saturation = Saturation()
        outputs = self.serving.run(
            [(list(prompts[row]), common | {"seed": seed}) for row, seed in zip(rows_B, seeds_B, strict=True)],
            self.on_microstep,
        )
        if self.cache:
            self.saturation = self.cache.saturation.shares()
        tokens_BT = torch.full((len(rows_B), P + R), self.pad_id)
        tokens_BT[:, :P] = tokens_NP[rows_B]
        logprobs_BR = torch.zeros(len(rows_B), R)
        lengths_B = torch.zeros(len(rows_B), dtype=torch.int64)
        finished_B = torch.zeros(len(rows_B), dtype=torch.bool)
        for row, output in enumerate(outputs):
            response = output.outputs[0]
            length = len(response.token_ids)
            tokens_BT[row, P : P + length] = torch.tensor(response.token_ids)
            logprobs_BR[row, :length] = torch.tensor(response.logprobs.logprobs)
            lengths_B[row], finished_B[row] = length, response.finish_reason == "stop"
        _check_finite(logprobs_BR)
        scale_version = self.weight_version if self.scale_version is None else self.scale_version
        return Rollouts(
            tokens_BT, starts_N[rows_B], lengths_B, logprobs_BR, finished_B, P, self.weight_version, scale_version
        )

    def score(self, rollouts: Rollouts, sampling: "Sampling") -> Tensor:
        """Raises ValueError for a distribution whose log-probs vLLM can't give for tokens that are already there."""
        self._check_loaded("score()")
        if (sampling.temperature, sampling.top_k, sampling.top_p) != (1.0, 0, 1.0):
            raise ValueError(
                "vLLM scores given tokens at temperature 1 over the whole vocabulary only: "
                "set sampling.temperature to 1, top_k to 0 and top_p to 1, or engine to local"
            )
        P, mask_BR = rollouts.prompt_width, rollouts.mask_BR
        self._check_length(P, mask_BR.shape[1])
        requests = [
            (tokens_T[start : P + length].tolist(), {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0})
            for tokens_T, start, length in zip(
                rollouts.tokens_BT, rollouts.starts_B.tolist(), rollouts.lengths_B.tolist(), strict=True
            )
        ]
        logprobs_BR = torch.zeros(mask_BR.shape)
        for row, output in enumerate(self.serving.run(requests, self.on_microstep)):
            length = int(rollouts.lengths_B[row])
            found = output.prompt_logprobs.logprobs  # of every token but the first
            logprobs_BR[row, :length] = torch.tensor(found[len(found) - length :])
        _check_finite(logprobs_BR)
        return logprobs_BR

    def _check_loaded(self, call: str) -> None:
        if self.weight_version < 0:
            raise ValueError(f"the engine has no weights yet: call refit() before {call}")

    def _check_length(self, prompt: int, response: int) -> None:
        if prompt + response > self.plan.longest:
            raise ValueError(
                f"prompt ({prompt}) + new tokens ({response}) exceed the {self.plan.longest} tokens that vLLM was "
                "started for: shorten the prompts or lower sampling.max_new_tokens"
            )

    # ---- weights and scales

    @torch.no_grad()
    def refit(self, weights: Mapping[str, Tensor], kv_scales: KVScales | None, version: int) -> None:
        check_complete(self.placeholders, self.recipe, self.config.num_layers, weights, kv_scales)
        if bad := [name for name, tensor in weights.items() if not _finite(tensor)]:
            raise RuntimeError(f"{bad[0]} holds NaN or infinity: has the training diverged? Lower grpo.lr")
        loaded = self.weight_version >= 0
        held = {name: tensor.clone() for name, tensor in self.serving.fp8_operands()} if loaded else {}
        self.weight_version = -1
        self.device = next(iter(weights.values())).device
        self.serving.reload(self._sent(weights))
        if kv_scales is not None:
            self.serving.write_scales(kv_scales)
        self.scale_version = None if kv_scales is None else kv_scales.version
        self.codes_changed = share_changed(held, dict(self.serving.fp8_operands())) if held else math.nan
        self.weight_version = version

    def _sent(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """In BF16, or what is to be FP8 as codes and scales."""
        if self.plan.linears is None or self.plan.linears.scale_name is None:
            return weights
        from labkit.rollout.vllm.weights import as_checkpoint

        return as_checkpoint(weights, self.fp8_names, self.precision, self.plan.linears.scale_name)

    def keep_scales(self, measured: KVScales) -> None:
        """vLLM measures no scales, so there are none to keep."""
        raise ValueError("vLLM measures no scales itself: set recipe.recalibration.policy to every-step")

    def state(self) -> EngineState:
        scales = None if self.scale_version is None else self.serving.read_scales(self.scale_version)
        return EngineState(self.weight_version, scales)

    @torch.no_grad()
    def read_back(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.serving.read_back(self.config.vocab_size):
            yield name, tensor.to(self.device)

    def active(self) -> dict[str, Active]:
        """Read from vLLM's own layers."""
        off = Active(state="bf16", detail="")
        num_fp8, total = self.serving.linears()
        backend, cache, query = self.serving.attention()
        found = {"rollout.linears": off, "rollout.kv_cache": off, "rollout.attention": off}
        engine = f"vLLM {self.serving.version}"
        if num_fp8 and (linears := self.plan.linears):
            how = f"{num_fp8} of {total} fused layers of {engine}, {self.recipe.scaling.short_str()}, {linears.why}"
            found["rollout.linears"] = Active(state=linears.state, detail=how)
        if cache.startswith("fp8"):
            rounding = ", rounded to nearest by labkit's quantiser" if self.cache else ""
            how = f"{cache} in {engine}'s paged cache{rounding}, {backend}, scales of version {self.scale_version}"
            found["rollout.kv_cache"] = Active(state="fp8", detail=how)
        if query:
            found["rollout.attention"] = Active(state="fp8", detail=f"Q, K, V and P in FP8, {engine}'s {backend}")
        return found

    def close(self) -> None:
        self.serving.close()


def _finite(weight: Tensor) -> bool:
    """By its extremes, in which NaN shows: on a CPU a look at every element takes longer than the rest of a refit."""
    low, high = weight.aminmax()
    return math.isfinite(low) and math.isfinite(high)


def _check_finite(logprobs: Tensor) -> None:
    if not bool(logprobs.isfinite().all()):
        raise RuntimeError("the engine's logits hold NaN or infinity: have the weights diverged, are the scales sane?")
