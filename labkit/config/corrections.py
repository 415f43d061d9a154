"""The corrections in use, by name: what each is composed of, its bounds, and where it comes from. Imports no torch.

A name with a slash is a project's own preset under the project's own word, with the project's own numbers; one
without is the method as the papers name it. Where a project's switch covers more than its correction (a clip range,
the form of the objective) the name carries that too, so that "trl/gspo" is what the TRL documentation calls GSPO.

Projects as of August 2026. What remains different, mostly far from 1 or with several filters at once:

    verl, slime, SkyRL     clamp log-ratios to +-20; here ratios saturate at e^40
    verl                   takes rejected tokens out of the KL penalty too; its newer trainer and ours keep them
    SkyRL                  applies its filters one after the other, here each sees all tokens; rollout_is is an
                           open interval there
    NeMo RL, AReaL         set a weight that isn't finite to 0 (AReaL: 1); here it saturates and is bounded
    slime                  opsm compares c with p, here as in TRL with g; its veto has a bound of its own
    DPPO of verl, Stable-RL  cap the ratio at 10 or 20, prime-rl's and SkyRL's don't
    prime-rl               from September 2026 on ipo alone, at 0.3 and without the pull
    TRL                    off_policy_mask and cispo's bound have no default there; these are its documented examples
"""

from dataclasses import dataclass, field
from typing import Any

from labkit.config.correction import CUSTOM, Correction, Filter, Over


@dataclass(frozen=True)
class Known:
    composition: Correction  # under the name "custom"
    bounds: dict[str, str] = field(default_factory=dict)  # short name -> place in the composition
    text: str = ""
    source: str = ""

    def fields(self, bounds: dict[str, Any]) -> dict[str, Any]:
        """The fields of the correction with these bounds, unchecked."""
        fields = self.composition.model_dump()
        for name, value in bounds.items():
            *groups, key = self.bounds[name].split(".")
            place: Any = fields
            for group in groups:
                place = place[int(group)] if group.isdigit() else place[group]
            place[key] = value
        return fields

    @property
    def bounds_text(self) -> str:
        return " and ".join(self.bounds) or "no bound"


CORRECTIONS: dict[str, Known] = {}


def _name(name: str, text: str, source: str = "", **fields: Any) -> None:
    """Enter a correction; its bounds are those of its weight and of its first filter."""
    composition = Correction(name=CUSTOM, **fields)
    places = {"floor": composition.floor, "cap": composition.cap}
    bounds = {bound: bound for bound, value in places.items() if value is not None}
    for first in composition.filters[:1]:
        sides = {"low": first.low, "high": first.high}
        bounds |= {side: f"filters.0.{side}" for side, value in sides.items() if value is not None}
    CORRECTIONS[name] = Known(composition, bounds, text, source)


def _keep(low: float | None = None, high: float | None = None, over: Over = "token", **others: Any) -> dict[str, Any]:
    return {"filters": (Filter(low=low, high=high, over=over, **others),)}


_TOKEN, _SEQUENCE = {"weight": "token"}, {"weight": "sequence"}
_BYPASS = {"old_policy": "rollout"}
_REINFORCE = {**_BYPASS, "objective": "reinforce"}
_GSPO = {"objective": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}

# ---- methods, as the papers name them

_name("none", "no weight: the mismatch goes uncorrected")
_name("tis", "min(r, cap)", "Yao, Liu et al. 2025", **_TOKEN, cap=2.0)
_name("icepop", "r, tokens outside the window dropped", "Ant Ring 2025", **_TOKEN, **_keep(0.5, 5.0))
_name("sequence-tis", "min(W, cap), W the product of r over the response", "Liu, Li et al. 2025", **_SEQUENCE, cap=2.0)
_name("sequence-mask", "W, responses with W outside the window dropped", "Liu, Li et al. 2025",
      **_SEQUENCE, **_keep(0.5, 2.0, "sum"))  # fmt: skip
_name("geometric-mask", "r, responses whose geometric mean G is outside the window dropped", "NeMo RL",
      **_TOKEN, **_keep(0.999, 1.002, "mean"))  # fmt: skip
_name("importance-sampling", "r, not bounded: unbiased, of any variance", **_TOKEN)
_name("veto", "min(r, cap), responses with one r below low dropped", "slime", **_TOKEN, cap=2.0,
      **_keep(1e-4, None, "max"))  # fmt: skip
_name("k3-mask", "responses whose mean k3 is above high dropped", "verl", **_keep(None, 0.01, "mean", statistic="k3"))
_name("kpop", "tokens whose binary KL is above high dropped", "Ant Ring 2026",
      **_keep(None, 0.1, statistic="binary-kl"))  # fmt: skip
_name("bypass", "PPO's clip on c / g: two policies, no weight", "verl", **_BYPASS)
_name("on-policy", "ratio 1 with its gradient, min(r, cap)", "NeMo RL, prime-rl", **_TOKEN, cap=2.0,
      old_policy="current")  # fmt: skip
_name("off-policy-mask", "bad responses that have become improbable dropped: A < 0 and mean(g - c) above high",
      "DeepSeek-V3.2", **_keep(None, 0.5, "mean", statistic="k1", when="negative"))  # fmt: skip
_name("dppo", "unclipped c / g; tokens whose probability moved past the window, outwards, dropped",
      "Qi et al. 2026 (binary TV)", **_BYPASS, objective="ratio",
      **_keep(-0.2, 0.2, statistic="probability", when="outward"))  # fmt: skip
_name("gspo", "one ratio per response, clipped", "Zheng et al. 2025", **_GSPO)
_name("cispo", "PPO's clipped ratio as a constant weight of log c", "MiniMax-M1", objective="cispo", clip_low=1.0,
      clip_high=4.0)  # fmt: skip
_name("calibrated-clip", "min(r, cap), PPO's bounds moved to where BF16 would clip as often", "arXiv 2609.22870",
      **_TOKEN, cap=2.0, calibrate_clip_every=20)  # fmt: skip

# ---- NeMo RL: truncated_importance_sampling_type

_name("nemo-rl/tis", "min(r, cap)", "NeMo RL", **_TOKEN, cap=2.0)
_name("nemo-rl/icepop", "r, tokens outside the window dropped", "NeMo RL", **_TOKEN, **_keep(0.5, 5.0))
_name("nemo-rl/seq-mask-tis", "r, responses with G outside the window dropped", "NeMo RL",
      **_TOKEN, **_keep(0.999, 1.002, "mean"))  # fmt: skip
_name("nemo-rl/importance-sampling", "use_importance_sampling_correction alone: r", "NeMo RL", **_TOKEN)
_name("nemo-rl/sequence", "sequence_level_importance_ratios with the correction: W, and GSPO's ratio", "NeMo RL",
      **_SEQUENCE, objective="gspo")  # fmt: skip
_name("nemo-rl/seq-logprob-error", "responses with mean exp|delta| above high dropped", "NeMo RL",
      **_keep(None, 2.0, "mean", statistic="mult-error"), denominator="drop")  # fmt: skip

# ---- verl: RolloutCorrectionConfig's nineteen. Its k1 is log(g/p), so that a window "lo_hi" bounds 1/r.

_VERL = "verl, RolloutCorrectionConfig"
_GEO = _keep(1 / 1.001, 1 / 0.999, "mean")
_K3 = _keep(None, 0.01, "mean", statistic="k3")
for _text, _weight, _suffix in (("", {}, ""), ("min(W, cap), ", {**_SEQUENCE, "cap": 2.0}, "_seq_tis"),
                                ("min(r, cap), ", {**_TOKEN, "cap": 2.0}, "_token_tis")):  # fmt: skip
    _name(f"verl/decoupled_geo_rs{_suffix}", f"{_text}responses with G outside the window dropped", _VERL,
          **_weight, **_GEO)  # fmt: skip
    _name(f"verl/decoupled_k3_rs{_suffix}", f"{_text}responses with mean k3 above high dropped", _VERL,
          **_weight, **_K3)  # fmt: skip
    _name(f"verl/bypass_pg_geo_rs{_suffix}", f"REINFORCE, {_text}responses with G outside the window dropped", _VERL,
          **_weight, **_GEO, **_REINFORCE)  # fmt: skip
_name("verl/decoupled_token_is", "min(r, cap)", _VERL, **_TOKEN, cap=2.0)
_name("verl/decoupled_token_icepop", "r, tokens outside the window dropped", _VERL, **_TOKEN, **_keep(0.5, 5.0))
_name("verl/decoupled_seq_is", "min(W, cap)", _VERL, **_SEQUENCE, cap=2.0)
_name("verl/decoupled_seq_is_rs", "min(W, cap), responses with W outside the window dropped", _VERL,
      **_SEQUENCE, cap=2.0, **_keep(0.5, 2.0, "sum"))  # fmt: skip
_name("verl/bypass_ppo_clip", "PPO's clip on c / g", _VERL, **_BYPASS)
_name("verl/bypass_ppo_clip_geo_rs", "PPO's clip on c / g, responses with G outside the window dropped", _VERL,
      **_BYPASS, **_GEO)  # fmt: skip
_name("verl/bypass_ppo_clip_k3_rs", "PPO's clip on c / g, responses with mean k3 above high dropped", _VERL,
      **_BYPASS, **_K3)  # fmt: skip
_name("verl/bypass_pg_is", "REINFORCE, min(W, cap)", _VERL, **_REINFORCE, **_SEQUENCE, cap=2.0)
_name("verl/bypass_pg_token_icepop", "REINFORCE, r, tokens outside the window dropped", _VERL,
      **_REINFORCE, **_TOKEN, **_keep(0.5, 5.0))  # fmt: skip
_name("verl/disabled", "metrics only", _VERL)

# ---- TRL: vllm_importance_sampling_mode and what its loss types pair with

_TRL = "TRL, GRPOConfig"
_name("trl/sequence_mask", "W, responses with W above high dropped; TRL's default", _TRL,
      **_SEQUENCE, **_keep(None, 3.0, "sum"))  # fmt: skip
_name("trl/sequence_truncate", "min(W, cap)", _TRL, **_SEQUENCE, cap=3.0)
_name("trl/token_mask", "r, tokens above high dropped", _TRL, **_TOKEN, **_keep(None, 3.0))
_name("trl/token_truncate", "min(r, cap)", _TRL, **_TOKEN, cap=3.0)
_name("trl/off_policy_mask", "bad responses with mean(g - c) above high dropped", _TRL,
      **_keep(None, 0.5, "mean", statistic="k1", when="negative"))  # fmt: skip
_name("trl/gspo", "one ratio per response, clipped at 3e-4 and 4e-4", _TRL, **_GSPO)
_name("trl/cispo", "the ratio, at most 5, as a constant weight of log c", _TRL, objective="cispo", clip_low=1.0,
      clip_high=4.0)  # fmt: skip

# ---- OpenRLHF: is_correction_type, one pair of bounds for all

_OPENRLHF = "OpenRLHF"
_name("openrlhf/tis", "r, from floor to cap", _OPENRLHF, **_TOKEN, floor=0.5, cap=5.0)
_name("openrlhf/icepop", "r, tokens outside the window dropped", _OPENRLHF, **_TOKEN, **_keep(0.5, 5.0))
_name("openrlhf/seq-mask-tis", "r, responses with G outside the window dropped", _OPENRLHF,
      **_TOKEN, **_keep(0.5, 5.0, "mean"))  # fmt: skip
_name("openrlhf/gspo", "one ratio per response against the engine", _OPENRLHF, **_BYPASS, objective="gspo")

# ---- SkyRL: off_policy_correction, and its losses against the engine

_SKYRL = "SkyRL, off_policy_correction"
_name("skyrl/token_tis", "min(r, cap)", _SKYRL, **_TOKEN, cap=2.0)
_name("skyrl/sequence_tis", "min(W, cap)", _SKYRL, **_SEQUENCE, cap=5.0)
_name("skyrl/geometric_mask", "responses with G outside the window dropped", _SKYRL, **_keep(0.99, 1.01, "mean"))
_name("skyrl/product_mask", "responses with W outside the window dropped", _SKYRL, **_keep(0.5, 2.0, "sum"))
_name("skyrl/outlier_mask", "responses with one r outside the window dropped", _SKYRL, **_keep(1e-4, 100.0, "max"))
_name("skyrl/token_mask", "tokens with r outside the window dropped", _SKYRL, **_keep(0.5, 2.0))
_name("skyrl/rollout_is", "REINFORCE, c / g, tokens outside the window dropped (GLM-5)", _SKYRL,
      **_REINFORCE, **_TOKEN, **_keep(0.8, 1.2))  # fmt: skip
_name("skyrl/cispo", "the ratio, at most 5, as a constant weight of log c", _SKYRL, objective="cispo", clip_low=1.0,
      clip_high=4.0)  # fmt: skip
_name("skyrl/dppo", "unclipped c / g; tokens whose probability moved past the window, outwards, dropped", _SKYRL,
      **_BYPASS, objective="ratio",
      **_keep(-0.2, 0.2, statistic="probability", when="outward"))  # fmt: skip

# ---- prime-rl: trainer.loss.type

_PRIME = {**_BYPASS, "objective": "ratio"}
_name("prime-rl/dppo", "unclipped c / g and a pull to the engine; tokens moved past the window, outwards, dropped",
      "prime-rl", **_PRIME, anchor=1e-3,
      **_keep(-0.2, 0.2, statistic="probability", when="outward"))  # fmt: skip
_name("prime-rl/ipo", "the same, tokens moved past the window either way dropped", "prime-rl", **_PRIME, anchor=1e-3,
      **_keep(-0.1, 0.1, statistic="probability"))  # fmt: skip
_name("prime-rl/icepop", "unclipped c / g, tokens outside the window dropped", "prime-rl", **_PRIME,
      **_keep(0.2, 5.0))  # fmt: skip

# ---- AReaL: rejection_sampling, a weight between the behaviour and the proximal policy

_AREAL = "AReaL, RejectionSamplingConfig"
_name("areal/token-mask", "r, tokens above high dropped", _AREAL, **_TOKEN, **_keep(None, 5.0))
_name("areal/token-clamp", "min(r, cap)", _AREAL, **_TOKEN, cap=5.0)
_name("areal/sequence-mask", "G, responses with G above high dropped", _AREAL, weight="geometric",
      **_keep(None, 5.0, "mean"))  # fmt: skip
_name("areal/sequence-clamp", "min(G, cap)", _AREAL, weight="geometric", cap=5.0)

# ---- slime: --use-tis, and its helper for the mismatch

_name("slime/tis", "min(r, cap)", "slime", **_TOKEN, cap=2.0)
_name("slime/icepop", "r, tokens outside the window dropped", "slime", **_TOKEN, **_keep(0.5, 2.0))
_name("slime/mis", "min(r, cap) normalised; tokens outside the window and responses with an r below 1e-4 dropped",
      "slime, mis.yaml", **_TOKEN, cap=2.0, normalize=True,
      filters=(Filter(low=0.5, high=2.0), Filter(low=1e-4, over="max")))  # fmt: skip
_name("slime/opsm", "bad responses with mean(g - c) above high dropped", "slime",
      **_keep(None, 1e-4, "mean", statistic="k1", when="negative"))  # fmt: skip
