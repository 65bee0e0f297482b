"""Going on with a run: what it takes up, what may change, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from mrl import MRLTrainer
from mrl.cli.main import main
from mrl.config import OrchestratorConfig
from mrl.errors import ConfigError
from mrl.loop.replay import replay
from mrl.loop.resume import MAY_CHANGE, NEVER, check_same_run, is_description, stored_options
from mrl.store.checkpoints import list_checkpoints
from mrl.store.run import read_rows
from tests.small_runs import TASKS, distinct, record_of, run, same_weights, steps_of, tensors_of


@pytest.mark.slow
def test_a_longer_run_goes_on_from_the_shorter_one(tiny_model: str, four_steps: Path, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "whole", max_steps=6)
    result = run(tiny_model, four_steps, max_steps=6, resume="auto")
    assert result.steps == 6
    assert steps_of(four_steps) == [1, 2, 3, 4, 5, 6]

    assert record_of(four_steps) == record_of(tmp_path / "whole")


def test_auto_starts_what_is_not_there_yet_and_a_finished_run_stays_finished(tiny_model: str, tmp_path: Path) -> None:
    assert run(tiny_model, tmp_path / "r", max_steps=2, resume="auto").steps == 2
    again = run(tiny_model, tmp_path / "r", max_steps=2, resume="auto")
    assert again.status == "finished"
    assert steps_of(tmp_path / "r") == [1, 2]


def test_a_run_killed_before_its_first_checkpoint_starts_over(tiny_model: str, four_steps: Path) -> None:
    for checkpoint in list_checkpoints(four_steps):
        shutil.rmtree(checkpoint.path)
    assert run(tiny_model, four_steps, max_steps=2, resume="auto").steps == 2
    assert steps_of(four_steps) == [1, 2]


def test_resume_by_name_takes_the_runs_own_options(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps(task) for task in TASKS))
    (tmp_path / "rewards.py").write_text("def r(completions, **_):\n    return [len(set(c)) / 8 for c in completions]")
    flags = ["--model", tiny_model, "--dataset", "tasks.jsonl", "--reward-funcs", "rewards.py:r", "--device", "cpu"]
    more = ["--max-steps", "2", "--run-name", "mine", "--max-completion-length", "6", "--batch-size", "2"]
    for arguments, steps in (([*flags, *more], 2), (["--resume", "mine", "--max-steps", "4"], 4)):
        with pytest.raises(SystemExit) as stopped:
            main(["train", *arguments, "--json"])
        assert stopped.value.code == 0
        assert json.loads(capsys.readouterr().out)["steps"] == steps
    assert steps_of(tmp_path / "runs" / "mine") == [1, 2, 3, 4]
    config = yaml.safe_load((tmp_path / "runs" / "mine" / "config.yaml").read_text())
    assert config["training"]["max_steps"] == 4
    assert config["training"]["batch_size"] == 2


def test_changes_that_make_another_run_are_refused_until_they_are_allowed(tiny_model: str, one_step: Path) -> None:
    changes: dict[str, Any] = {"learning_rate": 1e-4, "batch_size": 3, "seed": 1, "loss_type": "grpo"}
    for name, value in changes.items():
        named = "learning_rate: 0.001 -> 0.0001" if name == "learning_rate" else name
        with pytest.raises(ConfigError, match=rf"another run:\n  {named}(.|\n)*allow_change=\['{name}'\]"):
            run(tiny_model, one_step, max_steps=2, resume="auto", **{name: value})
    allowed = run(tiny_model, one_step, max_steps=2, resume="auto", allow_change=list(changes), **changes)
    assert allowed.steps == 2


HELD = {"epoch", "position", "put_off", "num_tasks", "seed", "shuffle"}
"""By a checkpoint's data cursor; what is allowed to change is not taken from there."""


def test_a_changed_option_is_allowed_and_taken_or_refused(one_step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option is one that may change, one that never may, or one that counts once it is allowed. The latter take
    effect because a checkpoint holds nothing else in their place: its optimizer is tests/actor/test_optimizer.py's.
    """
    (checkpoint,) = list_checkpoints(one_step)
    state = checkpoint.state
    assert set(state) == {
        *(
            "step",
            "policy_version",
            "order",
            "random",
            "tasks",
            "trackers",
            "gap_in_a_row",
            "best",
            "actor",
            "evaluation_due",
        ),
    }
    assert set(state["order"]) == HELD
    before = stored_options(one_step)
    given = {name: value for name, value in before.items() if not is_description(value)}
    given |= {"resume": None, "allow_change": [], "train_dataset": TASKS, "reward_funcs": distinct}
    config = OrchestratorConfig.from_flat(**given)

    def check(changed: str, *allowed: str) -> None:
        monkeypatch.setattr("mrl.loop.resume.stored_options", lambda _: before | {changed: "<changed>"})
        config.run.allow_change = list(allowed)
        check_same_run(one_step, config)

    for name in before:
        if name in MAY_CHANGE:
            check(name)
            continue
        with pytest.raises(ConfigError, match="whatever allow_change says" if name in NEVER else "allow_change: "):
            check(name)
        if name in NEVER:
            with pytest.raises(ConfigError, match=rf"do not fit these options \({name}: '<changed>' -> "):
                check(name, name)
        else:
            check(name, name)


@pytest.mark.slow
def test_an_allowed_learning_rate_is_the_one_that_is_used(tiny_model: str, tmp_path: Path) -> None:
    changed = {"learning_rate": 1e-4, "seed": 1, "shuffle": False, "batch_size": 1}
    run(tiny_model, tmp_path / "r", max_steps=2)
    run(tiny_model, tmp_path / "r", max_steps=4, resume="auto", allow_change=list(changed), **changed)
    rates = [row["train/learning_rate"] for row in read_rows(tmp_path / "r", "metrics")]
    assert rates == [1e-3, 1e-3, 1e-4, 1e-4]
    last = [row["task_id"] for row in read_rows(tmp_path / "r", "rollouts") if row["step"] > 2]
    assert len(last) == 2 * 3
    by_place = {rollout["task_id"]: rollout["prompt"] for rollout in read_rows(tmp_path / "r", "rollouts")}
    assert [by_place[task] for task in dict.fromkeys(last)] == ["say 4", "say 5"], "unshuffled, after the first four"


LORA = {"use_lora": True, "lora_r": 4, "lora_dropout": 0.0, "beta": 0.1}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "lora"])
def test_a_mixture_of_experts_resumes_bit_for_bit(experts_model: str, tmp_path: Path, changes: dict[str, Any]) -> None:
    options = {"weight_sync_method": "reload", "sync_weights_every": 2, "max_steps": 4, **changes}
    run(experts_model, tmp_path / "whole", **options)
    run(experts_model, tmp_path / "parts", **options)
    for checkpoint in list_checkpoints(tmp_path / "parts")[1:]:
        shutil.rmtree(checkpoint.path)
    run(experts_model, tmp_path / "parts", **options, resume="auto")
    assert same_weights(tmp_path / "whole", tmp_path / "parts")
    assert replay(tmp_path / "parts", 3).exact
    if not changes:
        mine, first = (load_file(tensors_of(path)) for path in (tmp_path / "whole", Path(experts_model)))
        assert mine.keys() == first.keys(), "under the names of the model's own files"
        assert "model.layers.0.mlp.experts.3.gate_proj.weight" in mine


def test_another_length_changes_a_schedule_that_decays(tiny_model: str, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "r", max_steps=1, lr_scheduler_type="linear")
    with pytest.raises(ConfigError, match="max_steps: 1 -> 2"):
        run(tiny_model, tmp_path / "r", max_steps=2, lr_scheduler_type="linear", resume="auto")


def test_other_tasks_and_another_reward_function_are_refused(tiny_model: str, one_step: Path) -> None:
    others = [{"prompt": f"tell {i}"} for i in range(6)]
    with pytest.raises(ConfigError, match="tasks are not those"):
        run(tiny_model, one_step, max_steps=2, resume="auto", train_dataset=others)

    def another(completions: list[str], **_: Any) -> list[float]:
        return [1.0 for _ in completions]

    with pytest.raises(ConfigError, match="reward_funcs"):
        run(tiny_model, one_step, max_steps=2, resume="auto", reward_funcs=another)


def test_what_was_given_in_python_has_to_be_given_again(tiny_model: str, one_step: Path) -> None:
    with pytest.raises(ConfigError, match="was given in Python"):
        MRLTrainer(resume=str(one_step))
    trainer = MRLTrainer(resume=str(one_step), train_dataset=TASKS, reward_funcs=distinct, max_steps=2)
    assert trainer.train().steps == 2


def test_unknown_runs_and_options(tiny_model: str, one_step: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run 'nowhere'"):
        MRLTrainer(resume="nowhere")
    with pytest.raises(ConfigError, match="resume='auto': auto needs run_dir or run_name"):
        MRLTrainer(resume="auto")
    with pytest.raises(ConfigError, match="allow_change has an effect only with resume"):
        MRLTrainer(allow_change=["seed"])
    with pytest.raises(ConfigError, match="there is no option sede"):
        run(tiny_model, one_step, resume="auto", allow_change=["sede"])
