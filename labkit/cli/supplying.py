"""Commands that get things ready: the notebooks, models, data sets, the machine."""

import os
import subprocess
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from labkit.cli.app import app
from labkit.terminal import console


@app.command()
def lab(
    folder: Annotated[Path | None, typer.Argument(help="the notebooks; found by itself in a checkout")] = None,
    port: Annotated[int | None, typer.Option(help="the first free one from 8888 on if not given")] = None,
    browser: Annotated[bool, typer.Option(help="open a browser")] = True,
) -> None:
    """JupyterLab on the notebooks, on this machine alone, with the right settings. Ctrl-C ends it; runs go on."""
    from labkit.classroom import start

    start(folder, port, browser)


@app.command()
def doctor() -> None:
    """What this machine offers: memory, GPUs, engines, models, data sets. Exit code 1 if something will fail."""
    from labkit.hardware.checkup import checkup
    from labkit.runs.store import runs_root

    found = checkup(runs_root())
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for title in ("what", "state"):
        table.add_column(title, no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in found:
        advice = f"\n[dim]{escape(check.advice)}[/dim]" if check.advice else ""
        table.add_row(check.name, check.mark, f"{escape(check.found)}{advice}")
    console.print(table, highlight=False)
    if any(check.state == "problem" for check in found):
        raise typer.Exit(1)


@app.command("gpu-setup")
def gpu_setup(
    run: Annotated[bool, typer.Option("--run", help="run the commands, one after the other")] = False,
    print_only: Annotated[bool, typer.Option("--print-only", help="print them for another machine")] = False,
    without_vllm: Annotated[bool, typer.Option("--without-vllm", help="Transformer Engine for the torch here")] = False,
) -> None:
    """The commands that install vLLM and Transformer Engine on a GPU node, in their order. --run runs them."""
    from labkit.hardware import gpu_setup as setup

    if run and print_only:
        raise ValueError("--run and --print-only exclude each other: give one")
    node = setup.look()
    if not print_only and (obstacles := setup.obstacles(node, vllm=not without_vllm)):
        raise ValueError("; ".join(obstacles))
    done: set[str] = set()
    while todo := [step for step in setup.steps(node, vllm=not without_vllm) if step.name not in done]:
        for step in todo[:1] if run else todo:
            typer.echo(f"# {step.name}\n{step}\n")  # not through the console, which would break the lines
            done.add(step.name)
            if run:
                ended = subprocess.run(step.command, env={**os.environ, **dict(step.environment)})
                if ended.returncode:
                    raise ValueError(f"{step.name}: exit code {ended.returncode}; what went wrong is said above")
        node = setup.look()  # the first commands bring what the next ones are made from


@app.command()
def fetch(
    name: Annotated[
        str, typer.Argument(help="smollm2, a model of the Hugging Face hub (OWNER/NAME), gsm8k, or dataset:OWNER/NAME")
    ],
    subset: Annotated[str, typer.Argument(help="of a data set that has several", metavar="[SUBSET]")] = "",
) -> None:
    """Fetch a model or a data set once, for all later runs."""
    from labkit.config.locations import is_hub_name

    source = name.removeprefix("dataset:")
    if subset and source == name:
        raise ValueError(f"only a data set has subsets; write dataset:{name} {subset}")
    if name == "smollm2":
        from labkit.models.smollm2 import fetch as fetch_smollm2

        console.print(f"smollm2 is in {fetch_smollm2()}")
    elif name == "gsm8k":
        from labkit.tasks.gsm8k import GSM8K, SUBSET

        _fetch_dataset(GSM8K, SUBSET)
    elif source != name:
        _fetch_dataset(source, subset)
    elif is_hub_name(name):
        from labkit.models.hub import fetch as fetch_model

        console.print(f"{name} is in {fetch_model(name)}", highlight=False, soft_wrap=True)
    else:
        raise ValueError(f"cannot fetch {name!r}: give smollm2, gsm8k, OWNER/NAME or dataset:OWNER/NAME")


def _fetch_dataset(name: str, subset: str) -> None:
    from labkit.tasks.rows import fetch as fetch_dataset

    for split, rows in fetch_dataset(name, subset).items():
        console.print(f"{name}, split {split}: {len(rows)} rows", highlight=False)


@app.command()
def warmstart(
    out: Annotated[Path, typer.Option(help="folder for the policy, in Hugging Face layout")],
    seed: Annotated[int, typer.Option()] = 0,
    moe: Annotated[bool, typer.Option("--moe", help="tiny-moe, the one with a mixture of experts")] = False,
) -> None:
    """Train a tiny policy from nothing, as the shipped ones were (some minutes)."""
    from labkit.models.warmstart import TINY, TINY_MOE
    from labkit.models.warmstart import warmstart as train

    with console.status("warm start") as status:
        policy = train(
            out, seed, config=TINY_MOE if moe else TINY,
            progress=lambda step, loss: status.update(f"step {step}, loss {loss:.3f}"),
        )  # fmt: skip
    console.print(f"{policy.name} of seed {seed} is in {out}")
