"""The figure from real records of the tiny policy, made once."""

import base64
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from labkit.config import Experiment
from labkit.config.presets import RECIPES, preset
from labkit.hardware import modelled
from labkit.rl.loop import Loop
from labkit.runs.compare import EMULATED
from labkit.runs.metrics import METRICS
from labkit.runs.record import StepRecord
from labkit.ui import theme
from labkit.ui.charts import Charts
from labkit.ui.modelled import choices as modelled_choices
from labkit.ui.modelled import panel as modelled_panel
from labkit.ui.panels import NOTE, SIX, extra
from labkit.ui.series import points
from labkit.ui.traces import Curves, Settings

SMALL = {
    **{"steps": 4, "eval_every": 2, "eval_prompts": 4, "threads": 1, "sampling.max_new_tokens": 6},
    **{"grpo.prompts_per_step": 2, "grpo.group_size": 4, "grpo.minibatches": 1},
}


@dataclass
class View:
    id: str
    label: str
    experiment: Experiment
    records: list[StepRecord]
    colour: str
    dash: str
    switches: tuple[Any, ...] = ()
    visible: bool = True
    parent: tuple[str, int] | None = None


@pytest.fixture(scope="module")
def made() -> dict[str, tuple[Experiment, list[StepRecord]]]:
    experiments = {name: preset(name).override(SMALL) for name in ("bf16", "fp8-rollout-tis")}
    experiments["other seed"] = experiments["fp8-rollout-tis"].override({"seed": 1})
    return {name: (experiment, list(Loop(experiment).steps())) for name, experiment in experiments.items()}


@pytest.fixture
def views(made: dict[str, tuple[Experiment, list[StepRecord]]]) -> list[View]:
    return [
        View(f"run{i}", name, experiment, list(records), *theme.style(i))
        for i, (name, (experiment, records)) in enumerate(made.items())
    ]


def drawn(charts: Charts) -> list[Any]:
    return [trace for trace in charts.figure.data if trace.name and trace.visible]


def find(charts: Charts, name: str, panel: int, width: float | None = None) -> Any:
    """The main line of a run in a panel, or the one of that width."""
    axis = "y" if panel == 0 else f"y{panel + 1}"
    found = [t for t in drawn(charts) if t.name == name and t.yaxis == axis and not t.showlegend]
    return next(t for t in found if t.line.width == (width or 2.5))


def test_six_panels_with_unit_and_direction(views: list[View]) -> None:
    charts = Charts()
    charts.update(views)
    titles = " ".join(a.text for a in charts.figure.layout.annotations)
    for text in ("Accuracy ↑ (share)", "Throughput ↑ (tokens/s)", "TMPE − 1 ↓", "KL ↓ (nats)", "size ↑", "Entropy"):
        assert text in titles
    assert EMULATED in titles
    legend = [trace.name for trace in drawn(charts) if trace.showlegend]
    assert legend == ["bf16", "fp8-rollout-tis", "other seed"]


def test_emulation_is_not_mentioned_where_there_is_none(views: list[View]) -> None:
    charts = Charts()
    charts.update(views[:1])
    assert EMULATED not in " ".join(a.text for a in charts.figure.layout.annotations)


def test_lines_hold_the_records_values(views: list[View]) -> None:
    charts = Charts()
    charts.smoothing.value = 0.0
    charts.update(views)
    expected = [record.metric("gen_kl_error") for record in views[1].records[1:]]
    line = find(charts, "fp8-rollout-tis", 3)
    assert list(line.x) == [1, 2, 3, 4]
    assert list(line.y) == pytest.approx(expected, rel=1e-6)
    assert (line.line.color, line.line.dash) == theme.style(1)
    assert list(find(charts, "bf16", 0).x) == [0, 2, 4], "held-out accuracy is measured every second step"


def test_the_raw_curve_stands_behind_the_smoothed_one(views: list[View]) -> None:
    charts = Charts()
    charts.update(views)
    smoothed, raw = find(charts, "fp8-rollout-tis", 3), find(charts, "fp8-rollout-tis", 3, width=1)
    assert smoothed.y[0] == raw.y[0]
    assert smoothed.y[2] != raw.y[2]
    assert raw.zorder < smoothed.zorder


def test_exact_agreement_is_drawn_in_its_strip_and_log_can_be_left(views: list[View]) -> None:
    charts = Charts()
    charts.update(views)
    exact, inexact = find(charts, "bf16", 2), find(charts, "fp8-rollout-tis", 2)
    assert set(exact.y) == {exact.y[0]}
    assert 0 < exact.y[0] < min(inexact.y) / 9
    strips = [shape for shape in charts.figure.layout.shapes if shape.fillcolor == theme.GRID]
    assert [shape.yref for shape in strips] == ["y3", "y4"]
    assert strips[0].y0 < exact.y[0] < strips[0].y1
    ticks = charts.figure.layout.yaxis3
    assert (ticks.tickvals[0], ticks.ticktext[0]) == (pytest.approx(exact.y[0]), "exact (0)")
    assert ticks.ticktext[1] == f"10<sup>{math.log10(ticks.tickvals[1]):.0f}</sup>"
    charts.log.value = False
    charts.update(views)
    assert charts.figure.layout.yaxis3.type == "linear"
    assert set(find(charts, "bf16", 2).y) == {0.0}


def test_healthy_bands_end_where_the_metrics_say(views: list[View]) -> None:
    charts = Charts()
    charts.update(views)
    tops = {(s.yref, s.fillcolor): s.y1 for s in charts.figure.layout.shapes if s.type == "rect"}
    assert tops["y3", theme.HEALTHY] == 0.03
    assert tops["y3", theme.WATCH] == pytest.approx(0.05)
    assert tops["y4", theme.HEALTHY] == 1e-3


def test_a_switch_is_a_labelled_dashed_line_in_every_panel_and_the_average_begins_anew(views: list[View]) -> None:
    charts = Charts()
    view = dataclasses.replace(views[1], switches=(SimpleNamespace(step=3, changes={"train.fprop": (False, True)}),))
    charts.update([view])
    lines = [shape for shape in charts.figure.layout.shapes if shape.type == "line"]
    assert len(lines) == len(SIX)
    assert {(s.x0, s.line.dash, s.label.text) for s in lines} == {(3, "dash", "fprop on")}
    assert "step 3: train.fprop off → on" in charts.latest.value
    assert charts.figure.layout.xaxis.autorangeoptions.include == (0,)
    charts.update([dataclasses.replace(view, switches=(SimpleNamespace(**vars(view.switches[0]) | {"step": 4}),))])
    assert charts.figure.layout.xaxis.autorangeoptions.include[0] > 4, "room for the label of the newest"
    charts.update([view])
    line = find(charts, view.label, 3)
    assert line.y[2] == pytest.approx(view.records[3].metric("gen_kl_error"), rel=1e-6)


def test_a_fork_beside_its_parent_begins_where_it_left_it(views: list[View]) -> None:
    charts = Charts()
    fork = dataclasses.replace(views[0], id="fork", label="fork", parent=("run1", 2))
    charts.update([views[1], fork])
    assert list(find(charts, "fork", 1).x) == [2, 3, 4]
    charts.set_visible("run1", False)
    charts.update([views[1], fork])
    assert list(find(charts, "fork", 1).x) == [1, 2, 3, 4]


def test_only_what_changed_is_sent(views: list[View], monkeypatch: pytest.MonkeyPatch) -> None:
    charts = Charts()
    sent: list[dict[str, Any]] = []
    send = charts.figure._send_update_msg

    def spy(**message: Any) -> None:
        if message["restyle_data"] or message["relayout_data"]:
            sent.append(message)
        send(**message)

    complete = views[1].records
    views[1].records = complete[:3]
    charts.update(views)
    monkeypatch.setattr(charts.figure, "_send_update_msg", spy)
    charts.update(views)
    assert sent == []
    views[1].records = complete
    charts.update(views)
    (message,) = sent
    names = {charts.figure.data[index].name for index in message["trace_indexes"]}
    assert names == {"fp8-rollout-tis"}
    assert set(message["restyle_data"]) == {"x", "y"}


def test_throughput_is_measured_or_modelled_for_a_device_never_both(views: list[View]) -> None:
    charts = Charts()
    charts.speed.value = "h100"
    charts.update(views)
    titles = " ".join(a.text for a in charts.figure.layout.annotations)
    assert "Throughput ↑ (tokens/s/GPU)" in titles
    assert "modelled for H100 SXM" in titles
    assumed = "Throughput modelled for H100 SXM: Llama-3.1-8B, 2,048 rollouts of 127 + 1,019 tokens, 16 GPUs"
    assert assumed in charts.latest.value
    assert "measured" not in titles
    assert EMULATED not in titles
    for view in views:
        rate = modelled(view.experiment.recipe, device="h100").end_to_end
        line = find(charts, view.label, 1)
        assert list(line.x) == [1, 2, 3, 4]
        assert list(line.y) == pytest.approx([rate] * 4)
        assert f"<td>{rate:,.0f}</td>" in charts.latest.value
    assert "tokens/s/GPU, modelled" in charts.latest.value
    charts.speed.value = ""
    charts.update(views)
    titles = " ".join(a.text for a in charts.figure.layout.annotations)
    assert "measured" in titles
    assert "modelled" not in titles + charts.latest.value
    assert list(find(charts, "bf16", 1, width=1).y) == pytest.approx(
        points(views[0].records, "throughput")[1], rel=1e-6
    )


def test_the_modelled_line_steps_at_a_switch_and_a_fork_has_none_before_it_began(views: list[View]) -> None:
    charts = Charts()
    charts.speed.value = "h200"
    changes = {"rollout.linears": (False, True)}
    switch = SimpleNamespace(step=3, changes=changes, recipe=RECIPES["fp8-rollout"])
    before, after = (modelled(RECIPES[name], device="h200").end_to_end for name in ("bf16", "fp8-rollout"))
    switched = dataclasses.replace(views[0], switches=(switch,))
    charts.update([switched])
    assert list(find(charts, "bf16", 1).y) == pytest.approx([before, before, after, after])
    charts.update([dataclasses.replace(switched, parent=("elsewhere", 1))])
    assert list(find(charts, "bf16", 1).y) == pytest.approx([np.nan, before, after, after], nan_ok=True)


def test_devices_that_hold_the_model_are_offered_and_what_they_lack_is_said(views: list[View]) -> None:
    charts = Charts()
    offered = [name for _, name in charts.speed.options]
    assert offered == ["", "a100", "l40s", "h100", "h200", "b200"]  # 8B parameters in BF16 leave no cache on an L4
    charts.speed.value = "a100"
    charts.update(views)
    assert "fp8-rollout-tis: rollout.linears: no native FP8 block kernel on A100 SXM 80 GB" in charts.latest.value
    assert set(find(charts, "bf16", 1).y) == set(find(charts, "fp8-rollout-tis", 1).y)


def test_hidden_runs_leave_and_come_back(views: list[View]) -> None:
    charts = Charts()
    charts.update(views)
    before = len(charts.figure.data)
    charts.set_visible("run0", False)
    charts.update(views)
    assert {trace.name for trace in drawn(charts)} == {"fp8-rollout-tis", "other seed"}
    charts.pin("run0")
    charts.update(views)
    assert "bf16 (baseline)" in {trace.name for trace in drawn(charts)}
    assert find(charts, "bf16 (baseline)", 1, width=4.5).line.color == views[0].colour
    assert len(charts.figure.data) == before, "traces are used again"


def test_seeds_become_one_mean_with_its_spread(views: list[View]) -> None:
    charts = Charts()
    charts.smoothing.value = 0.0
    charts.seeds.value = True
    charts.update(views)
    name = "fp8-rollout-tis · 2 seeds"
    assert [trace.name for trace in drawn(charts) if trace.showlegend] == ["bf16", name]
    both = [[record.metric("ess") for record in view.records[1:]] for view in views[1:]]
    assert list(find(charts, name, 4).y) == pytest.approx(np.mean(both, axis=0), rel=1e-6)
    (area,) = [t for t in drawn(charts) if t.fill == "toself" and t.yaxis == "y5"]
    assert max(area.y) == pytest.approx((np.mean(both, axis=0) + np.std(both, axis=0, ddof=1)).max(), rel=1e-6)


def test_more_metrics_get_a_row_of_their_own(views: list[View]) -> None:
    charts = Charts()
    charts.update(views)
    height = charts.figure.layout.height
    charts.more[0].value = "kl_k2"
    charts.update(views)
    assert charts.figure.layout.height > height
    assert charts.figure.layout.yaxis7.type == "log"
    assert len(find(charts, "fp8-rollout-tis", 6).x) == 4
    charts.more[0].value = ""
    charts.update(views)
    assert charts.figure.layout.height == height
    assert not charts.figure.layout.yaxis7.visible


def test_metrics_with_a_filter_in_their_name_are_offered_once_seen(views: list[View]) -> None:
    charts = Charts()
    last = views[0].records[-1]
    views[0].records[-1] = dataclasses.replace(last, metrics=last.metrics | {"rejected_mean_ratio": 0.5})
    charts.more[1].value = "kl_k2"
    charts.update(views)
    assert "rejected_mean_ratio" in {name for _, name in charts.more[0].options}
    assert charts.more[1].value == "kl_k2"
    found = extra("rejected_mean_ratio")
    assert (found.title, found.note[:7]) == ("rejected mean ratio ↓", "share: ")


def test_headings_end_before_the_next_panel_begins() -> None:
    """The browser test measures them; in a title a character takes up to 8 of the 265 pixels, in a note 6.5."""
    devices = [modelled_panel(device) for _, device in modelled_choices() if device]
    for panel in (*SIX, *devices, *(extra(metric) for metric in METRICS)):
        assert len(panel.title) <= 33, panel.title
        assert len(panel.note) <= NOTE, panel.note


def test_a_page_that_loads_anew_gets_all_points(views: list[View]) -> None:
    charts = Charts()
    charts.update(views)
    state = charts.figure.get_state()
    sizes = [int(trace["y"]["shape"][0]) for trace in state["_widget_data"] if trace.get("name") == "fp8-rollout-tis"]
    assert sizes.count(4) >= 5
    assert state["_widget_layout"]["height"] == charts.figure.layout.height


def test_the_newest_values_are_text_and_labels_are_escaped(views: list[View]) -> None:
    charts = Charts()
    views[0].label = "<img>"
    charts.update(views)
    assert "<img>" not in charts.latest.value
    assert "&lt;img&gt;" in charts.latest.value
    assert f"{views[1].records[-1].metric('entropy'):.3f}" in charts.latest.value


def test_the_exported_page_has_every_point_and_needs_no_network(views: list[View], tmp_path: Path) -> None:
    base = views[1].records[1]
    views[1].records = [dataclasses.replace(base, step=step) for step in range(2000)]
    charts = Charts()
    charts.update(views)
    assert len(find(charts, "fp8-rollout-tis", 3).x) <= 300
    page = charts.to_html(tmp_path / "curves.html", views[1:2]).read_text()
    assert "<script src=" not in page
    assert "latest values" in page
    complete = Curves(limit=None).lines(views[1:2], SIX, Settings())
    assert len(complete["run1", 3, 0, "line"].x) == 2000
    values = complete["run1", 3, 0, "line"].trace(None)["y"]
    assert base64.b64encode(values.tobytes()).decode() in page.replace("\\u002f", "/")


def test_no_runs_and_no_records_draw_an_empty_figure(views: list[View]) -> None:
    charts = Charts()
    charts.update([])
    views[0].records = []
    charts.update(views[:1])
    assert [trace.name for trace in drawn(charts) if trace.showlegend] == ["bf16"]
    assert len(charts.figure.layout.annotations) == len(SIX)
