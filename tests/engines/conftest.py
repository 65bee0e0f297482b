from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from mrl.engines.transformers import TransformersEngine
from tests.engines.small_models import CONFIGS, build


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    """Models this small only make torch's threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=list(CONFIGS))
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
