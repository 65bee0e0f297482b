"""What `mrl eval RUN` and `mrl sample RUN` take over from the run: how it was prompted, cut and scored, and on what."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrl.config import flat_fields
from mrl.data.files import BUILDERS
from mrl.data.sources import own_reward
from mrl.errors import ConfigError
from mrl.evals.run_models import PROMPTS_AND_LIMITS
from mrl.loop.resume import is_description, stored_options
from mrl.store.checkpoints import Checkpoint
from mrl.store.find import all_runs, shortest_name
from mrl.system.shell import command

SCORE = (
    *("reward_funcs", "reward_weights", "reward_timeout", "reward_trial"),
    *("sandbox", "sandbox_options", "sandbox_timeout", "sandbox_memory_mb"),
)
ROLLOUT = (
    *("rollout_source", "rollout_options", "tools", "environment_factory", "rollout_func", "serve", "serve_token_env"),
    *("max_turns", "max_rollout_tokens", "step_timeout", "rollout_timeout"),
)
VLLM = (
    *("vllm_python", "tensor_parallel_size", "gpu_memory_utilization", "vllm_kv_cache_gb", "vllm_enforce_eager"),
    *("vllm_max_num_seqs", "vllm_args", "vllm_start_timeout", "vllm_stall_timeout"),
)
HAVE_HELD_OUT = ("tiny-code", "reasoning_gym", "humaneval")
"""Sources of tasks that have others than those a run was trained on."""
_WIDEST = 60


@dataclass
class Inherited:
    """A run's own options that a command takes over."""

    run: Path
    checkpoint: Checkpoint
    options: dict[str, Any] = field(default_factory=dict)
    """By flat name; none that was given on the command line."""
    notes: list[str] = field(default_factory=list)
    """What was not taken over although the run has it, and why."""

    def missing_files(self) -> list[str]:
        """Its tasks' and rewards' files that are not here: the record names them as the command line did."""
        functions, dataset = self.options.get("reward_funcs") or [], self.options.get("dataset_name") or ""
        names = [name for name in _listed(functions) if isinstance(name, str)]
        files = [name.rpartition(":")[0] for name in names if ".py:" in name]
        files += [name for name in names if name.endswith((".yaml", ".yml"))]
        files += [dataset] if Path(dataset).suffix in (*BUILDERS, ".gz") else []
        return [name for name in files if not Path(name).expanduser().exists()]

    def said(self, defaults: dict[str, Any]) -> str:
        """One line: where they come from, and those that differ from the command's `defaults`, as flags."""
        fields = flat_fields()
        differing = [
            _flag(name, value)
            for name, value in self.options.items()
            if value != defaults.get(name, fields[name][1].get_default(call_default_factory=True))
        ]
        source = f"{self.run.name}, step {self.checkpoint.step}"
        return f"as in the run ({source}; flags override): {' '.join(differing) or 'the defaults'}"


def similar_run(name: str) -> str | None:
    """The run whose name is nearest to one that is not there."""
    close = difflib.get_close_matches(Path(name.rpartition("@")[0] or name).name, [run.name for run in all_runs()], n=1)
    return close[0] if close else None


def eval_command(run: Path) -> str | None:
    """The shortest command that measures a run; None where it would have to be told what the record does not hold.

    On its held-out tasks where it is known to have any, else on those it was trained on. Raises ConfigError.
    """
    recorded = stored_options(run)
    if (test := recorded.get("evaluation_test")) is not None:
        return None if is_description(test) else command("mrl", "eval", test, "--model", shortest_name(run))
    held_out = any(recorded.get(name) for name in ("eval_dataset", "eval_split"))
    held_out = held_out or str(recorded.get("dataset_name")).partition(":")[0] in HAVE_HELD_OUT
    given = {} if held_out else {"dataset_split": _split(recorded)}
    try:
        _tasks(run, recorded, given)
        _score(run, recorded, given)
    except ConfigError:
        return None
    return command("mrl", "eval", shortest_name(run), *(["--split", given["dataset_split"]] if given else []))


def inherit_prompts(run: Path, checkpoint: Checkpoint, given: dict[str, Any]) -> Inherited:
    """How the run was prompted and where completions ended, for what was not `given`. Raises ConfigError."""
    recorded = stored_options(run)
    if recorded.get("max_tokens") is None and "max_completion_length" in recorded:  # its completions ended there
        recorded["max_tokens"] = recorded["max_completion_length"]
    inherited = Inherited(run, checkpoint)
    _take(inherited, recorded, given, PROMPTS_AND_LIMITS)
    if given.get("prompt_format") == "text":  # a system message goes with `chat` only
        inherited.options.pop("system_prompt", None)
    return inherited


def inherit_all(run: Path, checkpoint: Checkpoint, given: dict[str, Any]) -> Inherited:
    """As `inherit_prompts`, and the run's tasks (held-out ones where it has any), score and engine. Raises ConfigError.

    What was given in Python is not in a run's record: a reward or dataset that is needed then has to be given again.
    """
    recorded = stored_options(run)
    inherited = Inherited(run, checkpoint)
    inherited.options |= _tasks(run, recorded, given)
    _take(inherited, recorded, given, ("prompt_column", "rename"))
    inherited.options |= _score(run, recorded, given)
    inherited.options |= _attempts(run, recorded, given)
    inherited.options |= inherit_prompts(run, checkpoint, given).options
    _take_engine(inherited, recorded, given)
    return inherited


def _take(inherited: Inherited, recorded: dict[str, Any], given: dict[str, Any], names: tuple[str, ...]) -> None:
    inherited.options |= {name: recorded[name] for name in names if name in recorded and name not in given}


# --- the tasks --------------------------------------------------------------------------------------------------------


def _tasks(run: Path, recorded: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    if recorded.get("evaluation_test") is not None and "dataset_name" not in given:
        test = "TEST" if is_description(recorded["evaluation_test"]) else recorded["evaluation_test"]
        raise ConfigError(
            f"{run}: it was trained with an evaluation test; measure it with that: mrl eval {test} --model {run.name}"
        )
    trained, held_out, split = (recorded.get(name) for name in ("dataset_name", "eval_dataset", "eval_split"))
    asked, found = given.get("dataset_name"), {}
    if asked is None:
        found["dataset_name"] = source = held_out or trained
        if source is None or is_description(source):
            raise ConfigError(
                f"{run}: its tasks were given in Python and are not in its record; say which tasks to measure it on, "
                "e.g. --dataset held_out.jsonl"
            )
        asked = source
    if held_out is not None and asked == held_out:
        found["dataset_split"] = split or "train"
    elif asked == trained and split and held_out is None:
        found["dataset_split"] = split
    elif "dataset_name" in found and "dataset_split" not in given and held_out_split(asked) == _split(recorded):
        raise ConfigError(
            f"{run}: it has no held-out tasks. Name some with --dataset, or measure it on those it was trained on: "
            f"{_flag('dataset_name', asked)} {_flag('dataset_split', _split(recorded))}"
        )
    if asked in (trained, held_out) and recorded.get("dataset_config"):
        found["dataset_config"] = recorded["dataset_config"]
    return {name: value for name, value in found.items() if name not in given}


def held_out_split(dataset: str | None) -> str:
    """The shipped tasks' `heldout`, all of a local file or folder, the Hub's `test`."""
    if dataset == "tiny-code":
        return "heldout"
    return "train" if dataset and Path(dataset).expanduser().exists() else "test"


def was_trained_on(run: Path, options: dict[str, Any]) -> bool:
    """Whether the tasks of `options` are those the run was trained on."""
    recorded = stored_options(run)
    return (options["dataset_name"], options["dataset_split"]) == (recorded.get("dataset_name"), _split(recorded))


def _split(recorded: dict[str, Any]) -> str:
    return str(recorded.get("dataset_split", "train"))


# --- the score --------------------------------------------------------------------------------------------------------


def _score(run: Path, recorded: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    found = {name: recorded[name] for name in SCORE if name in recorded and name not in given}
    if "reward_funcs" in given:
        found.pop("reward_weights", None)
    elif _brings_another_reward(recorded, given):
        for name in ("reward_funcs", "reward_weights"):
            found.pop(name, None)
    elif is_description(functions := recorded.get("reward_funcs")):
        raise ConfigError(
            f"{run}: its reward was a Python object ({_joined(functions)}), which is not in its record; say what to "
            f"score with, {_importable(functions) or 'e.g. --reward-funcs my_rewards.py:accuracy'}"
        )
    if "sandbox" in given:
        found.pop("sandbox_options", None)
    return found


def _brings_another_reward(recorded: dict[str, Any], given: dict[str, Any]) -> bool:
    """Whether the tasks asked for have a reward of their own, or the run's reward was that of its own tasks."""
    asked, trained = given.get("dataset_name"), recorded.get("dataset_name")
    if asked is None or asked == trained:
        return False
    own = own_reward(trained) if isinstance(trained, str) else None
    return own_reward(asked) is not None or (own is not None and recorded.get("reward_funcs") == own)


def _importable(functions: Any) -> str | None:
    """The flag that names recorded functions by their files, where all are functions of a file that is still there."""
    names = []
    for described in _listed(functions):
        match = re.fullmatch(r"<[\w.]+?\.(\w+), (.+\.py):\d+>", str(described))
        if is_description(described) and (match is None or not Path(match[2]).is_file()):
            return None
        names.append(f"{match[2]}:{match[1]}" if match else str(described))
    return f"e.g. {_flag('reward_funcs', names)}"


def _joined(value: Any) -> str:
    return ", ".join(map(str, _listed(value)))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# --- how tasks are attempted ------------------------------------------------------------------------------------------


def _attempts(run: Path, recorded: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    named = {"tools": "search", "environment_factory": "Game", "rollout_func": "rollout"}
    implied = any(recorded.get(name) is not None for name in named)
    if (recorded.get("rollout_source", "single_turn") == "single_turn" and not implied) or "rollout_source" in given:
        return {}
    for name, example in named.items():
        if name not in given and is_description(value := recorded.get(name)):
            raise ConfigError(
                f"{run}: its {name} was given in Python ({_joined(value)}) and is not in its record; name it by its "
                f"file, e.g. --{name.replace('_', '-')} my_game.py:{example}"
            )
    if "rollout_options" not in given and is_description(lost := recorded.get("rollout_options") or {}):
        names = [name for name, value in lost.items() if is_description(value)]
        raise ConfigError(
            f"{run}: {' and '.join(names)} in its rollout_options was given in Python ({_joined(lost[names[0]])}) and "
            "is not in its record; give all of them again, functions by their file, e.g. --rollout-options "
            f"{names[0]}=my_game.py:{names[0]}"
        )
    limit = recorded.get("max_rollout_tokens") or recorded.get("max_completion_length")
    found = {name: recorded[name] for name in ROLLOUT if name in recorded}
    if recorded.get("rollout_func") is None and recorded.get("rollout_source") != "rollout_func":
        found["max_rollout_tokens"] = limit
    return {name: value for name, value in found.items() if name not in given}


# --- the engine -------------------------------------------------------------------------------------------------------


def _take_engine(inherited: Inherited, recorded: dict[str, Any], given: dict[str, Any]) -> None:
    """The run's engine, where this machine has it and it can hold the run's weights."""
    engine = given.get("engine", recorded.get("engine", "transformers"))
    if engine == "vllm-remote" and "engine" not in given:
        inherited.notes.append("engine: vllm-remote is not taken over: its servers may hold other weights by now")
    if engine != "vllm" or recorded.get("engine") != "vllm":
        return
    options = {name: recorded[name] for name in VLLM if name in recorded and name not in given}
    if "engine" not in given:
        from mrl.engines import ENGINES

        try:
            ENGINES.get("vllm").check(**(options | given))  # type: ignore[attr-defined]
        except ConfigError as error:
            inherited.notes.append(f"engine: vllm is not taken over, transformers generates instead ({error})")
            return
        options["engine"] = "vllm"
    inherited.options |= options


# --- small things -----------------------------------------------------------------------------------------------------


def _flag(name: str, value: Any) -> str:
    from mrl.cli.flags import ALIASES

    flag = ALIASES.get(name, [f"--{name.replace('_', '-')}"])[0]
    if isinstance(value, bool):
        return flag if value else f"--no-{flag.removeprefix('--')}"
    if isinstance(value, dict) and name != "reward_funcs":
        values = [f"{key}={inner}" for key, inner in value.items()]
    else:  # a reward with its options is one value, as YAML
        values = [json.dumps(item) if isinstance(item, dict) else str(item) for item in _listed(value)]
    shown = " ".join(map(_quoted, values))
    return f"{flag} {shown if len(shown) <= _WIDEST else shown[: _WIDEST - 1] + '…'}"


def _quoted(text: str) -> str:
    """For a shell, in one line: as $'…' where it holds line breaks."""
    breaks = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
    if not any(character in text for character in breaks):
        return shlex.quote(text)
    return "$'" + "".join(breaks.get(c, "\\" + c if c in "\\'" else c) for c in text) + "'"
