"""What is done with an object of the program: answered here, by the judge; asked there, of the program; or refused.

The rule that keeps a program from forging a result: no value that it has not produced itself is compared, or combined,
with one of its objects by its own methods. Two objects of the program are compared by the program: that is its own
`__eq__`, which the test asks for. An object of a class that extends a builtin type is compared as the data it holds.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque

BASES = (
    *(int, float, complex, str, bytes, tuple, list, Counter, OrderedDict, defaultdict, dict, set, frozenset),
    *(bytearray, deque),
)
"""Builtin types whose data is read where a class of the program extends them."""

_ASKED = """
len:int iter next reversed call getitem setitem delitem str:str repr:str format:str bytes:bytes int:int float:float
complex:complex index:int bool:bool hash:int abs neg pos invert round floor ceil trunc dir enter aiter anext await
aenter copy deepcopy
"""
ASKED = {item.partition(":")[0]: item.partition(":")[2] for item in _ASKED.split()}
"""Asked there, and the type that the answer must have."""
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
"""Between two objects of the program: asked there. With data: answered here, and false or refused."""
_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul lshift rshift and or xor divmod"
COMBINED = tuple(_ARITHMETIC.split())
"""Between two objects of the program: asked there. With a number too, when an object comes of it, whose attributes can
be asked for; a number is refused, for it could be the distance to what a test expects."""
SCALED = ("mul",)
"""May give data."""
_ALLOWED = "getattr setattr delattr call getitem setitem delitem copy deepcopy and_ or_"
MADE_OF_A_NUMBER = frozenset((*COMPARED, *COMBINED, *_ALLOWED.split()))
"""What is still asked of an object that came of an object and a test's number. (Compared only with other objects.)"""
IN_PLACE = tuple(f"i{name}" for name in COMBINED if name != "divmod")

_REFLECTED = tuple(f"r{name}" for name in COMBINED)
_CONVERTED = ("hash", "int", "float", "complex", "index", "bool", "abs", "neg", "pos", "invert")
ARITHMETIC = frozenset(f"__{name}__" for name in (*COMPARED, *COMBINED, *IN_PLACE, *_REFLECTED, *_CONVERTED))
"""What a class that extends a builtin type answers as that type does."""
FORWARDED = tuple(
    dict.fromkeys([*(f"__{name}__" for name in ASKED), *sorted(ARITHMETIC), "__contains__", "__exit__", "__aexit__"])
)
"""The methods that an object here has when its class has them there."""
