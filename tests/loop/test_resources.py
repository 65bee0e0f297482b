"""What workers are given of the machine they are put on: devices, files, options of the backend."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from mrl.backends import Backend, Resources, check_backend, make_backend
from mrl.backends.inline import InlineBackend
from mrl.config import OrchestratorConfig
from mrl.errors import ConfigError
from mrl.loop.preflight import check_engine, engine_gpus
from mrl.loop.resources import actor_resources, model_for, needs, rewards_for, rollout_resources, settle_sync
from mrl.loop.spawning import spawn_actor, spawn_rewards, spawn_rollout
from mrl.rewards.base import RewardRequest
from mrl.store.checkpoints import Checkpoint
from tests import small_runs
from tests.conftest import build_model
from tests.process_backend import ProcessBackend
from tests.small_runs import record_of


def test_gpus_by_type_and_number() -> None:
    config = OrchestratorConfig.from_flat(actor_gpu="A100-80GB:2", rollout_gpu="L4")
    assert actor_resources(config) == Resources(gpu="A100-80GB", gpus=2)
    assert rollout_resources(config) == Resources(gpu="L4", gpus=1)
    ranks = list(needs(config).values())[:2]
    assert [(r.gpus, r.env["RANK"], r.env["WORLD_SIZE"]) for r in ranks] == [(1, "0", "2"), (1, "1", "2")]
    for gpu, wanted in (("cpu", Resources()), (None, Resources("any", 1))):
        assert next(iter(needs(OrchestratorConfig.from_flat(actor_gpu=gpu)).values())) == wanted


@pytest.mark.parametrize("wrong", ["A100:0", "A100:", ":2", "2", "A100:two", "A100 2", ""])
def test_what_is_no_gpu_is_refused_with_what_would_be(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"^rollout_gpu: '.*' is no type of GPU .* give e\.g\. A100, or A100:2"):
        OrchestratorConfig.from_flat(rollout_gpu=wrong)


def test_options_of_a_backend_reach_it(processes: None) -> None:
    made = make_backend("processes", {"delay": 0.5}, 7.0)
    assert isinstance(made, ProcessBackend)
    assert (made.call_timeout, made.delay) == (7.0, 0.5)


def test_options_that_a_backend_has_not_are_refused(processes: None, tiny_model: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="backend_options: backend 'processes' has no option 'dealy'; it has delay"):
        check_backend("processes", {"dealy": 1}, [])
    with pytest.raises(ConfigError, match="backend 'processes' has no option 'call_timeout'"):
        check_backend("processes", {"call_timeout": 1}, [])
    with pytest.raises(ConfigError, match="backend 'processes' has no option 'dealy'"):
        small_runs.run(tiny_model, tmp_path / "r", backend="processes", backend_options={"dealy": 1})
    assert not (tmp_path / "r").exists()


def test_vllms_gpus_are_those_of_its_tensor_parallelism(processes: None) -> None:
    def config(**options: Any) -> OrchestratorConfig:
        return OrchestratorConfig.from_flat(engine="vllm", backend="processes", **options)

    two = config(rollout_gpu="L4", tensor_parallel_size=2, num_rollout_workers=2)
    assert rollout_resources(two) == rollout_resources(config(rollout_gpu="L4:2", tensor_parallel_size=2))
    assert rollout_resources(two) == Resources("L4", 2)
    assert rollout_resources(config(tensor_parallel_size=2)) == Resources("any", 2)
    assert engine_gpus(two) == ([[], []], None)
    with pytest.raises(ConfigError, match=r"rollout_gpu: L4:4 is 4 GPUs, and vLLM uses 2 .* tensor_parallel_size: 4"):
        rollout_resources(config(rollout_gpu="L4:4", tensor_parallel_size=2))
    with pytest.raises(ConfigError, match=r"vllm_devices: backend processes chooses them"):
        check_engine(config(vllm_devices=[0]))


def test_inline_refuses_an_environment_of_a_workers_own() -> None:
    InlineBackend.check([Resources("A100", 8, 64.0, 1 << 20)])
    with pytest.raises(ConfigError, match=r"inline .* TOKEN cannot be set for one of them"):
        InlineBackend.check([Resources(env={"TOKEN": "x"})])


class Elsewhere(ProcessBackend):
    """Notes what was put."""

    async def put(self, path: Path) -> str:
        there = await super().put(path)
        self.there = there
        return there


@pytest.mark.slow
async def test_local_models_and_reward_files_go_to_the_workers(tiny_model: str, tmp_path: Path) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def where(completions, **_):\n    return [float(len(__file__)) for _ in completions]\n")
    config = OrchestratorConfig.from_flat(
        model=tiny_model, device="cpu", reward_funcs=[f"{rewards}:where", "sandbox"], num_reward_workers=2
    )
    backend = Elsewhere(60.0)
    try:
        rollout, actor = await asyncio.gather(
            spawn_rollout(backend, config, 64, 0), spawn_actor(backend, config, 64, total_steps=1)
        )
        for worker in (rollout, actor):
            model = await worker.call("__getattribute__", "model_config")
            assert model.model == backend.there != tiny_model
            assert (Path(model.model) / "config.json").is_file()
        pool = await spawn_rewards(backend, config)
        request = RewardRequest("r", "p", "c", [], {"testcases": "assert True"})
        report = await pool.score([request], {"global_step": 0})
        assert report.results[0].rewards["where"] == len(backend.there) != len(str(rewards))
    finally:
        await backend.close()


async def test_names_that_are_no_files_go_as_they_are(tiny_model: str) -> None:
    def function(completions: list[str], **_: Any) -> list[float]:
        return [0.0] * len(completions)

    inline: Backend = InlineBackend(60.0)
    for specs in (None, "sandbox", "package.module:name", ["math_verify", function], "absent.py:function"):
        assert await rewards_for(inline, specs) == specs
    for name in (tiny_model, "starter", "Qwen/Qwen2.5-0.5B-Instruct"):
        assert (await model_for(inline, OrchestratorConfig.from_flat(model=name)))["model"] == name


async def test_an_adapter_of_a_local_model_is_refused_where_only_it_would_travel(
    tiny_model: str, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{tiny_model}"}}')
    config = OrchestratorConfig.from_flat(model=str(tmp_path))
    assert (await model_for(InlineBackend(60.0), config))["model"] == str(tmp_path)
    backend = ProcessBackend(60.0)
    with pytest.raises(ConfigError, match=r"model: .* is an adapter of the folder .*export FOLDER --merged"):
        await model_for(backend, config)
    await backend.close()


@pytest.mark.slow
def test_a_run_in_processes_is_the_run_in_one(processes: None, tmp_path: Path) -> None:
    """Bit for bit, resumed once, with several workers of each kind."""
    model = str(build_model(tmp_path / "model"))
    workers = {"num_rollout_workers": 2, "weight_sync_method": "direct"}
    small_runs.run(model, tmp_path / "one", **workers)
    for steps in (2, 4):
        options = {"backend": "processes", "max_steps": steps, "resume": "auto"}
        small_runs.run(model, tmp_path / "several", **workers, **options)
    one, several = (record_of(tmp_path / name, "sync/bytes") for name in ("one", "several"))
    assert one == several


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide a folder from a process")
@pytest.mark.parametrize("mode", ["orchestrated", "simple"])
def test_a_run_whose_workers_do_not_see_its_folder(mode: str, processes: None, tmp_path: Path) -> None:
    """Checkpoints come to the run's folder, and go back to where the workers are."""
    model = str(build_model(tmp_path / "model"))
    hidden = {"backend": "processes", "backend_options": {"hidden": str(tmp_path)}}
    for steps in (2, 3):
        options = {"mode": mode, "save_steps": 1, "max_steps": steps, "resume": "auto"}
        small_runs.run(model, tmp_path / "here", **options)
        result = small_runs.run(model, tmp_path / "apart", **hidden, **options)
        assert result.checkpoint == tmp_path / "apart" / "checkpoints" / f"step-{steps}"
        assert result.checkpoint is not None
        assert not Checkpoint(result.checkpoint, steps).problems()
    apart, here = (record_of(tmp_path / name, "sync/bytes") for name in ("apart", "here"))
    assert repr(apart) == repr(here)  # TRL's logprobs are NaN


def test_methods_that_need_a_disk_in_common(processes: None) -> None:
    hidden = {"backend": "processes", "backend_options": {"hidden": "/nowhere"}}
    config = OrchestratorConfig.from_flat(**hidden)
    settle_sync(config)
    assert config.runtime.weight_sync_method == "volume"
    for options in ({"weight_sync_method": "reload"}, {"weight_sync_method": "checkpoint"}, {"weight_sync_dir": "/x"}):
        with pytest.raises(ConfigError, match=r"workers of backend processes do not see; use volume"):
            settle_sync(OrchestratorConfig.from_flat(**hidden, **options))
