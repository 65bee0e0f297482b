"""A training step side by side with TRL's `GRPOTrainer`: time, tokens per second, memory.

    python benchmarks/vs_trl.py              # a 1 M-parameter model, and one with 151,936 words: half an hour
    python benchmarks/vs_trl.py --quick      # the small model only, minutes

8 prompts × 8 generations on random weights, everything on the CPU in float32: (a) completions end by themselves, with a
long tail of lengths, (b) all have the same length. Both sides do the same work: the same model, prompts, reward, loss,
learning rate, temperature and limits. TRL generates with transformers, in the same process, as mrl does; its default
is activation checkpointing, so it is shown with and without. Each variant runs in a process of its own. A step's time
is that between two calls of the reward function, which both call once a step.

The sides take turns, `--rounds` times, since machines grow slower and faster within minutes; a ratio is the median of
those of single rounds, and its range is shown. "processor" is the processor time of a step, which neighbours on the
machine change less than its time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

PROMPTS, GENERATIONS, PROMPT_TOKENS = 8, 8, 32
LAYERS = {"intermediate_size": 512, "num_hidden_layers": 4, "num_key_value_heads": 2}
MODELS = {
    "1 M": {"vocab_size": 1024, "hidden_size": 128, "num_attention_heads": 4, **LAYERS},
    "30 M": {"vocab_size": 151_936, "hidden_size": 192, "num_attention_heads": 6, **LAYERS},
}
LIMITS = {"1 M": 128, "30 M": 64}
"""Longest completion. A fifth of it is the mean where completions end by themselves."""
SIDES = {"mrl": {}, "TRL": {"gradient_checkpointing": True}, "TRL, no checkpointing": {"gradient_checkpointing": False}}
LENGTHS = {"tail": "(a) long tail", "fixed": "(b) fixed"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small model only")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--steps", type=int, help="steps measured (default: 20 of the small model, 3 of the large)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side runs, by turns")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each side")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(json.loads(options.child))
        return
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("trl", "transformers", "torch"))
    work = f"{PROMPTS} prompts × {GENERATIONS} generations, {options.rounds} rounds"
    print(f"{processor()}; {versions}; {options.threads} CPU threads, float32; {work}\n")
    print(
        "| model | lengths | side | step, s | processor, s | tokens/s | peak memory, GB | tokens/s against TRL's best "
        "| memory |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="mrl-vs-trl-") as folder:
        for model in ["1 M"] if options.quick else options.models:
            for lengths in options.lengths:
                compare(Path(folder), model, lengths, options)


def compare(folder: Path, model: str, lengths: str, options: argparse.Namespace) -> None:
    """Measure every side and print its row."""
    path = folder / f"{model}-{lengths}".replace(" ", "")
    build_model(path, model, lengths)
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(options.rounds):
        sides = options.sides if number % 2 == 0 else options.sides[::-1]
        rounds.append({})
        for side in sides:
            spec = {
                "side": side,
                "path": str(path),
                "out": str(folder / "run"),
                "limit": LIMITS[model],
                "steps": options.steps or (20 if model == "1 M" else 3),
            }
            rounds[-1][side] = measure(spec, options.threads)
    for side in options.sides:
        middle = {name: statistics.median(found[side][name] for found in rounds) for name in rounds[0][side]}
        speed = memory = ""
        if side == "mrl" and len(options.sides) > 1:
            speeds = [found[side]["rate"] / max(peer["rate"] for peer in peers(found)) for found in rounds]
            speed = f"{statistics.median(speeds):.2f}× ({min(speeds):.2f}–{max(speeds):.2f})"
            ratio = statistics.median(f[side]["memory"] / min(p["memory"] for p in peers(f)) for f in rounds)
            memory = f"{ratio:.2f}×"
        print(
            f"| {model} | {LENGTHS[lengths]} | {side} | {middle['step']:.3f} | {middle['processor']:.3f} "
            f"| {middle['rate']:.0f} | {middle['memory']:.2f} | {speed} | {memory} |",
            flush=True,
        )


def peers(found: dict[str, dict[str, float]]) -> list[dict[str, float]]:
    """The sides that are not mrl's."""
    return [row for side, row in found.items() if side != "mrl"]


def processor() -> str:
    """Its name, as far as the system tells."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def measure(spec: dict[str, Any], threads: int) -> dict[str, float]:
    """Run one side in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, "--child", json.dumps(spec)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{spec['side']} failed:\n{done.stderr[-3000:]}")
    calls = json.loads(done.stdout.splitlines()[-1])
    calls = calls[1:]  # the first step's time is that of warming up
    seconds = [later["time"] - earlier["time"] for earlier, later in pairwise(calls)]
    tokens = [(later["tokens"] + earlier["tokens"]) / 2 for earlier, later in pairwise(calls)]
    return {
        "step": statistics.median(seconds),
        "processor": statistics.median(later["processor"] - earlier["processor"] for earlier, later in pairwise(calls)),
        "rate": statistics.median(t / s for t, s in zip(tokens, seconds, strict=True)),
        "memory": calls[-1]["memory"],
    }


# --- in the child process ---------------------------------------------------------------------------------------------


class Reward:
    """Something that differs within a group; and the clock, once a step."""

    def __init__(self) -> None:
        self.calls: list[dict[str, float]] = []

    def __call__(self, completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.calls.append(
            {
                "time": time.perf_counter(),
                "processor": time.process_time(),
                "tokens": sum(map(len, completion_ids)),
                "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
            }
        )
        return [sum(ids) % 97 / 97 for ids in completion_ids]

    __name__ = "reward"


def run_child(spec: dict[str, Any]) -> None:
    """Train, and print when the reward function was called and with how many tokens."""
    reward = Reward()
    steps = spec["steps"] + 2
    words = [f"w{i}" for i in range(100, 900)]
    prompts = [" ".join(words[(37 * row + 11 * i) % 800] for i in range(PROMPT_TOKENS)) for row in range(64)]
    if spec["side"] == "mrl":
        train_mrl(spec, reward, prompts, steps)
    else:
        sizes = {"per_device_train_batch_size": PROMPTS * GENERATIONS, "num_generations": GENERATIONS}
        sizes |= {"max_steps": steps, "max_completion_length": spec["limit"]}
        where = f"{spec['out']}-{os.getpid()}"
        train_trl(spec["path"], where, reward, prompts, use_cpu=True, bf16=False, **sizes, **SIDES[spec["side"]])
    print(json.dumps(reward.calls))


def train_mrl(spec: dict[str, Any], reward: Reward, prompts: list[str], steps: int) -> None:
    from mrl import MRLTrainer

    MRLTrainer(
        model=spec["path"],
        train_dataset=[{"prompt": prompt} for prompt in prompts],
        reward_funcs=reward,
        max_steps=steps,
        batch_size=PROMPTS,
        num_generations=GENERATIONS,
        max_completion_length=spec["limit"],
        learning_rate=1e-6,
        loss_type="dapo",
        temperature=1.0,
        top_p=1.0,
        device="cpu",
        num_rollout_workers=1,
        weight_sync_method="direct",
        run_dir=f"{spec['out']}-{os.getpid()}",
        report_to=[],
    ).train()


def train_trl(path: str, where: str, reward: Any, prompts: list[str], **options: Any) -> None:
    """TRL's trainer, set to do what mrl does in `train_mrl`. options: of `GRPOConfig`, sizes and device."""
    import contextlib

    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=where,
        learning_rate=1e-6,
        loss_type="dapo",
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    dataset = Dataset.from_list([{"prompt": prompt} for prompt in prompts])
    with contextlib.redirect_stdout(sys.stderr):
        GRPOTrainer(model=path, reward_funcs=reward, args=config, train_dataset=dataset).train()


# --- models ---------------------------------------------------------------------------------------------


def build_model(path: Path, name: str, lengths: str) -> None:
    """Random weights. The end token is as likely as the wanted lengths need."""
    import torch

    model = word_model(path, **MODELS[name])
    embedding = model.get_input_embeddings().weight.data
    embedding[:, 0] = 1.0  # so that the first number of every hidden state is large, and the end as likely everywhere
    probe = torch.randint(3, len(embedding), (4, 64))
    low, high = -20.0, 20.0
    wanted = 5 / LIMITS[name] if lengths == "tail" else 1e-7
    for _ in range(20):
        embedding[0, 0] = middle = (low + high) / 2
        with torch.no_grad():
            rate = torch.softmax(model(probe).logits, -1)[..., 0].mean().item()
        low, high = (low, middle) if rate > wanted else (middle, high)
    model.save_pretrained(path)


def word_model(path: Path, **shape: Any) -> Any:
    """A Llama of random weights with one word per id, whose tokenizer is saved at `path`. shape: of `LlamaConfig`."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {"<end>": 0, "<pad>": 1, "<unknown>": 2} | {f"w{i}": i for i in range(3, shape["vocab_size"])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<pad>").save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    main()
