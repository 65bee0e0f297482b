"""`mrl eval` and `mrl sample`: what a model is worth on a set of tasks, and what it says to a prompt."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mrl.cli.flags import Groups, argument, parse
from mrl.cli.inherit import (
    Inherited,
    held_out_split,
    inherit_all,
    inherit_prompts,
    similar_run,
    was_trained_on,
)
from mrl.config.dialects import in_flags
from mrl.errors import ConfigError, DataError, ModelError, MRLError, RewardError
from mrl.evals.run_models import find_run_of
from mrl.system.units import plural

DEFAULTS = {"max_tokens": 1024}
PROMPTS = ("prompt_format", "system_prompt", "chat_template_kwargs", "max_tokens", "stop", "max_model_len")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed")
MACHINE = (
    *("device", "dtype", "engine", "max_decode_rows", "decode_step", "revision", "trust_remote_code"),
    *("vllm_python", "vllm_urls", "vllm_model_name", "tensor_parallel_size", "gpu_memory_utilization"),
)
TASKS = ("dataset_name", "dataset_config", "dataset_split", "prompt_column", "rename", "max_samples")
SCORE = (
    *("reward_funcs", "reward_weights", "reward_timeout", "reward_trial"),
    *("sandbox", "sandbox_options", "sandbox_timeout", "sandbox_memory_mb"),
)
ROLLOUT = (
    *("environment_factory", "tools", "rollout_func", "rollout_source", "rollout_options", "serve", "serve_token_env"),
    *("max_turns", "max_rollout_tokens", "step_timeout", "rollout_timeout"),
)
_PROMPTS = ("How the model is prompted, and where a completion ends: of a run, as it did there.", PROMPTS)
_SAMPLING = ("The distribution completions are drawn from. Not taken over from a run.", SAMPLING)
EVAL_GROUPS: Groups = {
    "task": ("What the model attempts. Of a run: its held-out tasks.", TASKS),
    "score": ("What a completion is worth, and where untrusted code runs. Of a run: its own reward.", SCORE),
    "rollout": ("How a task is attempted, where that takes several turns, and within which limits.", ROLLOUT),
    "prompt": _PROMPTS,
    "sampling": _SAMPLING,
    "machine": (
        "What generates, and how the model is loaded. Of a run: its dtype, and vLLM where that is here.",
        MACHINE,
    ),
}
SAMPLE_GROUPS: Groups = {
    "prompt": _PROMPTS,
    "sampling": _SAMPLING,
    "machine": ("What generates, and how the model is loaded. Of a run: its dtype.", MACHINE),
}
HELP = {
    "dataset_split": "Split to take the tasks from.",
    "max_tokens": "A completion is cut after so many tokens.",
    "temperature": "Logits are divided by it; 0 = always the likeliest token.",
    "dtype": "Precision of the forward pass; `auto` = bfloat16 on GPUs that have it, float32 elsewhere.",
    "engine": "What generates: `transformers`, `vllm` (in a process of its own) or `vllm-remote` (servers that run "
    "already, with the weights they have); see docs/vllm.md.",
    "reward_funcs": "One or several of: `sandbox` (run the tests: 0 or 1), `sandbox_partial` (fraction passed), "
    "`math_verify` (equal to the column `answer`), `reasoning_gym` (its tasks' verifier), `file.py:function`, "
    "`package.module:function`, a sequence classifier by its Hub id or folder, a YAML file with `judge: {…}` "
    "(docs/judges.md). None = the dataset's own where it has one, else `sandbox`.",
    "max_samples": "Only the first tasks; 0 or None = all.",
    "max_decode_rows": "Completions that are decoded at once; the others wait until one ends. None = as many as the "
    "machine's memory is good for. It changes no completion, only memory and speed.",
    "vllm_urls": "Running `vllm serve` servers for engine `vllm-remote`, e.g. `http://gpu-box:8000`; the first counts.",
    "seed": "Completions derive from it, and the tasks of datasets that draw theirs.",
}
MODEL = argument(
    "`starter`, a Hub id, a model's folder, or a run by name or folder: RUN is its newest checkpoint, RUN@best its "
    "best, RUN@40 that of step 40.",
    positional=True,
    required=True,
    metavar="MODEL",
)
JSON = argument("Print the result as JSON.", default="off", kind=bool)


# --- eval -------------------------------------------------------------------------------------------------------------


def evaluate(argv: list[str]) -> int:
    """Measure a model: mean reward, pass@1, pass@k, with confidence intervals; or run an evaluation test."""
    given = parse(
        "mrl eval",
        "Measure a model on a set of tasks: mean reward, pass@1 and pass@k (unbiased estimator), each with a\n"
        "confidence interval over tasks.\n\n"
        "  mrl eval my-run                            a run, on its held-out tasks, with its own reward and limits\n"
        "  mrl eval my-run@best --num-samples 8       its best checkpoint, with pass@1, 2, 4 and 8\n"
        "  mrl eval my-run --dataset others.jsonl     on other tasks\n"
        "  mrl eval starter --dataset tiny-code --by family\n"
        "  mrl eval PATH_OR_HUB_ID --dataset tasks.jsonl --reward-funcs my_rewards.py:accuracy\n"
        "  mrl eval my_eval.py --model my-run         an evaluation test (`mrl eval my_eval.py --help`)\n\n"
        "What is taken over from a run is said in one line, and every flag overrides it.",
        argv,
        options=EVAL_GROUPS,
        extra={
            "model": MODEL,
            "num_samples": argument("Attempts per task; pass@k is given up to this k.", default="1", kind=int),
            "by": argument("Column to break pass@1 down by."),
            "confidence": argument("Level of the intervals.", default="0.95", kind=float),
            "output": argument("File to write every rollout to, one JSON line each."),
            "record": argument("Write a folder with the rollouts below the runs'.", default="on", kind=bool),
            "json": JSON,
        },
        defaults=DEFAULTS
        | {"dataset_split": "held-out tasks of a run, heldout of tiny-code, all of a local file, test of the Hub"},
        helps=HELP,
    )
    as_json, output, record = given.pop("json", False), given.pop("output", None), given.pop("record", True)
    count, by, confidence = given.pop("num_samples", 1), given.pop("by", None), given.pop("confidence", 0.95)
    if count < 1:
        raise ConfigError(f"--num-samples: {count} is no number of attempts; use 1 or more")
    if not 0 < confidence < 1:
        raise ConfigError(f"--confidence: {confidence} is not between 0 and 1, e.g. 0.95")
    if output:
        _check_output(Path(output).expanduser())
    model = given.pop("model")
    found = find_run_of(model)
    inherited = inherit_all(*found, given) if found else None
    options = (inherited.options if inherited else {}) | given
    if options.get("dataset_name") is None:
        example = "tiny-code" if model == "starter" else "tasks.jsonl"
        raise ConfigError(f"no dataset: say what to measure {model} on, e.g. --dataset {example}{_no_run(model)}")
    options.setdefault("dataset_split", held_out_split(options["dataset_name"]))
    config = _config(model, options, inherited)
    if inherited and was_trained_on(inherited.run, options):
        say_note(f"these are the tasks that {inherited.run.name} was trained on, not held-out ones")

    from mrl.evals.evaluation import evaluate as run_evaluation
    from mrl.store.run import write_rollouts
    from mrl.trainer import run_to_end

    with _explained(model, inherited), Progress("evaluating") as progress:
        report = run_to_end(
            run_evaluation(
                config, samples_per_task=count, by=by, confidence=confidence, progress=progress, note=say_note
            )
        )
    report = replace(report, model=model)
    if output:
        write_rollouts(output, report.groups)
    folder = _record(report, config, inherited) if record else None
    if as_json:
        plain = {name: value for name, value in asdict(report).items() if name != "groups"}
        recorded = {"recorded": None if folder is None else str(folder)}
        print_json(plain | recorded | _effective(config, EVAL_GROUPS, inherited))
    else:
        _print_evaluation(report, by)
        if folder is not None:
            print(f"Everything is in {folder}/")
    return 0


def _record(report: Any, config: Any, inherited: Inherited | None) -> Path | None:
    """Below the runs'. What was measured is worth more than its record: that it cannot be written is only said."""
    from mrl.experience.metrics import rollout_metrics
    from mrl.store.evaluation import write_evaluation

    model = report.model if inherited is None else f"{inherited.run.name}@{inherited.checkpoint.step}"
    metrics = rollout_metrics(report.groups, config, "eval") | report.logged
    try:
        return write_evaluation(config, metrics, report.groups, of=report.dataset, model=model)
    except MRLError as error:
        say_note(f"the evaluation is not recorded: {error}")
        return None


def _check_output(path: Path) -> None:
    """Before hours of evaluation, not after them."""
    if not path.parent.is_dir():
        raise ConfigError(f"--output: there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(f"--output: {path} is a folder; name a file, e.g. {path / 'rollouts.jsonl'}")


def _print_evaluation(report: Any, by: str | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"{report.model} on {report.dataset}"), title_justify="left")
    table.add_column("measure")
    table.add_column("mean", justify="right")
    table.add_column(f"{report.confidence * 100:g}% interval", justify="right")
    rows = {"mean reward": report.mean_reward} | {f"pass@{k}": value for k, value in report.pass_at.items()}
    rows |= {f"  {by}={name} pass@1": value for name, value in report.by.items()}
    for name, value in rows.items():
        interval = "–" if value.low is None else f"{value.low:.3f} – {value.high:.3f}"
        table.add_row(Text(name), f"{value.mean:.3f}", interval)
    console = Console(highlight=False)
    console.print(table)
    tasks = plural(report.tasks, "task") if report.taken == str(report.tasks) else f"{report.taken} tasks"
    print(f"{tasks} x {plural(report.samples_per_task, 'attempt')}; {report.completion_length:.0f} tokens a completion")
    if report.logged:
        print(", ".join(f"{name.removeprefix('eval/')} {value:g}" for name, value in report.logged.items()))
    if report.unscored:
        attempts = report.tasks * report.samples_per_task
        whole = f", {plural(report.unscored_tasks, 'task')} not at all" if report.unscored_tasks else ""
        print(
            f"{report.unscored} of {attempts} attempts could not be scored{whole}. The means leave them out; the "
            "intervals, but for rewards outside [0, 1], reach from all of them failing to all of them passing.\n"
            f"The first says: {report.unscored_because}"
        )


# --- sample -----------------------------------------------------------------------------------------------------------


def sample(argv: list[str]) -> int:
    """Print what a model says to a prompt."""
    given = parse(
        "mrl sample",
        "Print completions of one prompt.\n\n"
        '  mrl sample starter "Write a function f(a, b) that returns a + b." -n 3\n'
        '  mrl sample my-run@best "…"                 prompted as in the run, with the same limits\n'
        '  mrl sample my-run "…" --temperature 0      the likeliest completion',
        argv,
        options=SAMPLE_GROUPS,
        extra={
            "model": MODEL,
            "prompt": argument("The prompt.", positional=True, required=True, metavar="PROMPT"),
            "num_samples": argument("How many completions.", default="1", kind=int, aliases=["-n"]),
            "json": JSON,
        },
        defaults=DEFAULTS,
        helps=HELP,
    )
    as_json, prompt, count = given.pop("json", False), given.pop("prompt"), given.pop("num_samples", 1)
    if count < 1:
        raise ConfigError(f"--num-samples: {count} is no number of completions; use 1 or more")
    model = given.pop("model")
    found = find_run_of(model)
    inherited = inherit_prompts(*found, given) if found else None
    config = _config(model, (inherited.options if inherited else {}) | given, inherited)

    from mrl.evals.evaluation import sample as run_sample
    from mrl.trainer import run_to_end

    with _explained(model, inherited):
        completions = run_to_end(run_sample(config, prompt, count))
    if as_json:
        print_json(
            {"model": model, "prompt": prompt, "completions": completions}
            | _effective(config, SAMPLE_GROUPS, inherited)
        )
        return 0
    for number, completion in enumerate(completions):
        if number:
            print("─" * 40)
        print(completion["text"])
        if completion["finish_reason"] == "length":
            _say(f"(cut after {completion['tokens']} tokens; --max-tokens sets the limit)")
    return 0


# --- what both do -----------------------------------------------------------------------------------------------------


def _config(model: str, options: dict[str, Any], inherited: Inherited | None) -> Any:
    """The effective configuration; says what came from a run, whose checkpoint is taken by its folder from here on."""
    from mrl.config import OrchestratorConfig

    if inherited:
        _say(inherited.said(DEFAULTS))
        for note in inherited.notes:
            say_note(note)
    source = str(inherited.checkpoint.path) if inherited else model
    return OrchestratorConfig.from_flat(**(DEFAULTS | options | {"model": source}))


def _effective(config: Any, groups: Groups, inherited: Inherited | None) -> dict[str, Any]:
    """For --json: every option as it was used, and which of them came from where."""
    plain = {name: value for section in config.to_dict().values() for name, value in section.items()}
    options = {name: plain[name] for name in ("model", *(name for _, names in groups.values() for name in names))}
    if inherited is None:
        return {"options": options}
    return {"options": options, "run": str(inherited.run), "inherited": list(inherited.options)}


@contextmanager
def _explained(model: str, inherited: Inherited | None) -> Iterator[None]:
    """Adds to an error what only the command knows."""
    try:
        yield
    except (DataError, RewardError) as error:
        if inherited is None:
            raise type(error)(f"{error}{_no_run(model)}") from None
        if missing := inherited.missing_files():
            raise type(error)(
                f"{error}. The run was started in another folder, as it seems, with {missing[0]}: go there, or say "
                "with --dataset and --reward-funcs where they are"
            ) from None
        taken = [name for name in ("prompt_column", "rename") if inherited.options.get(name)]
        if not taken or "column" not in str(error):
            raise
        raise DataError(
            f"{error}. The run's own {' and '.join(taken)} are used; for other columns give --prompt-column and "
            "--rename (`--prompt-column prompt --rename` = as the dataset has them)"
        ) from None
    except ModelError as error:
        hint = "" if inherited else _no_run(model)
        raise ModelError(f"{error}{hint}") from None


def _no_run(model: str) -> str:
    close = similar_run(model)
    return f"; did you mean the run {close!r}?" if close else ""


class Progress:
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


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str, ensure_ascii=False))


def say_note(message: str) -> None:
    """What was written for recipes, in flags."""
    _say(f"note: {in_flags(message)}")


def _say(message: str) -> None:
    print(message, file=sys.stderr)
