"""`mrl checkpoints` and `mrl replay`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mrl.cli.flags import argument, parse
from mrl.errors import CheckpointError, ConfigError
from mrl.loop.resume import existing_run
from mrl.store.checkpoints import best_step, copy_model, find_checkpoint, list_checkpoints
from mrl.system.shell import command
from mrl.system.units import size

ACTIONS = ("list", "verify", "export", "push")
REPLAY_CODES = {"equal": 0, "rounding": 3, "different": 4}
"""Exit codes of `mrl replay`; 2 is for what the user can mend, as everywhere."""


def checkpoints(argv: list[str]) -> int:
    """List, verify, export or publish a run's checkpoints."""
    given = parse(
        "mrl checkpoints",
        "List, verify, export or publish a run's checkpoints.\n\n"
        "  mrl checkpoints RUN                        what there is\n"
        "  mrl checkpoints RUN verify                 check every checksum (exit code 1 when damaged)\n"
        "  mrl checkpoints RUN export FOLDER --merged a model folder by itself, an adapter merged into its model\n"
        "  mrl checkpoints RUN push USER/NAME         to the Hub, as a private repository",
        argv,
        options=[],
        extra={
            "run": argument("A run's name or folder.", positional=True, required=True, metavar="RUN"),
            "action": argument("list, verify, export or push.", positional=True, default="list", metavar="[ACTION]"),
            "target": argument(
                "Folder to export to, or the repository to push to.", positional=True, metavar="[TARGET]"
            ),
            "which": argument(
                "Which checkpoint is exported or pushed: newest, best, or a step's number.", default="newest"
            ),
            "merged": argument("Merge a LoRA adapter into its model.", default="off", kind=bool),
            "json": argument("Print the result as JSON.", default="off", kind=bool),
        },
    )
    run, action = existing_run(given["run"]), given.get("action", "list")
    if action not in ACTIONS:
        raise ConfigError(f"mrl checkpoints: {action!r} is none of {', '.join(ACTIONS)}")
    if action in ("list", "verify"):
        unused = {"target": str(given.get("target")), "which": "--which", "merged": "--merged"}
        if found := [text for name, text in unused.items() if name in given]:
            raise ConfigError(f"mrl checkpoints RUN {action}: is about all of them; leave out {', '.join(found)}")
        return _list(run, verify=action == "verify", as_json=given.get("json", False))
    if "target" not in given:
        example = command("mrl", "checkpoints", run.name, action)
        raise ConfigError(f"mrl checkpoints RUN {action}: say where to, e.g. `{example} TARGET`")
    checkpoint = find_checkpoint(run, given.get("which", "newest"))
    if problems := checkpoint.problems():
        raise CheckpointError("; ".join(problems))
    target: Path | str
    if action == "export":
        target = export(checkpoint.path, Path(given["target"]).expanduser(), merged=given.get("merged", False))
    else:
        target = _push(checkpoint.path, given["target"], merged=given.get("merged", False))
    _answer({"checkpoint": str(checkpoint.path), action: str(target)}, given.get("json", False))
    return 0


def replay(argv: list[str]) -> int:
    """Recompute a recorded step and show what differs."""
    given = parse(
        "mrl replay",
        "Recompute a recorded step's loss and gradients from its stored rollouts and the checkpoint before it, and\n"
        "show how they differ from what was recorded: not at all on the same machine's CPU.\n\n"
        "  mrl replay RUN --step 17\n\n"
        "Exit code 0: equal, bit for bit. 3: it differs by rounding only, and it says what is another than it was\n"
        "(processor, threads, versions). 4: not what was recorded.",
        argv,
        options=["device"],
        extra={
            "run": argument("A run's name or folder.", positional=True, required=True, metavar="RUN"),
            "step": argument("The step to recompute.", kind=int, required=True),
            "gradients": argument("How many parameters to list by gradient norm.", default="5", kind=int),
            "json": argument("Print the result as JSON.", default="off", kind=bool),
        },
    )
    from mrl.loop.replay import replay as run_replay

    result = run_replay(existing_run(given["run"]), given["step"], given.get("device"))
    if given.get("json"):
        plain = asdict(result) | {"exact": result.exact, "verdict": result.verdict}
        for entry, metric in zip(plain["metrics"], result.metrics, strict=True):
            entry["difference"] = metric.difference
        print(json.dumps(plain, indent=2))
        return REPLAY_CODES[result.verdict]
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"step {result.step}, from the checkpoint of step {result.checkpoint}", title_justify="left")
    for column in ("metric", "recorded", "replayed", "difference"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for metric in result.metrics:
        table.add_row(metric.name, f"{metric.recorded:.6g}", f"{metric.replayed:.6g}", f"{metric.difference:.3g}")
    console = Console()
    console.print(table)
    for name, norm in list(result.gradient_norms.items())[: given.get("gradients", 5)]:
        console.print(f"  gradient norm {norm:.4g}  {name}", highlight=False)
    verdict = {
        "equal": "exactly what was recorded",
        "rounding": "what was recorded, but for rounding",
        "different": "not what was recorded",
    }[result.verdict]
    console.print(verdict, style="bold")
    if result.changed is None:
        console.print("the record does not say on what it was computed", highlight=False)
    elif result.changed or not result.exact:
        console.print(
            f"another than in the run: {', '.join(result.changed) or 'nothing that is known'}", highlight=False
        )
    return REPLAY_CODES[result.verdict]


def export(checkpoint: Path, target: Path, *, merged: bool) -> Path:
    """Copy a checkpoint's model, without what training resumes from. Raises CheckpointError when `target` is in use."""
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be made a folder ({error.strerror}); choose another") from None
    if any(target.iterdir()):
        raise CheckpointError(f"{target}: is not empty; choose another folder")
    if merged and (checkpoint / "adapter_config.json").exists():
        from mrl.config import ModelConfig
        from mrl.models import load_model, load_processor, load_tokenizer

        config = ModelConfig(model=str(checkpoint), device="cpu")
        load_model(config).save_pretrained(target)
        (load_processor(config) or load_tokenizer(config)).save_pretrained(target)
        return target
    copy_model(checkpoint, target)
    return target


def _list(run: Path, *, verify: bool, as_json: bool) -> int:
    best = best_step(run)
    rows: list[dict[str, Any]] = [
        {
            "step": checkpoint.step,
            "path": str(checkpoint.path),
            "bytes": checkpoint.bytes,
            "best": checkpoint.step == best,
            **({"problems": checkpoint.problems()} if verify else {}),
        }
        for checkpoint in list_checkpoints(run)
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
    for row in [] if as_json else rows:
        state = "" if not verify else "  intact" if not row["problems"] else "  DAMAGED"
        best_mark = "  best" if row["best"] else ""
        print(f"step {row['step']:>6}  {size(row['bytes']):>8}{state}{best_mark}  {row['path']}")
        for problem in row.get("problems", []):
            print(f"    {problem}")
    if not rows and not as_json:
        print("no checkpoint yet")
    return 1 if any(row.get("problems") for row in rows) else 0


def _push(checkpoint: Path, repository: str, *, merged: bool) -> str:
    import tempfile

    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    from mrl.data.files import reachable

    failed = f"push to {repository!r} failed"
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(f"{failed}: HF_HUB_OFFLINE is set; unset it, or use export to a folder")
    if not reachable(constants.ENDPOINT):
        raise CheckpointError(
            f"{failed}: cannot reach {constants.ENDPOINT}; check the connection, or export to a folder"
        )
    with tempfile.TemporaryDirectory() as folder:
        export(checkpoint, Path(folder), merged=merged)
        try:
            api = HfApi()
            api.create_repo(repository, private=True, exist_ok=True)
            return str(api.upload_folder(folder_path=folder, repo_id=repository))
        except HFValidationError as error:
            raise CheckpointError(f"{failed}: {error}; give USER/NAME") from None
        except HfHubHTTPError as error:
            raise CheckpointError(f"{failed} ({error}); log in with `hf auth login`, check name and rights") from None
        except Exception as error:  # the libraries below have network errors of their own
            raise CheckpointError(f"{failed} ({type(error).__name__}: {error}); check the connection") from error


def _answer(result: dict[str, str], as_json: bool) -> None:
    print(json.dumps(result) if as_json else "\n".join(f"{name} {value}" for name, value in result.items()))
