"""The actor's checkpoints: what others load, what training goes on from, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrl.actor.lora import public_state_dict
from mrl.errors import CheckpointError, SyncError
from tests.actor.actors import make_actor, make_batch, parameters
from tests.soak import slow_but


def test_checkpoints_load_as_they_are(tiny_model: str, tmp_path: Path) -> None:
    batch = make_batch(tiny_model)
    actor = make_actor(tiny_model)
    actor.train_step(batch)
    path = str(tmp_path / "step-1")
    actor.save_checkpoint(path, {"note": "x"})
    loaded = AutoModelForCausalLM.from_pretrained(path)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, actor.model.state_dict()[name]), name
    assert AutoTokenizer.from_pretrained(path).chat_template
    assert json.loads((tmp_path / "step-1" / "trainer" / "state.json").read_text())["note"] == "x"
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_a_lora_checkpoint_loads_through_its_base(tiny_model: str, tmp_path: Path) -> None:
    from mrl.config import ModelConfig
    from mrl.models import load_model

    batch = make_batch(tiny_model)
    actor = make_actor(tiny_model, lora=True, learning_rate=1e-2)
    actor.train_step(batch)
    actor.train_step(batch)
    path = str(tmp_path / "step-2")
    actor.save_checkpoint(path, {})
    loaded = load_model(ModelConfig(model=path, device="cpu"))
    for name, value in public_state_dict(actor.model).items():
        torch.testing.assert_close(loaded.state_dict()[name], value, atol=1e-6, rtol=1e-5, msg=name)


def test_a_checkpoint_that_cannot_be_written_leaves_nothing_behind(tiny_model: str, tmp_path: Path) -> None:
    actor = make_actor(tiny_model)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        actor.save_checkpoint(str(tmp_path / "file" / "step-1"), {})


@pytest.mark.parametrize("lora", slow_but([True], [False, True]))
@pytest.mark.parametrize("beside", slow_but([True], [False, True]))
def test_training_goes_on_from_a_checkpoint_bit_for_bit(
    tiny_model: str, tmp_path: Path, lora: bool, beside: bool
) -> None:
    batch = make_batch(tiny_model)
    settings = {"lora": lora, "beta": 0.05, "num_iterations": 2, "lr_scheduler_type": "cosine", "learning_rate": 1e-2}
    actor = make_actor(tiny_model, **settings, dropout=0.1)
    for _ in range(2):
        actor.train_step(batch)
    actor.save_checkpoint(str(tmp_path / "step-2"), {}, beside=beside)
    first = [actor.train_step(batch) for _ in range(2)]  # while it is being written
    actor.finish_checkpoint()

    resumed = make_actor(tiny_model, **settings, dropout=0.1)
    torch.manual_seed(99)
    resumed.load_checkpoint(str(tmp_path / "step-2"))
    assert resumed.step == 2
    assert [resumed.train_step(batch) for _ in range(2)] == first
    for name, value in parameters(actor).items():
        assert torch.equal(parameters(resumed)[name], value), name
    for mine, theirs in zip(actor.optimizer.state.values(), resumed.optimizer.state.values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_a_checkpoint_of_another_model_is_refused(tiny_model: str, untied_model: str, tmp_path: Path) -> None:
    actor = make_actor(tiny_model)
    actor.save_checkpoint(str(tmp_path / "step-0"), {})
    with pytest.raises((CheckpointError, SyncError), match="step-0"):
        make_actor(untied_model).load_checkpoint(str(tmp_path / "step-0"))


def test_a_checkpoint_of_a_machine_with_more_gpus_is_resumed(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no GPU here: torch's calls are stood in for."""
    states = [torch.full((4,), index, dtype=torch.uint8) for index in range(3)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    first = make_actor(tiny_model)
    first.save_checkpoint(str(tmp_path / "step-0"), {})
    found: dict[int, torch.Tensor] = {}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: found.update({device: state}))
    first.load_checkpoint(str(tmp_path / "step-0"))
    assert [int(found[device][0]) for device in sorted(found)] == [0, 1]
