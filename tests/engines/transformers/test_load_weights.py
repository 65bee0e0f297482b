"""Weights from a directory: loaded whole, or refused with the old ones untouched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from mrl.engines.transformers.engine import TransformersEngine
from mrl.errors import SyncError
from mrl.types import WeightRef


@pytest.fixture(params=["tied", "untied"])
def model(request: pytest.FixtureRequest, tiny_model: str, untied_model: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_model if request.param == "tied" else untied_model)


@pytest.fixture
def changed(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Other values for each of the model's tensors, tied ones once."""
    return {name: torch.randn_like(p) for name, p in model.named_parameters()}


def load(model: PreTrainedModel, folder: Path) -> TransformersEngine:
    engine = TransformersEngine(model, None, max_model_len=64)
    pointers = [p.data_ptr() for p in model.parameters()]
    assert engine.load_weights(WeightRef(3, path=str(folder))) == engine.version == 3
    assert [p.data_ptr() for p in model.parameters()] == pointers  # in place
    return engine


def refused(model: PreTrainedModel, folder: Path, message: str) -> None:
    engine = TransformersEngine(model, None, max_model_len=64)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(SyncError, match=message):
        engine.load_weights(WeightRef(3, path=str(folder)))
    assert engine.version == 0
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_loads_a_file(model, changed, tmp_path):
    save_file(changed, tmp_path / "model.safetensors")
    engine = load(model, tmp_path)
    assert all(torch.equal(engine.state_dict()[name], t) for name, t in changed.items())


def test_loads_shards_in_another_precision(model, changed, tmp_path):
    half = {name: t.bfloat16() for name, t in changed.items()}
    names = sorted(half)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: half[name] for name in held}, tmp_path / file)
    save_file({"stranger": torch.zeros(1)}, tmp_path / "not-listed.safetensors")
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    load(model, tmp_path)
    assert all(torch.equal(model.state_dict()[name], t.float()) for name, t in half.items())

    (tmp_path / "b.safetensors").unlink()
    refused(model, tmp_path, "cannot be read")


def test_loads_what_save_pretrained_wrote(model, tmp_path):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    wanted = {name: t.clone() for name, t in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    load(model, tmp_path)
    assert all(torch.equal(wanted[name], t) for name, t in model.state_dict().items())


def test_a_tied_head_may_be_there_twice_but_not_two_things(model, changed, tmp_path):
    embedding = changed["model.embed_tokens.weight"]
    save_file(changed | {"lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors")
    load(model, tmp_path)
    assert torch.equal(model.lm_head.weight, embedding)
    save_file(changed | {"lm_head.weight": embedding + 1}, tmp_path / "model.safetensors")
    if model.config.tie_word_embeddings:
        refused(model, tmp_path, "different values for .*(embed_tokens|lm_head).*tied")
    del changed["model.embed_tokens.weight"]
    save_file(changed | {"lm_head.weight": embedding}, tmp_path / "model.safetensors")
    if model.config.tie_word_embeddings:
        load(model, tmp_path)
    else:
        refused(model, tmp_path, "lacks tensors of the model: model.embed_tokens.weight")


def test_mismatches_are_named_and_change_nothing(model, changed, tmp_path):
    file, norm = tmp_path / "model.safetensors", "model.norm.weight"
    refused(model, tmp_path, "holds no .safetensors file")
    save_file({n: t for n, t in changed.items() if n != norm}, file)
    refused(model, tmp_path, f"lacks tensors of the model: {norm}")
    save_file(changed | {"model.extra": torch.zeros(2)}, file)
    refused(model, tmp_path, "does not know: model.extra")
    save_file(changed | {norm: torch.zeros(33)}, file)
    refused(model, tmp_path, rf"{norm} is \[33\], the model's \[32\]")
    save_file(changed, file)
    file.write_bytes(file.read_bytes()[:-10])
    refused(model, tmp_path, "cannot be read")
    engine = TransformersEngine(model, None, max_model_len=64)
    with pytest.raises(SyncError, match="neither a module nor a path"):
        engine.load_weights(WeightRef(1))


def test_what_the_actor_publishes_is_what_the_worker_then_holds(model, changed, tmp_path):
    from mrl.weights.checksum import checksum
    from mrl.weights.files import publish

    ref = publish(changed, tmp_path, version=3)
    engine = TransformersEngine(model, None, max_model_len=64)
    engine.load_weights(ref)
    assert checksum(engine.state_dict(), load_file(f"{ref.path}/model.safetensors")) == ref.checksum


def test_a_model_with_an_adapter_is_refused(model, changed, tmp_path):
    from peft import LoraConfig, get_peft_model

    save_file(changed, tmp_path / "model.safetensors")
    refused(get_peft_model(model, LoraConfig(r=2)), tmp_path, "PEFT")
