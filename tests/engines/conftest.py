from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from mrl.engines.transformers.engine import TransformersEngine
from tests.engines.small_models import CONFIGS, build
from tests.soak import but


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    """Models this small only make torch's threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


IN_SHORT = ("qwen2", "llama-eager", "gemma3", "lfm2")
"""One of each way a model can be decoded: own masks, the model's masks, windows, the model's cache."""


@pytest.fixture(scope="module", params=but(IN_SHORT, CONFIGS))
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


@pytest.fixture(scope="module")
def qwen() -> PreTrainedModel:
    return build("qwen2")


@pytest.fixture
def engine(qwen: PreTrainedModel) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(qwen, None, max_model_len=128)
    yield engine
    engine.close()
