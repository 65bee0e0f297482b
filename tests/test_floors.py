"""Who may import whom: every room of the package has its place, and imports lead down.

All imports count: those within functions and those for types only, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FLOORS: dict[int, list[str]] = {
    1: ["types", "errors", "registry", "system", "algorithms", "starter", "data", "config"],
    2: ["store", "weights", "tracking", "sandbox", "models", "rewards", "environments", "modeling", "engines"],
    3: ["backends", "sync"],
    4: ["experience", "mismatch", "actor", "workers"],
    5: ["rollouts", "server"],
    6: ["loop", "simple", "evals"],
    7: ["trainer", "trl", "mrl", "logs", "cli", "__main__", "app", "train"],
}
"""Rooms by floor, the package's own `__init__` being `mrl`. A room may import those of lower floors, and those to its
left."""

PLACES = {room: (floor, at) for floor, rooms in FLOORS.items() for at, room in enumerate(rooms)}

Line = tuple[str, int, str]
"""A module that imports, the line, and the module that is imported."""


def modules_of(root: Path) -> dict[str, Path]:
    """Every module below `root / "mrl"` by its dotted name."""
    found = {}
    for path in sorted(root.glob("mrl/**/*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(modules: dict[str, Path]) -> Iterator[Line]:
    """What each of the modules imports of the others, wherever it does. A name that is a module counts as it."""
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                source = ".".join([*above, node.module] if node.module else above)
                named = [f"{source}.{alias.name}" for alias in node.names]
                named = [one if one in modules else source for one in named]
            else:
                continue
            for target in dict.fromkeys(named):
                if target in modules and target != name:
                    yield name, node.lineno, target


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def upward(lines: Sequence[Line]) -> list[str]:
    """What leads to a higher room, as text."""
    return [
        f"{name}, line {number}, imports {target}: {room_of(target)} is above {room_of(name)}"
        for name, number, target in lines
        if room_of(name) != room_of(target) and PLACES[room_of(target)] > PLACES[room_of(name)]
    ]


def circles(lines: Sequence[Line]) -> list[str]:
    """Imports that lead back to where they began, as text: one for each that closes a circle."""
    targets: dict[str, list[tuple[int, str]]] = {}
    for name, number, target in lines:
        targets.setdefault(name, []).append((number, target))
    found, done = [], set()

    def follow(name: str, way: list[str]) -> None:
        for number, target in targets.get(name, []):
            if target in way:
                around = " -> ".join([*way[way.index(target) :], target])
                found.append(f"{name}, line {number}, imports {target}, which closes the circle {around}")
            elif target not in done:
                follow(target, [*way, target])
        done.add(name)

    for name in targets:
        if name not in done:
            follow(name, [name])
    return found


def test_every_room_has_a_place() -> None:
    rooms = {room_of(module) for module in modules_of(ROOT)}
    assert rooms == set(PLACES), "a new room needs a place in FLOORS, one that is gone leaves it"


def test_imports_lead_down() -> None:
    found = upward(list(imports(modules_of(ROOT))))
    assert not found, "\n".join(found)


def test_no_circles() -> None:
    found = circles(list(imports(modules_of(ROOT))))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "import mrl.loop.schedule",
        "from mrl.loop.schedule import Taken",
        "from mrl.loop import schedule",
        "def late():\n    from mrl.loop import schedule",
        "if TYPE_CHECKING:\n    from mrl.loop.schedule import Taken",
        "from ..loop import schedule",
        "from ..loop.schedule import Taken",
    ],
)
def test_every_kind_of_import_is_seen(tmp_path: Path, line: str) -> None:
    write(tmp_path, {"store/read.py": f"x = 1\n{line}\n", "loop/schedule.py": "from mrl.store.read import x\n"})
    lines = list(imports(modules_of(tmp_path)))
    at = 3 if "\n" in line else 2
    assert upward(lines) == [f"mrl.store.read, line {at}, imports mrl.loop.schedule: loop is above store"]
    assert len(circles(lines)) == 1


def test_a_circle_through_several_modules_is_told(tmp_path: Path) -> None:
    write(
        tmp_path,
        {f"store/{here}.py": f"from mrl.store import {there}\n" for here, there in ("ab", "bc", "ca")}
        | {"store/d.py": "from mrl.store.a import b\n"},
    )
    assert circles(list(imports(modules_of(tmp_path)))) == [
        "mrl.store.c, line 1, imports mrl.store.a, which closes the circle mrl.store.a -> mrl.store.b -> mrl.store.c "
        "-> mrl.store.a"
    ]


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / "mrl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    (root / "mrl" / "__init__.py").touch()
