"""How long the logs page takes with a large run: every view over HTTP, and the first paint in Chromium.

    python benchmarks/logs_page.py                                  # a small run: half a minute
    python benchmarks/logs_page.py --steps 1000 --per-step 512      # the size the limit is stated for
    python benchmarks/logs_page.py --folder FOLDER --chromium       # keep the store; first paint too (needs Playwright)

Seconds are of a client on this machine, warm: the first request of each kind is not counted, but shown.
"""

from __future__ import annotations

import argparse
import importlib
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn

from mrl.config import OrchestratorConfig
from mrl.logs.app import create_app
from mrl.logs.catalog import Catalog
from mrl.logs.serve import take_address
from mrl.store.read import RunReader
from mrl.store.record import write_record
from mrl.store.run import RunStore
from mrl.store.schema import open_writer
from mrl.types import Group, Rollout, Sample, Task

GROUP = 8
TASKS = 2000
TOKENS = 64
STEPS_PER_TRANSACTION = 50
METRICS = (
    *("reward/mean", "reward/std", "reward/pass_rate", "reward/tests/mean", "reward/tests/std", "train/loss"),
    *("train/grad_norm", "train/entropy", "train/kl", "train/sampler_kl", "train/logprob_gap"),
    *("train/logprob_gap_max", "train/clipped_low_fraction", "train/clipped_high_fraction", "train/learning_rate"),
    *("rollout/completion_length_mean", "rollout/completion_length_max", "rollout/tokens_per_second"),
    *("rollout/truncated_fraction", "rollout/failed_fraction", "rollout/staleness_mean", "rollout/staleness_max"),
    *("time/generate", "time/reward", "time/train", "time/sync", "time/wait", "reward/zero_variance_groups"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--per-step", type=int, default=64, help="rollouts of a step")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where the store is kept (default: a temporary folder)")
    parser.add_argument("--chromium", action="store_true", help="measure the first paint as well")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="mrl-logs-page-"))
    try:
        if not (folder / "big").exists():
            build(folder / "big", options.steps, options.per_step)
        measure(folder, options.repeats, options.chromium)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)


def build(folder: Path, steps: int, per_step: int) -> None:
    """Steps as the run store writes them, but many in a transaction."""
    start = time.perf_counter()
    RunStore(folder, OrchestratorConfig.from_flat(model="starter", max_steps=steps)).close()
    db, random = open_writer(folder), np.random.default_rng(0)
    for first in range(1, steps + 1, STEPS_PER_TRANSACTION):
        db.execute("BEGIN")
        for step in range(first, min(first + STEPS_PER_TRANSACTION, steps + 1)):
            metrics = {name: float(random.random()) for name in METRICS}
            write_record(db, "train", step, time.time(), metrics, groups_of(random, step, per_step))
            if step % 50 == 0:
                write_record(db, "eval", step, time.time(), {"eval/mean": 0.5}, groups_of(random, step, 64))
        db.execute("COMMIT")
    db.close()
    count, seconds = steps * per_step, time.perf_counter() - start
    size = (folder / "run.db").stat().st_size
    print(
        f"{steps:,} steps x {per_step} rollouts: built in {seconds:.0f} s, {size / 1e6:.0f} MB "
        f"({size / count:.0f} B each)"
    )


def groups_of(random: np.random.Generator, step: int, count: int) -> list[Group]:
    """Completions of some words and numbers; a word in one of a hundred thousand is `needle`."""
    groups = []
    for first in range(0, count, GROUP):
        task = Task(f"task-{random.integers(TASKS):04d}", "Write a function f(a, b) that returns a + b.")
        rollouts = []
        for attempt in range(min(GROUP, count - first)):
            tokens = int(random.integers(24, TOKENS))
            ids = random.integers(0, 500, tokens).tolist()
            found = " needle" if random.random() < 1e-5 else ""
            text = f"def f(a, b):\n    x{ids[0]} = a + {ids[1]}\n    return x{ids[0]} + b{found}\n" + " ".join(
                map(str, ids[:24])
            )
            logprobs = (-random.exponential(0.5, tokens)).astype("f4").tolist()
            reason: Any = "length" if random.random() < 0.02 else "stop"
            sample = Sample([1, 2, 3], ids, logprobs, [1] * tokens, step - 1, reason)
            messages = [{"role": "user", "content": task.prompt}, {"role": "assistant", "content": text}]
            reward = float(random.random() < step / 1500)
            rollout = Rollout(
                f"{step}-{first}-{attempt}", task.id, attempt, messages, [sample], task.prompt, text, reward
            )
            rollout.rewards, rollout.advantage = {"tests": reward}, reward - 0.5
            if random.random() < 0.001:
                rollout.fail("SandboxError: no answer")
            rollouts.append(rollout)
        groups.append(Group(task, rollouts))
    return groups


def measure(folder: Path, repeats: int, chromium: bool) -> None:
    """Print the times of each view."""
    address = take_address("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(Catalog(None, folder)), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [address.socket]}, daemon=True)
    thread.start()
    importlib.import_module("scipy.stats")  # as `serve` does
    with RunReader(folder / "big") as reader:
        task = reader.tasks(limit=1)[0]["id"]
        count, last = reader.count(), reader.last_step() or 0
        deep = reader.page(limit=1, offset=int(count * 0.1)).next
        by_reward = reader.page(limit=1000, order="reward", newest_first=True).next
    assert deep is not None
    assert by_reward is not None
    base = "/run/big/rollouts"
    charts = "&".join(f"metric={name}" for name in METRICS)
    views = {
        "runs": "/",
        "run, its page": "/run/big",
        "run, all points of its curves": f"/run/big/series.json?{charts}",
        "rollouts, newest first": base,
        "rollouts, after a cursor 90 % deep": f"{base}?after={deep[0]}.{deep[1]}",
        "rollouts of a step": f"{base}?step={last // 2}",
        "rollouts of a task": f"{base}?task={task}",
        "failed, 90 % deep": f"{base}?status=failed&after={deep[0]}.{deep[1]}",
        "truncated, reward 1, 90 % deep": f"{base}?truncated=yes&min=1&after={deep[0]}.{deep[1]}",
        "of a policy version": f"{base}?version={last // 2}",
        "by reward, after 1,000": f"{base}?order=reward&after={by_reward[0]}.{by_reward[1]}",
        "by tokens, lowest first": f"{base}?order=tokens&up=1",
        "by tokens, rewards that none has": f"{base}?order=tokens&min=5&max=6",
        "reward 1, lowest advantage first": f"{base}?order=advantage&up=1&min=1",
        "truncated, by advantage": f"{base}?truncated=yes&order=advantage",
        "text, in most": f"{base}?text=return",
        "text, in hardly any: the first answer": f"{base}?text=needle",
        "one rollout": f"/run/big/rollout/{count // 2}",
        "one rollout, tokens": f"/run/big/rollout/{count // 2}?view=tokens",
        "a group": f"/run/big/group/train/{last // 2}/3",
        "a task over time": f"/run/big/task?id={task}",
        "evaluations": "/evals",
    }
    print(f"\n{count:,} rollouts\n\n| view | median s | worst s | first s | kB |\n|---|---|---|---|---|")
    with httpx.Client(base_url=address.url, timeout=60) as client:
        for name, path in views.items():
            times = []
            for _ in range(repeats + 1):
                start = time.perf_counter()
                answer = client.get(path)
                times.append(time.perf_counter() - start)
                assert answer.status_code == 200, (path, answer.text[:300])
            first, *rest = times
            size = len(answer.content) / 1000
            print(f"| {name} | {statistics.median(rest):.3f} | {max(rest):.3f} | {first:.3f} | {size:.0f} |")
        start, path, answers = time.perf_counter(), f"{base}?text=needle", 0
        while "searching on" in (text := client.get(path).text):
            path, answers = _next(text, 'class="note" hx-get="'), answers + 1
        seconds = time.perf_counter() - start
        print(
            f"\ntext in hardly any, to the end: {seconds:.1f} s, {answers + 1} answers, "
            f"{count / seconds:,.0f} rollouts/s"
        )
        start, text = time.perf_counter(), client.get(f"{base}?text=return").text
        while "counting on" in text:
            text = client.get(_next(text, 'id="matches" hx-get="')).text
        said = text.split('id="matches">')[1].split("</span>")[0].replace("<b>", "").replace("</b>", "")
        print(f"text in most, until the number is known ({said}): {time.perf_counter() - start:.1f} s")
    if chromium:
        paint(address.url, ["/", "/run/big", base, f"/run/big/rollout/{count // 2}", "/evals"], repeats)
    server.should_exit = True
    thread.join(10)


def _next(text: str, before: str) -> str:
    return text.split(before)[1].split('"')[0].replace("&amp;", "&")


def paint(url: str, paths: list[str], repeats: int) -> None:
    """First contentful paint, each time in a fresh context without a cache; and when all curves are drawn."""
    from playwright.sync_api import sync_playwright

    from mrl.environments.miniwob.browser import find_chromium

    entry = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    print("\n| page | first paint, median s | worst s | curves drawn, median s |\n|---|---|---|---|")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_chromium(), chromium_sandbox=False, args=["--disable-gpu"]
        )
        for path in paths:
            painted, drawn = [], []
            for _ in range(repeats):
                context = browser.new_context(base_url=url)
                page = context.new_page()
                page.goto(path)
                if path == "/run/big":
                    page.wait_for_selector("html[data-drawn]")
                    drawn.append(page.evaluate("performance.now()") / 1000)
                while (at := page.evaluate(entry)) is None:
                    page.wait_for_timeout(50)
                painted.append(at / 1000)
                context.close()
            last = f"{statistics.median(drawn):.2f}" if drawn else ""
            print(f"| {path} | {statistics.median(painted):.2f} | {max(painted):.2f} | {last} |")
        browser.close()


if __name__ == "__main__":
    main()
