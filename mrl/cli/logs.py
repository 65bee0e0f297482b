"""`mrl logs` and `mrl report`: look at runs in a browser, or send one to somebody as a file."""

from __future__ import annotations

import sys
from pathlib import Path

from mrl.cli.flags import argument, parse
from mrl.cli.runs import RUN, find_run_named
from mrl.errors import ConfigError
from mrl.store.find import runs_root
from mrl.system.units import size

PORT = 8000


def logs(argv: list[str]) -> int:
    """Serve the logs page until Ctrl-C."""
    given = parse(
        "mrl logs",
        "Look at runs in a browser: curves, rollouts, tokens, evaluations; while they train and afterwards.\n\n"
        "  mrl logs                       every run in $MRL_RUNS (default: ./runs)\n"
        "  mrl logs my-run other-run      these and no others, by name or folder\n"
        "  mrl logs --host 0.0.0.0        for other machines too; prints a link with a token",
        argv,
        options=[],
        extra={
            "runs": argument("Which runs.", default="all", positional=True, kind=list[str], metavar="[RUN ...]"),
            "host": argument(
                "Address to listen at. Any but this machine's own needs the token of the printed link (yours, if the "
                "environment variable MRL_LOGS_TOKEN has one).",
                default="127.0.0.1",
            ),
            "port": argument("Port; 0 = any that is free.", default=str(PORT), kind=int),
        },
    )
    from mrl.logs.catalog import Catalog
    from mrl.logs.serve import serve, take_address

    folders = [find_run_named(name) for name in given.get("runs") or []] or None
    address = take_address(given.get("host", "127.0.0.1"), given.get("port", PORT))
    what = f"runs in {runs_root()}/" if folders is None else ", ".join(folder.name for folder in folders)
    print(f"{what}: {address.link}", flush=True)
    print("Ctrl-C ends it", file=sys.stderr)
    serve(address, Catalog(folders, runs_root()))
    return 0


def report(argv: list[str]) -> int:
    """Write a run as one HTML file."""
    given = parse(
        "mrl report",
        "Write a run as one self-contained HTML file, to send to somebody: curves, configuration, events, evaluations\n"
        "and some rollouts. It needs no network and no mrl to be looked at. It holds prompts and completions.",
        argv,
        options=[],
        extra={
            "run": RUN,
            "output": argument("File to write.", default="RUN.html in this folder"),
            "rollouts": argument(
                "So many with the highest rewards, with the lowest, that failed, and held-out tasks before and after.",
                default="8",
                kind=int,
            ),
        },
    )
    from mrl.logs.report import write_report

    if given.get("rollouts", 8) < 0:
        raise ConfigError(f"--rollouts: {given['rollouts']} is no number of rollouts; use 0 or more")
    folder = find_run_named(given["run"])
    output = Path(given.get("output") or f"{folder.resolve().name}.html").expanduser()
    count = write_report(folder, output, given.get("rollouts", 8))
    print(f"{output} ({size(count)})")
    return 0
