"""Memory and time of an actor of several ranks on this machine's processor, against one process.

    python benchmarks/actor_ranks.py --ranks 1 2 4

A random model of 70 million parameters takes three steps. For each number of ranks and each `actor_parallelism` it
prints what rank 0 holds after them, weights, optimizer state and gradients in MiB (gradients are there at the end of a
backward pass), its resident memory in MiB, and the loss of the last step.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

VOCABULARY = 32_000
STEPS, SAMPLES, TOKENS = 3, 8, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--ways", nargs="+", default=["fsdp", "ddp"], help="`actor_parallelism` of several ranks")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model:
        print(json.dumps(one_rank(arguments.model, arguments.way)))
        return
    with tempfile.TemporaryDirectory() as folder:
        build_model(folder, arguments.layers, arguments.hidden)
        print(f"{'':14}{'weights':>9}{'state':>9}{'gradients':>11}{'resident':>10}{'loss':>12}")
        for size in arguments.ranks:
            for way in arguments.ways if size > 1 else ("fsdp",):
                found = run(folder, way, size)
                name = "one process" if size == 1 else f"{way}, {size} ranks"
                print(
                    f"{name:14}{found['weights']:9.0f}{found['state']:9.0f}{found['gradients']:11.0f}"
                    f"{found['resident']:10.0f}{found['loss']:12.6f}",
                    flush=True,
                )


def build_model(folder: str, layers: int, hidden: int) -> None:
    """A random model with a tokenizer of its vocabulary's size."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({"<end>": 0, "<unknown>": 1}, unk_token="<unknown>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unknown>").save_pretrained(folder)


def run(model: str, way: str, size: int) -> dict[str, float]:
    """What rank 0 of so many reports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(size):
        env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).absolute()), "--model", model, "--way", way]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    answers = [process.communicate()[0] for process in processes]
    found: dict[str, float] = json.loads(answers[0].splitlines()[-1])
    return found


def one_rank(model: str, way: str) -> dict[str, float]:
    """Train on this rank, and say what it holds."""
    import psutil
    import torch

    from mrl.actor.worker import ActorWorker
    from mrl.types import Sample, TrainBatch
    from mrl.weights.sharded import local

    warnings.simplefilter("ignore")
    training = {"learning_rate": 1e-4, "actor_parallelism": way, "max_tokens_per_micro_batch": 128}
    actor = ActorWorker({"model": model, "device": "cpu"}, training, total_steps=STEPS)
    actor.initialize()
    rng = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (count,), generator=rng).tolist()

    samples = [Sample(ids(8), ids(TOKENS), [-10.0] * TOKENS, [1] * TOKENS, 0) for _ in range(SAMPLES)]
    batch = TrainBatch(samples, [(-1.0) ** n for n in range(SAMPLES)], SAMPLES, SAMPLES * TOKENS, 1.0)
    metrics = [actor.train_step(batch) for _ in range(STEPS)]
    weights = sum(local(p).nbytes for p in actor.model.parameters())
    state: list[Any] = [value for values in actor.optimizer.state.values() for value in values.values()]
    actor.close()
    return {
        "weights": weights / 2**20,
        "state": sum(local(value).nbytes for value in state) / 2**20,
        "gradients": sum(local(p).nbytes for p in actor.parameters) / 2**20,
        "resident": psutil.Process().memory_info().rss / 2**20,
        "loss": metrics[-1]["train/loss"],
    }


if __name__ == "__main__":
    main()
