"""The folder in which programs without isolation may write. Layer A has one of its own kind, see `namespaces`."""

from __future__ import annotations

import os
from typing import Any


def make() -> str:
    """Everybody can pass through it, and nobody else write."""
    import tempfile  # here and below: what the fork-server has loaded costs every fork

    path = tempfile.mkdtemp(prefix="mrl-sandbox-")
    os.chmod(path, 0o711)
    return path


def make_inner(path: str, uid: int | None) -> str:
    """A new folder in it, for one program. uid: the user and group whose it is to be, if not ours."""
    inner = os.path.join(path, os.urandom(8).hex())
    os.mkdir(inner, 0o700)
    if uid is not None:
        os.chown(inner, uid, uid)
        os.chmod(inner, 0o770)
    return inner


def remove(path: str) -> None:
    """With all that a program has made in it, and made hard to remove. Nothing where `path` is empty or gone."""
    try:
        os.rmdir(path)  # most programs write nothing
    except FileNotFoundError:
        pass
    except OSError:
        import shutil
        import subprocess

        try:
            shutil.rmtree(path, onerror=_unlock)
        except RecursionError:  # folders in folders, by the thousand
            subprocess.run(["/bin/rm", "-rf", "--", path], stderr=subprocess.DEVNULL, check=False)


def _unlock(function: Any, name: str, _: Any) -> None:
    if os.geteuid() == 0:  # no mode is in root's way, and a name that a program can change is not for root to follow
        return
    try:
        os.chmod(os.path.dirname(name), 0o700)
        os.chmod(name, 0o700)
        function(name)
    except OSError:  # it is gone already, or is left for the system to clear up
        pass
