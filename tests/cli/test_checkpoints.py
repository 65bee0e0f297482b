"""`mrl checkpoints`: what it lists, verifies and exports, and what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.cli.main import main
from mrl.config import OrchestratorConfig
from mrl.errors import CheckpointError
from mrl.loop.resume import record_options
from mrl.store.checkpoints import copy_model, write_checkpoint
from tests.small_runs import run


def test_the_commands(tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tiny_model, tmp_path / "r", use_lora=True, max_steps=2, best_metric="reward/mean")

    def mrl(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as stopped:
            main(list(arguments))
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out + captured.err

    code, out = mrl("checkpoints", str(tmp_path / "r"), "--json")
    assert code == 0
    assert [row["step"] for row in json.loads(out)] == [1, 2]
    code, out = mrl("checkpoints", str(tmp_path / "r"), "verify")
    assert code == 0
    assert out.count("intact") == 2
    code, out = mrl("checkpoints", str(tmp_path / "r"), "export", str(tmp_path / "out"), "--merged")
    assert code == 0
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not (tmp_path / "out" / "trainer").exists()
    code, out = mrl("checkpoints", str(tmp_path / "r"), "export", str(tmp_path / "out"))
    assert code == 2
    assert "not empty" in out
    code, out = mrl("replay", str(tmp_path / "r"), "--step", "2", "--json")
    assert code == 0
    assert json.loads(out)["exact"] is True
    code, out = mrl("replay", str(tmp_path / "r"), "--step", "2")
    assert "exactly what was recorded" in out
    (tmp_path / "r" / "checkpoints" / "step-2" / "adapter_model.safetensors").write_bytes(b"")
    code, out = mrl("checkpoints", str(tmp_path / "r"), "verify")
    assert code == 1
    assert "DAMAGED" in out
    assert "adapter_model.safetensors" in out
    code, out = mrl("checkpoints", "nowhere")
    assert code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verfy"], "'verfy' is none of list, verify, export, push"),
        (["list", "somewhere"], "leave out somewhere"),
        (["verify", "--which", "7"], "leave out --which"),
        (["--merged"], "leave out --merged"),
        (["export"], "say where to"),
        (["export", "a_file"], "a_file: cannot be made a folder"),
        (["export", "a_file/below"], "cannot be made a folder"),
        (["export", "run"], "is not empty"),
        (["export", "new", "--which", "7"], "no checkpoint '7'"),
    ],
)
def test_mistakes(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    record_options(tmp_path / "run", OrchestratorConfig())
    write_checkpoint(tmp_path / "run" / "checkpoints" / "step-1", lambda folder: None, {})
    (tmp_path / "a_file").write_text("")
    with pytest.raises(SystemExit) as stopped:
        main(["checkpoints", "run", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_model_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: the model cannot be written there"):
        copy_model(tmp_path, tmp_path / "file")
