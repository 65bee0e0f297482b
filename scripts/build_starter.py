"""Rebuilds the starter kit: the tasks, the tokenizer and the policy under `mrl/starter/`.

What it does, in order:

1. draws the tasks of both splits (`mrl/starter/generate.py`): no function is in both, checked by behaviour on a probe
   grid;
2. draws more functions of the same families and the mistakes that a careless programmer makes in them (`corpus.py`).
   Some of them are training tasks; none behaves like a held-out task, mistaken programs included;
3. trains a byte-level BPE on their text, and a Llama of 0.8 million parameters to imitate those demonstrations, most of
   which are wrong on purpose. So the policy before reinforcement learning is sloppy, not ignorant: what reinforcement
   learning adds is mostly to prefer the right program among those that the policy can already write;
4. measures the policy on the held-out split, at temperature 1 and at its best guess, by family.

The same seed gives the same tasks and tokenizer everywhere, and the same weights on the same kind of machine with the
same versions of torch and transformers.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging

import mrl.starter
from mrl.sandbox.base import Limits, Program
from mrl.sandbox.process import ProcessSandbox
from mrl.starter.corpus import Lesson, answer, lessons
from mrl.starter.generate import Task, TaskSet, generate_tasks, write_jsonl
from mrl.starter.supervised import Schedule, new_policy, train
from mrl.starter.tokenizer import save_tokenizer, train_tokenizer

console = Console()


@dataclass(frozen=True)
class Settings:
    out: Path = mrl.starter.STARTER_DIR.parent
    """Folder that gets `policy/` and `tasks/`; both are replaced."""
    seed: int = 0
    steps: int = Schedule.steps
    """Optimizer steps of the supervised phase."""
    lessons: int = 12000
    """Functions demonstrated."""
    vocabulary: int = 640
    """Tokens, the 256 bytes and 3 special ones among them."""
    threads: int = 2
    samples: int = 4
    """Completions per held-out task when the policy is measured."""


def main(settings: Settings) -> None:
    started = time.perf_counter()
    logging.disable_progress_bar()
    torch.set_num_threads(settings.threads)
    tasks = build_tasks(settings)
    policy = settings.out / "policy"
    build_policy(settings, tasks, policy)
    print_sizes(policy, settings.out / "tasks")
    print_pass_rates(policy, tasks.heldout, settings)
    console.print(f"built in {time.perf_counter() - started:.0f} s")


def build_tasks(settings: Settings) -> TaskSet:
    tasks = generate_tasks(settings.seed)
    folder = settings.out / "tasks"
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(tasks.train, folder / "train.jsonl")
    write_jsonl(tasks.heldout, folder / "heldout.jsonl")
    console.print(f"tasks: {len(tasks.train)} train, {len(tasks.heldout)} held-out")
    return tasks


def build_policy(settings: Settings, tasks: TaskSet, folder: Path) -> None:
    with Progress(console=console) as progress:
        bar = progress.add_task("demonstrations", total=settings.lessons)
        course: list[Lesson] = []
        for lesson in lessons(settings.lessons, tasks, settings.seed):
            course.append(lesson)
            progress.advance(bar)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        tokenizer = build_tokenizer(course, settings, folder)
        model = new_policy(tokenizer, settings.seed)
        started = time.perf_counter()
        bar = progress.add_task("supervised phase", total=settings.steps)

        def report(step: int, loss: float) -> None:
            progress.update(bar, advance=1, description=f"supervised phase, loss {loss:.3f}")
            if (step + 1) % 100 == 0:
                # The bar shows nothing where the output is a file.
                progress.console.print(f"step {step + 1}: loss {loss:.3f}, {time.perf_counter() - started:.0f} s")

        train(model, tokenizer, course, Schedule(steps=settings.steps), settings.seed, report)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    model.save_pretrained(folder)


def build_tokenizer(course: list[Lesson], settings: Settings, folder: Path) -> PreTrainedTokenizerBase:
    texts = [f"user\n{lesson.prompt}assistant\n{answer(lesson.right)}" for lesson in course]
    # The byte alphabet and the special tokens count; 2048 is the policy's longest sequence.
    save_tokenizer(train_tokenizer(texts, settings.vocabulary), folder, max_length=2048)
    return AutoTokenizer.from_pretrained(folder)


def print_sizes(*folders: Path) -> None:
    for folder in folders:
        for path in sorted(folder.iterdir()):
            console.print(f"{path.stat().st_size:>10,}  {folder.name}/{path.name}", highlight=False)


def print_pass_rates(policy: Path, heldout: list[Task], settings: Settings) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    torch.manual_seed(settings.seed)
    sampled = grade(sample(model, tokenizer, heldout, settings.samples, do_sample=True), heldout)
    greedy = grade(sample(model, tokenizer, heldout, 1, do_sample=False), heldout)
    table = Table(
        "family", "temperature 1", "best guess", title="held-out tasks passed before reinforcement learning, %"
    )
    for family in [*dict.fromkeys(task.family for task in heldout), "all"]:
        members = [i for i, task in enumerate(heldout) if family in (task.family, "all")]
        cells = [sum(sum(rows[i]) for i in members) / sum(len(rows[i]) for i in members) for rows in (sampled, greedy)]
        table.add_row(family, *(f"{100 * cell:.1f}" for cell in cells))
    console.print(table)


def sample(model, tokenizer, tasks: list[Task], count: int, do_sample: bool) -> list[list[str]]:
    """`count` completions for each task."""
    completions: list[list[str]] = []
    for start in range(0, len(tasks), 64):
        chats = [[{"role": "user", "content": task.prompt}] for task in tasks[start : start + 64]]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**inputs, max_new_tokens=96, do_sample=do_sample, num_return_sequences=count, top_k=None)
        texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        completions += [texts[i : i + count] for i in range(0, len(texts), count)]
    return completions


def grade(completions: list[list[str]], tasks: list[Task]) -> list[list[bool]]:
    """For each task and completion, whether the program passes every test case."""
    limits = Limits(wall_seconds=5, cpu_seconds=5)
    programs = [
        Program(text.removeprefix("```python\n").removesuffix("```"), tuple(task.testcases), limits)
        for task, texts in zip(tasks, completions, strict=True)
        for text in texts
    ]
    verdicts = iter(asyncio.run(run_programs(programs)))
    return [[next(verdicts).status == "passed" for _ in texts] for texts in completions]


async def run_programs(programs: list[Program]):
    sandbox = ProcessSandbox()
    try:
        return await sandbox.run(programs)
    finally:
        await sandbox.close()


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
