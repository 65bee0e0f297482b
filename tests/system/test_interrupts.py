"""A run that is asked to stop: what it keeps, what it says, and that it goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import mrl.loop.collector
import mrl.loop.orchestrator
import mrl.system.interrupts as module
from mrl.actor.worker import ActorWorker
from mrl.cli.main import main
from mrl.loop.recorded_run import RunResult
from mrl.rollouts.runner import Runner
from mrl.store.checkpoints import list_checkpoints
from mrl.store.run import read_rows
from mrl.system.interrupts import interrupts
from tests import small_runs
from tests.small_runs import distinct, record_of
from tests.soak import slow_but

EVALUATED = {"eval_split": "train", "eval_samples": 2, "eval_steps": 2, "save_steps": 0}


def run(model: str, folder: Path, **changes: Any) -> RunResult:
    return small_runs.run(model, folder, **(EVALUATED | changes))


@pytest.fixture(scope="module")
def whole(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(tiny_model, folder).status == "finished"
    return folder


def signalling(function: Callable[..., Any], number: int, call: int) -> Callable[..., Any]:
    """The same function, at whose `call`th call the process gets a signal."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), number)
        return function(*args, **kwargs)

    return wrapped


PHASES: dict[str, tuple[Any, str, int, int]] = {
    # where, what is called there, at which of its calls the signal comes, steps kept
    "preparing": (mrl.loop.orchestrator, "prepare", 1, 0),
    "loading": (ActorWorker, "initialize", 1, 0),
    "the first evaluation": (mrl.loop.collector, "score_groups", 1, 0),
    "the first step": (mrl.loop.orchestrator, "make_batch", 1, 1),
    "training": (ActorWorker, "train_step", 3, 3),
    "evaluating": (mrl.loop.collector, "score_groups", 4, 2),
    "the last evaluation": (mrl.loop.collector, "score_groups", 7, 4),
    "checkpointing": (ActorWorker, "save_checkpoint", 2, 2),
}


IN_THE_DEFAULT_SUITE = ("training",)


def marked(phase: str) -> Any:
    marks = [] if phase in IN_THE_DEFAULT_SUITE else [pytest.mark.slow]
    if PHASES[phase][0] is ActorWorker:
        marks.append(pytest.mark.inline("the actor's own method sends the signal"))
    return pytest.param(phase, marks=marks)


@pytest.mark.parametrize("phase", ["generating", *map(marked, PHASES)])
def test_a_stopped_run_keeps_its_steps_and_goes_on_exactly(
    phase: str, tiny_model: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = signal.SIGHUP if phase == "training" else signal.SIGTERM
    changes: dict[str, Any] = {"save_steps": 1} if phase == "checkpointing" else {}
    with monkeypatch.context() as patched:
        if phase == "generating":
            steps = 2
            patched.setattr(Runner, "run", signalling(Runner.run, number, 5))  # after 2 evaluations and 2 steps
        else:
            where, name, call, steps = PHASES[phase]
            patched.setattr(where, name, signalling(getattr(where, name), number, call))
        result = run(tiny_model, tmp_path / "run", **changes)
    assert (result.status, result.steps, result.signal) == ("interrupted", steps, number)
    kept = [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "run")]
    assert kept == ([1, 2] if phase == "checkpointing" else [steps] if steps else [])
    assert result.checkpoint == (tmp_path / "run" / "checkpoints" / f"step-{steps}" if steps else None)
    again = run(tiny_model, tmp_path / "run", resume="auto", **changes)
    assert (again.status, again.steps) == ("finished", 4)
    assert record_of(tmp_path / "run", without="sync/") == record_of(whole, without="sync/")
    mine, theirs = (load_file(list_checkpoints(f)[-1].path / "model.safetensors") for f in (tmp_path / "run", whole))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.inline("its reward function interrupts its own process")
@pytest.mark.parametrize("where", ["program", "notebook"])
def test_nobody_waits_for_a_slow_step(where: str, tiny_model: str, tmp_path: Path) -> None:
    """Its rewards take a minute and more; the step before it is kept meanwhile. In a notebook an event loop is running
    already, and the run has a thread of its own."""
    calls, ended = 0, threading.Event()

    def slow(completions: list[str], **_: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 3:  # before the run it is tried once
            os.kill(os.getpid(), signal.SIGINT)
            ended.wait(90)
        return distinct(completions)

    def train() -> RunResult:
        return run(tiny_model, tmp_path / "run", reward_funcs=slow, eval_split=None, eval_steps=0)

    async def notebook() -> RunResult:
        return train()

    result = train() if where == "program" else asyncio.run(notebook())
    assert not ended.is_set()
    ended.set()
    assert (result.status, result.steps, result.signal) == ("interrupted", 1, signal.SIGINT)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "run")] == [1]


@pytest.mark.inline("its reward function interrupts its own process")
def test_a_notebooks_second_interrupt_ends_the_call(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is over soon after, without a word in its record of anything having failed."""
    calls = 0

    def stubborn(completions: list[str], **_: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 2:  # the first step's, which is waited for; before the run it is tried once
            for _again in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.3)
        return distinct(completions)

    async def notebook() -> RunResult:
        return run(tiny_model, tmp_path / "run", reward_funcs=stubborn, eval_split=None, eval_steps=0, save_steps=1)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(notebook())
    assert "stopped at once. Nothing was kept" in capsys.readouterr().out
    deadline = time.monotonic() + 60
    while any(thread.name == "mrl-run" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [row["kind"] for row in read_rows(tmp_path / "run", "events")][-1] != "error"
    assert calls == 2


@pytest.mark.inline("its reward function interrupts its own process")
@pytest.mark.parametrize("number", slow_but([signal.SIGTERM], [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]))
def test_the_command_says_how_to_go_on_and_exits_with_the_signals_code(
    number: int, tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module.os, "_exit", sys.exit)  # threads of other tests may be alive
    (tmp_path / "tasks & more.jsonl").write_text("\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(4)))
    (tmp_path / "rewards.py").write_text(
        "import os\ncalls = 0\ndef r(completions, **_):\n    global calls\n    calls += 1\n"
        f"    if calls == 3: os.kill(os.getpid(), {int(number)})\n    return [len(set(c)) / 8 for c in completions]\n"
    )
    flags = ["--model", tiny_model, "--dataset", "tasks & more.jsonl", "--reward-funcs", "rewards.py:r", "--save-steps"]
    more = ["0", "--device", "cpu", "--max-completion-length", "6", "--batch-size", "2", "--run-name", "my `run`"]
    with pytest.raises(SystemExit) as stopped:
        main(["train", *flags, *more])
    assert stopped.value.code == 128 + number
    said = capsys.readouterr()
    assert "Kept: runs/my `run`/checkpoints/step-1. Go on with: mrl train --resume 'my `run`'" in said.out
    assert "writing a checkpoint (Ctrl-C again to stop at once)" in said.err
    assert "mrl sample" not in said.out


SLOW_RUN = """
    import sys, time
    from mrl import MRLTrainer
    from mrl.actor.worker import ActorWorker

    ActorWorker.save_checkpoint = lambda *_, **__: time.sleep(60)

    def slow(completions, **_):
        time.sleep(0.5)
        return [float(i) for i in range(len(completions))]

    MRLTrainer(
        model=sys.argv[1], train_dataset=[{"prompt": "x"}], reward_funcs=slow, run_dir=sys.argv[2], max_steps=1000,
        max_completion_length=4, device="cpu", num_rollout_workers=1, weight_sync_method="direct",
    ).train()
"""


@pytest.mark.slow
def test_a_programs_second_interrupt_ends_the_process(tiny_model: str, tmp_path: Path) -> None:
    """While the first one's checkpoint is being written."""
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(SLOW_RUN))
    command = [sys.executable, str(script), tiny_model, str(tmp_path / "r")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ.copy()
    )
    deadline = time.monotonic() + 90
    while not list(read_rows(tmp_path / "r", "metrics")) and time.monotonic() < deadline:
        time.sleep(0.1)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopped at once. Nothing was kept: no checkpoint had been written. Begin again with: MRLTrainer(" in err
    assert not list_checkpoints(tmp_path / "r")


def test_handlers_are_there_only_meanwhile() -> None:
    """Those from before come back, and a signal that was ignored (as under nohup) stays so."""
    asked: list[tuple[str, int]] = []
    mine = lambda *_: None  # noqa: E731
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGTERM, mine)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with interrupts(lambda n: asked.append(("stop", n)), lambda n: asked.append(("end", n))):
            signal.raise_signal(signal.SIGHUP)
            assert asked == []
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)  # the same one, to the group
            signal.raise_signal(signal.SIGINT)
        assert asked == [("stop", signal.SIGTERM), ("end", signal.SIGINT)]
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is before[signal.SIGINT]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_command_without_a_run_ends_with_the_signals_code() -> None:
    """While it still imports, or evaluates: no traceback."""
    program = (
        "import os, signal, mrl.cli.main\n"
        "mrl.cli.main.COMMANDS['doctor'] = (lambda argv: os.kill(os.getpid(), signal.SIGTERM), '')\n"
        "mrl.cli.main.main(['doctor'])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (143, "mrl: error: stopped by SIGTERM\n")
