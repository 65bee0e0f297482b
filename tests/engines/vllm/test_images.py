"""Images in vLLM: the numbers of the trainer's model, with its processor's tokens, also after new weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mrl.config import ModelConfig
from mrl.data.images import Picture
from mrl.engines.transformers.engine import TransformersEngine
from mrl.engines.vllm.engine import VLLMEngine, _unexpanded
from mrl.models import load_model, load_processor, load_tokenizer
from mrl.rollouts.prompts import PromptEncoder
from mrl.types import GenerateRequest, SamplingParams, TokenSequence
from mrl.weights.files import publish
from tests.conftest import VLLM_SHAPE
from tests.vision_models import build_llava, image


def config(model: str) -> ModelConfig:
    return ModelConfig(model=model, device="cpu", max_model_len=256)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_llava(tmp_path_factory.mktemp("models") / "llava", **VLLM_SHAPE))


@pytest.fixture(scope="module")
def engine(llava: str) -> Iterator[VLLMEngine]:
    made = VLLMEngine.create(
        config(llava), vllm_args={"block_size": 32}, vllm_kv_cache_gb=0.25, repeatable_sampling=True
    )
    yield made
    made.close()


def requests(model: str, *colours: str, start: int = 0) -> list[GenerateRequest]:
    """One for each colour, and one with all of them."""
    encoder = PromptEncoder(load_tokenizer(config(model)), processor=load_processor(config(model)))
    made = []
    for number, shown in enumerate([[colour] for colour in colours] + [list(colours)]):
        parts = [{"type": "image", "image": Picture(image(colour))} for colour in shown]
        prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
        ids = tuple(encoder.encode(prompt))
        params, media = SamplingParams(max_tokens=12), encoder.media(prompt, ids)
        made.append(GenerateRequest(f"r{number}", ids, params, start + number, media=media))
    return made


def test_a_prompt_has_one_placeholder_for_each_image(llava: str) -> None:
    *_, both = requests(llava, "red", "blue")
    ids, image_id = list(both.prompt_ids), both.prompt_ids[both.media[0].start]
    assert ids.count(image_id) == 8
    assert _unexpanded(both, image_id) == [*ids[: ids.index(image_id) + 2], *ids[ids.index(image_id) + 8 :]]


@pytest.mark.vllm
async def test_images_are_seen_as_the_trainer_sees_them(engine: VLLMEngine, llava: str, tmp_path: Path) -> None:
    reference = TransformersEngine.create(config(llava))
    model = load_model(config(llava))
    asked = requests(llava, "red", "blue")
    firsts = []
    for version in (0, 1):
        if version:  # what vLLM kept of the images was made by other weights
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)
        for one in (engine, reference):
            one.load_weights(publish(model.state_dict(), tmp_path / f"{version}", version))
        sampled = await engine.generate(asked)
        assert [completion.error for completion in sampled] == [None] * 3
        expected = await reference.logprobs(
            [TokenSequence(r.prompt_ids, tuple(c.token_ids), 1.0, r.media) for r, c in zip(asked, sampled, strict=True)]
        )
        for completion, logprobs in zip(sampled, expected, strict=True):
            assert completion.logprobs == pytest.approx(logprobs, abs=1e-5)
        firsts.append([completion.logprobs[0] for completion in sampled])
    assert firsts[0] != firsts[1]
    reference.close()
