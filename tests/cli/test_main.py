"""The command line as a user types it: what works, and what a mistake says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.cli.flags import ALIASES, FLAG_HELP, PYTHON_ONLY, config_from, parse
from mrl.cli.main import COMMANDS, TRAIN_BASICS, main
from mrl.config import flat_fields
from mrl.store.filters import Filter
from mrl.store.find import all_runs
from mrl.store.read import RunReader
from mrl.store.run import read_rows

FLAGS = [
    "--device",
    "cpu",
    "--max-steps",
    "2",
    "--batch-size",
    "2",
    "--max-completion-length",
    "8",
    "--save-steps",
    "0",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's working directory, with tasks and a reward file."""
    rows = [{"prompt": f"say {i}", "level": i % 2} for i in range(4)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rewards.py").write_text(
        "def length(completions, **_):\n    return [min(len(text) / 8, 1.0) for text in completions]\n"
        "def sometimes(completions, level, **_):\n    return [1.0 if even else None for even in level]\n"
    )
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mrl(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


def test_train_eval_and_sample(tiny_model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "--model", tiny_model, "--dataset", "tasks.jsonl", "--reward-funcs", "rewards.py:length"]
    assert mrl(*train, *FLAGS, "--run-name", "first", "--eval-split", "train") == 0
    out = capsys.readouterr().out
    for words in ("reward.png", "  mrl eval first\n", "mrl sample", "before", "after", "held-out pass rate"):
        assert words in out
    assert len(list(read_rows(folder / "runs" / "first", "metrics"))) == 2

    more = ["--num-samples", "4", "--by", "level", "--output", "all.jsonl", "--json", "--device", "cpu"]
    assert mrl("eval", "first", *more) == 0, "with the run's own tasks, reward and limits"
    printed = capsys.readouterr()
    assert "as in the run (first, step 2; flags override): --dataset tasks.jsonl --reward-funcs" in printed.err
    assert "these are the tasks that first was trained on" in printed.err
    report = json.loads(printed.out)
    assert report["options"]["reward_funcs"] == ["rewards.py:length"]
    assert (report["options"]["max_tokens"], report["options"]["temperature"]) == (8, 1.0)
    assert {"reward_funcs", "dataset_name", "max_tokens"} <= set(report["inherited"])
    assert report["options"]["model"] == str(Path("runs") / "first" / "checkpoints" / "step-2")
    assert report["completion_length"] <= 8
    assert report["tasks"] == 4
    assert set(report["pass_at"]) == {"1", "2", "4"}
    assert report["pass_at"]["1"]["mean"] <= report["pass_at"]["4"]["mean"]
    assert report["mean_reward"]["low"] <= report["mean_reward"]["mean"] <= report["mean_reward"]["high"]
    assert set(report["by"]) == {"0", "1"}
    assert len((folder / "all.jsonl").read_text().splitlines()) == 16
    with RunReader(Path(report["recorded"])) as reader:
        assert reader.count(Filter("eval")) == 16
        (event,) = reader.events("evaluation")
        assert (event["of"], event["model"]) == ("tasks.jsonl:train", "first@2")

    assert mrl("eval", "first@2", "--device", "cpu", "--by", "level", "--reward-funcs", "rewards.py:sometimes") == 0
    out = capsys.readouterr().out
    assert "level=1 pass@1" in out
    assert "\n4 tasks x 1 attempt; " in out
    assert "2 of 4 attempts could not be scored, 2 tasks not at all" in out
    assert "sometimes returned None" in out

    before = all_runs()
    assert mrl("eval", "first", "--device", "cpu", "--max-samples", "3", "--no-record") == 0
    assert "\n3 of 4 tasks x 1 attempt; " in capsys.readouterr().out, "what is cut is said"
    assert all_runs() == before

    assert mrl("sample", str(folder / "runs" / "first"), "say 3", "-n", "2", "--max-tokens", "4", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["options"]["max_tokens"] == 4
    completions = printed["completions"]
    assert len(completions) == 2
    assert all(c["tokens"] == len(c["token_ids"]) <= 4 for c in completions)


def test_train_prints_json_alone(tiny_model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = ["train", "--model", tiny_model, "--dataset", "tasks.jsonl", "--reward-funcs", "rewards.py:length", *FLAGS]
    assert mrl(*train, "--run-name", "r", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "finished"
    assert result["steps"] == 2


def test_greedy_sampling_repeats_itself(tiny_model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mrl("sample", tiny_model, "x", "-n", "3", "--temperature", "0", "--max-tokens", "5", "--json") == 0
    completions = json.loads(capsys.readouterr().out)["completions"]
    assert len({tuple(c["token_ids"]) for c in completions}) == 1


def test_defaults_then_recipe_then_flags(folder: Path) -> None:
    (folder / "recipe.yaml").write_text("learning_rate: 1e-4\ntraining:\n  batch_size: 3\nmodel: m\n")
    given = parse("mrl train", "", ["--learning-rate", "1e-5", "--rename", "a=b", "--no-shuffle", "--stop", "x", "y"])
    config = config_from("recipe.yaml", given)
    assert config.training.learning_rate == 1e-5
    assert config.training.batch_size == 3
    assert config.model.model == "m"
    assert config.data.rename == {"a": "b"}
    assert config.data.shuffle is False
    assert config.generation.stop == ["x", "y"]
    assert config.training.num_generations == 4


def test_every_option_is_a_flag_with_its_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    assert mrl("train", "--help-all") == 0
    shown = "".join(capsys.readouterr().out.replace("│", " ").split())
    for name, (_, field) in flat_fields().items():
        if name in PYTHON_ONLY:
            continue
        assert f"--{name.replace('_', '-')}" in shown, name
        if name not in FLAG_HELP:
            assert "".join(field.description.split())[:40] in shown, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "did you mean `mrl train`"),
        (["train", "--learning-rat", "1"], "--learning-rate"),
        (["train", "--learning-rate", "fast"], "--learning-rate"),
        (["train", "--learning-rate", "-1"], "--learning-rate: "),
        (["train", "quickstrat"], "did you mean 'quickstart'"),
        (["train", "broken.yaml"], "broken.yaml, line 2"),
        (["train", "unknown.yaml"], "did you mean 'learning_rate'"),
        (["train", "--dataset", "nowhere.jsonl"], "nowhere.jsonl"),
        (["train", "--dataset", "no_prompt.jsonl", "--reward-funcs", "rewards.py:length"], "prompt"),
        (["train", "--dataset", "tasks.jsonl"], "testcases"),
        (["train", "--dataset", "tasks.jsonl", "--reward-funcs", "broken.py:f"], "nothing_of_that_name"),
        (["train", "--dataset", "tasks.jsonl", "--reward-funcs", "rewards.py:lenght"], "did you mean 'length'"),
        (
            ["train", "--dataset", "tasks.jsonl", "--reward-funcs", "rewards.py:length", "--model", "/no/model"],
            "/no/model",
        ),
        (
            ["train", "--dataset", "tasks.jsonl", "--reward-funcs", "rewards.py:length", "--model", "no-such-model"],
            "Hub",
        ),
        (["train", "--dataset", "tasks.jsonl", "--rename", "prompt"], "old=new"),
        (["eval", "starter", "--dataset", "tasks.jsonl", "--split", "train", "--num-samples", "0"], "--num-samples: 0"),
        (["eval", "starter"], "--dataset tiny-code"),
        (["eval", "starter", "--dataset", "tasks.jsonl", "--output", "."], "name a file"),
        (["eval", "rewards.py", "--dataset", "tasks.jsonl", "--reward-funcs", "rewards.py:length"], "is a file"),
        (
            ["eval", "starter", "--dataset", "tasks.jsonl", "--by", "hardness", "--reward-funcs", "rewards.py:length"],
            "by: breaking the results down needs a column 'hardness'",
        ),
        (["eval", "runs/frist", "--dataset", "tasks.jsonl"], "there is no run 'runs/frist'"),
        (["sample", "starter", "word " * 3000], "tokens and at most 2047 fit"),
        (["eval", "starter", "--learning-rate", "1"], "`mrl eval --help` lists them"),
        (["train", "--no-such-thing", "1"], "`mrl train --help-all` lists them"),
        (["sample", "starter"], "PROMPT"),
        (["sample", "starter", "hi", "--engine", "vlm"], "did you mean 'vllm'"),
        (["sample", "starter", "hi", "--engine", "vllm", "--vllm-python", "/nowhere/python"], "--vllm-python: "),
        (["cache", "clean"], "neither list nor clear"),
    ],
)
def test_mistakes_end_with_a_message_and_code_2(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.yaml").write_text("model: m\nlearning_rate: ]\n")
    (folder / "unknown.yaml").write_text("learning_rat: 1\n")
    (folder / "no_prompt.jsonl").write_text('{"question": "x"}\n')
    assert mrl(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
    assert "Traceback" not in captured.err
    assert "indexing errors" not in captured.err
    assert not (folder / "runs").exists()


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert mrl() == 0
    assert "mrl train quickstart" in capsys.readouterr().out
    assert mrl("--version") == 0


HELPS = {
    "train": "mrl train quickstart",
    "plan": "mrl plan recipe.yaml --backend modal",
    "eval": "mrl eval my-run",
    "sample": "mrl sample starter",
    "runs": "mrl runs compare",
    "logs": "mrl logs my-run",
    "report": "one self-contained HTML file",
    "checkpoints": "mrl checkpoints RUN verify",
    "replay": "mrl replay RUN",
    "sandbox": "mrl sandbox run --help",
    "sandbox run": "FILE",
    "env": "mrl env serve --help",
    "env list": "List",
    "env tasks": "NAME",
    "env serve": "file.py:Class",
    "doctor": "try every engine",
    "cache": "clear",
    "runs list": "List",
    "runs show": "Show",
    "runs compare": "Compare",
    "runs rollouts": "Print",
    "runs export": "Write",
    "runs delete": "Delete",
    "sandbox check": "layer",
}


def test_every_help_shows_how_to_use_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert {name.split()[0] for name in HELPS} == set(COMMANDS)
    for command, words in HELPS.items():
        assert mrl(*command.split(), "--help") == 0
        shown = capsys.readouterr().out
        assert words in shown, command
        assert "{None}" not in shown, command
        assert not re.search(r"^usage:.* STR$", shown, re.MULTILINE), "what is typed there has a name"


def test_help_of_train_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert mrl("train", "--help") == 0
    shown = capsys.readouterr().out
    names = [name for _, names in TRAIN_BASICS.values() for name in names]
    assert len(names) == 20
    flags = [(ALIASES.get(name) or [f"--{name.replace('_', '-')}"])[0] for name in names]
    found = [re.search(rf"(?m)^[│ ]*{flag}\b[ ,\n]", shown).start() for flag in flags]
    assert found == sorted(found), "in the order a user needs them"
    assert "--adam-beta1" not in shown
    assert "--help-all" in shown


def test_eval_and_sample_speak_of_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("eval", "sample"):
        assert mrl(command, "--help") == 0
        shown = capsys.readouterr().out
        words = set(re.findall(r"\w+", shown.lower()))
        assert not {"train", "trains", "training", "loss"} & words, command


def test_import_is_light() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import mrl; s = time.perf_counter() - t; "
        "assert s < 0.5, s; heavy = {'torch', 'transformers', 'datasets', 'pydantic'} & set(sys.modules); "
        "assert not heavy, heavy; assert 'MRLTrainer' in dir(mrl) or mrl.MRLTrainer"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
