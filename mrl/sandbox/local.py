"""The `local` sandbox: programs, and the tests that judge them, in isolated processes of this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mrl.errors import SandboxError
from mrl.sandbox.execution import Executor
from mrl.sandbox.graded import GradedSandbox


class LocalSandbox(GradedSandbox):
    """Programs in isolated processes of this machine, `slots` at a time.

    The process that runs a program never sees what its tests expect: it gets calls (or stdin) and answers, and another
    isolated process judges. See docs/sandbox.md for the layers of isolation and for what is not promised.
    """

    name = "local"

    def __init__(
        self,
        slots: int | None = None,
        layer: str = "auto",
        unsafe: bool = False,
        modules: Sequence[str] = (),
        executor: Executor | None = None,
    ) -> None:
        """slots: programs at a time, default one per usable core. layer: `auto` is the strongest that works here.
        unsafe: run without isolation where no layer works. modules: third-party ones that programs may import.
        executor: what runs them, instead of isolated processes with these settings.

        Raises SandboxError, saying what is missing and what to do, where no layer of isolation works.
        """
        names = (modules,) if isinstance(modules, str) else tuple(modules)
        super().__init__(executor or _isolated(slots, layer, unsafe, names))


def make_auto(
    slots: int | None = None, layer: str = "auto", unsafe: bool = False, modules: Sequence[str] = ()
) -> LocalSandbox:
    """`sandbox: auto`: the strongest isolation that works here. Raises SandboxError saying what to do when none does;
    it never falls back to a weaker sandbox by itself."""
    try:
        return LocalSandbox(slots, layer, unsafe, modules)
    except SandboxError as error:
        raise SandboxError(
            f"{error}\nsandbox: 'auto' needs one of its layers. `mrl sandbox check` says what each lacks here;"
            " `sandbox: modal` runs them on machines of Modal's, `sandbox: process` here with limits only, which a"
            " model can cheat"
        ) from None


def _isolated(slots: int | None, layer: str, unsafe: bool, modules: tuple[str, ...]) -> Executor:
    if sys.platform != "linux":
        raise SandboxError(
            f"sandbox: 'local' isolates with Linux's means, and this is {sys.platform}. Run mrl in a Linux container or"
            " virtual machine (on Windows: inside WSL), or choose a remote sandbox (`sandbox: modal`; docs/sandbox.md"
            " says how to add another)"
        )
    from mrl.sandbox.engine.client import IsolatedExecutor

    return IsolatedExecutor(slots, layer, unsafe, modules)
