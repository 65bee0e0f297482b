"""Every combination of options either trains a real step or is refused by name."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.actor.worker import ActorWorker
from mrl.algorithms import ADVANTAGES, LOSSES, advantage, loss
from mrl.algorithms.advantages import AdvantageInputs, AdvantageSettings
from mrl.algorithms.base import LossSettings, LossTerms, PolicyLoss
from mrl.config import AlgorithmConfig, OrchestratorConfig
from mrl.errors import ConfigError, TrainingError
from mrl.experience.batch import make_batch
from mrl.experience.shaping import shape
from mrl.types import Group, Rollout, Sample, Task
from tests.soak import but

CORRECTIONS: list[dict[str, Any]] = [
    {"importance_sampling": "none"},
    {},
    {"importance_sampling_floor": 0.9},
    {"importance_sampling_cap": None},
    {"importance_sampling": "masked"},
    {"importance_sampling": "masked", "importance_sampling_cap": 5.0, "importance_sampling_floor": 0.5},
    {"importance_sampling": "masked", "importance_sampling_cap": None},
    {"importance_sampling": "sequence_truncated"},
    {"importance_sampling": "sequence_masked"},
]
DIVERGENCES: list[dict[str, Any]] = [
    {},
    {"kl_estimator": "k2"},
    *[
        {"beta": 0.1, "kl_in": where, "kl_estimator": estimator, "use_bias_correction_kl": corrected}
        for where in ("loss", "reward")
        for estimator in ("k1", "k2", "k3")
        for corrected in (True, False)
    ],
]
OTHERS: list[dict[str, Any]] = [
    {},
    {"delta": 4.0},
    {"importance_sampling_level": "sequence"},
    {"importance_sampling_level": "token"},
    {"entropy_coef": 0.01, "top_entropy_quantile": 0.2},
    {"soft_punish_cache": 3, "length_penalty": 0.1},
    {"zero_variance_groups": "drop", "scale_rewards": "batch"},
    {"discount": 0.9, "num_iterations": 2},
    {"normalize_advantages": True, "mask_truncated_completions": True},
]
Combination = tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]


def grid(loss_type: str) -> Iterator[Combination]:
    return itertools.product([loss_type], ADVANTAGES.names(), CORRECTIONS, DIVERGENCES, [{}])


def pairs() -> Iterator[Combination]:
    """Every value of one dimension with every value of the others, in far fewer combinations."""
    dimensions: list[list[Any]] = [LOSSES.names(), ADVANTAGES.names(), CORRECTIONS, DIVERGENCES, OTHERS]
    number = 0
    for i, j in itertools.combinations(range(len(dimensions)), 2):
        for first, second in itertools.product(dimensions[i], dimensions[j]):
            chosen = [values[(number * (k + 1)) // 3 % len(values)] for k, values in enumerate(dimensions)]
            chosen[i], chosen[j] = first, second
            number += 1
            yield tuple(chosen)


def groups() -> list[Group]:
    """Rollouts of several samples and turns, with rewards by function and by step."""
    rng = torch.Generator().manual_seed(0)

    def rollout(name: str, rewards: list[float], turns: int) -> Rollout:
        samples = []
        for _ in range(1 + turns // 3):
            length = int(torch.randint(4, 9, (1,), generator=rng))
            ids = torch.randint(0, 200, (length,), generator=rng).tolist()
            mask = [1] * length
            if turns > 1:
                mask[2] = 0
            samples.append(Sample([1, 2, 3], ids, [-5.5] * length, mask, 0, "length" if turns == 2 else "stop"))
        by_name = {"f": rewards[0], "g": rewards[1]}
        return Rollout(
            name, "t", 0, [], samples, reward=sum(rewards) / 2, rewards=by_name, step_rewards=[0.1][: turns - 1]
        )

    task = Task("t", "p")
    return [
        Group(task, [rollout("a", [1.0, 0.0], 1), rollout("b", [0.0, 0.0], 2), rollout("c", [1.0, 1.0], 3)]),
        Group(task, [rollout("d", [0.0, 1.0], 2), rollout("e", [1.0, 0.0], 2), rollout("f", [1.0, 1.0], 1)]),
        Group(task, [rollout("g", [1.0, 0.0], 1), rollout("h", [1.0, 0.0], 1)]),
    ]


@pytest.fixture(scope="module")
def actor(tiny_model: str) -> ActorWorker:
    made = ActorWorker({"model": tiny_model, "device": "cpu"}, {"learning_rate": 1e-4}, 10**6, {"beta": 0.1})
    made.initialize()
    return made


def train_or_refuse(actor: ActorWorker, combination: Combination) -> bool:
    """One real step as a run would take it. Whether it was trained; else the refusal named what was chosen."""
    loss_type, advantage_type, *parts = combination
    options = {"loss_type": loss_type, "advantage_type": advantage_type, "max_completion_length": 8}
    for part in parts:
        options |= part
    try:
        config = OrchestratorConfig.from_flat(**options)
    except ConfigError as error:
        message = str(error)
    else:
        message = None
    if message is not None:
        assert any(name in message for name in options)
        return False
    actor.config, actor.algorithm = config.training, config.algorithm
    actor.arrange()
    made = groups()

    async def reference_kl(samples: list[Sample]) -> list[float]:
        return actor.reference_kl(samples, 1.0)

    asyncio.run(shape(made, config, reference_kl))
    batch = make_batch(made, config)
    assert batch.samples
    metrics = actor.train_step(batch)
    assert metrics["train/updates_skipped"] == 0, options
    assert all(math.isfinite(value) for value in metrics.values()), (options, metrics)
    assert metrics["train/grad_norm"] > 0 or options["importance_sampling"].endswith("masked"), options
    return True


@pytest.mark.parametrize("every", but((12,), (12, 1)))
def test_pairs_train_or_are_refused(actor: ActorWorker, every: int) -> None:
    trained = [train_or_refuse(actor, combination) for combination in list(pairs())[::every]]
    assert sum(trained) > 150 // every


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("loss_type", LOSSES.names())
def test_all_combinations_train_or_are_refused(actor: ActorWorker, loss_type: str) -> None:
    trained = sum(train_or_refuse(actor, combination) for combination in grid(loss_type))
    assert trained > 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss_type": "gspo", "importance_sampling_level": "token"},
            "token does not go with loss_type gspo.*sequence",
        ),
        ({"loss_type": "vespo", "importance_sampling_level": "sequence"}, "vespo, which takes token"),
        ({"loss_type": "vespo", "importance_sampling": "sequence_masked"}, "use truncated or masked"),
        ({"loss_type": "vespo", "delta": 4.0}, "delta has an effect only with a clipped loss_type"),
        ({"loss_type": "reinforce", "epsilon_high": 0.3}, "epsilon_high has an effect only with another loss_type"),
        ({"vespo_k_pos": 1.0}, "only with loss_type: vespo"),
        ({"loss_type": "reinforce", "num_iterations": 2}, "num_iterations: loss_type reinforce has no ratio"),
        ({"delta": 1.2}, r"delta: 1.2 is not above 1 \+ epsilon_high"),
        ({"advantage_type": "rlo"}, "use one of .*rloo"),
        (
            {"advantage_type": "rloo", "scale_rewards": "none"},
            "scale_rewards has an effect only with another advantage",
        ),
        ({"normalize_advantages": True}, "only with advantage_type: rloo"),
        ({"advantage_type": "gdpo", "discount": 0.9}, r"discount has an effect only with another advantage_type"),
        ({"advantage_type": "maxrl", "length_penalty": 0.1}, "length_penalty makes rewards negative.*maxrl"),
        ({"advantage_type": "maxrl", "beta": 0.1, "kl_in": "reward"}, "kl_in: reward makes rewards negative"),
        ({"max_resamples": 5}, "only with zero_variance_groups: resample"),
        ({"overlong_penalty": 0.5}, "only with soft_punish_cache"),
        ({"soft_punish_cache": 50, "max_completion_length": 40}, "50 tokens do not fit before max_completion_length"),
        ({"soft_punish_cache": 5, "max_completion_length": 40, "max_tokens": 30}, "completions end at max_tokens"),
        ({"kl_in": "reward"}, "kl_in has an effect only with beta above 0"),
        ({"kl_estimator": "k1"}, "only with beta above 0"),
        ({"beta": 0.1, "kl_in": "reward", "use_bias_correction_kl": False}, "only with kl_in: loss"),
        ({"beta": 0.1, "kl_estimator": "k1", "use_bias_correction_kl": False}, "whose mean is zero"),
        ({"importance_sampling": "none", "importance_sampling_floor": 0.5}, "importance_sampling_floor has an effect"),
        ({"importance_sampling_floor": 3.0}, "3.0 is not below importance_sampling_cap"),
        ({"importance_sampling": "masked", "importance_sampling_cap": None}, "masks nothing without a bound"),
        ({"training": {"epsilon": 0.1}}, "epsilon is an option of algorithm"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OrchestratorConfig.from_flat(**options)


def test_gspo_with_a_tokens_epsilon_is_noticed() -> None:
    limits = {"max_completion_length": 64, "loss_type": "gspo"}
    assert any("3e-4" in note for note in OrchestratorConfig.from_flat(**limits).notices())
    assert OrchestratorConfig.from_flat(**limits, epsilon=3e-4).notices() == []


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    for registry in (LOSSES, ADVANTAGES):
        monkeypatch.setattr(registry, "_registered", dict(registry._registered))


@pytest.mark.usefixtures("registries")
def test_another_package_adds_a_loss_and_an_advantage(actor: ActorWorker) -> None:
    seen = []

    @loss("halved", normalization="sequences", options=("epsilon",))
    def halved(terms: LossTerms, settings: LossSettings) -> PolicyLoss:
        seen.append(settings.epsilon_low)
        return PolicyLoss(-0.5 * terms.advantages_BT * terms.logprobs_BT)

    @advantage("sign")
    def sign(inputs: AdvantageInputs, settings: AdvantageSettings) -> torch.Tensor:
        return torch.where(inputs.rewards_B > 0.5, 1.0, -1.0)

    assert train_or_refuse(actor, ("halved", "sign", {}, {}, {"epsilon": 0.3}))
    assert seen == [0.3]
    with pytest.raises(ConfigError, match="epsilon_high has an effect only with"):
        AlgorithmConfig(loss_type="halved", epsilon_high=0.3)
    with pytest.raises(ConfigError, match="'halved' is already registered"):
        loss("halved")(halved)


@pytest.mark.usefixtures("registries")
def test_an_installed_package_adds_one_through_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs.py").write_text(
        "from mrl.algorithms import loss\n"
        "from mrl.algorithms.base import PolicyLoss\n"
        "@loss('theirs', normalization='max_length')\n"
        "def theirs(terms, settings):\n"
        "    return PolicyLoss(-terms.advantages_BT * terms.logprobs_BT)\n"
    )
    (tmp_path / "theirs-1.0.dist-info").mkdir()
    (tmp_path / "theirs-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (tmp_path / "theirs-1.0.dist-info" / "entry_points.txt").write_text("[mrl.losses]\ntheirs = theirs:theirs\n")
    with pytest.raises(ConfigError, match="use one of"):
        AlgorithmConfig(loss_type="theirs")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert AlgorithmConfig(loss_type="theirs").loss_type == "theirs"
    assert LOSSES.get("theirs").normalization == "max_length"
    assert LOSSES.get("theirs") is LOSSES.get("theirs")


def test_rewards_an_advantage_does_not_take_end_the_run_with_its_name() -> None:
    config = OrchestratorConfig.from_flat(advantage_type="maxrl", max_completion_length=8)
    negative = groups()
    negative[0].rollouts[0].reward = -1.0
    with pytest.raises(TrainingError, match="advantage_type maxrl: maxrl takes rewards of at least 0, found -1"):
        make_batch(negative, config)
