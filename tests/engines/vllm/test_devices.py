"""Which GPUs the engines get, with the numbers of GPUs that machines have and this one has not."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest
import torch

from mrl import OrchestratorConfig
from mrl.config import ModelConfig
from mrl.engines.vllm import engine as engine_module
from mrl.engines.vllm.devices import environment, notices, visible
from mrl.engines.vllm.engine import VLLMEngine
from mrl.errors import ConfigError, EngineError
from mrl.loop.preflight import engine_gpus
from mrl.loop.spawning import engine_options


def shares(monkeypatch: pytest.MonkeyPatch, gpus: int, **options: Any) -> tuple[list[list[int]], int | None]:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    return engine_gpus(OrchestratorConfig.from_flat(engine="vllm", **({"num_rollout_workers": 1} | options)))


@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        (0, {"num_rollout_workers": 2}, [[], []]),
        (2, {}, [[1]]),
        (2, {"device": "cuda:1"}, [[0]]),
        (4, {"num_rollout_workers": 3}, [[1], [2], [3]]),
        (4, {"device": "cuda:2", "tensor_parallel_size": 2}, [[0, 1]]),
        (4, {"actor_gpu": "A100:2"}, [[2]]),
        (4, {"device": "cpu", "num_rollout_workers": 2, "tensor_parallel_size": 2}, [[0, 1], [2, 3]]),
        (1, {"device": "cpu"}, [[0]]),
        (4, {"vllm_devices": [3, 1], "num_rollout_workers": 2}, [[3], [1]]),
        (1, {"gpu_memory_utilization": 0.4}, [[0]]),
        (1, {"vllm_args": {"gpu_memory_utilization": 0.3}, "num_rollout_workers": 3}, [[0], [0], [0]]),
        (2, {"vllm_devices": [0, 1], "tensor_parallel_size": 2, "gpu_memory_utilization": 0.5}, [[0, 1]]),
        (2, {"vllm_devices": [1, 1], "num_rollout_workers": 2, "gpu_memory_utilization": 0.5}, [[1], [1]]),
    ],
)
def test_engines_get_the_gpus_that_the_actor_leaves(
    gpus: int, options: dict[str, Any], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    got, actor = shares(monkeypatch, gpus, **options)
    assert got == expected
    shared = gpus and options.get("device") != "cpu" and any(actor in share for share in got)
    assert len(notices(got, actor)) == bool(shared)


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        (1, {}, r"1 engine\(s\) and the actor share GPU 0, .*almost all.*gpu_memory_utilization .*such as 0\.5"),
        (1, {"gpu_memory_utilization": 1.0}, "and the actor share GPU 0"),
        (1, {"gpu_memory_utilization": 0.6, "num_rollout_workers": 2}, r"such as 0\.25"),
        (1, {"device": "cpu", "num_rollout_workers": 2}, r"2 engine\(s\) share GPU 0"),
        (1, {"gpu_memory_utilization": 0.4, "tensor_parallel_size": 2}, "there are 1: set tensor_parallel_size: 1"),
        (2, {"num_rollout_workers": 2}, r"2 x 1 GPUs are needed, and besides .*GPU 0.* 1: set num_rollout_workers: 1"),
        (2, {"actor_gpu": "A100:2"}, r"besides the actor's \(GPUs 0, 1\) there are 0"),
        (4, {"tensor_parallel_size": 4}, "set tensor_parallel_size: 3, or name other GPUs, .* with vllm_devices"),
        (2, {"vllm_devices": [0]}, "and the actor share GPU 0"),
        (2, {"vllm_devices": [2]}, r"vllm_devices: 2 is asked for and 2 GPU\(s\) can be seen; .*counted from 0"),
    ],
)
def test_too_few_gpus_are_refused_with_what_to_do(
    gpus: int, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=message):
        shares(monkeypatch, gpus, **options)


def test_an_engine_without_an_actor_takes_the_devices_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = OrchestratorConfig.from_flat(engine="vllm", device="cuda:0")
    options = engine_options(config, 0, alone=True)
    assert options["vllm_devices"] == []
    assert options["repeatable_sampling"] is True, "an evaluation, whose figures are to be the same twice"


def test_engines_that_draw_without_seeds_of_requests_draw_differently() -> None:
    """vLLM numbers what it draws from its own seed on: with the same one, two engines would give the same rollouts."""
    configs = [OrchestratorConfig.from_flat(engine="vllm", seed=seed, num_rollout_workers=3) for seed in (1, 2)]
    seeds = [engine_options(config, index)["seed"] for config in configs for index in range(3)]
    assert len(set(seeds)) == 6
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seeds[0] == engine_options(configs[0], 0)["seed"]


@pytest.mark.parametrize(
    ("engine", "asked", "does"),
    [
        ("transformers", None, True),
        ("vllm", None, False),
        ("vllm", True, True),
        ("vllm-remote", None, True),
        ("vllm-remote", False, False),
    ],
)
def test_each_engine_has_its_default_for_seeds(engine: str, asked: bool | None, does: bool) -> None:
    config = OrchestratorConfig.from_flat(engine=engine, repeatable_sampling=asked)
    assert config.serving.samples_repeatably(engine) == does


def test_engine_transformers_always_has_seeds() -> None:
    config = OrchestratorConfig.from_flat(repeatable_sampling=False)
    with pytest.raises(ConfigError, match="repeatable_sampling has an effect only with engine: vllm or vllm-remote"):
        engine_options(config, 0)


@pytest.mark.parametrize(
    ("numbers", "outer", "expected"),
    [
        ([1, 2], None, "1,2"),
        ([0, 1], "4,5", "4,5"),
        ([1], " 4, 5", "5"),
        ([1], "GPU-8932f937,GPU-b2c4", "GPU-b2c4"),
        ([0], "MIG-GPU-1/2/3", "MIG-GPU-1/2/3"),
        ([2], "4,5", None),
        ([1], "3,-1,5", None),
        ([0], "", None),
        ([0], "NoDevFiles", None),
    ],
)
def test_numbers_count_the_gpus_that_an_outer_setting_leaves(
    numbers: list[int], outer: str | None, expected: str | None
) -> None:
    if expected is not None:
        assert visible(numbers, outer) == expected
        return
    with pytest.raises(EngineError, match=rf"vllm_devices: {numbers[0]} is asked for, and CUDA_VISIBLE_DEVICES="):
        visible(numbers, outer)


@pytest.mark.parametrize(
    ("outer", "built_for_cuda", "expected"),
    [
        ({"HIP_VISIBLE_DEVICES": "4,5"}, False, {"HIP_VISIBLE_DEVICES": "5", "CUDA_VISIBLE_DEVICES": "5"}),
        (
            {"HIP_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "4,5", "ROCR_VISIBLE_DEVICES": "0,1,2,3,4,5"},
            False,
            {"HIP_VISIBLE_DEVICES": "5", "CUDA_VISIBLE_DEVICES": "5"},
        ),
        ({"ROCR_VISIBLE_DEVICES": "6,7"}, False, {"CUDA_VISIBLE_DEVICES": "1"}),
        ({"HIP_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "2,3"}, True, {"CUDA_VISIBLE_DEVICES": "3"}),
    ],
)
def test_amds_variables_count_where_amds_gpus_are(
    outer: dict[str, str], built_for_cuda: bool, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8" if built_for_cuda else None)
    assert environment([1], outer) == expected
    if "HIP_VISIBLE_DEVICES" in expected:
        with pytest.raises(EngineError, match="HIP_VISIBLE_DEVICES=4,5 has 2 GPU"):
            environment([2], outer)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"vllm_devices": [1]}, {"CUDA_VISIBLE_DEVICES": "7"}),
        ({}, {}),
        ({"device": "cuda:1"}, {"CUDA_VISIBLE_DEVICES": "7"}),
        ({"device": "cuda:0", "tensor_parallel_size": 2}, {"CUDA_VISIBLE_DEVICES": "6,7"}),
    ],
)
def test_vllms_process_sees_them(
    options: dict[str, Any], expected: dict[str, str], tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []

    class FakeProcess:
        """Stands for vLLM's."""

        facts: ClassVar = {"max_model_len": 8, "vocab_size": 8}

        def __init__(self, *, env: dict[str, str], **_: Any) -> None:
            started.append(env)

    monkeypatch.setattr(engine_module, "VLLMProcess", FakeProcess)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    device = options.pop("device", "auto")
    VLLMEngine.create(ModelConfig(model=tiny_model, device=device), **options)
    assert started == [expected]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"
