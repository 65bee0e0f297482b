"""Tests whose scores are made on other machines: the file travels, with what it needs of its folder."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from mrl.backends import Resources
from mrl.backends.code import needed_files
from mrl.backends.inline import InlineBackend
from mrl.config import OrchestratorConfig
from mrl.errors import ConfigError
from mrl.evals import Message
from mrl.evaltests.carried import tasks_of
from mrl.evaltests.find import find_test, place_of
from mrl.evaltests.loaders import row_of_messages
from mrl.loop.resources import rewards_for
from mrl.rewards.base import RewardRequest
from mrl.workers.reward import RewardWorker
from tests.process_backend import ProcessBackend

TEST = """
import json
from pathlib import Path

from {package}helping import worth
from mrl.evals import EvaluateResult, EvaluationRow, evaluation_test

WORDS = json.loads(Path(__file__).with_name("words.json").read_text())


@evaluation_test(input_dataset=["rows.jsonl"])
def counted(row: EvaluationRow) -> EvaluationRow:
    row.evaluation_result = EvaluateResult(score=worth(row.messages[-1].text, WORDS), reason=__file__)
    return row


@evaluation_test(input_dataset=["rows.jsonl"])
def another(row: EvaluationRow) -> EvaluationRow:
    return row
"""
HELPING = """
def worth(text, words):
    return float(sum(word in text for word in words))
"""
ROW = '{"messages": [{"role": "user", "content": "say it"}]}\n'


def written(folder: Path, package: str = "") -> Path:
    """A test that imports a neighbour and reads another, in a folder with more than that."""
    folder.mkdir(parents=True)
    (folder / "my_eval.py").write_text(TEST.format(package=package), encoding="utf-8")
    (folder / "helping.py").write_text(HELPING, encoding="utf-8")
    (folder / "words.json").write_text('["a", "e"]', encoding="utf-8")
    (folder / "rows.jsonl").write_text(ROW, encoding="utf-8")
    (folder / "diary.py").write_text("SECRET = 1\n", encoding="utf-8")
    (folder / ".env").write_text("KEY=1\n", encoding="utf-8")
    return folder / "my_eval.py"


def request() -> RewardRequest:
    row = row_of_messages([Message(role="user", content="say it")])
    row.input_metadata.row_id = "row"
    (task,) = tasks_of([row])
    return RewardRequest("r", task.prompt, [{"role": "assistant", "content": "an end"}], [], task.columns, task.id)


async def scored_by(backend: Any, test: Any, folder: Path) -> Any:
    """By a worker that finds nothing in the folder."""
    specs = await rewards_for(backend, {"evaluation_test": {"test": test}})
    shutil.rmtree(folder)
    worker = await backend.spawn(RewardWorker, name="reward-0", resources=Resources(), args={"reward_funcs": specs})
    return (await worker.call("score", [request()], {"global_step": 0})).results[0]


def test_what_is_sent_of_a_folder(tmp_path: Path) -> None:
    file = written(tmp_path / "a")
    names = ["helping.py", "my_eval.py", "rows.jsonl", "words.json"]
    assert [path.name for path in needed_files(file, file.parent)] == names
    package = tmp_path / "b" / "bench"
    file = written(package / "inner", "bench.inner.")
    (package / "__init__.py").write_text("from . import base\n", encoding="utf-8")
    (package / "base.py").write_text("NAMES = ['../../../etc/passwd', '.env', '', '/', 'diary']\n", encoding="utf-8")
    sent = [str(path.relative_to(tmp_path / "b")) for path in needed_files(file, tmp_path / "b")]
    assert sent == ["bench/__init__.py", "bench/base.py", *(f"bench/inner/{name}" for name in names)]


class Apart(ProcessBackend):
    """Workers read what was put, elsewhere."""

    def __init__(self) -> None:
        super().__init__(60.0)
        self.shares_disk = False


class Copying(InlineBackend):
    """A worker of this process that has copies only."""

    shares_memory = shares_disk = False

    def __init__(self, there: Path) -> None:
        super().__init__(60.0)
        self.there = there

    async def put(self, path: Path) -> str:
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, self.there / path.name)
        return str(self.there / path.name)


async def test_copies_are_enough_to_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = written(tmp_path / "here" / "bench")
    (tmp_path / "there").mkdir()
    backend = Copying(tmp_path / "there")
    try:
        result = await scored_by(backend, f"{file}:counted", file.parent)
    finally:
        await backend.close()
        sys.modules.pop("helping", None)
    assert (result.reward, result.error) == (2.0, None)
    assert result.extra["evaluation_result"]["reason"] == str(tmp_path / "there" / "bench" / "my_eval.py")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["file", "module", "function"])
async def test_a_worker_without_the_folder_scores(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"bench_{how}"
    file = written(tmp_path / name, "" if how == "file" else f"{name}.")
    monkeypatch.syspath_prepend(str(tmp_path))
    where = str(file) if how == "file" else f"{name}.my_eval"
    test = find_test(f"{where}:counted") if how == "function" else f"{where}:counted"
    backend = Apart()
    try:
        result = await scored_by(backend, test, file.parent)
    finally:
        await backend.close()
    assert (result.reward, result.error) == (2.0, None)
    seen = result.extra["evaluation_result"]["reason"]
    assert seen.endswith("my_eval.py")
    assert not seen.startswith(str(tmp_path))


@pytest.mark.slow
async def test_a_function_of_the_program_itself_travels_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running the program again on a worker would begin a second run there."""
    from mrl.evals import EvaluateResult, EvaluationRow, evaluation_test

    def mine(row: EvaluationRow) -> EvaluationRow:
        row.evaluation_result = EvaluateResult(score=0.5)
        return row

    mine.__module__ = "__main__"
    test = evaluation_test(input_messages=[[[Message(role="user", content="a")]]])(mine)
    assert place_of(test) is None
    backend = Apart()
    try:
        specs = await rewards_for(backend, {"evaluation_test": {"test": test}})
        worker = await backend.spawn(RewardWorker, name="r", resources=Resources(), args={"reward_funcs": specs})
        report = await worker.call("score", [request()], {"global_step": 0})
    finally:
        await backend.close()
    assert report.results[0].reward == 0.5


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
async def test_a_ray_worker_without_the_folder_scores(tmp_path: Path) -> None:
    from mrl.backends.ray import RayBackend
    from tests.backends.workers import Worker

    file = written(tmp_path / "bench")
    backend = RayBackend(60.0, shared_disk=False)
    try:
        await backend.spawn(Worker, name="first", resources=Resources(), args={})  # files go where workers are
        result = await scored_by(backend, f"{file}:counted", file.parent)
    finally:
        await backend.close()
    assert (result.reward, result.error) == (2.0, None)
    assert result.extra["evaluation_result"]["reason"].startswith("/tmp/mrl-ray-")


@pytest.mark.modal
@pytest.mark.usefixtures("modal_account")
async def test_a_loop_at_modal_has_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What such a run is sent is enough for rows and scores in a container, where the folder here is not."""
    from mrl.backends.modal.backend import ModalBackend
    from mrl.loop.on_modal import RunOnModal
    from mrl.trainer import make_run

    file = written(tmp_path / "bench")
    monkeypatch.chdir(tmp_path)
    config = OrchestratorConfig.from_flat(backend="modal", evaluation_test="bench/my_eval.py:counted")
    backend = ModalBackend(60.0)
    try:
        await backend.reserve({})
        run = RunOnModal(config, tmp_path / "run", resume=False, make_run=make_run)
        there = await run._as_there(backend)
        shutil.rmtree(file.parent)
        args = {"reward_funcs": there.reward.reward_funcs}
        worker = await backend.spawn(Asked, name="rollout-0", resources=Resources(), args=args)
        assert await worker.call("rows", there.rollout.evaluation_test) == ["say it"]
        (result,) = (await worker.call("score", [request()], {"global_step": 0})).results
    finally:
        await backend.close()
    assert (result.reward, result.error) == (2.0, None)
    assert not result.extra["evaluation_result"]["reason"].startswith(str(tmp_path))


class Asked(RewardWorker):
    """Reads the rows as well, as the loop does."""

    def rows(self, test: str) -> list[str]:
        return [row.messages[0].text for row in find_test(test).training_rows()]


def test_a_module_cannot_be_sent_to_a_loop_at_modal() -> None:
    from mrl.loop.on_modal import _test_as_file

    config = OrchestratorConfig.from_flat(model="starter", evaluation_test="tests.evals.scored_by_tests:distinct")
    with pytest.raises(ConfigError, match=r"name it file\.py:name"):
        _test_as_file(config)
