"""What is taken over from a run when it is evaluated or sampled from, on runs that are only a record."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from mrl.cli.inherit import eval_command, inherit_all, inherit_prompts, similar_run, was_trained_on
from mrl.config import OrchestratorConfig
from mrl.errors import CheckpointError, ConfigError
from mrl.evals.run_models import find_run_of
from mrl.loop.resume import record_options
from mrl.store.checkpoints import write_checkpoint
from mrl.store.find import shortest_name


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a run's record with checkpoints of steps 20 and 40, and gives its folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("tasks.jsonl", "rewards.py", "others.jsonl"):
        (tmp_path / name).write_text("")

    def write(name: str = "run", **options: Any) -> Path:
        run = Path("runs") / name
        for step in (20, 40):
            (run / "checkpoints").mkdir(parents=True, exist_ok=True)
            write_checkpoint(run / "checkpoints" / f"step-{step}", lambda folder: None, {"best": {"step": 20}})
        record_options(run, OrchestratorConfig.from_flat(**options))
        return run

    return write


def taken(run: Path, **given: Any) -> dict[str, Any]:
    """All that is taken over and is not the default."""
    found = find_run_of(str(run))
    assert found is not None
    defaults = OrchestratorConfig().flat()
    options = inherit_all(*found, given).options
    return {name: value for name, value in options.items() if value != defaults[name]}


OWN = {
    "dataset_name": "tasks.jsonl",
    "eval_dataset": "held.jsonl",
    "prompt_column": "question",
    "rename": {"gold": "answer"},
    "reward_funcs": ["rewards.py:a", "rewards.py:b"],
    "reward_weights": [1.0, 2.0],
    "sandbox": "process",
    "sandbox_timeout": 5.0,
    "sandbox_memory_mb": 99,
    "reward_timeout": 7.0,
    "prompt_format": "chat",
    "system_prompt": "Be brief.",
    "chat_template_kwargs": {"enable_thinking": False},
    "max_completion_length": 64,
    "max_model_len": 256,
    "stop": ["\n\n"],
    "dtype": "float32",
}


def test_everything_that_decides_the_score_is_taken_over(record: Any) -> None:
    run = record(**OWN, temperature=0.5, learning_rate=1e-3)
    expected = {n: v for n, v in OWN.items() if n not in ("eval_dataset", "max_completion_length")}
    assert taken(run) == expected | {"dataset_name": "held.jsonl", "max_tokens": 64}
    prompts = inherit_prompts(*find_run_of("run"), {"stop": ["x"]}).options
    assert prompts == {
        "prompt_format": "chat",
        "system_prompt": "Be brief.",
        "chat_template_kwargs": {"enable_thinking": False},
        "max_tokens": 64,
        "max_model_len": 256,
        "dtype": "float32",
    }
    assert inherit_prompts(*find_run_of("run"), {"prompt_format": "text"}).options.get("system_prompt") is None
    assert taken(record("longer", **OWN, max_tokens=99))["max_tokens"] == 99


def test_flags_override_and_take_what_belongs_together(record: Any) -> None:
    run = record(**OWN, sandbox_options={"slots": 2})
    given = {"reward_funcs": ["rewards.py:c"], "max_tokens": 8, "sandbox": "local", "prompt_column": None}
    options = taken(run, **given)
    gone = {"reward_funcs", "reward_weights", "max_tokens", "sandbox", "sandbox_options", "prompt_column"}
    assert not gone & {*options}
    assert options["system_prompt"] == "Be brief."


@pytest.mark.parametrize(
    ("recorded", "given", "dataset", "split"),
    [
        ({"dataset_name": "tiny-code", "eval_split": "heldout"}, {}, "tiny-code", "heldout"),
        ({"dataset_name": "tiny-code"}, {}, "tiny-code", None),  # held out by its own name: heldout
        ({"dataset_name": "team/set", "dataset_config": "a", "eval_split": "dev"}, {}, "team/set", "dev"),
        ({"dataset_name": "team/set", "eval_split": "dev"}, {"dataset_name": "team/set"}, None, "dev"),
        ({"dataset_name": "team/set", "eval_split": "dev"}, {"dataset_name": "else/where"}, None, None),
        ({"dataset_name": "team/set", "eval_split": "dev"}, {"dataset_split": "test"}, "team/set", None),
        ({"dataset_name": "a.jsonl", "eval_dataset": "b.jsonl", "eval_split": "x"}, {}, "b.jsonl", "x"),
        ({"dataset_name": "tasks.jsonl"}, {"dataset_split": "train"}, "tasks.jsonl", None),
    ],
)
def test_held_out_tasks(record: Any, recorded: dict, given: dict, dataset: str | None, split: str | None) -> None:
    run, checkpoint = find_run_of(str(record(**recorded, reward_funcs=["rewards.py:a"])))
    options = inherit_all(run, checkpoint, given).options
    assert options.get("dataset_name") == dataset
    assert options.get("dataset_split") == split
    assert options.get("dataset_config") == recorded.get("dataset_config")


def test_tasks_a_run_was_trained_on_are_asked_for(record: Any) -> None:
    run = record(dataset_name="tasks.jsonl", reward_funcs=["rewards.py:a"])
    with pytest.raises(ConfigError, match=r"no held-out tasks.*--dataset tasks.jsonl --split train"):
        taken(run)
    assert was_trained_on(run, {"dataset_name": "tasks.jsonl", "dataset_split": "train"})
    assert not was_trained_on(run, {"dataset_name": "others.jsonl", "dataset_split": "train"})


def test_tasks_with_a_reward_of_their_own_are_scored_by_it(record: Any) -> None:
    own = record(dataset_name="tasks.jsonl", reward_funcs=["rewards.py:a"])
    assert "reward_funcs" not in taken(own, dataset_name="reasoning_gym:chain_sum")
    assert taken(own, dataset_name="others.jsonl")["reward_funcs"] == ["rewards.py:a"]


def said(text: str) -> str:
    return text


def test_what_was_given_in_python_is_asked_for(record: Any) -> None:
    run = record(dataset_name="tiny-code", reward_funcs=[said])
    with pytest.raises(ConfigError, match=r"its reward was a Python object.*said") as error:
        taken(run)
    assert f"--reward-funcs {__file__}:said" in str(error.value)
    assert "reward_funcs" not in taken(run, reward_funcs=["rewards.py:a"])
    with pytest.raises(ConfigError, match=r"Python object.*e.g. --reward-funcs my_rewards.py:accuracy"):
        taken(record("lambda", dataset_name="tiny-code", reward_funcs=lambda completions, **_: [1.0]))
    rows = record("rows", train_dataset=[{"prompt": "x"}], reward_funcs=["rewards.py:a"])
    with pytest.raises(ConfigError, match=r"its tasks were given in Python.*--dataset"):
        taken(rows)
    assert taken(rows, dataset_name="tasks.jsonl")["reward_funcs"] == ["rewards.py:a"]


def test_a_run_by_any_of_its_names(record: Any, tmp_path: Path) -> None:
    run = record(dataset_name="tiny-code")
    steps = {"run": 40, "run@20": 20, "run@best": 20, "runs/run": 40, "runs/run@20": 20, str(tmp_path / run): 40}
    steps |= {"runs/run/checkpoints/step-20": 20, str(tmp_path / "runs/run/checkpoints/step-40"): 40}
    for name, step in steps.items():
        found, checkpoint = find_run_of(name)
        assert (found.resolve(), checkpoint.step) == ((tmp_path / run).resolve(), step), name
    for name in ("run@30", "run@first", "run@"):
        with pytest.raises(CheckpointError, match="20, 40"):
            find_run_of(name)
    with pytest.raises(ConfigError, match="there is no run 'runs/rnu'"):
        find_run_of("runs/rnu")
    assert find_run_of("starter") is None
    assert find_run_of("Qwen/Qwen2.5-0.5B") is None
    assert similar_run("rum@20") == "run"
    assert similar_run("Qwen/Qwen2.5-0.5B") is None


def test_an_engine_is_taken_over_where_it_can_be(record: Any) -> None:
    vllm = record(dataset_name="tiny-code", engine="vllm", vllm_python=sys.executable, tensor_parallel_size=2)
    missing = record("missing", dataset_name="tiny-code", engine="vllm", vllm_python="/nowhere/python")
    remote = record("remote", dataset_name="tiny-code", engine="vllm-remote", vllm_urls=["http://gpu-box:8000"])
    for run in (missing, remote):
        inherited = inherit_all(*find_run_of(str(run)), {})
        assert not {"engine", "vllm_python", "vllm_urls"} & {*inherited.options}
        assert "is not taken over" in inherited.notes[0]
    asked = inherit_all(*find_run_of(str(vllm)), {"engine": "vllm"}).options
    assert (asked["vllm_python"], asked["tensor_parallel_size"]) == (sys.executable, 2)
    assert "tensor_parallel_size" not in inherit_all(*find_run_of(str(vllm)), {"engine": "transformers"}).options


def test_what_is_taken_over_is_one_line(record: Any) -> None:
    inherited = inherit_all(*find_run_of(str(record(**OWN))), {"dataset_name": "others.jsonl", "max_tokens": 9})
    line = inherited.said({"max_tokens": 1024})
    assert "\n" not in line
    assert line.startswith("as in the run (run, step 40; flags override): ")
    assert "--reward-funcs rewards.py:a rewards.py:b --reward-weights 1.0 2.0" in line
    assert r"--stop $'\n\n'" in line
    assert "--rename gold=answer" in line
    assert "--max-tokens" not in line
    assert "--dataset" not in line


def test_files_a_record_names_are_missed_elsewhere(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(dataset_name="tasks.jsonl", eval_split="train", reward_funcs=["rewards.py:a"]).resolve()
    assert inherit_all(*find_run_of(str(run)), {}).missing_files() == []
    monkeypatch.chdir(run)
    assert inherit_all(*find_run_of(str(run)), {}).missing_files() == ["rewards.py", "tasks.jsonl"]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"dataset_name": "tiny-code"}, "mrl eval run"),
        ({"dataset_name": "tasks.jsonl", "eval_dataset": "others.jsonl"}, "mrl eval run"),
        ({"dataset_name": "some/hub", "eval_split": "validation"}, "mrl eval run"),
        ({"dataset_name": "tasks.jsonl"}, "mrl eval run --split train"),
        ({"dataset_name": "some/hub", "dataset_split": "train[:9]"}, "mrl eval run --split 'train[:9]'"),
        ({"train_dataset": [{"prompt": "x"}]}, None),
        ({"dataset_name": "tasks.jsonl", "reward_funcs": len}, None),
    ],
)
def test_the_shortest_command_that_measures_a_run(options: dict[str, Any], shown: str | None, record: Any) -> None:
    run = record(**({"reward_funcs": ["rewards.py:a"]} | options))
    assert eval_command(run) == shown
    if shown is not None:
        found = find_run_of("run")
        assert found is not None
        words = shlex.split(shown)[3:]
        given = {"dataset_split": words[1]} if words else {}
        assert inherit_all(*found, given).options["dataset_name"]


def test_a_run_is_called_by_its_name_where_that_is_enough(record: Any, tmp_path: Path) -> None:
    run = record(**OWN)
    assert shortest_name(run) == shortest_name(run.resolve()) == "run"
    elsewhere = tmp_path / "other" / "run"
    shutil.copytree(run, elsewhere)
    assert shortest_name(elsewhere) == str(elsewhere)
    for name in ("starter", "-n", "a@b"):
        assert shortest_name(record(name, **OWN)) == f"runs/{name}"
    (tmp_path / "run").mkdir()  # a model's folder, for one
    assert shortest_name(run) == "runs/run"


def test_a_run_on_an_evaluation_test_is_measured_with_that(record: Any) -> None:
    run = record(evaluation_test="my_eval.py")
    assert eval_command(run) == "mrl eval my_eval.py --model run"
    with pytest.raises(ConfigError, match=r"measure it with that: mrl eval my_eval.py --model run"):
        inherit_all(*find_run_of(str(run)), {})
