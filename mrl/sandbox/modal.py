"""The `modal` sandbox: programs on machines of Modal's (https://modal.com/docs/guide/sandbox), judged there."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from mrl.errors import SandboxError
from mrl.sandbox.graded import GradedSandbox
from mrl.sandbox.machines import MachineExecutor

if TYPE_CHECKING:
    import modal

MAX_LIFETIME = 24 * 3600
CHUNK = 1 << 20
"""Bytes a write: the client refuses more than 2 MiB in its buffer."""


class ModalSandbox(GradedSandbox):
    """Programs in Modal's Sandboxes without a network, a pool of them, opened as they are needed.

    Inside, programs run in the strongest layer of isolation that holds there, one after another; where none holds,
    users of their own keep them from the processes that judge.
    """

    name = "modal"

    def __init__(
        self,
        machines: int = 4,
        cpu: int = 2,
        memory_mb: int = 4096,
        app: str = "mrl-sandbox",
        layer: str = "auto",
        modules: Sequence[str] = (),
        packages: Sequence[str] = (),
        lifetime: int = 3600,
        idle_timeout: int = 300,
        region: str | None = None,
    ) -> None:
        """machines: Sandboxes at most. cpu: cores of each, and programs at a time in it. memory_mb: of each.
        app: the Modal app they belong to, made when it is missing. layer: see `MachineExecutor`. modules: third-party
        ones that programs may import. packages: to install for that, as pip names them; default: `modules`.
        lifetime, idle_timeout: seconds after which Modal ends a Sandbox, whatever happens here.

        Raises SandboxError when `modal` is not installed or an argument will not do.
        """
        try:
            import modal
        except ImportError:
            raise SandboxError("sandbox: 'modal' needs the package: pip install 'mrl[modal]'") from None
        if not 10 <= lifetime <= MAX_LIFETIME:
            raise SandboxError(f"sandbox: lifetime must be between 10 and {MAX_LIFETIME} seconds, not {lifetime}")
        image = modal.Image.debian_slim(python_version=f"{sys.version_info.major}.{sys.version_info.minor}")
        if packages or modules:
            image = image.uv_pip_install(*(packages or modules))
        options: dict[str, Any] = {
            "image": image,
            "block_network": True,
            "cpu": float(cpu),
            "memory": memory_mb,
            "timeout": lifetime,
            "idle_timeout": min(idle_timeout, lifetime),
        }
        if region is not None:
            options["region"] = region

        async def open_machine(command: list[str]) -> _ModalMachine:
            owner = await modal.App.lookup.aio(app, create_if_missing=True)
            sandbox = await modal.Sandbox.create.aio(app=owner, **options)
            try:
                process = await sandbox.exec.aio(*command, text=False)
            except BaseException:
                await sandbox.terminate.aio()
                raise
            return _ModalMachine(sandbox, process)

        super().__init__(MachineExecutor(open_machine, machines, cpu, layer, modules))


class _ModalMachine:
    def __init__(self, sandbox: modal.Sandbox, process: Any) -> None:
        self.sandbox, self.process = sandbox, process
        self.output: AsyncIterator[bytes] = aiter(process.stdout)

    async def write(self, data: bytes) -> None:
        for start in range(0, len(data), CHUNK):
            self.process.stdin.write(data[start : start + CHUNK])
            await self.process.stdin.drain.aio()

    async def read(self) -> bytes:
        return await anext(self.output, b"")

    async def stop(self) -> None:
        await self.sandbox.terminate.aio()
