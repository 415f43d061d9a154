"""The embedded engine: batched sampling with a static KV cache, in any precision a Recipe names, on a CPU or a GPU.

prefill   every prompt once, [N, P]; its cache is then repeated for the samples of its group
decode    one column at a time; finished sequences are dropped once a quarter of the rows are finished
refit     weights are quantised here, from the trainer's BF16 copy, as a serving engine would
score     given responses, teacher-forced: the same arithmetic, a whole response in one pass

The model, its cache and the logits are on `device`; prompts, random numbers and rollouts on the CPU. A step of decoding
waits for its tokens to come back, and every kernel is launched by Python: no CUDA graphs.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from labkit.config import Lora, Recipe, Sampling
from labkit.fp8 import AmaxObserver, KVScales, LinearFormat, decode_kernel, scaled_mm
from labkit.models.attention import ObservedAttention
from labkit.models.decoder import Attention, Decoder, DecoderConfig
from labkit.models.device import torch_device
from labkit.models.lora import adapters, attach, only_adapters
from labkit.models.moe import set_router
from labkit.models.rollouts import Rollouts
from labkit.rollout.engine import EngineState, Request
from labkit.rollout.kv_cache import KVCache, KVPrecision
from labkit.rollout.refit import check_complete, share_changed
from labkit.rollout.routes import RouteLog
from labkit.rollout.sampling import sample
from labkit.rollout.scoring import teacher_forced
from labkit.runs.record import Active

DROP_FINISHED_AT = 0.25


def _nothing() -> None:
    pass


class LocalEngine:
    def __init__(
        self,
        config: DecoderConfig,
        recipe: Recipe,
        pad_id: int = 0,
        on_microstep: Callable[[], None] = _nothing,
        device: str = "cpu",
        lora: Lora | None = None,
    ) -> None:
        self.config, self.recipe, self.pad_id, self.on_microstep = config, recipe, pad_id, on_microstep
        self.device = torch_device(device)
        self.lora = lora or Lora()
        self.model = attach(Decoder(config), self.lora).requires_grad_(False).to(self.device)
        rollout_format = LinearFormat.from_recipe(recipe, side="rollout")
        for layer, _, linear in self.model.linears():
            linear.precision = rollout_format if recipe.covers(layer, config.num_layers) else LinearFormat.off()
        set_router(self.model, recipe)
        self.kv_precision = KVPrecision.from_recipe(recipe, config.num_layers)
        self.weight_version = -1  # nothing loaded yet
        self.saturation: dict[str, float] = {}
        self.codes_changed = math.nan
        self._calibrate_on_next_prompt = False
        self._log: RouteLog | None = None

    # ---- sampling

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], request: Request, generator: torch.Generator) -> Rollouts:
        self._check_loaded("generate()")
        tokens_NP, starts_N = left_pad(prompts, self.pad_id)
        P, R = tokens_NP.shape[1], request.max_new_tokens
        if self.config.max_positions < P + R:
            raise ValueError(
                f"prompt ({P}) + new tokens ({R}) exceed the model's {self.config.max_positions} positions: "
                "shorten the prompts or lower sampling.max_new_tokens"
            )
        group_B = torch.arange(len(prompts)).repeat_interleave(request.samples_per_prompt)
        moe = self.config.moe
        log = self._log = RouteLog(moe, group_B, P, P + R) if request.routes and moe else None
        cache, logits_NV = self._prefill(tokens_NP, starts_N, P + R)

        tokens_BT = torch.full((len(group_B), P + R), self.pad_id)
        tokens_BT[:, :P] = tokens_NP[group_B]
        logprobs_BR = torch.zeros(len(group_B), R)
        lengths_B = torch.full((len(group_B),), R)
        finished_B = torch.zeros(len(group_B), dtype=torch.bool)

        group = group_B.to(self.device)
        cache, logits = cache.rows(group), logits_NV[group]
        alive = torch.arange(len(group_B))  # batch row of each row still in the cache
        stop_ids = torch.tensor(sorted(request.stop_ids))
        for step in range(R):
            tokens, logprobs = (x.cpu() for x in sample(logits, request.sampling, generator))
            running = ~finished_B[alive]
            tokens_BT[alive[running], P + step] = tokens[running]
            logprobs_BR[alive[running], step] = logprobs[running]
            stopped = running & torch.isin(tokens, stop_ids)
            lengths_B[alive[stopped]] = step + 1
            finished_B[alive[stopped]] = True

            running = ~finished_B[alive]
            if step == R - 1 or not running.any():
                break
            if running.float().mean() < 1 - DROP_FINISHED_AT:
                keep = running.nonzero()[:, 0]
                cache, alive, tokens = cache.rows(keep.to(self.device)), alive[keep], tokens[keep]
            if log is not None:
                log.decoding(alive, P + step)
            logits = self._decode(tokens.to(self.device), cache)
            self.on_microstep()
        self.saturation = cache.saturation.shares()
        return Rollouts(
            tokens_BT, starts_N[group_B], lengths_B, logprobs_BR, finished_B, P,
            self.weight_version, self._scale_version,
            routes_BTLK=None if log is None else log.table(starts_N[group_B], P + lengths_B - 1),
        )  # fmt: skip

    def _prefill(self, tokens_NP: Tensor, starts_N: Tensor, num_columns: int) -> tuple[KVCache, Tensor]:
        tokens_NP, starts_N = tokens_NP.to(self.device), starts_N.to(self.device)
        positions_NP = (torch.arange(tokens_NP.shape[1], device=self.device) - starts_N[:, None]).clamp(min=0)
        if self._calibrate_on_next_prompt:
            self._self_calibrate(tokens_NP, positions_NP, starts_N)
        cache = KVCache(self.config, starts_N, num_columns, self.kv_precision)
        hidden = self.model(tokens_NP, positions_NP, cache.attend, self._log)
        cache.advance(tokens_NP.shape[1])
        return cache, self.model.logits(hidden[:, -1])

    def _decode(self, tokens_B: Tensor, cache: KVCache) -> Tensor:
        positions_B1 = (cache.length - cache.starts_B)[:, None]
        hidden = self.model(tokens_B[:, None], positions_B1, cache.attend, self._log)
        cache.advance(1)
        return self.model.logits(hidden[:, -1])

    @torch.no_grad()
    def score(self, rollouts: Rollouts, sampling: Sampling) -> Tensor:
        """g [B, R] of given responses: what this engine reports when it samples these very tokens.

        On a CPU bit for bit what `generate` recorded, but for scaling.granularity "tensor": an activation's scale
        then depends on the tokens that share the pass. On a GPU kernels add up in another order than in decoding.
        """
        self._check_loaded("score()")
        P = rollouts.prompt_width
        if self._calibrate_on_next_prompt:
            starts_B = rollouts.starts_B.to(self.device)
            positions_BP = (torch.arange(P, device=self.device) - starts_B[:, None]).clamp(min=0)
            self._self_calibrate(rollouts.tokens_BT[:, :P].to(self.device), positions_BP, starts_B)

        def attention(starts_b: Tensor, num_columns: int) -> Attention:
            return KVCache(self.config, starts_b, num_columns, self.kv_precision).attend

        return teacher_forced(self.model, rollouts, sampling, attention, self.on_microstep)

    def _check_loaded(self, call: str) -> None:
        if self.weight_version < 0:
            raise ValueError(f"the engine has no weights yet: call refit() before {call}")

    def _self_calibrate(self, tokens_NP: Tensor, positions_NP: Tensor, starts_N: Tensor) -> None:
        """Engine-side scales: from the first prompts after a refit, before they are quantised."""
        recalibration = self.recipe.recalibration
        observer = AmaxObserver()
        unquantised = KVCache(self.config, starts_N, tokens_NP.shape[1], KVPrecision())
        self.model(tokens_NP, positions_NP, ObservedAttention(unquantised.attend, observer))
        observer.end_microbatch()
        scales = observer.scales(
            self.weight_version, self.kv_precision.fmt, recalibration.percentile, recalibration.margin
        )
        self.kv_precision = replace(self.kv_precision, scales=scales)
        self._calibrate_on_next_prompt = False

    def keep_scales(self, measured: KVScales) -> None:
        """Go on with scales that this engine's policy measured before, for the same weights."""
        self.kv_precision = replace(self.kv_precision, scales=measured)
        self._calibrate_on_next_prompt = False

    def close(self) -> None:
        """Nothing but memory is held, and that goes with the object."""

    # ---- weights and scales

    @torch.no_grad()
    def refit(self, weights: Mapping[str, Tensor], kv_scales: KVScales | None, version: int) -> None:
        """Weights: all of them, or the adapters alone once the frozen base has come."""
        loaded = self.weight_version >= 0
        base_stays = loaded and only_adapters(weights)
        own = adapters(self.model.weights()) if base_stays else self.model.weights()
        check_complete(own, self.recipe, self.config.num_layers, weights, kv_scales)
        held = self._fp8_operands() if loaded else {}
        for name, tensor in own.items():
            tensor.copy_(weights[name])
        if not base_stays:
            for _, _, linear in self.model.linears():
                linear.requantize()
        self.codes_changed = share_changed(held, self._fp8_operands())
        engine_side = self.recipe.rollout.kv_cache and self.recipe.recalibration.policy == "engine"
        self._calibrate_on_next_prompt = engine_side
        self.kv_precision = replace(self.kv_precision, scales=kv_scales)
        self.weight_version = version

    def _fp8_operands(self) -> dict[str, Tensor]:
        return {name: linear.operand() for _, name, linear in self.model.linears() if linear.precision.fprop}

    @property
    def _scale_version(self) -> int:
        scales = self.kv_precision.scales
        return self.weight_version if scales is None else scales.version

    def state(self) -> EngineState:
        return EngineState(self.weight_version, self.kv_precision.scales)

    def read_back(self) -> Iterator[tuple[str, Tensor]]:
        operands = {name: linear.operand() for _, name, linear in self.model.linears()}
        yield from {**self.model.weights(), **operands}.items()

    def active(self) -> dict[str, Active]:
        """Read from the modules and the cache themselves, not from the Recipe."""
        report = {
            name: Active(state="bf16", detail="")
            for name in ("rollout.linears", "rollout.kv_cache", "rollout.attention")
        }
        linears, where = [linear for _, _, linear in self.model.linears()], scaled_mm.machine(self.device)
        if fp8 := [linear.kernels().fprop for linear in linears if linear.precision.fprop]:
            state, how = scaled_mm.described(fp8, where)
            detail = f"{len(fp8)} of {len(linears)} layers, {self.recipe.scaling.short_str()}, {how}"
            report["rollout.linears"] = Active(state=state, detail=detail)
        precision, kernel = self.kv_precision, decode_kernel.choose(where)
        if scales := precision.scales:
            held = "bytes" if where.device == "cuda" else "grid values held in BF16"
            report["rollout.kv_cache"] = Active(
                state="fp8" if where.device == "cuda" else "emulated",
                detail=f"{precision.fmt} {held}, scales of version {scales.version}",
            )
        if any(precision.quantizes_p(layer) for layer in range(self.config.num_layers)):
            detail = "Q, K, V and P in FP8, FP32 accumulation"
            if kernel.kernel:
                detail += f"; decoding by {kernel.kernel}, prefill and scoring emulated"
            elif where.device == "cuda":
                detail += f"; no kernel: {kernel.reason}"
            report["rollout.attention"] = Active(state="fp8" if kernel.kernel else "emulated", detail=detail)
        return report


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Prompts as [N, P] with padding on the left, and the column each starts at."""
    if empty := [i for i, prompt in enumerate(prompts) if not len(prompt)]:
        raise ValueError(f"prompt {empty[0]} has no tokens")
    width = max(map(len, prompts))
    starts_N = torch.tensor([width - len(prompt) for prompt in prompts])
    rows = [[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    return torch.tensor(rows), starts_N
