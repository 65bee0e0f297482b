"""An actor that leaves a simulated accelerator and comes back. Run by tests/test_simulated_device.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.actor.worker import ActorWorker
from tests import simulated_device
from tests.actor.test_worker import make_batch
from tests.device.cases_actor import LORA, make_actor

assert simulated_device  # torch has the device from here on


def moments(actor: ActorWorker) -> list[torch.Tensor]:
    """The tensors of the optimizer's state, of which there are some."""
    found = [v for state in actor.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    assert found
    return found


@pytest.mark.parametrize("options", [{}, LORA, {"beta": 0.1}, {"offload_optimizer": True}], ids=str)
def test_it_trains_as_if_it_had_stayed(options: dict[str, Any], tiny_model: str, tmp_path: Path) -> None:
    """Copies are whole before the device's memory is let go, and checkpoints can be written meanwhile."""
    stayed, moved = (make_actor(tiny_model, "sim", **options) for _ in range(2))
    batch = make_batch(tiny_model)
    for step in range(2):
        expected, found = stayed.train_step(batch), moved.train_step(batch)
        assert found == expected
        moved.leave_device()
        assert {p.device.type for p in moved.model.parameters()} == {"cpu"}
        assert {value.device.type for value in moments(moved)} == {"cpu"}
        if step == 1:
            moved.save_checkpoint(str(tmp_path / "while-away"), {"step": 2, "best": None})
            stayed.save_checkpoint(str(tmp_path / "there"), {"step": 2, "best": None})
        moved.return_to_device()
        assert {p.device.type for p in moved.model.parameters()} == {"sim"}
    both = ([*actor.model.parameters(), *moments(actor)] for actor in (moved, stayed))
    for mine, theirs in zip(*both, strict=True):
        assert torch.equal(mine.cpu(), theirs.cpu())
    for name in ("while-away", "there"):
        moved.load_checkpoint(str(tmp_path / name))
        assert moved.step == 2
