"""Tasks from every kind of source, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mrl.data.load
from mrl.data import DATASETS, load_rows, load_tasks
from mrl.errors import DataError
from mrl.types import Task

ROWS = [{"prompt": f"Add {i}", "answer": i} for i in range(5)]


def prompts(tasks: list[Task]) -> list[Any]:
    return [task.prompt for task in tasks]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- sources --------------------------------------------------------------------------------------------------------


def test_import_is_cheap() -> None:
    code = (
        "import mrl.data, sys; sys.exit(any(m in sys.modules for m in ('datasets', 'torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_list_of_dicts_keeps_every_column() -> None:
    tasks = load_tasks([{"prompt": "a"}, {"prompt": "b", "extra": {"k": None}}])
    assert prompts(tasks) == ["a", "b"]
    assert tasks[0].columns == {}
    assert tasks[1].columns == {"extra": {"k": None}}, "only Arrow data has its None entries removed"


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "jsonl.gz", "csv.gz", "tsv", "folder", "saved"])
def test_local_files(kind: str, tmp_path: Path) -> None:
    import datasets

    dataset = datasets.Dataset.from_list(ROWS)
    path = tmp_path / f"tasks.{kind}"
    csv = "prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in ROWS)
    match kind:
        case "jsonl":
            write_jsonl(path, ROWS)
        case "json":
            path.write_text(json.dumps(ROWS))
        case "csv":
            path.write_text(csv)
        case "tsv":
            path.write_text(csv.replace(",", "\t"))
        case "parquet":
            dataset.to_parquet(path)
        case "jsonl.gz":
            path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
        case "csv.gz":
            path.write_bytes(gzip.compress(csv.encode()))
        case "folder":
            path.mkdir()
            write_jsonl(path / "train-00000.jsonl", ROWS)
            write_jsonl(path / "test-00000.jsonl", ROWS[:1])
        case "saved":
            dataset.save_to_disk(path)
    for source in (path, str(path)):
        tasks = load_tasks(source)
        assert prompts(tasks) == [row["prompt"] for row in ROWS]
        assert [task.columns["answer"] for task in tasks] == list(range(5))
    assert prompts(load_tasks(path, max_samples=2)) == ["Add 0", "Add 1"]


@pytest.mark.parametrize("kind", ["list", "file", "dataset", "callable", "generator", "stream", "name"])
def test_it_is_known_of_how_many_rows_the_first_are(tmp_path: Path, kind: str) -> None:
    import datasets

    dataset = datasets.Dataset.from_list(ROWS)
    source: Any = {
        "list": ROWS,
        "file": write_jsonl(tmp_path / "a.jsonl", ROWS),
        "dataset": dataset,
        "callable": lambda: ROWS,
        "generator": lambda: (row for row in ROWS),
        "stream": dataset.to_iterable_dataset(),
        "name": "tiny-code",
    }[kind]
    known = {"generator": None, "stream": None, "name": len(load_tasks("tiny-code"))}
    loaded = load_rows(source, max_samples=2)
    assert (len(loaded.rows), loaded.total) == (2, known.get(kind, 5))
    if kind != "stream":
        assert load_rows(source).total == len(load_rows(source).rows)


def test_a_changed_file_is_never_stale_and_leaves_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "tasks.jsonl"
    stamp = (1_700_000_000, 1_700_000_000)
    for word in ("old", "new"):
        write_jsonl(path, [{"prompt": word}])
        os.utime(path, stamp)
        assert prompts(load_tasks(path)) == [word]
    assert not (tmp_path / "cache").exists()


def test_folder_splits(tmp_path: Path) -> None:
    import datasets

    write_jsonl(tmp_path / "train.jsonl", ROWS[:3])
    write_jsonl(tmp_path / "validation.jsonl", ROWS[3:])
    assert prompts(load_tasks(tmp_path, split="validation")) == ["Add 3", "Add 4"]
    assert prompts(load_tasks(tmp_path, split="train[:1]")) == ["Add 0"]
    with pytest.raises(DataError, match=r"no split 'test' .splits: 'train', 'validation'"):
        load_tasks(tmp_path, split="test")
    saved = tmp_path / "saved"
    datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS[:3]), "test": datasets.Dataset.from_list(ROWS[3:])}
    ).save_to_disk(saved)
    assert prompts(load_tasks(saved, split="test")) == ["Add 3", "Add 4"]
    with pytest.raises(DataError, match=r"no split 'dev' .splits: train, test"):
        load_tasks(saved, split="dev")


def test_what_has_no_splits_never_serves_training_tasks_as_held_out(tmp_path: Path) -> None:
    import datasets

    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    for source in (path, ROWS, datasets.Dataset.from_list(ROWS), lambda: ROWS):
        with pytest.raises(DataError, match=r"has no splits.*'test'.*eval_dataset"):
            load_tasks(source, split="test")


def test_datasets_objects() -> None:
    import datasets

    dataset = datasets.Dataset.from_list(ROWS)
    assert prompts(load_tasks(dataset, max_samples=2)) == ["Add 0", "Add 1"]
    assert type(load_tasks(dataset.with_format("numpy"))[0].columns["answer"]) is int
    both = datasets.DatasetDict({"train": dataset, "test": dataset.select([4])})
    assert prompts(load_tasks(both, split="test")) == ["Add 4"]
    stream = dataset.to_iterable_dataset()
    assert prompts(load_tasks(stream, max_samples=2)) == ["Add 0", "Add 1"]
    with pytest.raises(DataError, match="set max_samples"):
        load_tasks(stream)


def test_callables() -> None:
    import datasets

    assert prompts(load_tasks(lambda: ROWS)) == prompts(load_tasks(ROWS))
    assert len(load_tasks(lambda: datasets.Dataset.from_list(ROWS))) == 5
    assert len(load_tasks(lambda: (row for row in ROWS), max_samples=2)) == 2
    assert prompts(load_tasks(lambda split, seed: [{"prompt": f"{split} {seed}"}], split="dev", seed=7)) == ["dev 7"]
    assert prompts(load_tasks(lambda: datasets.DatasetDict({"dev": datasets.Dataset.from_list(ROWS[:1])}), split="dev"))

    def wants_more(tokenizer: object) -> list[dict[str, Any]]:
        return []

    def broken() -> list[dict[str, Any]]:
        raise KeyError("nope")

    for source, message in [
        (lambda: None, "returned None"),
        (lambda: 3, "expected a Hub id"),
        (lambda: "tasks.jsonl", "returned type str"),
        (lambda: ["text"], "row 0 is of type str"),
        (list, "empty"),
        (wants_more, "wants tokenizer"),
        (broken, "raised KeyError: 'nope'"),
    ]:
        with pytest.raises(DataError, match=message):
            load_tasks(source)


def test_named_sources_are_an_open_set() -> None:
    def countdown(argument: str, *, config: str | None, split: str, max_samples: int | None, seed: int) -> list[Any]:
        return [{"prompt": f"{argument} {split} {seed} {i}"} for i in range(max_samples or 3)]

    DATASETS.register("countdown")(countdown)
    try:
        assert prompts(load_tasks("countdown:easy", max_samples=1, seed=4)) == ["easy train 4 0"]
        assert len(load_tasks("countdown")) == 3
        with pytest.raises(DataError, match="did you mean 'countdown'"):
            load_tasks("countdwn:easy")
    finally:
        DATASETS._registered.pop("countdown")


def test_tiny_code_is_shipped_without_solutions() -> None:
    train, heldout = load_tasks("tiny-code"), load_tasks("tiny-code", split="heldout")
    assert len(train) > len(heldout) > 0
    assert not {task.id for task in train} & {task.id for task in heldout}
    assert all("solution" not in task.columns and task.columns["testcases"] for task in train + heldout)
    assert load_tasks("tiny-code", split="test") == heldout == load_tasks("tiny-code", split="validation")
    assert load_tasks("tiny-code", max_samples=3) == train[:3]
    with pytest.raises(DataError, match="no split 'dev'"):
        load_tasks("tiny-code", split="dev")
    with pytest.raises(DataError, match="no config or argument"):
        load_tasks("tiny-code:hard")


# --- columns --------------------------------------------------------------------------------------------------------


def test_renames() -> None:
    rows = [{"question": "q", "testcase": ["assert 1"], "prompt": "old"}]
    task = load_tasks(rows, prompt_column="question", rename={"prompt": "raw", "testcase": "testcases"})[0]
    assert (task.prompt, task.columns) == ("q", {"raw": "old", "testcases": ["assert 1"]})
    assert load_tasks(rows, prompt_column="prompt")[0].prompt == "old"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rename": {"testcases": "x"}}, "no column 'testcases'.*did you mean 'testcase'.*columns: question"),
        ({"prompt_column": "question"}, "there is a column 'prompt' already .*old_prompt"),
        ({"prompt_column": "quest"}, "did you mean 'question'"),
        ({"rename": {"question": "a", "testcase": "a"}}, "cannot rename column 'question' to 'a'"),
        ({"rename": {"question": "a"}, "prompt_column": "question"}, "give only one"),
    ]
    for arguments, message in cases:
        with pytest.raises(DataError, match=message):
            load_tasks(rows, **arguments)


def test_without_a_prompt_column_the_likely_one_is_named() -> None:
    with pytest.raises(DataError, match=r"no column 'prompt' \(columns: id, question\); set prompt_column='question'"):
        load_tasks([{"id": 1, "question": "x"}])


def test_built_in_renames_give_way_to_the_users() -> None:
    rows = [{"instruction": "i", "testcase": ["t"], "code": "c"}]

    def renames(**arguments: Any) -> dict[str, str]:
        options = {"prompt_column": None, "rename": None, **arguments}
        return mrl.data.load._renames("OpenCoder-LLM/opc-sft-stage2", rows, where="", **options)

    assert renames() == {"instruction": "prompt", "testcase": "testcases"}
    assert renames(rename={"testcase": "tests"}) == {"instruction": "prompt", "testcase": "tests"}
    assert renames(prompt_column="code") == {"code": "prompt", "testcase": "testcases"}


def test_arrow_none_entries_are_removed_but_columns_and_content_stay() -> None:
    import datasets

    call = {"type": "function", "function": {"name": "f"}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "a"},
    ]
    dataset = datasets.Dataset.from_list(
        [{"prompt": messages, "info": {"a": 1}, "n": None}, {"prompt": messages[:1], "info": {"b": [{"c": 1}]}, "n": 2}]
    )
    first, second = load_tasks(dataset)
    assert first.prompt == messages
    assert second.prompt == messages[:1]
    assert first.columns == {"info": {"a": 1}, "n": None}
    assert second.columns == {"info": {"b": [{"c": 1}]}, "n": 2}


# --- ids ------------------------------------------------------------------------------------------------------------


def test_given_ids() -> None:
    assert [t.id for t in load_tasks([{"prompt": "a", "id": 3}, {"prompt": "b", "id": "x"}])] == ["3", "x"]
    assert [t.id for t in load_tasks([{"prompt": "a", "task_id": "t", "id": "i"}])] == ["i"]
    with pytest.raises(DataError, match="rows 0 and 2 have the same task_id 'a'"):
        load_tasks([{"prompt": "p", "task_id": i} for i in ("a", "b", "a")])
    with pytest.raises(DataError, match="row 1, column 'id' is None"):
        load_tasks([{"prompt": "p", "id": "a"}, {"prompt": "p", "id": None}])


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(6)))
def test_content_ids_do_not_depend_on_the_row(order: list[int]) -> None:
    rows = [{"prompt": f"p{i // 2}", "answer": i} for i in range(6)]
    by_answer = {task.columns["answer"]: task.id for task in load_tasks(rows)}
    assert len(set(by_answer.values())) == 6
    assert {t.columns["answer"]: t.id for t in load_tasks([rows[i] for i in order])} == by_answer
    for task in load_tasks([rows[i] for i in order], max_samples=2):
        assert task.id == by_answer[task.columns["answer"]]


def test_equal_rows_get_a_number_and_odd_values_a_stable_hash() -> None:
    import datetime

    ids = [t.id for t in load_tasks([{"prompt": "p"}] * 3)]
    assert ids == [ids[0], f"{ids[0]}-2", f"{ids[0]}-3"]
    row = {"prompt": "p", "when": datetime.date(2024, 1, 1), "blob": b"x", "thing": object(), "text": "\ud800"}
    assert load_tasks([row])[0].id == load_tasks([{**row, "thing": object()}])[0].id
    assert load_tasks([row])[0].id != load_tasks([{**row, "blob": b"y"}])[0].id


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "x"}\n\n{"prompt": "y"\n', "line 3, column 15 is not JSON"),
        ("a.jsonl", '{"prompt": "x"}\n5\n', "line 2 is not a JSON object .int."),
        ("a.jsonl", "", "the file is empty"),
        ("a.jsonl", "\n", "empty"),
        ("a.json", '[{"prompt": "x"},\n{"prompt": }]', "line 2, column 12 is not JSON"),
        ("a.csv", "prompt,b\n1,2\n1,2,3\n", "Expected 2 fields in line 3, saw 3"),
        ("a.csv", "prompt,b\n", "the dataset is empty"),
        ("a.parquet", "prompt", "cannot be read"),
        ("a.jsonl.gz", "not gzip", "cannot be read"),
        ("a.txt", "hello", "cannot read .txt: take .jsonl"),
    ],
)
def test_broken_files(name: str, content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=message) as error:
        load_tasks(path)
    assert str(path) in str(error.value)


def test_bytes_that_are_not_utf8_name_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt":"x"}\n{"prompt":"\xff\xfe"}\n')
    with pytest.raises(DataError, match="line 2 is not UTF-8"):
        load_tasks(tmp_path / "a.jsonl")


def test_missing_paths_name_the_nearest(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "tasks.jsonl", ROWS)
    with pytest.raises(DataError, match=r"no such file or folder; did you mean '.*tasks\.jsonl'"):
        load_tasks(str(tmp_path / "task.jsonl"))
    with pytest.raises(DataError, match="the folder nowhere/at does not exist either"):
        load_tasks("nowhere/at/all.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="doesn't contain any data files"):
        load_tasks(tmp_path / "empty")


@pytest.mark.parametrize("source", [None, 3, object(), {"prompt": ["a"]}])
def test_what_is_no_source(source: Any) -> None:
    with pytest.raises(DataError, match="expected a Hub id, a path"):
        load_tasks(source)


def test_options_that_do_not_apply_are_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    for source in (path, ROWS, lambda: ROWS):
        with pytest.raises(DataError, match="config"):
            load_tasks(source, config="x")
    with pytest.raises(DataError, match="max_samples is -1"):
        load_tasks(ROWS, max_samples=-1)
    assert len(load_tasks(ROWS, max_samples=0)) == 5
