"""Generating while training: the step's time against the longer of its two parts, and the reward at equal samples.

    python benchmarks/overlap.py --vllm-python .venv-vllm/bin/python     # vLLM in a process of its own
    python benchmarks/overlap.py --engine transformers                   # no vLLM: two threads of one process

One thread each for generation and training, so that two cores hold both. The synchronous run says how long generation
and the rest (rewards, training, weight sync) take; no overlap can make a step shorter than the longer of the two.
The reward is the share of a completion's tokens from the lower half of the vocabulary, which the policy learns.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

SHAPE = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "heads": 8}
MODES: dict[str, dict[str, Any]] = {
    "off": {},
    "pipeline": {"async_mode": "pipeline"},
    "queue, staleness 1": {"async_mode": "queue", "max_staleness": 1},
    "queue, staleness 2": {"async_mode": "queue", "max_staleness": 2},
}
WARM_UP = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="vllm")
    parser.add_argument("--vllm-python", help="interpreter of the environment that has vLLM (default: this one)")
    parser.add_argument("--lengths", choices=["fixed", "tail"], nargs="+", default=["fixed", "tail"])
    parser.add_argument("--modes", choices=list(MODES), nargs="+", default=list(MODES), help="beside `off`")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--limit", type=int, default=96, help="longest completion, in tokens")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    for lengths in options.lengths:
        print(f"\n{options.engine}, lengths: {lengths}\n")
        print("| mode | step, s | longer part, s | ratio | first quarter | last quarter | staleness | dropped |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
        longer = 0.0
        for mode in dict.fromkeys(["off", *options.modes]):
            changes = MODES[mode]
            with tempfile.TemporaryDirectory(prefix="mrl-overlap-") as folder:
                rows = run(Path(folder), options, lengths, changes)
            counted = rows[WARM_UP:]
            if mode == "off":
                generation = statistics.median(row["time/generate"] for row in counted)
                rest = statistics.median(row["time/step"] - row["time/generate"] for row in counted)
                longer = max(generation, rest)
            # What a step takes in the long run: the mean, since with a queue steps differ.
            step = statistics.fmean(row["time/step"] for row in counted)
            quarter = len(rows) // 4
            rewards = [row["reward/mean"] for row in rows]
            first, last = statistics.fmean(rewards[:quarter]), statistics.fmean(rewards[-quarter:])
            staleness = statistics.fmean(row.get("rollout/staleness_mean", 0.0) for row in counted)
            dropped = sum(row.get("rollout/dropped_groups", 0.0) for row in rows)
            print(
                f"| {mode} | {step:.2f} | {longer:.2f} | {step / longer:.2f} | {first:.3f} | {last:.3f} "
                f"| {staleness:.2f} | {dropped:.0f} |",
                flush=True,
            )


def run(folder: Path, options: argparse.Namespace, lengths: str, changes: dict[str, Any]) -> list[dict[str, float]]:
    """The metrics of every step."""
    from vs_trl import GENERATIONS, LIMITS, MODELS, PROMPT_TOKENS, build_model

    from mrl import MRLTrainer
    from mrl.store.run import read_rows

    MODELS["overlap"], LIMITS["overlap"] = SHAPE, options.limit
    build_model(folder / "model", "overlap", lengths)
    engine = {"engine": options.engine}
    if options.engine == "vllm":
        engine |= {"vllm_python": options.vllm_python, "vllm_kv_cache_gb": 0.5}
    trainer = MRLTrainer(
        model=str(folder / "model"),
        train_dataset=[
            {"prompt": " ".join(f"w{100 + (37 * row + 11 * i) % 800}" for i in range(PROMPT_TOKENS))}
            for row in range(64)
        ],
        reward_funcs=lower_half,
        max_steps=options.steps,
        batch_size=options.prompts,
        num_generations=GENERATIONS,
        max_completion_length=options.limit,
        learning_rate=1e-3,
        temperature=1.0,
        top_p=1.0,
        device="cpu",
        num_rollout_workers=1,
        run_dir=str(folder / "run"),
        report_to=[],
        **engine,
        **changes,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return list(read_rows(folder / "run", "metrics"))


def lower_half(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Share of tokens from the lower half of the vocabulary. The end (id 0) is none, or ending at once would pay."""
    words = [[token for token in ids if token] for ids in completion_ids]
    return [sum(token < SHAPE["vocab_size"] // 2 for token in ids) / max(1, len(ids)) for ids in words]


if __name__ == "__main__":
    main()
