"""Checkpoints that are damaged, missing, of an older kind, or cannot be written."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import mrl.actor.worker as actor_module
from mrl.errors import CheckpointError
from mrl.store.checkpoints import Checkpoint, list_checkpoints, newest_intact, write_checkpoint
from mrl.store.run import read_rows
from tests.small_runs import run, same_weights, steps_of


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    tiny_model: str, four_steps: Path, damage: str
) -> None:
    newest = list_checkpoints(four_steps)[-1].path
    file = newest / ("manifest.json" if damage == "manifest" else "model.safetensors")
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    else:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0xFF
        file.write_bytes(bytes(content) if damage == "flipped" else b"{")
    intact, problems = newest_intact(four_steps)
    assert intact is not None
    assert intact.step == 3
    assert str(file) in problems[0]
    assert run(tiny_model, four_steps, resume="auto").steps == 4
    events = [row["message"] for row in read_rows(four_steps, "events")]
    assert any("checkpoint not used" in message and str(file) in message for message in events)
    assert any("going on after step 3" in message for message in events)
    assert newest_intact(four_steps)[0].step == 4


def test_no_intact_checkpoint_never_means_starting_over(tiny_model: str, four_steps: Path) -> None:
    for checkpoint in list_checkpoints(four_steps):
        (checkpoint.path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint is intact"):
        run(tiny_model, four_steps, max_steps=5, resume="auto")
    assert steps_of(four_steps) == [1, 2, 3, 4]


@pytest.mark.inline("it changes how the actor writes")
@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_a_full_disk_keeps_the_last_good_checkpoint(
    tiny_model: str, tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device fills up while step 2 is written, and has room again for the last one."""

    def write(path: Path, write_files: Any, state: dict[str, Any]) -> None:
        def full(folder: Path) -> None:
            write_files(folder)
            raise OSError(28, "No space left on device")

        write_checkpoint(path, full if path.name == "step-2" else write_files, state)

    monkeypatch.setattr(actor_module, "write_checkpoint", write)
    if policy == "stop":
        with pytest.raises(CheckpointError, match=r"step-2 could not be written.*No space left"):
            run(tiny_model, tmp_path / "r", checkpoint_errors=policy)
        assert [c.step for c in list_checkpoints(tmp_path / "r")] == [1]
    else:
        assert run(tiny_model, tmp_path / "r", checkpoint_errors=policy).steps == 4
        assert [c.step for c in list_checkpoints(tmp_path / "r")] == [1, 3, 4]
        assert any("No space left" in row["message"] for row in read_rows(tmp_path / "r", "events"))
    assert not list((tmp_path / "r" / "checkpoints").glob("*.partial"))
    assert all(not c.problems() for c in list_checkpoints(tmp_path / "r"))


@pytest.mark.inline("it changes how the actor writes")
def test_a_full_disk_at_the_last_checkpoint_is_an_error(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, write_files: Any, state: dict[str, Any]) -> None:
        raise CheckpointError("no space")

    monkeypatch.setattr(actor_module, "write_checkpoint", write)
    with pytest.raises(CheckpointError, match="no space"):
        run(tiny_model, tmp_path / "r", save_steps=0)


def test_a_checkpoint_is_whole_or_absent(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        write_checkpoint(tmp_path / "step-1", broken, {})
    assert list(tmp_path.iterdir()) == []
    write_checkpoint(tmp_path / "step-1", lambda folder: (folder / "a").write_text("x"), {"step": 1})
    checkpoint = Checkpoint(tmp_path / "step-1", 1)
    assert checkpoint.problems() == []
    assert checkpoint.state == {"step": 1}


@pytest.fixture(scope="module")
def pipelined(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelined") / "run"
    run(tiny_model, folder, max_steps=3, async_mode="pipeline")
    return folder


def test_what_is_in_flight_is_packed_beside_a_short_state(pipelined: Path, tmp_path: Path) -> None:
    checkpoint = list_checkpoints(Path(shutil.copytree(pipelined, tmp_path / "r")))[0]
    (batch,) = checkpoint.in_flight["batches"]
    assert len(batch["groups"][0]["rollouts"][0]["samples"][0]["logprobs"]) > 0
    text = (checkpoint.path / "trainer" / "state.json").read_text()
    assert "in_flight" not in text
    assert len(text.splitlines()) < 20
    packed = checkpoint.path / "trainer" / "in_flight.json.gz"
    packed.write_bytes(packed.read_bytes()[:-1] + b"x")
    assert "in_flight.json.gz: damaged" in checkpoint.problems()[0]
    with pytest.raises(CheckpointError, match=r"in_flight\.json\.gz: cannot be read"):
        _ = checkpoint.in_flight


def test_a_checkpoint_with_everything_in_its_state_is_still_resumed(
    tiny_model: str, pipelined: Path, tmp_path: Path
) -> None:
    """As they were written before what is in flight had a file of its own."""
    shutil.copytree(pipelined, tmp_path / "r")
    checkpoint, *later = list_checkpoints(tmp_path / "r")
    for other in later:
        shutil.rmtree(other.path)
    state = checkpoint.state | {"in_flight": checkpoint.in_flight}
    del state["order"]["put_off"]
    (checkpoint.path / "trainer" / "in_flight.json.gz").unlink()
    text = json.dumps(state, indent=1)
    (checkpoint.path / "trainer" / "state.json").write_text(text)
    manifest = json.loads((checkpoint.path / "manifest.json").read_text())
    del manifest["files"]["trainer/in_flight.json.gz"]
    manifest["files"]["trainer/state.json"] = {"size": len(text), "sha256": sha256(text.encode()).hexdigest()}
    (checkpoint.path / "manifest.json").write_text(json.dumps(manifest))
    run(tiny_model, tmp_path / "r", max_steps=3, async_mode="pipeline", resume="auto")
    assert same_weights(tmp_path / "r", pipelined)
