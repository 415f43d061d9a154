"""Cost of one synchronous GRPO step on GPUs: a roofline for the rollout, Amdahl's law for the training. All "modelled".

Every GPU has a whole copy of the engine and N = prompts·group/num_gpus rollouts; engine and trainer take turns on it.
Per GPU, in seconds, with peak in FLOP/s and BW in bytes/s:

    matmul(B)  = max(weight bytes / (BW·DECODE_BANDWIDTH), 2·params·B / (peak·DECODE_GEMM))   FP8 and BF16 part each
    attend(B)  = max(B·context·KV bytes / (BW·DECODE_BANDWIDTH), 4·layers·heads·head_dim·B·context / (peak·DECODE_GEMM))
    decode step with B rollouts = matmul + attend + STEP_OVERHEAD + quantisation launches
    prefill    = FLOPs / (peak·PREFILL), every prompt once: its group shares it
    forward    = GEMM time + the rest;  GEMM time = FLOPs / (peak·TRAIN_GEMM), rest: what makes the BF16 total one of
                 FLOPs / (bf16 peak·MFU). FP8 shortens the GEMM time only.
    update     = 3 forwards: fprop, dgrad, wgrad, each in its own precision
    refit      = BF16 weights over the link, and 3 passes over them to quantise

Lengths of answers spread like exp(-t / response_tokens), cut at LONGEST times the mean: so a rollout phase ends with a
tail of few long answers, in which a decode step costs the reading of the weights. The cache has room for
capacity / (prompt_tokens + response_tokens) rollouts at a time. The others wait; until none does, the batch is full.

FP8 linears halve weight bytes and have the device's FP8 peak; FP8 KV halves the cache's bytes; FP8 attention has
that peak too. What device or shape has no native kernel for is charged as BF16, and a note says so.

Nothing was fitted to end-to-end figures. Beside those that others published (tests/hardware), a step of Llama-3.1-8B is
17 % too fast, FP8 linears gain a little too much in the rollout, and recalibration costs twice what it should.

Left out: asynchronous rollouts, tensor parallelism, memory of the trainer, offloading, rewards, correction, and kernel
launches in training, so that small models look too fast. Source: roofline, Williams et al. 2009; constants below.
Raises ValueError for unknown names, workloads without work, and a model that leaves no memory for the cache.
"""

import math
from dataclasses import dataclass, fields

from rich.table import Table

from labkit.config.recipe import Recipe
from labkit.hardware.devices import Device, device_named
from labkit.hardware.native import native
from labkit.hardware.shapes import Shape, shape_named

# Assumption, within the 0.6 to 0.75 that engines with CUDA graphs reach on H100.
DECODE_BANDWIDTH = 0.7
DECODE_GEMM = 0.5  # assumption: skinny GEMMs
PREFILL = 0.55  # assumption
STEP_OVERHEAD = 3e-3  # assumption: scheduler and sampling take 2 to 4 ms a decode step
# torchtitan, Llama-3-8B on 8 H100 at 8192 tokens: 0.32 in BF16; verl's table of MoE runs: 0.31 to 0.40. On B200, 0.19.
MFU = 0.35
TRAIN_GEMM = 0.65  # assumption: a single 8192³ BF16 GEMM reaches 0.78 to 0.81 on H200, those of layers less
# Transformer Engine, layers of a 5B model on H200 NVL: FP8 GEMMs alone are 1.92 times as fast, not 2.
FP8_GEMM = 0.96  # of the ratio of the peaks
# The same source with quantisation: 1.41 (block), 1.57 (tensor); 1.44 (mx, B300). 1/1.41 - 1/1.92 of the BF16 time is
# quantisation. It grows with the width of a layer, a GEMM with its square. Assumption: row costs what block does.
QUANTISE = {"block": 0.188, "row": 0.188, "tensor": 0.116, "mx": 0.174}
QUANTISE_WIDTH = 4096
QUANTISE_LAUNCH = 3e-6  # assumption, seconds a kernel in a CUDA graph; q/k/v, o, gate/up and down each quantise once
# vLLM, H100, Llama-3.1-8B: the time of a token grows with the context at 54 % of BF16's slope, not 50 %.
FP8_KV_TIME = 0.54
LONGEST = 4.0  # NeMo RL, Llama-3.1-8B: answers of 1,019 tokens on average, limit 4,096
ENGINE_MEMORY = 0.6  # gpu_memory_utilization of NeMo RL's GRPO recipes
WORKSPACE = 2**30  # assumption: the engine's activations and CUDA graphs, bytes
LINK = 0.7  # assumption: share of the link's bandwidth
REQUANTISE_PASSES = 3  # over the BF16 weights: amax, quantise, copy into the engine

_SLICES = 64  # of the tail


@dataclass(frozen=True)
class Workload:
    """One step. `response_tokens` is the mean; `scorings` are forwards before the update, 2 with a reference policy."""

    prompts: int = 64
    group: int = 32
    prompt_tokens: int = 127
    response_tokens: int = 1019
    num_gpus: int = 16
    scorings: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise ValueError(f"{field.name}: must be at least 1, got {value}")
        if self.prompts * self.group < self.num_gpus:
            rollouts = self.prompts * self.group
            raise ValueError(f"num_gpus: {rollouts} rollouts leave some of {self.num_gpus} GPUs idle; set it lower")

    def __str__(self) -> str:
        rollouts, tokens = self.prompts * self.group, f"{self.prompt_tokens:,} + {self.response_tokens:,} tokens"
        return f"{rollouts:,} rollouts of {tokens}, {self.num_gpus} GPU{'s' * (self.num_gpus > 1)}"


# NeMo RL v0.5, docs/about/performance-summary.md: 2,048 rollouts a step, on-policy, KL to a reference policy.
# 1,581 tok/s/GPU · 92.8 s · 16 GPUs / 2,048 are 1,146 tokens a rollout, of which 1,019 are generated.
PUBLISHED = Workload(scorings=2)


@dataclass(frozen=True)
class Modelled:
    """Rates are tokens/s/GPU, by the definitions of `labkit.runs.compare`. Nothing here was measured."""

    seconds: dict[str, float]  # per phase
    rollout: float
    train: float
    end_to_end: float
    kv_capacity_tokens: int  # of one GPU
    concurrency: float  # rollouts that one GPU decodes at a time
    inputs: dict[str, str]
    notes: tuple[str, ...]

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def rollout_seconds(self) -> float:
        return self.seconds["prefill"] + self.seconds["decode"]

    @property
    def label(self) -> str:
        return f"modelled for {self.inputs['device']}"

    def table(self) -> Table:
        table = Table("quantity", "value", title=f"{self.label}, not measured", caption="\n".join(self.notes) or None)
        table.caption_justify = "left"
        for name, value in self.inputs.items():
            table.add_row(name, value)
        table.add_section()
        for phase, seconds in self.seconds.items():
            table.add_row(phase, f"{seconds:,.2f} s ({seconds / self.step_seconds:.0%})")
        table.add_row("step", f"{self.step_seconds:,.2f} s", end_section=True)
        for name in ("rollout", "train", "end_to_end"):
            table.add_row(name.replace("_", "-"), f"{getattr(self, name):,.0f} tokens/s/GPU")
        table.add_row("KV capacity", f"{self.kv_capacity_tokens:,} tokens a GPU")
        table.add_row("decoded at a time", f"{self.concurrency:,.0f} rollouts a GPU")
        return table


def modelled(
    recipe: Recipe, shape: str = "llama-3.1-8b", device: str = "h100", workload: Workload | None = None
) -> Modelled:
    """What one step of `recipe` would cost. Without a workload: that of NeMo RL's published Llama-3.1-8B runs."""
    workload = workload or Workload()
    cost = _Cost(recipe, shape_named(shape), device_named(device), workload)
    prefill, decode = cost.rollout()
    seconds = {
        "prefill": prefill,
        "decode": decode,
        "score": workload.scorings * cost.gemm("fprop"),
        "update": sum(cost.gemm(name) for name in ("fprop", "dgrad", "wgrad")),
        "recalibrate": cost.recalibrate(),
        "refit": cost.refit(),
    }
    generated = cost.rollouts * workload.response_tokens
    return Modelled(
        seconds=seconds,
        rollout=generated / (prefill + decode),
        train=cost.tokens / seconds["update"],
        end_to_end=cost.tokens / sum(seconds.values()),
        kv_capacity_tokens=cost.capacity,
        concurrency=cost.concurrency,
        inputs={
            **{"device": cost.device.label, "shape": cost.shape.label, "workload": str(workload)},
            **{"recipe": recipe.short_str(), "scorings": str(workload.scorings)},
        },
        notes=cost.native.notes,
    )


class _Cost:
    """Seconds of the phases, on one GPU."""

    def __init__(self, recipe: Recipe, shape: Shape, device: Device, workload: Workload) -> None:
        self.shape, self.device, self.workload = shape, device, workload
        self.native = native(recipe, shape, device)
        self.speedup = FP8_GEMM * (device.fp8 or device.bf16) / device.bf16  # of an FP8 matmul, without quantisation
        self.quantise = QUANTISE[recipe.scaling.granularity] * QUANTISE_WIDTH / shape.hidden
        self.covered_layers = sum(recipe.covers(layer, shape.layers) for layer in range(shape.layers))
        self.covered_head = shape.head_params if recipe.covers(None, shape.layers) else 0
        self.covered = self.covered_layers * shape.layer_params + self.covered_head
        every = {"every-step": 1, "every-k-steps": recipe.recalibration.every}
        self.recalibrate_every = every.get(recipe.recalibration.policy) if self.native.kv_cache else None
        self.rollouts = workload.prompts * workload.group / workload.num_gpus
        self.tokens = self.rollouts * (workload.prompt_tokens + workload.response_tokens)
        self.capacity = self._capacity()
        self.concurrency = min(self.rollouts, self.capacity / (workload.prompt_tokens + workload.response_tokens))

    def _capacity(self) -> int:
        shape, device = self.shape, self.device
        weights = 2 * shape.params - (self.covered if self.native.linears else 0)
        room = ENGINE_MEMORY * device.memory - WORKSPACE - weights
        capacity = int(room / (shape.kv_elements * (1 if self.native.kv_cache else 2)))
        need = self.workload.prompt_tokens + self.workload.response_tokens
        if capacity < need:
            raise ValueError(
                f"device: {shape.label} leaves room for {max(0, capacity):,} tokens in the KV cache of {device.label}, "
                f"one rollout has {need:,}; choose a smaller shape, shorter answers or a device with more memory"
            )
        return capacity

    def rollout(self) -> tuple[float, float]:
        """(prefill, decode) seconds."""
        workload, shape = self.workload, self.shape
        prompt, mean = workload.prompt_tokens, workload.response_tokens
        prompts = self.rollouts / workload.group
        # The lm_head sees one position of a prompt.
        head = prompts * shape.head_params
        layers = prompts * prompt * shape.layers * shape.layer_params
        fp8 = layers * self.covered_layers / shape.layers if self.native.linears else 0
        peak = self.device.bf16 * PREFILL
        attend = prompts * self._attention_flops(prompt) / (self.speedup if self.native.attention else 1)
        gemms = fp8 * (1 / self.speedup + self.quantise) + (layers - fp8) + head
        prefill = (2 * gemms + attend) / peak

        waiting = self.rollouts - self.concurrency
        decode = waiting * mean / self.concurrency * self._decode_step(self.concurrency, prompt + mean)
        length = LONGEST * mean / _SLICES
        for t in (length * (i + 0.5) for i in range(_SLICES)):
            context = prompt + (mean if waiting else t)  # all began together, or at any time before
            decode += length * self._decode_step(max(1.0, self.concurrency * math.exp(-t / mean)), context)
        return prefill, decode

    def _decode_step(self, batch: float, context: float) -> float:
        shape, device = self.shape, self.device
        bandwidth, peak = device.bandwidth * DECODE_BANDWIDTH, device.bf16 * DECODE_GEMM
        fp8 = self.covered if self.native.linears else 0
        bf16 = shape.layers * shape.layer_params + shape.head_params - fp8
        matmul = max(fp8 / bandwidth, 2 * fp8 * batch / (self.speedup * peak))
        matmul += max(2 * bf16 / bandwidth, 2 * bf16 * batch / peak)
        read = 2 * shape.kv_elements * batch * context / bandwidth * (FP8_KV_TIME if self.native.kv_cache else 1)
        flops = 4 * shape.layers * shape.heads * shape.head_dim * batch * context
        attend = max(read, flops / (peak * (self.speedup if self.native.attention else 1)))
        launches = 4 * self.covered_layers * QUANTISE_LAUNCH if self.native.linears else 0.0
        return matmul + attend + STEP_OVERHEAD + launches

    def _attention_flops(self, length: float) -> float:
        """Of a causal forward over one sequence: q·kᵀ and p·v, half of each."""
        return 2 * self.shape.layers * self.shape.heads * self.shape.head_dim * length**2

    def gemm(self, name: str, head: bool = True) -> float:
        """Seconds of one of the three GEMMs of all linears, over the step's tokens, with the rest that goes with it."""
        shape = self.shape
        params = shape.layers * shape.layer_params + (shape.head_params if head else 0)
        covered = self.covered - (0 if head else self.covered_head) if self.native.gemms[name] else 0
        # Of the attention, backward costs twice the forward: one more for each of dgrad and wgrad.
        # Mean of the square over lengths that spread like exp(-t): 2·mean².
        mean = self.workload.response_tokens
        squares = self.workload.prompt_tokens**2 + 2 * self.workload.prompt_tokens * mean + 2 * mean**2
        attend = self.rollouts * self._attention_flops(math.sqrt(squares))
        flops = 2 * self.tokens * params + attend
        saved = 2 * self.tokens * covered * (1 - 1 / self.speedup - self.quantise)
        return flops / (self.device.bf16 * MFU) - saved / (self.device.bf16 * TRAIN_GEMM)

    def recalibrate(self) -> float:
        """Seconds a step: the forward over the batch stops before the lm_head."""
        return self.gemm("fprop", head=False) / self.recalibrate_every if self.recalibrate_every else 0.0

    def refit(self) -> float:
        weights = 2 * self.shape.params
        alone = self.workload.num_gpus == 1
        send = weights / (self.device.bandwidth * DECODE_BANDWIDTH if alone else self.device.link * LINK)
        passes = REQUANTISE_PASSES * 2 * self.covered if self.native.linears else 0
        return send + passes / (self.device.bandwidth * DECODE_BANDWIDTH)
