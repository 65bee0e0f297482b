"""The judge: runs the tests as the ordinary Python they are, and says what became of each.

Its process is confined like the program's, for what the tests do with the program's data may take any time and memory.
It alone holds the channel on which results travel, and it believes nothing that the program says but what the tests
ask of it.
"""

from __future__ import annotations

import _socket
import ast
import builtins
import importlib.machinery
import inspect
import os
import random
import reprlib
import sys
import time
import types
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

from .. import protocol
from ..protocol import Kind
from . import mirrors, outputs, pytest_here, values
from .faults import is_ours
from .instrument import Watch, helpers, instrumented
from .link import Gone, Link
from .mirrors import LINK, Mirror
from .names import PROGRAM_MODULES, Names, Test
from .values import Refused

MAX_DETAIL = 1500
MAX_REPORT = 4_000_000
NOT_SET = "another test should have set it, and did not"

_short = reprlib.Repr()
_short.maxlevel = 4
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = _short.maxfrozenset = _short.maxdeque = 12
_short.maxstring = _short.maxother = 120
_short.maxlong = 60


def run_judge(plan: dict[str, Any], control: int, channel: int) -> None:
    """Never returns. plan: `tests` (texts), `outputs` (how, tolerance and wanted text of each test of an output),
    `report` (names whose values are asked for)."""
    try:
        tests = Tests(plan["tests"]) if plan["tests"] else None
    except BaseException as error:  # no program has said anything yet
        protocol.send(control, Kind.FAULT, f"{type(error).__name__}: {error}".encode("ascii", "backslashreplace")[:500])
        os._exit(1)
    notes = take_notes()
    judge_program(tests, plan["report"], control, channel, notes)
    supervisor = _socket.socket(fileno=control)
    while True:
        kind, body, rights = _next(supervisor)
        if kind is Kind.NEXT:
            (link,) = protocol.DESCRIPTOR.unpack(rights[0][2])
            os.dup2(link, channel)
            os.close(link)
            judge_program(tests, plan["report"], control, channel, notes)
        else:
            at, printed = protocol.parse(body)
            how, tolerance, wanted = plan["outputs"][at]
            detail = outputs.compare(how, tolerance, wanted, printed)
            protocol.send(control, Kind.COMPARED, protocol.dump([not detail, detail[:MAX_DETAIL], ""]))


def _next(supervisor: _socket.socket) -> tuple[Kind, bytes, list[Any]]:
    header, rights, _, _ = supervisor.recvmsg(protocol.HEADER.size, _socket.CMSG_SPACE(4))
    if not header:
        os._exit(0)
    header += protocol.read_exactly(supervisor.fileno(), protocol.HEADER.size - len(header))
    size, byte = protocol.HEADER.unpack(header)
    return protocol.kind_of(byte), protocol.read_exactly(supervisor.fileno(), size), rights


def take_notes() -> int:
    """The descriptor of the file that came in the place of a stdin, which is then empty."""
    notes = os.dup(0)
    reader, writer = os.pipe()
    os.dup2(reader, 0)
    os.close(reader)
    os.close(writer)
    return notes


def judge_program(tests: Tests | None, report: list[str], control: int, channel: int, notes: int) -> None:
    """All that the tests say of one program, to the supervisor. Ends the process where the program is gone."""
    said: list[str | None] = []
    again = False
    if tests is not None:
        judge = Judge(tests, channel)
        try:
            judge.begin()
            written = 0
            for at in range(len(tests.texts)):
                written += os.pwrite(notes, protocol.dump(judge.run(at)) + b"\n", written)
            said = [judge.report(name) for name in report]
        except Gone as gone:
            if gone.broke:
                protocol.send(control, Kind.BROKEN, str(gone).encode("ascii", "backslashreplace")[:500])
            os._exit(0)
        again = tests.pure and not judge.strained
    end = {"report": said, "again": again, "cpu": time.process_time()}
    protocol.send(control, Kind.END, protocol.dump(end))


class Tests:
    """The tests of one program after another, read once."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        prepare_modules(any("unittest" in text for text in texts))
        self.names = Names(texts)
        self.pure = self.names.are_pure()
        self.code = [_compiled(test) for test in self.names.tests]


def _compiled(test: Test) -> Any:
    """None where that cannot be done, which the test then says. (`return` outside a function is found only here.)"""
    if test.tree is not None:
        try:
            return compile(instrumented(test.tree), "<test>", "exec", 0, True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            test.tree, test.problem = None, f"not Python: {error}"
    return None


class Globals(dict[str, Any]):
    """The tests' names. One that nobody here knows is asked of the program."""

    judge: Judge

    def __missing__(self, name: str) -> Any:
        return self.judge.name(name)


class Judge:
    """Runs tests, one after the other, in one namespace."""

    def __init__(self, tests: Tests, channel: int) -> None:
        self.texts, self.names, self.code, self.at = tests.texts, tests.names, tests.code, 0
        self.strained = False
        """Whether this process has seen the end of its memory or stack."""
        self.link = Link(channel, self.surroundings)
        LINK[:] = [self.link]
        self.link.printed = self.take_printed
        self.watch = Watch(self.link.emptied)
        self.opened: dict[str, Any] = {}
        self.missing: set[str] = set()
        self.seeds: dict[str, tuple[Any, ...]] = {}
        SEEDS[:] = [self.seeds]
        module = _ProgramModule("__main__")
        sys.modules["__main__"] = module
        self.globals = Globals(__name__="__main__", __builtins__=builtins, **helpers(self.watch))
        self.globals.judge = self
        self.streams = sys.stdout, sys.stderr, sys.stdin, builtins.input, builtins.print

    def begin(self) -> None:
        """Wait for the program. Raises Gone."""
        wanted = [self.names.wanted + self.names.shadowing, self.names.offered]
        self.link.send(Kind.WANT, wanted)
        self.opened, missing = self.link.names()
        self.missing = set(missing)

    def run(self, at: int) -> list[Any]:
        """Whether test number `at` holds, why not, and `memory`, `refused` or `fault` where it is that. Raises Gone."""
        self.at = at
        self.watch.reset()
        test = self.names.tests[at]
        if test.tree is None or test.refused:
            return [False, test.problem or test.refused, "refused" if test.refused else ""]
        result: list[Any]
        try:
            before = set(self.globals)
            exec(self.code[at], self.globals)
            self.run_collected(test, set(self.globals) - before)
            lines = ", ".join(map(str, self.watch.nothing[:5]))
            result = [True, f"held over nothing: the loop in line {lines} had no items" if lines else "", ""]
        except pytest_here.Skipped as skipped:
            result = [True, f"skipped: {skipped}"[:MAX_DETAIL], ""]
        except BaseException as error:
            result = self.failure(error, test)
        if self.link.gone is not None:  # also where the test caught it
            raise self.link.gone
        return result

    def run_collected(self, test: Test, new: set[str]) -> None:
        """Test classes and functions that a test defines and does not run itself. Raises AssertionError."""
        unittest: Any = sys.modules.get("unittest")
        case = unittest.TestCase if unittest is not None else ()
        for name in sorted(new):
            found = self.globals[name]
            if isinstance(found, type) and issubclass(found, case) and not isinstance(found, Mirror):
                outcome = unittest.TestResult()
                faults = _faults_of(outcome)
                unittest.defaultTestLoader.loadTestsFromTestCase(found).run(outcome)
                bad = outcome.failures + outcome.errors + [(case, "passed") for case in outcome.unexpectedSuccesses]
                if bad:
                    raise AssertionError(f"{bad[0][0]}: {_last_line(bad[0][1])}") from next(iter(faults), None)
            elif isinstance(found, types.FunctionType) and name.startswith("test") and name not in test.used:
                for arguments in pytest_here.cases(found) if found.__code__.co_filename == "<test>" else ():
                    made = found(**arguments)
                    if inspect.iscoroutine(made):
                        import_module("asyncio").run(made)

    def name(self, name: str) -> Any:
        """A name that the tests use and have not set. Raises KeyError, Refused, Gone, and what the program raises."""
        if hasattr(builtins, name) or name.startswith("__"):
            if name in self.names.shadowing_of(self.at) and name in self.opened:
                return self.opened[name]
            raise KeyError(name)
        if name in self.names.library:
            return self.names.library[name]
        if not self.names.may_ask(name, self.at):
            raise NameError(f"name {name!r} is not defined: {NOT_SET}")
        if name in self.opened:
            return self.opened[name]
        return self.link.ask("name", name)

    def failure(self, error: BaseException, test: Test) -> list[Any]:
        kept = self.link.details.get(id(error))
        self.strained = self.strained or isinstance(error, MemoryError | RecursionError)
        flag = "memory" if kept is not None and isinstance(error, MemoryError) else "fault" if is_ours(error) else ""
        return [False, self.describe(error, test, kept[1] if kept else "")[:MAX_DETAIL], flag]

    def describe(self, error: BaseException, test: Test, said: str) -> str:
        """One or two lines: what stands in the test, what was raised, what was compared."""
        number, trace = 0, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == "<test>":
                number = trace.tb_lineno
            trace = trace.tb_next
        statement = _statement(self.texts[self.at], number)
        try:
            text = str(error)
        except BaseException:
            text = ""
        if type(error) is AssertionError and not said:
            got = f"; got {show(self.watch.got[0])}" if self.watch.got else ""
            return f"{statement}: false{got}" + (f" ({text})" if text else "")
        return f"{statement}: raised {said or f'{type(error).__name__}: {text}'.rstrip(': ')}"

    def report(self, name: str) -> str | None:
        """`repr` of a name's value, where that reads back as the same."""
        value = self.globals.get(name)
        try:
            text = repr(value)
            return text if len(text) <= MAX_REPORT and ast.literal_eval(text) == value else None
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return None

    # --- what the program has around it while it is asked

    def surroundings(self, link: Link) -> dict[str, Any]:
        around: dict[str, Any] = {}
        out, error, stdin, read, show_ = self.streams
        if sys.stdout is not out:
            around["out"] = True
        if sys.stderr is not error:
            around["err"] = True
        if sys.stdin is not stdin and hasattr(sys.stdin, "read") and hasattr(sys.stdin, "seek"):
            at = sys.stdin.tell()
            around["in"] = sys.stdin.read()
            sys.stdin.seek(at)
        if builtins.input is not read:
            around["input"] = link.encode(builtins.input)
        if builtins.print is not show_:
            around["print"] = link.encode(builtins.print)
        for name, arguments in self.seeds.items():
            around[name] = link.encode_items(arguments)
        self.seeds.clear()
        given = [name for name in self.missing if name in self.globals]
        if given:
            self.missing.difference_update(given)
            around["give"] = [[name, link.encode(self.globals[name])] for name in given]
        return around

    def take_printed(self, printed: list[Any]) -> None:
        out, error, read = printed
        if out:
            sys.stdout.write(str(out))
        if error:
            sys.stderr.write(str(error))
        if type(read) is int and read and sys.stdin is not self.streams[2]:
            sys.stdin.seek(sys.stdin.tell() + read)


SEEDS: list[dict[str, tuple[Any, ...]]] = []
"""Where the judge of this process keeps what its tests seeded `random` with."""


def prepare_modules(unit_tests: bool) -> None:
    """Modules that tests use, as they are here. Once a process."""
    warnings.simplefilter("ignore")
    values.add_numpy()
    sys.modules["pytest"] = pytest_here.module()
    sys.meta_path.append(_ProgramFinder())
    if unit_tests:
        import_module("unittest").main = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    for name, ask in (("signature", mirrors.signature), ("getsource", lambda value: mirrors.ask("source", value))):
        original = getattr(inspect, name)

        def asking(value: Any, *args: Any, _own: Any = original, _ask: Any = ask, **kwargs: Any) -> Any:
            return _ask(value) if LINK and id(value) in LINK[0].number_by_id else _own(value, *args, **kwargs)

        setattr(inspect, name, asking)
    random.seed = _noting("seed", random.seed)
    opened = builtins.open

    def open_(file: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int):  # the judge's own, named by the program
            raise Refused("not judgeable here, because the test opens a descriptor")
        return opened(file, *args, **kwargs)

    builtins.open = open_
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed = _noting("np_seed", numpy.random.seed)


def _noting(name: str, seed: Callable[..., Any]) -> Callable[..., Any]:
    """A test that seeds `random` means the program's draws too."""

    def noted(*args: Any) -> Any:
        if SEEDS:
            SEEDS[0][name] = args
        return seed(*args)

    return noted


class _ProgramFinder:
    """`from solution import f`, where nothing is called that."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        loader: Any = self  # duck-typed: importlib.abc would load a dozen modules into the fork-server
        return importlib.machinery.ModuleSpec(name, loader) if name in PROGRAM_MODULES else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _ProgramModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _ProgramModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return LINK[0].ask("name", name)
        except NameError as error:
            raise AttributeError(str(error)) from None


def show(value: Any) -> str:
    """`repr`, cut, for a log line; of the program's objects only the type."""
    if isinstance(type(value), Mirror):
        return f"a {type(value).__name__}"[:100]
    try:
        return _short.repr(value)[:300]
    except BaseException:  # too deep, or an int with more digits than Python prints
        return f"a {type(value).__name__}"


def _statement(text: str, number: int) -> str:
    """What is asserted in that line, or the line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assert) and node.lineno <= number <= (node.end_lineno or 0):
            return ast.unparse(node.test)[:500]
    lines = text.splitlines()
    return lines[number - 1].strip()[:300] if 0 < number <= len(lines) else "the test"


def _faults_of(outcome: Any) -> list[BaseException]:
    """A list of our own mistakes among the errors that a `unittest.TestResult` is told of."""
    found: list[BaseException] = []
    add = outcome.addError

    def add_error(case: Any, info: Any) -> None:
        if is_ours(info[1]):
            found.append(info[1])
        add(case, info)

    outcome.addError = add_error
    return found


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
