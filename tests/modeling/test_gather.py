"""The same gradient every time on CPU: whatever the number of threads, and whatever else the machine does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mrl.actor.worker import ActorWorker
from mrl.modeling.fixed_order import fixed_order
from mrl.modeling.gather import make_gather
from mrl.types import Sample, TrainBatch
from tests.conftest import build_model

CPU = torch.device("cpu")
TRIES = 10


@pytest.fixture(scope="module")
def busy_machine() -> Iterator[None]:
    """Other processes want the cores, so that threads of ours are stopped at any moment."""
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(2)]
    yield
    for other in others:
        other.kill()
        other.wait()


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=40))
@settings(max_examples=50, deadline=None)
def test_values_and_gradients_are_those_of_indexing(places: list[tuple[int, bool]]) -> None:
    row_P, filled_P = np.array([row for row, _ in places]), np.array([filled for _, filled in places])
    table_NF = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    weights_PF = torch.randn(len(places), 3, dtype=torch.float64) * torch.from_numpy(filled_P)[:, None]
    mine_PF, plain_PF = make_gather(row_P, CPU, filled_P)(table_NF), table_NF[torch.from_numpy(row_P)]
    assert torch.equal(mine_PF, plain_PF)
    (mine_NF,) = torch.autograd.grad(mine_PF, table_NF, weights_PF)
    (plain_NF,) = torch.autograd.grad(plain_PF, table_NF, weights_PF)
    torch.testing.assert_close(mine_NF, plain_NF)


def gathered(table_NF: Tensor, row_P: Tensor) -> Tensor:
    return make_gather(row_P.numpy(), CPU)(table_NF)


def indexed_by_a_model(table_NF: Tensor, row_P: Tensor) -> Tensor:
    return table_NF[row_P]


@pytest.mark.parametrize("how", [gathered, indexed_by_a_model])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_gradient_is_the_same_every_time(
    busy_machine: None, how: Callable[[Tensor, Tensor], Tensor], count: int
) -> None:
    """Sizes beyond those that torch leaves to one thread; without a fixed order most of these differ."""
    generator = torch.Generator().manual_seed(0)
    table_NF = torch.randn(300, 256, generator=generator, requires_grad=True)
    row_P = torch.randint(0, 300, (1000,), generator=generator)
    grad_PF = torch.randn(1000, 256, generator=generator)
    with threads(count), fixed_order(CPU):
        gradients = [torch.autograd.grad(how(table_NF, row_P), table_NF, grad_PF)[0] for _ in range(TRIES)]
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


def test_the_switch_is_set_back_and_a_users_own_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with fixed_order(CPU), fixed_order(CPU):
        assert torch.get_deterministic_debug_mode() == 1
    assert torch.get_deterministic_debug_mode() == 0
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    try:
        with fixed_order(CPU):
            assert torch.get_deterministic_debug_mode() == 2
        assert torch.get_deterministic_debug_mode() == 2
    finally:
        torch.set_deterministic_debug_mode("default")
    with fixed_order(torch.device("cuda")):
        assert torch.get_deterministic_debug_mode() == 0


class WatchSums(TorchDispatchMode):
    """Keeps what is called of the operations that add on several CPU threads at once, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__.strip("_")
        if name in ("index_put", "index_put_impl", "unsafe_index_put", "put"):
            accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
            if accumulate and args[0].dtype == torch.float32:
                self.found.append(name)
        return func(*args, **kwargs)


def batch_of(prompts: int, completions: int, length: int) -> TrainBatch:
    """Groups with one prompt each, with lengths that differ a little."""
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(1, 250, (count,), generator=generator).tolist()

    samples = []
    for prompt in [ids(9) for _ in range(prompts)]:
        for row in range(completions):
            n = length - row % 3
            samples.append(Sample(prompt, ids(n), [-5.0] * n, [int(i != 2) for i in range(n)], 0, [-5.0] * n))
    count = len(samples)
    advantages = torch.randn(count, generator=generator).tolist()
    return TrainBatch(samples, advantages, count, sum(sum(s.mask) for s in samples), 1.0)


def actor_of(model: str, **options: Any) -> ActorWorker:
    algorithm = {"beta": 0.1, "entropy_coef": 0.01, "max_completion_length": 64}
    settings = {"model": model, "device": "cpu", "use_lora": options.pop("use_lora", False)}
    actor = ActorWorker(settings, {"learning_rate": 1e-3, **options}, total_steps=9, algorithm=algorithm)
    actor.initialize()
    return actor


@pytest.mark.parametrize(
    "options", [{}, {"packing": False}, {"gradient_checkpointing": True}, {"use_lora": True}], ids=str
)
def test_a_step_adds_nothing_up_in_an_order_that_changes(tiny_model: str, options: dict[str, Any]) -> None:
    actor = actor_of(tiny_model, **options)
    with WatchSums() as watch:
        actor.train_step(batch_of(2, 3, 6))
    actor.close()
    assert watch.found == []


def test_the_watch_sees_what_it_is_for() -> None:
    table_NF = torch.zeros(3, 2, requires_grad=True)
    with WatchSums() as watch:
        table_NF[torch.tensor([0, 0])].sum().backward()
    assert watch.found


@pytest.mark.parametrize(
    "count", [pytest.param(2, marks=pytest.mark.slow), *(pytest.param(n, marks=pytest.mark.soak) for n in (1, 4))]
)
def test_actors_side_by_side_learn_the_same(busy_machine: None, tmp_path: Path, count: int) -> None:
    """Their threads are in each other's way too. The hidden states are more than torch leaves to one thread."""
    model = str(build_model(tmp_path / "model", hidden_size=64))
    batch = batch_of(4, 8, 40)

    def train(_: int) -> dict[str, Tensor]:
        torch.set_num_threads(count)
        actor = actor_of(model)
        for _ in range(6):
            actor.train_step(batch)
        actor.close()
        return {name: parameter.detach().clone() for name, parameter in actor.model.named_parameters()}

    with ThreadPoolExecutor(4) as executor:
        first, *others = executor.map(train, range(4))
    for other in others:
        assert all(torch.equal(tensor, other[name]) for name, tensor in first.items())
