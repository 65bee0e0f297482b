"""A loss and an advantage of one's own, by decorator: python examples/custom_loss.py"""

import torch

from mrl import MRLTrainer
from mrl.algorithms import advantage, loss
from mrl.algorithms.base import PolicyLoss


@loss("quadratic", normalization="tokens", options=("epsilon",))
def quadratic(terms, settings):
    """The surrogate r A, held to the old policy by a quadratic penalty (r - 1)² / 2ε in the place of a clip."""
    ratio_BT = torch.exp(terms.logprobs_BT - terms.old_logprobs_BT)
    loss_BT = -ratio_BT * terms.advantages_BT + (ratio_BT - 1) ** 2 / (2 * settings.epsilon_low)
    return PolicyLoss(loss_BT, ratio_BT.detach())


@advantage("above_average")
def above_average(inputs, settings):
    """Only what was better than the step's mean is learned from."""
    return (inputs.rewards_B - inputs.rewards_B.mean()).clamp(min=0)


if __name__ == "__main__":
    options = {"model": "starter", "dataset_name": "tiny-code", "max_steps": 2, "max_completion_length": 64}
    result = MRLTrainer(loss_type="quadratic", advantage_type="above_average", num_iterations=2, **options).train()
    print(f"loss {result.metrics['train/loss']:.4f}, ratio up to {result.metrics['train/ratio_max']:.3f}")
