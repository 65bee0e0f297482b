"""The objective on the same tensors as TRL's own code, value and gradient: every loss, with everything around it."""

from __future__ import annotations

import inspect
import math
import textwrap
from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.actor.objective import Objective
from mrl.actor.step_metrics import StepMetrics
from mrl.config import AlgorithmConfig
from mrl.errors import ConfigError
from mrl.types import TrainBatch

trl = pytest.importorskip("trl", reason="the peer these losses are compared with")

B, T, MAX_LENGTH = 5, 9, 16

LOSSES = {  # ours: TRL's name for it, and the levels at which it is compared
    "grpo": ("grpo", ("token", "sequence")),
    "dapo": ("dapo", ("token", "sequence")),
    "dr_grpo": ("dr_grpo", ("token", "sequence")),
    "bnpo": ("bnpo", ("token", "sequence")),
    "cispo": ("cispo", ("token", "sequence")),
    "sapo": ("sapo", ("token", "sequence")),
    "gspo": ("grpo", ("sequence",)),
    "luspo": ("luspo", ("sequence", "token")),
    "vespo": ("vespo", ("token",)),
}
AROUND: dict[str, dict[str, Any]] = {
    "alone": {},
    "asymmetric": {"epsilon": 0.1, "epsilon_high": 0.28},
    "delta": {"delta": 1.5},
    "kl": {"beta": 0.1, "use_bias_correction_kl": False},
    "kl_corrected": {"beta": 0.1},
    "truncated": {"importance_sampling": "truncated", "importance_sampling_cap": 1.2},
    "truncated_on_both_sides": {"importance_sampling": "truncated", "importance_sampling_floor": 0.8},
    "masked": {"importance_sampling": "masked", "importance_sampling_cap": 1.2},
    "band": {"importance_sampling": "masked", "importance_sampling_cap": 1.3, "importance_sampling_floor": 0.75},
    "sequence_truncated": {"importance_sampling": "sequence_truncated", "importance_sampling_cap": 1.5},
    "sequence_masked": {"importance_sampling": "sequence_masked", "importance_sampling_floor": 0.5},
    "top_entropy": {"top_entropy_quantile": 0.3},
    "top_entropy_of_one": {"top_entropy_quantile": 0.0},
    "entropy_bonus": {"entropy_coef": 0.05},
    "everything": {
        "beta": 0.1,
        "importance_sampling": "masked",
        "importance_sampling_floor": 0.7,
        "top_entropy_quantile": 0.6,
        "entropy_coef": 0.05,
    },
}


def tensors(seed: int, *, environment: bool = False) -> dict[str, Tensor]:
    """environment: some tokens of each completion are an environment's."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.ones(B, T)
    for row, length in enumerate(torch.randint(1, T + 1, (B,), generator=rng)):
        mask[row, length:] = 0
    old = -2 * torch.rand(B, T, generator=rng)
    masks = {}
    if environment:
        tool = (torch.rand(B, T, generator=rng) > 0.4).float()
        tool[:, 0] = 1
        masks = {"completion": mask, "tool": tool}
        mask = mask * tool
    return masks | {
        "logprobs": old + 0.4 * torch.randn(B, T, generator=rng),
        "old": old,
        "sampler": old + 0.3 * torch.randn(B, T, generator=rng),
        "ref": old + 0.3 * torch.randn(B, T, generator=rng),
        "entropy": 3 * torch.rand(B, T, generator=rng),
        "advantages": torch.randn(B, generator=rng),
        "mask": mask,
    }


@cache
def trl_lines() -> CodeType:
    source = inspect.getsource(trl.GRPOTrainer._generate_and_score_completions)
    start = source.index("            if self.use_vllm and self.vllm_importance_sampling_correction:")
    end = source.index("            # Compute the per-token log probabilities for the reference model")
    return compile(textwrap.dedent(source[start:end]), "trl", "exec")


def correction_of_trl(config: AlgorithmConfig, data: dict[str, Tensor]) -> Tensor:
    """TRL's own lines for it, taken out of the method that also samples."""
    modes = {
        "truncated": "token_truncate",
        "masked": "token_mask",
        "sequence_truncated": "sequence_truncate",
        "sequence_masked": "sequence_mask",
    }
    names: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "self": SimpleNamespace(
            use_vllm=True,
            vllm_importance_sampling_correction=True,
            vllm_importance_sampling_mode=modes[config.importance_sampling],
            vllm_importance_sampling_clip_min=config.importance_sampling_floor,
            vllm_importance_sampling_clip_max=config.importance_sampling_cap,
        ),
        "completion_mask": data.get("completion", data["mask"]),
        "tool_mask": data.get("tool"),
        "old_per_token_logps": data["old"],
        "sampling_per_token_logps": data["sampler"],
    }
    exec(trl_lines(), names)
    ratio: Tensor = names["vllm_importance_sampling_ratio"]
    return ratio


def trl_loss(name: str, config: AlgorithmConfig, level: str, data: dict[str, Tensor], leaves: list[Tensor]) -> Tensor:
    """TRL's method, unchanged, on an object that has what it reads and hands it our logprobs and entropies."""

    class Stub:
        def __getattr__(self, _name: str) -> object:
            return None

    stub = Stub()
    corrects = config.importance_sampling != "none"
    vars(stub).update(
        _get_per_token_logps_and_entropies=lambda *_a, **_k: (*leaves, None),
        get_high_entropy_mask=partial(trl.GRPOTrainer.get_high_entropy_mask, stub),
        get_gamma_weights=trl.GRPOTrainer.get_gamma_weights,
        aux_loss_enabled=False,
        top_entropy_quantile=config.top_entropy_quantile,
        importance_sampling_level=level,
        beta=config.beta,
        loss_type=name,
        epsilon_low=config.epsilon,
        epsilon_high=config.epsilon_high or config.epsilon,
        use_vllm=corrects,
        vllm_importance_sampling_correction=corrects,
        entropy_coef=config.entropy_coef,
        _entropy_bonus_enabled=config.entropy_coef != 0,
        use_adaptive_entropy=False,
        max_completion_length=MAX_LENGTH,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, dim, pad_index: x,
        ),
        args=SimpleNamespace(
            use_bias_correction_kl=config.use_bias_correction_kl,
            delta=config.delta,
            sapo_temperature_pos=config.sapo_temperature_pos,
            sapo_temperature_neg=config.sapo_temperature_neg,
            vespo_k_pos=config.vespo_k_pos,
            vespo_lambda_pos=config.vespo_lambda_pos,
            vespo_k_neg=config.vespo_k_neg,
            vespo_lambda_neg=config.vespo_lambda_neg,
            steps_per_generation=1,
        ),
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(B, 1, dtype=torch.long),
        "prompt_mask": torch.ones(B, 1),
        "completion_ids": torch.zeros(B, T, dtype=torch.long),
        "completion_mask": data.get("completion", data["mask"]),
        "advantages": data["advantages"],
        "old_per_token_logps": data["old"],
        "ref_per_token_logps": data["ref"],
        "num_items_in_batch": data["mask"].sum(),
    }
    if "tool" in data:
        inputs["tool_mask"] = data["tool"]
    if corrects:
        inputs["importance_sampling_ratio"] = correction_of_trl(config, data)
    loss: Tensor = trl.GRPOTrainer._compute_loss(stub, None, inputs)
    return loss


def our_loss(
    token_batch_of: Callable[..., Any], config: AlgorithmConfig, data: dict[str, Tensor], leaves: list[Tensor]
) -> Tensor:
    objective = Objective(config, num_iterations=2)
    advantages_BT = data["advantages"][:, None].expand(B, T)
    lengths = data["mask"].sum(dim=1).int().tolist()
    tokens = token_batch_of(lengths, data["mask"], advantages_BT, data["sampler"], data["old"], data["ref"])
    batch = TrainBatch([], [], num_sequences=B, num_tokens=int(data["mask"].sum()))
    objective.prepare(tokens, batch, leaves[1].detach())
    return objective.part_loss(tokens, *leaves, StepMetrics())


EVERY = [(name, level) for name, (_, levels) in LOSSES.items() for level in levels]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(("name", "level"), EVERY)
def test_value_and_gradient_agree_with_trl(
    token_batch_of: Callable[..., Any], name: str, level: str, around: str
) -> None:
    compare(token_batch_of, name, level, around, range(1))


@pytest.mark.parametrize("around", ["alone", "kl", "everything"])
@pytest.mark.parametrize(("name", "level"), EVERY)
def test_the_environments_tokens_are_left_out_as_by_trl(
    token_batch_of: Callable[..., Any], name: str, level: str, around: str
) -> None:
    compare(token_batch_of, name, level, around, range(3), environment=True)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "level"), EVERY)
def test_they_agree_on_many_tensors(token_batch_of: Callable[..., Any], name: str, level: str) -> None:
    for around in AROUND:
        compare(token_batch_of, name, level, around, range(1, 40))


def compare(
    token_batch_of: Callable[..., Any], name: str, level: str, around: str, seeds: range, *, environment: bool = False
) -> None:
    options = {"importance_sampling": "none", "max_completion_length": MAX_LENGTH, **AROUND[around]}
    if name == "cispo":
        options["epsilon_high"] = 1.5
    try:
        config = AlgorithmConfig(loss_type=name, importance_sampling_level=level, **options)
    except ConfigError:  # tests/config/test_algorithm_options.py has what is refused
        expected_refusals = {"asymmetric", "delta"} | (
            {"sequence_truncated", "sequence_masked"} if name == "vespo" else set()
        )
        assert name in ("cispo", "sapo", "vespo")
        assert around in expected_refusals
        return
    for seed in seeds:
        data = tensors(seed, environment=environment)
        theirs, mine = (
            [data["logprobs"].clone().requires_grad_(), data["entropy"].clone().requires_grad_()] for _ in range(2)
        )
        their_loss = trl_loss(LOSSES[name][0], config, level, data, theirs)
        my_loss = our_loss(token_batch_of, config, data, mine)
        their_loss.backward()
        my_loss.backward()
        torch.testing.assert_close(my_loss, their_loss, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mine[0].grad, theirs[0].grad, atol=1e-5, rtol=1e-5)
        if config.entropy_coef:
            torch.testing.assert_close(mine[1].grad, theirs[1].grad, atol=1e-7, rtol=1e-5)


def test_every_loss_that_trl_has_is_compared() -> None:
    documented = inspect.getdoc(trl.GRPOConfig)
    assert documented is not None
    section = documented[documented.index("loss_type (") : documented.index("mask_truncated_completions (")]
    names = {line.strip().split('"')[1] for line in section.splitlines() if line.strip().startswith('- `"')}
    assert names == {theirs for theirs, _ in LOSSES.values()}
