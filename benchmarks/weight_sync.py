"""Seconds and bytes of every way of sending weights into vLLM, beside copying the same bytes in memory.

    python benchmarks/weight_sync.py [--shapes 30m,120m,0.5b] [--methods reload,direct,...] [--dtype float32]

Needs vLLM in this environment, or in the one that --python names. Models are random and Qwen2-shaped. For each shape:

- `memcpy`: the tensors copied into memory that is already there, the floor of anything that moves them;
- `memcpy+load`: the same, and what vLLM itself takes to load and re-pack tensors that it can read from memory (its own
  clock, in the syncs by `direct`): the floor of `direct`;
- `write+read`: the bytes written to a file beside the run and read back into memory, the floor of `reload`;
- each method: publish (by the actor), load (by vLLM, until it has confirmed the checksum), their sum, the bytes, and
  its total as a multiple of the floors beside it (`memcpy+load`: `direct` alone).

The median of --repeat syncs, after one that is not counted; between two syncs every weight changes. The floors are
measured before each sync, so that a multiple compares what the machine did at about the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, dict[str, int]] = {
    "1m": {"hidden": 128, "layers": 2, "heads": 2, "kv": 1, "inner": 512, "vocab": 2_000},
    "30m": {"hidden": 384, "layers": 8, "heads": 6, "kv": 2, "inner": 1536, "vocab": 32_000},
    "120m": {"hidden": 768, "layers": 12, "heads": 12, "kv": 4, "inner": 3072, "vocab": 32_000},
    "0.5b": {"hidden": 896, "layers": 24, "heads": 14, "kv": 2, "inner": 4864, "vocab": 151_936},
}
METHODS = ("direct", "reload", "reload-memory", "volume", "delta", "checkpoint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", default="30m,120m,0.5b")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--python")
    parser.add_argument("--json", action="store_true", help="one line of JSON per measurement")
    options = parser.parse_args()
    for shape in options.shapes.split(","):
        with tempfile.TemporaryDirectory(prefix="mrl-benchmark-") as folder:
            asyncio.run(measure(shape, options, Path(folder)))


async def measure(shape: str, options: argparse.Namespace, folder: Path) -> None:
    from mrl.actor.publisher import Publisher
    from mrl.backends.inline import InlineHandle
    from mrl.sync import SYNC_METHODS
    from mrl.workers.rollout import RolloutWorker

    model, tokenizer = build(shape, folder / "model")
    dtype = getattr(torch, options.dtype)
    floors = Floors(model, dtype, folder)

    def say(method: str, publish: float, load: float, bytes_: int, beside: dict[str, float]) -> None:
        measured = row(shape, options.dtype, method, publish, load, bytes_, beside)
        print(json.dumps(measured) if options.json else text(measured), flush=True)

    worker = RolloutWorker(
        "vllm",
        {"model": str(folder / "model"), "device": "cpu", "max_model_len": 64, "dtype": options.dtype},
        {"vllm_python": options.python, "vllm_kv_cache_gb": 0.25},
    )
    await asyncio.to_thread(worker.load)
    actor = InlineHandle(Actor(Publisher(model, tokenizer)), "actor", 600)
    try:
        for name in options.methods.split(","):
            where = Path("/dev/shm") if name == "reload-memory" else folder
            extra = {"full_every": 1000} if name == "delta" else {}
            sync = SYNC_METHODS.get(name.partition("-")[0])(
                where / f"mrl-benchmark-{os.getpid()}", deadline=600, **extra
            )
            handle = InlineHandle(worker, name, 600)
            reports, loads, beside = [], [], []
            for version in range(1 + (1 if name == "checkpoint" else options.repeat)):
                change(model)
                beside.append(floors.measure())
                reports.append(await sync.sync(actor, [handle], version))
                loads.append((await handle.call("health"))["load_seconds"])
            counted = reports[1:]
            floor = {key: statistics.median(seconds[key] for seconds in beside[1:]) for key in beside[0]}
            if name == "direct":
                floor["memcpy+load"] = floor["memcpy"] + statistics.median(loads[1:])
            publish = statistics.median(report.publish_seconds for report in counted)
            load = statistics.median(report.load_seconds for report in counted)
            for key, seconds in floor.items():
                say(f"({key})", seconds, 0.0, floors.bytes, {})
            say(name, publish, load, counted[-1].bytes, floor)
            sync.close()
    finally:
        worker.close()


class Actor:
    """The publishing half of the actor, without an optimizer."""

    def __init__(self, publisher: Any) -> None:
        self.publisher = publisher

    def machine(self) -> str:
        from mrl.system.machine import machine_id

        return machine_id()

    def write_weights(self, folder: str, version: int, **options: Any) -> Any:
        return self.publisher.files(Path(folder), version, **options)

    def write_memory(self, version: int, **options: Any) -> Any:
        return self.publisher.in_memory(version, **options)

    def write_model(self, folder: str, version: int, **options: Any) -> Any:
        return self.publisher.whole_model(Path(folder), version, **options)

    def write_difference(self, folder: str | None, version: int, **options: Any) -> Any:
        return self.publisher.difference(Path(folder or self.publisher.memory_folder()), version, **options)


def build(shape: str, folder: Path) -> tuple[Any, Any]:
    """A random model with tied embeddings and the starter's tokenizer, in a folder."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from mrl.starter import STARTER_DIR

    s = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=s["vocab"],
        hidden_size=s["hidden"],
        intermediate_size=s["inner"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv"],
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(STARTER_DIR)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


@torch.no_grad()
def change(model: torch.nn.Module) -> None:
    """As an optimizer step of 1e-6 would."""
    for parameter in model.parameters():
        parameter.add_(torch.empty_like(parameter).uniform_(-1e-6, 1e-6))


class Floors:
    """What handling the same bytes costs without any engine."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, folder: Path) -> None:
        self.source = [p.detach().to(dtype) for p in model.parameters()]
        self.target = [torch.empty_like(t).fill_(1) for t in self.source]
        self.bytes = sum(t.numel() * t.element_size() for t in self.source)
        self.data = torch.ones(self.bytes, dtype=torch.uint8).numpy()
        self.path = folder / "bytes"

    def measure(self) -> dict[str, float]:
        """Seconds of each floor, once."""
        start = time.perf_counter()
        for a, b in zip(self.source, self.target, strict=True):
            b.copy_(a)
        copied = time.perf_counter()
        self.data.tofile(self.path)
        len(self.path.read_bytes())
        done = time.perf_counter()
        self.path.unlink()
        return {"memcpy": copied - start, "write+read": done - copied}


def row(
    shape: str, dtype: str, name: str, publish: float, load: float, size: int, floors: dict[str, float]
) -> dict[str, Any]:
    """One measurement, as a multiple of the floors measured beside it."""
    return {
        "shape": shape,
        "dtype": dtype,
        "method": name,
        "publish_s": round(publish, 4),
        "load_s": round(load, 4),
        "total_s": round(publish + load, 4),
        "mb": round(size / 1e6, 2),
        "x": {other: round((publish + load) / floor, 1) for other, floor in floors.items()},
    }


def text(r: dict[str, Any]) -> str:
    multiples = "  ".join(f"{times:6.1f} x {floor}" for floor, times in r["x"].items())
    return (
        f"{r['shape']:>5} {r['dtype']:>8} {r['method']:>14}  publish {r['publish_s']:8.3f} s  load {r['load_s']:8.3f} s"
        f"  total {r['total_s']:8.3f} s  {r['mb']:9.2f} MB  {multiples}"
    )


if __name__ == "__main__":
    main()
