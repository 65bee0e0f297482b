"""The optimizer and its schedule; with `offload_optimizer` its state is in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mrl.config import TrainingConfig
from mrl.errors import ConfigError
from mrl.system.transfers import asynchronous, wait


def check_offload(config: TrainingConfig, device: torch.device) -> None:
    """Raise ConfigError where `offload_optimizer` has no effect."""
    if config.offload_optimizer and device.type == "cpu":
        raise ConfigError("offload_optimizer: the model is on the CPU, and so is the optimizer's state; leave it out")


def make_optimizer(parameters: Sequence[Tensor], config: TrainingConfig, device: torch.device) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices only."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": config.learning_rate, "betas": (config.adam_beta1, config.adam_beta2)}
    if not config.offload_optimizer:
        return torch.optim.AdamW(groups, fused=device.type in ("cpu", "cuda"), **options)
    return HostAdamW(groups, **options)


def make_scheduler(
    optimizer: torch.optim.Optimizer, config: TrainingConfig, total_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning-rate schedule over all updates of a run."""
    from transformers import get_scheduler

    return get_scheduler(
        "constant_with_warmup" if config.lr_scheduler_type == "constant" else config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=config.warmup_steps * config.num_iterations,
        num_training_steps=total_steps * config.num_iterations,
    )


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    state: dict[str, Any],
    updates: int,
) -> None:
    """Continue after so many updates, with the moments of `state` (the optimizer's `state_dict`). Learning rate,
    schedule, weight decay and betas stay as configured here. Raises ValueError for other parameters."""
    own = group_options(optimizer)
    optimizer.load_state_dict(state)
    set_group_options(optimizer, own)
    set_schedule(optimizer, scheduler, updates)


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Each parameter group's options: learning rate, weight decay and the rest."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def set_group_options(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> None:
    """Restore what `group_options` returned."""
    for group, own in zip(optimizer.param_groups, options, strict=True):
        group.update(own)


def set_schedule(
    optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, updates: int
) -> None:
    """Set scheduler and learning rate to their state after so many updates."""
    assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)  # `make_scheduler` makes no others
    scheduler.last_epoch = updates
    scheduler._step_count = updates + 1
    rates = [base * factor(updates) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates


class HostAdamW(torch.optim.AdamW):
    """AdamW that keeps its state and runs its update in host memory (ZeRO-Offload, arXiv 2101.06840).

    Gradients are copied to the host and updated parameters back. That saves 8 bytes per parameter on the device, and
    costs two transfers of the model's size per update. The host keeps a copy of the parameters too.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []
        host_groups = []
        for group in groups:
            host = [self._host_copy(parameter) for parameter in group["params"]]
            self.pairs += zip(group["params"], host, strict=True)
            host_groups.append({**group, "params": host})
        super().__init__(host_groups, fused=True, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for parameter, host in self.pairs:
            if parameter.grad is None:
                host.grad = None
                continue
            if host.grad is None:
                host.grad = torch.empty_like(host, pin_memory=host.is_pinned())
            host.grad.copy_(parameter.grad, non_blocking=asynchronous(parameter.device))
        self._wait()
        super().step()
        for parameter, host in self.pairs:
            parameter.copy_(host, non_blocking=asynchronous(parameter.device))
        self._wait()  # before the next update overwrites the host's copy

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the device's gradients; the host's are overwritten by the next update."""
        for parameter, _ in self.pairs:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any) -> None:
        """Also copies the device's current parameters to the host: load those first."""
        super().load_state_dict(state_dict)
        for parameter, host in self.pairs:
            host.copy_(parameter)

    @staticmethod
    def _host_copy(parameter: Tensor) -> Tensor:
        host = torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda, requires_grad=False)
        return host.copy_(parameter.detach())

    def _wait(self) -> None:
        """Wait for asynchronous copies on the parameters' devices, which need not be the current device."""
        for device in {parameter.device for parameter, _ in self.pairs}:
            wait(device)
