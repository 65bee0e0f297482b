"""The gap between sampler and trainer in whole runs: each cause is planted in a sampler and has to be named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn

from mrl.config import ModelConfig
from mrl.engines import ENGINES
from mrl.engines.transformers.engine import TransformersEngine
from mrl.errors import TrainingError
from mrl.mismatch import probe
from mrl.store.checkpoints import list_checkpoints
from mrl.store.run import read_rows
from mrl.types import Completion, GenerateRequest, WeightRef
from tests.conftest import build_model
from tests.mismatch.planted import SamplesOtherwise, run, warnings_of


class InBfloat16(TransformersEngine):
    @classmethod
    def create(cls, config: ModelConfig, module: nn.Module | None = None) -> Self:
        return super().create(config.model_copy(update={"dtype": "bfloat16"}), module)


class LosesUpdates(TransformersEngine):
    """Takes the first weights and from then on only says that it took them, checksum and all."""

    confirmed: str | None = None

    def load_weights(self, ref: WeightRef) -> int:
        if self.confirmed is None:
            super().load_weights(ref)
        self.confirmed, self.version = ref.checksum, ref.version
        return ref.version

    def held(self) -> str | None:
        return self.confirmed


def sampling(**changes: Any) -> type[TransformersEngine]:
    return type("Planted", (SamplesOtherwise, TransformersEngine), {"changes": changes})


@pytest.fixture(scope="session")
def sharp_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Qwen2 whose words are not all about equally likely: temperature and cuts make a difference."""
    return str(build_model(tmp_path_factory.mktemp("models") / "sharp", initializer_range=0.5))


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """A name for an engine class that is registered for one test."""
    name = f"planted-{request.node.name}"
    ENGINES.register(name)(request.param)
    yield name
    ENGINES._registered.pop(name)


CASES: dict[str, tuple[type[TransformersEngine], dict[str, Any], str]] = {
    "temperature": (sampling(temperature=0.6), {}, r"1\. temperature: .* of temperature 0\.6\b.*temperature: 1 was"),
    "temperature-and-top-p": (
        sampling(temperature=1.0),
        {"temperature": 0.7, "top_p": 0.9},
        r"1\. temperature: .* temperature 1, where temperature: 0\.7 was asked for .*processed_logprobs",
    ),
    "top-p": (sampling(top_p=0.8), {}, r"1\. top-p: the sampler filters like top_p: 0\.8, where 1 was"),
    "tighter-top-p": (
        sampling(top_p=0.5),
        {"top_p": 0.9},
        r"1\. top-p: the sampler filters like top_p: 0\.5, where 0\.9",
    ),
    "top-k": (sampling(top_k=12), {}, r"1\. top-k: the sampler filters like top_k: 12, where 0 was"),
    "min-p": (sampling(min_p=0.1), {"top_p": 0.95}, r"1\. min-p: the sampler filters like min_p: 0\.\d+, where 0 was"),
    "dtype": (InBfloat16, {"max_logprob_gap": 0.01}, r"1\. dtype: .* trainer computes in float32\. Give both the same"),
    "missed-sync": (
        LosesUpdates,
        {"learning_rate": 1e-2},
        r"1\. missed sync: rollout-0 says it serves version \d, but scores known tokens as version 0 does",
    ),
}


SIMILAR = ("temperature-and-top-p", "top-p", "tighter-top-p", "min-p", "dtype")


@pytest.mark.parametrize(
    ("engine", "options", "named"),
    [pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name in SIMILAR)) for name, case in CASES.items()],
    indirect=["engine"],
)
def test_a_planted_cause_is_named_and_stops_the_run(
    sharp_model: str, tmp_path: Path, engine: str, options: dict[str, Any], named: str
) -> None:
    folder = tmp_path / "r"
    with pytest.raises(TrainingError, match=r"for the second step in a row\. Likely causes") as stopped:
        run(sharp_model, folder, engine, **options)
    assert re.search(named, str(stopped.value)), str(stopped.value)
    (warning,) = warnings_of(folder)[:1]
    assert re.search(named, warning), warning
    first = int(re.match(r"step (\d+):", warning).group(1))  # type: ignore[union-attr]
    rows = {row["step"]: row for row in read_rows(folder, "metrics")}
    assert max(rows) == first + 1, "it stops at the second step, and that step is in the record"
    limit = options.get("max_logprob_gap", 0.1)
    assert [s for s, row in rows.items() if row["train/logprob_gap_unexplained"] > limit] == [first, first + 1]
    assert {r["step"] for r in read_rows(folder, "rollouts")} == set(rows)
    assert [c.step for c in list_checkpoints(folder)] == list(range(1, first)), "the good ones are the newest"


@pytest.mark.parametrize(
    "options",
    [
        {"weight_sync_method": "reload", "num_rollout_workers": 2, "top_k": 7, "min_p": 0.02},
        {"weight_sync_method": "direct", "num_iterations": 2, "temperature": 0.7, "top_p": 0.6},
        pytest.param(
            {"use_lora": True, "lora_r": 4, "lora_alpha": 8, "top_entropy_quantile": 0.5}, marks=pytest.mark.slow
        ),
        pytest.param({"sync_weights_every": 3}, marks=pytest.mark.slow),
    ],
    ids=["reload", "direct", "lora", "stale"],
)
def test_a_sampler_that_does_as_it_is_told_has_no_gap(
    sharp_model: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    """However fast the policy moves and whatever it cuts: the limit is a hundredth of the usual one."""
    run(sharp_model, tmp_path / "r", **({"learning_rate": 1e-2, "max_logprob_gap": 1e-3} | options))
    assert not warnings_of(tmp_path / "r")
    rows = list(read_rows(tmp_path / "r", "metrics"))
    checked = [row["step"] for row in rows if "train/logprob_gap_unexplained" in row]
    assert checked == ([1, 4] if "sync_weights_every" in options else [1, 2, 3, 4])
    if "sync_weights_every" in options:
        assert rows[2]["train/logprob_gap"] > 1e-3, "older weights make a gap, which is no mistake"


SEEN_LATE = ("temperature", "tighter-top-p", "missed-sync")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "options", "named"), [CASES[name] for name in SEEN_LATE], ids=SEEN_LATE, indirect=["engine"]
)
def test_a_cause_is_named_where_all_tokens_are_of_older_weights(
    sharp_model: str, tmp_path: Path, engine: str, options: dict[str, Any], named: str
) -> None:
    """From the second step of a pipeline on."""
    folder = tmp_path / "r"
    with pytest.raises(TrainingError, match=r"for the second step in a row\. Likely causes") as stopped:
        run(sharp_model, folder, engine, async_mode="pipeline", max_steps=8, **options)
    assert re.search(named, str(stopped.value)), str(stopped.value)
    assert "tokens of older weights" in str(stopped.value)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["pipeline", "queue"])
def test_updates_are_no_mismatch(sharp_model: str, tmp_path: Path, mode: str) -> None:
    """Rollouts one version old are compared too, and what an update moves is not held against the sampler."""
    run(sharp_model, tmp_path / "r", async_mode=mode, learning_rate=1e-4, max_steps=6)
    assert not warnings_of(tmp_path / "r")
    rows = list(read_rows(tmp_path / "r", "metrics"))
    assert all("train/logprob_gap_unexplained" in row for row in rows)
    assert max(row["train/logprob_gap_unexplained"] for row in rows) < 0.05


@pytest.mark.slow
def test_updates_that_move_too_far_are_said_once_and_stop_nothing(
    sharp_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "MOVED", 0.01)
    run(sharp_model, tmp_path / "r", async_mode="pipeline", learning_rate=0.02, max_steps=6)
    (warning,) = warnings_of(tmp_path / "r")
    assert "1. fast updates: these tokens are from older weights" in warning
    assert [c.step for c in list_checkpoints(tmp_path / "r")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("engine", [sampling(temperature=0.6)], indirect=True)
def test_without_a_limit_it_is_only_reported(sharp_model: str, tmp_path: Path, engine: str) -> None:
    run(sharp_model, tmp_path / "r", engine, max_logprob_gap=None)
    assert not warnings_of(tmp_path / "r")
    for row in read_rows(tmp_path / "r", "metrics"):
        assert row["train/logprob_gap_unexplained"] == pytest.approx(row["train/logprob_gap"])
        assert row["train/sampler_kl"] > 0.05
        assert 0.1 < row["train/effective_sample_fraction"] < 0.95
        assert 0 < row["train/importance_dropped_fraction"] < 0.9


class EveryOther(SamplesOtherwise, TransformersEngine):
    """Another temperature, in every other step."""

    async def generate(self, requests: list[GenerateRequest]) -> list[Completion]:
        self.changes = {} if (self.version or 0) % 2 else {"temperature": 0.6}
        return await super().generate(requests)


@pytest.mark.parametrize("engine", [EveryOther], indirect=True)
def test_a_step_within_the_limit_ends_the_row(sharp_model: str, tmp_path: Path, engine: str) -> None:
    run(sharp_model, tmp_path / "r", engine)
    warned = [message.partition(":")[0] for message in warnings_of(tmp_path / "r")]
    assert warned == ["step 1", "step 3"]
    assert [c.step for c in list_checkpoints(tmp_path / "r")] == [2, 4]


@pytest.mark.inline("it counts the engines that are made in this process")
@pytest.mark.parametrize("engine", [LosesUpdates], indirect=True)
def test_the_one_of_two_workers_that_missed_a_sync_is_named(sharp_model: str, tmp_path: Path, engine: str) -> None:
    """The other one gets every version; half the samples are enough for the mean to show it."""

    class OnlyTheFirst(LosesUpdates):
        made = 0

        @classmethod
        def create(cls, config: ModelConfig, module: nn.Module | None = None) -> TransformersEngine:  # type: ignore[override]
            OnlyTheFirst.made += 1
            if OnlyTheFirst.made % 2:
                return super().create(config, module)
            return TransformersEngine.create(config, module)

    ENGINES._registered[engine] = OnlyTheFirst
    with pytest.raises(TrainingError) as stopped:
        run(sharp_model, tmp_path / "r", engine, num_rollout_workers=2, learning_rate=2e-2, max_steps=8)
    assert re.search(r"1\. missed sync: rollout-[01] says .* as version 0 does", str(stopped.value)), stopped.value
    assert "rollout-0 says" in str(stopped.value) or "rollout-1 says" in str(stopped.value)
    assert str(stopped.value).count("missed sync:") == 1, "the other worker has the weights it says"


class AnotherModel(TransformersEngine):
    """Serves a model of its own whatever it is sent, and says that it took it."""

    def load_weights(self, ref: WeightRef) -> int:
        if not hasattr(self, "confirmed"):
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for p in self._lm.module.parameters():  # type: ignore[union-attr]
                    p.add_(torch.randn(p.shape, generator=generator) * 0.1)
        self.confirmed, self.version = ref.checksum, ref.version
        return ref.version

    def held(self) -> str | None:
        return self.confirmed


@pytest.mark.parametrize("engine", [AnotherModel], indirect=True)
def test_weights_of_no_known_version_are_a_missed_sync_too(sharp_model: str, tmp_path: Path, engine: str) -> None:
    with pytest.raises(TrainingError) as stopped:
        run(sharp_model, tmp_path / "r", engine)
    assert re.search(r"1\. missed sync: rollout-0 says it serves version 1, .*another model", str(stopped.value))


@pytest.mark.slow
@pytest.mark.parametrize("engine", [sampling(temperature=0.6)], indirect=True)
def test_a_stopped_run_goes_on_from_before_once_its_cause_is_gone(
    sharp_model: str, tmp_path: Path, engine: str
) -> None:
    folder = tmp_path / "r"
    run(sharp_model, folder, engine, max_steps=2, max_logprob_gap=50.0)
    with pytest.raises(TrainingError, match="steps: a resumed run goes on from there"):
        run(sharp_model, folder, engine, resume="auto", max_logprob_gap=0.1)
    assert [c.step for c in list_checkpoints(folder)] == [1, 2]
    ENGINES._registered[engine] = TransformersEngine
    run(sharp_model, folder, engine, resume="auto", max_logprob_gap=0.1)
    rows = list(read_rows(folder, "metrics"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["train/logprob_gap_unexplained"] < 1e-4
