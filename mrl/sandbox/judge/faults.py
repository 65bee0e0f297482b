"""Our own mistakes, told from what a program causes.

Of all that can go wrong in the judge's code, only one kind is no program's doing whatever it sends: that the code reads
a name that there is not, or an attribute that an object of its own has not. A wrong type, a key that is missing, a
value that does not fit may each come of a program's data, and must then count against the program; those of ours that
look the same do too.
"""

from __future__ import annotations

import dis
import types

FOLDER = __file__.rpartition("/")[0] + "/"
NOT_OURS = FOLDER + "pytest_here.py"
"""It stands for a library, whose objects are in the tests' hands."""


def is_ours(error: BaseException | None) -> bool:
    """Whether it, or what it was raised because of, is a mistake of this package's."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if _arose_here(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _arose_here(error: BaseException) -> bool:
    """By an instruction that reads, in our code: never one that raises, as for what the program has raised."""
    trace = error.__traceback__
    if trace is None or type(error) not in (NameError, UnboundLocalError, AttributeError):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    here = code.co_filename.startswith(FOLDER) and code.co_filename != NOT_OURS
    if not here or not dis.opname[code.co_code[trace.tb_lasti]].startswith("LOAD_"):
        return False
    return not isinstance(error, AttributeError) or _is_own(error.obj)


def _is_own(value: object) -> bool:
    """Whether it is a module of this package, or of a class of one."""
    if type(value) is types.ModuleType:
        return value.__name__.startswith(f"{__package__}.")
    return type(value).__module__.startswith(f"{__package__}.")
