"""What a commit runs of the long tests."""

from __future__ import annotations

from tests.soak import sample

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
