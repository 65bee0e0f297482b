"""The same causes in the real vLLM: planted by vLLM's own options where it has them, else between mrl and vLLM."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mrl.engines.vllm.engine import VLLMEngine
from mrl.errors import TrainingError
from mrl.types import WeightRef
from tests.conftest import VLLM_SHAPE, build_model
from tests.lent import Lent, lent
from tests.mismatch.planted import SamplesOtherwise, run, warnings_of

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def sharp_vllm_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "sharp-for-vllm"
    return str(build_model(folder, initializer_range=0.3, **VLLM_SHAPE))


class LosesUpdates(Lent):
    """vLLM is sent the first version's tensors for ever, under the newest version's number."""

    first: WeightRef | None = None

    def load_weights(self, ref: WeightRef) -> int:
        assert ref.path is not None
        if self.first is None:
            kept = f"{ref.path}-kept"
            shutil.copytree(ref.path, kept)
            self.first = dataclasses.replace(ref, path=kept)
        version = super().load_weights(dataclasses.replace(self.first, version=ref.version))
        self._held = ref.checksum
        return version


@pytest.fixture
def engine(request: pytest.FixtureRequest, running_vllm: VLLMEngine) -> Iterator[str]:
    kinds, attributes = request.param
    with lent(running_vllm, *kinds, **attributes) as name:
        yield name


def stops(model: str, folder: Path, named: str, **options: Any) -> None:
    with pytest.raises(TrainingError) as stopped:
        run(model, folder, **options)
    assert re.search(named, str(stopped.value)), str(stopped.value)
    assert re.search(named, warnings_of(folder)[0]), warnings_of(folder)


CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "temperature": (
        ((SamplesOtherwise, Lent), {"changes": {"temperature": 0.6}}),
        {},
        r"1\. temperature: .* of temperature 0\.6\b",
    ),
    "top-p": (
        ((SamplesOtherwise, Lent), {"changes": {"top_p": 0.7}}),
        {"top_p": 0.95},
        r"1\. top-p: the sampler filters like top_p: 0\.7, where 0\.95 was",
    ),
    "missed-sync": (
        ((LosesUpdates,), {}),
        {"learning_rate": 1e-2},
        r"1\. missed sync: rollout-0 says it serves version \d, but scores known tokens as version 0 does",
    ),
}


@pytest.mark.parametrize(("engine", "options", "named"), CASES.values(), ids=CASES, indirect=["engine"])
def test_a_cause_planted_before_vllm_is_named(
    sharp_vllm_model: str, tmp_path: Path, engine: str, options: dict[str, Any], named: str
) -> None:
    stops(sharp_vllm_model, tmp_path / "r", named, engine=engine, max_model_len=128, **options)


@pytest.mark.parametrize("engine", [((Lent,), {})], indirect=True)
def test_vllm_as_it_is_has_no_gap(sharp_vllm_model: str, tmp_path: Path, engine: str) -> None:
    options = {"temperature": 0.8, "top_p": 0.9, "learning_rate": 1e-2, "max_logprob_gap": 2e-3}
    run(sharp_vllm_model, tmp_path / "r", engine, max_model_len=128, **options)
    assert not warnings_of(tmp_path / "r")


def test_vllms_own_options_are_named(sharp_vllm_model: str, tmp_path: Path) -> None:
    """bfloat16 beside a trainer in float32; logprobs as they are before the temperature."""
    own: dict[str, Any] = {"engine": "vllm", "max_model_len": 128, "vllm_kv_cache_gb": 0.25}
    stops(
        sharp_vllm_model,
        tmp_path / "dtype",
        r"1\. dtype: .* the trainer computes in float32, the engine in bfloat16\. Give both the same dtype",
        **own,
        vllm_args={"dtype": "bfloat16"},
        max_logprob_gap=0.004,
    )
    stops(
        sharp_vllm_model,
        tmp_path / "raw",
        r"1\. temperature: .* temperature 1, where temperature: 0\.7 .* has to be processed_logprobs",
        **own,
        vllm_args={"logprobs_mode": "raw_logprobs"},
        temperature=0.7,
        top_p=0.9,
    )
