"""TRL's GRPO loop in simple mode: the very loop, recorded, resumed, and stopped as any other run."""

from __future__ import annotations

import copy
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mrl.cli.main import main
from mrl.errors import CheckpointError, ConfigError, DataError, RewardError, TrainingError
from mrl.loop.recorded_run import RunResult
from mrl.loop.replay import replay
from mrl.store.checkpoints import list_checkpoints
from mrl.store.progress import Progress
from mrl.store.run import RunStore, read_rows
from mrl.system import interrupts
from mrl.tracking.console import ConsoleTracker
from tests.soak import rows_but

Train = Callable[..., RunResult]


def rows_of(folder: Path, what: str = "rollouts") -> list[dict[str, Any]]:
    return list(read_rows(folder / "run", what))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_it_is_trls_own_loop(simple: Train, tiny_model: str, tmp_path: Path) -> None:
    """The same weights, bit for bit, as GRPOTrainer gives with the same settings written by hand."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    def by_hand(completions: list[Any], **_: Any) -> list[float]:
        return [len(set(message[0]["content"])) / 8 for message in completions]

    beta, parts = 0.05, 2
    result = simple(beta=beta, gradient_accumulation_steps=parts, num_iterations=2, weight_decay=0.1, warmup_steps=1)
    config = GRPOConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=parts,
        num_generations=4,
        num_iterations=2,
        max_steps=6,
        max_completion_length=8,
        learning_rate=1e-2,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        weight_decay=0.1,
        beta=beta,
        loss_type="dapo",
        epsilon=0.2,
        temperature=1.0,
        gradient_checkpointing=False,
        seed=42,
        data_seed=42,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    prompts = [{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(10)]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32),
        args=config,
        reward_funcs=by_hand,
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(tiny_model),
    )
    trainer.train()
    mine = weights_of(result.checkpoint)
    theirs = {name: tensor for name, tensor in trainer.model.state_dict().items() if name in mine}
    assert set(mine) == set(theirs)
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name
    start = load_file(Path(tiny_model) / "model.safetensors")
    assert any(not torch.equal(start[name], mine[name]) for name in mine)


@pytest.mark.usefixtures("pictures")
def test_everything_is_recorded(simple: Train, tmp_path: Path) -> None:
    result = simple(eval_dataset=[{"prompt": f"tell {i}", "want": "a"} for i in range(3)], eval_steps=2, save_steps=2)
    assert (result.status, result.steps) == ("finished", 3)
    rows = rows_of(tmp_path)
    assert len(rows) == 3 * 4 * 4
    for row in rows:
        sample = row["samples"][0]
        assert row["prompt"].startswith("say")
        assert isinstance(row["completion"], str)
        assert row["messages"][-1] == {"role": "assistant", "content": row["completion"]}
        assert row["reward"] == row["rewards"]["distinct"]
        assert len(sample["completion_ids"]) == len(sample["mask"]) > 0
        assert sample["prompt_ids"][-1] != sample["prompt_ids"][0]
        assert sample["policy_version"] == row["step"] - 1
        assert sample["finish_reason"] == ("stop" if sample["completion_ids"][-1] == 256 else "length")
    for group in {(row["step"], row["task_id"]) for row in rows}:
        advantages = [row["advantage"] for row in rows if (row["step"], row["task_id"]) == group]
        assert len(advantages) == 4
        assert sum(advantages) == pytest.approx(0, abs=1e-4)
    metrics = rows_of(tmp_path, "metrics")
    assert [row["step"] for row in metrics] == [1, 2, 3]
    needed = {"reward/mean", "reward/distinct/mean", "train/loss", "train/grad_norm", "train/entropy", "time/generate"}
    assert needed | {"train/learning_rate", "rollout/tokens_per_second", "time/step"} <= set(metrics[0])
    assert not [name for name in metrics[0] if name.startswith(("trl/reward", "trl/completions"))]
    assert [row["step"] for row in rows_of(tmp_path, "eval_metrics")] == [0, 2, 3]
    assert len(rows_of(tmp_path, "eval_rollouts")) == 3 * 3
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "run")] == [2, 3]
    assert not any(problem for checkpoint in list_checkpoints(tmp_path / "run") for problem in checkpoint.problems())
    with pytest.raises(ConfigError, match="cannot be replayed"):
        replay(tmp_path / "run", 2)
    assert (tmp_path / "run" / "reward.png").stat().st_size > 5000
    assert not (tmp_path / "run" / "trl").exists()
    started = next(event for event in rows_of(tmp_path, "events") if event["kind"] == "start")
    assert started["trl"]["num_generations"] == 4


@pytest.mark.slow
def test_the_reward_goes_up(simple: Train, tmp_path: Path) -> None:
    def share_of_a(completions: list[str], **_: Any) -> list[float]:
        return [text.count("a") / max(len(text), 1) for text in completions]

    simple(max_steps=25, num_generations=8, reward_funcs=share_of_a)
    rewards = [row["reward/mean"] for row in rows_of(tmp_path, "metrics")]
    assert sum(rewards[:3]) / 3 < 0.05
    assert sum(rewards[-3:]) / 3 > 0.8


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "after"), rows_but([(False, 2), (True, 3)], [(False, 2), (False, 3), (True, 3)]))
def test_a_resumed_run_equals_an_uninterrupted_one(simple: Train, tmp_path: Path, lora: bool, after: int) -> None:
    """After step 2 an epoch ends."""
    options = {"use_lora": lora, "num_iterations": 2, "beta": 0.05, "save_steps": 1, "max_steps": 4}
    whole = simple(run_dir=str(tmp_path / "whole"), **options)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for step in range(after + 1, 5):  # as if it had been killed after that step's checkpoint
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step}", ignore_errors=True)
    again = simple(resume=str(tmp_path / "run"), **options)
    assert again.steps == 4
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    expected, found = load_file(whole.checkpoint / file), load_file(again.checkpoint / file)
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    ids = [
        [row["samples"][0]["completion_ids"] for row in read_rows(tmp_path / n, "rollouts")] for n in ("whole", "run")
    ]
    assert ids[0] == ids[1]


@pytest.mark.slow
def test_a_resumed_run_takes_what_was_allowed_to_change(simple: Train, tmp_path: Path) -> None:
    """And no step is credited with the score of an evaluation before it."""
    held_out = [{"prompt": f"tell {i}", "want": "a"} for i in range(4)]
    options = {"save_steps": 1, "eval_dataset": held_out, "eval_steps": 2, "best_metric": "eval/mean"}
    simple(**options, max_steps=2)
    changed = {"learning_rate": 1e-4, "weight_decay": 0.1}
    simple(**options, resume=str(tmp_path / "run"), max_steps=4, **changed, allow_change=list(changed))
    rates = [row["train/learning_rate"] for row in rows_of(tmp_path, "metrics")]
    assert rates == [1e-2, 1e-2, 1e-4, 1e-4]
    best = [checkpoint.state["best"] for checkpoint in list_checkpoints(tmp_path / "run")]
    assert [entry and entry["step"] for entry in best[:3]] == [None, 2, 2]
    stored = torch.load(list_checkpoints(tmp_path / "run")[-1].path / "trainer" / "optimizer.pt", weights_only=True)
    assert {group["weight_decay"] for group in stored["param_groups"]} == {0.1, 0.0}


def test_resume_refuses_another_run(simple: Train, tmp_path: Path) -> None:
    simple(max_steps=1)
    with pytest.raises(ConfigError, match=r"algorithm: 'grpo' -> 'rloo'"):
        simple("rloo", resume=str(tmp_path / "run"), max_steps=1)
    with pytest.raises(ConfigError, match="mode: 'simple' -> 'orchestrated'"):
        simple(resume=str(tmp_path / "run"), max_steps=1, mode="orchestrated")


@pytest.mark.slow
def test_iterations_are_one_step_of_the_record(simple: Train, tmp_path: Path) -> None:
    simple(num_iterations=3, max_steps=2)
    rows = rows_of(tmp_path, "metrics")
    assert [row["step"] for row in rows] == [1, 2]
    assert len(rows_of(tmp_path)) == 2 * 16
    assert rows[0]["train/clipped_high_fraction"] >= 0


@pytest.mark.slow
def test_the_best_checkpoint_is_kept(simple: Train, tmp_path: Path) -> None:
    simple(save_steps=1, save_total_limit=1, best_metric="-train/learning_rate", lr_scheduler_type="constant")
    steps = [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "run")]
    assert steps == [1, 3]  # the first of equal ones, and the last


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_a_checkpoint_that_cannot_be_written(
    policy: str, simple: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mrl.simple import worker

    write = worker.write_checkpoint

    def full_disk(path: Path, *args: Any) -> None:
        if path.name == "step-1":
            raise CheckpointError("no space left")
        write(path, *args)

    monkeypatch.setattr(worker, "write_checkpoint", full_disk)
    if policy == "stop":
        with pytest.raises(CheckpointError, match="no space left"):
            simple(save_steps=1, checkpoint_errors=policy)
        return
    simple(save_steps=1, checkpoint_errors=policy)
    assert [checkpoint.step for checkpoint in list_checkpoints(tmp_path / "run")] == [2, 3]
    assert any(event["kind"] == "checkpoint_failed" for event in rows_of(tmp_path, "events"))


def test_none_is_no_zero_and_told(
    simple: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sometimes(completions: list[str], **_: Any) -> list[float | None]:
        return [None if index % 4 == 1 else float(len(set(text))) for index, text in enumerate(completions)]

    phases: list[str] = []
    monkeypatch.setattr(ConsoleTracker, "phase", lambda self, name, detail: phases.append(name))
    reported: dict[str, Progress] = {}
    monkeypatch.setattr(RunStore, "report", lambda self, facts: reported.setdefault(facts.stage, copy.copy(facts)))
    result = simple(reward_funcs=sometimes, max_steps=1, report_to=["console"])
    assert phases == ["loading data", "trying", "loading", "generating", "scoring", "training"]
    assert list(reported) == phases[2:], "the record says what the display shows"
    training, tokens = reported["training"], sum(row["tokens"] for row in rows_of(tmp_path))
    assert (training.step, training.groups_done, training.groups_wanted, training.tokens) == (1, 4, 4, tokens)
    assert (reported["scoring"].groups_done, reported["scoring"].tokens) == (0, tokens)
    assert [worker.name for worker in training.workers] == ["simple"]
    cause = "no reward function scored it (sometimes returned None)"
    assert result.warnings[0] == f"4 of 16 rollouts could not be scored: {cause}"
    assert f"step 1: 4 of 16 rollouts could not be scored and are left out: {cause}" in capsys.readouterr().err
    rows = rows_of(tmp_path)
    failed = [row for row in rows if row["status"] == "failed"]
    assert len(failed) == 4
    assert all(row["reward"] is None and row["advantage"] is None and "sometimes" in row["error"] for row in failed)
    assert rows_of(tmp_path, "metrics")[0]["rollout/failed_fraction"] == 0.25
    group = [row for row in rows if row["task_id"] == rows[0]["task_id"] and row["status"] == "ok"]
    assert sum(row["advantage"] for row in group) == pytest.approx(0, abs=1e-4)


def test_too_many_failures_stop_the_run_and_nothing_is_lost(simple: Train, tmp_path: Path) -> None:
    def broken(completions: list[str], **_: Any) -> list[float]:
        raise KeyError("gold")

    with pytest.raises(TrainingError, match=r"16 of 16 rollouts.*\n.*16 x .*broken.*KeyError"):
        simple(reward_funcs=broken)
    assert len(rows_of(tmp_path)) == 16


def test_a_reward_of_the_wrong_length_stops_the_run(simple: Train, tmp_path: Path) -> None:
    def short(completions: list[str], **_: Any) -> list[float]:
        return [1.0]

    with pytest.raises(RewardError, match=r"short.*1.*16"):
        simple(reward_funcs=short)
    assert len(rows_of(tmp_path)) == 16


@pytest.mark.slow
def test_weights_and_several_rewards_join_as_in_the_other_mode(simple: Train, tmp_path: Path) -> None:
    def length(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    def once(completions: list[str], **_: Any) -> list[float]:
        return [1.0 for _ in completions]

    simple(reward_funcs=[length, once], reward_weights=[0.5, 2.0], max_steps=1)
    for row in rows_of(tmp_path):
        assert row["reward"] == pytest.approx(0.5 * row["rewards"]["length"] + 2.0)
    assert "reward/once/mean" in rows_of(tmp_path, "metrics")[0]


@pytest.mark.slow
def test_rewards_normalised_one_by_one_reach_trl_one_by_one(simple: Train, tmp_path: Path) -> None:
    def length(completions: list[str], **_: Any) -> list[float]:
        return [1000.0 * len(set(text)) for text in completions]

    def vowels(completions: list[str], **_: Any) -> list[float]:
        return [sum(letter in "aeiou" for letter in text) / 8 for text in completions]

    simple(reward_funcs=[length, vowels], max_steps=1, advantage_type="gdpo")
    rows = rows_of(tmp_path)[:4]
    lengths = torch.tensor([row["rewards"]["length"] for row in rows])
    advantages = torch.tensor([row["advantage"] for row in rows])
    # The larger scale does not drown the other: the order is not that of the lengths alone wherever vowels differ.
    assert torch.isfinite(advantages).all()
    assert lengths.max() >= 1000


@pytest.mark.slow
def test_code_is_judged_in_the_sandbox(simple: Train, tmp_path: Path) -> None:
    tasks = [
        {"prompt": f"Write a function f(n) that returns {i}.", "testcases": [f"assert f(1) == {i}"]} for i in range(4)
    ]
    simple(model="starter", train_dataset=tasks, reward_funcs="sandbox", max_completion_length=48, max_steps=1)
    rows = rows_of(tmp_path)
    assert {row["status"] for row in rows} == {"ok"}
    assert any(row["extra"]["verdict"]["status"] in ("passed", "failed", "error") for row in rows)


@pytest.mark.slow
def test_messages_and_plain_text(simple: Train, untied_model: str, tmp_path: Path) -> None:
    seen: list[Any] = []

    async def reward(prompts: list[Any], completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
        seen.append((prompts[0], completions[0], trainer_state.global_step))
        return [float(len(c[0]["content"])) for c in completions]

    tasks = [{"prompt": [{"role": "user", "content": f"hi {i}"}]} for i in range(4)]
    simple(train_dataset=tasks, reward_funcs=reward, max_steps=1, system_prompt="be brief")
    prompt, completion, step = seen[0]
    assert prompt == [{"role": "user", "content": prompt[0]["content"]}]
    assert completion[0]["role"] == "assistant"
    assert step == 1
    assert [m["role"] for m in rows_of(tmp_path)[0]["messages"]] == ["system", "user", "assistant"]
    simple(model=untied_model, run_dir=str(tmp_path / "plain"), max_steps=1)
    row = next(read_rows(tmp_path / "plain", "rollouts"))
    assert isinstance(row["completion"], str)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"train_dataset": None}, ConfigError, "no dataset"),
        ({"train_dataset": [{"question": "x"}]}, DataError, "prompt"),
        ({"train_dataset": [{"prompt": "x", "want": "a"}]}, ConfigError, "batch_size=.*use 1 or less"),
        ({"train_dataset": [{"prompt": "x " * 200, "want": "a"}]}, DataError, "max_model_len"),
        ({"max_completion_length": 300}, ConfigError, "max_completion_length=300: 300 tokens leave no room"),
        ({"reward_funcs": "nowhere.py:f"}, RewardError, "nowhere.py"),
        ({"backend": "cloud"}, ConfigError, "backend"),
        ({"engine": "vllm"}, ConfigError, "engine='vllm': 'vllm' has no meaning"),
        ({"algorithm": "gpro"}, ConfigError, "algorithm='gpro': 'gpro' is not available; did you mean 'grpo'"),
        ({"eval_steps": 1}, ConfigError, "eval_split or eval_dataset"),
    ],
)
def test_trouble_is_found_before_anything_is_loaded(
    options: dict[str, Any], error: type[Exception], message: str, simple: Train, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        simple(**({"algorithm": "grpo"} | options))
    assert not (tmp_path / "run").exists()


def test_without_trl_it_says_what_to_install(simple: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "trl" else find(name, *a))
    with pytest.raises(ConfigError, match=r"pip install 'mrl\[trl\]'"):
        simple()


def test_not_finite_stops_the_run(simple: Train, tmp_path: Path) -> None:
    def huge(completions: list[str], **_: Any) -> list[float]:
        return [1e30 * index for index, _ in enumerate(completions)]

    with pytest.raises(TrainingError, match="not finite"):
        simple(reward_funcs=huge, scale_rewards="none", learning_rate=1e4, max_grad_norm=1e30, max_steps=8)
    assert rows_of(tmp_path)


@pytest.mark.slow
def test_the_command_line(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(8)))
    (tmp_path / "r.py").write_text("def length(completions, **_):\n    return [len(set(t)) / 8 for t in completions]\n")
    common = ["--model", tiny_model, "--device", "cpu", "--dataset", "tasks.jsonl", "--reward-funcs", "r.py:length"]
    small = ["--max-steps", "2", "--batch-size", "2", "--max-completion-length", "8", "--top-p", "1"]

    def mrl(*arguments: str) -> int:
        with pytest.raises(SystemExit) as stopped:
            main(list(arguments))
        return int(stopped.value.code or 0)

    extra = ["--trl-args", "max_grad_norm=1"]
    assert mrl("train", *common, *small, "--simple-mode", *extra) == 2
    assert "own option --max-grad-norm" in capsys.readouterr().err
    assert mrl("train", *common, *small, "--simple-mode", "--mode", "orchestrated") == 2
    assert "only one" in capsys.readouterr().err
    named = ["--run-name", "r", "--trl-args", "repetition_penalty=1.1", "--eval-split", "train"]
    assert mrl("train", *common, *small, "--simple-mode", *named) == 0
    assert "reward.png" in capsys.readouterr().out
    assert mrl("sample", "r", "say 3", "--max-tokens", "4", "--json") == 0
    assert json.loads(capsys.readouterr().out)["completions"][0]["tokens"] <= 4
    scored = [
        "--dataset",
        "tasks.jsonl",
        "--reward-funcs",
        "r.py:length",
        "--device",
        "cpu",
        "--max-tokens",
        "4",
        "--json",
    ]
    assert mrl("eval", "r", *scored) == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == 8
    assert mrl("checkpoints", "r", "verify") == 0
    assert mrl("runs", "rollouts", "r", "--limit", "2") == 0
    assert mrl("train", "--resume", "r", "--max-steps", "3", "--json") == 0
    out = capsys.readouterr().out
    assert json.loads(out[out.index("{\n") :])["steps"] == 3


@pytest.mark.slow
@pytest.mark.inline("its reward function interrupts its own process")
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_keeps_the_step_and_the_command_that_is_shown_goes_on(
    number: int, tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(interrupts.os, "_exit", sys.exit)  # threads of other tests may be alive
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(4)))
    (tmp_path / "rewards.py").write_text(
        "import os\ncalls = 0\ndef r(completions, **_):\n    global calls\n    calls += 1\n"
        f"    if calls == 3: os.kill(os.getpid(), {int(number)})\n    return [len(set(c)) / 8 for c in completions]\n"
    )

    def mrl(command: str) -> int:
        with pytest.raises(SystemExit) as stopped:
            main(shlex.split(command)[1:])
        return int(stopped.value.code or 0)

    sizes = "--batch-size 2 --max-completion-length 6 --max-model-len 256 --max-steps 3 --device cpu"
    tasks = "--dataset tasks.jsonl --reward-funcs rewards.py:r --run-name r"
    assert mrl(f"mrl train --simple-mode --model {tiny_model} {tasks} {sizes}") == 128 + number
    said = capsys.readouterr()  # the first call was the trial before the run, so this was step 2
    assert f"{signal.Signals(number).name}: finishing this step and writing a checkpoint" in said.err
    kept, _, go_on = said.out.strip().splitlines()[-1].partition(" Go on with: ")
    assert (kept, go_on) == ("Kept: runs/r/checkpoints/step-2.", "mrl train --resume r")
    assert mrl(go_on) == 0
    assert [row["step"] for row in read_rows(tmp_path / "runs" / "r", "metrics")] == [1, 2, 3]
    assert "mrl eval r --split train" in capsys.readouterr().out


@pytest.mark.inline("its reward function counts its calls in this process")
def test_ctrl_c_ends_after_the_step_with_a_checkpoint(simple: Train, tmp_path: Path) -> None:
    calls, process = 0, os.getpid()

    def interrupting(completions: list[str], **_: Any) -> list[float]:
        nonlocal calls
        calls += 1
        if calls == 3:  # before the run it is tried once
            os.kill(process, signal.SIGINT)
        return [float(i) for i, _ in enumerate(completions)]

    result = simple(reward_funcs=interrupting, max_steps=1000)
    steps = len(rows_of(tmp_path, "metrics"))
    assert (result.status, result.steps, 0 < steps < 9) == ("interrupted", steps, True)
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / f"step-{steps}"
    assert any("finishing this step" in row["message"] for row in rows_of(tmp_path, "events"))
