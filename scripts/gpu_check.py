"""Ten minutes on one GPU: does mrl compute there what it computes on the CPU, how fast, and next to TRL?

    python scripts/gpu_check.py                      # everything that is installed; writes gpu-check.json
    python scripts/gpu_check.py --parts decode vllm  # some of it
    python scripts/gpu_check.py --device cpu         # what can run without a GPU, to try the script itself

Nothing is downloaded: models are the shipped starter policy and random ones made here. Each part is a function of
gpu_checks/ and runs in a process of its own, so that one that fails, or hangs, says so and the others go on. The report
holds versions, the GPU's name and memory, numbers, lines of code at which the host waits and error messages, nothing
else of the machine; docs/gpu.md says where to send it.

Exit code 0: all that ran was right. 1: something was not. 2: there is no GPU here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from gpu_checks.report import Part, lines_of, tried

MODULES = {
    "machine": ("machine",),
    "numbers": ("logprobs", "products"),
    "sampling": ("decode", "graphs"),
    "training": (
        *("train_full", "train_bfloat16", "train_lora", "train_reference"),
        *("train_offload", "train_checkpointing", "train_compiled", "train_liger"),
    ),
    "resources": ("waits", "micro_batches", "residence"),
    "runs": ("checkpoints", "sync_methods"),
    "serving": ("vllm", "colocate"),
    "beside_trl": ("trl",),
}
"""The parts, in the order in which they run, by the module of gpu_checks/ that has them."""
PARTS = {part: module for module, parts in MODULES.items() for part in parts}
SECONDS = 240.0
"""A part may take; those with vLLM three times as long."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="the report (default: %(default)s)")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = "cuda:0" if options.device == "cuda" else "cpu"
    if options.child:
        print(json.dumps(tried(part(options.child), device)))
        return 0
    if options.device == "cuda" and not has_gpu():
        print("torch sees no GPU here. `--device cpu` runs what can run without one.", file=sys.stderr)
        return 2
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mrl-gpu-check-") as scratch:
        for name in options.parts:
            found[name] = in_a_process(name, options.device, scratch)
            print("\n".join(lines_of(name, found[name])), flush=True)
            options.out.write_text(json.dumps({"device": options.device, "parts": found}, indent=1) + "\n")
    wrong = [name for name, result in found.items() if result["outcome"] not in ("right", "skipped")]
    print(f"\n{len(found) - len(wrong)} of {len(found)} parts are as they should be. Report: {options.out}")
    if wrong:
        print(f"Not: {', '.join(wrong)}")
    return 1 if wrong else 0


def part(name: str) -> Part:
    """Imported only in the process that runs it: what cannot be imported concerns no other part."""
    found: Part = getattr(import_module(f"gpu_checks.{PARTS[name]}"), name)
    return found


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def in_a_process(name: str, device: str, scratch: str) -> dict[str, Any]:
    """What a part found, or how it ended."""
    command = [sys.executable, __file__, "--child", name, "--device", device]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "GPU_CHECK_SCRATCH": scratch}
    limit = SECONDS * (3 if name in ("vllm", "colocate") else 1)
    start = time.perf_counter()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"outcome": "hangs", "error": f"not done after {limit:.0f} s", "seconds": limit}
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        found = {"outcome": "died", "error": f"exit code {done.returncode}\n{done.stderr[-2000:]}"}
    return found | {"seconds": round(time.perf_counter() - start, 1)}


if __name__ == "__main__":
    sys.exit(main())
