"""TRL's other trainers: each trains, is recorded and goes on; data of the wrong shape is refused before that."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mrl.cli.main import main
from mrl.errors import ConfigError, DataError, ModelError, TrainingError
from mrl.loop.recorded_run import RunResult
from mrl.loop.report import read_curve
from mrl.models import load_model
from mrl.store.run import read_rows
from tests.soak import but

Train = Callable[..., RunResult]
OTHERS = ("rloo", "online_dpo", "sft", "dpo", "kto", "reward")


@pytest.mark.parametrize(
    ("algorithm", "lora"),
    [
        ("rloo", True),
        ("dpo", False),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in OTHERS if name != "dpo"),
        *(pytest.param(name, True, marks=pytest.mark.soak) for name in OTHERS if name != "rloo"),
    ],
)
def test_it_trains_and_is_recorded(algorithm: str, lora: bool, simple: Train, tiny_model: str, tmp_path: Path) -> None:
    # KTO's first step has no gradient where a batch holds one label only: the data alternate.
    result = simple(algorithm, use_lora=lora, save_steps=2)
    assert (result.status, result.steps) == ("finished", 3)
    metrics = list(read_rows(tmp_path / "run", "metrics"))
    assert [row["step"] for row in metrics] == [1, 2, 3]
    assert all(row["train/learning_rate"] == 1e-2 for row in metrics)
    assert any(row["train/grad_norm"] > 0 for row in metrics)
    saved = load_file(result.checkpoint / ("adapter_model.safetensors" if lora else "model.safetensors"))
    if lora:
        assert any("lora_B" in name and tensor.abs().max() > 0 for name, tensor in saved.items())
    else:
        start = load_file(Path(tiny_model) / "model.safetensors")
        assert any(not torch.equal(start[name], saved[name]) for name in start if name in saved)
    rollouts = list(read_rows(tmp_path / "run", "rollouts"))
    per_step = {"rloo": 16, "online_dpo": 8}.get(algorithm, 0)
    assert sum(row["step"] == 1 for row in rollouts) == per_step
    for row in rollouts:
        assert row["samples"][0]["prompt_ids"]
        assert row["reward"] == row["rewards"]["distinct"]
        assert (row["advantage"] is None) == (algorithm == "online_dpo")
    assert read_curve(tmp_path / "run").what == ("reward" if per_step else "loss")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", but(("rloo", "dpo"), ["rloo", "sft", "dpo", "kto", "reward"]))
def test_held_out_data_are_evaluated(algorithm: str, simple: Train, tmp_path: Path) -> None:
    from tests.simple.conftest import DATA

    simple(algorithm, eval_dataset=DATA[algorithm][:4], eval_steps=2)
    rows = list(read_rows(tmp_path / "run", "eval_metrics"))
    assert [row["step"] for row in rows] == [0, 2, 3]
    assert all(("eval/mean" if algorithm == "rloo" else "eval/loss") in row for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", but(("rloo", "kto"), OTHERS))
def test_a_resumed_run_equals_an_uninterrupted_one(algorithm: str, simple: Train, tmp_path: Path) -> None:
    options = {"save_steps": 1, "max_steps": 3}
    whole = simple(algorithm, run_dir=str(tmp_path / "whole"), **options)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for step in (2, 3):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step}")
    again = simple(algorithm, resume=str(tmp_path / "run"), **options)
    expected, found = (load_file(r.checkpoint / "model.safetensors") for r in (whole, again))
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_sft_learns_what_it_is_shown_and_the_policy_answers_with_it(
    simple: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = simple("sft", max_steps=60, batch_size=8)
    assert list(read_rows(tmp_path / "run", "metrics"))[-1]["train/loss"] < 0.1
    assert (tmp_path / "run" / "loss.png").stat().st_size > 5000
    with pytest.raises(SystemExit):
        main(["sample", str(result.run_dir), "say 3", "--temperature", "0", "--max-tokens", "8", "--json"])
    assert json.loads(capsys.readouterr().out)["completions"][0]["text"] == "aaa"


def test_epochs_count_every_example(simple: Train) -> None:
    assert simple("sft", max_steps=-1, num_epochs=2, gradient_accumulation_steps=2).steps == 6  # 4 + 4 + 2, twice


def test_trls_own_options_arrive(simple: Train, tmp_path: Path) -> None:
    simple("dpo", max_steps=1, trl_args={"beta": 0.5, "label_smoothing": 0.25})
    recorded = next(row for row in read_rows(tmp_path / "run", "events") if row["kind"] == "start")["trl"]
    assert (recorded["beta"], recorded["label_smoothing"]) == (0.5, 0.25)


def test_a_trainers_refusal_is_a_message(simple: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MRL_RUNS", str(tmp_path))
    with pytest.raises(ConfigError, match="algorithm='dpo': dpo: TRL says"):
        simple("dpo", trl_args={"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]})
    with pytest.raises(TrainingError, match=r"algorithm: dpo: TRL says .*nonsense"):
        simple("dpo", run_dir=None, run_name=None, trl_args={"loss_type": ["nonsense"]})


def test_a_score_model_is_no_language_model(simple: Train, tmp_path: Path) -> None:
    from mrl.config import ModelConfig

    result = simple("reward", max_steps=1)
    with pytest.raises(ModelError, match="score instead of text"):
        load_model(ModelConfig(model=str(result.run_dir)))


def test_online_dpo_never_takes_none_for_zero(simple: Train, tmp_path: Path) -> None:
    def sometimes(completions: list[str], **_: Any) -> list[float | None]:
        return [None if index == 1 else 1.0 for index, _ in enumerate(completions)]

    with pytest.raises(TrainingError, match=r"could not be scored.*take it for 0"):
        simple("online_dpo", reward_funcs=sometimes)
    assert len(list(read_rows(tmp_path / "run", "rollouts"))) == 8


MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.mark.parametrize(
    ("algorithm", "rows"),
    [
        ("sft", [{"messages": MESSAGES}] * 4),
        ("sft", [{"text": "once upon a time"}] * 4),
        ("sft", [{"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}] * 4),
        ("dpo", [{"chosen": MESSAGES, "rejected": [*MESSAGES[:1], {"role": "assistant", "content": "no"}]}] * 4),
        ("reward", [{"chosen": "good", "rejected": "bad"}] * 4),
        ("kto", [{"prompt": MESSAGES[:1], "completion": "ho", "label": k % 2 == 0} for k in range(4)]),
    ],
)
def test_shapes_of_data(algorithm: str, rows: list[dict[str, Any]], simple: Train) -> None:
    assert simple(algorithm, train_dataset=rows, max_steps=1).status == "finished"


@pytest.mark.parametrize(
    ("algorithm", "rows", "message"),
    [
        (
            "sft",
            [{"prompt": "x"}],
            "learns from the columns 'messages', or 'prompt' .* 'completion', or 'text'; there are prompt",
        ),
        ("sft", [{"prompt": "x", "response": "y"}], "rename"),
        ("dpo", [{"prompt": "x", "chosen": "y"}], "'prompt' . 'chosen' . 'rejected'"),
        ("dpo", [{"chosen": "y", "rejected": "z"}], "needs a column 'prompt'"),
        (
            "dpo",
            [{"prompt": "x", "chosen": "y", "rejected": "z"}, {"prompt": "x", "chosen": "", "rejected": "z"}],
            "row 1, column 'chosen' is empty",
        ),
        ("dpo", [{"prompt": "x", "chosen": "y", "rejected": MESSAGES}], "mixes text and messages"),
        ("kto", [{"prompt": "x", "completion": "y"}], "'label'"),
        ("kto", [{"prompt": "x", "completion": "y", "label": "yes"}], "row 0, column 'label' is 'yes'"),
        ("reward", [{"chosen": 3, "rejected": "z"}], "row 0, column 'chosen' is of type int"),
        ("sft", [{"messages": [{"content": "x"}]}], "row 0, column 'messages', message 0"),
        ("sft", [{"messages": "x"}], "a list of messages"),
    ],
)
def test_data_of_the_wrong_shape_are_refused_before_the_model_is_loaded(
    algorithm: str, rows: list[dict[str, Any]], message: str, simple: Train, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        simple(algorithm, train_dataset=rows, model="/no/such/model")
    assert not (tmp_path / "run").exists()


def test_messages_need_a_template(simple: Train, untied_model: str) -> None:
    with pytest.raises(DataError, match="no chat template"):
        simple("sft", model=untied_model, train_dataset=[{"messages": MESSAGES}] * 4)
    simple("sft", model=untied_model, max_steps=1)


def test_rewards_are_refused_where_nothing_is_rewarded(simple: Train) -> None:
    with pytest.raises(ConfigError, match="reward_funcs='sandbox_partial': 'sandbox_partial' has no meaning"):
        simple("sft", reward_funcs="sandbox_partial")


def test_the_command_line(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"say {i}", "reply": "aaa"} for i in range(8)]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train = ["train", "--model", tiny_model, "--device", "cpu", "--dataset", "answers.jsonl", "--max-steps", "2"]
    names = ["--prompt-column", "question", "--rename", "reply=completion"]
    with pytest.raises(SystemExit) as stopped:
        main(
            [
                *train,
                *names,
                "--simple-mode",
                "--algorithm",
                "sft",
                "--run-name",
                "r",
                "--trl-args",
                '{"packing": false}',
            ]
        )
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    assert "loss.png" in out
    assert "mrl sample" in out
    assert "mrl eval" not in out
