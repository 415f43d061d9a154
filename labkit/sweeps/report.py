"""The report of a sweep: question, what was shown, arms, curves, intervals, throughput, alarms, how to repeat it.

`write_html` gives one page that opens without a network, `write_markdown` the same without the curves, `write_csv` a
line for each cell. Whatever isn't there yet is named.
"""

import csv
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from labkit.config.words import said
from labkit.hardware import modelled
from labkit.runs.compare import EMULATED
from labkit.sweeps import provenance
from labkit.sweeps.document import Block, Bullets, Code, Grid, Heading, Paragraph, Picture, as_html, as_markdown
from labkit.sweeps.results import QUANTITIES, Arm, Results
from labkit.sweeps.statistics import short, signed
from labkit.sweeps.sweep import Sweep

_DEVICE = "h100"


def write_html(path: str | Path, sweep: Sweep) -> Path:
    results = sweep.results()
    return _write(path, as_html(title(sweep), blocks(sweep, results)))


def write_markdown(path: str | Path, sweep: Sweep) -> Path:
    results = sweep.results()
    return _write(path, as_markdown(title(sweep), blocks(sweep, results)))


def write_csv(path: str | Path, sweep: Sweep) -> Path:
    """arm, seed, where it stands, what was measured, and the settings that differ between arms."""
    results = sweep.results()
    differing = differences(results)
    path = Path(path)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        measured = ["end_to_end_tokens_per_s", "step_seconds", "emulated"]
        writer.writerow(["cell", "arm", "seed", "standing", *QUANTITIES, *measured, *differing])
        for cell in sweep.cells:
            arm = results.arms[cell.arm]
            numbers: list[object] = [""] * (len(QUANTITIES) + 3)
            if summary := arm.summaries.get(cell.seed):
                values = [arm.values(key)[cell.seed] for key in QUANTITIES]
                rate = summary.throughput
                numbers = ["" if math.isnan(v) else v for v in [*values, rate.end_to_end, summary.step_seconds]]
                numbers.append(rate.emulated)
            settings = [values[list(results.arms).index(cell.arm)] for values in differing.values()]
            standing = arm.missing.get(cell.seed, "done")
            writer.writerow([cell.id, cell.arm, cell.seed, standing, *numbers, *settings])
    return path


def title(sweep: Sweep) -> str:
    return sweep.plan.question or sweep.plan.name


def blocks(sweep: Sweep, results: Results) -> list[Block]:
    plan = sweep.plan
    head = (
        f"Sweep {plan.name}: {len(results.arms)} arms, {len(plan.seeds)} seeds, baseline {plan.baseline}; "
        f"{results.done} of {len(sweep.cells)} cells done, {time.strftime('%Y-%m-%d %H:%M')}."
    )
    found: list[Block] = [Paragraph(head), Heading("What was shown")]
    if not results.done:
        return [*found, Paragraph("Nothing yet: no cell is done."), *_repeat(sweep)]
    found += [Bullets(results.reading() or ["One arm alone: there is nothing to compare."])]
    found += [Paragraph(_ON_INTERVALS, soft=True)]
    found += [Heading("Arms"), *_arms(results), Heading("Curves"), _curves(results)]
    found += [Heading("Results"), *_results(results), Heading("Against the baseline"), *_comparisons(results)]
    found += [Heading("Throughput"), *_throughput(results), Heading("Alarms"), *_alarms(results)]
    return [*found, Heading("Computed on"), *_machines(sweep), *_repeat(sweep)]


def differences(results: Results) -> dict[str, list[str]]:
    """The settings that are not the same in all arms: {setting: its value in each arm}."""
    base = results.baseline.experiment
    changes = {arm.name: base.diff(arm.experiment) for arm in results.arms.values()}
    base_values = {key: before for changed in changes.values() for key, (before, _) in changed.items()}
    return {
        key: [said(changed[key][1] if key in changed else value) for changed in changes.values()]
        for key, value in base_values.items()
    }


def _arms(results: Results) -> list[Block]:
    rows = [[key, *values] for key, values in differences(results).items()]
    if not rows:
        return [Paragraph("One arm; nothing differs.")]
    grid = Grid(["setting", *results.arms], rows)
    return [grid, Paragraph("Only what differs is listed; everything else is the same in all arms.", soft=True)]


def _curves(results: Results) -> Block:
    from labkit.sweeps.curves import figure

    words = "Mean over the seeds of each arm; the band is one standard deviation to either side (of the logarithms on "
    return Picture(figure(results), words + "logarithmic axes). A legend entry hides or shows its arm.")


def _results(results: Results) -> list[Block]:
    keys = results.measured
    head = ["arm", "n", *(f"{QUANTITIES[key].title} {_arrow(key)}" for key in keys)]
    rows = [[arm.name, str(len(arm.runs)), *(results.cell(arm, key) for key in keys)] for arm in results.arms.values()]
    note = "Mean over seeds and 95 % interval (Student's t), geometric for TMPE − 1 and KL."
    return [Grid(head, rows), Paragraph(f"{note} {results.evaluation().capitalize()}.", soft=True)]


def _arrow(key: str) -> str:
    return "↑" if QUANTITIES[key].better == "higher" else "↓"


def _comparisons(results: Results) -> list[Block]:
    rows = []
    for arm in results.others:
        for key in results.measured:
            found = results.against(arm.name, key)
            shown = results.verdict(arm.name, key)
            if found.unpaired:
                shown += f"; without seed {', '.join(map(str, found.unpaired))}, which only one side has"
            difference = "–" if sum(found.zeros) else signed(found, results.plan.baseline)
            ends = [f"×{math.exp(end):.3g}" if found.log else short(end) for end in found.bootstrap]
            known = not any(map(math.isnan, found.bootstrap))
            needed = str(found.needed(results.plan.effect) or "–") if key == "heldout_end" else "–"
            tests = [f"{ends[0]} to {ends[1]}" if known else "–", short(found.p_t), short(found.p_flip)]
            rows.append([f"{arm.name}: {QUANTITIES[key].short}", shown, difference, str(found.n), *tests, needed])
    if not rows:
        return [Paragraph("There is no other arm.")]
    effect = short(results.plan.effect).rstrip("0")
    tests = ["bootstrap 95 %", "p, t test", "p, sign flips"]
    head = ["arm and quantity", "verdict", "difference", "n", *tests, f"seeds for {effect}"]
    return [Grid(head, rows, words=[1]), Paragraph(_ON_TESTS, soft=True)]


def _throughput(results: Results) -> list[Block]:
    told = {arm.name: modelled(arm.experiment.recipe, device=_DEVICE) for arm in results.arms.values()}
    base = told[results.plan.baseline]
    rows = []
    for arm in results.arms.values():
        rates = [summary.throughput for summary in arm.summaries.values()]
        emulated = any(rate.emulated for rate in rates)
        expected = told[arm.name].end_to_end
        rows.append(
            [arm.name, _mean([rate.end_to_end for rate in rates], ",.0f"), _mean(_seconds(arm), ".2f"),
             EMULATED if emulated else "measured", f"{expected:,.0f}", f"×{expected / base.end_to_end:.2f}"]
        )  # fmt: skip
    head = ["arm", "tokens/s here", "seconds a step", "that is", "tokens/s/GPU, modelled", "to the baseline, modelled"]
    inputs = f"{base.label}, not measured: {base.inputs['shape']}, {base.inputs['workload']}"
    here = "Measured on this machine, while other cells ran beside; evaluation left out."
    notes = dict.fromkeys(note for each in told.values() for note in each.notes)
    return [
        Grid(head, rows, words=[3]),
        Paragraph(" ".join([here, f"The last two columns are {inputs}.", *notes]), soft=True),
    ]


def _seconds(arm: Arm) -> list[float]:
    return [summary.step_seconds for summary in arm.summaries.values()]


def _mean(values: Sequence[float], form: str) -> str:
    known = [value for value in values if math.isfinite(value)]
    return format(statistics.fmean(known), form) if known else "–"


def _alarms(results: Results) -> list[Block]:
    rows, silent = [], 0
    for arm in results.arms.values():
        for seed, run in arm.runs.items():
            raised = run.alarms()
            silent += not raised
            for alarm in raised:
                steps = f"{alarm.step}" if alarm.step == alarm.last_step else f"{alarm.step} to {alarm.last_step}"
                rows.append([f"{arm.name}, seed {seed}", alarm.severity, alarm.name, steps, alarm.what])
    quiet = Paragraph(f"{silent} of {results.done} runs raised no alarm.")
    return [quiet, Grid(["run", "severity", "alarm", "steps", "what"], rows, words=[1, 2, 4])] if rows else [quiet]


def _machines(sweep: Sweep) -> list[Block]:
    known = provenance.machines(sweep.path)
    lines = [
        f"{each['processor']}, {each['cores']} cores, {each['system']}; "
        f"{', '.join(f'{name} {number}' for name, number in each['versions'].items())} (since {each['since']})"
        for each in known
    ]
    threads = sorted({cell.experiment.threads or 1 for cell in sweep.cells})
    lines.append(
        f"{', '.join(map(str, threads))} thread{'s' if threads != [1] else ''} a cell, whatever runs beside it."
    )
    mixed = [Paragraph("The cells come from more than one machine or set of versions.")] if len(known) > 1 else []
    return [*mixed, Bullets(lines)]


def _repeat(sweep: Sweep) -> list[Block]:
    file = sweep.path / "sweep.yaml"
    here = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    command = f"labkit sweep {here}"
    where = "The file is below. Cells that are done are not repeated; those that failed are with --retry."
    return [
        Heading("To repeat it"),
        Code(command),
        Paragraph(where, soft=True),
        Code(file.read_text(encoding="utf-8"), fold="sweep.yaml"),
    ]


def _write(path: str | Path, text: str) -> Path:
    path = Path(path)
    path.write_text(text, encoding="utf-8")
    return path


_ON_INTERVALS = (
    "Paired by seed: arms with the same seed see the same prompts in the same order. Brackets are 95 % intervals "
    "(Student's t), each for itself: of twenty true nulls one is expected to look like a difference. “Could have "
    "missed up to” is the largest difference that the interval doesn't exclude; it is no proof of equality."
)
_ON_TESTS = (
    "The sign-flip test needs no normal distribution and can't fall below 2/2ⁿ: .25 with three seeds, .062 with five. "
    "The bootstrap is too narrow with few seeds and is shown for comparison. Seeds needed: for power .8, if the spread "
    "of the differences is what it is here."
)
