"""Every kind of source, every refusal, and an order that survives interruption. Real files, the real `datasets`."""

from __future__ import annotations

import gzip
import http.server
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mrl.data.load
from mrl.data import DATASETS, TaskOrder, check_columns, check_prompt_lengths, load_tasks
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


# --- prompts --------------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "is missing"),
        ("  \n", "is empty"),
        (3, "is of type int"),
        ({"messages": [USER]}, "is of type dict"),
        ([], "empty list of messages"),
        (["hi"], "message 0 is of type str"),
        ([USER, {"role": 3, "content": "x"}], "message 1: 'role' is 3"),
        ([{"content": "x"}], "message 0: 'role' is None"),
        ([{"role": "user"}], "there is no 'content'"),
        ([{"role": "user", "content": 3}], "'content' is of type int"),
        ([USER, {"role": "assistant", "content": "x"}], "ends with an assistant message"),
    ],
)
def test_bad_prompts_name_row_and_column(prompt: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"row 1, column 'prompt'.*{message}"):
        load_tasks([{"prompt": "fine"}, {"prompt": prompt}])


def test_good_prompts() -> None:
    for prompt in ("x", [USER], [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text"}]}]):
        assert load_tasks([{"prompt": prompt}])[0].prompt == prompt


def test_prompt_lengths() -> None:
    tasks = load_tasks([{"prompt": "x" * n, "id": f"t{n}"} for n in (1, 9, 3, 12)])
    check_prompt_lengths(tasks, len, 12)
    with pytest.raises(DataError, match=r"row 1.*'t9'.* 9 tokens .* 8 fit; 2 of 4 rows.* 12 tokens.*max_model_len"):
        check_prompt_lengths(tasks, len, 8)


def test_needed_columns() -> None:
    tasks = load_tasks([{"prompt": "a", "testcases": ["t"]}, {"prompt": "b", "testcases": None}])
    check_columns(tasks[:1], ["testcases"], "the code reward")
    with pytest.raises(DataError, match=r"the code reward needs column 'testcases', but row 1 .* has None"):
        check_columns(tasks, ["testcases"], "the code reward")
    with pytest.raises(DataError, match=r"needs a column 'testcase'.*did you mean 'testcases'"):
        check_columns(tasks, ["testcase"], "the code reward")


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


# --- the Hub, played by a server on loopback ------------------------------------------------------------------------


class StandInHub(http.server.BaseHTTPRequestHandler):
    """Serves one dataset the way the Hub's HTTP interface does, as far as `datasets` asks."""

    name = "OpenCoder-LLM/opc-sft-stage2"
    sha = "a" * 40
    data: ClassVar[bytes]
    readme = b"---\nconfigs:\n- config_name: educational_instruct\n  data_files: educational_instruct/train-*\n---\n"

    def answer(self) -> None:
        file = "educational_instruct/train-0.parquet"
        if self.path == "/":
            self.reply(200, b"")
        elif self.name not in self.path:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif self.path.endswith(("README.md", ".parquet")):
            body = self.readme if self.path.endswith(".md") else self.data
            self.reply(200, body, {"X-Repo-Commit": self.sha, "ETag": f'"{len(body)}"'})
        elif "/tree/" in self.path:
            item = {"type": "file", "path": file, "size": len(self.data), "oid": "b" * 40}
            folder = {"type": "directory", "path": "educational_instruct", "oid": "c" * 40}
            self.reply(200, json.dumps([item if "educational_instruct" in self.path else folder]).encode())
        elif self.path.startswith("/api/datasets/"):
            info = {"id": self.name, "sha": self.sha, "siblings": [{"rfilename": "README.md"}, {"rfilename": file}]}
            self.reply(200, json.dumps({**info, "private": False, "gated": False, "tags": []}).encode())
        else:
            self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    do_GET = do_HEAD = answer

    def reply(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def test_hub_datasets(tmp_path: Path) -> None:
    """Downloaded, renamed, unknown, unreachable, and again from the cache with the Hub gone."""
    import datasets

    rows = [{"instruction": "Write f", "output": "o", "testcase": ["assert f(1) == 1"]}]
    buffer = io.BytesIO()
    datasets.Dataset.from_list(rows).to_parquet(buffer)
    StandInHub.data = buffer.getvalue()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), StandInHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {
        **{k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")},
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path),
        "HF_HUB_DISABLE_XET": "1",
    }
    env.pop("HF_HUB_OFFLINE", None)
    env.pop("HF_HUB_CACHE", None)
    code = """if True:
        import sys
        from mrl.data import load_tasks
        for name, options in [(sys.argv[1], {}), (sys.argv[1], {"split": "test"}), (sys.argv[1], {"config": "nope"}),
                              ("nobody/nothing", {})]:
            try:
                task, = load_tasks(name, **options)
                print(task.prompt, sorted(task.columns), task.columns["testcases"])
            except Exception as error:
                print(type(error).__name__, error)
    """

    def lines() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", code, StandInHub.name],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout.splitlines()

    loaded, no_split, no_config, unknown = lines()
    assert loaded == "Write f ['output', 'testcases'] ['assert f(1) == 1']"
    assert no_split.startswith("DataError")
    assert "no split 'test' (splits: 'train')" in no_split
    assert "no config 'nope' (configs: 'educational_instruct')" in no_config
    assert "doesn't exist on the Hub" in unknown
    assert "path of a file or folder" in unknown
    server.shutdown()
    server.server_close()
    again, _, _, unreachable = lines()
    assert again == loaded
    assert unreachable.startswith("DataError dataset 'nobody/nothing': cannot reach http://127.0.0.1")


# --- order ----------------------------------------------------------------------------------------------------------


def take(order: TaskOrder, count: int) -> list[list[int]]:
    return [order.next_batch() for _ in range(count)]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 17),
    st.integers(1, 20),
    st.integers(0, 2**63 - 1),
    st.booleans(),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_resumed_order_equals_uninterrupted(
    num_tasks: int, batch_size: int, seed: int, shuffle: bool, before: int, after: int
) -> None:
    whole = take(TaskOrder(num_tasks, batch_size, seed, shuffle), before + after)
    first = TaskOrder(num_tasks, batch_size, seed, shuffle)
    take(first, before)
    state = json.loads(json.dumps(first.state_dict()))
    second = TaskOrder(num_tasks, batch_size, seed, shuffle)
    take(second, after)  # whatever it did before, the state decides
    second.load_state_dict(state)
    assert (second.epoch, second.position) == (first.epoch, first.position)
    assert take(second, after) == whole[before:]


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 17), st.integers(1, 20), st.integers(0, 99), st.booleans())
def test_every_epoch_takes_every_task_once(num_tasks: int, batch_size: int, seed: int, shuffle: bool) -> None:
    order = TaskOrder(num_tasks, batch_size, seed, shuffle)
    for epoch in range(3):
        assert (order.epoch, order.position) == (epoch, 0)
        batches = take(order, order.steps_per_epoch)
        assert sorted(i for batch in batches for i in batch) == list(range(num_tasks))
        assert all(len(batch) == batch_size for batch in batches[:-1])
        if not shuffle:
            assert [i for batch in batches for i in batch] == list(range(num_tasks))


def test_epochs_and_seeds_differ_and_the_order_is_fixed_for_good() -> None:
    order = TaskOrder(8, 8, seed=0)
    assert take(order, 2) == [[0, 2, 7, 5, 4, 3, 6, 1], [5, 0, 6, 2, 3, 4, 7, 1]]
    assert TaskOrder(8, 8, seed=1).next_batch() != TaskOrder(8, 8, seed=0).next_batch()


def test_batch_size_may_change_on_resume_but_not_the_dataset() -> None:
    order = TaskOrder(10, 4, seed=0)
    seen = order.next_batch()
    resumed = TaskOrder(10, 3, seed=0)
    resumed.load_state_dict(order.state_dict())
    assert sorted(seen + [i for batch in take(resumed, 2) for i in batch]) == list(range(10))
    for other in (TaskOrder(11, 4, 0), TaskOrder(10, 4, 1), TaskOrder(10, 4, 0, shuffle=False)):
        with pytest.raises(DataError, match="cannot resume"):
            other.load_state_dict(order.state_dict())
    with pytest.raises(DataError, match="outside"):
        order.load_state_dict({**order.state_dict(), "position": 10})
    with pytest.raises(DataError, match="empty"):
        TaskOrder(0, 1, 0)
    with pytest.raises(ValueError, match="batch_size"):
        TaskOrder(1, 0, 0)
