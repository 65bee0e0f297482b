"""Engines: one policy on one set of devices, token ids in and out."""

from mrl.engines.base import Engine
from mrl.registry import Registry

ENGINES: Registry[type[Engine]] = Registry(
    "engines",
    "engine",
    {
        "transformers": "mrl.engines.transformers.engine:TransformersEngine",
        "vllm": "mrl.engines.vllm.engine:VLLMEngine",
        "vllm-remote": "mrl.engines.vllm.remote:RemoteVLLMEngine",
    },
)

__all__ = ["ENGINES", "Engine"]
