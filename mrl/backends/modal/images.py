"""What containers have installed: the versions that mrl is tested with."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mrl.backends.modal.settings import Settings
from mrl.backends.modal.storage import HUB, STORAGE

if TYPE_CHECKING:
    import modal

TRAINING = {
    "torch": "2.13.0",
    "transformers": "5.19.0",
    "trl": "1.16.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "safetensors": "0.8.0",
    "datasets": "5.2.0",
    "huggingface-hub": "2.4.0",
    "tokenizers": "0.23.3",
    "renderers": "0.1.12",
    "numpy": "2.4.6",
    "math-verify": "0.9.0",
}
"""Versions of what the numbers depend on, by package."""

ROLLOUT = {"vllm": "0.32.0", "torch": "2.13.0", "transformers": "5.19.0", "renderers": "0.1.12"}
"""The same, where vLLM samples."""

OTHERS = (
    *("pydantic>=2.10,<3", "tyro>=1.0,<2", "rich>=13.9", "pyyaml>=6.0", "fastapi>=0.115", "uvicorn>=0.30"),
    *("httpx>=0.27", "packaging>=24", "psutil>=5.9", "pyarrow>=17", "scipy>=1.13", "cloudpickle>=3.0"),
    *("matplotlib>=3.9", "plotext>=5.3,<6", "peft>=0.19", "safetensors>=0.5", "datasets>=4.0", "huggingface-hub>=1.0"),
    *("numpy>=1.26", "modal>=1.6,<2"),
)
"""What mrl needs besides."""


def training_image(settings: Settings) -> modal.Image:
    """Of everything but vLLM's workers."""
    return _image(TRAINING, settings)


def rollout_image(settings: Settings) -> modal.Image:
    """Of workers that sample with vLLM."""
    return _image(ROLLOUT, settings)


def _image(pinned: dict[str, str], settings: Settings) -> modal.Image:
    import modal

    others = [other for other in OTHERS if other.partition(">")[0] not in pinned]
    return (
        modal.Image.debian_slim(python_version=f"{sys.version_info.major}.{sys.version_info.minor}")
        .uv_pip_install(*(f"{name}=={version}" for name, version in pinned.items()), *others, *settings.packages)
        .env({"HF_HOME": f"{STORAGE}/{HUB}", "HF_DATASETS_CACHE": "/tmp/hf_datasets", **settings.environ()})
        .add_local_python_source("mrl")
    )
