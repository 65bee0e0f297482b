"""Cutting rows into micro-batches: every row once, within the budget, little padding."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from mrl.actor.micro_batches import FEWEST_GPU_TOKENS, by_count, by_tokens, gpu_tokens, of_rank, shares
from mrl.types import Sample

ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=30)


def samples(rows: list[tuple[int, int]]) -> list[Sample]:
    return [Sample([prompt] * (prompt + 1), [1] * n, [0.0] * n, [1] * n, 0) for prompt, n in rows]


@given(rows=ROWS, parts=st.integers(1, 40))
def test_by_count(rows: list[tuple[int, int]], parts: int) -> None:
    batches = by_count(samples(rows), parts)
    assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
    assert len(batches) == min(parts, len(rows))
    assert max(map(len, batches)) - min(map(len, batches)) <= 1


@given(rows=ROWS, most=st.integers(1, 200), shared=st.booleans())
def test_by_tokens(rows: list[tuple[int, int]], most: int, shared: bool) -> None:
    made = samples(rows)
    batches = by_tokens(made, most, shared_prompts=shared)
    assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
    for batch in batches:
        lengths = [len(made[i].prompt_ids) + len(made[i].completion_ids) for i in batch]
        if shared:
            prompts = {tuple(made[i].prompt_ids) for i in batch}
            tokens = sum(map(len, prompts)) + sum(len(made[i].completion_ids) for i in batch)
        else:
            tokens = len(batch) * max(lengths)
        assert tokens <= most or len(batch) == 1


@given(rows=ROWS, ranks=st.integers(1, 8), shared=st.booleans())
def test_ranks_share_the_rows(rows: list[tuple[int, int]], ranks: int, shared: bool) -> None:
    """Each row once, tokens about equal, nobody idle without need, and as many micro-batches for each."""
    made = samples(rows)
    found = shares(made, ranks, shared_prompts=shared)
    assert sorted(i for share in found for i in share) == list(range(len(rows)))
    assert sum(map(bool, found)) == min(ranks, len(rows))
    lengths = [len(sample.prompt_ids) + len(sample.completion_ids) for sample in made]
    assert max(sum(lengths[i] for i in share) for share in found) <= sum(lengths) / ranks + max(lengths)
    parts = [of_rank(made, rank, ranks, lambda own: by_count(own, 3), shared_prompts=shared) for rank in range(ranks)]
    assert len({len(own) for own in parts}) == 1
    assert sorted(i for own in parts for part in own if part.counts for i in part.index) == list(range(len(rows)))


def test_groups_stay_together_and_lengths_beside_each_other() -> None:
    made = samples([(0, 5), (1, 30), (0, 6), (1, 2), (2, 9)])
    assert by_tokens(made, 1000, shared_prompts=True) == [[1, 3, 4, 2, 0]]
    assert by_tokens(made, 1000, shared_prompts=False) == [[1, 4, 2, 0, 3]]


def test_a_gpus_micro_batch_goes_by_its_memory_and_the_models_size() -> None:
    """About what runs on one GPU of 80 GB: a model of 0.5 B trained whole, one of 7 B with an adapter."""
    small = SimpleNamespace(hidden_size=896, intermediate_size=4864, num_hidden_layers=24)
    large = SimpleNamespace(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28)
    free = {"small": 70 << 30, "large": 60 << 30}
    whole = gpu_tokens(small, free["small"], narrow=True, checkpointing=False)
    adapter = gpu_tokens(large, free["large"], narrow=True, checkpointing=False)
    assert 12_000 < whole < 24_000
    assert 2_000 < adapter < 6_000
    assert gpu_tokens(large, free["large"], narrow=False, checkpointing=False) < adapter
    assert gpu_tokens(large, free["large"], narrow=True, checkpointing=True) > 4 * adapter
    assert gpu_tokens(large, 0, narrow=True, checkpointing=False) == FEWEST_GPU_TOKENS
    assert gpu_tokens(large, free["large"] + 10_000_000, narrow=True, checkpointing=False) == adapter
