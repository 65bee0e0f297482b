"""Every example runs as its header says, on few steps."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from mrl.algorithms import ADVANTAGES, LOSSES
from mrl.cli.flags import argument, parse
from mrl.cli.main import main
from mrl.store.run import read_rows
from tests.rollouts.calling_model import build_calling_model

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


Output = pytest.CaptureFixture[str]


def script(path: str, capsys: Output, *arguments: str) -> str:
    """What it prints; in this process, which has imported most of it already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [path, *arguments])
        for registry in (LOSSES, ADVANTAGES):  # what an example registers is gone after it
            patch.setattr(registry, "_registered", dict(registry._registered))
        patch.syspath_prepend(str(Path(path).parent))
        runpy.run_path(path, run_name="__main__")
    return capsys.readouterr().out


def mrl(capsys: Output, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    said = capsys.readouterr()
    assert not ended.value.code, said.err
    return said.out


def test_python_api(folder: Path, capsys: Output) -> None:
    assert "after 2 steps" in script("examples/python_api.py", capsys, "--max-steps", "2")


@pytest.mark.slow
def test_two_rewards(folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "examples")
    out = mrl(capsys, "train", "two_rewards.yaml", "--max-steps", "2", "--eval-samples", "4", "--json")
    metrics = json.loads(out)["metrics"]
    expected = 0.9 * metrics["reward/sandbox/mean"] + 0.1 * metrics["reward/short_and_fenced/mean"]
    assert metrics["reward/mean"] == pytest.approx(expected)
    assert metrics["fenced_fraction"] > 0.5
    assert "train/kl" in metrics


@pytest.mark.parametrize(
    "engine",
    [pytest.param("transformers", marks=pytest.mark.slow), pytest.param("vllm", marks=pytest.mark.vllm)],
)
def test_async_vllm(folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.chdir(folder / "examples")
    memory = ["--vllm-kv-cache-gb", "0.5"] if engine == "vllm" else []
    small = ["--max-steps", "4", "--eval-samples", "4", "--batch-size", "4"]
    printed = mrl(capsys, "train", "async_vllm.yaml", "--engine", engine, *memory, *small, "--json")
    metrics = json.loads(printed[printed.index("{\n") :])["metrics"]
    assert 0 <= metrics["rollout/staleness_max"] <= 2
    assert metrics["sync/policy_version"] == 4


@pytest.mark.slow
def test_custom_loss(folder: Path, capsys: Output) -> None:
    out = script("examples/custom_loss.py", capsys)
    largest = float(out.rpartition("ratio up to ")[2])
    assert largest > 1.0  # the second update of a step is off the policy that sampled
    lines = (EXAMPLES / "custom_loss.py").read_text().splitlines()
    assert len(lines) < 30


@pytest.mark.slow
def test_judge(folder: Path, capsys: Output) -> None:
    out = script("examples/judge.py", capsys, "--max-steps", "2")
    assert "prompt tokens, $0.0" in out


@pytest.mark.slow
def test_rollout_func(folder: Path, capsys: Output) -> None:
    assert "after 2 steps" in script("examples/rollout_func.py", capsys, "--max-steps", "2")
    (run,) = (folder / "runs").iterdir()
    rewards = [(row["reward"], row["extra"]["recognised"]) for row in read_rows(run, "rollouts")]
    assert all(reward in (0.0, recognised) for reward, recognised in rewards)


@pytest.mark.slow
def test_tasks_with_test_cases(folder: Path, capsys: Output) -> None:
    out = mrl(capsys, "eval", "starter", "--dataset", "examples/tasks.jsonl", "--max-tokens", "64", "--json")
    report = json.loads(out)
    assert report["tasks"] == 4
    assert report["unscored"] == 0


@pytest.mark.slow
def test_sums(folder: Path, capsys: Output) -> None:
    """Two steps of each stage; that it learns is seen in tests/test_learning.py."""
    out = script("examples/sums.py", capsys, "--sft-steps", "2", "--max-steps", "2")
    assert "after 2 steps" in out


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rewards"), [("number_guessing.py", ["--step-rewards"]), ("asking_around.py", [])])
def test_learning_over_several_turns(name: str, rewards: list[str], folder: Path, capsys: Output) -> None:
    """A few steps of each stage: that both kinds of rewards arrive."""
    out = script(f"examples/{name}", capsys, "--lessons", "30", "--steps", "2", *rewards)
    assert "after 2 steps" in out
    (run,) = (folder / "runs").iterdir()
    rows = list(read_rows(run, "rollouts"))
    assert all(row["status"] == "ok" for row in rows)
    assert any(row["metrics"]["tool_calls"] for row in rows)
    assert any(row["step_rewards"] for row in rows) == bool(rewards)


@pytest.mark.slow
def test_images(folder: Path, capsys: Output) -> None:
    out = script("examples/images.py", capsys, "--max-steps", "2")
    assert "after 2 steps" in out


@pytest.mark.slow
def test_math_answers(folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "examples")
    small = ["--model", "starter", "--max-steps", "1", "--max-completion-length", "16", "--json"]
    metrics = json.loads(mrl(capsys, "train", "math_answers.yaml", *small))["metrics"]
    assert metrics["reward/math_verify/mean"] == metrics["reward/mean"]
    assert metrics["rollout/failed_fraction"] == 0


@pytest.mark.slow
def test_sft(folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "examples")
    out = mrl(capsys, "train", "sft.yaml", "--num-epochs", "3", "--run-name", "r")
    assert "loss.png" in out
    assert len(list(read_rows(folder / "examples" / "runs" / "r", "metrics"))) == 3


ELSEWHERE = {
    "modal.yaml": "loop/test_modal_runs.py",
    "openenv_guess.py": "rollouts/openenv/test_openenv_runs.py",
    "trl_environment.py": "trl/test_scripts.py",
}
"""Examples that another module of tests runs."""
DATA = ("my_rewards.py", "answers.jsonl", "math_answers.jsonl")
"""What other examples use."""


def test_every_example_is_run_here() -> None:
    for path in EXAMPLES.iterdir():
        module = Path(__file__).parent / ELSEWHERE.get(path.name, "test_examples.py")
        assert path.name in DATA or path.name in module.read_text(), f"{path.name} is run by no test"


def caller(folder: Path, *calls: tuple[str, dict[str, str]]) -> str:
    """A tiny model that makes these calls."""
    says = [f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>" for name, given in calls]
    return str(build_calling_model(folder / "caller", says))


@pytest.mark.slow
def test_coding_environment(folder: Path, capsys: Output) -> None:
    solution = {"code": "def f(*given): return given[0]"}
    model = caller(folder, ("run_code", {"code": "print(6 * 7)"}), ("submit", solution))
    out = script("examples/coding_environment.py", capsys, "--model", model, "--max-steps", "2")
    assert "finished after 2 steps" in out
    rows = list(read_rows(Path(out.split()[-1]), "rollouts"))
    said = [message["content"] for row in rows for message in row["messages"] if message["role"] == "tool"]
    assert "42" in said
    assert any("tests passed" in text for text in said)
    assert {row["status"] for row in rows} == {"ok"}


@pytest.mark.browser
def test_web_tasks(folder: Path, capsys: Output) -> None:
    model = caller(folder, *(("act", {"action_str": f"click('{number}')"}) for number in (1, 2)))
    out = script("examples/web_tasks.py", capsys, "--model", model, "--max-steps", "1", "--batch-size", "1")
    assert "finished after 1" in out
    rows = list(read_rows(Path(out.split()[-1]), "rollouts"))
    assert {row["status"] for row in rows} == {"ok"}
    assert any("Actions: click(bid, button)" in row["messages"][0]["content"] for row in rows)
    assert any(message["role"] == "tool" and "[1]" in message["content"] for row in rows for message in row["messages"])


@pytest.mark.ray
def test_a_ray_cluster_that_ends_with_its_run(folder: Path) -> None:
    command = [sys.executable, "-m", "mrl", "train", "ray.yaml", "--max-steps", "2", "--json"]
    environment = {"PYTHONPATH": str(EXAMPLES.parent), "RAY_ADDRESS": "192.0.2.1:6379", "MRL_TEST": str(folder)}
    done = subprocess.run(
        command, cwd=folder / "examples", env={**os.environ, **environment}, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 2
    assert not [process for process in psutil.process_iter(["environ"]) if marked(process.info["environ"], folder)]


RAY = """#!/bin/bash
# A stand-in for `ray symmetric-run OPTIONS -- COMMAND`.
echo "$@" > ray-was-called
while [ "$1" != "--" ]; do shift; done
exec "${@:2}"
"""
MRL = """#!/bin/bash
printf '%s\\n' "$@" > mrl-was-called
"""


def test_launchers_start_the_run_of_their_recipe(folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """slurm.sbatch and skypilot.yaml of examples/launch, up to the command on the first machine."""
    stands_in = {
        "ray": RAY,
        "mrl": MRL,
        "srun": '#!/bin/bash\nexec "$@"\n',
        "scontrol": "#!/bin/bash\necho localhost\n",
    }
    (folder / "bin").mkdir()
    for name, program in stands_in.items():
        (folder / "bin" / name).write_text(program)
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    sky = yaml.safe_load((folder / "examples/launch/skypilot.yaml").read_text())
    slurm = ["bash", "examples/launch/slurm.sbatch", "examples/launch/two_rollout_workers.yaml", "--max-steps", "5"]
    given = {
        "slurm": (slurm, {"SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7"}),
        "sky": (
            ["bash", "-c", sky["run"]],
            sky["envs"] | {"SKYPILOT_NODE_IPS": "127.0.0.1", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_TASK_ID": "7"},
        ),
    }
    for name, (command, variables) in given.items():
        subprocess.run(
            command, env={**os.environ, **variables, "MRL_RUNS": str(folder / "runs")}, check=True, timeout=60
        )
        assert (folder / "ray-was-called").read_text().startswith("symmetric-run --address 127.0.0.1:63")
        train, *arguments = (folder / "mrl-was-called").read_text().splitlines()
        assert train == "train"
        given_options = parse("mrl train", "", arguments, extra={"recipe": argument("a file", positional=True)})
        assert (given_options["backend"], given_options["resume"]) == ("ray", "auto"), name
        assert given_options["backend_options"]["address"].startswith("127.0.0.1:63")
        assert Path(given_options["recipe"]).is_file()
    out = mrl(capsys, "train", "examples/launch/two_rollout_workers.yaml", "--max-steps", "1", "--json")
    assert json.loads(out)["steps"] == 1


def marked(environment: dict[str, str] | None, folder: Path) -> bool:
    return (environment or {}).get("MRL_TEST") == str(folder)
