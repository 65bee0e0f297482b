"""Entry points of `modal run`:

    modal run mrl/train.py::main --model Qwen/Qwen3-0.6B --dataset tasks.jsonl --max-steps 5 \\
        --actor-gpu A100 --rollout-gpu A10G --num-rollout-workers 2

`main` takes every flag of `mrl train`; `modal run --detach` lets the run go on when this machine leaves. The others try
one part (`test_rollout_fn`, `test_reward_fn`) or look after the Volume (`list_checkpoints_fn`, `clear_cache`).
"""

# ruff: noqa: PT028
# Modal reads the types of entry points, so annotations are not put off here.

import json
import sys

from mrl.app import app, volume
from mrl.backends.modal.storage import CHECKPOINTS, DATA, HUB, step_of


@app.local_entrypoint()
def main(*arguments: str) -> None:
    """Train, with the flags of `mrl train`."""
    _mrl("train", *_at_modal(arguments))


@app.local_entrypoint()
def test_rollout_fn(
    model: str, prompt: str = "Hello", gpu: str = "A10", engine: str = "transformers", tokens: int = 32
) -> None:
    """Start one rollout worker, and print what the model says."""
    import asyncio

    from mrl.config import OrchestratorConfig
    from mrl.evals.evaluation import sample

    config = OrchestratorConfig.from_flat(
        model=model, backend="modal", engine=engine, rollout_gpu=gpu, max_completion_length=tokens
    )
    print(json.dumps(asyncio.run(sample(config, prompt, 1))[0]))


@app.local_entrypoint()
def test_reward_fn(completion: str = "def f(x): return 2 * x", test: str = "assert f(2) == 4") -> None:
    """Judge a program in a Sandbox, and print the verdict."""
    import asyncio
    from dataclasses import asdict

    from mrl.sandbox import Program, make_factory

    async def judge() -> None:
        sandbox = make_factory("modal", {"machines": 1})()
        try:
            verdicts = await sandbox.run([Program(completion, (test,))])
        finally:
            await sandbox.close()
        print(json.dumps(asdict(verdicts[0]), default=str))

    asyncio.run(judge())


@app.local_entrypoint()
def list_checkpoints_fn() -> None:
    """Print the runs on the Volume and their checkpoints."""
    for run in _listing(f"/{CHECKPOINTS}"):
        steps = sorted(step for path in _listing(f"{run}/checkpoints") if (step := step_of(path)) is not None)
        name = run.rpartition("/")[2]
        print(f"{name}: " + (f"steps {', '.join(map(str, steps))}" if steps else "no checkpoint yet"))


@app.local_entrypoint()
def clear_cache() -> None:
    """Remove from the Volume the cache of models, and the files that runs were given. Runs are not touched."""
    for folder in (HUB, DATA):
        entries = _listing(f"/{folder}")
        for path in entries:
            volume.remove_file(path, recursive=True)
        print(f"{folder}: {len(entries)} removed")


def _at_modal(arguments: tuple[str, ...]) -> list[str]:
    given = list(arguments)
    return given if any(one.partition("=")[0] == "--backend" for one in given) else [*given, "--backend", "modal"]


def _mrl(*arguments: str) -> None:
    """As the command `mrl`, but that success does not exit: Modal has to end the app."""
    from mrl.cli.main import main as command

    try:
        command(list(arguments))
    except SystemExit as end:
        if end.code:
            sys.stdout.flush()
            raise


def _listing(folder: str) -> list[str]:
    import modal

    try:
        return [f"/{entry.path.lstrip('/')}" for entry in volume.listdir(folder)]
    except (modal.exception.NotFoundError, FileNotFoundError):
        return []
