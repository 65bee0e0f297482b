"""A user's Python file on its way to workers elsewhere, with what it needs of its folder.

That folder may be somebody's home, so it is not sent whole: there go the file, the modules below the folder that it
imports, those that they import, and the files below it that one of them names in a text.
"""

from __future__ import annotations

import ast
import atexit
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Protocol

from mrl.system import scratch

MOST = 1 << 30
"""Bytes of a file that is sent because it is named."""


class Puts(Protocol):
    """What of a backend is needed here."""

    shares_disk: bool

    async def put(self, path: Path) -> str:
        """See Backend."""
        ...


async def put_code(backend: Puts, file: Path, root: Path | None = None) -> str:
    """Bring a Python file to where workers can read it, and return its path there. root: the folder from which it
    imports what is sent with it; None = its own. Raises OSError."""
    file = file.expanduser().resolve()
    root = file.parent if root is None else root.resolve()
    needed = [file] if backend.shares_disk else needed_files(file, root)
    if needed == [file]:
        return await backend.put(file)
    there = await backend.put(_together(needed, root))
    return f"{there}/{file.relative_to(root)}"


def needed_files(file: Path, root: Path) -> list[Path]:
    """The file itself, and what it needs of the files below `root`, in a fixed order. Nothing is run."""
    found, left = {file}, [file]
    while left:
        one = left.pop()
        if one.suffix != ".py":
            continue
        try:
            tree = ast.parse(one.read_bytes())
        except (OSError, SyntaxError, ValueError):  # importing it says what is wrong
            continue
        for path in [*_imported(tree, one, root), *_named(tree, {one.parent, root}, root)]:
            if path not in found:
                found.add(path)
                left.append(path)
    return sorted(found)


def _imported(tree: ast.AST, file: Path, root: Path) -> Iterator[Path]:
    """Modules below `root`, and the packages that they are in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(root, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = root if not node.level else file.parents[node.level - 1]
            source = f"{node.module}." if node.module else ""
            names = [(start, f"{source}{alias.name}") for alias in node.names]
        else:
            continue
        for start, name in names:
            folder = start
            for part in name.split("."):
                for path in (folder / part / "__init__.py", folder / f"{part}.py"):
                    if path.is_file() and path.is_relative_to(root):
                        yield path
                folder /= part
    for folder in file.parents:
        if not folder.is_relative_to(root) or folder == root:
            break
        if (package := folder / "__init__.py").is_file():
            yield package


def _named(tree: ast.AST, folders: set[Path], root: Path) -> Iterator[Path]:
    """Files whose names are texts in the program; hidden ones are not meant."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or not 0 < len(node.value) < 256:
            continue
        for folder in folders:
            try:
                path = (folder / node.value).resolve()
                parts = path.relative_to(root).parts
                if path.is_file() and path.stat().st_size <= MOST and not any(part.startswith(".") for part in parts):
                    yield path
            except (OSError, ValueError):  # a text that is no path, or one of another place
                continue


def _together(files: list[Path], root: Path) -> Path:
    """A folder with these files at their places below `root`: the same one for the same content."""
    contents = [(str(path.relative_to(root)), path.read_bytes()) for path in files]
    digest = hashlib.blake2b(digest_size=8)
    for name, content in contents:
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    folder = _scratch() / digest.hexdigest() / root.name
    if not folder.exists():
        partial = folder.with_name(f"{root.name}.partial")
        for name, content in contents:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            (partial / name).write_bytes(content)
        partial.rename(folder)
    return folder


@cache
def _scratch() -> Path:
    """Of this process, and gone after it."""
    folder = scratch.make("code")
    atexit.register(scratch.remove, folder)
    return folder
