"""Messages that name options as their reader gives them: flags in a shell, arguments in Python; else as in recipes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import yaml

from mrl.config.orchestrator import flat_fields

PYTHON_ONLY = {"train_dataset", "vllm_args", "reward_processing_classes"}
"""Not on the command line; recipes can hold `vllm_args`."""
ARGUMENTS = ("tokenizer",)
"""What `MRLTrainer` takes besides the options."""
DICTS = (
    *("rename", "chat_template_kwargs", "rollout_options", "sandbox_options", "backend_options", "vllm_args"),
    "trl_args",
)
"""What stands behind them is a key."""
PLAIN = r"[\d.+-][\w.+-]*|true|false|\[.*|'.*"
SAID = ("use ", "set ", "with ", "needs ", "only with ", "by ", "to ", "and ", "or ", ", ", "(")
"""`model: of what` is an option only after one of these, `seed: 7` anywhere."""
VALUE = r"\[[^\]]*\]|\{[^}]*\}|'[^']*'|[\w./@+-]*\w"


def in_flags(message: str, keys: Collection[str] = ()) -> str:
    """`use max_tokens: 64` becomes `use --max-tokens 64`. keys: options that a recipe gives, which stay as they are."""

    def setting(name: str, value: str) -> str:
        if value in ("true", "false"):
            return _flag(name) if value == "true" else f"--no-{_flag(name)[2:]}"
        if value.startswith("["):
            value = " ".join(value[1:-1].split(", "))
        return f"{_flag(name)} {value}"

    return _reworded(
        message, {*keys, *PYTHON_ONLY}, subject=lambda name: f"{_flag(name)}:", setting=setting, bare=_flag, meant=_flag
    )


def in_python(message: str, given: Mapping[str, Any]) -> str:
    """`use max_tokens: 64` becomes `use max_tokens=64`. given: the arguments, of which the one at fault is shown."""

    def subject(name: str) -> str:
        shown = repr(given.get(name)) if isinstance(given.get(name), str | int | float) else ""
        return f"{name}={shown}:" if shown and len(shown) < 40 else f"{name}:"

    def setting(name: str, value: str) -> str:
        if value in ("true", "false") or value.startswith("["):
            return f"{name}={yaml.safe_load(value)!r}"
        quoted = value.startswith("'") or re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", value)
        return f"{name}={value}" if quoted else f"{name}={value!r}"

    return _reworded(message, (), subject=subject, setting=setting, bare=str, meant=lambda name: f"{name}=")


def _reworded(
    message: str,
    keep: Collection[str],
    *,
    subject: Callable[[str], str],
    setting: Callable[[str, str], str],
    bare: Callable[[str], str],
    meant: Callable[[str], str],
) -> str:
    def replace(match: re.Match[str]) -> str:
        name = match["subject"] or match["set"] or match["with"] or match["bare"] or match["meant"] or match["unknown"]
        if name in keep or (match["set"] and name in DICTS):
            return match[0]
        if match["subject"]:
            return subject(name)
        if match["set"]:
            prose = "_" not in name and not re.fullmatch(PLAIN, match["value"])
            if prose and not message[: match.start()].endswith(SAID):
                return match[0]
            return setting(name, match["value"])
        if match["with"]:
            return setting(name, match["amount"])
        if match["bare"]:
            return bare(name)
        return f"{match['verb'] or 'unknown option'} '{meant(name)}'"

    return _patterns().sub(replace, message)


@functools.cache
def _patterns() -> re.Pattern[str]:
    names = sorted([*flat_fields(), *ARGUMENTS], key=len, reverse=True)
    any_name, long_name = "|".join(names), "|".join(name for name in names if "_" in name)
    before, after = r"(?<![\w./'\"=`-])", r"(?![\w/'\"=`-]|\.\w)"
    return re.compile(
        rf"(?:^|(?<=;[ ]))(?P<subject>{any_name}):(?=\s)"
        rf"|{before}(?P<set>{any_name}):[ ](?P<value>{VALUE})(?!\S*[ ]->)"
        rf"|{before}(?P<with>{long_name})[ ]\((?P<amount>[\w.+-]+)\)"
        rf"|{before}(?P<bare>{long_name}){after}"
        rf"|(?P<verb>did[ ]you[ ]mean|it[ ]is[ ]called)[ ]'(?P<meant>{any_name})'"
        r"|unknown[ ]option[ ]'(?P<unknown>\w+)'"
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
