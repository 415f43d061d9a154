"""Claims: what NVIDIA says about FP8 reinforcement learning, and what nobody has published, as sweeps to be repeated.

    labkit claims                       # what is claimed, and the table of what has been run here
    labkit claims end-to-end            # run one of them
    labkit claims all                   # all, each cell once

A claim has arms and expectations: an arm against another (or, for a cost, against the published range), in one
quantity, with the direction that was published. "same" needs a margin: it is shown where the whole interval lies inside
it, which a mere "no difference" doesn't do. "open" stands for what no one has published.

Figures are from 8B and 30B models on H100s, ours from a policy of 0.8 M parameters that calculates, at 60 steps. So
what is put to the test is the direction, and a null here says what the interval says and no more. Held-out accuracy is
that of the unquantised policy; NVIDIA evaluates through the FP8 engine, on 256 problems.

Sources:  blog   "Run High-Throughput Reinforcement Learning Training with End-to-End FP8 Precision", NVIDIA 2026-04-20
          1212   NVIDIA-NeMo/RL pull request 1212, FP8 KV cache and attention, Qwen3-8B-Base
          fp8rl  "FP8-RL", arXiv 2601.18150
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from labkit.config.errors import ConfigError, did_you_mean
from labkit.config.experiment import MODEL_TASKS

Says = Literal["lower", "higher", "same", "open"]
_BLOG = "NVIDIA blog 2026-04-20"
_LLAMA = f"Llama-3.1-8B, 4,000 steps; {_BLOG}"
COST = "recalibrate_share"


@dataclass(frozen=True)
class Expectation:
    """`arm` is `says` than/as `versus` in `quantity`. With `band`: its own value lies inside, `versus` is empty."""

    arm: str
    versus: str
    quantity: str
    says: Says
    published: str = "not published"
    margin: float = 0.0  # of "same"
    band: tuple[float, float] | None = None


@dataclass(frozen=True)
class Claim:
    name: str
    statement: str
    source: str
    arms: dict[str, dict[str, Any]]
    expectations: tuple[Expectation, ...]
    note: str = ""
    effect: float = 0.03  # the published difference in accuracy, for the seeds needed
    experiment: dict[str, Any] = field(default_factory=dict)  # what all arms have in common


BF16: dict[str, Any] = {"preset": "bf16"}
ROLLOUT: dict[str, Any] = {"preset": "fp8-rollout"}
ROLLOUT_IS: dict[str, Any] = {"preset": "fp8-rollout-tis"}
END_TO_END: dict[str, Any] = {"preset": "fp8-e2e"}
KV: dict[str, Any] = {"preset": "fp8-rollout-kv", "recipe.correction": "none"}
KV_IS: dict[str, Any] = {"preset": "fp8-rollout-kv"}
STALE: dict[str, Any] = {"preset": "fp8-rollout-icepop", "grpo.staleness": 4, "grpo.lr": 4e-4}

_THREE = {"bf16": BF16, "fp8-rollout": ROLLOUT_IS, "fp8-e2e": END_TO_END}
_ORDER = (
    Expectation("fp8-rollout", "bf16", "tmpe_excess", "higher", "BF16 lowest"),
    Expectation("fp8-rollout", "fp8-e2e", "tmpe_excess", "higher", "FP8 rollouts highest"),
    Expectation("fp8-e2e", "bf16", "tmpe_excess", "higher", "end to end between the two"),
)

_CLAIMS = [
    Claim(
        "tmpe-order",
        "TMPE is lowest for BF16, highest for FP8 rollouts with BF16 training, and between them end to end",
        f"{_BLOG}, figure 1 (vLLM and Megatron have different kernels)",
        _THREE,
        _ORDER,
        note="the trainer has another attention kernel than the engine, as theirs has",
        experiment={"trainer_attention": "sdpa"},
    ),
    Claim(
        "tmpe-order-same-kernels",
        "The same order, with the same kernels on both sides",
        f"{_BLOG}, figure 1",
        _THREE,
        _ORDER,
        note="with the same kernels BF16 and end to end are exact here, so there is nothing between",
    ),
    Claim(
        "rollout-only",
        "FP8 rollouts with BF16 training lose accuracy; importance sampling narrows the gap but doesn't close it",
        _LLAMA,
        {"bf16": BF16, "fp8-rollout": ROLLOUT, "fp8-rollout + IS": ROLLOUT_IS},
        (
            Expectation("fp8-rollout", "bf16", "heldout_end", "lower", ".586 against .616: −.030"),
            Expectation("fp8-rollout + IS", "fp8-rollout", "heldout_end", "higher", "narrowed, no figure"),
            Expectation("fp8-rollout + IS", "bf16", "heldout_end", "lower", "not closed, no figure"),
        ),
        note="whether the .586 is with or without importance sampling isn't said",
    ),
    Claim(
        "end-to-end",
        "FP8 on both sides with importance sampling closes the gap to BF16",
        _LLAMA,
        {"bf16": BF16, "fp8-e2e + IS": END_TO_END, "fp8-rollout + IS": ROLLOUT_IS},
        (
            Expectation("fp8-e2e + IS", "bf16", "heldout_end", "same", ".613 against .616: −.003", margin=0.03),
            Expectation("fp8-e2e + IS", "fp8-rollout + IS", "heldout_end", "higher", ".613 against .586: +.027"),
        ),
    ),
    Claim(
        "kv-attention",
        "An FP8 KV cache and FP8 attention raise the mismatch further; token-level TIS brings accuracy back to BF16's",
        "Qwen3-8B-Base, NVIDIA-NeMo/RL pull request 1212 (figures without numbers)",
        {"bf16": BF16, "linears + IS": ROLLOUT_IS, "linears, KV": KV, "linears, KV + IS": KV_IS},
        (
            Expectation("linears, KV + IS", "linears + IS", "tmpe_excess", "higher", "further up"),
            Expectation("linears, KV", "bf16", "heldout_end", "lower", "lower, no figure"),
            Expectation("linears, KV + IS", "linears, KV", "heldout_end", "higher", "re-aligned, no figure"),
            Expectation("linears, KV + IS", "bf16", "heldout_end", "same", "re-aligned, no figure", margin=0.03),
        ),
    ),
    Claim(
        "recalibration",
        "Q/K/V scales are recalibrated after every step, because the policy changes at every step",
        f"{_BLOG}; no ablation published",
        {
            "every step": KV_IS,
            "first step only": KV_IS | {"recipe.recalibration.policy": "first-step"},
            "unit scales": KV_IS | {"recipe.recalibration.policy": "unit"},
        },
        (
            Expectation("first step only", "every step", "tmpe_excess", "higher"),
            Expectation("unit scales", "every step", "tmpe_excess", "higher"),
            Expectation("first step only", "every step", "heldout_end", "open"),
            Expectation("unit scales", "every step", "heldout_end", "open"),
        ),
        note="the tiny policy normalises its keys, which keeps their amax nearly where it was",
    ),
    Claim(
        "recalibration-cost",
        "Recalibrating after every step costs 2 to 3 % of a step",
        f"{_BLOG}, Qwen3-8B-Base",
        {"every step": KV_IS},
        (Expectation("every step", "", COST, "same", "2 to 3 %", band=(0.02, 0.03)),),
        note="ours is the share on a CPU with emulated FP8, where generation doesn't dominate as it does on GPUs",
    ),
    Claim(
        "first-last-bf16",
        "Keeping the first and the last layers in BF16 helps",
        "a switch in NeMo RL and AReaL; no isolated gain published",
        {
            "none kept": ROLLOUT,
            "first": ROLLOUT | {"recipe.keep_bf16.first_layers": 1},
            "last": ROLLOUT | {"recipe.keep_bf16.last_layers": 1},
            "both": ROLLOUT | {"recipe.keep_bf16.first_layers": 1, "recipe.keep_bf16.last_layers": 1},
        },
        (
            *(Expectation(arm, "none kept", "tmpe_excess", "lower") for arm in ("first", "last", "both")),
            Expectation("both", "none kept", "heldout_end", "open"),
        ),
        note="one of four layers each, FP8 rollouts with BF16 training, no correction",
    ),
    Claim(
        "scale-type",
        "FP32 scales are closer than powers of two",
        "NVIDIA uses FP32 scales on Hopper (blog, table 1); LMSYS 2025-11-25 reports the direction, no figure",
        {
            "powers of two": ROLLOUT,
            "FP32": ROLLOUT | {"recipe.scaling.scale": "fp32"},
            "powers of two, both sides": END_TO_END,
            "FP32, both sides": {"preset": "fp8-e2e-fp32-scales"},
        },
        (
            Expectation("FP32", "powers of two", "tmpe_excess", "lower"),
            Expectation("FP32, both sides", "powers of two, both sides", "tmpe_excess", "open"),
            Expectation("FP32, both sides", "powers of two, both sides", "heldout_end", "open"),
        ),
    ),
    Claim(
        "denominator",
        "Whether rejected tokens stay in the mean of the loss (NeMo RL, verl) or leave it (slime) changes the outcome",
        "projects differ; no comparison published",
        {"keep": STALE, "drop": STALE | {"recipe.correction.name": "custom", "recipe.correction.denominator": "drop"}},
        (
            Expectation("drop", "keep", "heldout_end", "open"),
            Expectation("drop", "keep", "heldout_area", "open"),
        ),
        note="IcePop on FP8 rollouts that are four steps old, lr 4e-4, so that there is something to reject",
    ),
    Claim(
        "lora-frozen-base",
        "Adapters on a frozen FP8 base that engine and trainer share need no correction: its codes never change",
        "an idea; no ablation published",
        {"bf16 base": BF16, "fp8 base": {"preset": "fp8-frozen-base"}, "fp8 base in rollouts only": ROLLOUT},
        (
            Expectation("fp8 base", "bf16 base", "tmpe_excess", "open"),
            Expectation("fp8 base in rollouts only", "fp8 base", "tmpe_excess", "open"),
            Expectation("fp8 base", "bf16 base", "heldout_end", "open"),
            Expectation("fp8 base in rollouts only", "bf16 base", "heldout_end", "open"),
            Expectation("fp8 base in rollouts only", "fp8 base", "heldout_engine", "open"),
        ),
        note="rank 16, lr 5e-3, no correction; the same kernels on both sides. heldout_end puts the adapters on the "
        "BF16 base, also those that were trained on an FP8 one; heldout_engine on the base of the run's own engine",
        experiment={"lora.rank": 16, "grpo.lr": 5e-3, "eval_engine": True},
    ),
]
if "tiny-moe" in MODEL_TASKS:
    _CLAIMS.append(
        Claim(
            "moe-parity",
            "A mixture of experts trained end to end in FP8 with importance sampling is on par with BF16",
            f"{_BLOG}, Qwen3-30B-A3B (no numbers); arXiv 2601.18150: FP8 rollouts alone crash near step 700",
            {"bf16": BF16, "fp8-e2e + IS": END_TO_END, "fp8-rollout + IS": ROLLOUT_IS},
            (
                Expectation("fp8-e2e + IS", "bf16", "heldout_end", "same", "on par, no figure", margin=0.03),
                Expectation("fp8-rollout + IS", "fp8-e2e + IS", "tmpe_excess", "higher", "higher, no figure"),
            ),
            experiment={"model": "tiny-moe"},
        )
    )

CLAIMS: dict[str, Claim] = {claim.name: claim for claim in _CLAIMS}


def find(name: str) -> list[Claim]:
    """One claim by its name, or all."""
    if name == "all":
        return list(CLAIMS.values())
    if name not in CLAIMS:
        raise ConfigError(f"claims: none is called {name!r}; {did_you_mean(name, [*CLAIMS, 'all'])}")
    return [CLAIMS[name]]
