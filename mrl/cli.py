"""The command line: `mrl train`, `eval`, `sample`, `runs`, `checkpoints`, `replay`, `doctor`, `cache`.

Results go to stdout (plain data with --json), progress and messages to stderr. What a user can mend ends with one
message and exit code 2.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mrl.errors import ConfigError, MRLError
from mrl.units import duration, plural, size

Command = Callable[[list[str]], int]

EVAL_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "max_samples": None, "max_tokens": 1024}
POLICY_OPTIONS = [
    *("revision", "trust_remote_code", "dtype", "device", "max_model_len", "prompt_format", "system_prompt"),
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "engine", "max_decode_rows"),
    *("vllm_python", "vllm_urls", "vllm_model_name", "tensor_parallel_size", "gpu_memory_utilization"),
    "decode_step",
]
EVAL_OPTIONS = [
    *("dataset_name", "dataset_config", "dataset_split", "prompt_column", "rename", "max_samples"),
    *(
        "reward_funcs",
        "reward_weights",
        "reward_timeout",
        "sandbox",
        "sandbox_options",
        "sandbox_timeout",
        "sandbox_memory_mb",
    ),
    *POLICY_OPTIONS,
]


def main(argv: list[str] | None = None) -> None:
    """Entry point of the `mrl` command. Exits with 0, with 2 for what the user can mend, with 130 after Ctrl-C."""
    # Waiting threads that spin take the cores from whatever else runs, a sandbox for one: on a busy machine a training
    # step then takes ten times as long. Has to be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    arguments = sys.argv[1:] if argv is None else argv
    try:
        sys.exit(_dispatch(arguments))
    except MRLError as error:
        _complain(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        import mrl

        print(f"mrl {mrl.__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean `mrl {close[0]}`?" if close else ""
        raise ConfigError(f"there is no command {name!r}{hint} (commands: {', '.join(COMMANDS)})")
    return COMMANDS[name][0](rest)


# --- train ------------------------------------------------------------------------------------------------------------


def train(argv: list[str]) -> int:
    """Train a model by reinforcement learning."""
    from mrl.flags import argument, flat_options, parse

    given = parse(
        "mrl train",
        "Train a model by reinforcement learning.\n\n"
        "  mrl train quickstart\n"
        "  mrl train recipe.yaml --learning-rate 1e-5\n"
        "  mrl train --model PATH_OR_HUB_ID --dataset tasks.jsonl --reward-funcs my_rewards.py:accuracy\n"
        "  mrl train --resume runs/my-run\n"
        "  mrl train --simple-mode --algorithm sft --dataset answers.jsonl --trl-args packing=true\n\n"
        "Options come from the defaults, then the recipe, then the flags.",
        argv,
        extra={
            "recipe": argument("YAML file of options, or a shipped recipe's name.", positional=True),
            "simple_mode": argument("The same as --mode simple: one of TRL's trainers.", default="off", kind=bool),
            "json": argument("Print the result as JSON.", default="off", kind=bool),
        },
    )
    as_json = given.pop("json", False)
    recipe = given.pop("recipe", None)
    if given.pop("simple_mode", False) and given.setdefault("mode", "simple") != "simple":
        raise ConfigError(f"mode: --simple-mode and --mode {given['mode']} say different things: give only one")

    from mrl.trainer import MRLTrainer, make_config

    config = make_config(flat_options(recipe, given))
    trainer = MRLTrainer(config)
    result = trainer.train()
    if as_json:
        _print_json(asdict(result))
    else:
        _print_run(result, config)
    return 0


def _print_run(result: Any, config: Any) -> None:
    from rich.console import Console
    from rich.markup import escape

    from mrl import report

    console = Console(highlight=False)
    run = result.run_dir
    print(report.draw_terminal(run, width=min(console.width, 90)))
    for pair in report.before_and_after(run):
        console.rule(escape(pair["task_id"]), align="left")
        console.print(escape(pair["prompt"].strip()), style="dim")
        for when in ("before", "after"):
            reward = pair[f"{when}_reward"]
            shown = "not scored" if reward is None else f"reward {reward:g}"
            console.print(f"[bold]{when}[/bold] ({shown})\n{escape(pair[when].strip())}")
    console.rule()
    curve = report.read_curve(run)
    if curve.eval_pass_rates:
        form = ".1%" if curve.what == "reward" else ".4f"
        first, last = (format(value, form) for value in (curve.eval_pass_rates[0], curve.eval_pass_rates[-1]))
        console.print(f"held-out {curve.eval_what} {first} → {last}")
    ended = f"{result.status} after {plural(result.steps, 'step')}, {duration(result.seconds)}"
    if result.warnings:
        console.print(f"[yellow]{ended}, but[/yellow]")
        for warning in result.warnings:
            console.print(f"  {escape(warning)}", soft_wrap=True)
    else:
        console.print(ended)
    console.print(f"Everything is in {run}/", soft_wrap=True, markup=False)
    if curve.steps:
        console.print(f"  {f'{curve.what} curve':14} {run / f'{curve.what}.png'}")
    if result.checkpoint is None or (config.trl.mode == "simple" and config.trl.algorithm == "reward"):
        return
    split = config.data.eval_split or config.data.dataset_split
    console.print("Go on with", style="bold")
    if config.data.dataset_name and curve.what == "reward":
        console.print(f"  mrl eval {run} --dataset {config.data.dataset_name} --split {split}", soft_wrap=True)
    pairs = report.before_and_after(run, 1)
    prompt = pairs[0]["prompt"] if pairs else "your prompt"
    console.print(f"  mrl sample {run} {json.dumps(prompt)}", soft_wrap=True, markup=False)
    console.print(f"  mrl train --model {run} …   # train on from here", soft_wrap=True, markup=False)


# --- eval -------------------------------------------------------------------------------------------------------------


def evaluate(argv: list[str]) -> int:
    """Measure a model: mean reward, pass@1, pass@k, with confidence intervals."""
    from mrl.flags import argument, parse

    given = parse(
        "mrl eval",
        "Measure a model on a set of tasks: mean reward, pass@1 and pass@k (unbiased estimator), each with a\n"
        "confidence interval over tasks.\n\n"
        "  mrl eval starter --dataset tiny-code --split heldout\n"
        "  mrl eval runs/my-run --dataset tasks.jsonl --num-samples 8 --by family",
        argv,
        options=EVAL_OPTIONS,
        extra={
            "model": argument(
                "Hub id, folder, `starter`, or a run (its newest checkpoint).", positional=True, required=True
            ),
            "num_samples": argument("Attempts per task; pass@k is given up to this k.", default="1", kind=int),
            "by": argument("Column to break pass@1 down by."),
            "confidence": argument("Level of the intervals.", default="0.95", kind=float),
            "output": argument("File to write every rollout to, one JSON line each."),
            "json": argument("Print the result as JSON.", default="off", kind=bool),
        },
        defaults=EVAL_DEFAULTS | {"dataset_split": "heldout of tiny-code, all of a local file, test of the Hub"},
    )
    as_json, output = given.pop("json", False), given.pop("output", None)
    count, by, confidence = given.pop("num_samples", 1), given.pop("by", None), given.pop("confidence", 0.95)
    if count < 1:
        raise ConfigError(f"num_samples: {count} is no number of attempts; use 1 or more")
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence: {confidence} is not between 0 and 1, e.g. 0.95")
    given.setdefault("dataset_split", _held_out_split(given.get("dataset_name")))
    config = _policy_config(given)

    from mrl.evaluation import evaluate as run_evaluation
    from mrl.store.run import write_rollouts
    from mrl.trainer import run_to_end

    with _Progress("evaluating") as progress:
        report = run_to_end(
            run_evaluation(config, samples_per_task=count, by=by, confidence=confidence, progress=progress)
        )
    if output:
        write_rollouts(output, report.groups)
    if as_json:
        _print_json({name: value for name, value in asdict(report).items() if name != "groups"})
    else:
        _print_evaluation(report)
    return 0


def _held_out_split(dataset: str | None) -> str:
    """The shipped tasks' `heldout`, all of a local file or folder, the Hub's `test`."""
    if dataset == "tiny-code":
        return "heldout"
    return "train" if dataset and Path(dataset).expanduser().exists() else "test"


def _print_evaluation(report: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report.model} on {report.dataset}", title_justify="left")
    table.add_column("measure")
    table.add_column("mean", justify="right")
    table.add_column(f"{report.confidence:.0%} interval", justify="right")
    rows = {"mean reward": report.mean_reward} | {f"pass@{k}": value for k, value in report.pass_at.items()}
    rows |= {f"  {name} pass@1": value for name, value in report.by.items()}
    for name, value in rows.items():
        table.add_row(name, f"{value.mean:.3f}", "–" if value.low is None else f"{value.low:.3f} – {value.high:.3f}")
    console = Console()
    console.print(table)
    unscored = f", {report.unscored} could not be scored" if report.unscored else ""
    console.print(
        f"{report.tasks} tasks x {report.samples_per_task} attempts{unscored}; "
        f"{report.completion_length:.0f} tokens a completion",
        highlight=False,
    )


# --- sample -----------------------------------------------------------------------------------------------------------


def sample(argv: list[str]) -> int:
    """Print what a model says to a prompt."""
    from mrl.flags import argument, parse

    given = parse(
        "mrl sample",
        'Print completions of one prompt.\n\n  mrl sample starter "Write a function f(a, b) that returns a + b." -n 3',
        argv,
        options=POLICY_OPTIONS,
        extra={
            "model": argument(
                "Hub id, folder, `starter`, or a run (its newest checkpoint).", positional=True, required=True
            ),
            "prompt": argument("The prompt.", positional=True, required=True),
            "num_samples": argument("How many completions.", default="1", kind=int, aliases=["-n"]),
            "json": argument("Print the result as JSON.", default="off", kind=bool),
        },
        defaults=EVAL_DEFAULTS,
    )
    as_json, prompt, count = given.pop("json", False), given.pop("prompt"), given.pop("num_samples", 1)
    if count < 1:
        raise ConfigError(f"num_samples: {count} is no number of completions; use 1 or more")
    config = _policy_config(given)

    from mrl.evaluation import sample as run_sample
    from mrl.trainer import run_to_end

    completions = run_to_end(run_sample(config, prompt, count))
    if as_json:
        _print_json({"model": config.model.model, "prompt": prompt, "completions": completions})
        return 0
    for number, completion in enumerate(completions):
        if number:
            print("─" * 40)
        print(completion["text"])
        if completion["finish_reason"] == "length":
            _say(f"(cut after {completion['tokens']} tokens; --max-tokens sets the limit)")
    return 0


def _policy_config(given: dict[str, Any]) -> Any:
    from mrl.config import OrchestratorConfig

    return OrchestratorConfig.from_flat(**(EVAL_DEFAULTS | given))


# --- doctor and cache -------------------------------------------------------------------------------------------------


def doctor(argv: list[str]) -> int:
    """Say what is installed, and which engines, backends and sandboxes work here."""
    from mrl.flags import argument, parse

    given = parse(
        "mrl doctor",
        "Say what is installed, and try every engine, backend and sandbox: which work here, and why not.\n"
        "Exits with 1 when the default ones do not work.",
        argv,
        options=[],
        extra={"json": argument("Print the report as JSON.", default="off", kind=bool)},
    )
    from mrl.doctor import diagnose, render

    report = diagnose()
    if given.get("json"):
        _print_json(asdict(report))
    else:
        from rich.console import Console

        render(report, Console())
    return 0 if report.ok else 1


def cache(argv: list[str]) -> int:
    """List or clear what mrl and the Hub keep on disk."""
    if not argv or argv[0] in ("-h", "--help"):
        print(
            "usage: mrl cache list [--json]\n       mrl cache clear [--model NAME] [--dry-run] [--json]\n\n"
            "`clear` removes mrl's own cache; with --model, that model of the Hub cache\n"
            "instead. Runs are never touched."
        )
        return 0
    from mrl.flags import argument, parse
    from mrl.hub_cache import clear_cache, list_cache

    action, *rest = argv
    if action not in ("list", "clear"):
        raise ConfigError(f"mrl cache: {action!r} is neither list nor clear")
    extra = {"json": argument("Print the entries as JSON.", default="off", kind=bool)}
    if action == "clear":
        extra |= {
            "model": argument("Remove this model from the Hub cache."),
            "dry_run": argument("Only say what would be removed.", default="off", kind=bool),
        }
    given = parse(f"mrl cache {action}", cache.__doc__ or "", rest, options=[], extra=extra)
    dry_run = given.get("dry_run", False)
    entries = list_cache() if action == "list" else clear_cache(given.get("model"), dry_run=dry_run)
    if given.get("json"):
        _print_json([asdict(entry) for entry in entries])
        return 0
    verb = {"list": "", "clear": "would remove " if dry_run else "removed "}[action]
    for entry in entries:
        print(f"{verb}{entry.kind:8} {size(entry.bytes):>10}  {entry.name}")
    if not entries:
        print("nothing is cached" if action == "list" else "nothing to remove")
    if action == "clear" and not given.get("model"):
        models = [entry for entry in list_cache() if entry.kind == "model"]
        if models:
            left = size(sum(entry.bytes for entry in models))
            _say(f"{plural(len(models), 'model')} of the Hub cache were left ({left}); `mrl cache clear --model NAME`")
    return 0


# --- small things -----------------------------------------------------------------------------------------------------


def _lazily(where: str) -> Command:
    """A command of another module, imported when it is run."""

    def run(argv: list[str]) -> int:
        module, _, name = where.partition(":")
        code: int = getattr(importlib.import_module(module), name)(argv)
        return code

    return run


COMMANDS: dict[str, tuple[Command, str]] = {
    "train": (train, "train a model by reinforcement learning"),
    "eval": (evaluate, "measure a model: mean reward, pass@1, pass@k"),
    "sample": (sample, "print what a model says to a prompt"),
    "runs": (_lazily("mrl.runs_cli:runs"), "list, show, compare, export and delete runs"),
    "checkpoints": (_lazily("mrl.checkpoints_cli:checkpoints"), "list, verify, export or publish a run's checkpoints"),
    "replay": (_lazily("mrl.checkpoints_cli:replay"), "recompute a recorded step and show what differs"),
    "sandbox": (_lazily("mrl.sandbox_cli:sandbox"), "grade a program, or say which isolation works here"),
    "doctor": (doctor, "what is installed, what works here, and why not"),
    "cache": (cache, "list or clear what is kept on disk"),
}


def _overview() -> str:
    commands = "\n".join(f"  {name:12} {text}" for name, (_, text) in COMMANDS.items())
    return (
        "usage: mrl COMMAND [OPTIONS]\n\nPost-train language models by reinforcement learning.\n\n"
        f"{commands}\n\nStart with `mrl train quickstart`. `mrl COMMAND --help` explains a command."
    )


class _Progress:
    """A progress bar on stderr, as a callback."""

    def __init__(self, label: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self.bar = Progress(
            TextColumn(label),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(label, total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        self.bar.start()
        return lambda done, total: self.bar.update(self.task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str, ensure_ascii=False))


def _complain(message: str) -> None:
    print(f"mrl: error: {message}", file=sys.stderr)


def _say(message: str) -> None:
    print(message, file=sys.stderr)


if __name__ == "__main__":
    main()
