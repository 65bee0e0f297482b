"""Whole runs whose actor and engine take turns on one device. The engine is the one for CPUs, made to sleep as vLLM
does; the device is a CPU that is taken for a GPU, and whoever uses it out of turn is caught."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn

from mrl import MRLTrainer, OrchestratorConfig
from mrl.actor.residence import Residence
from mrl.actor.worker import ActorWorker
from mrl.config import ModelConfig
from mrl.engines import ENGINES
from mrl.engines.transformers.engine import TransformersEngine
from mrl.engines.vllm import shares
from mrl.errors import ConfigError, EngineDied, EngineError, MRLError, TrainingError
from mrl.loop import colocate
from mrl.loop.orchestrator import Orchestrator
from mrl.loop.preflight import colocated_places
from mrl.loop.recorded_run import RunResult
from mrl.loop.spawning import engine_options
from mrl.store.checkpoints import list_checkpoints
from mrl.store.run import read_rows
from mrl.types import Completion, GenerateRequest, TrainBatch, WeightRef
from tests import small_runs
from tests.soak import slow_but

pytestmark = pytest.mark.inline("other backends refuse `colocate`, and whoever has the device is asked as an object")

GPU = 24 * shares.GIB


class Sleeper(TransformersEngine):
    """Sleeps and wakes as engine `vllm` does. calls: of all engines and of the actor, in order. fails: what is to raise
    the next time, and what it raises."""

    accepts = frozenset({"weights"})
    calls: list[str]
    fails: dict[str, Exception]
    open: set[Sleeper]
    actor_here = False
    asleep = 0

    @classmethod
    def create(cls, config: ModelConfig, module: nn.Module | None = None, **options: Any) -> Self:
        cls.did("start")
        assert module is None
        assert not cls.actor_here, "started while the actor has the device"
        made = super().create(config)
        cls.open.add(made)
        return made

    @classmethod
    def did(cls, what: str) -> None:
        if cls.calls[-1:] != [what]:
            cls.calls.append(what)
        name = what.partition(" ")[0]
        if name in cls.fails:
            raise cls.fails.pop(name)

    async def sleep(self, level: int) -> None:
        self.did(f"sleep {level}")
        assert not self.asleep
        self.asleep = level
        if level == 2:
            self.version = None  # type: ignore[assignment]

    async def wake(self) -> None:
        self.did("wake")
        assert self.asleep == 1, "there are no weights to wake with"
        assert not self.actor_here, "woken while the actor has the device"
        self.asleep = 0

    def load_weights(self, ref: WeightRef) -> int:
        self.did(f"load {ref.version}")
        assert not self.actor_here, "woken while the actor has the device"
        self.asleep = 0
        return super().load_weights(ref)

    async def generate(self, requests: list[GenerateRequest]) -> list[Completion]:
        self.did(f"generate {self.version}")
        assert not self.asleep, "asked while it sleeps"
        assert not self.actor_here, "generates while the actor has the device"
        return await super().generate(requests)

    def close(self) -> None:
        self.open.discard(self)
        super().close()


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was done, in order; with one GPU that is none."""
    Sleeper.calls, Sleeper.fails, Sleeper.open, Sleeper.actor_here = [], {}, set(), False
    monkeypatch.setitem(ENGINES._registered, "vllm", Sleeper)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(colocate, "gpu_memory", lambda gpu: GPU)

    def logged(owner: type, method: str, what: str, *, here: bool | None = None) -> None:
        plain = getattr(owner, method)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            Sleeper.did(what)
            if what in ("train", "reference", "write"):
                assert Sleeper.actor_here, f"{what}: without the device"
                assert all(engine.asleep for engine in Sleeper.open), f"{what}: an engine has the device"
            found = plain(self, *args, **kwargs)
            Sleeper.actor_here = Sleeper.actor_here if here is None else here
            return found

        monkeypatch.setattr(owner, method, call)

    logged(ActorWorker, "initialize", "initialize", here=True)
    logged(ActorWorker, "train_step", "train")
    logged(ActorWorker, "reference_logprobs", "reference")
    logged(ActorWorker, "write_weights", "write")
    logged(ActorWorker, "save_checkpoint", "save")
    logged(Residence, "leave", "leave", here=False)
    logged(Residence, "come_back", "return", here=True)
    yield Sleeper.calls
    assert not Sleeper.open, "an engine was not closed"


def run(model: str, folder: Path, **changes: Any) -> RunResult:
    Sleeper.calls.clear()
    Sleeper.actor_here = False
    mine = {"engine": "vllm", "colocate": True, "device": "auto", "save_steps": 0, "max_steps": 2}
    return small_runs.run(model, folder, **(mine | changes))


def notices(folder: Path) -> list[str]:
    return [row["message"] for row in read_rows(folder, "events") if row["kind"] == "notice"]


STEP = ["sleep 2", "return", "train", "write", "leave"]
BEGIN = ["start", "sleep 2", "initialize", "write", "leave", "load 0"]


def test_they_take_turns_and_the_run_is_the_same(
    tiny_model: str, tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tiny_model, tmp_path / "one", max_steps=2)
    assert calls == [*BEGIN, "generate 0", *STEP, "load 1", "generate 1", *STEP, "load 2", "save"]
    (shared,) = [message for message in notices(tmp_path / "one") if message.startswith("colocate: GPU 0 (24.0 GiB)")]
    assert "gpu_memory_utilization 0.92" in shared
    (began,) = [row for row in read_rows(tmp_path / "one", "events") if row["kind"] == "start"]
    assert began["repeatable_sampling"] is False
    times = [row["time/handover"] for row in read_rows(tmp_path / "one", "metrics")]
    assert len(times) == 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    small_runs.run(tiny_model, tmp_path / "two", max_steps=2, save_steps=0)
    assert small_runs.same_weights(tmp_path / "one", tmp_path / "two")
    assert small_runs.record_of(tmp_path / "one")["rollouts"] == small_runs.record_of(tmp_path / "two")["rollouts"]


def test_the_references_logprobs_wait_for_the_actors_turn(tiny_model: str, tmp_path: Path, calls: list[str]) -> None:
    run(tiny_model, tmp_path, beta=0.1, max_steps=1)
    turn = ["sleep 2", "return", "reference", "train", "write", "leave", "load 1", "save"]
    assert calls == [*BEGIN, "generate 0", *turn]


def test_weights_that_are_not_sent_are_kept(tiny_model: str, tmp_path: Path, calls: list[str]) -> None:
    """Between syncs, and those below an adapter."""
    run(tiny_model, tmp_path / "rarely", sync_weights_every=2)
    kept = ["sleep 1", "return", "train", "leave", "wake"]
    assert calls == [*BEGIN, "generate 0", *kept, "generate 0", *STEP, "load 1", "save"]
    run(tiny_model, tmp_path / "adapter", use_lora=True, max_steps=1)
    assert "sleep 1" in calls
    assert "sleep 2" not in calls


@pytest.mark.slow
def test_it_goes_on_with_weights_that_were_sent_before_the_actors(
    tiny_model: str, tmp_path: Path, calls: list[str]
) -> None:
    """From a checkpoint between two syncs, which holds both."""
    run(tiny_model, tmp_path / "whole", sync_weights_every=2, max_steps=4)
    run(tiny_model, tmp_path / "cut", sync_weights_every=2, max_steps=3)
    calls.clear()
    Sleeper.actor_here = False
    run_again(tmp_path / "cut", max_steps=4)
    assert calls[:6] == ["start", "sleep 2", "initialize", "leave", "load 1", "generate 1"]
    assert small_runs.same_weights(tmp_path / "whole", tmp_path / "cut")


def run_again(folder: Path, **changes: Any) -> RunResult:
    given = {"train_dataset": small_runs.TASKS, "reward_funcs": small_runs.distinct}
    return MRLTrainer(resume=str(folder), **given, **changes).train()


def test_checkpoints_and_evaluations_come_in_between(tiny_model: str, tmp_path: Path, calls: list[str]) -> None:
    held_out = [{"prompt": f"answer {i}"} for i in range(2)]
    run(tiny_model, tmp_path, save_steps=1, eval_steps=1, eval_dataset=held_out, sync_weights_every=1)
    around = [*BEGIN, "generate 0", *STEP, "load 1", "generate 1", "save", "generate 1", *STEP, "load 2"]
    assert calls == [*around, "generate 2", "save"]
    assert len(list(read_rows(tmp_path, "eval_metrics"))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("stops", slow_but(["train"], ["train", "return"]))
def test_stopped_in_the_actors_turn_it_goes_on_later(
    stops: str, tiny_model: str, tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No weights are sent any more, and nothing is woken; the resumed run is the one without the stop."""
    run(tiny_model, tmp_path / "whole", max_steps=3)
    owner: Any = ActorWorker if stops == "train" else Residence
    method = {"train": "train_step", "return": "come_back"}[stops]
    plain, init, runs = getattr(owner, method), Orchestrator.__init__, list[Orchestrator]()

    def made(self: Orchestrator, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        runs.append(self)

    def stopping(self: Any, *args: Any) -> Any:
        runs[-1].request_stop(signal.SIGTERM)
        return plain(self, *args)

    monkeypatch.setattr(Orchestrator, "__init__", made)
    monkeypatch.setattr(owner, method, stopping)
    assert run(tiny_model, tmp_path / "cut", max_steps=3).status == "interrupted"
    monkeypatch.setattr(owner, method, plain)
    assert calls == [*BEGIN, "generate 0", "sleep 2", "return", "train", "save"]
    calls.clear()
    Sleeper.actor_here = False
    run_again(tmp_path / "cut")
    assert calls[:6] == ["start", "sleep 2", "initialize", "write", "leave", "load 1"]
    assert small_runs.same_weights(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("what", slow_but(["load"], ["sleep", "load"]))
def test_an_engine_that_cannot_change_over_is_replaced(
    what: str, tiny_model: str, tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ActorWorker.train_step

    def plant(self: ActorWorker, batch: TrainBatch) -> dict[str, float]:
        if what == "load" and self.step == 0:
            Sleeper.fails["load"] = EngineError("no memory to wake in")
        return plain(self, batch)

    monkeypatch.setattr(ActorWorker, "train_step", plant)
    if what == "sleep":
        generate = Sleeper.generate

        async def planted(self: Sleeper, requests: list[GenerateRequest]) -> list[Completion]:
            if not Sleeper.fails and "planted" not in calls:
                Sleeper.fails["sleep"] = EngineError("cannot sleep")
                calls.append("planted")
            return await generate(self, requests)

        monkeypatch.setattr(Sleeper, "generate", planted)
    result = run(tiny_model, tmp_path)
    assert result.status == "finished"
    replaced = ["load 1", "start", "load 1"] if what == "load" else ["start", "load 1"]
    assert calls[calls.index("train") :] == [
        "train",
        "write",
        "leave",
        *replaced,
        "generate 1",
        *STEP,
        "load 2",
        "save",
    ]
    said = " ".join(notices(tmp_path))
    assert ("no memory to wake in" if what == "load" else "did not go to sleep and is ended") in said
    assert "rollout-0 is replaced" in said


def test_an_engine_that_dies_in_its_turn_is_replaced_in_it(
    tiny_model: str, tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = Sleeper.generate

    dead: set[Sleeper] = set()

    async def dies(self: Sleeper, requests: list[GenerateRequest]) -> list[Completion]:
        if not dead:
            calls.append("dies")
            dead.add(self)
        if self in dead:
            raise EngineDied("killed")
        return await generate(self, requests)

    monkeypatch.setattr(Sleeper, "generate", dies)
    assert run(tiny_model, tmp_path, max_steps=1).status == "finished"
    assert calls == [*BEGIN, "dies", "start", "load 0", "generate 0", *STEP, "load 1", "save"]


@pytest.mark.parametrize("what", slow_but(["return"], ["train", "return", "write", "leave"]))
def test_an_actor_that_fails_in_its_turn_ends_the_run_cleanly(
    what: str, tiny_model: str, tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM sleeps then; it is closed asleep, and nobody is asked for anything."""
    generate = Sleeper.generate

    async def planted(self: Sleeper, requests: list[GenerateRequest]) -> list[Completion]:
        done = await generate(self, requests)
        Sleeper.fails[what] = TrainingError("broken")
        return done

    monkeypatch.setattr(Sleeper, "generate", planted)
    with pytest.raises(MRLError, match="broken"):
        run(tiny_model, tmp_path)
    turn = ["sleep 2", "return", "train", "write", "leave"]
    assert calls == [*BEGIN, "generate 0", *turn[: turn.index(what) + 1]]
    assert not list_checkpoints(tmp_path)
    assert list(read_rows(tmp_path, "rollouts")), "what was generated is written down"


def test_an_engine_that_does_not_start_or_sleep_ends_the_run_before_the_actor_loads(
    tiny_model: str, tmp_path: Path, calls: list[str]
) -> None:
    for what in ("start", "sleep"):
        Sleeper.fails[what] = EngineError("Sleep mode is not supported on current platform.")
        with pytest.raises(EngineError, match="not supported"):
            run(tiny_model, tmp_path / what)
        assert "initialize" not in calls


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        (1, {"async_mode": "pipeline"}, "pipeline.* vLLM generates while the actor trains"),
        (1, {"engine": "transformers"}, "colocate has an effect only with engine=.vllm.:"),
        (1, {"engine": "vllm-remote", "vllm_urls": ["http://x"]}, "colocate has an effect only with engine=.vllm.:"),
        (0, {}, "there is no GPU here, and vLLM cannot sleep on a CPU"),
        (2, {"device": "cpu"}, "the actor is on cpu"),
        (2, {"num_rollout_workers": 2, "vllm_devices": [0, 0]}, r"several rollout workers are on GPU 0"),
        (1, {"num_rollout_workers": 2}, "2 x 1 GPUs are needed"),
        (2, {"vllm_devices": [1]}, "no engine is on the actor's GPU"),
        (1, {"vllm_args": {"enable_sleep_mode": False}}, "enable_sleep_mode"),
        (1, {"gpu_memory_utilization": 0.99}, "use at most 0.92"),
        (1, {"vllm_kv_cache_gb": 40.0}, "the GPU has 22.1 GiB for vLLM"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    gpus: int,
    options: dict[str, Any],
    message: str,
    tiny_model: str,
    tmp_path: Path,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=message):
        run(tiny_model, tmp_path / "run", **options)
    assert not calls
    assert not (tmp_path / "run").exists()


def test_only_engines_on_the_actors_gpu_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = OrchestratorConfig.from_flat(engine="vllm", colocate=True, num_rollout_workers=2, tensor_parallel_size=2)
    assert colocated_places(config) == [0]
    first, second = (engine_options(config, index) for index in range(2))
    assert (first["vllm_devices"], first["colocate"], first["gpu_memory_utilization"]) == ([0, 1], True, 0.92)
    assert (second["vllm_devices"], second["colocate"], second["gpu_memory_utilization"]) == ([2, 3], False, None)
    assert engine_options(config, 0, alone=True)["colocate"] is False, "mrl eval has no actor"
