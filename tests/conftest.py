"""Tiny models, made here: no test downloads anything. And which of the long tests are run."""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.sampling import sample, takes_long

if TYPE_CHECKING:
    from torch import Tensor

    from mrl.engines.vllm.engine import VLLMEngine
    from mrl.modeling.token_batch import TokenBatch

# Tiny models are fastest on one thread, and two pools of threads on a busy machine wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


NAMED = ("trackers", "modal", "ray", "openenv", "browser", "vllm")
"""Marks by whose name .ci/run finds the files that have tests with them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        choices=["inline", "processes"],
        default="inline",
        help="where runs have their workers that do not say it: `processes` of their own stand for other machines",
    )
    parser.addoption(
        "--sample", type=int, metavar="N", help="N of the tests (on processes: of the runs), by --sample-key"
    )
    parser.addoption("--sample-key", default="", metavar="COMMIT", help="another one, another choice")


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: some tests wait, for processes that start and for deadlines."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4, cores + 1)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--backend") == "processes":
        from mrl.backends import BACKENDS

        BACKENDS._builtin["inline"] = "tests.process_backend:ProcessBackend"


def pytest_itemcollected(item: pytest.Item) -> None:
    """.ci/run gives pytest the files that name a mark: to import all tests takes each process a quarter of a minute."""
    for mark in item.iter_markers():
        if mark.name in NAMED and not named_in(item.path, mark.name):
            raise pytest.UsageError(f"{item.nodeid} has the mark {mark.name}, and its file does not name it")


@functools.cache
def named_in(file: Path, mark: str) -> bool:
    return re.search(rf"mark\.{mark}\b", file.read_text()) is not None


@pytest.hookimpl(trylast=True)  # after -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    on_processes = config.getoption("--backend") == "processes"
    if on_processes:
        for item in items:
            if (mark := item.get_closest_marker("inline")) is not None:
                item.add_marker(pytest.mark.skip(reason=f"with workers in this process: {mark.args[0]}"))
    number = config.getoption("--sample")
    if number is None:
        return
    quick = [item for item in items if not (takes_long(item) or item.get_closest_marker("skip"))]
    some = [item.nodeid for item in quick if gets_model(item) or not on_processes]
    chosen = sample(some, number, config.getoption("--sample-key"))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def gets_model(item: pytest.Item) -> bool:
    """Whether one of its fixtures, or one that a parameter names, makes a model: no run starts without."""
    parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
    names = [*getattr(item, "fixturenames", ()), *(value for value in parameters if isinstance(value, str))]
    return any(name.endswith("_model") for name in names)


def pytest_collection_finish() -> None:
    """What the tests imported stays; to walk through it takes half a second, in every full garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Names the tests that were chosen, so that they can be run again by name."""
    if config.getoption("--sample") is None:
        return
    terminalreporter.section(f"chosen for {config.getoption('--sample-key')}")
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            terminalreporter.line(f"{report.duration:6.1f} s  {outcome:7}  {report.nodeid}")


@pytest.fixture(autouse=True)
def _no_pictures() -> None:
    """Drawing a run's curve takes as long as a run of a few steps on a tiny model."""
    if trainer := sys.modules.get("mrl.trainer"):  # importing it takes longer than most tests
        trainer.write_png = lambda run: None


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`backend: processes` is there: every worker in a process of its own."""
    from mrl.backends import BACKENDS
    from tests.process_backend import ProcessBackend

    monkeypatch.setitem(BACKENDS._registered, "processes", ProcessBackend)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """This process is connected to a Ray cluster on this machine, which backends then use."""
    import ray

    from mrl.backends.ray import cluster

    os.environ.update(cluster.HEALTH)
    ray.init(address="local", num_cpus=2, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def modal_variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment variables of an account at Modal, or at an emulator of it (tests/modal_account.py)."""
    from tests.modal_account import account

    with account(tmp_path_factory.mktemp("modal")) as variables:
        yield variables


@pytest.fixture
def modal_account(modal_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has an account at Modal. What tests define travels there with its code."""
    import cloudpickle

    import tests

    for name, value in modal_variables.items():
        monkeypatch.setenv(name, value)
    cloudpickle.register_pickle_by_value(tests)
    yield
    cloudpickle.unregister_pickle_by_value(tests)


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at them."""
    from mrl.loop.report import write_png

    monkeypatch.setattr("mrl.trainer.write_png", write_png)


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_model(folder: Path, *, chat: bool = True, tied: bool = True, **changes: object) -> Path:
    """A Qwen2 of about 50,000 random parameters with a byte-level tokenizer, as a Hugging Face folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE if chat else None
    torch.manual_seed(0)
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**(settings | changes)))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random Qwen2 with tied embeddings and a chat template."""
    return str(build_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with a head of its own and no chat template."""
    return str(build_model(tmp_path_factory.mktemp("models") / "untied", tied=False, chat=False))


@pytest.fixture(scope="session")
def experts_model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random Qwen3 with a mixture of experts, which transformers holds in one tensor a layer."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer, folder = AutoTokenizer.from_pretrained(tiny_model), tmp_path_factory.mktemp("models") / "experts"
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def llava_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random LLaVA."""
    from tests.vision_models import build_llava

    return str(build_llava(tmp_path_factory.mktemp("models") / "llava"))


@pytest.fixture(scope="session")
def qwen_vl_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random Qwen2.5-VL."""
    from tests.vision_models import build_qwen

    return str(build_qwen(tmp_path_factory.mktemp("models") / "qwen-vl"))


VLLM_SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
"""vLLM's attention on CPU wants heads of 32."""


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a random Qwen2 that vLLM can run on CPU, with tied embeddings."""
    return str(build_model(tmp_path_factory.mktemp("models") / "for-vllm", **VLLM_SHAPE))


@pytest.fixture(scope="session")
def untied_vllm_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with a head of its own."""
    return str(build_model(tmp_path_factory.mktemp("models") / "for-vllm-untied", tied=False, **VLLM_SHAPE))


@pytest.fixture(scope="session")
def running_vllm(vllm_model: str) -> Iterator[VLLMEngine]:
    """For every test that needs nothing special of it: a start takes longer than most tests. It holds the weights that
    the test before sent, so each sends its own first."""
    yield from _vllm(vllm_model)


@pytest.fixture(scope="session")
def running_vllm_with_adapters(vllm_model: str) -> Iterator[VLLMEngine]:
    """The same, of which `lora_sync: adapter` is possible."""
    yield from _vllm(vllm_model, use_lora=True, lora_r=8)


def _vllm(model: str, **changes: object) -> Iterator[VLLMEngine]:
    from mrl.config import ModelConfig
    from mrl.engines.vllm.engine import VLLMEngine

    config = ModelConfig(model=model, device="cpu", max_model_len=256, **changes)
    engine = VLLMEngine.create(
        config, vllm_args={"block_size": 32}, vllm_kv_cache_gb=0.25, lora_sync="adapter", repeatable_sampling=True
    )
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def token_batch_of() -> Callable[..., TokenBatch]:
    """Makes a TokenBatch from given tensors."""
    import torch

    from mrl.modeling.token_batch import TokenBatch
    from mrl.types import Sample

    def make(
        lengths: list[int],
        mask_BT: Tensor,
        advantages_BT: Tensor,
        sampler_BT: Tensor,
        old_BT: Tensor | None = None,
        ref_BT: Tensor | None = None,
    ) -> TokenBatch:
        rows, width = mask_BT.shape
        ids_BT = torch.zeros(rows, width, dtype=torch.long)
        return TokenBatch(
            samples=[Sample([], [0] * n, [0.0] * n, [1] * n, 0) for n in lengths],
            ids_BL=ids_BT,
            completion_BT=ids_BT,
            mask_BT=mask_BT,
            advantages_BT=advantages_BT,
            sampler_logprobs_BT=sampler_BT,
            temperature=1.0,
            weights_BT=torch.empty_like(mask_BT),
            old_logprobs_BT=old_BT,
            ref_logprobs_BT=ref_BT,
        )

    return make
