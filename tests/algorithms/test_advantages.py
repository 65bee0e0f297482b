"""Every advantage against its formula in numpy, group by group, and against TRL's own lines where it has it."""

from __future__ import annotations

import inspect
import textwrap
from functools import cache
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mrl.algorithms import ADVANTAGES
from mrl.algorithms.advantages import EPSILON, AdvantageInputs, AdvantageSettings
from mrl.algorithms.turns import returns_to_go, spread_over_samples, turn_lengths, turn_rewards
from mrl.types import Rollout, Sample

grouped = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.25, 1.0, 3.0])), min_size=1, max_size=30
)  # (group, reward), in any order


def inputs(rows: list[tuple[int, float]], **others: Any) -> AdvantageInputs:
    rewards = torch.tensor([reward for _, reward in rows], dtype=torch.float64)
    columns = {"rewards_BK": rewards[:, None], "weights_K": torch.ones(1, dtype=torch.float64)}
    return AdvantageInputs(rewards, torch.tensor([group for group, _ in rows]), **(columns | others))


def compute(name: str, given_inputs: AdvantageInputs, **settings: Any) -> Any:
    return ADVANTAGES.get(name).compute(given_inputs, AdvantageSettings(**settings))


def deviation(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def expected(name: str, rows: list[tuple[int, float]]) -> np.ndarray:
    groups, rewards = np.array([g for g, _ in rows]), np.array([r for _, r in rows])
    out = np.zeros_like(rewards)
    for i, group in enumerate(groups):
        own = rewards[groups == group]
        if name == "rloo":
            others = [r for j, r in enumerate(rewards) if groups[j] == group and j != i]
            out[i] = rewards[i] - np.mean(others) if others else 0.0
        elif name == "maxrl":
            out[i] = (rewards[i] - own.mean()) / own.mean() if own.mean() > 0 else 0.0
        elif name == "reinforce_pp":
            out[i] = rewards[i]
        else:
            out[i] = rewards[i] - own.mean()
            if name == "gdpo":
                out[i] /= deviation(own) + EPSILON
    if name in ("reinforce_pp", "reinforce_pp_baseline", "gdpo"):
        out = (out - out.mean()) / (deviation(out) + EPSILON)
    return out


@pytest.mark.parametrize("name", ["rloo", "maxrl", "reinforce_pp", "reinforce_pp_baseline", "gdpo"])
@given(rows=grouped)
def test_matches_numpy(name: str, rows: list[tuple[int, float]]) -> None:
    np.testing.assert_allclose(compute(name, inputs(rows)).numpy(), expected(name, rows), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["rloo", "maxrl", "turn", "token", "process", "group"])
@given(rows=grouped)
def test_an_empty_step_and_a_group_that_agrees_teach_nothing(name: str, rows: list[tuple[int, float]]) -> None:
    agreed = [(group, 0.1) for group, _ in rows]
    of_one_turn = {"turn_rewards": [[reward] for _, reward in agreed], "turn_lengths": [[2]] * len(agreed)}
    for value in compute(name, inputs(agreed, **of_one_turn)):
        assert value.abs().max() < 1e-12
    nothing = inputs([], rewards_BK=torch.zeros(0, 1, dtype=torch.float64))
    assert len(compute(name, nothing)) == 0


def test_maxrl_is_the_score_of_the_successes_minus_that_of_all() -> None:
    """Its estimator, as the paper derives it: (1/K) sum over successes - (1/N) sum over all, times N."""
    rewards = [1.0, 0.0, 0.0, 1.0, 0.0]
    advantages = compute("maxrl", inputs([(0, r) for r in rewards]))
    n, k = len(rewards), sum(rewards)
    assert advantages.tolist() == pytest.approx([n * (r / k - 1 / n) for r in rewards])
    with pytest.raises(ValueError, match="at least 0, found -1"):
        compute("maxrl", inputs([(0, -1.0), (0, 1.0)]))


@pytest.mark.parametrize("name", [n for n in ADVANTAGES.names() if n not in ("turn", "token", "process")])
def test_rewards_that_are_not_finite_are_refused(name: str) -> None:
    bad = inputs([(0, 1.0), (0, float("inf"))])
    with pytest.raises(ValueError, match="finite"):
        compute(name, bad)


# --- TRL's own lines --------------------------------------------------------------------------------------------------

trl = pytest.importorskip("trl", reason="the peer these advantages are compared with")


@cache
def trl_lines(trainer: str, start: str, end: str) -> CodeType:
    source = inspect.getsource(getattr(trl, trainer)._generate_and_score_completions)
    return compile(textwrap.dedent(source[source.index(start) : source.index(end)]), "trl", "exec")


def names_for(rewards_BK: Tensor, weights: list[float], generations: int, **attributes: Any) -> dict[str, Any]:
    from trl.trainer.utils import nanstd

    self = SimpleNamespace(
        reward_weights=torch.tensor(weights, dtype=torch.float64),
        reward_funcs=weights,
        reward_clip_range=None,
        beta=0.0,
    )
    vars(self).update(attributes)
    return {
        "torch": torch,
        "nanstd": nanstd,
        "self": self,
        "device": "cpu",
        "rewards_per_func": rewards_BK,
        "num_generations": generations,
        "unscorable_mask": torch.isnan(rewards_BK).all(dim=1),
    }


def rewards_by_function(seed: int, tasks: int, generations: int) -> Tensor:
    """Two functions; the second does not apply to some rollouts."""
    rng = torch.Generator().manual_seed(seed)
    rewards_BK = torch.randint(0, 4, (tasks * generations, 2), generator=rng).double()
    rewards_BK[torch.rand(len(rewards_BK), generator=rng) < 0.2, 1] = torch.nan
    return rewards_BK


def grpo_lines() -> CodeType:
    return trl_lines(
        "GRPOTrainer",
        '        if self.multi_objective_aggregation == "sum_then_normalize":',
        "        # Unscorable completions (every reward func returned None) carry",
    )


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_agrees_with_trl(scale: str) -> None:
    names = names_for(
        rewards_by_function(0, 5, 4),
        [0.7, 0.3],
        4,
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards=scale,
    )
    exec(grpo_lines(), names)
    rows = [(i // 4, value) for i, value in enumerate(names["rewards"].tolist())]
    got = compute("group", inputs(rows), scale=scale)
    torch.testing.assert_close(got, names["advantages"], atol=1e-6, rtol=1e-6)


def test_gdpo_agrees_with_trl() -> None:
    rewards_BK = rewards_by_function(1, 6, 4)
    names = names_for(rewards_BK, [0.7, 0.3], 4, multi_objective_aggregation="normalize_then_sum")
    exec(grpo_lines(), names)
    rows = [(i // 4, 0.0) for i in range(len(rewards_BK))]
    weights_K = torch.tensor([0.7, 0.3], dtype=torch.float64)
    got = compute("gdpo", inputs(rows, rewards_BK=rewards_BK, weights_K=weights_K))
    torch.testing.assert_close(got, names["advantages"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("normalize", [False, True])
def test_rloo_agrees_with_trl(normalize: bool) -> None:
    rewards_BK = rewards_by_function(2, 5, 4)[:, :1]
    names = names_for(rewards_BK, [1.0], 4, normalize_advantages=normalize)
    exec(
        trl_lines(
            "RLOOTrainer",
            "        # Apply weights to each reward function's output and sum",
            "        # Unscorable completions carry no learning signal: zero their advantage",
        ),
        names,
    )
    rows = [(i // 4, value) for i, value in enumerate(names["rewards"].tolist())]
    got = compute("rloo", inputs(rows), normalize=normalize)
    torch.testing.assert_close(got, names["advantages"], atol=1e-6, rtol=1e-6)


# --- turns and tokens -------------------------------------------------------------------------------------------------


def test_turns_are_runs_of_sampled_tokens() -> None:
    assert turn_lengths([[1, 1, 0, 1], [1], [0, 0], [0, 1, 1, 1]]) == [2, 1, 1, 3]
    assert turn_rewards(5.0, [1.0, 2.0], 2) == [1.0, 4.0]  # what the steps do not explain came at the end
    assert turn_rewards(3.0, [1.0, 2.0], 2) == [1.0, 2.0]
    assert turn_rewards(2.0, [], 3) == [0.0, 0.0, 2.0]
    assert turn_rewards(0.0, [], 0) == []
    with pytest.raises(ValueError, match="3 step rewards for 2 turns"):
        turn_rewards(0.0, [1.0] * 3, 2)


@given(rewards=st.lists(st.floats(-2, 2), max_size=8), discount=st.sampled_from([0.0, 0.5, 1.0]))
def test_returns_to_go(rewards: list[float], discount: float) -> None:
    sums = [sum(discount ** (j - k) * r for j, r in enumerate(rewards) if j >= k) for k in range(len(rewards))]
    assert returns_to_go(rewards, discount) == pytest.approx(sums, abs=1e-9)


def test_values_by_token_are_spread_over_samples() -> None:
    samples = [Sample([1], [5, 6, 7], [0.0] * 3, [1, 0, 1], 0), Sample([1], [8], [0.0], [1], 0)]
    rollout = Rollout("r", "t", 0, [], samples)
    assert spread_over_samples([1.0, 2.0, 3.0], rollout) == [[1.0, 0.0, 2.0], [3.0]]
    with pytest.raises(ValueError, match="r: 2 advantages for 3 sampled tokens"):
        spread_over_samples([1.0, 2.0], rollout)


TURNS: list[tuple[int, list[float], list[int]]] = [  # group, rewards by turn, tokens by turn
    (0, [0.0, 1.0], [2, 3]),
    (0, [1.0, 0.0], [1, 2]),
    (0, [0.5], [4]),
    (1, [2.0, 0.0, 1.0], [1, 1, 1]),
    (1, [0.0, 3.0], [2, 2]),
]


def turn_inputs() -> AdvantageInputs:
    return inputs(
        [(group, sum(rewards)) for group, rewards, _ in TURNS],
        turn_rewards=[rewards for _, rewards, _ in TURNS],
        turn_lengths=[lengths for _, _, lengths in TURNS],
    )


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("discount", [1.0, 0.5])
@pytest.mark.parametrize("name", ["turn", "token", "process"])
def test_step_rewards_against_loops(name: str, discount: float, scale: str) -> None:
    """Written out: what each token is worth, and what it is compared with."""

    def token_returns(rollout: int, turn: int) -> list[float]:
        """The discounted rewards from each token of a turn on, a turn's reward being at its last token."""
        _, rewards, lengths = TURNS[rollout]
        ends = np.cumsum(lengths) - 1
        begin = int(ends[turn]) - lengths[turn] + 1
        return [
            sum(discount ** (int(end) - t) * r for end, r in zip(ends, rewards, strict=True) if end >= t)
            for t in range(begin, int(ends[turn]) + 1)
        ]

    def worth(rollout: int, turn: int) -> float:
        """Of a turn, as it is compared."""
        rewards = TURNS[rollout][1]
        if name == "process":
            return rewards[turn]
        if name == "token":
            return float(np.mean(token_returns(rollout, turn)))
        return sum(discount ** (j - turn) * rewards[j] for j in range(turn, len(rewards)))

    turns = [(i, k, group) for i, (group, rewards, _) in enumerate(TURNS) for k in range(len(rewards))]
    everything = np.array([worth(i, k) for i, k, _ in turns])

    def relative(rollout: int, turn: int, value: float) -> float:
        group = TURNS[rollout][0]
        same = np.array([worth(i, k) for i, k, g in turns if g == group and (name == "process" or k == turn)])
        by = {"group": deviation(same), "batch": deviation(everything)}
        return float(value - same.mean()) / (by[scale] + EPSILON if scale != "none" else 1.0)

    advantages = compute(name, turn_inputs(), discount=discount, scale=scale)
    for rollout, (_, rewards, lengths) in enumerate(TURNS):
        own: list[float] = []
        for k, length in enumerate(lengths):
            if name == "token":
                own += [relative(rollout, k, value) for value in token_returns(rollout, k)]
            elif name == "turn":
                own += [relative(rollout, k, worth(rollout, k))] * length
            else:
                later = range(k, len(rewards))
                own += [sum(discount ** (j - k) * relative(rollout, j, rewards[j]) for j in later)] * length
        np.testing.assert_allclose(advantages[rollout].numpy(), own, atol=1e-9)


def test_a_rollout_of_one_turn_has_the_groups_advantage() -> None:
    rows = [(0, 1.0), (0, 0.0), (1, 2.0), (1, 5.0), (1, 2.0)]
    one_turn = inputs(rows, turn_rewards=[[r] for _, r in rows], turn_lengths=[[3]] * len(rows))
    for name in ("turn", "token", "process"):
        for own, whole in zip(compute(name, one_turn), compute("group", inputs(rows)), strict=True):
            assert own.tolist() == pytest.approx([whole.item()] * 3)
