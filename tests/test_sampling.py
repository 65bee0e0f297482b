"""Which tests a commit runs where it does not run all."""

from __future__ import annotations

import pytest

from tests.sampling import sample, takes_long

IDS = [f"tests/{file}.py::test[{case}]" for file, cases in (("a", 40), ("b", 3), ("c", 1)) for case in range(cases)]


def files(ids: set[str]) -> list[str]:
    return sorted(one.partition("::")[0] for one in ids)


def test_a_commit_runs_the_same_whatever_the_order_they_are_found_in() -> None:
    assert sample(IDS, 5, "commit") == sample(IDS[::-1], 5, "commit")
    assert len(sample(IDS, 5, "commit")) == 5
    assert sample(IDS, 99, "commit") == set(IDS)


def test_no_file_crowds_out_another() -> None:
    assert files(sample(IDS, 3, "commit")) == ["tests/a.py", "tests/b.py", "tests/c.py"]
    assert files(sample(IDS, 8, "commit")) == ["tests/a.py"] * 4 + ["tests/b.py"] * 3 + ["tests/c.py"]


def test_every_test_has_its_turn() -> None:
    assert set.union(*(sample(IDS, 3, f"commit {number}") for number in range(400))) == set(IDS)


@pytest.mark.timeout(1)
def test_what_takes_minutes_is_in_no_sample(request: pytest.FixtureRequest) -> None:
    assert not takes_long(request.node)
    request.node.add_marker(pytest.mark.timeout(1500), append=False)
    assert takes_long(request.node)
