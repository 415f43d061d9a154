"""The panel in JupyterLab in a browser, while real runs of the tiny policy go on."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import pytest

from labkit.runs.process import Run

if TYPE_CHECKING:
    from driver import LabPage, Server

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]

OpenPage = Callable[..., "LabPage"]
QUICK = {  # some 15 steps a second on a core of one's own
    "steps": 2000,
    "eval_every": 100,
    "eval_prompts": 8,
    "checkpoint_every": 5,
    "keep_rollouts": 2,
    "threads": 1,
    "sampling.max_new_tokens": 8,
    "grpo.prompts_per_step": 2,
    "grpo.group_size": 4,
    "grpo.minibatches": 1,
}
LAB = f"import labkit as lk\nlab = lk.Lab(lk.preset('bf16').override({QUICK}))\nlab"


def panel(open_page: OpenPage, server: "Server", *cells: str) -> "LabPage":
    """A page with the panel, made by running all cells."""
    page = open_page(server.write("panel.ipynb", *cells))
    page.run_all()
    page.button("Run").wait_for()
    return page


def start(page: "LabPage", points: int) -> None:
    page.press("Run")
    page.says("running")
    page.until(lambda: page.points() >= points, f"{points} points")


def complete(page: "LabPage") -> int:
    """The last step of the only curve, if it has a point for every step up to it. (Beyond 300 they are thinned out.)"""
    curves = list(page.curves().values())
    return curves[0][1] if len(curves) == 1 and curves[0][0] >= min(curves[0][1], 250) else -1


def restart_and_stop(page: "LabPage", run: Run) -> None:
    """The kernel ends, the run doesn't: a new panel has all its points, and can stop it."""
    before = run.records()[-1].step
    page.restart_kernel()
    assert run.alive
    page.write_cell("import labkit as lk\nlab = lk.open_lab()\nlab")
    page.run_all()
    page.says("attached to")
    page.until(lambda: complete(page) > before + 5, "every point, those before and after the restart")
    page.press("Stop")
    page.says("stopped")
    assert run.status.name == "stopped"
    assert page.errors == []


def test_a_run_is_driven_from_the_page(open_page: OpenPage, server: "Server") -> None:
    page = panel(open_page, server, LAB)
    start(page, points=8)
    (name,) = page.curves()

    page.checkbox("KV cache").click()
    page.says("switched at step")
    page.until(lambda: page.marks() == {"kv_cache on"}, "a line at the switch")
    (run,) = Run.all(server.runs)
    assert run.recipe.rollout.kv_cache

    page.press("Pause")
    page.says("paused")
    before = len(run.records())
    page.page.wait_for_timeout(500)
    assert len(run.records()) <= before + 1
    page.press("Resume")
    page.says("running")
    page.until(lambda: len(run.records()) > before + 3, "steps after the pause")

    page.press("Stop")
    page.says("stopped")
    assert run.status.name == "stopped"
    steps = run.records()[-1].step
    page.until(lambda: page.curves()[name] == (steps, steps), "all points")

    page.checkbox("KV cache").click()
    latest = run.checkpoints()[-1]
    page.control("combobox", "from step").select_option(str(latest))
    page.press("Fork")
    page.says("running")
    page.until(lambda: len(page.curves()) == 2, "the fork beside its parent")
    forked = Run.all(server.runs)[0]
    assert forked.parent == (run.id, latest)
    assert not forked.recipe.rollout.kv_cache
    page.press("Stop")
    page.says("stopped")

    assert page.elsewhere == [], "works without a network"
    assert page.errors == []


def test_reload_and_kernel_restart_lose_nothing(open_page: OpenPage, server: "Server") -> None:
    page = panel(open_page, server, LAB)
    start(page, points=10)
    (run,) = Run.all(server.runs)
    page.save()

    before = run.records()[-1].step
    page.reload()
    page.until(lambda: complete(page) > before + 5, "every point, those before and after the reload")
    page.says("running")

    restart_and_stop(page, run)


def test_the_kernel_before_serves_the_same_panel(open_page: OpenPage, server: "Server", ipykernel_6: str) -> None:
    version = "import ipykernel\nipykernel.__version__"
    page = open_page(server.write("panel.ipynb", version, LAB, kernel=ipykernel_6))
    page.run_all()
    page.button("Run").wait_for()
    page.page.locator(".jp-OutputArea-output", has_text="'6.31.0'").wait_for()
    start(page, points=8)
    (run,) = Run.all(server.runs)

    page.checkbox("KV cache").click()
    page.says("switched at step")
    assert run.recipe.rollout.kv_cache
    page.press("Pause")
    page.says("paused")
    page.press("Resume")
    page.says("running")

    restart_and_stop(page, run)


def test_the_keyboard_is_enough(open_page: OpenPage, server: "Server") -> None:
    page = panel(open_page, server, LAB)
    keys = page.page.keyboard
    page.tab_to("Run")
    keys.press("Enter")
    page.says("running")
    page.until(lambda: page.points() >= 3, "points")
    page.tab_to("Stop")
    page.tab_to("linears")
    keys.press("Space")
    page.says("switched at step")
    assert page.checkbox("linears").is_checked()
    for _ in range(40):
        keys.press("Shift+Tab")
        if page.focus().endswith("Stop"):
            break
    keys.press("Space")
    page.says("stopped")
    (run,) = Run.all(server.runs)
    assert run.recipe.rollout.linears


def test_the_first_notebook_is_legible_dark_and_light_on_a_small_screen(open_page: OpenPage, server: "Server") -> None:
    shutil.copy(ROOT / "notebooks" / "00_start_here.ipynb", server.folder)
    page = open_page("00_start_here.ipynb", width=1024, height=768)
    page.execute("application:toggle-left-area")
    page.run_all()
    page.button("Look again").wait_for()
    page.button("Run").wait_for()
    start(page, points=2)
    assert page.page.get_by_role("dialog").count() == 0, "no question comes up"
    assert page.page.get_by_text("official Jupyter news").count() == 0
    for theme in ("Dark", "Light"):
        page.theme(theme)
        page.page.wait_for_timeout(300)
        assert page.illegible() == [], theme
        assert page.overflow() == 0, theme

    page.execute("application:toggle-left-area")  # beside the file browser, with switches at neighbouring steps
    for name, setting in (("KV cache", "rollout.kv_cache"), ("fprop", "train.fprop"), ("wgrad", "train.wgrad")):
        page.checkbox(name).click()
        page.until(lambda words=f"{setting} off → on": f": {words}" in page.status().partition("switched")[2], name)
    page.until(page.marks, "labels of the switches")
    assert page.out_of_sight() == 0
    assert page.overlaps(".annotation-text") == []
    assert page.overlaps(".shape-label") == []
    assert page.overflow() == 0
    page.press("Stop")
    page.says("stopped")


@pytest.mark.slow
def test_clicks_are_answered_while_a_policy_trains(open_page: OpenPage, server: "Server") -> None:
    page = panel(open_page, server, "import labkit as lk\nlab = lk.Lab(lk.preset('bf16', steps=10_000))\nlab")
    start(page, points=2)
    found: dict[str, list[float]] = {"toggle": [], "pause": [], "stop": [], "stopped": []}
    for _ in range(20):
        found["toggle"].append(page.clicked(page.checkbox("KV cache"), "asked: rollout.kv_cache"))
        page.says("switched at step")
        found["pause"].append(page.clicked(page.button("Pause"), "paus"))
        page.says("paused")
        page.press("Resume")
        page.says("running")
    for _ in range(5):
        for what, words in (("stop", "stopp"), ("stopped", "stopped")):
            found[what].append(page.clicked(page.button("Stop"), words))
            page.says("stopped")
            page.press("Continue")
            page.says("running")
    for what, times in found.items():
        print(f"{what}: median {median(times):.0f} ms, worst {max(times):.0f} ms, n = {len(times)}")
    for what in ("toggle", "pause", "stop"):
        assert median(found[what]) < 200, what
    assert median(found["stopped"]) < 500


@pytest.mark.slow
def test_pictures(open_page: OpenPage, server: "Server", pictures: Path) -> None:
    """Two runs and a switch, in both themes: the pictures of the documentation (LABKIT_PICTURES=docs)."""
    cell = "import labkit as lk\nlab = lk.Lab(lk.preset('bf16', steps=40, checkpoint_every=10))\nlab"
    server.write("lab.ipynb", cell)
    page = open_page("lab.ipynb", width=1600, height=1330)
    page.execute("application:toggle-left-area")
    page.run_all()
    page.button("Run").wait_for()
    start(page, points=2)
    page.says("done", seconds=180)
    page.checkbox("linears").click()
    page.press("Run")
    page.says("running")
    page.until(lambda: [step for _, step in page.curves().values() if step >= 20][1:], "half of the second run", 180)
    page.checkbox("KV cache").click()
    page.says("switched")
    page.says("done", seconds=180)
    page.page.wait_for_timeout(1000)
    for theme in ("Light", "Dark"):
        page.theme(theme)
        page.page.wait_for_timeout(1000)
        page.screenshot(pictures / f"panel-{theme.lower()}.png")
    assert os.path.getsize(pictures / "panel-dark.png") > 50_000
