"""Updates of the actor: the same three here and on the CPU, with each option that changes how they are computed."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from gpu_checks.machine import version
from gpu_checks.measuring import finish
from gpu_checks.models import apart, flat, starter_batch
from gpu_checks.report import Report, Skip
from mrl.actor.worker import ActorWorker
from mrl.modeling.token_batch import make_token_batch


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
    if not report.gpu or not version("liger-kernel"):
        raise Skip("needs a GPU and `pip install 'mrl[liger]'`")
    compare_training(report, training={"use_liger_kernel": True})


def make_actor(
    device: str,
    model: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
) -> Any:
    """An initialised actor of the shipped policy; `facts` are those it gave."""
    options = {"model": "starter", "device": device, "dtype": "float32", "max_model_len": 256, **(model or {})}
    actor = ActorWorker(options, {"learning_rate": 1e-4, **(training or {})}, 10, algorithm)
    actor.facts = actor.initialize()  # type: ignore[attr-defined]
    return actor


def compare_training(
    report: Report, *, logprob_limit: float = 2e-2, norm_limit: float = 1e-2, **options: dict[str, Any]
) -> None:
    """Three updates here and, in float32 and without what only a GPU has, on the CPU."""
    batch = starter_batch(report)
    plain = {"model": {k: v for k, v in options.get("model", {}).items() if k != "dtype"}}
    plain["algorithm"] = options.get("algorithm", {})
    truth, mine = make_actor("cpu", **plain), make_actor(report.device, **options)
    started = truth.reference_logprobs(batch.samples, 1.0) if "algorithm" in options else None
    seconds, norms = [], []
    for _ in range(3):
        expected = truth.train_step(batch)
        start = time.perf_counter()
        found = mine.train_step(batch)
        finish(report)
        seconds.append(time.perf_counter() - start)
        norms.append((expected["train/grad_norm"], found["train/grad_norm"]))
    report.facts |= {"first update, s": round(seconds[0], 3), "update, s": round(seconds[-1], 3)}
    report.facts |= {name: mine.facts[name] for name in ("packing", "compiled", "full_logits", "forward_dtype")}
    report.facts["notices"] = mine.facts["notices"]
    norm = abs(norms[0][1] / norms[0][0] - 1)
    report.at_most("gradient norm of the first update, relative difference", norm, norm_limit)
    ours, theirs = (policy_logprobs(actor, batch) for actor in (mine, truth))
    untrained = flat([sample.logprobs for sample in batch.samples])
    report.facts["nats per token that the updates moved"] = statistics.fmean(apart(theirs, untrained))
    gap = statistics.fmean(apart(ours, theirs))
    report.at_most("after three updates, mean difference of a logprob, nats", gap, logprob_limit)
    if started is not None:
        kept = mine.reference_logprobs(batch.samples, 1.0)
        report.at_most("the reference model has not moved, nats", max(apart(flat(started), flat(kept))), 1e-3)
    if report.gpu:
        report.facts["peak memory, MB"] = round(torch.cuda.max_memory_allocated(report.device) / 1e6)


def policy_logprobs(actor: Any, batch: Any) -> list[float]:
    """Of the batch's tokens, by the actor as it is now."""
    tokens = make_token_batch(batch, actor.device)
    found_BT = actor.passes.policy(tokens)[0].float().cpu()
    return flat([row[: len(s.completion_ids)].tolist() for row, s in zip(found_BT, batch.samples, strict=True)])
