import time
from collections.abc import Callable
from pathlib import Path

from ipywidgets import Button

from labkit import preset
from labkit.hardware.check import Check
from labkit.runs.process import Run
from labkit.ui.preflight import Preflight, preflight, table


def buttons(panel: Preflight, tooltip: str) -> list[Button]:
    return [row.children[0] for row in panel.list.children[1:] if row.children[0].tooltip == tooltip]


def listed(panel: Preflight, tooltip: str) -> bool:
    """A process that has only just begun has no name yet."""
    panel.look()
    return bool(buttons(panel, tooltip))


def until(condition: Callable[[], object], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


def test_states_are_words_and_text_is_escaped() -> None:
    text = table([Check("GPU", "problem", "<b>none</b>", "buy & plug"), Check("disk", "ok", "1 GiB")])
    assert "✗ problem" in text
    assert "✓ ok" in text
    assert "&lt;b&gt;none&lt;/b&gt;" in text
    assert "buy &amp; plug" in text


def test_a_worker_is_listed_and_the_button_ends_it(tmp_path: Path) -> None:
    small = {"grpo.prompts_per_step": 4, "grpo.group_size": 4, "eval_prompts": 8, "threads": 1}
    run = Run.start(preset("bf16", steps=10_000).override(small), tmp_path)
    try:
        panel = preflight(tmp_path)
        assert until(lambda: listed(panel, f"End {run.id}"))
        (button,) = buttons(panel, f"End {run.id}")
        assert any("started by this kernel" in row.children[1].value for row in panel.list.children[1:])
        assert until(lambda: run.status.name == "running")
        button.click()
        assert f"{run.id} is stopping" in panel.said.value
        assert until(lambda: f"{run.id} has ended" in panel.said.value)
        assert run.status.name == "stopped"
        assert until(lambda: not buttons(panel, f"Kill {run.id}"))
    finally:
        run.kill()


def test_a_second_press_kills(tmp_path: Path) -> None:
    run = Run.start(preset("bf16", steps=10_000), tmp_path)
    try:
        panel = preflight(tmp_path)
        assert until(lambda: listed(panel, f"End {run.id}"))
        for name in ("End", "Kill"):
            (button,) = buttons(panel, f"{name} {run.id}")
            button.click()
        assert until(lambda: not run.alive)
        assert run.status.reason == "killed"
    finally:
        run.kill()
