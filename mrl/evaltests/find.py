"""A test by its name: a module, a file, one of several in it, or the function itself."""

from __future__ import annotations

import copyreg
import functools
import hashlib
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mrl.errors import ConfigError
from mrl.evaltests.foreign import adopted, is_foreign
from mrl.evaltests.parameters import Parameters
from mrl.evaltests.test import EvaluationTest, name_of

_OWN = "_mrl_eval_"
"""What the modules begin with that files are loaded as."""


def find_test(given: Any, folder: str | None = None) -> EvaluationTest:
    """The test that is meant: `tests.my_eval`, `my_eval.py`, `my_eval.py:name`, `my_eval.py::name`, or the decorated
    function. folder: where modules are looked for first. Raises ConfigError where there is none, or several and no
    name."""
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)
    if not isinstance(given, str | os.PathLike):
        if (test := as_test(given)) is None:
            raise ConfigError(f"evaluation_test: {given!r:.80} is no function with @evaluation_test")
        return test
    where, name = split_name(str(given))
    found = find_tests(where)
    if name:
        if name not in found:
            raise ConfigError(f"evaluation_test: {where} has no test {name!r}; it has {_listed(found)}")
        return found[name]
    if len(found) != 1:
        raise ConfigError(
            f"evaluation_test: {where} has {_listed(found)}; say which, e.g. {where}:{next(iter(found), 'my_eval')}"
        )
    return next(iter(found.values()))


def find_tests(where: str) -> dict[str, EvaluationTest]:
    """All tests that a file or a module has of its own or has imported, by name. Raises ConfigError."""
    module = load_module(where)
    made = {name: as_test(value) for name, value in vars(module).items() if not name.startswith("__")}
    return {name: test for name, test in made.items() if test is not None}


def as_test(value: Any) -> EvaluationTest | None:
    """A decorated function as a test; None = it is none."""
    if isinstance(value, EvaluationTest):
        return value
    return adopted(value) if is_foreign(value) else None


@dataclass(frozen=True)
class Place:
    """Where on this machine a test is written down."""

    file: Path
    root: Path
    """What the file imports begins here: its folder; of a module with a dotted name, the folder of its package."""
    module: str | None
    """Its dotted name; None = it is found as a file."""
    name: str
    """Of the test in it; "" = it has one."""

    def elsewhere(self, file: str) -> dict[str, str]:
        """What finds it where a copy is `file`: arguments of `find_test`."""
        colon = f":{self.name}" if self.name else ""
        if self.module is None:
            return {"given": f"{file}{colon}"}
        return {
            "given": f"{self.module}{colon}",
            "folder": file.removesuffix(str(self.file.relative_to(self.root))) or "/",
        }


def place_of(given: Any) -> Place | None:
    """None for an installed module, which is there wherever it is installed, and for a function of the program itself.

    Raises ConfigError.
    """
    if not isinstance(given, str | os.PathLike):
        test = find_test(given)
        named = name_of(test)
        if named is None or _of_program(test):
            return None
        module = test.function.__module__
        given = named if module.startswith(_OWN) else f"{module}:{test.name}"
    where, name = split_name(str(given))
    if where.endswith(".py"):
        file = Path(where).expanduser().resolve()
        return Place(file, file.parent, None, name)
    found = load_module(where).__file__
    if found is None or {"site-packages", "dist-packages"} & set(Path(found).parts):
        return None
    file = Path(found).resolve()
    parts = where.split(".")
    above = parts if file.name == "__init__.py" else parts[:-1]
    return Place(file, file.parents[len(above)], where, name)


def _pickled(test: EvaluationTest) -> tuple[Any, ...]:
    """By its name, found again where it is needed; one of the program itself, which is not run a second time, as far as
    it scores."""
    if _of_program(test):
        kept = ("mode", "max_concurrent_evaluations", "evaluation_test_kwargs")
        scoring = Parameters(input_rows=[[]], **{name: getattr(test.params, name) for name in kept})
        return EvaluationTest, (test.function, scoring, test.convert)
    name = name_of(test)
    if name is None:
        raise ConfigError(
            f"evaluation_test: {test.name} is at no file's or module's top, and is needed in another process; put it "
            "there, and name it file.py:name"
        )
    return find_test, (name,)


copyreg.pickle(EvaluationTest, _pickled)


def _of_program(test: EvaluationTest) -> bool:
    return getattr(test.function, "__module__", None) == "__main__"


def split_name(given: str) -> tuple[str, str]:
    """Module or file, and the test's name or ""."""
    where, _, name = given.partition("::") if "::" in given else given.partition(":")
    return where, name


def load_module(where: str) -> ModuleType:
    """A file, or a module by its dotted name. Raises ConfigError with what it raised."""
    try:
        if not where.endswith(".py"):
            # `mrl` and `pytest` put the current folder at different places; a test's module is found from it.
            if (here := os.getcwd()) not in sys.path:
                sys.path.append(here)
            return importlib.import_module(where)
        return _from_file(Path(where).expanduser().resolve())
    except Exception as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"evaluation_test: {where} does not import: {type(error).__name__}: {error}") from error


def _from_file(path: Path) -> ModuleType:
    """Once in a process; one that is a module already, imported by its name, is that one."""
    if not path.is_file():
        raise ConfigError(f"evaluation_test: there is no file {path}")
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and os.path.isabs(file) and Path(file) == path and module.__name__ != "__main__":
            return module
    return _loaded(path)


@functools.cache
def _loaded(path: Path) -> ModuleType:
    name = f"{_OWN}{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # what it imports of its neighbours, as pytest does
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _listed(found: dict[str, EvaluationTest]) -> str:
    return ", ".join(found) or "no function with @evaluation_test"
