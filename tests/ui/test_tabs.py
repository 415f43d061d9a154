"""The tabs from real records and rollouts of the tiny policy, made once and kept in real run directories."""

import csv
import dataclasses
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from labkit.config import RECIPES, Experiment, Recipe
from labkit.config.overrides import parse_assignments
from labkit.config.presets import preset
from labkit.models import Tokenizer
from labkit.rl.loop import Loop
from labkit.runs.alarms import Alarm
from labkit.runs.record import StepRecord
from labkit.runs.store import RunDirectory, Switch
from labkit.ui import theme
from labkit.ui.tabs import TABS
from labkit.ui.tabs.active import ActiveTab, asked
from labkit.ui.tabs.alarms import Alarms
from labkit.ui.tabs.command import command
from labkit.ui.tabs.compare import Compare
from labkit.ui.tabs.completions import Completions, level, marked
from labkit.ui.tabs.export import FORMS, IN_FORCE, Export
from labkit.ui.tabs.mismatch import Mismatch
from labkit.ui.tabs.plot import Axis, Plot
from labkit.ui.tabs.samples import Token, answers, text_of
from labkit.ui.tabs.scales import Scales
from labkit.ui.tabs.svg_file import write_svg

SMALL = {
    **{"steps": 3, "eval_every": 3, "eval_prompts": 4, "threads": 1, "sampling.max_new_tokens": 10},
    **{"grpo.prompts_per_step": 2, "grpo.group_size": 4, "grpo.minibatches": 1, "keep_rollouts": 6},
}
EVIL = "<script>alert('x')</script>"


@dataclass
class View:
    id: str
    label: str
    experiment: Experiment
    records: list[StepRecord]
    colour: str
    dash: str
    path: Path
    alarms: tuple[Alarm, ...] = ()
    switches: tuple[Switch, ...] = ()
    visible: bool = True
    parent: tuple[str, int] | None = None

    @property
    def recipe(self) -> Recipe:
        return self.switches[-1].recipe if self.switches else self.experiment.recipe


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[RunDirectory]:
    """bf16, which agrees exactly, and an FP8 rollout whose correction rejects."""
    kv = {"recipe.correction.name": "icepop", "recipe.correction.low": 0.98, "recipe.correction.high": 1.02}
    directories = []
    for name, changes in (("bf16", {}), ("fp8-rollout-kv", kv)):
        directory = RunDirectory.create(preset(name).override(SMALL | changes), tmp_path_factory.mktemp("runs"))
        for record in Loop(directory.experiment).steps():
            directory.append_record(record)
        directories.append(directory)
    return directories


@pytest.fixture
def views(made: list[RunDirectory]) -> list[View]:
    return [
        View(d.id, d.experiment.recipe.name, d.experiment, d.records(), *theme.style(i), d.path)
        for i, d in enumerate(made)
    ]


def switched(view: View) -> Switch:
    recipe = view.experiment.recipe.override({"recalibration.policy": "unit"})
    return Switch(2, 1, {"recalibration.policy": ("every-step", "unit"), "rollout.linears": (False, True)}, recipe, 0.0)


def shown(tab: Any, views: list[View], selected: View | None) -> str:
    tab.update(views, selected)
    return str(tab.body.value)


# ---- all of them


def test_the_tabs_in_order() -> None:
    titles = [tab.title for tab in TABS]
    assert titles == ["Completions", "Mismatch", "Scales", "What is active", "Alarms", "Compare", "Export"]


@pytest.mark.parametrize("tab", TABS, ids=lambda tab: tab.title)
def test_a_tab_says_so_where_there_is_nothing_to_show(tab: Callable[[], Any], views: list[View]) -> None:
    made = tab()
    made.update([], None)
    content = made.notes.value if isinstance(made, Export) else made.body.value
    assert "No run" in content
    young = dataclasses.replace(views[0], records=[])
    made.update([young], young)  # a run whose first step is still being done


@pytest.mark.parametrize("tab", TABS, ids=lambda tab: tab.title)
def test_an_update_without_anything_new_sends_nothing(tab: Callable[[], Any], views: list[View]) -> None:
    made = tab()
    made.update(views, views[1])
    sent: list[Any] = []
    for name in ("body", "notes", "text", "said"):
        if hasattr(made, name):
            getattr(made, name).observe(sent.append)
    made.update(views, views[1])
    assert sent == []


@pytest.mark.parametrize("tab", TABS, ids=lambda tab: tab.title)
def test_what_comes_from_a_run_is_escaped(tab: Callable[[], Any], views: list[View], tmp_path: Path) -> None:
    view = hostile(views[1], tmp_path)
    made = tab()
    made.update([views[0], view], view)
    content = made.notes.value + made.said.value if isinstance(made, Export) else made.body.value
    assert "<script" not in content
    if isinstance(made, Export):
        return
    assert "&lt;script" in content


def hostile(view: View, tmp_path: Path) -> View:
    """A run all of whose texts are markup."""
    directory = RunDirectory.create(view.experiment, tmp_path)
    tokens: dict[str, Any] = {"tokens": [3, 4], "g": [-0.5, -1.0], "p": [-0.7, -9.0], "weight": [1.0, 0.0]}
    said = {"prompt": EVIL, "answer": EVIL, "completion": EVIL, "reward": 0.0, "advantage": 0.0, "finished": True}
    active = {EVIL: {"state": EVIL, "detail": EVIL}}
    records = [dataclasses.replace(r, active=active, samples=[said | tokens] if r.step else ()) for r in view.records]
    for record in records:
        directory.append_record(record)
    alarm = Alarm(EVIL, 1, 2, "critical", EVIL, EVIL, EVIL)
    switch = dataclasses.replace(switched(view), changes={EVIL: (EVIL, [EVIL])})
    return dataclasses.replace(
        view, id=EVIL, label=EVIL, path=directory.path, records=records, alarms=(alarm,), switches=(switch,),
        parent=(EVIL, 1),
    )  # fmt: skip


# ---- completions


def test_tokens_have_their_text_and_both_log_probs(views: list[View], made: list[RunDirectory]) -> None:
    sample = made[1].samples(3)[0]
    answer = answers(views[1], 3)[0]
    assert answer.prompt == sample["prompt"]
    assert "".join(t.text for t in answer.tokens).removesuffix("<eos>").startswith(sample["completion"])
    assert [t.delta for t in answer.tokens] == [p - g for p, g in zip(sample["p"], sample["g"], strict=True)]
    ids = Tokenizer.char_level().encode("7*8")[1:]
    assert [text_of(token, "tiny") for token in ids] == ["7", "*", "8"]
    assert text_of(5, "/no/such/model") == "‹5›"


@pytest.mark.parametrize(
    ("delta", "kind"),
    [(0.0, ""), (0.0099, ""), (-0.01, "lk-d1"), (0.06, "lk-d2"), (-0.2, "lk-d3"), (0.7, "lk-d4"), (math.nan, "lk-nan")],
)
def test_the_colour_of_a_token(delta: float, kind: str) -> None:
    assert level(Token("a", 0.0, delta, 1.0)) == kind


def test_tokens_that_agree_have_no_mark_and_rejected_ones_do() -> None:
    agreeing, rejected, apart = Token("<", -1.0, -1.0, 1.0), Token("b", -1.0, -1.0, 0.0), Token("c", -1.0, -2.0, 1.0)
    content = marked([agreeing, agreeing, rejected, apart])
    assert content.startswith("&lt;&lt;<mark class='lk-no'")
    assert "<mark class='lk-d4' title='Δ −1, engine 0.368, trainer 0.135'>c</mark>" in content


def test_the_worst_tokens_come_first_and_stand_in_a_table(views: list[View]) -> None:
    tab = Completions()
    content = shown(tab, views, views[1])
    found = answers(views[1], 3)
    worst = max((t for a in found for t in a.tokens), key=lambda t: t.size)
    assert worst.size > 0
    table = content[content.index("Worst tokens") :]
    assert f"<td>{worst.delta:+.3g}</td>".replace("-", "−") in table.split("</tr>")[1]
    first = max(found, key=lambda a: a.worst)
    assert content.index(f"ΣΔ {first.sum_delta:+.3g}".replace("-", "−")) < content.index("Worst tokens")
    assert "4 of 6 answers" in content


def test_the_slider_follows_the_run_until_it_is_moved(views: list[View]) -> None:
    tab = Completions()
    young = dataclasses.replace(views[1], records=views[1].records[:2])
    assert "step 1:" in shown(tab, views, young)
    assert "step 3:" in shown(tab, views, views[1])
    assert (tab.step.min, tab.step.max, tab.step.value) == (1, 3, 3)
    tab.step.value = 2
    assert "step 2:" in shown(tab, views, views[1])
    assert tab.newest.value is False
    tab.newest.value = True
    assert "step 3:" in shown(tab, views, views[1])


def test_another_run_with_fewer_steps_moves_the_slider_and_not_the_tick(views: list[View]) -> None:
    tab = Completions()
    shown(tab, views, views[1])
    young = dataclasses.replace(views[0], records=views[0].records[:2])
    assert "step 1:" in shown(tab, views, young)
    assert tab.newest.value is True


def test_a_run_that_keeps_no_rollouts_says_so(views: list[View]) -> None:
    view = dataclasses.replace(views[1], experiment=views[1].experiment.override({"keep_rollouts": 0}))
    assert "keep_rollouts is 0" in shown(Completions(), views, view)


# ---- mismatch, scales


def test_the_table_of_the_mismatch_counts_every_token(views: list[View]) -> None:
    content = shown(Mismatch(), views, views[1])
    tokens = [t for step in (1, 2, 3) for a in answers(views[1], step) for t in a.tokens]
    assert f"steps 1 to 3: {len(tokens)} tokens of 18 answers" in content
    cells = content[content.index("Which tokens") :].split("<tr>")[2:]
    assert sum(int(row.split("<td>")[1].split("<")[0]) for row in cells) == len(tokens)
    assert "rejected by the correction" in content
    assert ElementTree.fromstring(content[content.index("<svg") : content.index("</svg>") + 6]).tag == "svg"


def test_exact_agreement_is_said_in_words(views: list[View]) -> None:
    content = shown(Mismatch(), views, views[0])
    assert "agree exactly" in content
    assert "<svg" not in content


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> View:
    """FP8 rollouts of a mixture of experts whose first layer is dense."""
    directory = RunDirectory.create(preset("fp8-rollout", "tiny-moe").override(SMALL), tmp_path_factory.mktemp("moe"))
    for record in Loop(directory.experiment).steps():
        directory.append_record(record)
    return View("moe", "moe", directory.experiment, directory.records(), *theme.style(0), directory.path)


def test_flips_by_layer_stand_under_the_mismatch_of_a_run_that_has_experts(routed: View, views: list[View]) -> None:
    content = shown(Mismatch(), [routed], routed)
    newest = routed.records[-1].metrics
    assert f"Step 3: {newest['router_flip_rate_own']:.2%} of the pairs" in content
    table = content[content.index("<caption>Flips by layer") :]
    assert [table.count(f"<th scope='row' class='lk-text'>{layer} ") for layer in range(4)] == [0, 1, 1, 1]
    assert f"<td>{100 * newest['router_flip_rate_layer_2']:.2f}</td>" in table
    start = content.rindex("<svg role")
    plot = ElementTree.fromstring(content[start : content.index("</svg>", start) + 6])
    assert "Flips by layer" in "".join(plot.itertext())
    assert "Router replay" not in content
    assert "Routing" not in shown(Mismatch(), views, views[1]), "a dense model has none"


def test_what_replay_does_to_flips_and_what_it_lacks_is_said(routed: View) -> None:
    replayed = {"router_flip_rate": 0.0, "router_flip_rate_own": 0.02, "router_routes_missing": 0.25}
    newest = dataclasses.replace(routed.records[-1], metrics=routed.records[-1].metrics | replayed)
    view = dataclasses.replace(routed, records=[*routed.records[:-1], newest])
    content = shown(Mismatch(), [view], view)
    assert "Router replay overrules the trainer's choice: 0.00% are left" in content
    assert "25.0% of the engine's routes are missing" in content


def test_scales_by_layer_and_the_largest_value_they_hold(views: list[View]) -> None:
    content = shown(Scales(), views, views[1])
    scales = views[1].records[-1].kv_scales
    assert scales is not None
    assert "Scale of Q by layer" in content
    assert "Saturation" in content
    assert f"<td>{scales['k'][0]:.3g}</td>" in content
    assert f"<td>{scales['k'][0] * 448:.3g}</td>" in content
    assert content.count("<th scope='row'") == len(scales["k"])
    assert "updates behind" not in content


def test_scales_that_lag_are_an_error_only_where_the_recipe_wants_them_new(views: list[View]) -> None:
    late = dataclasses.replace(views[1].records[-1], engine={"weight_version": 5, "scale_version": 2})
    view = dataclasses.replace(views[1], records=[*views[1].records[:-1], late])
    assert "3 updates behind" in shown(Scales(), views, view)
    meant = dataclasses.replace(view, switches=(switched(view),))
    content = shown(Scales(), views, meant)
    assert "updates behind" not in content
    assert "policy unit" in content, "the mark of the switch"


def test_a_long_run_of_a_deep_model_stays_small_on_the_page(views: list[View]) -> None:
    scales = {part: [0.01 * (layer + 1) for layer in range(30)] for part in "qkv"}
    long = [dataclasses.replace(views[1].records[1], step=step, kv_scales=scales) for step in range(2000)]
    content = shown(Scales(), views, dataclasses.replace(views[1], records=long))
    assert len(content) < 160_000
    assert content.count("<th scope='row'") == 30


def test_a_bf16_cache_has_no_scales(views: list[View]) -> None:
    assert "BF16 KV cache" in shown(Scales(), views, views[0])


# ---- active, alarms, compare


def test_active_comes_from_the_run_and_stands_beside_the_wish(views: list[View]) -> None:
    assert asked(views[1].experiment.recipe, "rollout.linears") == "FP8"
    assert asked(views[1].experiment.recipe, "train.fprop") == "BF16"
    assert asked(views[1].experiment.recipe, "train.attention") == "–"
    off = views[1].records[-1].active | {"rollout.linears": {"state": "bf16", "detail": "no layer"}}
    view = dataclasses.replace(
        views[1], records=[*views[1].records[:-1], dataclasses.replace(views[1].records[-1], active=off)]
    )
    row = next(row for row in shown(ActiveTab(), views, view).split("<tr>") if "rollout.linears" in row)
    assert [word in row for word in (">FP8<", ">BF16<", ">3<", "no layer", "emulated")] == [True] * 4 + [False]


def test_alarms_of_the_selected_run_come_first(views: list[View]) -> None:
    alarm = Alarm("kv-saturation", 2, 3, "critical", "5% clipped", "scales too small", "raise recalibration.margin")
    warned = dataclasses.replace(views[1], alarms=(alarm,))
    content = shown(Alarms(), [views[0], warned], warned)
    for text in ("kv-saturation", "steps 2 to 3", "5% clipped", "scales too small", "raise recalibration.margin"):
        assert text in content
    assert content.index("1 critical") < content.index("no alarm")
    assert "looked at 3 steps" in content


def test_compare_shows_what_differs_and_only_that(views: list[View]) -> None:
    tab = Compare()
    moved = dataclasses.replace(views[1], switches=(switched(views[1]),))
    content = shown(tab, [views[0], moved], None)
    settings = content[content.index("Settings that differ") : content.index("What came of them")]
    assert "recipe.rollout.kv_cache" in settings
    assert "icepop0.98..1.02" in settings
    assert "step 2: recalibration.policy every-step → unit<br>rollout.linears off → on" in settings
    assert "grpo.lr" not in settings
    hidden = dataclasses.replace(moved, visible=False)
    assert "Settings that differ" not in shown(tab, [views[0], hidden], None)


# ---- export


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 7, "name": "a name, with 'quotes'"},
        {"grpo.lr": 1e-5, "grpo.betas": (0.8, 0.9), "sampling.max_new_tokens": 5},
        {"recipe.correction.name": "icepop", "recipe.correction.high": 3.0},
        {"recipe.correction": {"name": "custom", "weight": "token", "cap": 3.0, "filters": [{"high": 2.0}]}},
        {"recipe.rollout.linears": True, "recipe.train.fprop": True, "recipe.name": "mine"},
        {"model": "smollm2", "seed": 4},
        {"task": "dataset:/some where/rows.jsonl", "task_options": {"max_new_tokens": 9}},
        {"faults": ("nan-logprobs",)},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("recipe", ["bf16", "fp8-e2e-kv"])
def test_a_command_carries_out_the_same_experiment(recipe: str, changes: dict[str, Any]) -> None:
    experiment = preset(recipe).override(changes)
    words = shlex.split(command(experiment) or "")
    assert words[:2] == ["labkit", "run"]
    given = parse_assignments(words[3:])
    again = preset(words[2], given.pop("model", "tiny"), **given)  # as `labkit run` does
    assert again.diff(experiment) == {}
    assert again.name == experiment.name or "recipe.name" in changes


def test_the_command_of_a_preset_is_its_name_alone() -> None:
    for name in RECIPES:
        assert command(preset(name)) == f"labkit run {name}"


def test_the_text_of_every_form(views: list[View]) -> None:
    tab = Export()
    texts = {}
    for form in FORMS:
        tab.form.value = form
        tab.update(views, views[1])
        texts[form] = tab.text.value
        assert tab.copy.text == tab.text.value
    assert Experiment.from_yaml(texts["labkit YAML"]) == views[1].experiment
    assert texts["command"].startswith("labkit run fp8-rollout-kv ")
    assert "GRPOConfig" in texts["TRL"]
    assert len(set(texts.values())) == len(FORMS)


def test_after_a_switch_the_recipe_in_force_can_be_had(views: list[View]) -> None:
    tab = Export()
    tab.update(views, views[1])
    assert tab.recipe.disabled
    view = dataclasses.replace(views[1], switches=(switched(views[1]),))
    tab.update([view], view)
    assert not tab.recipe.disabled
    assert "switched on the way" in tab.notes.value
    assert Experiment.from_yaml(tab.text.value).recipe.recalibration.policy == "every-step"
    tab.recipe.value = IN_FORCE
    tab.update([view], view)
    assert Experiment.from_yaml(tab.text.value).recipe.recalibration.policy == "unit"


def test_files_are_written_at_the_update_after_the_press(views: list[View], tmp_path: Path) -> None:
    tab = Export(tmp_path / "exports")
    tab.update(views, views[1])
    for name, button in tab.buttons.items():
        button.click()
        assert "Writing" in tab.said.value
        tab.update(views, views[1])
        assert "Written" in tab.said.value, name
    files = {path.suffix: path for path in (tmp_path / "exports").iterdir()}
    assert Experiment.from_yaml(files[".yaml"]) == views[1].experiment
    with files[".csv"].open(newline="") as file:
        assert len(list(csv.DictReader(file))) == sum(len(view.records) for view in views)
    assert "plotly" in files[".html"].read_text()
    assert ElementTree.parse(files[".svg"]).getroot().tag.endswith("svg")


def written(tab: Export, name: str, views: list[View], chosen: View) -> str:
    tab.buttons[name].click()
    tab.update(views, chosen)
    return tab.said.value.partition("Written: ")[2].partition(" (")[0].rpartition("/")[2]


def test_files_are_named_after_what_they_hold_and_never_written_over(views: list[View], tmp_path: Path) -> None:
    tab = Export(tmp_path)
    first, second = "bf16", "fp8-rollout-kv"
    assert written(tab, "csv", views, views[1]) == f"{first}+{second}.csv"
    one = [views[0], dataclasses.replace(views[1], visible=False)]
    assert written(tab, "csv", one, views[1]) == f"{views[0].id}.csv"
    before = (tmp_path / f"{first}+{second}.csv").read_bytes()
    fork = dataclasses.replace(views[1], label="fp8 / e2e from step 10 · 2")
    assert written(tab, "csv", [views[0], fork], fork) == f"{first}+fp8-e2e-from-step-10-2.csv"
    assert written(tab, "csv", [*views, *[fork] * 4], fork) == (
        f"{first}+{second}+{'fp8-e2e-from-step-10-2+' * 3}1-more.csv"
    )
    assert written(tab, "csv", views, views[1]) == f"{first}+{second}-2.csv"
    assert (tmp_path / f"{first}+{second}.csv").read_bytes() == before
    long = dataclasses.replace(views[0], label="x" * 300)
    assert written(tab, "csv", [long, views[1]], long) == f"{'x' * 100}+1-more.csv"


def test_settings_in_force_do_not_take_the_name_of_those_at_the_start(views: list[View], tmp_path: Path) -> None:
    tab = Export(tmp_path)
    view = dataclasses.replace(views[1], switches=(switched(views[1]),))
    tab.update([view], view)
    assert written(tab, "save", [view], view) == f"{view.id}.yaml"
    tab.recipe.value = IN_FORCE
    assert written(tab, "save", [view], view) == f"{view.id}-switched-at-{view.switches[-1].step}.yaml"


def test_a_file_that_cannot_be_written_is_said(views: list[View], tmp_path: Path) -> None:
    (tmp_path / "exports").write_text("a file is in the way")
    tab = Export(tmp_path / "exports")
    tab.buttons["csv"].click()
    tab.update(views, views[1])
    assert "Not written" in tab.said.value


def test_the_svg_has_six_panels_and_says_what_is_emulated(views: list[View], tmp_path: Path) -> None:
    text = write_svg(tmp_path / "a.svg", views).read_text()
    for words in ("Accuracy", "Throughput", "TMPE − 1", "KL", "sample size", "Entropy", "exact (0)", "fp8-rollout-kv"):
        assert words in text
    assert "emulated: not a speed-up" in text
    assert "emulated" not in write_svg(tmp_path / "b.svg", views[:1]).read_text()


# ---- plots


def test_axes_and_their_ticks() -> None:
    assert [label for _, label in Axis(0.0, 1.0, "").ticks()] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert [label for _, label in Axis(-4.0, 4.0, "").ticks(4)] == ["−4", "−2", "0", "2", "4"]
    log = Axis.around([3e-5, 0.2, 0.0, math.nan], "", log=True)
    assert (log.low, log.high) == (pytest.approx(1e-5), pytest.approx(1.0))
    assert [label for _, label in log.ticks()] == ["10⁻⁵", "10⁻⁴", "0.001", "0.01", "0.1", "1"]
    assert log.share(1e-5) == pytest.approx(0)
    assert log.share(1.0) == pytest.approx(1)
    assert Axis.around([2.0, 2.0], "").share(2.0) == pytest.approx(0.5), "a constant curve stands in the middle"
    assert Axis.around([], "").ticks()


def test_a_line_has_a_gap_where_there_is_no_number() -> None:
    plot = Plot("t", Axis(0, 4, "x"), Axis(0, 1, "y"))
    plot.line([(0, 0.5), (1, math.nan), (2, 0.5), (3, 0.5)], "#000000")
    assert plot.marks.count("M") == 2
    assert plot.marks.count("L") == 1
