"""`use_liger_kernel`: refused before a model is loaded, and what Liger is asked to do with the model.

Liger's kernels need CUDA, so the one call into it is a fake here. Where the package is installed, a test shows what the
real call changes in a model, without running it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from mrl.actor import worker as actor_module
from mrl.actor.worker import ActorWorker
from mrl.config import ModelConfig, TrainingConfig
from mrl.errors import ConfigError, ModelError
from mrl.modeling import liger
from mrl.modeling.liger import apply_liger, check_liger

CUDA = torch.device("cuda")
WANTED = TrainingConfig(use_liger_kernel=True)


class FakeLiger:
    """Stands for `_apply_liger_kernel_to_instance` and the table of architectures."""

    def __init__(self, change: Callable[[PreTrainedModel], None] = lambda model: None) -> None:
        self.calls: list[tuple[Any, dict[str, bool]]] = []
        self.change = change

    def __call__(self, model: Any, **kernels: bool) -> None:
        self.calls.append((model, kernels))
        self.change(model)

    def install(self, monkeypatch: pytest.MonkeyPatch, *architectures: str) -> FakeLiger:
        package, transformers = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
        patches = ModuleType("liger_kernel.transformers.monkey_patch")
        package.__spec__ = ModuleSpec("liger_kernel", None)
        transformers._apply_liger_kernel_to_instance = self
        patches.MODEL_TYPE_TO_APPLY_LIGER_FN = dict.fromkeys(architectures)
        for module in (package, transformers, patches):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return self


def test_it_is_refused_without_cuda_before_anything_is_loaded() -> None:
    actor = ActorWorker({"model": "not looked for", "device": "cpu"}, {"use_liger_kernel": True}, total_steps=1)
    with pytest.raises(ConfigError, match=r"use_liger_kernel: .* for CUDA and the model is on cpu; leave it out"):
        actor.initialize()


def test_it_is_refused_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ConfigError, match=r"use_liger_kernel: .*pip install 'mrl\[liger\]'"):
        check_liger(WANTED, ModelConfig(model="not looked for"), CUDA)
    with pytest.raises(ConfigError, match=r"first GPU .* not on cuda:1; set CUDA_VISIBLE_DEVICES to GPU 1 first"):
        check_liger(WANTED, ModelConfig(model="not looked for"), torch.device("cuda:1"))


def test_it_is_refused_for_an_architecture_that_has_none(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type = AutoModelForCausalLM.from_pretrained(tiny_model).config.model_type
    FakeLiger().install(monkeypatch, "another")
    with pytest.raises(ModelError, match=rf"use_liger_kernel: .*\({model_type}\); leave it out.*another"):
        check_liger(WANTED, ModelConfig(model=tiny_model), CUDA)
    FakeLiger().install(monkeypatch, "another", model_type)
    check_liger(WANTED, ModelConfig(model=tiny_model), CUDA)
    check_liger(TrainingConfig(), ModelConfig(model="not looked for"), torch.device("cpu"))


@pytest.mark.parametrize("lora", [False, True])
def test_the_actors_own_model_gets_layer_kernels_and_no_losses(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    fake = FakeLiger().install(monkeypatch)
    monkeypatch.setattr(actor_module, "check_liger", lambda *args: None)  # there is no CUDA
    actor = ActorWorker({"model": tiny_model, "device": "cpu", "use_lora": lora}, {"use_liger_kernel": True}, 1)
    actor.initialize()
    ((model, kernels),) = fake.calls
    assert model is (actor.model.get_base_model() if lora else actor.model)
    assert {name for name, on in kernels.items() if on} == {"rope", "rms_norm", "layer_norm", "swiglu", "geglu"}
    assert {name for name, on in kernels.items() if not on} == {"cross_entropy", "fused_linear_cross_entropy"}


def test_a_model_whose_hidden_states_change_is_refused(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(model: PreTrainedModel) -> None:
        norm = next(module for module in model.modules() if "Norm" in type(module).__name__)
        norm.weight.data *= 0.5

    FakeLiger(half).install(monkeypatch)
    with pytest.raises(ModelError, match=r"use_liger_kernel: .*hidden states differ by"):
        apply_liger(AutoModelForCausalLM.from_pretrained(tiny_model))


def test_what_the_real_package_changes(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers, but not the model's own forward, which is where its fused loss would be; and no tensor."""
    pytest.importorskip("liger_kernel")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    modeling = sys.modules[type(model).__module__]
    for name in list(vars(modeling)):  # Liger exchanges these for the whole process
        if name == "apply_rotary_pos_emb" or name.endswith(("RMSNorm", "MLP")):
            monkeypatch.setattr(modeling, name, getattr(modeling, name))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    monkeypatch.setattr(liger, "_hidden", lambda model: torch.ones(1, 1))  # the kernels do not run here
    apply_liger(model)
    patched = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if "forward" in vars(module)}
    assert {"norm", "input_layernorm", "post_attention_layernorm", "mlp"} <= patched
    assert isinstance(model.forward, MethodType)
    assert "forward" not in vars(model)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in state.items())
