"""Sampling by engine transformers: ways of taking a step, CUDA graphs, speed."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_checks.measuring import timed
from gpu_checks.models import (
    apart,
    change,
    engine,
    flat,
    random_model,
    sampled,
    scored,
    sequences,
    speed_model,
    speed_prompts,
    starter_prompts,
)
from gpu_checks.report import Report
from mrl.config import ModelConfig
from mrl.models import load_model
from mrl.types import Completion
from mrl.weights.files import publish


def decode(report: Report) -> None:
    """The decode loop's ways of taking a step (eager, static; on CUDA with graphs) against the CPU's, and its speed."""
    prompts = starter_prompts()
    with engine("cpu", decode_step="eager") as cpu:
        expected = sampled(cpu, prompts, tokens=32, temperature=0.0)
    for step in ("eager", "static"):
        with engine(report.device, decode_step=step) as here:
            same = alike(expected, sampled(here, prompts, tokens=32, temperature=0.0))
        report.at_least(f"{step}: share of greedy tokens that are the CPU's", same, 0.97)
    path = speed_model(report)
    speeds = {step: tokens_per_second(report, path, step) for step in ("eager", "static")}
    report.facts |= {f"{step}: tokens/s": round(speed) for step, speed in speeds.items()}
    plain = generate_speed(report, path)
    report.facts["model.generate: tokens/s"] = round(plain)
    report.facts["against model.generate"] = round(max(speeds.values()) / plain, 2)


def graphs(report: Report) -> None:
    """CUDA graphs of an engine with a model of its own: kept from call to call, and right after new weights."""
    report.not_shown("graphs: static steps are called directly")
    for dtype, limit in (("float32", 1e-3), ("bfloat16", 0.05)):  # the old weights are 0.25 nats away
        with tempfile.TemporaryDirectory() as folder:
            path = random_model(Path(folder) / "model", hidden=128, layers=2, words=512)
            model = load_model(ModelConfig(model=path, device="cpu"))
            change(model)
            ref = publish(dict(model.state_dict()), Path(folder) / "weights", 1)
            options = {"model": path, "dtype": dtype}
            with (
                engine(report.device, **options, decode_step="static") as static,
                engine(report.device, **options, decode_step="eager") as eager,
            ):
                keep_graphs(report, dtype, static, eager, ref, limit)


def keep_graphs(report: Report, dtype: str, static: Any, eager: Any, ref: Any, limit: float) -> None:
    """Sample, load the weights `ref`, and sample again."""
    prompts = speed_prompts(16)
    start = time.perf_counter()
    before = sampled(static, prompts, tokens=32)
    report.facts[f"{dtype}: first call, s"] = round(time.perf_counter() - start, 3)
    recorded = recorded_by(static)
    for each in (static, eager):
        each.load_weights(ref)
    start = time.perf_counter()
    found = sampled(static, prompts, tokens=32)
    report.facts[f"{dtype}: a call after new weights, s"] = round(time.perf_counter() - start, 3)
    if report.gpu:
        kept = sum(recorded_by(static).get(size) is graph for size, graph in recorded.items())
        report.at_least(f"{dtype}: sizes that were captured", len(recorded), 1)
        report.at_least(f"{dtype}: of them still there after new weights", kept, len(recorded))
    if dtype == "float32":  # in bfloat16 roundings soon decide between two words, and all that follow are others
        same = alike(found, sampled(eager, prompts, tokens=32))
        report.at_least("float32: after new weights, tokens as by eager steps", same, 0.9)
    new, old = (
        statistics.fmean(apart(flat([c.logprobs for c in told]), scored(eager, sequences(prompts, told))))
        for told in (found, before)
    )
    report.at_most(f"{dtype}: after new weights, mean difference from logprobs scored with them, nats", new, limit)
    report.at_least(f"{dtype}: the same of what the old weights sampled, nats", old, 0.1)


def alike(some: Sequence[Completion], others: Sequence[Completion]) -> float:
    """The share of tokens that are the same at the same place."""
    pairs = [zip(one.token_ids, other.token_ids, strict=False) for one, other in zip(some, others, strict=True)]
    return statistics.fmean(a == b for pair in pairs for a, b in pair)


def recorded_by(engine: Any) -> dict[Any, Any]:
    """The graphs that an engine has kept, by their sizes."""
    step = engine._model.kept_step
    return dict(step.recorded) if step is not None else {}


# --- speed ------------------------------------------------------------------------------------------------------------


def tokens_per_second(report: Report, path: str, step: str) -> float:
    """Of engine transformers, 64 rows."""
    length, prompts = 256 if report.gpu else 16, speed_prompts(64)
    with engine(report.device, model=path, dtype="auto", decode_step=step, max_model_len=512) as made:
        tokens = sum(len(c.token_ids) for c in sampled(made, prompts, length))  # and graphs are recorded
        return tokens / timed(lambda: sampled(made, prompts, length), report, repeat=2)


def generate_speed(report: Report, path: str) -> float:
    """Of transformers' own `generate`, the same rows."""
    from transformers import AutoModelForCausalLM

    length = 256 if report.gpu else 16
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16 if report.gpu else torch.float32)
    model = model.to(report.device).eval()
    ids = torch.tensor(speed_prompts(64), device=report.device)
    limits = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": True, "top_k": 0}

    def once() -> None:
        model.generate(ids, attention_mask=torch.ones_like(ids), **limits)

    once()
    return 64 * length / timed(once, report, repeat=2)
