"""`mrl eval my_eval.py --model …`: an evaluation test without pytest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mrl.cli.flags import Groups, argument, parse
from mrl.errors import ConfigError

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "seed")
LIMITS = ("max_turns", "max_rollout_tokens", "step_timeout", "rollout_timeout")
PROMPTS = ("prompt_format", "system_prompt", "chat_template_kwargs", "max_model_len")
MACHINE = (
    *("device", "dtype", "engine", "max_decode_rows", "decode_step", "revision", "trust_remote_code"),
    *("vllm_python", "vllm_urls", "vllm_model_name", "tensor_parallel_size", "gpu_memory_utilization"),
)
GROUPS: Groups = {
    "sampling": ("The distribution answers are drawn from; goes before the test's completion_params.", SAMPLING),
    "rollout": ("Limits of an attempt of several turns; `--max-turns` instead of the test's `steps`.", LIMITS),
    "prompt": ("How the model is prompted: of a run, as it did there.", PROMPTS),
    "machine": ("What generates, and how a model is loaded.", MACHINE),
}
HELP = {"vllm_model_name": "The model's name, where an address has several."}


def evaluate(argv: list[str]) -> int:
    """`mrl eval`: of a test, or of a model on a dataset."""
    if names_test(argv):
        return evaluate_test(argv)
    from mrl.cli import eval as of_model

    return of_model.evaluate(argv)


def names_test(argv: list[str]) -> bool:
    """Whether a command line is about a test rather than a model: its first word is a file, or a model is named."""
    first = next((word for word in argv if not word.startswith("-")), "")
    flags = {word.partition("=")[0] for word in argv if word.startswith("-")}
    is_file = first.partition(":")[0].endswith(".py") and not flags & {"--dataset", "--dataset-name"}
    return is_file or "--model" in flags


def evaluate_test(argv: list[str]) -> int:
    """Run a test's experiments. Exits with 1 when one fails."""
    given = parse(
        "mrl eval",
        "Run an evaluation test: attempt its rows with a model, score them, compare with the threshold.\n\n"
        "  mrl eval my_eval.py --model my-run                 the policy of a run\n"
        "  mrl eval my_eval.py --model http://127.0.0.1:8000/v1\n"
        "  mrl eval my_eval.py:test_sums --model PATH_OR_HUB_ID --num-runs 4\n"
        "  mrl eval tests.my_eval --model starter             a module by its name\n\n"
        "Without --model each of the test's completion_params says which model. The same file runs with pytest\n"
        "(`pytest my_eval.py --mrl-model …`) and trains (`mrl train --evaluation-test my_eval.py …`).",
        argv,
        options=GROUPS,
        extra={
            "test": argument(
                "A file or module with functions that have @evaluation_test; `:NAME` takes one of them.",
                positional=True,
                required=True,
                metavar="TEST",
            ),
            "model": argument(
                "An address (http://HOST/v1), `starter`, a folder, a Hub id, or a run: RUN, RUN@best, RUN@40."
            ),
            "num_runs": argument("Attempts at each row, instead of the test's num_runs.", kind=int),
            "confidence": argument("Level of the intervals.", default="0.95", kind=float),
            "output": argument("File to write the rows to, one JSON line each, as Eval Protocol reads them."),
            "record": argument("Write a folder with the rollouts below the runs'.", default="on", kind=bool),
            "json": argument("Print the result as JSON.", default="off", kind=bool),
        },
        helps=HELP,
    )
    own = {name: given.pop(name, None) for name in ("test", "model", "num_runs", "output")}
    as_plain, record = given.pop("json", False), given.pop("record", True)
    confidence = given.pop("confidence", 0.95)
    if own["num_runs"] is not None and own["num_runs"] < 1:
        raise ConfigError(f"--num-runs: {own['num_runs']} is no number of attempts; use 1 or more")
    if not 0 < confidence < 1:
        raise ConfigError(f"--confidence: {confidence} is not between 0 and 1, e.g. 0.95")
    output = Path(own["output"]).expanduser() if own["output"] else None
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise ConfigError(f"--output: {output} cannot be written; name a file in a folder that is there")

    from mrl.evals.report import write_rows
    from mrl.evaltests.find import find_test, find_tests, split_name

    where, name = split_name(own["test"])
    try:
        tests = [find_test(own["test"])] if name else list(find_tests(where).values())
    except ConfigError as error:  # there is no such flag here
        raise ConfigError(str(error).removeprefix("evaluation_test: ")) from error
    if not tests:
        raise ConfigError(f"{where} has no function with @evaluation_test")
    reports = [
        report for test in tests for report in _run(test, own["model"], given, own["num_runs"], confidence, record)
    ]
    if output is not None:
        write_rows(output, [row for report in reports for row in report.done])
    _show(reports, as_plain)
    return 1 if any(report.failure for report in reports) else 0


def _run(
    test: Any, model: str | None, options: dict[str, Any], runs: int | None, confidence: float, record: bool
) -> list[Any]:
    from mrl.cli.eval import Progress, say_note
    from mrl.evals.running import run_test
    from mrl.trainer import run_to_end

    with Progress(test.name) as progress:
        return run_to_end(
            run_test(
                test,
                model=model,
                options=options,
                num_runs=runs,
                confidence=confidence,
                record=record,
                note=say_note,
                progress=progress,
            )
        )


def _show(reports: list[Any], as_plain: bool) -> None:
    from mrl.evals.table import as_json, print_reports

    if as_plain:
        from mrl.cli.eval import print_json

        print_json([as_json(report) for report in reports])
        return
    from rich.console import Console

    print_reports(reports, Console(highlight=False))
    for report in reports:
        if report.failure:
            print(f"{report.test}: {report.failure}", file=sys.stderr)
