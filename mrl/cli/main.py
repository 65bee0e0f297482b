"""The command line: `mrl train`, `plan`, `eval`, `sample`, `runs`, `logs`, `report`, `checkpoints`, `replay` ….

Results go to stdout (plain data with --json), progress and messages to stderr. What a user can mend ends with one
message and exit code 2.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mrl.cli.last_resort import run_command, says_everything
from mrl.errors import ConfigError, MRLError
from mrl.system.shell import command
from mrl.system.units import duration, plural

Command = Callable[[list[str]], int]

TRAIN_BASICS = {
    "task": (
        "What is trained, on what, and what a completion is worth.",
        ("model", "dataset_name", "prompt_column", "reward_funcs", "eval_split"),
    ),
    "training": (
        "How long, how much at once, how fast.",
        (
            *("max_steps", "batch_size", "num_generations", "max_completion_length", "learning_rate"),
            *("loss_type", "beta", "use_lora"),
        ),
    ),
    "machine": ("What it runs on.", ("device", "engine")),
    "record": (
        "What is kept of it, and under which name.",
        ("run_name", "resume", "save_steps", "eval_steps", "report_to"),
    ),
}
"""The twenty options most people use, in the order they need them."""


def main(argv: list[str] | None = None) -> None:
    """Entry point of the `mrl` command. Exits with 0, with 2 for what the user can mend, with 1 for what nobody
    foresaw, with 130, 143 or 129 after Ctrl-C, SIGTERM or SIGHUP."""
    # Between two operations torch's threads wait for the next one. Where they spin for long they take the cores from
    # whatever else runs, a sandbox for one; where they sleep at once, every small operation waits for the kernel and a
    # step takes twice as long. So they spin for less than a millisecond. Has to be set before torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "60000")
    arguments = sys.argv[1:] if argv is None else argv
    run_command(lambda: _dispatch(arguments), arguments)


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
    from mrl.backends.torchrun import take_part

    take_part()
    from mrl.cli.flags import argument, find_recipe, flat_options, parse
    from mrl.config.dialects import in_flags
    from mrl.config.recipe import located

    given = parse(
        "mrl train",
        "Train a model by reinforcement learning: on tasks, scored by a reward function or by test cases.\n\n"
        "  mrl train quickstart                         a shipped recipe: some minutes, nothing to download\n"
        "  mrl train --model PATH_OR_HUB_ID --dataset tasks.jsonl --reward-funcs my_rewards.py:accuracy\n"
        "  mrl train recipe.yaml --learning-rate 1e-5   options from a file; flags override it\n"
        "  mrl train --resume my-run                    go on with a run, from its newest checkpoint\n"
        "  mrl train --simple-mode --algorithm sft --dataset answers.jsonl --trl-args packing=true\n\n"
        "Options come from the defaults, then the recipe, then the flags. Below are the most used ones;\n"
        "`mrl train --help-all` shows every one, docs/ explains them by task.",
        argv,
        extra={
            "recipe": argument(
                "YAML file of options, or a shipped recipe's name.", positional=True, metavar="[RECIPE]"
            ),
            "simple_mode": argument("The same as --mode simple: one of TRL's trainers.", default="off", kind=bool),
            "live": argument(
                "Serve the run's logs page while it trains, at http://127.0.0.1:8000/ or the next free port.",
                default="off",
                kind=bool,
            ),
            "json": argument("Print the result as JSON.", default="off", kind=bool),
        },
        basics=TRAIN_BASICS,
    )
    as_json, live = given.pop("json", False), given.pop("live", False)
    recipe = given.pop("recipe", None)
    if given.pop("simple_mode", False) and given.setdefault("mode", "simple") != "simple":
        raise ConfigError(f"mode: --simple-mode and --mode {given['mode']} say different things: give only one")

    from mrl.loop.resume import resume_hint
    from mrl.system.interrupts import exit_code
    from mrl.trainer import MRLTrainer, make_config

    options: dict[str, Any] = {}

    def in_users_words(message: str) -> str:
        """Flags, but for options that the recipe gives."""
        return in_flags(message, keys=options.keys() - given.keys())

    try:
        with located(find_recipe(recipe) if recipe else None, given):
            options = flat_options(recipe, given)
            config = make_config(options)
            trainer = MRLTrainer(config)
            trainer.wording = in_users_words
            with _live(trainer.run_dir) if live else contextlib.nullcontext():
                result = trainer.train()
    except MRLError as error:
        if not error.worded:
            error.reword(in_users_words(str(error)))
        raise
    stopped = result.signal if result.status == "interrupted" else None
    with contextlib.suppress(OSError) if stopped else contextlib.nullcontext():  # the terminal may be gone
        if as_json:
            _print_json(asdict(result))
        elif stopped and not result.steps:
            print(resume_hint(result.run_dir))
        else:
            _print_run(result, config)
    return exit_code(stopped) if stopped else 0


@contextlib.contextmanager
def _live(run: Path) -> Iterator[None]:
    """The run's logs page, as long as it trains."""
    from mrl.logs.live import live_page

    with live_page(run) as link:
        print(f"logs page: {link}", file=sys.stderr, flush=True)
        yield
    print(f"the logs page ended with the run; see it again with `{command('mrl', 'logs', run)}`", file=sys.stderr)


def _print_run(result: Any, config: Any) -> None:
    from rich.console import Console
    from rich.markup import escape

    from mrl.cli.inherit import eval_command
    from mrl.loop import report
    from mrl.loop.resume import resume_hint
    from mrl.store.find import shortest_name

    console = Console(highlight=False)
    run = result.run_dir
    if says_everything():  # it is drawn with characters that others lack
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
    if result.status == "interrupted":
        print(resume_hint(run))
        return
    if result.checkpoint is None or (config.trl.mode == "simple" and config.trl.algorithm == "reward"):
        return
    name = shortest_name(run)
    console.print("Go on with", style="bold")
    if curve.what == "reward" and (evaluation := eval_command(run)):
        print(f"  {evaluation}")
    pairs = report.before_and_after(run, 1)
    prompt = pairs[0]["prompt"] if pairs else "your prompt"
    print(f"  {command('mrl', 'sample', name, prompt)}")
    print(f"  {command('mrl', 'train', '--model', name)} …   # train on from here")


# --- doctor -----------------------------------------------------------------------------------------------------------


def doctor(argv: list[str]) -> int:
    """Say what is installed, and which engines, backends and sandboxes work here."""
    from mrl.cli.flags import argument, parse

    given = parse(
        "mrl doctor",
        "Say what is installed, and try every engine, backend and sandbox: which work here, and why not.\n"
        "Exits with 1 when the default ones do not work, or took too long to tell.",
        argv,
        options=[],
        extra={"json": argument("Print the report as JSON.", default="off", kind=bool)},
    )
    from mrl.cli.doctor import diagnose, render

    report = diagnose()
    if given.get("json"):
        _print_json(asdict(report))
    else:
        from rich.console import Console

        render(report, Console())
    return 0 if report.ok else 1


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
    "plan": (_lazily("mrl.cli.plan:plan"), "what `mrl train` would start, and what it would cost"),
    "eval": (_lazily("mrl.cli.eval_test:evaluate"), "measure a model: mean reward, pass@k; run an evaluation test"),
    "sample": (_lazily("mrl.cli.eval:sample"), "print what a model says to a prompt"),
    "runs": (_lazily("mrl.cli.runs:runs"), "list, show, compare, export and delete runs"),
    "logs": (_lazily("mrl.cli.logs:logs"), "look at runs in a browser, while they train and afterwards"),
    "report": (_lazily("mrl.cli.logs:report"), "write a run as one HTML file, to send to somebody"),
    "checkpoints": (_lazily("mrl.cli.checkpoints:checkpoints"), "list, verify, export or publish a run's checkpoints"),
    "replay": (_lazily("mrl.cli.checkpoints:replay"), "recompute a recorded step and show what differs"),
    "sandbox": (_lazily("mrl.cli.sandbox:sandbox"), "grade a program, or say which isolation works here"),
    "env": (_lazily("mrl.cli.env:env"), "list the shipped environments, make tasks for them, serve one"),
    "doctor": (doctor, "what is installed, what works here, and why not"),
    "cache": (_lazily("mrl.cli.cache:cache"), "list or clear the models that are kept on disk"),
}


def _overview() -> str:
    commands = "\n".join(f"  {name:12} {text}" for name, (_, text) in COMMANDS.items())
    return (
        "usage: mrl COMMAND [OPTIONS]\n\nPost-train language models by reinforcement learning.\n\n"
        f"{commands}\n\nStart with `mrl train quickstart`. `mrl COMMAND --help` explains a command."
    )


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str, ensure_ascii=not says_everything()))


if __name__ == "__main__":
    main()
