"""What a person looks at when a run has ended: the reward curve, and samples from before and after."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.store.filters import Filter
from mrl.store.read import RunReader
from mrl.types import Rollout

SMOOTHING_STEPS = 10
SHOWN = (("reward", "reward/mean", "pass rate", "eval/pass_rate"), ("loss", "train/loss", "loss", "eval/loss"))
"""What is drawn, in training and on held-out data: the first that the run recorded."""


@dataclass
class Curve:
    """A run's rewards by step; its losses, where it trained on examples and had no rewards."""

    steps: list[int]
    rewards: list[float]
    eval_steps: list[int]
    eval_pass_rates: list[float]
    what: str = "reward"
    eval_what: str = "pass rate"

    @property
    def smoothed(self) -> list[float]:
        """Mean of each step and the up to nine before it."""
        windows = [self.rewards[max(0, i - SMOOTHING_STEPS + 1) : i + 1] for i in range(len(self.rewards))]
        return [sum(window) / len(window) for window in windows]


def read_curve(run: Path) -> Curve:
    """The rewards recorded in a run's folder. Raises StoreError when it has no store that can be read."""
    with RunReader(run) as reader:
        what, name, eval_what, eval_name = next((s for s in SHOWN if reader.series(s[1])), SHOWN[0])
        trained, held_out = reader.series(name), reader.series(eval_name, "eval")
    return Curve(
        [step for step, _ in trained],
        [value for _, value in trained],
        [step for step, _ in held_out],
        [value for _, value in held_out],
        what,
        eval_what,
    )


def first_and_last_reward(run: Path) -> tuple[float, float] | None:
    """Mean rewards of the first step that has one and of the last. Raises StoreError."""
    with RunReader(run) as reader:
        rewards = [value for _, value in reader.series(SHOWN[0][1])]
    return (rewards[0], rewards[-1]) if rewards else None


def shown_completion(rollout: Rollout) -> str:
    """A rollout as text: task, reward or why there is none, prompt, completion."""
    scored = f"not scored: {rollout.error}" if rollout.reward is None else f"reward {rollout.reward:g}"
    prompt, completion = _text(rollout.prompt).strip(), _text(rollout.completion).strip()
    cut = f"  (cut at {rollout.limit or 'the token limit'})" if rollout.truncated else ""
    return f"[{rollout.task_id}] {scored}\nprompt: {prompt}\ncompletion{cut}: {completion}"


def write_png(run: Path) -> Path | None:
    """Draw the curve as a picture in the run's folder; None when no step was recorded."""
    curve = read_curve(run)
    if not curve.steps:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(curve.steps, curve.rewards, color="tab:blue", alpha=0.3, linewidth=1, label=f"{curve.what} of each step")
    axes.plot(curve.steps, curve.smoothed, color="tab:blue", linewidth=2, label=f"mean of {SMOOTHING_STEPS} steps")
    if curve.eval_steps:
        axes.plot(
            curve.eval_steps, curve.eval_pass_rates, "o-", color="tab:orange", label=f"held-out {curve.eval_what}"
        )
    axes.set(xlabel="step", ylabel=curve.what, title=run.name)
    axes.grid(alpha=0.3)
    axes.legend(loc="best")
    path = run / f"{curve.what}.png"
    figure.savefig(path, dpi=130)
    return path


def draw_terminal(run: Path, width: int = 76, height: int = 16) -> str:
    """The same curve in characters; an empty string when no step was recorded."""
    curve = read_curve(run)
    if not curve.steps:
        return ""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    plotext.plot(curve.steps, curve.smoothed, label=f"{curve.what} (mean of {SMOOTHING_STEPS} steps)", marker="braille")
    if curve.eval_steps:
        plotext.plot(curve.eval_steps, curve.eval_pass_rates, label=f"held-out {curve.eval_what}", marker="o")
    plotext.xlabel("step")
    return str(plotext.uncolorize(plotext.build()))


def before_and_after(run: Path, count: int = 5) -> list[dict[str, Any]]:
    """The same held-out tasks attempted by the first and by the last policy: prompt, both completions, both rewards.

    Tasks whose reward changed are shown in proportion to their number, improved or not. Empty when the run was not
    evaluated at least twice.
    """
    with RunReader(run) as reader:
        steps = [row["step"] for row in reader.steps("eval")]
        if len(steps) < 2:
            return []
        first, last = (
            {row["task_id"]: row for row in reader.rollouts(Filter("eval", step=step))}
            for step in (steps[0], steps[-1])
        )
    pairs = [
        {
            "task_id": task_id,
            "prompt": _text(first[task_id]["prompt"]),
            "before": _text(first[task_id]["completion"]),
            "before_reward": first[task_id]["reward"],
            "after": _text(last[task_id]["completion"]),
            "after_reward": last[task_id]["reward"],
        }
        for task_id in first
        if task_id in last
    ]
    changed = [p for p in pairs if p["before_reward"] != p["after_reward"]]
    same = [p for p in pairs if p["before_reward"] == p["after_reward"]]
    take = max(round(count * len(changed) / max(len(pairs), 1)), count - len(same))
    return _evenly(changed, take) + _evenly(same, count - take)


def _evenly(items: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    if count <= 0 or not items:
        return []
    stride = max(1, len(items) // count)
    return items[::stride][:count]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(str(message.get("content", "")) for message in value)
