"""From what a user writes under `reward_funcs` to rewards that can be called."""

from __future__ import annotations

import ast
import copy
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from mrl.errors import ConfigError, ModelError, RewardError
from mrl.rewards.base import Code, Reward
from mrl.rewards.combine import check_weights
from mrl.rewards.function_reward import FunctionReward
from mrl.rewards.members import REWARDS
from mrl.rewards.spec import is_model, names_model, with_options
from mrl.sandbox.base import Limits, Sandbox

RewardSpec = str | Mapping[str, Any] | Callable[..., Any] | Reward
FORMS = (
    "a registered name, 'path/to/file.py:function', 'package.module:function', a function, a classifier by its folder "
    "or Hub id (OWNER/NAME), or {name: {option: value}}"
)
_SOURCE = "__mrl_source__"
"""In a module that was loaded from a file: what the file held."""


def resolve_rewards(
    specs: RewardSpec | list[RewardSpec] | None,
    weights: Sequence[float] | None = None,
    *,
    sandbox: Callable[[], Sandbox] | None = None,
    limits: Limits | None = None,
    timeout: float | None = 60.0,
    processing_classes: Any = None,
) -> list[Reward]:
    """The rewards that `specs` names; `None` means `["sandbox"]`: code tests, 0 or 1.

    weights: checked, one per reward. sandbox: makes the sandbox of rewards that run code; called only when one does.
    limits: of each program there. timeout: seconds for one call of a reward function. processing_classes: tokenizers of
    the models among `specs`, one (or None) per reward. Equal names get the suffixes `_2`, `_3` … Raises RewardError
    naming the spec and what would work, ConfigError for a reward's own options, ModelError.
    """
    items = ["sandbox"] if specs is None else list(specs) if isinstance(specs, list | tuple) else [specs]
    if not items:
        raise RewardError(f"reward_funcs: the list is empty; give {FORMS}, or leave it out for code tests")
    tokenizers = _one_each(processing_classes, len(items))
    rewards = [
        _resolve(spec, {"sandbox": sandbox, "limits": limits, "tokenizer": tokenizer}, timeout)
        for spec, tokenizer in zip(items, tokenizers, strict=True)
    ]
    rewards = _with_distinct_names(rewards)
    check_weights(weights, rewards)
    return rewards


def check_columns(rewards: list[Reward], columns: Iterable[str]) -> None:
    """Raises RewardError when a reward needs a dataset column that is not among `columns`."""
    columns = list(columns)
    for reward in rewards:
        check = getattr(reward, "check_columns", None)
        if check is not None:
            check(columns)


def _one_each(processing_classes: Any, count: int) -> list[Any]:
    """A tokenizer, or None, per reward."""
    if processing_classes is None:
        return [None] * count
    given = list(processing_classes) if isinstance(processing_classes, list | tuple) else [processing_classes]
    if len(given) != count:
        raise RewardError(
            f"reward_processing_classes: {len(given)} for {count} reward_funcs; give one each, None for those that are "
            "no models"
        )
    return given


def _resolve(spec: RewardSpec, made_with: dict[str, Any], timeout: float | None) -> Reward:
    """made_with: what a class may take, by the name of its parameter."""
    named = with_options(spec)
    if named is not None:
        member = _find(named[0])
        if not inspect.isclass(member) or not hasattr(member, "score"):
            raise RewardError(f"reward_funcs: {named[0]!r} takes no options; give the name alone")
        return _construct(member, named[0], made_with, named[1])
    if is_model(spec) or (isinstance(spec, str) and spec not in REWARDS.names() and _may_be_model(spec)):
        return _construct(REWARDS.get("classifier"), "classifier", made_with, {"model": spec})
    member = _find(spec) if isinstance(spec, str) else spec
    if inspect.isclass(member):
        if not hasattr(member, "score"):
            raise RewardError(f"reward_funcs: {_show(spec)} is a class without `score`; give {FORMS}")
        return _construct(member, _show(spec), made_with, {})
    if hasattr(member, "score") and hasattr(member, "name"):
        return member
    if not callable(member):
        raise RewardError(f"reward_funcs: {_show(spec)} is a {type(member).__name__}, not callable; give {FORMS}")
    return FunctionReward(member, timeout=timeout)


def _may_be_model(spec: str) -> bool:
    return ":" not in spec and not spec.endswith(".py") and names_model(spec)


def _construct(member: Callable[..., Any], shown: str, made_with: dict[str, Any], options: dict[str, Any]) -> Reward:
    accepted = inspect.signature(member).parameters
    arguments = {name: value for name, value in made_with.items() if name in accepted and value is not None}
    if "sandbox" in arguments:
        arguments["sandbox"] = arguments["sandbox"]()
    try:
        return member(**(arguments | options))
    except TypeError as error:
        raise RewardError(f"reward_funcs: {shown} could not be made: {error}") from error
    except (ConfigError, ModelError) as error:
        raise type(error)(f"reward_funcs: {shown}: {error}") from None


def reward_paths(name: str) -> tuple[str, ...]:
    """The options of a reward that may name local files."""
    paths: tuple[str, ...] = getattr(_find(name), "paths", ())
    return paths


def reward_code(name: str, options: dict[str, Any]) -> Code | None:
    """The Python file that a reward's options name, if any. Raises ConfigError."""
    code: Callable[[dict[str, Any]], Code | None] | None = getattr(_find(name), "code", None)
    return None if code is None else code(options)


def split_file(spec: str) -> tuple[Path, str] | None:
    """File and function of `path/to/file.py:function`; None for what has another form."""
    where, _, name = spec.rpartition(":")
    is_file = name and (where.endswith(".py") or os.sep in where)
    return (Path(where).expanduser(), name) if is_file else None


def _find(spec: str) -> Any:
    where, colon, name = spec.rpartition(":")
    if colon and where and name:
        found = split_file(spec)
        module = _load_file(found[0], spec) if found is not None else _import(where, spec)
        return _attribute(module, name, spec, where)
    if spec.endswith(".py"):
        known = ", ".join(_functions_in_file(Path(spec).expanduser())) or "none found"
        raise RewardError(
            f"reward_funcs: {spec!r} does not say which function; write '{spec}:function' (functions there: {known})"
        )
    try:
        return REWARDS.get(spec)
    except ConfigError as error:
        raise RewardError(f"{error}; or give {FORMS.removeprefix('a registered name, ')}") from None


def _load_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise RewardError(f"reward_funcs: {spec!r}: no file {path} (looked in {Path.cwd()}){_near_files(path)}")
    path = path.resolve()
    source = path.read_bytes()
    name = f"_mrl_rewards_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    loaded = sys.modules.get(name)
    if loaded is not None and vars(loaded).get(_SOURCE) == source:  # as an import: run once, until it is edited
        return loaded
    if str(path.parent) not in sys.path:  # last, so that it shadows nothing: the file may import its neighbours
        sys.path.append(str(path.parent))
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        # As it is now: an import could take compiled code of a second ago, and would leave some in the user's folder.
        exec(compile(source, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise RewardError(f"reward_funcs: {spec!r} does not import: {_cause(error, str(path))}") from error
    setattr(module, _SOURCE, source)
    return module


def _import(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise RewardError(
                f"reward_funcs: {spec!r}: there is no module {error.name!r}; install it, or give the file:"
                " 'path/to/file.py:function'"
            ) from None
        raise RewardError(f"reward_funcs: {spec!r} does not import: {_cause(error, None)}") from error
    except (Exception, SystemExit) as error:
        raise RewardError(f"reward_funcs: {spec!r} does not import: {_cause(error, None)}") from error


def _attribute(module: ModuleType, name: str, spec: str, where: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    functions = [
        key for key, value in vars(module).items() if inspect.isroutine(value) and value.__module__ == module.__name__
    ]
    close = difflib.get_close_matches(name, functions, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise RewardError(
        f"reward_funcs: {spec!r}: {where} has no function {name!r}{hint}"
        f" (functions there: {', '.join(functions) or 'none'})"
    )


def _cause(error: BaseException, path: str | None) -> str:
    """Exception, message and the line of the user's file, in one line."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, SyntaxError):
        return text  # its message has file and line
    frames = [f for f in traceback.extract_tb(error.__traceback__) if path is None or f.filename == path]
    frames = [f for f in frames if "importlib" not in f.filename and f.filename != __file__]
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})" if frames else text


def _functions_in_file(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _near_files(path: Path) -> str:
    folder = path.parent
    names = sorted(p.name for p in folder.glob("*.py")) if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {str(folder / close[0])!r}?" if close else ""


def _with_distinct_names(rewards: list[Reward]) -> list[Reward]:
    taken: set[str] = set()
    distinct = []
    for reward in rewards:
        name, number = reward.name, 1
        while name in taken:
            number += 1
            name = f"{reward.name}_{number}"
        taken.add(name)
        if name != reward.name:
            reward = copy.copy(reward)  # the user's own object keeps its name
            reward.name = name
        distinct.append(reward)
    return distinct


def _show(spec: Any) -> str:
    text = repr(spec)
    return text if len(text) <= 80 else text[:77] + "..."
