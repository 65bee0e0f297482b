"""`mrl logs` and `mrl report`: look at runs in a browser, or send one to somebody as a file."""

from __future__ import annotations

import sys

from mrl.cli.flags import argument, parse
from mrl.cli.runs import find_run_named
from mrl.store.find import runs_root

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
