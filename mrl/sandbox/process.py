"""The `process` sandbox: limits only, and no isolation."""

from __future__ import annotations

import sys

from mrl.errors import SandboxError
from mrl.sandbox.graded import GradedSandbox


class ProcessSandbox(GradedSandbox):
    """Programs as processes of this machine, `slots` at a time, judged as in the `local` sandbox but not isolated.

    Each has its `Limits`, no environment, a scratch folder that is removed after it, and nothing outlives it. When mrl
    runs as root, programs and their judges get unused user ids: they can then reach no other process, and write only
    in their scratch folder and in what is open to everyone.

    What it is not: proof against a program that means to cheat. It can read what its user may read and use the network,
    and where mrl is not root's it can reach into the process that judges it.
    """

    name = "process"

    def __init__(self, slots: int | None = None, python: str = sys.executable) -> None:
        """slots: programs at a time, default one per usable core. python: the interpreter to run them with.

        Raises SandboxError on a system that is not Linux.
        """
        if sys.platform != "linux":
            raise SandboxError(
                f"sandbox: 'process' needs Linux, and this is {sys.platform}. Run mrl in a Linux container or virtual"
                " machine (on Windows: inside WSL), or choose `sandbox: modal`"
            )
        from mrl.sandbox.engine.client import IsolatedExecutor

        super().__init__(IsolatedExecutor(slots, "unsafe", unsafe=True, python=python))
