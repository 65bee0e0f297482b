"""Length terms against the papers' cases and TRL's reward function; the choice of tokens by entropy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.algorithms.entropy import top_entropy_mask
from mrl.algorithms.kl import estimate_kl
from mrl.algorithms.shaping import length_rewards, soft_overlong_punishment


@given(length=st.integers(0, 40), limit=st.integers(1, 30), data=st.data())
def test_the_soft_overlong_punishment_is_trls(length: int, limit: int, data: st.DataObject) -> None:
    rewards = pytest.importorskip("trl.rewards")
    cache = data.draw(st.integers(1, limit))
    theirs = rewards.get_soft_overlong_punishment(limit, cache)(completion_ids=[[0] * length])
    assert soft_overlong_punishment(length, limit, cache) == pytest.approx(theirs[0])


def test_shorter_is_better_unless_it_is_wrong() -> None:
    assert length_rewards([10, 20, 30], [True, True, True]) == [0.5, 0.0, -0.5]
    assert length_rewards([10, 20, 30], [False, True, False]) == [0.0, 0.0, -0.5]
    assert length_rewards([7, 7], [True, False]) == [0.0, 0.0]
    assert length_rewards([], []) == []


@given(seed=st.integers(0, 1000), quantile=st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.99, 1.0]))
def test_the_most_uncertain_tokens_are_kept(seed: int, quantile: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    entropy_BT = torch.rand(4, 7, generator=rng)
    mask_BT = (torch.rand(4, 7, generator=rng) < 0.7).float()
    kept_BT = top_entropy_mask(entropy_BT, mask_BT, quantile)
    on = mask_BT.bool()
    assert not kept_BT[~on].any()
    if on.any():
        threshold = torch.quantile(entropy_BT[on], 1 - quantile)
        assert torch.equal(kept_BT[on], entropy_BT[on] >= threshold)
        assert kept_BT.any()


def test_estimators_of_the_divergence() -> None:
    """k1 and k3 are unbiased, k2 and k3 never negative; the gradient of k2 is that of k1 in a reward."""
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(6, generator=rng, dtype=torch.float64, requires_grad=True)
    q = torch.log_softmax(torch.randn(6, generator=rng, dtype=torch.float64), -1)
    p = torch.log_softmax(logits, -1)
    exact = (p.exp() * (p - q)).sum()
    for name in ("k1", "k3"):
        torch.testing.assert_close((p.exp() * estimate_kl(p, q, name)).sum(), exact)
    assert (estimate_kl(p, q, "k2") >= 0).all()
    assert (estimate_kl(p, q, "k3") >= 0).all()

    def gradient(per_sample: torch.Tensor) -> torch.Tensor:
        """Of the mean over samples drawn from p, which the sampler holds fixed."""
        return torch.autograd.grad((p.detach().exp() * per_sample).sum(), logits, retain_graph=True)[0]

    true = torch.autograd.grad(exact, logits, retain_graph=True)[0]
    ratio = (p - p.detach()).exp()
    torch.testing.assert_close(gradient(estimate_kl(p, q, "k1").detach() * p), true)  # in the reward
    torch.testing.assert_close(gradient(estimate_kl(p, q, "k2")), true)
    for name in ("k1", "k3"):  # use_bias_correction_kl
        torch.testing.assert_close(gradient(ratio * estimate_kl(p, q, name)), true)
    assert gradient(estimate_kl(p, q, "k1")).abs().max() < 1e-12  # which is why k1 in the loss needs it
