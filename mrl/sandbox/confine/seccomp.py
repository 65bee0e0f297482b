"""Loads a shipped filter into this process. What the filters allow is written down in scripts/build_seccomp.py."""

from __future__ import annotations

import ctypes
import os
import struct

from . import kernel
from .filters import FILTERS, OWN_PID
from .names import MACHINE

_INSTRUCTION, _PROGRAM, _PID = struct.Struct("=HBBI"), struct.Struct("@HP"), struct.Struct("=I")


class Filter:
    """One layer's filter, built once in the server so that a child only has to put its pid in and load it."""

    def __init__(self, layer: str, machine: str = MACHINE) -> None:
        """Raises LookupError for an architecture without filters."""
        text = FILTERS[machine, layer]
        parts = [text[at : at + 16] for at in range(0, len(text), 16)]
        numbers = [(int(part[:4], 16), int(part[4:6], 16), int(part[6:8], 16), int(part[8:], 16)) for part in parts]
        code = b"".join(_INSTRUCTION.pack(*number) for number in numbers)
        self.code = ctypes.create_string_buffer(code, len(code))
        self.own_pid_at = [8 * at + 4 for at, number in enumerate(numbers) if number[3] == OWN_PID]
        program = _PROGRAM.pack(len(parts), ctypes.addressof(self.code))
        self.program = ctypes.create_string_buffer(program, len(program))

    def acts(self, own_pid: int | None) -> list[kernel.Act]:
        """Load it: it holds from there on, needs no_new_privs, and cannot be undone. own_pid: the process's, if that is
        known before it is there."""
        mode = kernel.SECCOMP_MODE_FILTER
        load = kernel.act("prctl", kernel.PR_SET_SECCOMP, mode, self.program, 0, 0, name="seccomp")
        if own_pid is None:
            return [("own pid", self.put_own_pid, ()), load]
        self.put(own_pid)
        return [load]

    def put_own_pid(self) -> None:
        self.put(os.getpid())

    def put(self, pid: int) -> None:
        for at in self.own_pid_at:
            _PID.pack_into(self.code, at, pid)
