"""The real math-verify, in the process that it runs in."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from labkit.tasks import load_task, mathematics
from labkit.tasks.mathematics_process import SECONDS

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("reference", "answer", "same"),
    [
        *[
            ("1/2", text, True)
            for text in ("\\boxed{1/2}", "0.5", "\\frac12", "so $\\frac{1}{2}$.", "\\boxed{\\frac12}")
        ],
        *[("\\frac12", text, True) for text in ("\\boxed{1/2}", "it is 0.5", "\\frac{2}{4}")],
        *[("0.5", text, True) for text in ("1/2", "\\boxed{\\dfrac{1}{2}}", "50%")],
        ("12", "\\frac12", False),
        ("1,200", "\\boxed{\\$1200}", True),
        ("18", "She makes $18.00 a day.", True),
        ("18", "\\boxed{17}, no, wait, 18", False),
        ("3\\sqrt{2}", "\\boxed{\\sqrt{18}}", True),
        ("(1,2)", "\\boxed{(2,1)}", False),
        ("The sum is $\\boxed{\\frac{1}{2}}$, as it was.", "\\boxed{0.5}", True),
        ("New York", "New York", True),
        ("7", "it is -7", False),
        *[("7", text, False) for text in ("", "no idea", "\\boxed{", "\\boxed{\\frac{}", "\ud800", "\\boxed{\0}")],
    ],
)
def test_equal(reference, answer, same):
    assert mathematics.equal(reference, answer) is same


RUNAWAY = "\\boxed{2^{2^{2^{100}}}}"


def test_what_never_ends_is_wrong_and_leaves_no_trace(capfd):
    start = time.monotonic()
    assert mathematics.equal("7", RUNAWAY) is False
    assert time.monotonic() - start < 10 * SECONDS
    assert mathematics.equal("7", "7") is True, "the next comparison has a process of its own"
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("answer", ["\\boxed{" + "(" * 3000 + "}", "9" * 100_000])
def test_what_breaks_a_parser_is_wrong(answer):
    assert mathematics.equal("7", answer) is False
    assert mathematics.equal("7", "7") is True


def test_every_thread_may_ask():
    asked = [(str(n), str(n + n % 2)) for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda pair: mathematics.equal(*pair), asked)) == [n % 2 == 0 for n in range(40)]
    assert threading.active_count() < 10


def test_a_killed_process_costs_no_reward():
    assert mathematics.equal("7", "7")
    os.kill(mathematics._process._running.pid, signal.SIGKILL)
    mathematics._process._running.wait()
    assert mathematics.equal("7", "7")


def test_alarms_of_the_asking_process_stay_as_they_are():
    before = signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        assert mathematics.equal("7", "7")
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 900
        assert signal.getsignal(signal.SIGALRM) is before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_it_ends_with_the_process_that_asked():
    code = (
        "from labkit.tasks import mathematics as m; m.equal('7', '7'); print(m._process._running.pid, flush=True);"
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout
    deadline = time.monotonic() + 10
    while _runs(int(said)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(int(said))


def _runs(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return "mathematics_process" in file.read()
    except OSError:
        return False


def test_a_task_rewards_by_it(tmp_path):
    path = tmp_path / "fractions.jsonl"
    path.write_text("".join(f'{{"prompt": "1/{n}?", "answer": "\\\\\\\\frac1{n}"}}\n' for n in range(2, 10)))
    task = load_task(f"dataset:{path}", {"reward": "math-verify", "heldout_fraction": 0.5})
    half = next(problem for _, problem in task.problems() if problem.prompt == "1/2?")
    assert task.reward(half, "it is \\boxed{0.5}", finished=True) == 1
    assert task.reward(half, "it is \\boxed{0.5}", finished=False) == 0
    assert task.reward(half, RUNAWAY[:-1], finished=True) == 0
    assert load_task(f"dataset:{path}", {"heldout_fraction": 0.5}).reward(half, "0.5", finished=True) == 0


def test_without_the_package_the_task_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    code = (
        "import sys; sys.modules['math_verify'] = None\n"
        "from labkit.tasks import load_task\n"
        f"load_task('dataset:{tmp_path}/rows.jsonl', {{'reward': 'math-verify'}})"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr
    assert "TaskError" in said
    assert "pip install math-verify, or set task_options.reward to match" in said
