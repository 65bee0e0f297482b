"""A search finds what reading everything finds, and says how far it came."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mrl.store.search
from mrl.config import OrchestratorConfig
from mrl.store.filters import Filter
from mrl.store.read import RunReader
from mrl.store.run import RunStore
from mrl.store.search import count_matches, search
from mrl.types import Group, Rollout, Task

TEXTS = (
    "plain words",
    'quo"ted \\ and\nbroken',
    "Straße ÄÖÜ",
    "עברית",
    "half \ud800 pair",
    "\x1b[31mcontrol\x00",
    "user",
)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunReader]:
    folder = tmp_path_factory.mktemp("search") / "run"
    store = RunStore(folder, OrchestratorConfig())
    for step in range(1, 11):
        rollouts = []
        for at, text in enumerate(TEXTS):
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"{text} {step}"}]
            messages.append({"role": "assistant", "content": [{"type": "text", "text": f"part {text}"}]})
            rollouts.append(Rollout(f"{step}-{at}", "t", at, messages, [], reward=float(at)))
        store.write_step(step, {}, [Group(Task("t", "p"), rollouts)])
    store.close()
    with RunReader(folder) as opened:
        yield opened


def everything(reader: RunReader, **options: Any) -> tuple[list[int], int]:
    keys, after, searched = [], None, 0
    while True:
        found = search(reader, after=after, **options)
        keys += [row["key"] for row in found.rows]
        searched += found.searched
        if (after := found.next) is None:
            return keys, searched


WANTED = st.sampled_from(TEXTS).flatmap(
    lambda text: st.tuples(st.integers(0, len(text) - 1), st.integers(1, 8)).map(lambda at: text[at[0] : at[0] + at[1]])
)


@settings(max_examples=40, deadline=None)
@given(wanted=WANTED, upper=st.booleans(), limit=st.sampled_from([3, 500]), newest=st.booleans())
def test_it_finds_what_reading_everything_finds(
    reader: RunReader, wanted: str, upper: bool, limit: int, newest: bool
) -> None:
    rows = list(reader.rollouts(newest_first=newest))
    texts = {row["key"]: [row["messages"][0]["content"], row["messages"][1]["content"][0]["text"]] for row in rows}
    folded = wanted.casefold()
    expected = [key for key, said in texts.items() if any(folded in text.casefold() for text in said)]
    keys, searched = everything(reader, wanted=wanted.upper() if upper else wanted, limit=limit, newest_first=newest)
    if upper and wanted.upper().casefold() != folded:
        return
    if folded.isascii():  # "ss" is in "Straße" for who folds the text: said in the code
        expected = [key for key in expected if any(folded in text.lower() for text in texts[key])]
    assert keys == expected
    assert searched == len(rows)


def test_roles_and_names_of_fields_are_no_text(reader: RunReader) -> None:
    assert len(everything(reader, wanted="user")[0]) == 10  # those that say it
    for name in ("assistant", "content", "type", "text"):
        assert everything(reader, wanted=name)[0] == []


def test_it_ends_in_time_and_goes_on(reader: RunReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mrl.store.search, "CHUNK", 10)
    ticks = iter(range(1000))
    found = search(reader, "nowhere", seconds=3, clock=lambda: float(next(ticks)))
    assert (found.rows, found.searched) == ([], 30)
    assert found.next is not None
    assert everything(reader, wanted="nowhere", seconds=0) == ([], 70)


def test_with_a_filter_and_an_order(reader: RunReader) -> None:
    keys, searched = everything(reader, wanted="plain", where=Filter(step=4))
    assert (len(keys), searched) == (1, 7)
    highest = search(reader, "part", order="reward", newest_first=True, limit=5)
    assert {row["reward"] for row in highest.rows} == {6.0}


def test_counting_goes_on_where_a_search_ended(reader: RunReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mrl.store.search, "CHUNK", 10)
    found = search(reader, "part", limit=3)
    matches, searched, after = len(found.rows), found.searched, found.next
    while after is not None:
        counted = count_matches(reader, "part", after=after, seconds=0)
        assert counted.searched <= 10
        matches, searched, after = matches + counted.matches, searched + counted.searched, counted.next
    assert (matches, searched) == (70, 70)
    assert count_matches(reader, "plain", Filter(step=4)).matches == 1
