"""An actor that leaves its device and comes back trains as if it had stayed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from mrl.actor.optimizer import make_optimizer
from mrl.actor.residence import Residence
from mrl.config import TrainingConfig
from mrl.errors import TrainingError

CPU = torch.device("cpu")


class Tied(nn.Module):
    """A head tied to its embedding, a buffer, and a layer that does not train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.frozen(self.embedding(ids))) * self.scale
        return found


def made(offload: bool) -> tuple[Tied, torch.optim.Optimizer, Residence]:
    model = Tied()
    config = TrainingConfig(learning_rate=1e-2, offload_optimizer=offload)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], config, CPU)
    return model, optimizer, Residence([model], optimizer, CPU)


def train(model: Tied, optimizer: torch.optim.Optimizer, step: int) -> None:
    ids = torch.randint(0, 9, (5,), generator=torch.Generator().manual_seed(step))
    model(ids).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("offload", [False, True])
def test_leaving_changes_nothing_and_frees_the_device(offload: bool) -> None:
    stayed, plain, _ = made(offload)
    model, optimizer, residence = made(offload)
    parameters = dict(model.named_parameters())
    residence.leave()  # before the optimizer has a state
    residence.come_back()
    for step in range(4):
        train(stayed, plain, step)
        train(model, optimizer, step)
        before = weakref.ref(model.embedding.weight.untyped_storage())
        frozen = model.frozen.weight.data_ptr()
        residence.leave()
        residence.leave()  # is allowed
        gc.collect()
        assert before() is None, "the device's memory is still held"
        assert model.frozen.weight.data_ptr() != frozen
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert all(torch.equal(saved[name], tensor) for name, tensor in stayed.state_dict().items())
        residence.come_back()
        residence.come_back()
    assert dict(model.named_parameters()) == parameters, "the same objects"
    assert model.head.weight is model.embedding.weight
    for mine, theirs in zip(model.parameters(), stayed.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_what_does_not_train_is_copied_out_once_and_host_memory_taken_once() -> None:
    model, optimizer, residence = made(offload=False)
    train(model, optimizer, 0)
    residence.leave()
    host = {key: tensor.data_ptr() for key, tensor in residence.host.items()}
    assert len(host) == 1 + 2 + len(optimizer.state[model.embedding.weight])
    kept = model.frozen.weight.clone()
    residence.come_back()
    model.frozen.weight.data.zero_()  # shows that it is not looked at again
    train(model, optimizer, 1)
    residence.leave()
    assert {key: tensor.data_ptr() for key, tensor in residence.host.items()} == host
    assert torch.equal(model.frozen.weight, kept)


def test_too_little_room_to_come_back_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, residence = made(offload=False)
    train(model, optimizer, 0)
    residence.leave()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def full(host: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(residence, "_to_device", full)
        with pytest.raises(TrainingError, match=r"2.00 GiB.*offload_optimizer: true or use_lora: true"):
            residence.come_back()
    assert residence.away
    residence.come_back()
    assert all(torch.equal(kept[name], tensor) for name, tensor in model.state_dict().items())
