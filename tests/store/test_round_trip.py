"""What goes into the store comes out of it, bit for bit."""

from __future__ import annotations

import json
import math
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mrl.config import OrchestratorConfig
from mrl.store.arrays import decode_samples, encode_samples
from mrl.store.read import RunReader
from mrl.store.rows import ROLLOUT_COLUMNS, content_row, read_rollout, rollout_row, task_row, to_rollout
from mrl.store.run import RunStore, read_rows
from mrl.types import Group, Rollout, Sample, Task

TOKEN = st.integers(0, 2**18)
FLOAT32 = st.floats(width=32, max_value=0) | st.just(-math.inf)
ANY_FLOAT = st.floats()
TEXT = st.text(st.characters())  # half surrogate pairs included
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool"]), "content": TEXT | JSON})


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    count = draw(st.integers(0, 20))

    def many(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
        return st.lists(values, min_size=count, max_size=count)

    return Sample(
        prompt_ids=draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5)),
        completion_ids=draw(many(TOKEN)),
        logprobs=draw(many(FLOAT32) | many(ANY_FLOAT)),
        mask=draw(many(st.integers(0, 1))),
        policy_version=draw(st.integers(0, 10**9) | many(st.integers(0, 3))),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
    )


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[Task, Rollout]:
    prompt = draw(TEXT | st.lists(MESSAGE, max_size=2))
    messages = draw(st.lists(MESSAGE, max_size=4))
    completion = draw(TEXT | st.lists(MESSAGE, max_size=2) | st.sampled_from([messages[-1:], messages]))
    if messages and isinstance(messages[-1]["content"], str) and draw(st.booleans()):
        completion = messages[-1]["content"]
    number = st.none() | st.floats(allow_nan=False)
    rollout = Rollout(
        id=draw(st.text(max_size=5)),
        task_id="t",
        attempt=draw(st.integers(0, 100)),
        messages=messages,
        samples=draw(st.lists(samples(), max_size=3)),
        prompt=draw(st.sampled_from([prompt, "another"])),
        completion=completion,
        reward=draw(number),
        rewards=draw(st.dictionaries(TEXT, number, max_size=2)),
        step_rewards=draw(st.lists(st.floats(allow_nan=False), max_size=3)),
        advantage=draw(number),
        status=draw(st.sampled_from(["ok", "failed"])),
        error=draw(st.none() | st.text()),
        metrics=draw(st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=2)),
        extra=draw(st.dictionaries(TEXT, JSON, max_size=2)),
        seconds=draw(st.dictionaries(TEXT, st.floats(0, 9), max_size=2)),
    )
    return Task("t", prompt, draw(st.dictionaries(TEXT, JSON, max_size=2))), rollout


@settings(max_examples=100, deadline=None)
@given(st.lists(samples(), max_size=3))
def test_samples_bit_for_bit(given_samples: list[Sample]) -> None:
    found = [Sample(**sample) for sample in decode_samples(encode_samples(given_samples))]
    for before, after in zip(given_samples, found, strict=True):
        assert bits(before.logprobs) == bits(after.logprobs)
        before.logprobs = after.logprobs = []
    assert found == given_samples


def bits(values: list[float]) -> list[bytes]:
    """-0.0 is not 0.0 here, and NaN is NaN."""
    return [struct.pack("<d", math.nan if value != value else value) for value in values]


@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rollouts())
def test_rollouts_field_by_field(pair: tuple[Task, Rollout]) -> None:
    task, rollout = pair
    for sample in rollout.samples:
        sample.logprobs = [0.0 if value != value else value for value in sample.logprobs]  # NaN is unequal to itself
    row = dict(
        zip(ROLLOUT_COLUMNS, rollout_row(rollout, 5, 8, 1, 0), strict=True),
        **dict(zip(("key", "texts", "samples"), content_row(rollout, 5, task), strict=True)),
        task_id="t",
        task_content=task_row(task)[2],
    )
    found = read_rollout(row)
    assert (found["key"], found["step"], found["split"]) == (5, 4, "train")
    assert to_rollout(found) == rollout


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(rollouts(), min_size=1, max_size=4))
def test_through_the_file(pairs: list[tuple[Task, Rollout]]) -> None:
    for _, rollout in pairs:
        for sample in rollout.samples:
            sample.logprobs = [0.0 if value != value else value for value in sample.logprobs]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        store = RunStore(folder, OrchestratorConfig())
        store.write_step(1, {"a": 1.0}, [Group(task, [rollout]) for task, rollout in pairs])
        store.close()
        assert [to_rollout(row) for row in read_rows(folder, "rollouts")] == [rollout for _, rollout in pairs]


def test_a_float32_logprob_is_stored_in_four_bytes_and_others_in_eight() -> None:
    random = np.random.default_rng(0)
    single = (-random.exponential(1, 1000)).astype("f4").tolist()
    double = (-random.exponential(1, 1000)).tolist()
    sizes = [len(encode_samples([Sample([], [0] * 1000, values, [1] * 1000, 0)])) for values in (single, double)]
    assert sizes[0] < 4100
    assert 7000 < sizes[1] < 8200
    for values in (single, double):
        (sample,) = decode_samples(encode_samples([Sample([], [0] * 1000, values, [1] * 1000, 0)]))
        assert sample["logprobs"] == values


def test_a_rollout_of_1000_tokens_costs_under_12_kb(tmp_path: Path) -> None:
    """With ids and letters drawn at random, which compress worst."""
    random = np.random.default_rng(0)
    store, groups = RunStore(tmp_path / "run", OrchestratorConfig()), []
    for k in range(8):
        task, attempts = Task(str(k), "Write a function f."), []
        for i in range(8):
            ids = random.integers(0, 150_000, 1000).tolist()
            text = " ".join("".join(map(chr, random.integers(97, 123, 4))) for _ in range(1000))
            logprobs = (-random.exponential(1, 1000)).astype("f4").tolist()
            messages = [{"role": "user", "content": task.prompt}, {"role": "assistant", "content": text}]
            sample = Sample(list(range(50)), ids, logprobs, [1] * 1000, 3)
            attempts.append(Rollout(f"{k}-{i}", task.id, i, messages, [sample], task.prompt, text, 0.5, {"f": 0.5}))
        groups.append(Group(task, attempts))
    store.write_step(1, {"a": 1.0}, groups)
    store.close()
    assert (tmp_path / "run" / "run.db").stat().st_size / 64 < 12_000


def test_what_is_not_finite_is_seen(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run", OrchestratorConfig())
    rollout = Rollout("r", "t", 0, [], [], reward=math.nan, advantage=-math.inf, rewards={"f": math.nan})
    metrics = {"train/loss": math.nan, "train/grad_norm": math.inf, "low": -math.inf, "np": np.float32(0.5)}
    store.write_step(1, metrics, [Group(Task("t", ""), [rollout])])
    store.close()
    with RunReader(tmp_path / "run") as reader:
        (step,) = reader.metric_rows()
        assert math.isnan(step["train/loss"])
        assert (step["train/grad_norm"], step["low"], step["np"]) == (math.inf, -math.inf, 0.5)
        (row,) = reader.page().rows
        assert math.isnan(row["reward"])
        assert math.isnan(row["rewards"]["f"])
        assert row["advantage"] == -math.inf


def test_columns_that_json_does_not_know_break_nothing(tmp_path: Path) -> None:
    circle: list[Any] = []
    circle.append(circle)
    odd = {"bytes": b"12345", "np": np.int64(7), "array": np.arange(3), "set": {1}, "circle": circle, (1, 2): "key"}
    task = Task("t", [{"role": "user", "content": np.arange(2)}], odd)  # type: ignore[arg-type]
    rollout = Rollout("r", "t", np.int64(0), [], [], prompt="x", extra=odd, reward=np.float64(0.5))  # type: ignore[arg-type]
    store = RunStore(tmp_path / "run", OrchestratorConfig())
    store.write_step(1, {}, [Group(task, [rollout])])
    store.event("odd", "one", a={1, 2}, b=math.nan)
    store.close()
    (row,) = read_rows(tmp_path / "run", "rollouts")
    assert row["extra"]["np"] == 7
    assert row["extra"]["bytes"] == "<5 bytes>"
    assert row["extra"]["(1, 2)"] == "key"
    json.dumps(row)


@pytest.mark.parametrize("columns", [{"gold": 1}, {"gold": 2}])
def test_a_task_whose_content_changes_keeps_what_it_was(tmp_path: Path, columns: dict[str, int]) -> None:
    store = RunStore(tmp_path / "run", OrchestratorConfig())
    for step, prompt in enumerate(("one", "one", "two"), 1):
        task = Task("t", prompt, columns)
        store.write_step(step, {}, [Group(task, [Rollout("r", "t", 0, [], [], prompt=prompt)])])
    store.close()
    assert [row["prompt"] for row in read_rows(tmp_path / "run", "rollouts")] == ["one", "one", "two"]
    with RunReader(tmp_path / "run") as reader:
        assert [(t["prompt"], t["columns"], t["rollouts"]) for t in reader.tasks()] == [
            ("one", columns, 2),
            ("two", columns, 1),
        ]
