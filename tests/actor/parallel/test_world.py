from __future__ import annotations

import pytest

from mrl.actor.parallel.world import VARIABLES, World, join, own_device, together, wanted_size
from mrl.config import ModelConfig, OrchestratorConfig, TrainingConfig
from mrl.config.ranks import check_ranks
from mrl.errors import ConfigError, WorkerDied
from mrl.loop.preflight import prepare


def test_one_process_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert type(join("cpu", 1.0)) is World
    monkeypatch.delenv("WORLD_SIZE")
    assert wanted_size() == 1


def test_an_environment_that_is_not_complete_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for size, said in (("2", "RANK, MASTER_ADDR"), ("two", "'two'"), ("0", "'0'")):
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(ConfigError, match=said):
            wanted_size()


def test_options_that_ranks_do_not_take_are_refused_before_anything_is_loaded() -> None:
    for option in ("torch_compile", "offload_optimizer", "use_liger_kernel"):
        training = TrainingConfig(**{option: True})
        check_ranks(training, ModelConfig(), 1)
        check_ranks(training.model_copy(update={"actor_parallelism": "ddp"}), ModelConfig(), 2)
        with pytest.raises(ConfigError, match=f"{option}.*use ddp"):
            check_ranks(training, ModelConfig(), 2)
    with pytest.raises(ConfigError, match=r"torch_compile.*use ddp"):
        prepare(OrchestratorConfig.from_flat(actor_gpu="A100:2", torch_compile=True))
    with pytest.raises(ConfigError, match="mps"):
        check_ranks(TrainingConfig(), ModelConfig(device="mps"), 2)
    with pytest.raises(ConfigError, match="one device"):
        own_device("cuda:1", 0)


def test_only_errors_of_other_ranks_count_as_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Worker:
        world = World()

        @together
        def step(self, error: Exception) -> None:
            raise error

    closed = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    with pytest.raises(RuntimeError, match="closed by peer"):
        Worker().step(closed)
    for name in ("WORLD_SIZE", *VARIABLES):
        monkeypatch.setenv(name, "2")
    with pytest.raises(WorkerDied, match=r"step\(\).*ddp_timeout"):
        Worker().step(closed)
    with pytest.raises(RuntimeError, match="shapes"):
        Worker().step(RuntimeError("shapes do not match"))
