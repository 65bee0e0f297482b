"""The logs page of one run beside its training: `python -m mrl.logs DESCRIPTOR RUN_FOLDER [TOKEN in MRL_LOGS_TOKEN]`.

The run's process has the address already and passes its socket on; this one ends when the run's process does, which
holds the other end of its standard input.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

from mrl.logs.catalog import Catalog
from mrl.logs.serve import TOKEN, Address, serve

if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are the run's: it decides when to end
        signal.signal(number, signal.SIG_IGN)
    taken, folder = socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2])
    catalog = Catalog([folder], folder.parent)
    serve(Address(taken, "", os.environ.get(TOKEN) or None), catalog, until_stdin_ends=True)
