"""What the actor takes of the device: the host's waits, memory of a token, and leaving it for another process."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from gpu_checks.measuring import allocated, host_waits, peak, timed
from gpu_checks.models import engine, random_model, sampled, speed_prompts, starter_batch, starter_prompts
from gpu_checks.report import Report, Skip
from gpu_checks.training import make_actor
from mrl.actor.micro_batches import GPU_SHARE, activation_bytes
from mrl.engines.transformers.decode import STEPS_PER_CHECK
from mrl.types import Sample, TrainBatch

ROW = 256
"""Tokens of a row of `long_batch`, its prompt of 32 included."""


def waits(report: Report) -> None:
    """How often the host waits for the GPU: in a step of one and of four micro-batches, and while it samples."""
    if not report.gpu:
        raise Skip("needs a GPU: on a CPU there is nothing to wait for")
    batch = starter_batch(report)
    for parts in (1, 4):
        actor = make_actor(report.device, {"dtype": "bfloat16"}, {"gradient_accumulation_steps": parts})
        actor.train_step(batch)
        with host_waits() as found:
            actor.train_step(batch)
        report.facts[f"a step of micro-batches: {parts}, waits at"] = dict(found)
        report.at_most(f"a step of micro-batches: {parts}, waits", found.total(), 2)
    tokens = 48
    with engine(report.device, dtype="auto") as made:
        for _ in range(2):  # graphs are recorded
            sampled(made, starter_prompts(), tokens)
        with host_waits() as found:
            sampled(made, starter_prompts(), tokens)
    report.facts[f"sampling {tokens} tokens, waits at"] = dict(found)
    report.at_most(f"sampling {tokens} tokens, waits", found.total(), 1 + tokens / STEPS_PER_CHECK["cuda"])


def micro_batches(report: Report) -> None:
    """What a token of a micro-batch takes, against the estimate by which micro-batches are sized."""
    report.not_shown("what a token takes: torch does not count a CPU's memory")
    shape = {"hidden": 768, "layers": 6, "words": 4096} if report.gpu else {"hidden": 64, "layers": 2, "words": 512}
    rows = (20, 28) if report.gpu else (1, 2)  # more tokens than a tile of logits has: those of a tile are a constant
    with tempfile.TemporaryDirectory() as folder:
        model = {"model": random_model(Path(folder) / "model", **shape), "dtype": "bfloat16", "max_model_len": 512}
        for checkpointing in (False, True):
            name = "with checkpointing" if checkpointing else "without checkpointing"
            options = {"gradient_checkpointing": checkpointing}
            actor = make_actor(report.device, model, options, {"max_logprob_gap": None})
            report.facts[f"{name}: tokens of a micro-batch by default"] = actor.passes.micro_batch_tokens
            actor.passes.micro_batch_tokens = 1 << 20
            few, many = (long_batch(count) for count in rows)
            actor.train_step(few)  # the optimizer's state is there from now on
            peaks = [peak(report, partial(actor.train_step, batch)) for batch in (few, many)]
            estimate = activation_bytes(actor.model.config, narrow=True, checkpointing=checkpointing)
            report.facts[f"{name}: estimated bytes a token"] = estimate
            if report.gpu:
                each = (peaks[1] - peaks[0]) / ((rows[1] - rows[0]) * ROW)
                report.facts[f"{name}: bytes a token"] = round(each)
                report.at_most(f"{name}: bytes a token, actual by estimated", each / estimate, 1 / GPU_SHARE)


def long_batch(rows: int) -> TrainBatch:
    """Rows of one length and no prompt in common, of ids that every vocabulary here has."""
    prompts = speed_prompts(rows)
    length = ROW - len(prompts[0])
    completions = [[3 + (7 * row + 11 * at) % 400 for at in range(length)] for row in range(rows)]
    samples = [
        Sample(list(prompt), ids, [-6.0] * length, [1] * length, 0)
        for prompt, ids in zip(prompts, completions, strict=True)
    ]
    return TrainBatch(samples, [(-1.0) ** row for row in range(rows)], rows, rows * length)


def residence(report: Report) -> None:
    """The actor leaves the device and comes back (`colocate`): the same training, and the memory is free meanwhile."""
    batch = starter_batch(report)
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
