"""The command line's flags, made from the config: same names, same types, same documentation."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Required, TypedDict, get_args

import tyro
import yaml

from mrl.config import OrchestratorConfig, flat_fields, load_recipe, nest
from mrl.config.dialects import PYTHON_ONLY
from mrl.config.recipe import located
from mrl.config.section import unknown_option
from mrl.errors import ConfigError, MRLError
from mrl.system.yaml_values import yaml_numbers

Groups = Mapping[str, tuple[str, Iterable[str]]]
"""Title → (a sentence, flat names of options): how a command's help shows them."""
RECIPES = Path(__file__).parents[1] / "recipes"

FLAG_TYPES: dict[str, Any] = {
    # In Python these take objects too; on the command line, names.
    "reward_funcs": list[str],
    "eval_dataset": str,
    "rename": list[str],
    "chat_template_kwargs": list[str],
    "rollout_options": list[str],
    "tools": list[str],
    "environment_factory": list[str],
    "rollout_func": str,
    "evaluation_test": str,
    "sandbox_options": list[str],
    "backend_options": list[str],
    "trl_args": list[str],
}
FLAG_HELP = {
    "reward_funcs": "One or several of: `sandbox` (run the tests: 0 or 1), `sandbox_partial` (fraction passed), "
    "`math_verify` (equal to the column `answer`), `reasoning_gym` (its tasks' verifier), `file.py:function`, "
    "`package.module:function`, a sequence classifier by its Hub id or folder, a YAML file with `judge: {…}` "
    "(docs/judges.md). None = the rollout source's or the dataset's own where they have one, else `sandbox`.",
    "rename": "Columns to rename, each as `old=new`; reward functions see the new names.",
    "chat_template_kwargs": "What the chat template gets besides messages and tools, each as `key=value` (values as in "
    "YAML), or all as one JSON object, e.g. `enable_thinking=false` for Qwen3.",
    "rollout_options": "The source's own options, each as `key=value` (values as in YAML), or all as one JSON object.",
    "tools": "Functions that the policy may call, typed and with a docstring: `file.py:function`, "
    "`package.module:function`; or MCP servers: `mcp:http://HOST/mcp`, `mcp:COMMAND`.",
    "environment_factory": "A class with `reset` whose other methods are tools, `file.py:Class`, or the name of one "
    "(`mrl env list`); or several by the column `environment`, each as `name=file.py:Class`.",
    "rollout_func": "A function that makes all rollouts of a step, as TRL takes it: `file.py:function` or "
    "`package.module:function`; docs/rollout-func.md.",
    "evaluation_test": "A test with `@evaluation_test`, which brings the rows, how they are attempted, and the score: "
    "`my_eval.py`, `my_eval.py:name` or a module's name; docs/evaluation-tests.md.",
    "sandbox_options": "Arguments of the sandbox, each as `key=value` (values as in YAML), or all as one JSON object, "
    "e.g. `slots=4 modules=[numpy]`; docs/sandbox.md lists them.",
    "backend_options": "Options of the backend's own, each as `key=value` (values as in YAML), or all as one JSON "
    "object.",
    "trl_args": "With `mode: simple`: further options of TRL's config for that trainer, by TRL's names, each as "
    "`key=value`, or all as one JSON object; those that mrl has an option for are set by that one.",
}
OBJECTS = {
    "chat_template_kwargs": "enable_thinking=false",
    "rollout_options": "max_turns=8 tools=[search]",
    "sandbox_options": "slots=4 modules=[numpy]",
    "backend_options": "key=value",
    "trl_args": "packing=true max_length=512",
}
"""Options that are dicts, with an example."""
METAVARS = {"str | None": "STR", "int | None": "INT", "float | None": "FLOAT", "list[float] | None": "FLOAT ..."}
"""Where an option's type would be shown as `{None}|STR`: its text says what None means."""
ALIASES = {"dataset_name": ["--dataset"], "dataset_split": ["--split"]}


def parse(
    prog: str,
    description: str,
    argv: list[str],
    *,
    options: Iterable[str] | Groups | None = None,
    extra: dict[str, Any] | None = None,
    defaults: dict[str, Any] | None = None,
    helps: dict[str, str] | None = None,
    basics: Groups | None = None,
) -> dict[str, Any]:
    """The flags given on a command line, by name; those not given are absent.

    options: the config's flat names this command takes, in groups of its own or else by the config's sections; None =
    all. extra: further arguments, as annotated types. defaults: what the command uses where its default is not the
    config's, shown in the help. helps: what an option means to this command, where the config's sentence does not say
    that. basics: all that --help shows; --help-all then shows everything. Exits with 2 on a wrong flag, with 0 after
    a help.
    """
    if basics is not None and "--help-all" in argv:
        argv = ["--help"]
    elif basics is not None and {"-h", "--help"} & set(argv):
        argv, options = ["--help"], basics
    wanted = options if isinstance(options, Mapping) else _by_section(flat_fields() if options is None else options)
    # Under names no argument has: `mrl eval` takes a `model`, and there is a section of that name.
    groups = {
        f"options of {title}": _group(title, text, names, (helps or {}), (defaults or {}))
        for title, (text, names) in wanted.items()
    }
    flags = TypedDict("flags", {**(extra or {}), **groups}, total=False)  # type: ignore[misc]
    options_here = [name for _, names in wanted.values() for name in names if name not in PYTHON_ONLY]
    aliases = (alias[2:] for name in options_here for alias in ALIASES.get(name, []))
    _refuse_unknown(
        f"{prog} --help{'-all' * (basics is not None)}", argv, {*options_here, *_names(extra or {}), *aliases}
    )
    config = (tyro.conf.OmitArgPrefixes,)
    parsed: dict[str, Any] = dict(tyro.cli(flags, prog=prog, description=description, args=argv, config=config))
    given: dict[str, Any] = {name: value for name, value in parsed.items() if name not in groups}
    for section in groups:
        given.update(parsed.get(section, {}))
    if "rename" in given:
        given["rename"] = dict(_pair(text) for text in given["rename"])
    for name, example in OBJECTS.items():
        if name in given:
            given[name] = key_values(name, given[name], example)
    if "environment_factory" in given:
        given["environment_factory"] = _factories(given["environment_factory"])
    return given


def config_from(recipe: str | None, given: dict[str, Any]) -> OrchestratorConfig:
    """Defaults, then the recipe, then the flags. Raises ConfigError."""
    with located(find_recipe(recipe) if recipe else None, given):
        return OrchestratorConfig.from_flat(**flat_options(recipe, given))


def flat_options(recipe: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """The recipe's options by flat name, with the flags in their place where both say something. Raises ConfigError."""
    path = find_recipe(recipe) if recipe else None
    try:
        with located(path):
            nested = nest(load_recipe(path)[0] if path else {})
    except MRLError as error:
        error.worded = True  # what is wrong with a recipe is said in its own words
        raise
    return {name: value for section in nested.values() for name, value in section.items()} | given


def find_recipe(name: str) -> Path:
    """The file called `name`, or the shipped recipe of that name. Raises ConfigError."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    shipped = {file.stem: file for file in RECIPES.glob("*.yaml")}
    if name in shipped:
        return shipped[name]
    near = [str(file) for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(name, [*shipped, *near], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"recipe {name!r}: no such file{hint} (shipped recipes: {', '.join(shipped)})")


def argument(
    description: str,
    *,
    default: str | None = None,
    positional: bool = False,
    required: bool = False,
    kind: Any = str,
    aliases: list[str] | None = None,
    metavar: str | None = None,
) -> Any:
    """An argument of a command that is no option of a run. metavar: what stands for its value in the help."""
    hint = "(required)" if required else "" if default is None else f"(default: {default})"
    markers = [tyro.conf.Positional] if positional else []
    shown = tyro.conf.arg(help=description, help_behavior_hint=hint, aliases=aliases, metavar=metavar)
    marked = Annotated[(kind, *markers, shown)]
    return Required[marked] if required else marked


def key_values(name: str, texts: list[str], example: str) -> dict[str, Any]:
    """`key=value` pairs with values as in YAML, or one JSON object (which is YAML too). Raises ConfigError."""
    hint = f"e.g. --{name.replace('_', '-')} {example}, or one JSON object"
    pairs: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        try:
            if text.lstrip().startswith("{"):
                found = yaml.safe_load(text)
                pairs |= {str(key): yaml_numbers(inner) for key, inner in found.items()}
                continue
            if not equals or not key.isidentifier():
                raise ConfigError(f"{name}: {text!r} is not of the form key=value; {hint}")
            pairs[key] = yaml_numbers(yaml.safe_load(value))
        except yaml.YAMLError:
            raise ConfigError(f"{name}: {text!r} cannot be read; {hint}") from None
    return pairs


def _by_section(names: Iterable[str]) -> Groups:
    """The config's own groups: its sections, each with its first sentence."""
    fields = flat_fields()
    groups: dict[str, tuple[str, list[str]]] = {}
    for name in names:
        section = fields[name][0]
        text = inspect.getdoc(OrchestratorConfig.model_fields[section].annotation) or ""
        groups.setdefault(section, (text.split("\n\n")[0], []))[1].append(name)
    return groups


def _group(title: str, text: str, names: Iterable[str], helps: dict[str, str], defaults: dict[str, Any]) -> Any:
    fields = flat_fields()
    hints = {name: _annotation(name, fields[name][1], helps, defaults) for name in names if name not in PYTHON_ONLY}
    flags = TypedDict(title, hints, total=False)  # type: ignore[misc]
    return Annotated[flags, tyro.conf.arg(name=title, help=text)]


def _names(extra: dict[str, Any]) -> set[str]:
    """Names of arguments that are no options, with their aliases."""
    names = set(extra)
    for annotation in extra.values():
        for part in [annotation, *get_args(annotation)]:
            for mark in getattr(part, "__metadata__", ()):
                names |= {alias.lstrip("-").replace("-", "_") for alias in getattr(mark, "aliases", None) or ()}
    return names


def _refuse_unknown(listed_by: str, argv: list[str], names: set[str]) -> None:
    """Raise ConfigError for a flag there is not, which may be another trainer's name of one there is."""
    if any(token == "-h" or token.startswith("--help") for token in argv):
        return
    for token in argv:
        flag = re.fullmatch(r"--([A-Za-z][\w.-]*)(=.*)?", token, re.DOTALL)
        name = "" if flag is None else flag[1].replace("-", "_")
        if name and name not in names and name.removeprefix("no_") not in names and not name.startswith("tyro_"):
            raise ConfigError(unknown_option(name, name, sorted(names), listed_by))


def _annotation(name: str, field: Any, helps: dict[str, str], defaults: dict[str, Any]) -> Any:
    default = defaults.get(name, field.get_default(call_default_factory=True))
    shown = " ".join(map(str, default)) or "none" if isinstance(default, (list, dict)) else default
    return Annotated[
        FLAG_TYPES.get(name, field.annotation),
        tyro.conf.arg(
            help=helps.get(name, FLAG_HELP.get(name, " ".join((field.description or "").split()))),
            help_behavior_hint=f"(default: {shown})",
            aliases=ALIASES.get(name),
            metavar=METAVARS.get(str(field.annotation)),
        ),
    ]


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals or not old or not new:
        raise ConfigError(f"rename: {text!r} is not of the form old=new, e.g. --rename question=prompt")
    return old, new


def _factories(texts: list[str]) -> str | dict[str, str]:
    """One class, or several as `name=file.py:Class`. Raises ConfigError."""
    if len(texts) == 1 and "=" not in texts[0]:
        return texts[0]
    pairs = [text.partition("=") for text in texts]
    if wrong := [text for text, (name, equals, where) in zip(texts, pairs, strict=True) if not (name and where)]:
        raise ConfigError(f"environment_factory: {wrong[0]!r} is not of the form name=file.py:Class")
    return {name: where for name, _, where in pairs}
