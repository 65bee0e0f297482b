"""Loads a shipped filter into this process. What the filters allow is written down in scripts/build_seccomp.py."""

from __future__ import annotations

import ctypes

from . import kernel
from .filters import FILTERS, OWN_PID
from .names import MACHINE


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.POINTER(_Instruction))]


class Filter:
    """One layer's filter, built once in the server so that a child only has to put its pid in and load it."""

    def __init__(self, layer: str, machine: str = MACHINE) -> None:
        """Raises LookupError for an architecture without filters."""
        text = FILTERS[machine, layer]
        parts = [text[at : at + 16] for at in range(0, len(text), 16)]
        self.instructions = (_Instruction * len(parts))(*map(_instruction, parts))
        self.program = _Program(len(self.instructions), self.instructions)
        self.own_pid_at = [at for at, part in enumerate(self.instructions) if part.k == OWN_PID]

    def load(self, pid: int) -> None:
        """From here on. Needs no_new_privs; cannot be undone. Raises OSError."""
        for at in self.own_pid_at:
            self.instructions[at].k = pid
        kernel.prctl(kernel.PR_SET_SECCOMP, kernel.SECCOMP_MODE_FILTER, ctypes.addressof(self.program))


def _instruction(text: str) -> _Instruction:
    return _Instruction(int(text[:4], 16), int(text[4:6], 16), int(text[6:8], 16), int(text[8:], 16))
