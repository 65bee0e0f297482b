"""The optimizer with its state in host memory is the optimizer."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from mrl.actor.optimizer import HostAdamW, group_options, load_optimizer, make_optimizer, make_scheduler
from mrl.actor.worker import ActorWorker
from mrl.config import TrainingConfig
from mrl.errors import ConfigError
from mrl.types import Sample, TrainBatch

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


STORED: dict[str, Any] = {"learning_rate": 1e-2, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"learning_rate": 1e-3},
        {"weight_decay": 0.3},
        {"adam_beta1": 0.5},
        {"adam_beta2": 0.9},
        {"lr_scheduler_type": "linear"},
        {"lr_scheduler_type": "constant", "learning_rate": 1e-3},
        {"warmup_steps": 7},
        {"num_iterations": 3},
        {"total": 30},
    ],
    ids=str,
)
def test_a_changed_option_wins_over_the_stored_optimizer(changes: dict[str, Any]) -> None:
    """Moments go on; rate, course, decay and betas are those of an optimizer that was made with the new options."""

    def make(changes: dict[str, Any]) -> tuple[torch.nn.Module, torch.optim.Optimizer, LRScheduler, TrainingConfig]:
        config = TrainingConfig(**(STORED | {name: value for name, value in changes.items() if name != "total"}))
        module = make_module()
        optimizer = make_optimizer(list(module.parameters()), config, CPU)
        return module, optimizer, make_scheduler(optimizer, config, changes.get("total", 10)), config

    module, optimizer, scheduler, _ = make({})
    for step in range(4):
        train(module, optimizer, 1, start=step)
        scheduler.step()
    stored = copy.deepcopy(optimizer.state_dict())
    _, expected, course, config = make(changes)
    expected.step()  # else torch warns of the order
    for _ in range(4 * config.num_iterations):
        course.step()
    _, resumed, schedule, _ = make(changes)
    load_optimizer(resumed, schedule, stored, 4 * config.num_iterations)
    for _ in range(3):
        assert group_options(resumed) == group_options(expected)
        assert schedule.get_last_lr() == course.get_last_lr()
        schedule.step()
        course.step()
    for mine, theirs in zip(resumed.state_dict()["state"].values(), stored["state"].values(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    if not changes:
        assert group_options(optimizer)[0].keys() == group_options(resumed)[0].keys()


class FakeGPU(torch.Tensor):
    """Stands for memory of another device: where a copy from or to it does not wait, it happens only once that device
    is waited for. The numbers are in host memory."""

    where = torch.device("cuda:1")
    queued: ClassVar[defaultdict[torch.device, list[Callable[[], Any]]]] = defaultdict(list)
    device = property(lambda self: self.where)  # type: ignore[assignment]
    is_cuda = property(lambda self: self.where.type == "cuda")  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty_like:  # pinned memory takes a real device
            return torch.empty_like(args[0].as_subclass(torch.Tensor), memory_format=torch.contiguous_format)
        if func is torch.Tensor.copy_:
            device = next(tensor.device for tensor in args if isinstance(tensor, cls))
            target, source = (tensor.detach().as_subclass(torch.Tensor) for tensor in args)
            cls.queued[device].append(lambda: target.copy_(source))
            if not kwargs.get("non_blocking"):
                cls.synchronize(device)
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def synchronize(cls, device: Any = None) -> None:
        """In the place of torch.cuda.synchronize."""
        for work in cls.queued.pop(torch.device("cuda:0" if device is None else device), []):
            work()


@pytest.mark.parametrize("where", [("cuda:0", "cuda:0"), ("cuda:1", "cuda:1"), ("cuda:1", "cuda:2"), ("mps", "mps")])
def test_host_adamw_waits_for_the_devices_its_parameters_are_on(
    where: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", FakeGPU.synchronize)
    monkeypatch.setattr(FakeGPU, "queued", defaultdict(list))
    kinds = [type("Elsewhere", (FakeGPU,), {"where": torch.device(name)}) for name in where]
    start = [torch.linspace(0, 1, 6).view(2, 3), torch.ones(3)]
    plain = [value.clone().requires_grad_() for value in start]
    elsewhere = [value.clone().as_subclass(kind).requires_grad_() for kind, value in zip(kinds, start, strict=True)]
    options = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}
    optimizers = torch.optim.AdamW(plain, fused=True, **options), HostAdamW([{"params": elsewhere}], **options)
    for step in range(3):
        for parameter, other, kind in zip(plain, elsewhere, kinds, strict=True):
            parameter.grad = torch.full_like(parameter, 1.0 + step)
            other.grad = parameter.grad.clone().as_subclass(kind)
        for optimizer in optimizers:
            optimizer.step()
    for parameter, other in zip(plain, elsewhere, strict=True):
        assert torch.equal(parameter, other.as_subclass(torch.Tensor))


def test_offload_is_refused_where_it_would_do_nothing() -> None:
    actor = ActorWorker({"model": "not looked for", "device": "cpu"}, {"offload_optimizer": True}, total_steps=1)
    with pytest.raises(ConfigError, match=r"offload_optimizer: the model is on the CPU"):
        actor.initialize()


def test_an_actor_with_its_optimizer_elsewhere_resumes_bit_for_bit(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides are host memory here."""
    monkeypatch.setattr("mrl.actor.worker.check_offload", lambda *_: None)
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
