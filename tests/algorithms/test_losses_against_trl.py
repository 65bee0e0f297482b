"""Our losses on the same tensors as TRL's own `_compute_loss`, value and gradient."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mrl.algorithms import LOSSES
from mrl.algorithms.base import LossSettings, LossTerms, token_weights
from mrl.algorithms.kl import kl_k3

trl = pytest.importorskip("trl", reason="the peer these losses are compared with")

B, T, MAX_LENGTH = 5, 9, 16


def tensors(seed: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    mask = torch.ones(B, T)
    for row, length in enumerate(torch.randint(1, T + 1, (B,), generator=rng)):
        mask[row, length:] = 0
    old = -2 * torch.rand(B, T, generator=rng)
    return {
        "logprobs": old + 0.4 * torch.randn(B, T, generator=rng),
        "old": old,
        "ref": old + 0.3 * torch.randn(B, T, generator=rng),
        "advantages": torch.randn(B, generator=rng),
        "mask": mask,
    }


def trl_loss(name: str, beta: float, data: dict[str, torch.Tensor], logprobs: torch.Tensor) -> torch.Tensor:
    """TRL's method, unchanged, on an object that has what it reads and hands it our logprobs."""
    from collections import defaultdict

    from trl import GRPOTrainer

    class Stub:
        def __getattr__(self, _name: str) -> object:
            return None

    stub = Stub()
    entropies = torch.zeros(B, T)
    vars(stub).update(
        _get_per_token_logps_and_entropies=lambda *_a, **_k: (logprobs, entropies, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        importance_sampling_level="token",
        beta=beta,
        loss_type=name,
        epsilon_low=0.2,
        epsilon_high=1.5 if name == "cispo" else 0.28,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        max_completion_length=MAX_LENGTH,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        args=SimpleNamespace(
            use_bias_correction_kl=False,
            delta=None,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
        ),
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(B, 1, dtype=torch.long),
        "prompt_mask": torch.ones(B, 1),
        "completion_ids": torch.zeros(B, T, dtype=torch.long),
        "completion_mask": data["mask"],
        "advantages": data["advantages"],
        "old_per_token_logps": data["old"],
        "ref_per_token_logps": data["ref"],
        "num_items_in_batch": data["mask"].sum(),
    }
    return GRPOTrainer._compute_loss(stub, None, inputs)


def our_loss(name: str, beta: float, data: dict[str, torch.Tensor], logprobs: torch.Tensor) -> torch.Tensor:
    loss = LOSSES.get(name)
    settings = LossSettings(0.2, 1.5 if name == "cispo" else 0.28)
    advantages_BT = data["advantages"][:, None].expand(B, T)
    per_token = loss.per_token(LossTerms(logprobs, data["old"], advantages_BT, data["mask"]), settings)
    loss_BT = per_token.loss_BT + beta * kl_k3(logprobs, data["ref"])
    weights_BT = token_weights(
        data["mask"],
        loss.normalization,
        max_completion_length=MAX_LENGTH,
        num_sequences=B,
        num_tokens=int(data["mask"].sum()),
    )
    return (loss_BT * weights_BT).sum()


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo"])
def test_value_and_gradient_agree_with_trl(name: str, beta: float) -> None:
    for seed in range(5):
        data = tensors(seed)
        theirs, mine = data["logprobs"].clone().requires_grad_(), data["logprobs"].clone().requires_grad_()
        their_loss, my_loss = trl_loss(name, beta, data, theirs), our_loss(name, beta, data, mine)
        their_loss.backward()
        my_loss.backward()
        torch.testing.assert_close(my_loss, their_loss, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-5, rtol=1e-5)
