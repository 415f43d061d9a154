"""Correction: what the loss does about r = exp(p - g), the trainer's over the engine's probability of a token.

A correction is a weight, then filters, then the objective they act on:

    weight       what multiplies the loss: nothing, r_t, the product over the response W = exp(sum_t delta_t),
                 its geometric mean G = exp(mean_t delta_t), or a function of the user's (labkit.config.own);
                 truncated to [floor, cap], then, if asked, divided by its mean over the batch
    filters      each keeps what lies inside [low, high]; a token counts if all of them keep it
    old_policy   what the objective's own ratio rho compares the current policy c with:
                 trainer   rho = exp(c - p), times the weight: decoupled, three policies
                 rollout   rho = exp(c - g), which holds the mismatch already: bypass, two policies
                 current   rho = exp(c - sg(c)) = 1, with its gradient: exact on-policy
    objective    ppo (clipped ratio), ratio (not clipped), reinforce (no ratio), cispo (clipped ratio as a
                 constant), gspo (one clipped ratio per response, its geometric mean)

`labkit.config.corrections` names the ones in use, each with its bounds; `Correction(name="tis", cap=3)` changes a
bound of a named one. Everything else is composed under the name "custom"; "mine.py:my_weight" in place of a name is
short for a custom one with that weight. Imports no torch.
"""

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from labkit.config import own
from labkit.config.errors import did_you_mean, wrong
from labkit.config.own import Weight
from labkit.config.settings import Float, Int, Name, Settings, flatten, nest

if TYPE_CHECKING:
    from labkit.config.corrections import Known

Statistic = Literal["ratio", "k1", "k2", "k3", "mult-error", "probability", "binary-kl"]
Over = Literal["token", "sum", "mean", "max"]
CUSTOM = "custom"


# What a statistic can be; a bound outside would never act.
_RANGE = {
    "ratio": (0.0, math.inf), "mult-error": (1.0, math.inf), "k2": (0.0, math.inf), "k3": (0.0, math.inf),
    "binary-kl": (0.0, math.inf), "probability": (-1.0, 1.0),
}  # fmt: skip


class Filter(Settings):
    """Keep what lies inside [low, high], bounds included; None: no bound on that side.

    statistic    ratio  exp(delta)     k1  -delta     k2  delta^2 / 2     k3  r - 1 - delta     mult-error  exp|delta|
                 probability  exp(c) - exp(g)     binary-kl  KL of "this token or another", the larger of both ways
    over         token    judges every token by itself
                 sum, mean    a response by that of its tokens (ratio: the product W, the geometric mean G)
                 max      a response by its worst token: one outside the bounds rejects the whole (veto)
    when         always
                 negative    only responses with a negative advantage (DeepSeek-V3.2's off-policy mask)
                 outward     only where the update would push further out: above high with A > 0, below low with
                             A <= 0 (DPPO). These two follow the update: they judge the current policy c.
    """

    statistic: Statistic = "ratio"
    over: Over = "token"
    low: Float | None = None
    high: Float | None = None
    when: Literal["always", "negative", "outward"] = "always"

    @model_validator(mode="after")
    def _check(self) -> Self:
        low, high, name = self.low, self.high, self.short_str()
        if low is None and high is None:
            raise wrong("high", f"{name} has no bound and keeps everything; give low or high")
        if low is not None and high is not None and low > high:
            raise wrong("low", f"{low:g} is above high {high:g}; swap them")
        least_value, most_value = _RANGE.get(self.statistic, (-math.inf, math.inf))
        if low is not None and low < least_value:
            raise wrong("low", f"{low:g}: {self.statistic} is never below {least_value:g}; raise the bound or drop it")
        if high is not None and high > most_value:
            raise wrong("high", f"{high:g}: {self.statistic} is never above {most_value:g}; lower the bound or drop it")
        match = 1.0 if self.statistic in ("ratio", "mult-error") else 0.0
        least, most = -float("inf") if low is None else low, float("inf") if high is None else high
        if not least <= match <= most:
            key, what = ("low" if least > match else "high"), f"{_window(low, high)} leaves out {match:g}"
            raise wrong(key, f"{what}, so even a perfect match would be rejected; choose low <= {match:g} <= high")
        if self.when == "outward" and (self.over != "token" or low is None or high is None):
            raise wrong("when", "outward judges single tokens between two bounds; set over to token and both bounds")
        if self.statistic in ("probability", "binary-kl") and self.over in ("sum", "mean"):
            raise wrong("over", f"{self.statistic} judges single tokens; choose token or max")
        return self

    @property
    def per_sequence(self) -> bool:
        return self.over != "token"

    def short_str(self) -> str:
        """ "mean-ratio0.999..1.002"; the same without bounds where there are none."""
        over = "" if self.over == "token" else f"{self.over}-"
        when = "" if self.when == "always" else f"-{self.when}"
        return f"{over}{self.statistic}{when}{_window(self.low, self.high)}"

    @property
    def key(self) -> str:
        """The filter without its bounds, such as mean_ratio: its rejections are recorded under this."""
        over = "" if self.over == "token" else f"{self.over}_"
        return f"{over}{self.statistic.replace('-', '_')}"


def _window(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return ""
    return f"{'' if low is None else f'{low:g}'}..{'' if high is None else f'{high:g}'}"


class Correction(Settings):
    """See the module's head. A named correction fills in what is not given; its bounds may be changed."""

    shorthand: ClassVar[tuple[str, ...]] = ("low", "high")

    name: Name = "none"
    weight: Weight = "none"
    floor: Float | None = Field(default=None, ge=0)
    cap: Float | None = None
    normalize: bool = False  # divide by the mean weight of the batch, after the truncation
    filters: tuple[Filter, ...] = ()
    denominator: Literal["keep", "drop"] = "keep"  # whether rejected tokens stay in the loss's mean
    old_policy: Literal["trainer", "rollout", "current"] = "trainer"
    objective: Literal["ppo", "ratio", "reinforce", "cispo", "gspo"] = "ppo"
    clip_low: Float | None = Field(default=None, ge=0, le=1)  # None: grpo.clip_low and grpo.clip_high
    clip_high: Float | None = Field(default=None, ge=0)
    calibrate_clip_every: Int = Field(default=0, ge=0)  # steps between BF16 shadow passes; 0: never
    anchor: Float = Field(default=0.0, ge=0)  # coefficient of (c - g)^2, a pull towards the engine

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """A name brings its composition along; its bounds may be given by their short names."""
        data = {"name": data} if isinstance(data, str) else data
        if not isinstance(data, dict) or not isinstance(data.get("name", ""), str):
            return data
        name = data.get("name", CUSTOM if data.keys() - set(cls.shorthand) else "none").strip()
        if _is_own(name):
            if "weight" in data and data["weight"] != name:
                raise wrong("name", f"{name} is a weight, and another one is given; set name to {CUSTOM}")
            data, name = {**data, "weight": name}, CUSTOM
        if name == CUSTOM:
            for key in cls.shorthand:
                if key in data:
                    raise wrong(key, f"belongs to a filter of a custom correction; give filters.0.{key}")
            return {**data, "name": name}
        known = _known(name)
        bounds = {key: data[key] for key in _BOUNDS if data.get(key) is not None}
        for key in bounds:
            if key not in known.bounds:
                raise wrong(key, f"belongs to {_having(key)}; {name} has {known.bounds_text}: "
                            "drop it or change the correction")  # fmt: skip
        if "filters" in data and bounds.keys() & set(cls.shorthand):
            raise wrong("filters", f"low and high of {name} are in there; give either those or filters")
        others = {key: value for key, value in data.items() if key not in _BOUNDS}
        return {**known.fields(bounds), **others, "name": name}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.cap is not None and self.cap < 1:
            raise wrong("cap", f"{self.cap:g} would weight even a perfect match below 1; choose cap >= 1")
        if self.floor is not None and self.floor > 1:
            raise wrong("floor", f"{self.floor:g} would weight even a perfect match above 1; choose floor <= 1")
        if self.weight == "none":
            for key in ("floor", "cap", "normalize"):
                if getattr(self, key) not in (None, False):
                    raise wrong(key, "has nothing to act on while weight is none; choose a weight or drop it")
        if self.old_policy == "rollout" and self.weight != "none" and self.objective != "reinforce":
            what = f"{self.objective} against the rollout policy has the ratio to it already"
            raise wrong(
                "weight", f"{what}, a weight would count it twice; set weight to none or objective to reinforce"
            )
        if self.normalize and self.judges_current:
            what = "needs the weights of the whole batch before its update, but here they follow the update"
            raise wrong("normalize", f"{what} (old_policy rollout, or a filter with when); drop one of the two")
        for key in ("clip_low", "clip_high", "calibrate_clip_every"):
            if getattr(self, key) is None or (key == "calibrate_clip_every" and not self.calibrate_clip_every):
                continue
            if self.objective in ("ratio", "reinforce"):
                raise wrong(key, f"{self.objective} clips nothing; drop it, or choose another objective")
            if self.old_policy == "current":
                raise wrong(key, "with old_policy current the ratio is 1 and nothing is clipped; drop one of the two")
        if self.calibrate_clip_every and self.objective != "ppo":
            raise wrong("calibrate_clip_every", f"adapts the clip of ppo, {self.objective} has none of that kind")
        keys = [each.key for each in self.filters]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise wrong("filters", f"two filters on {min(twice)}; join them to one with both bounds")
        self._check_name()
        return self

    def _check_name(self) -> None:
        """A name promises what the field knows under it: only its bounds may differ."""
        if self.name == CUSTOM:
            return
        num_filters = len(_known(self.name).composition.filters)
        if len(self.filters) != num_filters:
            raise wrong("filters", f"{self.name} has {num_filters}; set name to {CUSTOM} to compose your own")
        for bound, value in self.bounds.items():
            if value is None:
                raise wrong(bound, f"{self.name} can't do without; give a number, or set name to {CUSTOM}")
        promised = Correction(**{**_known(self.name).fields(self.bounds), "name": CUSTOM})
        for key, value in promised:
            if key != "name" and getattr(self, key) != value:
                raise wrong(key, f"is not what {self.name} has; set name to {CUSTOM} to compose your own")

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds of a named correction, by their short names."""
        paths = {} if self.name == CUSTOM else _known(self.name).bounds
        return {bound: _at(self, path) for bound, path in paths.items()}

    @property
    def judges_current(self) -> bool:
        """Whether the verdict follows the update, so that it has to be made anew in every micro-batch."""
        return self.old_policy == "rollout" or any(each.when != "always" for each in self.filters)

    def _merged(self, changes: dict[str, Any]) -> dict[str, Any]:
        name = changes.get("name", self.name)
        if name not in (self.name, CUSTOM):
            return Correction(name=name)._merged({key: value for key, value in changes.items() if key != "name"})
        known = None if self.name == CUSTOM else _known(self.name)
        expanded = {}
        for key, value in flatten(changes).items():
            path = known.bounds.get(key, key) if known else key
            expanded[path] = _at(known.composition, path) if known and value is None and path != key else value
        return super()._merged(nest(expanded))

    def short_str(self) -> str:
        if self.name == "none":
            return ""
        if self.name != CUSTOM:
            return self.name + _bounds_text(self.bounds)
        weight = "" if self.weight == "none" else f"{own.short(self.weight)}{_window(self.floor, self.cap)}"
        changed = {
            "normalize": "normalized", "denominator": self.denominator, "old_policy": f"vs-{self.old_policy}",
            "objective": self.objective, "anchor": f"anchor{self.anchor:g}",
            "calibrate_clip_every": f"calibrated-clip-every{self.calibrate_clip_every}",
        }  # fmt: skip
        default = Correction()
        flags = [text for key, text in changed.items() if getattr(self, key) != getattr(default, key)]
        clip = "" if self.clip_low is self.clip_high is None else f"clip{_window(self.clip_low, self.clip_high)}"
        return "+".join(part for part in [weight, *(each.short_str() for each in self.filters), *flags, clip] if part)


def _bounds_text(bounds: dict[str, float]) -> str:
    truncation = _window(bounds.get("floor"), None) + (f"{bounds['cap']:g}" if "cap" in bounds else "")
    return "/".join(part for part in [truncation, _window(bounds.get("low"), bounds.get("high"))] if part)


_BOUNDS = ("cap", "floor", "low", "high")


def _is_own(name: str) -> bool:
    """Whether a weight of the user's stands in place of a correction's name."""
    from labkit.config.corrections import CORRECTIONS

    if name == CUSTOM or name in CORRECTIONS:
        return False
    return own.is_reference(name) or name in own.installed("correction")


def _known(name: str) -> "Known":
    from labkit.config.corrections import CORRECTIONS

    if name not in CORRECTIONS:
        otherwise = f"`labkit corrections` lists the named ones, {CUSTOM} is for your own"
        meant = did_you_mean(name, [*CORRECTIONS, CUSTOM], otherwise="")
        raise wrong("name", f"no correction {name!r}; {meant if meant.startswith('did') else otherwise}")
    return CORRECTIONS[name]


def _having(bound: str) -> str:
    from labkit.config.corrections import CORRECTIONS

    plain = [name for name, known in CORRECTIONS.items() if bound in known.bounds and "/" not in name]
    return ", ".join(plain) or f"{CUSTOM} corrections"


def _at(settings: Any, path: str) -> Any:
    for part in path.split("."):
        settings = settings[int(part)] if part.isdigit() else getattr(settings, part)
    return settings
