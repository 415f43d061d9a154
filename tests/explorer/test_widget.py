import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

import pytest

from labkit import explorer
from labkit.explorer.svg import Axis, number, percent

EXPLORERS = [getattr(explorer, name) for name in explorer.__all__]
MOVES = {"NumberLine": "x", "ScalingExplorer": "outlier", "LinearExplorer": "outlier", "AttentionExplorer": "size"}
every_explorer = pytest.mark.parametrize("kind", EXPLORERS, ids=explorer.__all__)


def test_naming_the_explorers_needs_neither_torch_nor_widgets():
    code = "import labkit.explorer, sys; sys.exit('torch' in sys.modules or 'ipywidgets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        explorer.Nothing  # noqa: B018


@every_explorer
def test_picture_is_well_formed_labelled_and_fits_both_themes(kind):
    view = kind().view
    picture = ET.fromstring(view.picture)
    assert picture.get("role") == "img"
    assert picture.get("aria-label") == view.reading
    assert "white" not in view.picture
    assert "black" not in view.picture
    width = float(picture.get("viewBox").split()[2])
    assert all(-1 <= float(text.get("x")) <= width for text in picture.iter("text"))


@every_explorer
def test_a_moved_control_changes_picture_and_numbers_and_reset_brings_them_back(kind):
    shown = kind()
    first, settings = shown.view, shown.settings
    name = MOVES[kind.__name__]
    shown.controls[name].value = 1000.0
    assert shown.view.picture != first.picture
    assert shown.view.reading != first.reading
    assert shown._picture.value == shown.view.picture
    assert shown.view.reading.split()[0] in shown._reading.value
    shown._reset.click()
    assert shown.settings == settings
    assert shown.view.picture == first.picture


@every_explorer
def test_a_control_that_is_not_there_or_a_value_out_of_range_is_refused(kind):
    shown = kind()
    before = shown.settings
    with pytest.raises(ValueError, match=r"has no outlyer: it has"):
        shown.set(outlyer=3.0)
    with pytest.raises(ValueError, match=r"fmt can't be 'fp8': choose one of 'e4m3', 'e5m2'"):
        shown.set(fmt="fp8")
    with pytest.raises(ValueError, match=r"can't be 1e\+30: choose a number from"):
        shown.set(**{MOVES[kind.__name__]: 1e30})
    assert shown.settings == before
    with pytest.raises(ValueError, match="has no outlyer"):
        kind(outlyer=3.0)


@every_explorer
def test_an_answer_costs_less_than_100_ms_of_computing(kind):
    shown = kind()
    seconds = []
    for step in range(1, 12):
        start = time.process_time()
        shown.set(**{MOVES[kind.__name__]: 1.7**step})
        seconds.append(time.process_time() - start)
    assert statistics.median(seconds) < 0.1


@every_explorer
def test_the_sentence_is_announced_and_no_control_hides_its_name(kind):
    shown = kind()
    assert 'role="status" aria-live="polite"' in shown._reading.value
    for control in shown.controls.values():
        label = control.children[0] if hasattr(control, "children") else control
        assert label.description


def test_slider_and_field_of_a_log_number_follow_each_other():
    shown = explorer.NumberLine()
    x = shown.controls["x"]
    slider, field = x.children
    shown.set(x=300.0)
    assert (field.value, x.value) == (300.0, 300.0)  # not the slider's nearest position
    slider.value += 1
    assert 300 < x.value < 320
    assert field.value == x.value
    field.value = 17.0
    assert shown.numbers["value"] == 16.0
    assert shown.settings["x"] == 17.0


def test_percent_and_number_read_well():
    shares = [0, 5e-6, 5e-5, 0.0265, 0.126, 0.9999, 1.0, float("nan"), float("inf")]
    assert [percent(s) for s in shares] == [
        *("0", "< 0.001 %", "0.005 %", "2.65 %", "12.6 %", "100 %", "100 %", "NaN", "infinite"),
    ]
    assert [number(v) for v in (0.0, 19.3, 57344.0, 262144.0, 1e-5)] == ["0", "19.3", "57344", "262144", "1e-05"]


def test_values_beyond_an_axis_are_drawn_at_its_edge():
    axis = Axis(1e-3, 1.0, 100, 400, log=True)
    assert [axis.at(v) for v in (0, 1e-3, 1, 7)] == pytest.approx([100, 100, 400, 400])
    assert axis.at(1e-2) == pytest.approx(200)
