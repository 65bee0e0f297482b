"""How a command ends when something is wrong: one message that says what would work, and no traceback."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

import mrl.cli.main
from mrl.cli.flags import config_from
from mrl.cli.last_resort import run_command
from mrl.cli.main import main
from mrl.config import ModelConfig, OrchestratorConfig
from mrl.errors import ConfigError, ModelError
from mrl.models import load_config, load_model, load_tokenizer
from mrl.store.run import RunStore
from mrl.system.shell import command


def ends(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


def test_what_nobody_foresaw_is_one_line_and_a_saved_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(argv: list[str]) -> int:
        raise KeyError("gone\nand more")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setitem(mrl.cli.main.COMMANDS, "doctor", (broken, ""))
    assert ends("doctor", "a `b`") == 1
    (line,) = capsys.readouterr().err.splitlines()
    (saved,) = tmp_path.glob("mrl-error-*.txt")
    assert str(saved) in line
    assert "please report it" in line
    text = saved.read_text()
    assert text.startswith("mrl doctor 'a `b`'\nmrl ")
    assert "in broken" in text


def test_an_output_without_a_character_shows_another(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="latin-1", write_through=True))
    with pytest.raises(SystemExit):
        run_command(lambda: print("held-out 1% → 2%") or 0, [])  # type: ignore[func-returns-value]
    assert output.getvalue() == b"held-out 1% ? 2%\n"


@pytest.mark.parametrize("word", ["a `touch /tmp/x` b", "tasks & more.jsonl", "$HOME", 'say "it\'s"\n', ""])
def test_a_shown_command_is_read_as_it_was_meant(word: str) -> None:
    assert shlex.split(command("mrl", "sample", Path("runs/a b"), word)) == ["mrl", "sample", "runs/a b", word]


def test_models_that_are_damaged_or_incomplete(tiny_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    weights, own = folder / "model.safetensors", ModelConfig(model=str(folder), device="cpu")
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut short; copy or download it again"):
        load_model(own)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"the folder has no tokenizer .* copy these files from the model"):
        load_tokenizer(own)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        load_model(own)


def test_a_model_that_is_nowhere_is_not_asked_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def unreachable(endpoint: str) -> bool:
        asked.append(endpoint)
        return False

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("mrl.models.reachable", unreachable)
    with pytest.raises(ModelError, match=r"no local folder, no run, and the Hub did not give it.*does not answer"):
        load_config(ModelConfig(model="nobody/has-this"))
    assert len(asked) == 1
    with pytest.raises(ModelError, match="no Hub id"):
        load_tokenizer(ModelConfig(model="no such name!"))


def test_a_runs_broken_config_and_a_push_without_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    RunStore(tmp_path / "r", OrchestratorConfig()).close()
    (tmp_path / "r" / "checkpoints" / "step-1").mkdir(parents=True)
    monkeypatch.setattr("mrl.store.checkpoints.Checkpoint.problems", lambda self: [])
    assert ends("checkpoints", str(tmp_path / "r"), "push", "me/it") == 2
    assert "push to 'me/it' failed: HF_HUB_OFFLINE is set" in capsys.readouterr().err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert ends("checkpoints", str(tmp_path / "r"), "push", "me/it") == 2
    assert "cannot reach http://127.0.0.1:9" in capsys.readouterr().err
    (tmp_path / "r" / "config.yaml").write_text("model:\n  model: [\n")
    for arguments in (["runs", "show"], ["train", "--resume"]):
        assert ends(*arguments, str(tmp_path / "r")) == 2
        assert re.search(r"config\.yaml, line 3: .*\n$", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: starter\nlerning_rate: 1\n", "line 2: unknown option 'lerning_rate'; did you mean 'learning_rate'"),
        ("training:\n  bogus: 1\n", "line 2: unknown option 'training.bogus'"),
        ("\n\nlearning_rate: abc\n", "line 3: learning_rate: should be a valid number"),
        ("training:\n  learning_rate: abc\n\n  max_steps: -3\n", "lines 2, 4: learning_rate"),
        ("loss_type: nope\n", "line 1: loss_type: use one of"),
        ("model: starter\nmax_staleness: 2\n", "line 2: max_staleness has an effect only with"),
        ("learning_rate: 1\n  x: 2\n", "line 2: not valid YAML"),
        ("seed: 1\nmodel: a\nseed: 2\n", "line 3: seed is given twice, first in line 1"),
        ("training:\n  seed: 1\nseed: 2\n", "line 3: seed is given twice"),
        ("run_name: 2020-13-45\n", "line 1: run_name: month must be in 1..12; put text in quotes"),
        ("training:\n  2: 3\n", "line 2: a recipe is a list of `option: value`"),
        ("- seed\n", "line 1: a recipe is a list of `option: value` lines, found a list"),
    ],
)
def test_errors_in_a_recipe_name_file_and_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        config_from(str(path), {})
    assert f"{path}, {message}" in str(raised.value)


def test_a_flags_error_is_not_the_recipes(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("loss_type: grpo\n")
    with pytest.raises(ConfigError, match=r"^loss_type: use one of"):
        config_from(str(tmp_path / "recipe.yaml"), {"loss_type": "nope"})
