"""The optimizer with its state in host memory is the optimizer."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from mrl.config import TrainingConfig
from mrl.errors import ConfigError
from mrl.types import Sample, TrainBatch
from mrl.workers.actor import ActorWorker
from mrl.workers.optimizer import HostAdamW, make_optimizer, make_scheduler

CPU = torch.device("cpu")


def make_module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))


def train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        rng = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        module(torch.randn(4, 5, generator=rng)).square().mean().backward()
        optimizer.step()


def host(module: torch.nn.Module) -> HostAdamW:
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    others = [p for p in module.parameters() if p.dim() < 2]
    return HostAdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.99)
    )


def test_host_adamw_is_adamw_bit_for_bit() -> None:
    config = TrainingConfig(learning_rate=1e-2, weight_decay=0.1, adam_beta2=0.99)
    plain, offloaded = make_module(), make_module()
    train(plain, make_optimizer(list(plain.parameters()), config, CPU), 5)
    optimizer = host(offloaded)
    train(offloaded, optimizer, 5)
    for mine, theirs in zip(offloaded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    owned = {id(p) for p in offloaded.parameters()}
    assert all(id(parameter) not in owned for parameter in optimizer.state), "the state is the host copies'"


def test_host_adamw_goes_on_from_its_state_with_the_model_loaded_before() -> None:
    module = make_module()
    optimizer = host(module)
    scheduler = make_scheduler(optimizer, TrainingConfig(lr_scheduler_type="linear"), 10)
    train(module, optimizer, 3)
    scheduler.step()
    saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    train(module, optimizer, 2, start=3)

    resumed = make_module()
    again = host(resumed)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    train(resumed, again, 2, start=3)
    for mine, theirs in zip(resumed.parameters(), module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_offload_is_refused_where_it_would_do_nothing() -> None:
    actor = ActorWorker({"model": "not looked for", "device": "cpu"}, {"offload_optimizer": True}, total_steps=1)
    with pytest.raises(ConfigError, match=r"offload_optimizer: the model is on the CPU"):
        actor.initialize()


def test_an_actor_with_its_optimizer_elsewhere_resumes_bit_for_bit(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides are host memory here."""
    monkeypatch.setattr("mrl.workers.actor.check_offload", lambda *_: None)
    batch = TrainBatch([Sample([5, 6], [7, 8, 9], [-5.0] * 3, [1] * 3, 0)], [1.0], 1, 3)

    def actor() -> ActorWorker:
        made = ActorWorker(
            {"model": tiny_model, "device": "cpu"}, {"offload_optimizer": True, "learning_rate": 1e-2}, total_steps=9
        )
        made.initialize()
        assert isinstance(made.optimizer, HostAdamW)
        return made

    first = actor()
    first.train_step(batch)
    first.save_checkpoint(str(tmp_path / "step-1"), {})
    second = actor()
    second.load_checkpoint(str(tmp_path / "step-1"))
    assert first.train_step(batch) == second.train_step(batch)
    for mine, theirs in zip(first.parameters, second.parameters, strict=True):
        assert torch.equal(mine, theirs)
