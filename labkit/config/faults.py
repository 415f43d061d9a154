"""The failure gallery as data: what went wrong in real systems, where to look, and what it does here.

A case compares two arms that differ in the fault alone: `preset` with `settings` is the control; the faulty arm has
`faulty` on top. Two kinds:

    injected    code is broken on purpose (labkit.rl.faults): faulty is {"faults": [name]}
    settings    a legal Experiment that goes wrong: faulty is what it sets

`Experiment.faults` takes the names of the injected ones. `check` refuses a fault that the rest of the Experiment
would hide. Nothing else turns one on: no preset has any. Imports no torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from labkit.config.errors import did_you_mean, wrong
from labkit.config.findings import FINDINGS

if TYPE_CHECKING:
    from labkit.config.experiment import Experiment


@dataclass(frozen=True)
class Need:
    """A setting without which a fault has nothing to break."""

    key: str
    fits: Callable[[Any], bool]
    way_out: str


@dataclass(frozen=True)
class Case:
    name: str
    wrong: str  # what is broken
    reported: str  # where real systems had it
    look_at: tuple[str, ...]  # metrics of the record that tell, the clearest first
    alarm: str  # of labkit.runs.alarms that it raises; "" if none does
    cure: str
    preset: str
    settings: Mapping[str, Any]  # of both arms, as overrides
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the faulty arm; none if the fault is injected
    needs: tuple[Need, ...] = ()
    finding: str = ""  # what was measured here, also when that is nothing

    @property
    def injected(self) -> bool:
        return not self.changes

    @property
    def faulty(self) -> dict[str, Any]:
        return {"faults": (self.name,)} if self.injected else dict(self.changes)


def check(experiment: "Experiment") -> None:
    """For a validator of Experiment: raises for a name that is no injected fault, or that can't show here."""
    names = experiment.faults
    injected = [case.name for case in CASES.values() if case.injected]
    for name in names:
        if name in CASES and name not in injected:
            raise wrong("faults", f"{name} is made of settings, there is no code to break; run it with "
                        f"labkit.gallery.run({name!r})")  # fmt: skip
        if name not in injected:
            raise wrong("faults", f"no fault {name!r}; {did_you_mean(name, injected)}")
        for group, members in _SAME_PLACE.items():
            if name in members and (other := next((n for n in names if n in members and n != name), "")):
                raise wrong("faults", f"{name} and {other} both break {group}; run them one at a time")
        if names.count(name) > 1:
            raise wrong("faults", f"{name} is given twice; keep one of the two")
        for need in CASES[name].needs:
            value = attrgetter(need.key)(experiment)
            if not need.fits(value):
                raise wrong("faults", f"{name} can't show while {need.key} is {value}; {need.way_out}")


# Of two that break the same place only one would show.
_SAME_PLACE = {
    "the log-probs": (
        "wrong-temperature", "raw-logprobs", "logprobs-divided", "logprobs-shifted", "nan-logprobs", "logprobs-missing",
    ),
    "the Q/K/V scales": ("scales-dropped", "scales-stale-growth", "scales-from-dummy"),
    "the FP8 weights": ("fp8-not-installed", "identity-scale", "weight-scales-stale", "zero-block"),
    "the refit": ("layer-not-refitted", "one-version-behind"),
}  # fmt: skip

_KV = Need("recipe.rollout.kv_cache", bool, "turn it on, since its scales are what breaks")
_SENT_SCALES = (
    _KV,
    Need("recipe.recalibration.policy", lambda policy: policy not in ("unit", "engine"),
         "choose a policy that sends calibrated scales, such as every-step"),
)  # fmt: skip
_FP8_ROLLOUT = Need("recipe.rollout.linears", bool, "turn it on, since its FP8 weights are what breaks")
_TEMPERATURE = Need("sampling.temperature", lambda t: t != 1, "set another one, such as 0.6: at 1 nothing differs")

_FAST = {"grpo.lr": 4e-4}
_TIS = {"recipe.correction": "tis"}
_AT_06 = {"steps": 4, "sampling.temperature": 0.6, **_TIS}

_CASES = [
    # ---- scales of the FP8 KV cache
    Case(
        "scales-dropped",
        "the refit loses the calibrated Q/K/V scales; the engine goes on with 1.0 and says nothing",
        "NeMo RL#3225, #3226", ("gen_kl_error", "kv_saturation_k", "kv_saturation_v"), "scales-default",
        "read the scales back from the engine after each refit and refuse a difference (the loop does, unless this "
        "fault is on)",
        "fp8-rollout-kv", {"steps": 4}, needs=_SENT_SCALES,
    ),
    Case(
        "scales-stale-growth",
        "keys and values have doubled since their scales were measured: everything above half of the range is clipped",
        "NeMo RL#3008", ("kv_saturation_k", "token_mult_prob_error", "ess"),
        "kv-saturation",
        "recalibrate at every step (recipe.recalibration.policy every-step), with a margin above 1",
        "fp8-rollout-kv", {"steps": 6, **_FAST}, needs=_SENT_SCALES,
    ),
    Case(
        "scales-from-dummy",
        "scales are measured on a warm-up batch of one repeated token, not on what the policy writes",
        "engines that take scales from their first forward, which may be a warm-up: vllm#11906, verl#4435",
        ("kv_saturation_v", "gen_kl_error", "token_mult_prob_error"), "kv-saturation",
        "calibrate on real rollouts, with the updated weights",
        "fp8-rollout-kv", {"steps": 4}, needs=_SENT_SCALES,
    ),
    Case(
        "scales-frozen",
        "scales are measured once, after step 1, and kept while the policy moves away",
        "every engine with a calibrated checkpoint; NeMo RL recalibrates because of it",
        ("kv_saturation_k", "kv_saturation_v", "gen_kl_error"), "",
        "recipe.recalibration.policy every-step",
        "fp8-rollout-kv", {"steps": 20, **_FAST}, {"recipe.recalibration.policy": "first-step"},
    ),
    Case(
        "unit-scale-large-k",
        "keys beyond the format's 448 meet a scale of 1.0, as in models without QK-norm; with QK-norm 1.0 does no harm",
        "verl#4435, TRT-LLM#4218, Qwen3#840: answers become ????; vllm#11906",
        ("kv_saturation_k", "token_mult_prob_error", "gen_kl_error"), "kv-saturation",
        "calibrate: recipe.recalibration.policy every-step",
        "fp8-rollout-kv",
        {"steps": 4, "recipe.rollout.attention": False, "recipe.recalibration.policy": "unit"}, needs=(_KV,),
    ),
    # ---- what is sampled, and what is said about it
    Case(
        "wrong-temperature",
        "the engine samples colder than asked and reports log-probs as if it had not: g and p agree, both are wrong",
        "TRL#4159, prime-rl#697, NeMo RL#902", ("surprisal_gap", "accuracy", "heldout_accuracy"), "sampler-surprisal",
        "give the engine sampling.temperature, and take the log-probs from the very numbers it samples from",
        "bf16", {"steps": 6},
    ),
    Case(
        "temperature-forgotten",
        "the trainer scores at temperature 1 what was sampled at 0.6",
        "TRL#4159; SkyRL's text-to-SQL script", ("surprisal_gap", "ess_raw", "token_mult_prob_error"),
        "sampler-surprisal", "divide the trainer's logits by sampling.temperature",
        "bf16", {"steps": 4, "sampling.temperature": 0.6}, needs=(_TEMPERATURE,),
    ),
    Case(
        "raw-logprobs",
        "the engine reports log-probs of its raw logits, before the temperature",
        "TRL#4159 (vLLM's raw_logprobs)", ("sampling_importance_ratio", "mean_applied"), "sampler-ratio",
        "ask the engine for processed log-probs", "bf16", _AT_06, needs=(_TEMPERATURE,),
    ),
    Case(
        "logprobs-divided",
        "log-probs are divided by the temperature instead of logits, so they belong to no distribution",
        "prime-rl#697", ("sampling_importance_ratio", "clipped_weight_share"), "sampler-ratio",
        "divide logits, then take the log-softmax", "bf16", _AT_06, needs=(_TEMPERATURE,),
    ),
    Case(
        "top-p-unnormalised",
        "the sampler renormalises over the nucleus, the trainer over the whole vocabulary: r is the nucleus's mass",
        "TRL#6789, #7269; SkyRL's text-to-SQL script", ("sampling_importance_ratio", "mean_applied"), "sampler-ratio",
        "score over the sampler's nucleus, or sample with top_p 1",
        "bf16", {"steps": 4, "sampling.top_p": 0.8, **_TIS},
        needs=(Need("sampling.top_p", lambda p: p < 1, "lower it, to 0.8 for instance: at 1 nothing differs"),),
    ),
    Case(
        "logprobs-shifted",
        "log-probs are out of step with the tokens by one",
        "prime-rl#1525; Unsloth switches TRL's correction off for left padding",
        ("sampling_importance_ratio", "prob_correlation", "ess_raw"), "mismatch-level",
        "align by position, and test it with a policy scored twice", "bf16", {"steps": 4, **_TIS},
    ),
    Case(
        "nan-logprobs",
        "the engine returns NaN for some tokens",
        "TRL#6297", ("nan_count", "kept_share"), "nan-tokens",
        "leave the token out, count it, keep the loss finite (the loop does)", "fp8-rollout-tis", {"steps": 4},
    ),
    Case(
        "logprobs-missing",
        "the engine's log-probs are not recorded, so the trainer's own stand in: every ratio is 1",
        "verl#4070; verl's default records none", ("tokens_differing", "token_mult_prob_error", "ess"),
        "blind-correction", "record them while sampling; a mismatch of exactly 0 across precisions is no good news",
        "fp8-rollout-tis", {"steps": 4},
    ),
    # ---- what a refit delivers
    Case(
        "layer-not-refitted",
        "the first layer's weights never arrive",
        "verl#5683, #5459", ("tokens_differing", "token_mult_prob_error", "gen_kl_error"), "not-exact",
        "compare every weight after the refit (the loop does, unless this fault is on)",
        "bf16", {"steps": 12, **_FAST},
    ),
    Case(
        "one-version-behind",
        "every second refit is skipped while the engine reports the new version",
        "slime#1695 (after a resume)", ("tokens_differing", "token_mult_prob_error"), "not-exact",
        "compare weights, not version numbers", "bf16", {"steps": 6, **_FAST},
    ),
    Case(
        "stale-prefix-cache",
        "keys and values of prompts outlive the refit that should have flushed them",
        "prime-rl#1650, NeMo RL#4018, vllm-omni#6739: up to 17 steps old",
        ("tokens_differing", "gen_kl_error", "token_mult_prob_error"), "not-exact",
        "flush every cached key and value in the refit", "bf16", {"steps": 12, **_FAST},
        needs=(Need("recipe.recalibration.policy", lambda policy: policy != "engine",
                    "choose another, since an engine that reads its prompts from a cache has nothing to measure"),),
    ),
    Case(
        "stale-uncorrected",
        "rollouts come from weights four updates old, and nothing corrects for it",
        "AReaL: 42.0 to 23.3 at lag 4", ("heldout_accuracy", "ess_raw", "staleness"), "accuracy-fell",
        "recipe.correction tis, or compare with the rollout policy (old_policy rollout)",
        "bf16", {"steps": 40, "grpo.staleness": 4, **_FAST, **_TIS}, {"recipe.correction": "none"},
    ),
    # ---- FP8 linears
    Case(
        "fp8-not-installed",
        "the engine's hooks match no layer, so its linears stay BF16 under an FP8 name",
        "NeMo RL#3755, #3754", ("tokens_differing", "codes_changed"), "not-active",
        "read back what the engine multiplies with; look at active['rollout.linears']",
        "fp8-rollout-tis", {"steps": 4}, needs=(_FP8_ROLLOUT,),
    ),
    Case(
        "identity-scale",
        "one layer's FP8 codes arrive without their scale",
        "NeMo RL#2744", ("accuracy", "token_mult_prob_error", "ess"), "mismatch-level",
        "dequantise what the engine holds and compare with what was sent", "fp8-rollout-tis", {"steps": 4},
        needs=(_FP8_ROLLOUT,),
    ),
    Case(
        "weight-scales-stale",
        "reloading keeps the scales of the first load and brings new codes",
        "vllm#28783, sglang#30749, stitch#16", ("tokens_differing", "gen_kl_error"), "not-exact",
        "after a second load the logits must equal those of a fresh engine", "fp8-e2e-fp32-scales",
        {"steps": 10, **_FAST},
        needs=(_FP8_ROLLOUT, Need("lora.rank", lambda rank: not rank, "set it to 0: a frozen base keeps its scales")),
    ),
    Case(
        "zero-block",
        "a block of zeros is divided by its own amax: 0/0",
        "torchao#4713, #4714, #4762, HF kernels#680", (), "",
        "a scale of 1 for a block of zeros (the quantisers here do)", "fp8-rollout-tis", {"steps": 2},
        needs=(
            _FP8_ROLLOUT,
            Need("recipe.scaling.granularity", lambda g: g != "tensor",
                 "choose block, row or mx: a whole tensor is never zero"),
        ),
    ),
    Case(
        "scale-type-mismatch",
        "engine and trainer are both FP8 and round their scales differently",
        "Transformer Engine defaults to powers of two, vLLM to FP32", ("tokens_differing", "gen_kl_error"), "not-exact",
        "one scale type for both sides", "fp8-e2e-fp32-scales", {"steps": 4},
        needs=(
            _FP8_ROLLOUT, Need("recipe.train.fprop", bool, "turn it on: it is the other side of the comparison"),
            Need("recipe.scaling.scale", lambda scale: scale == "fp32", "set it to fp32, the trainer takes pow2"),
        ),
    ),
    Case(
        "kernels-differ",
        "both sides run the same FP8 recipe, the trainer with another attention kernel: last bits flip FP8 roundings",
        "NeMo RL#1801: spikes in every step until fusions were off", ("tokens_differing", "gen_kl_error"), "",
        "trainer_attention math", "fp8-e2e", {"steps": 4}, {"trainer_attention": "sdpa"},
    ),
    Case(
        "tensor-scales",
        "one activation scale a tensor: it depends on who else is in the batch, and the two sides batch differently",
        "verl PR#3519: not recommended", ("tokens_differing", "gen_kl_error"), "",
        "recipe.scaling.granularity block, row or mx", "fp8-e2e", {"steps": 4},
        {"recipe.scaling.granularity": "tensor"},
    ),
    Case(
        "lm-head-fp8",
        "the output projection is FP8 in the rollout alone, where every rounding goes straight into the log-probs",
        "MiniMax-M1, ScaleRL, NeMo RL#3936 (there BF16 against FP32)", ("token_mult_prob_error", "gen_kl_error"), "",
        "recipe.keep_bf16.lm_head true", "fp8-rollout", {"steps": 4}, {"recipe.keep_bf16.lm_head": False},
    ),
    Case(
        "update-masking",
        "updates are far smaller than an FP8 step, so the rollout's weights hardly move",
        "QuRL: updates of 1e-7 to 1e-6, far below an FP8 step", ("codes_changed", "heldout_accuracy"), "codes-frozen",
        "a larger grpo.lr, or weights in BF16", "fp8-e2e", {"steps": 4, "grpo.warmup_steps": 0}, {"grpo.lr": 1e-6},
    ),
    # ---- what the loss makes of it
    Case(
        "sequence-product",
        "the product of ratios over a long answer leaves the window, however small each one is",
        "TRL#4772, #5814, NeMo RL#2269", ("kept_share", "ess", "std_raw"), "mostly-rejected",
        "a weight by token, or the geometric mean", "fp8-rollout-kv",
        {
            "steps": 4, "task_options": {"min_operators": 12, "max_operators": 16},
            "recipe.scaling.format": "e5m2", "recipe.scaling.kv_format": "e5m2",
        },
        {"recipe.correction": "sequence-mask"},
    ),
    Case(
        "window-too-tight",
        "the window of geometric means is narrower than the mismatch, so most of the batch is thrown away",
        "verl#3984; slime's mis.yaml suggests .9999 to 1.0001", ("kept_share", "num_rejected_seqs", "grad_norm"),
        "mostly-rejected", "take bounds from the quantiles of the statistic seen", "fp8-rollout-kv", {"steps": 4},
        {"recipe.correction": {"name": "geometric-mask", "low": 0.9999, "high": 1.0001}},
    ),
    Case(
        "minibatches-uncorrected",
        "eight optimizer steps on one batch of rollouts, the last of them off-policy, with neither ratio nor clip",
        "what PPO's ratio and clip are for (Schulman et al. 2017)",
        ("heldout_accuracy", "probs_ratio_max", "grad_norm"), "accuracy-fell",
        "recipe.correction.objective ppo, or grpo.minibatches 1",
        "bf16", {"steps": 20, "grpo.minibatches": 8, **_FAST},
        {"recipe.correction": {"name": "custom", "objective": "reinforce"}},
    ),
    Case(
        "answers-truncated",
        "max_new_tokens cuts answers off before they are finished",
        "NeMo RL#2725", ("truncated_share", "accuracy", "response_length"), "truncated",
        "raise sampling.max_new_tokens", "bf16", {"steps": 8}, {"sampling.max_new_tokens": 16},
    ),
]  # fmt: skip

CASES: dict[str, Case] = {case.name: replace(case, finding=FINDINGS[case.name]) for case in _CASES}
