"""A test's rows, in every form they are given in; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrl.errors import ConfigError, DataError
from mrl.evals import (
    DynamicDataLoader,
    EvaluateResult,
    EvaluationRow,
    EvaluationRowJsonlDataLoader,
    InlineDataLoader,
    Message,
    evaluation_test,
)
from mrl.evaltests.find import find_test
from mrl.evaltests.test import EvaluationTest, name_of


def row(text: str, **fields: Any) -> EvaluationRow:
    return EvaluationRow(messages=[Message(role="user", content=text)], **fields)


def made(**parameters: Any) -> EvaluationTest:
    @evaluation_test(**parameters)
    def scored(row: EvaluationRow) -> EvaluationRow:
        row.evaluation_result = EvaluateResult(score=1.0)
        return row

    return scored


def texts(test: EvaluationTest) -> list[list[str]]:
    return [[one.messages[0].text for one in experiment.rows()] for experiment in test.experiments()]


def test_rows_and_messages_are_an_experiment_each() -> None:
    assert texts(made(input_rows=[[row("a"), row("b")], [row("c")]])) == [["a", "b"], ["c"]]
    conversations = [[Message(role="user", content="a")], [{"role": "user", "content": "b"}]]
    assert texts(made(input_messages=[conversations])) == [["a", "b"]]
    assert texts(made(input_messages=[conversations[0]])) == [["a"]]


def test_files_are_one_experiment_together_or_each(tmp_path: Path) -> None:
    files = []
    for name in "ab":
        files.append(str(tmp_path / f"{name}.jsonl"))
        Path(files[-1]).write_text(row(name).model_dump_json() + "\n\n", encoding="utf-8")
    assert texts(made(input_dataset=files)) == [["a", "b"]]
    assert texts(made(input_dataset=files, combine_datasets=False)) == [["a"], ["b"]]
    assert texts(made(input_dataset=files, max_dataset_rows=1)) == [["a"]]


def test_a_datasets_columns_become_rows(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"id": "q1", "question": "2+2?", "answer": "4", "kind": "sum"}), encoding="utf-8")
    (found,) = made(input_dataset=[str(file)]).experiments()[0].rows()
    assert (found.input_metadata.row_id, found.messages[0].text, found.ground_truth) == ("q1", "2+2?", "4")
    assert found.input_metadata.dataset_info["kind"] == "sum"

    def adapter(rows: list[dict[str, Any]]) -> list[EvaluationRow]:
        return [row(one["question"].upper()) for one in rows]

    assert texts(made(input_dataset=[str(file)], dataset_adapter=adapter)) == [["2+2?".upper()]]


def test_loaders_with_variants_and_what_they_note(tmp_path: Path) -> None:
    def numbers() -> list[EvaluationRow]:
        """Two of them."""
        return [row("1"), row("2")]

    file = tmp_path / "rows.jsonl"
    file.write_text(row("f").model_dump_json(), encoding="utf-8")
    loaders = [
        InlineDataLoader(rows=[row("i")], messages=[[{"role": "user", "content": "m"}]]),
        DynamicDataLoader(generators=[numbers], preprocess_fn=lambda rows: rows[1:]),
        EvaluationRowJsonlDataLoader(jsonl_path=str(file)),
    ]
    test = made(data_loaders=loaders)
    assert texts(test) == [["i", "m"], ["2"], ["f"]]
    info = test.experiments()[1].rows()[0].input_metadata.dataset_info
    assert info["data_loader_variant_id"] == "numbers"
    assert info["data_loader_num_rows"] == 2
    assert info["data_loader_num_rows_after_preprocessing"] == 1


def test_every_combination_is_an_experiment_with_a_name_of_its_own() -> None:
    test = made(
        input_rows=[[row("a")]],
        completion_params=[{"model": "x"}, {"model": "y"}],
        evaluation_test_kwargs=[{"k": 1}, {"k": 2}],
    )
    found = test.experiments()
    assert [(one.completion_params[0]["model"], one.kwargs["k"]) for one in found] == [
        ("x", 1),
        ("x", 2),
        ("y", 1),
        ("y", 2),
    ]
    assert len({one.name for one in found}) == 4


def test_ids_follow_from_the_content_and_equal_rows_stay_two() -> None:
    first, again, other = made(input_rows=[[row("a"), row("a"), row("b")]]).experiments()[0].rows()
    assert first.input_metadata.row_id == made(input_rows=[[row("a")]]).experiments()[0].rows()[0].input_metadata.row_id
    assert len({one.input_metadata.row_id for one in (first, again, other)}) == 3


def test_filtered_and_preprocessed() -> None:
    rows = [row("a"), row("b")]
    rows[0].input_metadata.row_id = "first"
    assert texts(made(input_rows=[rows], filtered_row_ids=["first"])) == [["a"]]
    assert texts(made(input_rows=[rows], preprocess_fn=lambda all_rows: all_rows[::-1])) == [["b", "a"]]


def test_a_parametrize_mark_gives_completion_params() -> None:
    @pytest.mark.parametrize("completion_params", [{"model": "x"}, {"model": "y"}])
    @evaluation_test(input_rows=[[row("a")]])
    def scored(row: EvaluationRow) -> EvaluationRow:
        return row

    assert [one.completion_params[0]["model"] for one in scored.experiments()] == ["x", "y"]


def test_environment_variables_go_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EP_NUM_RUNS", "3")
    monkeypatch.setenv("EP_MAX_DATASET_ROWS", "1")
    monkeypatch.setenv("EP_INPUT_PARAMS_JSON", '{"extra": {"b": 2}}')
    test = made(input_rows=[[row("a"), row("b")]], completion_params=[{"model": "m", "extra": {"a": 1}}])
    assert test.params.overridden().num_runs == 3
    assert texts(test) == [["a"]]
    assert test.experiments()[0].completion_params[0]["extra"] == {"a": 1, "b": 2}
    monkeypatch.setenv("EP_NUM_RUNS", "many")
    with pytest.raises(ConfigError, match="EP_NUM_RUNS: 'many'"):
        test.experiments()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "none of them is given"),
        ({"input_rows": [[row("a")]], "input_dataset": ["x.jsonl"]}, "input_dataset and input_rows are given"),
        ({"input_rows": [[row("a")]], "completion_params": {"model": "m"}}, "completion_params: is a list"),
        ({"input_rows": [[row("a")]], "mode": "rowwise"}, "mode: 'rowwise' is none of pointwise"),
        ({"input_rows": [[row("a")]], "num_runs": 0}, "num_runs: 0 is no number"),
        ({"input_rows": [[row("a")]], "passed_threshold": "high"}, "passed_threshold: 'high'"),
        ({"input_rows": [[row("a")]], "evaluation_test_kwargs": [{"row": 1}]}, "'row' is what the test gets anyway"),
        ({"input_rows": []}, "input_rows is an empty list"),
        ({"input_rows": [[row("a")]], "aggregation_method": "median"}, "aggregation_method: 'median'"),
    ],
)
def test_parameters_that_do_not_go_together(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**parameters)


def test_a_function_that_does_not_take_what_its_mode_gives() -> None:
    with pytest.raises(ConfigError, match="it takes row; with mode groupwise it takes `rows"):
        made(input_rows=[[row("a")]], mode="groupwise")


def test_a_dataset_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"messages": []}\n{"messages"\n', encoding="utf-8")
    with pytest.raises(DataError, match="line 2: is no JSON"):
        made(input_dataset=[str(file)]).experiments()[0].rows()
    file.write_text('{"question_text": "?"}', encoding="utf-8")
    with pytest.raises(DataError, match="no messages and no prompt"):
        made(input_dataset=[str(file)]).experiments()[0].rows()


MODULE = """
from mrl.evals import EvaluationRow, Message, evaluation_test

@evaluation_test(input_messages=[[[Message(role="user", content="a")]]])
def test_one(row: EvaluationRow) -> EvaluationRow:
    return row

@evaluation_test(input_messages=[[[Message(role="user", content="b")]]], mode="all")
def test_two(rows: list[EvaluationRow]) -> list[EvaluationRow]:
    return rows
"""


def test_tests_are_found_by_file_module_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "some_eval.py"
    file.write_text(MODULE, encoding="utf-8")
    assert find_test(f"{file}:test_two").mode == "all"
    assert find_test(f"{file}::test_one").mode == "pointwise"
    with pytest.raises(ConfigError, match="has test_one, test_two; say which"):
        find_test(str(file))
    with pytest.raises(ConfigError, match="no test 'test_three'"):
        find_test(f"{file}:test_three")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_test("some_eval:test_one")
    assert find_test(found) is found
    assert name_of(found) == f"{file.resolve()}:test_one"
    with pytest.raises(ConfigError, match="no file"):
        find_test(str(tmp_path / "other.py"))


def test_called_by_hand_it_scores() -> None:
    import asyncio

    scored = asyncio.run(_scored())
    assert scored.evaluation_result.score == 1.0


async def _scored() -> Any:
    return await made(input_rows=[[row("a")]])(row("b"))
