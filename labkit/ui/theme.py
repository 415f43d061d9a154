"""What the panel looks like, on light and on dark, on a laptop and on a projector.

Backgrounds are transparent and text is one grey that reads on both. A run has a colour and a dash pattern, so that
colour is never the only channel: the palette is Okabe and Ito's, without its black, which a dark page swallows.
"""

from labkit.runs.report import DASHES, OKABE_ITO

COLOURS = OKABE_ITO[:6]
TEXT = "#7a7a7a"
GRID = "rgba(128,128,128,0.22)"
CLEAR = "rgba(0,0,0,0)"
HEALTHY = "rgba(0,158,115,0.13)"  # green and orange of the palette, as areas behind curves
WATCH = "rgba(230,159,0,0.16)"
SIZE, SMALL = 14, 12  # pixels


def style(index: int) -> tuple[str, str]:
    """(colour, dash) of the run with that number. Six are told apart; the seventh looks like the first."""
    return COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]


def translucent(colour: str, opacity: float) -> str:
    """A colour #rrggbb as rgba, for an area that lets the curves behind it through."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"
