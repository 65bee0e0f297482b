"""Starts training processes quickly: everything heavy is imported once, then each request forks.

Reads one JSON request a line ({"options", "kill"}), answers one JSON line ({"killed", "status", "error"}). No torch
work happens before the fork, so that there are no threads to lose. A child dies by SIGKILL, of its own hand, a moment
after it entered the phase that the request names.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from typing import Any

import peft  # noqa: F401
import torch  # noqa: F401
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

import mrl.actor.worker as actor_module
import mrl.loop.orchestrator  # noqa: F401
import mrl.trainer as trainer_module
from mrl.actor.updates import Updates
from mrl.actor.worker import ActorWorker
from mrl.engines.transformers.engine import TransformersEngine  # noqa: F401
from mrl.trainer import MRLTrainer
from mrl.workers.reward import RewardWorker
from mrl.workers.rollout import RolloutWorker

LONGEST_PHASE_SECONDS = {
    "generate": 0.03,
    "reward": 0.01,
    "optimizer": 0.02,
    "checkpoint": 0.03,
    "database": 0.004,
    "sync": 0.01,
    "any": 0.1,  # wherever the next step or two are by then
}


def reward(completions: list[str], prompts: list[str], **_: Any) -> list[float]:
    """Depends on the completion, and on Python's own generator, whose state a checkpoint has to hold."""
    return [text.count("a") + 0.01 * random.random() for text in completions]


def kill_soon(seconds: float) -> None:
    def die() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


def arm(kill: dict[str, Any]) -> None:
    """Make the child die in the phase `kill["phase"]`, on its call number `kill["call"]`."""
    rng = random.Random(kill["seed"])
    phase = kill["phase"]
    if phase == "start":
        kill_soon(rng.uniform(0.0, 0.4))
        return
    from mrl.store.run import RunStore

    owner, name = {
        "generate": (RolloutWorker, "generate"),
        "reward": (RewardWorker, "score"),
        "optimizer": (Updates, "update"),
        "checkpoint": (actor_module, "write_checkpoint"),
        "database": (RunStore, "write_step"),
        "any": (RunStore, "write_step"),
        "sync": (ActorWorker, "write_weights"),
    }[phase]
    original, calls = getattr(owner, name), [0]

    def wrapped(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == kill["call"]:
            kill_soon(rng.uniform(0.0, LONGEST_PHASE_SECONDS[phase]))
        return original(*arguments, **named)

    async def wrapped_async(*arguments: Any, **named: Any) -> Any:
        return await wrapped(*arguments, **named)

    setattr(owner, name, wrapped_async if phase in ("generate", "reward") else wrapped)


def child(request: dict[str, Any], answer: int) -> None:
    if request["kill"] is not None:
        arm(request["kill"])
    try:
        random.seed(12345)
        result = MRLTrainer(**request["options"], reward_funcs=reward).train()
        outcome = {"status": result.status, "steps": result.steps}
    except BaseException as error:
        outcome = {"error": f"{type(error).__name__}: {error}"}
    os.write(answer, json.dumps(outcome).encode())
    os._exit(0)


def main() -> None:
    trainer_module.write_png = lambda run: None  # a drawing takes as long as a few steps
    for line in sys.stdin:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            child(json.loads(line), write_end)
        os.close(write_end)
        with os.fdopen(read_end) as pipe:
            text = pipe.read()
        _, status = os.waitpid(pid, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        print(json.dumps({"killed": killed, **(json.loads(text) if text else {})}), flush=True)


if __name__ == "__main__":
    main()
