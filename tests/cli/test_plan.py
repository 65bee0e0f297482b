"""`mrl plan` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrl.backends import BACKENDS, Resources
from mrl.backends.inline import InlineBackend
from mrl.cli.main import main


class Rented(InlineBackend):
    """Has prices, and must not be asked for anything else."""

    def price(self, name: str, resources: Resources) -> float:  # type: ignore[override]
        return {"actor": 4.0, "rollout-0": 2.0}.get(name, 0.0)

    async def reserve(self, workers: Any) -> None:
        raise AssertionError("a plan starts nothing")

    async def spawn(self, worker: type, **rest: Any) -> Any:
        raise AssertionError("a plan starts nothing")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's working directory, with tasks, a reward file and a backend that has prices."""
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps({"prompt": f"say {i}"}) for i in range(6)))
    (tmp_path / "rewards.py").write_text("def length(completions, **_):\n    return [1.0 for _ in completions]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("MRL_RUNS", raising=False)
    monkeypatch.setitem(BACKENDS._registered, "rented", Rented)
    return tmp_path


def mrl(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


@pytest.fixture
def flags(tiny_model: str) -> list[str]:
    data = ["--model", tiny_model, "--dataset", "tasks.jsonl", "--reward-funcs", "rewards.py:length"]
    return [
        *data,
        "--device",
        "cpu",
        "--num-epochs",
        "1",
        "--batch-size",
        "2",
        "--max-completion-length",
        "8",
        "--run-name",
        "first",
    ]


def test_without_prices_it_says_what_would_start(
    flags: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mrl("plan", *flags, "--num-rollout-workers", "2", "--save-steps", "2") == 0
    out = capsys.readouterr().out
    for words in (
        "3 steps, backend inline",
        "  rollout-1  any × 1, 1 CPU\n",
        "weight sync   reload",
        "runs/first/checkpoints, every 2 steps and at the end",
        "backend inline has no prices",
    ):
        assert words in out
    assert "$" not in out
    assert not (folder / "runs").exists()


def test_costs_are_of_an_hour_a_step_and_the_run(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    rented = [*flags, "--backend", "rented"]
    assert mrl("plan", *rented) == 0
    out = capsys.readouterr().out
    assert "$6.00 per hour by list prices" in out
    assert "--step-seconds SECONDS, or --like RUN" in out
    assert mrl("plan", *rented, "--step-seconds", "600") == 0
    out = capsys.readouterr().out
    assert "a step        600 s, $1.00\n" in out
    assert "all steps     30 min, $3.00, besides starting" in out
    assert mrl("plan", *rented, "--step-seconds", "600", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["steps"], plan["dollars_per_hour"], plan["dollars_per_step"], plan["dollars"]) == (3, 6.0, 1.0, 3.0)
    assert [worker["name"] for worker in plan["workers"]] == ["actor", "rollout-0", "reward-0"]


def test_the_seconds_are_those_of_an_earlier_run_and_its_steps_are_done(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert mrl("train", *flags, "--max-steps", "2", "--report-to", "jsonl") == 0
    capsys.readouterr()
    other = [*flags[:-1], "second", "--backend", "rented", "--like", "first", "--json"]
    assert mrl("plan", *other) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["measured_in"] == "first"
    assert plan["notices"] == ["first ran on backend inline: steps may take another time here"]
    assert plan["dollars_per_step"] == pytest.approx(6.0 * plan["step_seconds"] / 3600)
    assert mrl("plan", "--resume", "first", "--max-steps", "5", "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3, "two of five are done"
    assert mrl("plan", *flags) == 2
    assert "already holds a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--backend", "moon"], "moon"),
        (["--weight-sync-method", "object_store"], "object_store is Ray's"),
        (["--temperature", "0"], "nothing to learn from"),
        (["--reward-funcs", "rewards.py:nothing"], "nothing"),
        (["--max-cost", "5"], "knows no prices"),
    ],
)
def test_what_train_refuses_is_refused_in_the_same_words(
    flags: list[str], wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mrl("train", *flags, *wrong) == 2
    by_train = capsys.readouterr().err
    assert mrl("plan", *flags, *wrong) == 2
    assert said in by_train
    assert capsys.readouterr().err == by_train.removeprefix("loading data\n")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--step-seconds", "0"], "0 is no duration"),
        (["--step-seconds", "nan"], "nan is no duration"),
        (["--step-seconds", "1", "--like", "first"], "give only one"),
        (["--like", "nobody"], "there is no run 'nobody'"),
    ],
)
def test_wrong_seconds_are_refused(
    flags: list[str], wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mrl("plan", *flags, *wrong) == 2
    assert said in capsys.readouterr().err


@pytest.mark.modal
def test_of_modal_each_worker_has_its_price(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    modal = [*flags, "--backend", "modal", "--rollout-gpu", "l4"]
    assert mrl("plan", *modal, "--actor-gpu", "h100:2") == 0
    out = capsys.readouterr().out
    for words in ("actor-1    h100 × 1, 1 CPU", "rollout-0  l4 × 1, 1 CPU", "weight sync   volume", "$8.84 per hour"):
        assert words in out
    assert mrl("plan", *modal, "--actor-gpu", "H1000") == 2
    assert "Modal has no GPU of type 'H1000'; did you mean H100" in capsys.readouterr().err
    (Path("prices.yaml")).write_text("modal: {gpu: {H100: 0, L4: 0}, cpu_core: 1}")
    assert mrl("plan", *modal, "--actor-gpu", "H100:2", "--backend-options", "prices=prices.yaml") == 0
    assert "$3.00 per hour" in capsys.readouterr().out
