"""The numbers themselves: logprobs and products of matrices."""

from __future__ import annotations

import statistics

import torch

from gpu_checks.measuring import timed
from gpu_checks.models import apart, engine, sampled, scored, sequences, starter_prompts
from gpu_checks.report import Report
from mrl.algorithms.products import add_product, product, widens


def logprobs(report: Report) -> None:
    """Logprobs of the same tokens here and on the CPU, in float32 and bfloat16."""
    prompts = starter_prompts()
    with engine("cpu", decode_step="eager") as cpu:
        asked = sequences(prompts, sampled(cpu, prompts, tokens=48))
        truth = scored(cpu, asked)
    for dtype, limit in (("float32", 1e-3), ("bfloat16", 0.2)):
        with engine(report.device, dtype=dtype) as here:
            differences = apart(truth, scored(here, asked))
        report.at_most(f"{dtype}: largest difference of a logprob, nats", max(differences), limit)
        report.facts[f"{dtype}: mean difference, nats"] = statistics.fmean(differences)


def products(report: Report) -> None:
    """Products of bfloat16 matrices that come out in float32: whether the device has them, how exact, at what price."""
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
        error = (found_NM.double().cpu() - exact_NM).abs().max() / exact_NM.abs().max()
        report.at_most(f"largest error of {what}, as a share of the largest number", error.item(), 1e-4)
    if report.gpu:
        wide = torch.randn(8192, 4096, device=device).bfloat16()
        narrow = timed(lambda: wide @ wide.T, report)
        report.facts["time, against a product that is rounded"] = round(
            timed(lambda: product(wide, wide.T), report) / narrow, 2
        )
