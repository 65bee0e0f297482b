"""`mrl runs`: list, show, compare, delete and export what the run store holds."""

from __future__ import annotations

import difflib
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from mrl.cli.flags import argument, parse
from mrl.cli.last_resort import says_everything
from mrl.config import load_recipe
from mrl.errors import ConfigError, StoreError
from mrl.store.export import STDOUT, export
from mrl.store.filters import Filter
from mrl.store.find import RunSummary, all_runs, find_run, runs_root, summarize
from mrl.store.lock import RunLock, is_locked
from mrl.store.read import RunReader, Split
from mrl.store.rows import jsonable
from mrl.store.schema import check_version
from mrl.system.units import plural, size

LAST_STEPS = 10
"""A single step's reward says little: runs are compared by the mean of so many."""

USAGE = """usage: mrl runs [list] [--json]
       mrl runs show RUN [--json]
       mrl runs compare RUN RUN ... [--json]
       mrl runs rollouts RUN [--step N] [--task ID] [--failed] [--eval] [--limit N] [--json]
       mrl runs export RUN --format parquet|jsonl [--rows rollouts|metrics|events] [--output FILE]
       mrl runs delete RUN [--yes]

RUN is a run's folder, or its name below $MRL_RUNS (default: ./runs)."""


def runs(argv: list[str]) -> int:
    """List, show, compare, export and delete runs. Raises MRLError for what the user can mend."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    action, rest = ("list", argv) if not argv or argv[0].startswith("-") else (argv[0], argv[1:])
    if action not in ACTIONS:
        close = difflib.get_close_matches(action, ACTIONS, n=1)
        hint = f"; did you mean `mrl runs {close[0]}`?" if close else f" (commands: {', '.join(ACTIONS)})"
        raise ConfigError(f"mrl runs: there is no command {action!r}{hint}")
    return ACTIONS[action](rest)


# --- list and show ----------------------------------------------------------------------------------------------------


def _list(argv: list[str]) -> int:
    given = _parse("list", "List the runs, oldest first.", argv)
    summaries = [summarize(run) for run in all_runs()]
    if given.get("json"):
        _print_json([asdict(summary) for summary in summaries])
        return 0
    if not summaries:
        _say(f"no runs in {runs_root()}/ ($MRL_RUNS names another folder)")
        return 0
    columns = ("run", "status", "steps", "last reward", "best eval", "age", "size")
    _print_table(columns, [_listed(summary) for summary in summaries], right=columns[2:])
    for summary in summaries:
        if summary.status == "unreadable":
            _say(f"{summary.error}")
    return 0


def _listed(run: RunSummary) -> list[str]:
    best = "–" if run.best_eval is None else f"{run.best_eval:.3f} (step {run.best_eval_step})"
    age = "–" if run.created is None else _duration(time.time() - run.created)
    return [run.name, _status(run), str(run.steps), _number(run.reward), best, age, size(run.bytes)]


def _status(run: RunSummary) -> str:
    """For people: `running`, `running, no sign of life since 12:03:11`."""
    if run.silent_since is None:
        return run.status
    silent = f"no sign of life since {_clock(run.silent_since)}"
    return silent if run.status == "unknown" else f"{run.status}, {silent}"


def _show(argv: list[str]) -> int:
    given = _parse("show", "Show a run: how it went, its options, its last metrics and events.", argv, run=RUN)
    folder = find_run_named(given["run"])
    check_version(folder)
    summary, config = summarize(folder), _config(folder)
    with RunReader(folder) as reader:
        metrics = reader.metrics(summary.steps)
        evals = [{name: value for name, value in row.items() if name != "time"} for row in reader.metric_rows("eval")]
        events = reader.events()
        counts = {split: reader.count(Filter(split)) for split in _SPLITS}
        failed = {split: reader.count(Filter(split, status="failed")) for split in _SPLITS}
    facts: dict[str, Any] = {
        **asdict(summary),
        "checkpoints": sorted((path.name for path in (folder / "checkpoints").glob("step-*")), key=_step_number),
        "rollouts": counts,
        "failed_rollouts": failed,
    }
    if given.get("json"):
        _print_json({**facts, "metrics": metrics, "evals": evals, "events": events, "config": config})
        return 0
    facts |= {"size": size(facts.pop("bytes")), "rollouts": _per_split(counts), "failed_rollouts": _per_split(failed)}
    facts |= {"status": _status(summary)} | _shown_progress(facts.pop("progress"), summary.status)
    for name in ("created", "ended"):
        facts[name] = facts[name] and time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(facts[name]))
    _print_pairs({name: value for name, value in facts.items() if value not in (None, [])})
    print(f"\nmetrics of step {summary.steps}")
    _print_pairs({f"  {name}": _number(value) for name, value in metrics.items()})
    for row in evals:
        print(f"\nevaluation after step {row.pop('step')}")
        _print_pairs({f"  {name}": _number(value) for name, value in row.items()})
    warnings = [event for event in events if event["kind"] == "warning"]
    others = [event for event in events if event["kind"] != "warning"]
    for title, shown in (("warnings", warnings), ("last events", others[-10:])):
        if shown:
            print(f"\n{title}")
        for event in shown:
            print(f"  {time.strftime('%H:%M:%S', time.localtime(event['time']))} {event['kind']}: {event['message']}")
    print(f"\nconfiguration: {folder / 'config.yaml'}")
    return 0


def _shown_progress(progress: dict[str, Any] | None, status: str) -> dict[str, Any]:
    """What a run without an end is doing, or was doing when its process was last alive."""
    if progress is None or status not in ("running", "unknown", "died"):
        return {}
    counts = [
        f"{progress['groups_done']} of {progress['groups_wanted']} groups" if progress["groups_wanted"] else "",
        f"{progress['tokens']:,} tokens" if progress["tokens"] else "",
        f"{progress['in_flight']:,} attempts in flight" if progress["in_flight"] else "",
    ]
    doing = f"step {progress['step']}: {progress['stage']} for {_duration(progress['heartbeat'] - progress['since'])}"
    return {
        "doing": ", ".join([doing, *filter(None, counts)]),
        "last sign of life": _clock(progress["heartbeat"]),
        "workers": [_shown_worker(worker) for worker in progress["workers"]],
    }


def _shown_worker(worker: dict[str, Any]) -> str:
    notes = [
        "" if worker["alive"] else "does not answer",
        "" if worker["version"] is None else f"weights of version {worker['version']}",
        f"replaced {plural(worker['restarts'], 'time')}" if worker["restarts"] else "",
    ]
    shown = ", ".join(filter(None, notes))
    return f"{worker['name']} ({shown})" if shown else worker["name"]


# --- compare ----------------------------------------------------------------------------------------------------------


def _compare(argv: list[str]) -> int:
    given = _parse(
        "compare",
        f"Compare runs: the options that differ, and metrics side by side (training: mean of the last {LAST_STEPS}\n"
        "steps; evaluation: the last one).",
        argv,
        runs=argument("Two or more runs.", positional=True, required=True, kind=list[str], metavar="RUN RUN ..."),
    )
    if len(given["runs"]) < 2:
        raise ConfigError("mrl runs compare: name at least two runs")
    folders = [find_run_named(name) for name in given["runs"]]
    options = [_flat(_config(folder)) for folder in folders]
    metrics = [_last_metrics(folder) for folder in folders]
    differing = _side_by_side(options, differing=True)
    measured = _side_by_side(metrics)
    if given.get("json"):
        _print_json({"runs": [str(folder) for folder in folders], "options": differing, "metrics": measured})
        return 0
    names = [folder.name for folder in folders]
    shown = {name: [json.dumps(value, default=str) for value in values] for name, values in differing.items()}
    print("options that differ" if shown else "the runs have the same options")
    if shown:
        _print_table(("option", *names), [[name, *values] for name, values in shown.items()])
    print(f"\nmetrics (training: mean of the last {LAST_STEPS} steps; evaluation: the last)")
    rows = [[name, *map(_number, values)] for name, values in measured.items()]
    _print_table(("metric", *names), rows, right=names)
    return 0


def _last_metrics(folder: Path) -> dict[str, float]:
    """`steps`, and each metric at the run's end."""
    with RunReader(folder) as reader:
        found: dict[str, float] = {"steps": reader.last_step() or 0}
        for name, series in reader.all_series().items():
            found[name] = fmean(value for _, value in series[-LAST_STEPS:])
        for name, series in reader.all_series("eval").items():
            found[name] = series[-1][1]
    return found


def _side_by_side(columns: list[dict[str, Any]], differing: bool = False) -> dict[str, list[Any]]:
    """Each name's value in every column, None where there is none."""
    names = dict.fromkeys(name for column in columns for name in column)
    rows = {name: [column.get(name) for column in columns] for name in names}
    if differing:
        return {name: row for name, row in rows.items() if any(value != row[0] for value in row)}
    return rows


# --- rollouts and export ----------------------------------------------------------------------------------------------


def _rollouts(argv: list[str]) -> int:
    given = _parse(
        "rollouts",
        "Print some of a run's rollouts, the newest first.",
        argv,
        run=RUN,
        step=argument("Only those of this step.", kind=int),
        task=argument("Only attempts at this task (its id)."),
        failed=argument("Only those that could not be generated or scored.", default="off", kind=bool),
        min_reward=argument("Only rewards from here.", kind=float),
        max_reward=argument("Only rewards up to here.", kind=float),
        eval=argument("Those of the held-out evaluations, instead of training's.", default="off", kind=bool),
        limit=argument("At most so many.", default="5", kind=int),
    )
    limit = given.get("limit", 5)
    if limit < 1:
        raise ConfigError(f"limit: {limit} is no number of rollouts; use 1 or more")
    where = Filter(
        split="eval" if given.get("eval") else "train",
        step=given.get("step"),
        task_id=given.get("task"),
        status="failed" if given.get("failed") else None,
        reward_min=given.get("min_reward"),
        reward_max=given.get("max_reward"),
    )
    with RunReader(find_run_named(given["run"])) as reader:
        page = reader.page(where, limit=limit, newest_first=True)
        found = [reader.rollout(row["key"]) for row in page.rows]
    if given.get("json"):
        _print_json(found)
        return 0
    for rollout in found:
        _print_rollout(rollout)
    if not found:
        _say("no such rollouts")
    elif page.next:
        _say("there are more; --limit prints more")
    return 0


def _print_rollout(rollout: dict[str, Any]) -> None:
    reward = "not scored" if rollout["reward"] is None else f"reward {_number(rollout['reward'])}"
    print(f"── step {rollout['step']} · {rollout['task_id']} · attempt {rollout['attempt']} · {reward} · ", end="")
    print(f"{rollout['tokens']} tokens")
    if rollout["error"]:
        print(f"error: {rollout['error']}")
    for message in rollout["messages"]:
        print(f"[{message.get('role', '?')}] {_utf8(_shown(message.get('content', '')).strip())}")


def _shown(content: Any) -> str:
    """A message's content on the screen: of images their hash and size."""
    if not isinstance(content, list) or not all(isinstance(part, dict) and "type" in part for part in content):
        return str(content)
    return " ".join(_shown_part(part) for part in content)


def _shown_part(part: dict[str, Any]) -> str:
    image = part.get("image")
    if part["type"] != "image" or not isinstance(image, dict):
        return str(part["text"] if part["type"] == "text" and "text" in part else part)
    return f"[image {image['sha256'][:12]}, {image['bytes']} bytes]" if "sha256" in image else f"[image {image}]"


def _export(argv: list[str]) -> int:
    given = _parse(
        "export",
        "Write a run's rows to a file: rollouts (with token ids, masks and logprobs), metrics or events.",
        argv,
        run=RUN,
        format=argument("File format.", required=True, kind=Literal["parquet", "jsonl"]),
        rows=argument("What to write.", default="rollouts", kind=Literal["rollouts", "metrics", "events"]),
        output=argument("File; - writes jsonl to stdout.", default="RUN-ROWS.FORMAT in this folder"),
    )
    folder, form, rows = find_run_named(given["run"]), given["format"], given.get("rows", "rollouts")
    output = given.get("output") or f"{folder.resolve().name}-{rows}.{form}"
    count = export(folder, output, form, rows)
    if given.get("json") and output != STDOUT:
        _print_json({"output": output, "rows": count})
    else:
        _say(f"{count} rows of {rows} in {'stdout' if output == STDOUT else output}")
    return 0


# --- delete -----------------------------------------------------------------------------------------------------------


def _delete(argv: list[str]) -> int:
    given = _parse(
        "delete",
        "Delete a run: its record and its checkpoints.",
        argv,
        run=RUN,
        yes=argument("Do not ask.", default="off", kind=bool),
    )
    folder = find_run_named(given["run"])
    if is_locked(folder):
        RunLock(folder).release()  # raises, naming the process
    summary = summarize(folder)
    if not given.get("yes"):
        if not sys.stdin.isatty():
            raise ConfigError("mrl runs delete: nobody to ask; give --yes to delete without asking")
        _say(f"{folder}: {summary.status}, {summary.steps} steps, {size(summary.bytes)}, checkpoints included")
        if input("delete it? [y/N] ").strip().lower() not in ("y", "yes"):
            _say("kept")
            return 1
    try:
        lock = RunLock(folder)  # nobody starts to write meanwhile
        shutil.rmtree(folder)
        lock.release()
    except OSError as error:
        raise StoreError(f"{folder} could not be deleted ({error})") from None
    if given.get("json"):
        _print_json({"deleted": str(folder), "bytes": summary.bytes})
    else:
        _say(f"deleted {folder} ({size(summary.bytes)})")
    return 0


# --- small things -----------------------------------------------------------------------------------------------------

ACTIONS: dict[str, Callable[[list[str]], int]] = {
    "list": _list,
    "show": _show,
    "compare": _compare,
    "rollouts": _rollouts,
    "export": _export,
    "delete": _delete,
}
RUN = argument("The run's folder or name.", positional=True, required=True, metavar="RUN")
_SPLITS: tuple[Split, ...] = ("train", "eval")


def _parse(action: str, description: str, argv: list[str], **extra: Any) -> dict[str, Any]:
    as_json = argument("Print the result as JSON.", default="off", kind=bool)
    return parse(f"mrl runs {action}", description, argv, options=[], extra={**extra, "json": as_json})


def find_run_named(name: str) -> Path:
    """The run of that name or folder. Raises ConfigError, with the name that was meant where one is close."""
    folder = find_run(name)
    if folder is not None:
        return folder
    known = [run.name for run in all_runs()]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "; `mrl runs` lists them"
    raise ConfigError(f"there is no run {name!r}, neither as a folder nor in {runs_root()}/{hint}")


def _config(folder: Path) -> dict[str, Any]:
    """The run's options as they were recorded. Raises ConfigError naming the line that cannot be read."""
    return load_recipe(folder / "config.yaml")[0]


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Options by their flat names, as flags and recipes have them."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat.update(value if isinstance(value, dict) else {name: value})
    return flat


def _step_number(name: str) -> int:
    digits = name.removeprefix("step-")
    return int(digits) if digits.isdigit() else -1


def _per_split(counts: dict[Split, int]) -> str:
    return f"{counts['train']} of training, {counts['eval']} of evaluations"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else "–" if value is None else str(value)


def _clock(moment: float) -> str:
    """The time of day, and the date where it is another one."""
    then, now = time.localtime(moment), time.localtime()
    return time.strftime("%H:%M:%S" if then[:3] == now[:3] else "%Y-%m-%d %H:%M:%S", then)


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _print_table(columns: Any, rows: list[list[str]], right: Any = ()) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_plain, row))
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)


def _plain(value: str) -> Any:
    from rich.text import Text

    return Text(value)


def _print_pairs(pairs: dict[str, Any]) -> None:
    width = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        print(f"{name:{width}}  {', '.join(map(str, value)) if isinstance(value, list) else value}")


def _print_json(value: Any) -> None:
    print(_utf8(json.dumps(jsonable(value, finite=True), indent=2, default=str, ensure_ascii=not says_everything())))


def _utf8(value: str) -> str:
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def _say(message: str) -> None:
    print(message, file=sys.stderr)
