import math

import pytest

from labkit.explorer import NumberLine
from labkit.explorer.number_line import bits, largest_error, line, meaning, round_value
from labkit.fp8.formats import E4M3, E5M2


def test_the_line_has_every_finite_value():
    assert len(line("e4m3")) == 127  # 0 and 126 positive values; code 0x7f is NaN
    assert line("e4m3")[-1] == 448
    assert len(line("e5m2")) == 124
    assert line("e5m2")[-1] == 57344
    assert line("e4m3")[:3] == [0.0, 2**-9, 2**-8]


@pytest.mark.parametrize(
    ("x", "value", "zone"),
    [
        (19.3, 20.0, "normal"),
        (17.0, 16.0, "normal"),  # a tie goes to the even code
        (19.0, 20.0, "normal"),
        (448.0, 448.0, "normal"),
        (500.0, 448.0, "clipped"),
        (2**-6, 2**-6, "normal"),
        (0.003, 2**-8, "subnormal"),
        (2**-10, 0.0, "lost"),  # a tie with zero
        (2**-10 * 1.01, 2**-9, "subnormal"),
    ],
)
def test_rounding(x, value, zone):
    rounded = round_value(x)
    assert (rounded.value, rounded.zone) == (value, zone)
    assert rounded.error == abs(value - x) / x


def test_neighbours_and_code():
    rounded = round_value(19.3)
    assert (rounded.below, rounded.above) == (18.0, 20.0)
    assert bits(rounded.code, E4M3) == "0 1011 010"
    assert meaning(rounded.code, E4M3) == "2⁴ × 1.25"
    assert meaning(1, E4M3) == "2⁻⁶ × 0.125"
    assert math.isinf(round_value(500.0).above)


@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_every_code_reads_as_the_value_it_stands_for(form):
    for code, value in enumerate(line(form.name)):
        base, fraction = meaning(code, form).split(" × ")
        exponent = int(base[1:].translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")))
        assert 2.0**exponent * float(fraction) == value
        assert int(bits(code, form).replace(" ", ""), 2) == code


def test_a_scale_moves_the_line():
    assert round_value(19.3, scale=4.0).value == 4 * round_value(19.3 / 4).value
    assert round_value(5000.0, scale=16.0).zone == "normal"
    assert round_value(1e-4, scale=2**-8).zone == "normal"


def test_no_error_passes_the_largest_at_its_size():
    for x in (0.0011, 0.0039, 0.02, 1.06, 1.9, 17.0, 447.0, 463.0, 1e4):
        for fmt, form in (("e4m3", E4M3), ("e5m2", E5M2)):
            assert round_value(x, fmt).error <= largest_error(x, form, 1.0)
    assert largest_error(1.0, E4M3, 1.0) == 2**-4
    assert largest_error(1.0, E5M2, 1.0) == 2**-3
    assert largest_error(1e-5, E4M3, 1.0) == 1.0


def test_only_positive_numbers():
    for x in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="positive"):
            round_value(x)


def test_explorer_says_what_happens_in_each_zone():
    explorer = NumberLine()
    assert explorer.numbers == {
        **{"x": 19.3, "value": 20.0, "code": 90, "below": 18.0, "above": 20.0, "zone": "normal"},
        "error": pytest.approx(0.0363, abs=1e-4),
    }
    for x, words in (
        (500.0, "clipped"),
        (1e-5, "becomes 0"),
        (0.003, "relative error grows"),
        (19.3, "at most 6.25 %"),
    ):
        explorer.set(x=x)
        assert words in explorer.view.reading
