"""Every benchmark runs, on sizes that measure nothing, and prints its rows."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
QUICK: dict[str, tuple[str, str]] = {
    "actor_ranks": ("--ranks 2 --ways fsdp --layers 2 --hidden 64", "fsdp, 2 ranks"),
    "decode": ("--only 1M --case equal --repeats 1", "equal prompts"),
    "evaluation_concurrency": ("--rows 2 --milliseconds 1 --repeats 1", "x the 0.003 s of the steps"),
    "logs_page": ("--steps 60 --per-step 32 --repeats 1", "rollouts/s"),
    "logprob_memory": ("--tokens 64 --words 500 --hidden 16 --repeats 1", "TRL"),
    "multi_turn": ("--rollouts 16 --turns 3 --sleep 0.02 --rounds 1", "prefill computed / unique"),
    "overhead": ("--quick --steps 3", "%"),
    "recovery": ('--faults "a reward worker"', "| a reward worker |"),
    "replay_rounding": ("--quick --dtypes float32", "one logprob"),
    "run_store": ("--rows 400 --per-step 8 --tokens 20 --steps 2 --step-seconds 0.1", "ms"),
    "sandbox": ("--seconds 0.5", "programs, one sleeping"),
    "scaling": (
        "--workers 1 2 --modes queue --slots 8 --tokens 32 --prompt-tokens 8 --steps 1 --fanout-mb 1 --repeat 1",
        "| network | 2 |",
    ),
    "vs_trl": ("--quick --lengths tail --sides mrl TRL --steps 1 --rounds 1", "TRL"),
}
VLLM: dict[str, tuple[str, str]] = {
    "overlap": ("--modes pipeline --lengths tail --steps 6 --prompts 2 --limit 16", "pipeline"),
    "weight_sync": ("--shapes 1m --methods direct,reload,volume,delta --repeat 1", "x write+read"),
}


def output_of(name: str, arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *shlex.split(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ.copy(), timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_all_are_listed_here() -> None:
    assert {path.stem for path in BENCHMARKS.glob("*.py")} == {*QUICK, *VLLM}


LONG = ("decode", "overhead", "recovery", "replay_rounding", "sandbox", "vs_trl")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if name in LONG else pytest.mark.slow) for name in QUICK]
)
def test_benchmark(name: str) -> None:
    arguments, printed = QUICK[name]
    assert printed in output_of(name, arguments)


@pytest.mark.soak
@pytest.mark.vllm
@pytest.mark.parametrize("name", VLLM)
def test_benchmark_with_vllm(name: str) -> None:
    arguments, printed = VLLM[name]
    assert printed in output_of(name, arguments)
