"""Log-probabilities of a batch's tokens, forward and backward, by several ways: seconds, and memory beyond the inputs.

    python benchmarks/logprob_memory.py                              # 16 × 512 tokens, 151,936 words: minutes, 16 GB
    python benchmarks/logprob_memory.py --tokens 1024 --words 32000  # a look

Each way runs in a process of its own. The memory is the process's peak beyond what it held before (the gradients of
hidden states and head included, which every way makes); the time is the median of the repeats, the entropy included.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

TRL_CHUNK = 32_768
"""Words of a tile, as TRL's trainers take by default."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16 * 512)
    parser.add_argument("--words", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run(options.child, options)))
        return
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("trl", "torch"))
    sizes = f"{options.tokens} tokens, {options.words} words, hidden {options.hidden}"
    print(f"{versions}; {options.threads} CPU threads, {options.dtype}; {sizes}\n")
    print("| way | seconds | extra memory, GB | time against full logits | memory against full logits |")
    print("|---|---|---|---|---|", flush=True)
    full = None
    for way in options.ways:
        found = measure(way, options)
        full = found if way == "full logits" else full
        ratios = " | "
        if full is not None:
            ratios = f"{found['seconds'] / full['seconds']:.2f} | 1/{full['gb'] / found['gb']:.0f}"
        print(f"| {way} | {found['seconds']:.2f} | {found['gb']:.2f} | {ratios} |", flush=True)


def measure(way: str, options: argparse.Namespace) -> dict[str, float]:
    """One way in a process of its own."""
    names = ("tokens", "words", "hidden", "dtype", "repeats")
    arguments = [text for name in names for text in (f"--{name}", str(getattr(options, name)))]
    done = subprocess.run(
        [sys.executable, __file__, "--child", way, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{way} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(way: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds and gigabytes, in this process."""
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    hidden = (torch.randn(options.tokens, options.hidden) * 0.5).to(dtype).requires_grad_()
    weight = (torch.randn(options.words, options.hidden) * 0.05).to(dtype).requires_grad_()
    targets, upstream = torch.randint(0, options.words, (options.tokens,)), torch.randn(options.tokens)
    way_of = WAYS[way]
    way_of(hidden[:8], weight[:64], targets[:8] % 64).sum().backward()  # imports, threads
    hidden.grad = weight.grad = None
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9
    seconds = []
    for _ in range(options.repeats):
        hidden.grad = weight.grad = None
        start = time.perf_counter()
        (way_of(hidden, weight, targets) * upstream).sum().backward()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6 * 1.024
    return {"seconds": statistics.median(seconds), "gb": peak - before}


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """What a trainer does that has its model return logits. The entropy goes in pieces: it need not take memory."""
    log_p = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    with torch.no_grad():
        for piece in log_p.split(128):
            -(piece.exp() * piece).sum(dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1)


def trl_chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """TRL's fused head, as its GRPO trainer asks for it."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    apply: Any = ChunkedLogProbFunction.apply
    logprobs: Tensor = apply(hidden, weight, None, targets, 1.0, TRL_CHUNK, None, 1.0, ("entropy",))[0]
    return logprobs


def mrl_tiles(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """What the actor does."""
    from mrl.algorithms.logprobs import token_logprobs

    return token_logprobs(hidden, weight, None, targets)[0]


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "full logits": full_logits,
    "TRL, chunked": trl_chunked,
    "mrl": mrl_tiles,
}

if __name__ == "__main__":
    main()
