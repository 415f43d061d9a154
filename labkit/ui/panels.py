"""What the panels are, as data: titles with unit and direction, healthy bands, what their axes always show.

`SIX` are the panels of the first screen; `extra(metric)` makes one of any other metric. `labkit.ui.layout` draws them.
Titles and notes end before the next panel begins where the curves have least room, beside JupyterLab's file browser on
a projector of 1024 x 768.
"""

import math
from dataclasses import dataclass

from labkit.ui.series import meaning

DIRECTIONS = {"higher": "↑", "lower": "↓", "one": "→ 1", "zero": "→ 0", "neither": ""}
WATCH_TMPE = 0.03  # NeMo RL's guide: up to 1.03 is usual, above 1.05 something is broken
NOTE = 40  # characters of a note, at most


@dataclass(frozen=True)
class Curve:
    """`thin` curves are the second of their panel, `right` ones have their axis on the right."""

    metric: str
    thin: bool = False
    right: bool = False
    exact: bool = False  # never smoothed: measured so seldom that an average would lag by whole evaluations


@dataclass(frozen=True)
class Panel:
    title: str
    note: str
    curves: tuple[Curve, ...]
    log: bool = False
    watch: float | None = None  # from here to the end of the healthy band, it deserves a look
    include: tuple[float, ...] = ()  # the axis always shows these values
    top: float | None = None  # and ends here at the latest
    shaded: bool = True  # the healthy band is drawn, so the axis shows it, however far the curves are from its end

    @property
    def healthy(self) -> tuple[float, float] | None:
        return meaning(self.curves[0].metric).healthy if self.shaded else None


@dataclass(frozen=True)
class Floor:
    """The decades of a logarithmic panel, around its smallest and largest positive values, and if there is a zero."""

    lowest: float = 1e-4
    highest: float = 1.0
    zero: bool = False

    @property
    def ticks(self) -> tuple[list[float], list[str]]:
        """Values and texts. They go on above the highest value, for a healthy band that ends there."""
        apart = max(1, round(math.log10(self.highest / self.lowest) / 4))
        first = round(math.log10(self.at if self.zero else self.lowest))
        exponents = [first + apart * index for index in range(8)]
        texts = [f"10<sup>{exponent}</sup>" for exponent in exponents]
        if self.zero:
            texts[0] = "exact (0)"
        return [10.0**exponent for exponent in exponents], texts

    @property
    def at(self) -> float:
        """Where zero is drawn."""
        return self.lowest / 10


def title(name: str, metric: str) -> str:
    described = meaning(metric)
    unit = "" if described.unit == "1" else f"({described.unit})"
    return " ".join(part for part in (name, DIRECTIONS[described.better], unit) if part)


THROUGHPUT = Panel(title("Throughput", "throughput"), "measured", (Curve("throughput"),), include=(0.0,))
SIX = (
    Panel(
        title("Accuracy", "heldout_accuracy"),
        "bold: held-out, thin: rollout",
        (Curve("heldout_accuracy", exact=True), Curve("accuracy", thin=True)),
        include=(0.0, 1.0),
        top=1.02,
    ),
    THROUGHPUT,
    Panel(
        title("Mismatch TMPE − 1", "tmpe"),
        "green: healthy, orange: 0.03 to 0.05",
        (Curve("tmpe"),),
        log=True,
        watch=WATCH_TMPE,
    ),
    Panel(
        title("Generation KL", "gen_kl_error"),
        "per token; green: healthy, below 0.001",
        (Curve("gen_kl_error"),),
        log=True,
    ),
    Panel(
        title("Effective sample size", "ess"),
        "healthy above 0.3; thin: tokens kept",
        (Curve("ess"), Curve("kept_share", thin=True)),
        include=(0.9, 1.0),
        top=1.02,
        shaded=False,
    ),
    Panel(
        title("Entropy", "entropy"),
        "thin, right: answer length, tokens",
        (Curve("entropy"), Curve("response_length", thin=True, right=True)),
        include=(0.0,),
    ),
)


def extra(metric: str) -> Panel:
    """A panel of any metric. Errors in nats or probability span decades: their axis is logarithmic."""
    described = meaning(metric)
    errors = described.better == "lower" and described.unit in ("nats", "probability")
    unit = "" if described.unit == "1" else f"{described.unit}: "  # names are long: the title has no room for it
    note = unit + described.definition
    note = note if len(note) <= NOTE else note[: NOTE - 1].rstrip() + "…"
    name = " ".join(filter(None, (metric.replace("_", " "), DIRECTIONS[described.better])))
    return Panel(name, note, (Curve(metric),), log=errors)
