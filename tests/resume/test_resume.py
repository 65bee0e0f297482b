"""Going on with a run: what may change, what is refused, and what a damaged or missing checkpoint does."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import mrl.environment as environment_module
import mrl.replay as replay_module
import mrl.workers.actor as actor_module
from mrl import MRLTrainer
from mrl.checkpointing import best_so_far
from mrl.cli import main
from mrl.config import OrchestratorConfig
from mrl.errors import CheckpointError, ConfigError
from mrl.models import resolve_model
from mrl.recorded_run import RunResult
from mrl.replay import TOKEN_TOLERANCE, TOLERANCE, Difference, replay
from mrl.resume import MAY_CHANGE, NEVER, check_same_run, is_description, stored_options
from mrl.store.checkpoints import Checkpoint, best_step, list_checkpoints, newest_intact, write_checkpoint
from mrl.store.run import read_rows
from mrl.types import Group, Rollout

TASKS = [{"prompt": f"say {i}"} for i in range(6)]


def length(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text)) / 8 for text in completions]


def options(model: str, folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": model,
        "device": "cpu",
        "train_dataset": TASKS,
        "reward_funcs": length,
        "run_dir": str(folder),
        "report_to": [],
        "batch_size": 2,
        "num_generations": 3,
        "max_completion_length": 6,
        "temperature": 1.0,
        "top_p": 1.0,
        "learning_rate": 1e-3,
        "num_rollout_workers": 1,
        "save_steps": 1,
        "max_steps": 4,
        **changes,
    }


def run(model: str, folder: Path, **changes: Any) -> RunResult:
    return MRLTrainer(**options(model, folder, **changes)).train()


def steps_of(folder: Path) -> list[int]:
    return [row["step"] for row in read_rows(folder, "metrics")]


def test_a_longer_run_goes_on_from_the_shorter_one(tiny_model: str, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "whole", max_steps=6)
    run(tiny_model, tmp_path / "parts", max_steps=3)
    result = run(tiny_model, tmp_path / "parts", max_steps=6, resume="auto")
    assert result.steps == 6
    assert steps_of(tmp_path / "parts") == [1, 2, 3, 4, 5, 6]

    def losses(name: str) -> list[float]:
        return [row.get("train/loss", 0.0) for row in read_rows(tmp_path / name, "metrics")]

    assert losses("parts") == losses("whole")


def test_auto_starts_what_is_not_there_yet_and_a_finished_run_stays_finished(tiny_model: str, tmp_path: Path) -> None:
    assert run(tiny_model, tmp_path / "r", resume="auto").steps == 4
    again = run(tiny_model, tmp_path / "r", resume="auto")
    assert again.status == "finished"
    assert steps_of(tmp_path / "r") == [1, 2, 3, 4]


def test_a_run_killed_before_its_first_checkpoint_starts_over(tiny_model: str, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "r")
    for checkpoint in list_checkpoints(tmp_path / "r"):
        shutil.rmtree(checkpoint.path)
    assert run(tiny_model, tmp_path / "r", resume="auto").steps == 4
    assert steps_of(tmp_path / "r") == [1, 2, 3, 4]


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


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"learning_rate": 1e-4}, "learning_rate: 0.001 -> 0.0001"),
        ({"batch_size": 3}, "batch_size"),
        ({"seed": 1}, "seed"),
        ({"loss_type": "grpo"}, "loss_type"),
    ],
)
def test_changes_that_make_another_run_are_refused_until_they_are_allowed(
    tiny_model: str, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    run(tiny_model, tmp_path / "r", max_steps=1)
    with pytest.raises(ConfigError, match=rf"another run:\n  {named}(.|\n)*allow_change=\['{next(iter(changes))}'\]"):
        run(tiny_model, tmp_path / "r", max_steps=2, resume="auto", **changes)
    allowed = run(tiny_model, tmp_path / "r", max_steps=2, resume="auto", allow_change=list(changes), **changes)
    assert allowed.steps == 2


HELD = {"epoch", "position", "put_off", "num_tasks", "seed", "shuffle"}
"""By a checkpoint's data cursor; what is allowed to change is not taken from there."""


def test_a_changed_option_is_allowed_and_taken_or_refused(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every option is one that may change, one that never may, or one that counts once it is allowed. The latter take
    effect because a checkpoint holds nothing else in their place: its optimizer is tests/workers/test_optimizer.py's.
    """
    run(tiny_model, tmp_path / "r", max_steps=1)
    (checkpoint,) = list_checkpoints(tmp_path / "r")
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
    before = stored_options(tmp_path / "r")
    given = {name: value for name, value in before.items() if not is_description(value)}
    given |= {"resume": None, "allow_change": [], "train_dataset": TASKS, "reward_funcs": length}
    config = OrchestratorConfig.from_flat(**given)

    def check(changed: str, *allowed: str) -> None:
        monkeypatch.setattr("mrl.resume.stored_options", lambda _: before | {changed: "<changed>"})
        config.run.allow_change = list(allowed)
        check_same_run(tmp_path / "r", config)

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


def test_what_is_in_flight_is_packed_beside_a_short_state(tiny_model: str, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "r", max_steps=3, async_mode="pipeline")
    checkpoint = list_checkpoints(tmp_path / "r")[0]
    (ticket,) = checkpoint.in_flight["tickets"]
    assert len(ticket["groups"][0]["rollouts"][0]["samples"][0]["logprobs"]) > 0
    text = (checkpoint.path / "trainer" / "state.json").read_text()
    assert "in_flight" not in text
    assert len(text.splitlines()) < 20
    packed = checkpoint.path / "trainer" / "in_flight.json.gz"
    packed.write_bytes(packed.read_bytes()[:-1] + b"x")
    assert "in_flight.json.gz: damaged" in checkpoint.problems()[0]
    with pytest.raises(CheckpointError, match=r"in_flight\.json\.gz: cannot be read"):
        _ = checkpoint.in_flight


def test_a_checkpoint_with_everything_in_its_state_is_still_resumed(tiny_model: str, tmp_path: Path) -> None:
    """As they were written before what is in flight had a file of its own."""
    for name in ("r", "whole"):
        run(tiny_model, tmp_path / name, max_steps=3, async_mode="pipeline")
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
    assert same_weights(tmp_path / "r", tmp_path / "whole")


LORA = {"use_lora": True, "lora_r": 4, "lora_dropout": 0.0, "beta": 0.1}


@pytest.mark.parametrize("changes", [{}, pytest.param(LORA, marks=pytest.mark.slow)], ids=["full", "lora"])
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


def same_weights(left: Path, right: Path) -> bool:
    """Of the newest checkpoints of two runs."""
    mine, theirs = load_file(tensors_of(left)), load_file(tensors_of(right))
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def tensors_of(folder: Path) -> Path:
    newest = Path(resolve_model(str(folder)))
    return next(iter(sorted(newest.glob("*model.safetensors"))))


def test_another_length_changes_a_schedule_that_decays(tiny_model: str, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "r", max_steps=1, lr_scheduler_type="linear")
    with pytest.raises(ConfigError, match="max_steps: 1 -> 2"):
        run(tiny_model, tmp_path / "r", max_steps=2, lr_scheduler_type="linear", resume="auto")


def test_other_tasks_and_another_reward_function_are_refused(tiny_model: str, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "r", max_steps=1)
    others = [{"prompt": f"tell {i}"} for i in range(6)]
    with pytest.raises(ConfigError, match="tasks are not those"):
        run(tiny_model, tmp_path / "r", max_steps=2, resume="auto", train_dataset=others)

    def another(completions: list[str], **_: Any) -> list[float]:
        return [1.0 for _ in completions]

    with pytest.raises(ConfigError, match="reward_funcs"):
        run(tiny_model, tmp_path / "r", max_steps=2, resume="auto", reward_funcs=another)


def test_what_was_given_in_python_has_to_be_given_again(tiny_model: str, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "r", max_steps=1)
    with pytest.raises(ConfigError, match="was given in Python"):
        MRLTrainer(resume=str(tmp_path / "r"))
    trainer = MRLTrainer(resume=str(tmp_path / "r"), train_dataset=TASKS, reward_funcs=length, max_steps=2)
    assert trainer.train().steps == 2


def test_unknown_runs_and_options(tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run 'nowhere'"):
        MRLTrainer(resume="nowhere")
    with pytest.raises(ConfigError, match="resume='auto': auto needs run_dir or run_name"):
        MRLTrainer(resume="auto")
    with pytest.raises(ConfigError, match="allow_change has an effect only with resume"):
        MRLTrainer(allow_change=["seed"])
    run(tiny_model, tmp_path / "r", max_steps=1)
    with pytest.raises(ConfigError, match="there is no option sede"):
        run(tiny_model, tmp_path / "r", resume="auto", allow_change=["sede"])


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tiny_model: str, tmp_path: Path, damage: str) -> None:
    run(tiny_model, tmp_path / "whole")
    run(tiny_model, tmp_path / "r")
    newest = list_checkpoints(tmp_path / "r")[-1].path
    file = newest / ("manifest.json" if damage == "manifest" else "model.safetensors")
    if damage == "missing":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    else:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0xFF
        file.write_bytes(bytes(content) if damage == "flipped" else b"{")
    intact, problems = newest_intact(tmp_path / "r")
    assert intact is not None
    assert intact.step == 3
    assert str(file) in problems[0]
    assert run(tiny_model, tmp_path / "r", resume="auto").steps == 4
    events = [row["message"] for row in read_rows(tmp_path / "r", "events")]
    assert any("checkpoint not used" in message and str(file) in message for message in events)
    assert any("going on after step 3" in message for message in events)
    assert newest_intact(tmp_path / "r")[0].step == 4


def test_no_intact_checkpoint_never_means_starting_over(tiny_model: str, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "r", max_steps=2)
    for checkpoint in list_checkpoints(tmp_path / "r"):
        (checkpoint.path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint is intact"):
        run(tiny_model, tmp_path / "r", max_steps=3, resume="auto")
    assert steps_of(tmp_path / "r") == [1, 2]


def test_limits_and_best(tiny_model: str, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "r", max_steps=6, save_total_limit=2, best_metric="reward/mean")
    rewards = {row["step"]: row["reward/mean"] for row in read_rows(tmp_path / "r", "metrics")}
    best = max(rewards, key=lambda step: rewards[step])
    assert {c.step for c in list_checkpoints(tmp_path / "r")} == {5, 6, best}
    assert resolve_model(f"{tmp_path / 'r'}@best").endswith(f"step-{best}")
    assert resolve_model(f"{tmp_path / 'r'}@5").endswith("step-5")
    assert resolve_model(str(tmp_path / "r")).endswith("step-6")
    with pytest.raises(CheckpointError, match="no checkpoint '77'"):
        resolve_model(f"{tmp_path / 'r'}@77")


def test_best_of_a_metric_there_is_not(tiny_model: str, tmp_path: Path) -> None:
    """What a reward function was to log, and did not, is found at the first checkpoint; all else before the run."""

    def might_log(completions: list[str], log_metric: Any) -> list[float]:
        return [len(set(text)) / 8 for text in completions]

    with pytest.raises(ConfigError, match="no step has a metric 'reward/maen'; the nearest: reward/mean"):
        run(tiny_model, tmp_path / "r", best_metric="reward/maen")
    assert not (tmp_path / "r").exists()
    with pytest.raises(ConfigError, match="there is no metric 'reward/maen' at step 1"):
        run(tiny_model, tmp_path / "r", best_metric="reward/maen", reward_funcs=might_log)


def test_best_by_an_evaluation_counts_where_there_was_one(tiny_model: str, tmp_path: Path) -> None:
    """The reward falls from call to call: an older score would be credited to steps 3 and 5, and 2 has the best."""
    calls: list[int] = []

    def falling(completions: list[str], **_: Any) -> list[float]:
        calls.append(1)
        return [1 / len(calls) + index / 1000 for index, _ in enumerate(completions)]

    held_out = {"eval_dataset": TASKS[:2], "eval_steps": 2, "best_metric": "eval/mean", "reward_funcs": falling}
    run(tiny_model, tmp_path / "r", **held_out, max_steps=6)
    for step in (4, 5, 6):
        shutil.rmtree(tmp_path / "r" / "checkpoints" / f"step-{step}")
    states = [checkpoint.state["best"] for checkpoint in list_checkpoints(tmp_path / "r")]
    assert [None if best is None else best["step"] for best in states] == [None, 2, 2]
    run(tiny_model, tmp_path / "r", **held_out, max_steps=6, resume="auto")  # its first checkpoint has no evaluation
    assert best_step(tmp_path / "r") == 2
    scores = {row["step"]: row["eval/mean"] for row in read_rows(tmp_path / "r", "eval_metrics")}
    assert Checkpoint(tmp_path / "r" / "checkpoints" / "step-6", 6).state["best"]["value"] == scores[2]


def test_what_is_a_candidate_for_the_best_checkpoint() -> None:
    def best(metrics: dict[str, float], before: dict[str, Any] | None = None, wanted: str = "eval/mean") -> Any:
        found = best_so_far(before, wanted, 9, metrics)
        return found and (found["step"], found["value"])

    before = {"metric": "eval/mean", "value": 0.5, "step": 2}
    assert best({"eval/mean": 0.6}, before) == (9, 0.6)
    assert best({"eval/mean": 0.5}, before) == (2, 0.5)
    assert best({"eval/mean": float("nan")}, before) == (2, 0.5)
    assert best({"reward/mean": 0.5}) is None, "no evaluation was due"
    assert best({"train/tokens": 0.0}, wanted="-train/loss") is None, "the step taught nothing"
    assert best({"train/loss": 0.4}, before, wanted="-train/loss") == (9, 0.4), "another metric begins anew"
    assert best({"eval/mean": 0.6}, before | {"smaller": False}, wanted="-eval/mean") == (9, 0.6)
    for wanted, metrics in {"eval/mena": {"eval/mean": 1.0}, "loss": {}, "train/los": {"train/tokens": 2.0}}.items():
        with pytest.raises(ConfigError, match="best_metric: there is no metric"):
            best(metrics, wanted=wanted)


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


def test_a_full_disk_at_the_last_checkpoint_is_an_error(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, write_files: Any, state: dict[str, Any]) -> None:
        raise CheckpointError("no space")

    monkeypatch.setattr(actor_module, "write_checkpoint", write)
    with pytest.raises(CheckpointError, match="no space"):
        run(tiny_model, tmp_path / "r", save_steps=0)


@pytest.mark.parametrize("changes", [{}, {"use_lora": True, "beta": 0.1}, {"num_iterations": 2}])
def test_replay_recomputes_a_step_exactly(tiny_model: str, tmp_path: Path, changes: dict[str, Any]) -> None:
    run(tiny_model, tmp_path / "r", save_steps=2, max_steps=6, **changes)
    for step in (1, 3, 6):  # from the start, from the checkpoint just before, over a step in between
        result = replay(tmp_path / "r", step)
        assert result.checkpoint == {1: 0, 3: 2, 6: 4}[step]
        assert {"train/loss", "train/grad_norm", "train/entropy"} <= {m.name for m in result.metrics}
        assert [m for m in result.metrics if m.difference != 0.0] == []
        assert result.verdict == "equal"
        assert result.changed == []
        assert result.gradient_norms
    with pytest.raises(ConfigError, match="has no step 9"):
        replay(tmp_path / "r", 9)


def test_replay_shows_what_was_tampered_with(tiny_model: str, tmp_path: Path) -> None:
    run(tiny_model, tmp_path / "r", max_steps=2)
    run(tiny_model, tmp_path / "other", max_steps=2, seed=5)
    shutil.rmtree(tmp_path / "r" / "checkpoints" / "step-1")
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step-1", tmp_path / "r" / "checkpoints" / "step-1")
    result = replay(tmp_path / "r", 2)
    assert result.verdict == "different"
    assert any(m.name == "train/logprob_gap_max" and m.difference > 1e-4 for m in result.metrics)


def test_replay_shows_one_token_and_one_advantage_that_are_wrong(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest faults of interest, beside what other numbers of threads do to the last bits."""
    run(tiny_model, tmp_path / "r", max_steps=1, batch_size=6, num_generations=8, max_completion_length=24)
    stored = replay_module._groups

    def best(group: Group) -> Rollout:
        return max(group.rollouts, key=lambda rollout: rollout.reward or 0.0)

    def one_logprob(group: Group) -> None:
        best(group).samples[0].logprobs[0] -= 0.01

    def one_reward(group: Group) -> None:
        best(group).reward = min(rollout.reward or 0.0 for rollout in group.rollouts)

    for change, name in ((one_logprob, "train/logprob_gap_max"), (one_reward, "train/grad_norm")):

        def groups(run: Path, step: int, change: Any = change) -> list[Group]:
            found = stored(run, step)
            change(next(group for group in found if len({rollout.reward for rollout in group.rollouts}) > 1))
            return found

        monkeypatch.setattr(replay_module, "_groups", groups)
        result = replay(tmp_path / "r", 1)
        assert result.verdict == "different"
        assert name in {m.name for m in result.metrics if not m.is_rounding(result.tolerance, result.token_tolerance)}


@pytest.mark.parametrize(
    ("name", "recorded", "replayed", "rounding"),
    [
        ("train/grad_norm", 0.1144179404, 0.1144179627, True),
        ("train/grad_norm", 0.1144, 0.1150, False),
        ("train/loss", -1.2e-9, 3.4e-9, True),  # a sum that cancels: nothing is left of it but rounding
        ("train/loss", -0.0176, -0.0177, False),
        ("train/logprob_gap", 4.6e-7, 4.5e-7, True),
        ("train/logprob_gap", 4.6e-7, 2e-4, False),
        ("train/logprob_gap_max", 4.6e-6, 1.2e-5, True),
        ("train/logprob_gap_max", 4.6e-6, 0.01, False),
        ("train/logprob_gap_max", 4.6e-6, float("nan"), False),
        ("train/tokens", 9999.0, 10000.0, False),
        ("train/learning_rate", 1e-3, 1.0001e-3, False),
    ],
)
def test_what_rounding_can_do_to_a_metric(name: str, recorded: float, replayed: float, rounding: bool) -> None:
    found = Difference(name, recorded, replayed).is_rounding(TOLERANCE["float32"], TOKEN_TOLERANCE["float32"])
    assert found is rounding


def test_threads_are_recorded_replayed_with_and_named_when_a_run_goes_on_with_others(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    step = actor_module.ActorWorker.train_step

    def train_step(self: Any, batch: Any) -> dict[str, float]:
        seen.append(torch.get_num_threads())
        metrics = step(self, batch)
        metrics["train/grad_norm"] *= 1 + error
        return metrics

    def as_if_with(threads: int) -> None:
        def environment(device: Any) -> dict[str, Any]:
            return environment_module.computing_environment(device) | {"threads": threads}

        monkeypatch.setattr(actor_module, "computing_environment", environment)

    error = 0.0
    mine = torch.get_num_threads()
    as_if_with(2)
    run(tiny_model, tmp_path / "r", max_steps=1)
    as_if_with(1)
    run(tiny_model, tmp_path / "r", max_steps=2, resume="auto")
    events = [row["message"] for row in read_rows(tmp_path / "r", "events")]
    assert "from here on the last bits may be others than without the stop: threads 2 → 1" in events
    for checkpoint in list_checkpoints(tmp_path / "r"):
        shutil.rmtree(checkpoint.path)
    monkeypatch.setattr(actor_module.ActorWorker, "train_step", train_step)
    result = replay(tmp_path / "r", 2)
    assert seen == [2, 1]
    assert result.environment["threads"] == 1
    assert result.changed == []
    assert replay(tmp_path / "r", 1).environment["threads"] == 2
    assert torch.get_num_threads() == mine

    monkeypatch.setattr(replay_module, "computing_environment", lambda device: {"threads": 2, "processor": "another"})
    for error, code, words in ((1e-6, 3, "but for rounding"), (0.1, 4, "not what was recorded")):  # noqa: B007
        with pytest.raises(SystemExit) as stopped:
            main(["replay", str(tmp_path / "r"), "--step", "1"])
        assert stopped.value.code == code
        out = " ".join(capsys.readouterr().out.split())
        assert words in out
        assert "→ another" in out


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
