"""What the orchestrator makes of many rollout workers: efficiency, processor time, the store's, and weights sent out.

    python benchmarks/scaling.py                                  # a quarter of an hour, mostly asleep
    python benchmarks/scaling.py --workers 1 64 --modes queue     # two points of one mode
    python benchmarks/scaling.py --json FILE --svg FILE           # the rows, and a plot of the efficiency

The loop, the pool, the scheduler, rewards and the run store are the real ones. The engines are simulated: each works on
--slots requests at a time, a request of k tokens takes k / --rate seconds, and nothing is computed meanwhile. So is the
actor, which takes --train-seconds a step. A step has as many rollouts as all workers have slots, so that the work grows
with the workers:

- efficiency: rollouts per second with n workers / (n × those with 1 worker, in the same run). In mode `off` nothing
  overlaps, so whatever the loop does between two completions is lost; in `queue` the next rollouts are under way;
- processor time per 1,000 rollouts of this process, of its event loop (the one thread that everything waits for) and of
  the thread that writes the store. What the simulated engines take is in it, which is a few per cent;
- fan-out: a version of --fanout-mb megabytes sent to n workers in processes of their own, which load it into memory of
  theirs and confirm its checksum, against copying the same bytes once for each of them (the median of several syncs,
  each with the copies measured right before it; as many copies at a time as there are cores). `network` has the workers
  fetch it from the actor over TCP, as those on other machines do. With --fanout-on-ray they are on a Ray cluster of the
  run's own, and the methods are `direct` and `object_store`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import io
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests/process_backend.py: workers in processes of their own

import torch

from mrl.backends import BACKENDS, Resources
from mrl.backends.inline import InlineBackend, InlineHandle
from mrl.config import ModelConfig
from mrl.engines import ENGINES
from mrl.sync import SYNC_METHODS
from mrl.types import Completion, GenerateRequest, WeightRef
from mrl.weights.tensors import open_folder
from mrl.workers.rollout import RolloutWorker

MODES: dict[str, dict[str, Any]] = {"off": {}, "queue": {"async_mode": "queue", "max_staleness": 1}}
GENERATIONS = 8
WARM_UP = 2
FANOUTS = ("direct", "network", "reload")
ON_RAY = ("direct", "object_store")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--modes", choices=list(MODES), nargs="*", default=list(MODES))
    parser.add_argument("--slots", type=int, default=32, help="requests that an engine works on at a time")
    parser.add_argument("--tokens", type=int, default=512, help="of the longest completion; the shortest has half")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--rate", type=float, default=64.0, help="tokens per second of one request")
    parser.add_argument("--train-seconds", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=5, help="counted ones, after two that are not")
    parser.add_argument("--fanout", choices={*FANOUTS, *ON_RAY}, nargs="*")
    parser.add_argument("--fanout-on-ray", action="store_true")
    parser.add_argument("--fanout-mb", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3, help="syncs of which the median is taken")
    parser.add_argument("--json", type=Path, help="where the rows are written")
    parser.add_argument("--svg", type=Path, help="where the plot is written")
    options = parser.parse_args()
    can = ON_RAY if options.fanout_on_ray else FANOUTS
    options.fanout = list(can) if options.fanout is None else options.fanout
    if not {*options.fanout} <= {*can}:
        parser.error(f"--fanout {' '.join(options.fanout)}: there are {', '.join(can)} here (--fanout-on-ray)")
    rows = [row for mode in options.modes for row in throughput(mode, options)]
    sent = asyncio.run(fan_out(options)) if options.fanout else []
    if options.json is not None:
        options.json.write_text(json.dumps({"throughput": rows, "fanout": sent}, indent=1) + "\n")
    if options.svg is not None:
        plot(rows, options.svg)


# --- throughput -------------------------------------------------------------------------------------------------------


def throughput(mode: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of workers."""
    print(f"\nasync_mode: {mode}\n")
    print("| workers | rollouts/s | efficiency | processor s per 1,000 | event loop | store | event loop busy |")
    print("|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    rows: list[dict[str, Any]] = []
    for workers in options.workers:
        with tempfile.TemporaryDirectory(prefix="mrl-scaling-") as folder:
            row = measure(Path(folder) / "run", mode, workers, options)
        least = rows[0] if rows else row
        row["efficiency"] = row["rollouts_per_second"] / workers / (least["rollouts_per_second"] / least["workers"])
        rows.append(row)
        print(
            f"| {workers} | {row['rollouts_per_second']:.1f} | {100 * row['efficiency']:.1f} % "
            f"| {row['processor']:.3f} | {row['event_loop']:.3f} | {row['store']:.3f} "
            f"| {100 * row['event_loop_busy']:.0f} % |",
            flush=True,
        )
    return rows


def measure(folder: Path, mode: str, workers: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run: rollouts per second, and seconds of processor time per 1,000 of them, by who took it."""
    from mrl import MRLTrainer  # not above: workers' processes import this file, and need no trainer
    from mrl.starter import STARTER_DIR

    SimulatedEngine.slots, SimulatedEngine.rate = options.slots, options.rate
    SimulatedActor.seconds = options.train_seconds
    per_step = max(GENERATIONS, workers * options.slots)
    words = random.Random(0)
    trainer = MRLTrainer(
        model=str(STARTER_DIR),
        train_dataset=[
            {"prompt": " ".join(words.choice("abcdefgh") for _ in range(options.prompt_tokens // 2))}
            for _ in range(4 * per_step // GENERATIONS)
        ],
        reward_funcs=reward,
        backend="simulated",
        engine="simulated",
        weight_sync_method="reload",
        max_steps=WARM_UP + options.steps,
        batch_size=per_step // GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=options.tokens,
        temperature=1.0,
        top_p=1.0,
        num_rollout_workers=workers,
        save_steps=0,
        run_dir=str(folder),
        report_to=["console", "jsonl"],
        **MODES[mode],
    )
    with watched() as seen, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        trainer.train()
    first, last = seen[WARM_UP - 1], seen[-1]
    took = {name: last[name] - first[name] for name in first}
    rollouts = per_step * (len(seen) - WARM_UP)
    return {
        "mode": mode,
        "workers": workers,
        "rollouts_per_second": rollouts / took["time"],
        "event_loop_busy": took["event_loop"] / took["time"],
        **{name: took[name] / rollouts * 1000 for name in ("processor", "event_loop", "store")},
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Efficiency against the number of workers, a line for each mode."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for mode in dict.fromkeys(row["mode"] for row in rows):
        mine = [row for row in rows if row["mode"] == mode]
        axes.plot([row["workers"] for row in mine], [100 * row["efficiency"] for row in mine], "o-", label=mode)
    axes.axhline(95, color="grey", linestyle=":")
    axes.set(xscale="log", xlabel="rollout workers", ylabel="efficiency, %", ylim=(0, 110))
    axes.set_xticks([row["workers"] for row in rows], [str(row["workers"]) for row in rows], minor=False)
    axes.legend(title="async_mode")
    figure.savefig(path, format="svg")


@contextlib.contextmanager
def watched() -> Iterator[list[dict[str, float]]]:
    """The clocks at each step's end."""
    from mrl.loop.orchestrator import Orchestrator
    from mrl.store.writer import Writer

    seen: list[dict[str, float]] = []
    one_step: Any = Orchestrator._one_step
    transact: Any = Writer._transact
    store = 0.0

    async def step(self: Any, *args: Any) -> dict[str, float]:
        metrics: dict[str, float] = await one_step(self, *args)
        clocks = {"time": time.perf_counter(), "processor": time.process_time(), "event_loop": time.thread_time()}
        seen.append({**clocks, "store": store})
        return metrics

    def transaction(self: Any, job: Any) -> None:
        nonlocal store
        start = time.thread_time()
        transact(self, job)
        store += time.thread_time() - start

    Orchestrator._one_step, Writer._transact = step, transaction  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Orchestrator._one_step, Writer._transact = one_step, transact  # type: ignore[method-assign]


async def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Something that differs within a group, and takes neither time nor a thread."""
    return [len(ids) % 97 / 97 for ids in completion_ids]


@ENGINES.register("simulated")
class SimulatedEngine:
    """Takes the time of a fixed token rate and computes nothing. Of weights it keeps a copy."""

    accepts = frozenset({"weights"})
    slots, rate = 32, 128.0
    ids: ClassVar = [32 + index * 37 % 64 for index in range(4096)]
    logprobs_of_them: ClassVar = [-float(torch.tensor(0.1 + index % 89 / 89)) for index in range(4096)]

    def __init__(self) -> None:
        self.version: int | None = 0
        self.capacity = self.slots
        self.tensors: dict[str, torch.Tensor] = {}

    @classmethod
    def create(cls, config: ModelConfig, module: Any = None, **_: Any) -> SimulatedEngine:
        return cls()

    async def generate(self, requests: list[GenerateRequest]) -> list[Completion]:
        return list(await asyncio.gather(*map(self._one, requests)))

    async def _one(self, request: GenerateRequest) -> Completion:
        most, begun = request.sampling.max_tokens, self.version
        assert begun is not None
        tokens = most - request.seed % (most // 2 + 1)
        await asyncio.sleep(tokens / self.rate)
        assert self.version is not None
        # New weights came midway: every token says which ones sampled it.
        half = [begun] * (tokens // 2) + [self.version] * (tokens - tokens // 2)
        return Completion(
            request.id,
            self.ids[:tokens],
            self.logprobs_of_them[:tokens],
            "stop",
            begun if begun == self.version else half,
        )

    def load_weights(self, ref: WeightRef) -> int:
        if ref.path is not None and ref.bytes:
            with open_folder(ref.path) as tensors:
                if not self.tensors:
                    self.tensors = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
                for name, tensor in tensors.items():
                    self.tensors[name].copy_(tensor)
        self.version = ref.version
        return ref.version

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def close(self) -> None:
        self.tensors = {}


class SimulatedActor:
    """What the loop asks of the actor, without a model."""

    seconds = 0.0

    def __init__(self, **_: Any) -> None:
        pass

    async def initialize(self) -> dict[str, Any]:
        nothing = {"parameters": 0, "trainable_parameters": 0, "environment": {}, "notices": []}
        return {**nothing, "device": "none", "forward_dtype": "float32", "full_logits": False, "packing": False}

    async def learn(self, batch: Any) -> tuple[dict[str, float], list[list[float]]]:
        """The logprobs are the sampler's: the record takes one for each token."""
        await asyncio.sleep(self.seconds)
        return {"train/updates_skipped": 0.0}, [sample.logprobs for sample in batch.samples]

    async def write_weights(self, folder: str, version: int, **_: Any) -> WeightRef:
        return WeightRef(version, path=folder)

    async def save_checkpoint(self, path: str, state: dict[str, Any], **_: Any) -> None:
        """There is nothing to save."""

    async def finish_checkpoint(self) -> None:
        """Nor to wait for."""


@BACKENDS.register("simulated")
class SimulatedBackend(InlineBackend):
    """Workers in this process, and an actor without a model."""

    async def spawn(self, worker: type, *, name: str, resources: Resources, args: dict[str, Any]) -> InlineHandle:
        return await super().spawn(
            SimulatedActor if name == "actor" else worker, name=name, resources=resources, args=args
        )


# --- weights sent out -------------------------------------------------------------------------------------------------


async def fan_out(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each method and number of workers."""
    from mrl.backends.ray import RayBackend
    from tests.process_backend import ProcessBackend

    print(f"\nfan-out of {options.fanout_mb} MB, seconds\n")
    print("| method | workers | publish | load | copies | (publish + load) / copies | GB/s into workers |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    backend: Any = RayBackend(600.0) if options.fanout_on_ray else ProcessBackend(600.0)
    rows = []
    try:
        await backend.spawn(Publishing, name="actor", resources=Resources(), args={"megabytes": options.fanout_mb})
        for place in range(max(options.workers)):
            args = {"engine": "simulated", "model": {"model": "none"}}
            await backend.spawn(Remote, name=f"rollout-{place}", resources=Resources(), args=args)
        for method in options.fanout:
            for workers in options.workers:
                with tempfile.TemporaryDirectory(prefix="mrl-scaling-", dir="/dev/shm") as folder:
                    row = await send(Path(folder), method, workers, backend, options)
                rows.append(row)
                print(
                    f"| {method} | {workers} | {row['publish']:.3f} | {row['load']:.3f} | {row['copies']:.3f} "
                    f"| {row['ratio']:.1f} | {row['gb_per_second']:.1f} |",
                    flush=True,
                )
    finally:
        await backend.close()
    return rows


async def send(folder: Path, method: str, workers: int, backend: Any, options: argparse.Namespace) -> dict[str, Any]:
    actor, *all_workers = backend.handles
    used = all_workers[:workers]
    for worker in used:
        await worker.call("be_elsewhere", method == "network")
    name = "direct" if method == "network" else method
    sync = SYNC_METHODS.get(name)(folder / "weights", deadline=600.0, shares_modules=False)
    copies, publishes, loads = [], [], []
    for version in range(1, options.repeat + 2):
        await actor.call("change")
        copies.append(await asyncio.to_thread(copy_seconds, options.fanout_mb, workers))
        report = await sync.sync(actor, used, version)
        publishes.append(report.publish_seconds)
        loads.append(report.load_seconds)
    sync.close()
    floor, publish, load = (statistics.median(seconds[1:]) for seconds in (copies, publishes, loads))
    return {
        "method": method,
        "workers": workers,
        "publish": publish,
        "load": load,
        "copies": floor,
        "ratio": (publish + load) / floor,
        "gb_per_second": workers * report.bytes / (publish + load) / 1e9,
    }


def copy_seconds(megabytes: int, times: int) -> float:
    """Copying so many bytes so many times, on all cores."""
    source, cores = _source(megabytes), os.cpu_count() or 1
    targets = threading.local()

    def copy(_: int) -> None:
        if not hasattr(targets, "memory"):
            targets.memory = source.clone()
        targets.memory.copy_(source)

    with ThreadPoolExecutor(cores) as threads:
        list(threads.map(copy, range(cores)))  # memory is there from here on
        start = time.perf_counter()
        list(threads.map(copy, range(times)))
        return time.perf_counter() - start


@functools.cache
def _source(megabytes: int) -> torch.Tensor:
    return torch.ones(megabytes * 1_000_000, dtype=torch.uint8)


class Remote(RolloutWorker):
    """A rollout worker that may be told that it is on another machine."""

    def be_elsewhere(self, elsewhere: bool) -> None:
        from mrl.system.machine import machine_id
        from mrl.workers import rollout

        torch.set_num_threads(1)
        rollout.machine_id = (lambda: "another") if elsewhere else machine_id


class Publishing:
    """The publishing half of an actor: 16 tensors."""

    def __init__(self, megabytes: int) -> None:
        from mrl.actor.publisher import Publisher

        torch.set_num_threads(1)
        shape = megabytes * 1_000_000 // 4 // 16
        self.model = torch.nn.ParameterList([torch.nn.Parameter(torch.rand(shape)) for _ in range(16)])
        self.publisher = Publisher(self.model, None)
        self.publisher.tensors = lambda: {f"t{i}": p.detach() for i, p in enumerate(self.model)}  # type: ignore[method-assign]

    @torch.no_grad()
    def change(self) -> None:
        for parameter in self.model:
            parameter.add_(1e-3)

    def machine(self) -> str:
        from mrl.system.machine import machine_id

        return machine_id()

    def write_weights(self, folder: str, version: int, **options: Any) -> WeightRef:
        return self.publisher.files(Path(folder), version, **options)

    def write_memory(self, version: int, **options: Any) -> WeightRef:
        return self.publisher.in_memory(version, **options)

    def write_objects(self, version: int, **options: Any) -> WeightRef:
        return self.publisher.in_object_store(version, **options)

    def close(self) -> None:
        self.publisher.close()


if __name__ == "__main__":
    main()
