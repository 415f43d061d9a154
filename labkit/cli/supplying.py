"""Commands that get things ready: the notebooks, models."""

from pathlib import Path
from typing import Annotated

import typer

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
def fetch(model: Annotated[str, typer.Argument(help="smollm2")]) -> None:
    """Fetch a model's weights once, for all later runs."""
    if model != "smollm2":
        raise ValueError(f"cannot fetch {model!r}: smollm2 is the only model to fetch")
    from labkit.models.smollm2 import fetch as fetch_smollm2

    console.print(f"smollm2 is in {fetch_smollm2()}")


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
