"""The part of mrl that a machine apart needs, as one archive: the standard library is all it stands on."""

from __future__ import annotations

import functools
import io
import json
import zipfile
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
FILES = ("errors.py", "sandbox/base.py", "sandbox/execution.py", "sandbox/protocol.py", "sandbox/machines/agent.py")
FOLDERS = ("confine", "engine", "judge")
PACKAGES = ("", "sandbox/", "sandbox/machines/")
"""Their own `__init__` files import what is not there: empty ones take their places."""

COMMAND = [
    "python3",
    "-c",
    "import io,sys,tempfile,zipfile;i=sys.stdin.buffer;d=tempfile.mkdtemp();"
    "zipfile.ZipFile(io.BytesIO(i.read(int(i.read(10))))).extractall(d);sys.path.insert(0,d);"
    "from mrl.sandbox.machines.agent import main;main(i.read(int(i.read(10))))",
]
"""What is started there. It reads the archive, and then the settings, each after its length in ten digits."""


@functools.cache
def archive() -> bytes:
    """A zip of the modules."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as packed:
        for folder in PACKAGES:
            packed.writestr(f"mrl/{folder}__init__.py", "")
        inner = (path for folder in FOLDERS for path in sorted(PACKAGE.glob(f"sandbox/{folder}/*.py")))
        for name in (*FILES, *(str(path.relative_to(PACKAGE)) for path in inner)):
            packed.write(PACKAGE / name, f"mrl/{name}")
    return buffer.getvalue()


def greeting(slots: int, layer: str, modules: list[str]) -> bytes:
    """What the command reads first."""
    settings = json.dumps({"slots": slots, "layer": layer, "modules": modules}).encode()
    return b"".join(f"{len(data):010d}".encode() + data for data in (archive(), settings))
