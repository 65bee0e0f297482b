"""The order of tasks over epochs, and resumed."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.data import TaskOrder
from mrl.errors import DataError


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


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 17), st.integers(1, 20), st.integers(0, 99), st.booleans())
def test_every_batch_is_whole_and_every_epoch_takes_every_task_once(
    num_tasks: int, batch_size: int, seed: int, shuffle: bool
) -> None:
    order = TaskOrder(num_tasks, batch_size, seed, shuffle)
    seen: Counter[int] = Counter()
    for _ in range(12):
        batch = order.next_batch()
        assert len(batch) == batch_size
        assert max(Counter(batch).values()) == -(-batch_size // num_tasks), "repeated only in a smaller dataset"
        seen.update(batch)
        assert order.epoch * num_tasks + order.position == sum(seen.values())
        assert {seen[i] for i in range(num_tasks)} <= {order.epoch, order.epoch + 1}


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 9), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), max_size=20), st.integers(0, 99))
def test_single_draws_avoid_what_a_step_has_and_lose_nothing(
    num_tasks: int, draws: list[tuple[int, int]], seed: int
) -> None:
    order, seen = TaskOrder(num_tasks, 3, seed), Counter[int]()
    for count, more in draws:
        first = order.next_batch(count)
        left = num_tasks - order.position
        others = order.next_batch(more, avoid=first)
        assert len(others) == more
        if count + more <= left:  # within an epoch nothing comes twice
            assert not set(first) & set(others) or count > num_tasks
        seen.update(first + others)
        assert {seen[i] for i in range(num_tasks)} <= {order.epoch, order.epoch + 1}


def test_an_epochs_last_batch_goes_on_with_the_next_ones_order() -> None:
    order = TaskOrder(8, 8, seed=0)
    assert take(order, 2) == [[0, 2, 7, 5, 4, 3, 6, 1], [5, 0, 6, 2, 3, 4, 7, 1]]
    assert take(TaskOrder(4, 4, seed=3), 3) == [[2, 1, 0, 3], [3, 2, 1, 0], [3, 0, 1, 2]]
    order = TaskOrder(4, 3, seed=3)
    assert take(order, 2) == [[2, 1, 0], [3, 2, 1]], "the second epoch's 3 is put off: the batch has one"
    assert take(order, 2) == [[3, 0, 1], [3, 0, 2]]
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
