"""Runs the examples that learn over several turns, and draws how they learn: docs/learning-turns.svg, and a table.

    python scripts/learning_turns.py                                       # all of them, and the picture
    python scripts/learning_turns.py --tasks number_guessing --seeds 0   # one, and the picture of what there is
    python scripts/learning_turns.py --seeds                               # the picture alone

What each run came to at each evaluation is kept in docs/learning-turns.csv.
"""

from __future__ import annotations

import argparse
import csv
import platform
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

from mrl.store.run import read_rows

ROOT = Path(__file__).parent.parent
ROWS = ROOT / "docs" / "learning-turns.csv"
PICTURE = ROWS.with_suffix(".svg")
COLUMNS = ("task", "rewards", "seed", "step", "success", "seconds")
TASKS = {"number_guessing": "number guessing", "asking_around": "tools"}
REWARDS = {"outcome": [], "steps": ["--step-rewards"]}
Row = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--rewards", nargs="*", choices=REWARDS, default=list(REWARDS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # one beginner for all runs of a task
        for seed, task, rewards in product(chosen.seeds, chosen.tasks, chosen.rewards):
            key = {"task": task, "rewards": rewards, "seed": str(seed)}
            points = curve(task, REWARDS[rewards], seed, Path(folder))
            kept = [row for row in read() if not key.items() <= row.items()]
            write(kept + [key | point for point in points])
    rows = read()
    draw(rows)
    report(rows)


def curve(task: str, flags: list[str], seed: int, folder: Path) -> list[Row]:
    """A run of the example: success on held-out tasks at each evaluation, and the seconds of all of it."""
    before, start = set(folder.glob("runs/*")), time.perf_counter()
    command = [sys.executable, str(ROOT / "examples" / f"{task}.py"), "--seed", str(seed), *flags]
    subprocess.run(command, cwd=folder, check=True)
    seconds = time.perf_counter() - start
    (run,) = set(folder.glob("runs/*")) - before
    return [
        {"step": str(row["step"]), "success": f"{row['eval/pass_rate']:.4f}", "seconds": f"{seconds:.0f}"}
        for row in read_rows(run, "eval_metrics")
    ]


def read() -> list[Row]:
    return list(csv.DictReader(ROWS.open())) if ROWS.exists() else []


def write(rows: list[Row]) -> None:
    with ROWS.open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(sorted(rows, key=lambda row: (row["task"], row["rewards"], int(row["seed"]), int(row["step"]))))


def curves(rows: list[Row], task: str, rewards: str) -> dict[str, list[Row]]:
    """By seed."""
    found = [row for row in rows if (row["task"], row["rewards"]) == (task, rewards)]
    seeds = sorted({row["seed"] for row in found})
    return {seed: sorted((r for r in found if r["seed"] == seed), key=lambda r: int(r["step"])) for seed in seeds}


def draw(rows: list[Row]) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "learning-turns"  # the same picture from the same rows
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (task, title) in zip(figure.subplots(1, len(TASKS), sharey=True), TASKS.items(), strict=True):
        for rewards, colour in zip(REWARDS, ("tab:blue", "tab:orange"), strict=True):
            for number, points in enumerate(curves(rows, task, rewards).values()):
                label = {"outcome": "reward at the end", "steps": "step rewards alone"}[rewards]
                steps, rates = [int(p["step"]) for p in points], [100 * float(p["success"]) for p in points]
                axes.plot(steps, rates, ".-", color=colour, alpha=0.7, label=None if number else label)
        for rate in (30, 80):
            axes.axhline(rate, color="grey", linewidth=0.8, linestyle=":")
        axes.set(title=title, xlabel="step", ylim=(0, 100))
        axes.grid(alpha=0.2)
    figure.axes[0].set_ylabel("held-out success, %")
    figure.axes[0].legend(loc="lower right")
    figure.savefig(PICTURE, metadata={"Date": None})


def report(rows: list[Row]) -> None:
    print(f"Python {platform.python_version()}\n\n| task | rewards | seed | before | after | seconds |")
    print("|---|---|---|---:|---:|---:|")
    for task, title in TASKS.items():
        for rewards in REWARDS:
            for seed, points in curves(rows, task, rewards).items():
                before, after = (100 * float(points[end]["success"]) for end in (0, -1))
                print(f"| {title} | {rewards} | {seed} | {before:.1f} % | {after:.1f} % | {points[0]['seconds']} |")


if __name__ == "__main__":
    main()
