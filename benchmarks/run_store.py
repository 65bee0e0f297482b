"""What the run store costs: pages of a large store, bytes per rollout, and the loop's time for writing.

    python benchmarks/run_store.py                      # a minute
    python benchmarks/run_store.py --rows 1000000       # the size the limits are stated for

Pages are read by a new connection each, and are warm: the operating system has the file in memory if it fits.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mrl.config import OrchestratorConfig
from mrl.store.filters import Filter
from mrl.store.read import RunReader
from mrl.store.record import write_record
from mrl.store.run import RunStore
from mrl.store.schema import open_writer
from mrl.types import Group, Rollout, Sample, Task

PAGE = 50
STEPS_PER_TRANSACTION = 200
WORDS = [
    "the",
    "of",
    "to",
    "return",
    "def",
    "for",
    "value",
    "list",
    "sum",
    "number",
    "if",
    "else",
    "while",
    "print",
    "range",
]
WORD_IDS = np.random.default_rng(1).integers(0, 150_000, len(WORDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000, help="rollouts in the large store")
    parser.add_argument("--per-step", type=int, default=64, help="rollouts of a step, there and when writing")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of a rollout when writing")
    parser.add_argument("--steps", type=int, default=20, help="steps to write")
    parser.add_argument("--step-seconds", type=float, default=10.0, help="a step's time, for the share of it")
    parser.add_argument("--folder", type=Path, help="where to build (default: a temporary folder, removed afterwards)")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="mrl-run-store-"))
    try:
        pages(folder / "large", options.rows, options.per_step)
        writing(folder / "writing", options.steps, options.per_step, options.tokens, options.step_seconds)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)


# --- pages ------------------------------------------------------------------------------------------------------------


def pages(folder: Path, rows: int, per_step: int) -> None:
    """Build a store of `rows` small rollouts and time pages of it."""
    start = time.perf_counter()
    build(folder, rows, per_step)
    size = (folder / "run.db").stat().st_size
    seconds = time.perf_counter() - start
    print(f"store of {rows:,} rollouts: built in {seconds:.0f} s, {size / 1e6:.0f} MB ({size / rows:.0f} B each)\n")
    with RunReader(folder) as reader:
        last = reader.last_step() or 0
        cursor = reader.page(limit=1, offset=int(rows * 0.9)).next
    asked: dict[str, Callable[[RunReader], object]] = {
        "first page": lambda r: r.page(),
        "newest first": lambda r: r.page(newest_first=True),
        "after a cursor, 90 % deep": lambda r: r.page(after=cursor),
        "offset 50 %": lambda r: r.page(offset=rows // 2),
        "offset 99 %": lambda r: r.page(offset=int(rows * 0.99)),
        "one step": lambda r: r.page(Filter(step=last // 2)),
        "one task": lambda r: r.page(Filter(task_id="task-7")),
        "one task, newest first": lambda r: r.page(Filter(task_id="task-7"), newest_first=True),
        "failed (1 in 1,000)": lambda r: r.page(Filter(status="failed")),
        "failed, offset 80 %": lambda r: r.page(Filter(status="failed"), offset=int(rows * 0.0008)),
        "reward above 0.5": lambda r: r.page(Filter(reward_min=0.5)),
        "reward 1, only in the last 2 % of steps": lambda r: r.page(Filter(reward_min=1.0)),
        "reward 0.12345 to 0.12355 (rare)": lambda r: r.page(Filter(reward_min=0.12345, reward_max=0.12355)),
        "one task, reward above 0.5": lambda r: r.page(Filter(task_id="task-7", reward_min=0.5)),
        "evaluation": lambda r: r.page(Filter("eval")),
        "nothing there": lambda r: r.page(Filter(reward_min=7.0)),
        "count": lambda r: r.count(),
        "count of failed": lambda r: r.count(Filter(status="failed")),
        "count of reward above 0.5 (to 10,000)": lambda r: r.count(Filter(reward_min=0.5)),
        "one rollout in full": lambda r: r.rollout(rows // 2),
        "a metric's series": lambda r: r.series("reward/mean"),
    }
    print(f"{'page of ' + str(PAGE):45}{'median ms':>10}{'worst ms':>10}{'rows':>8}")
    for name, ask in asked.items():
        times = []
        for _ in range(7):
            with RunReader(folder) as reader:
                start = time.perf_counter()
                answer = ask(reader)
                times.append((time.perf_counter() - start) * 1000)
        found = len(answer.rows) if hasattr(answer, "rows") else "-"
        print(f"{name:45}{statistics.median(times):10.2f}{max(times):10.2f}{found:>8}")


def build(folder: Path, rows: int, per_step: int) -> None:
    """Steps as the run store writes them, but many in a transaction."""
    RunStore(folder, OrchestratorConfig()).close()
    db = open_writer(folder)
    random = np.random.default_rng(0)
    steps = -(-rows // per_step)
    left = rows
    for first in range(1, steps + 1, STEPS_PER_TRANSACTION):
        db.execute("BEGIN")
        for step in range(first, min(first + STEPS_PER_TRANSACTION, steps + 1)):
            groups = small_groups(random, step, min(per_step, left), late=step > 0.98 * steps)
            left -= per_step
            write_record(db, "train", step, float(step), {"reward/mean": step / steps, "train/loss": 0.1}, groups)
        write_record(db, "eval", first, float(first), {"eval/mean": 0.5}, small_groups(random, first, 16))
        db.execute("COMMIT")
    db.close()


def small_groups(random: np.random.Generator, step: int, count: int, late: bool = False) -> list[Group]:
    """`count` rollouts of 4 tokens, 4 to a task of a thousand tasks, one in a thousand failed."""
    groups = []
    for first in range(0, count, 4):
        task = Task(f"task-{random.integers(1000)}", "Write a function.")
        rollouts = []
        for attempt in range(min(4, count - first)):
            sample = Sample([1, 2, 3], [5, 6, 7, 8], [-0.5, -0.25, -1.0, -2.0], [1] * 4, step)
            reward = 1.0 if late and attempt == 0 else float(random.random() * 0.9)
            rollout = Rollout(f"{step}-{task.id}-{attempt}", task.id, attempt, [], [sample], task.prompt, "", reward)
            if random.random() < 0.001:
                rollout.fail("SandboxError: no answer")
            rollouts.append(rollout)
        groups.append(Group(task, rollouts))
    return groups


# --- writing ----------------------------------------------------------------------------------------------------------


def writing(folder: Path, steps: int, per_step: int, tokens: int, step_seconds: float) -> None:
    """Bytes per rollout; the time the loop waits for `write_step`, and the CPU time of the writing thread."""
    random = np.random.default_rng(0)
    batches = [full_groups(random, step, per_step, tokens) for step in range(1, steps + 1)]
    metrics = {f"train/metric_{index}": 0.5 for index in range(40)}
    store = RunStore(folder, OrchestratorConfig())
    calls, thread = [], []
    for step, groups in enumerate(batches, 1):
        cpu = time.process_time()
        start = time.perf_counter()
        store.write_step(step, metrics, groups)
        calls.append(time.perf_counter() - start)
        store.flush()
        thread.append(time.process_time() - cpu)
    store.close()
    size = (folder / "run.db").stat().st_size / (steps * per_step)
    texts = sum(len(r.messages[-1]["content"]) for r in batches[0][0].rollouts) / len(batches[0][0].rollouts)
    call, work = statistics.median(calls), statistics.median(thread)
    print(f"\nsteps of {per_step} rollouts of {tokens} tokens ({texts:.0f} characters of text)")
    print(f"{'bytes of a rollout':45}{size:10.0f}")
    print(f"{'write_step, ms (share of a step)':45}{call * 1000:10.2f}   {call / step_seconds:.4%}")
    print(f"{'writing thread, ms of CPU (at most; share)':45}{work * 1000:10.2f}   {work / step_seconds:.4%}")
    print(f"a step counts {step_seconds:g} s (--step-seconds)")


def full_groups(random: np.random.Generator, step: int, count: int, tokens: int) -> list[Group]:
    """Rollouts with token ids and text of a few words, and random logprobs in float32."""
    groups = []
    for first in range(0, count, 8):
        task = Task(f"{step}-{first}", "Write a function f(a, b).", {"answer": "x" * 200})
        rollouts = []
        for attempt in range(min(8, count - first)):
            words = random.integers(0, len(WORDS), tokens)
            ids = np.where(random.random(tokens) < 0.3, random.integers(0, 150_000, tokens), WORD_IDS[words])
            text = " ".join(
                WORDS[word] if word % 3 else f"x{identifier}" for word, identifier in zip(words, ids, strict=True)
            )
            logprobs = (-random.exponential(0.5, tokens)).astype("f4").tolist()
            sample = Sample(list(range(100)), ids.tolist(), logprobs, [1] * tokens, step)
            sample.trainer_gap = (random.standard_normal(tokens) * 1e-3).tolist()
            messages = [{"role": "user", "content": task.prompt}, {"role": "assistant", "content": text}]
            rollouts.append(
                Rollout(
                    f"{task.id}-{attempt}", task.id, attempt, messages, [sample], task.prompt, text, 0.5, {"f": 0.5}
                )
            )
        groups.append(Group(task, rollouts))
    return groups


if __name__ == "__main__":
    main()
