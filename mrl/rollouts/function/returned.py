"""What a rollout function returned, checked and made into rollouts.

What concerns all rollouts at once and no retry mends, a key that is missing or a list of another length, is an error.
What is wrong with one rollout fails that one, with the reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mrl.errors import RolloutError
from mrl.rollouts.base import SourceSetup
from mrl.rollouts.runner import failed_rollout, rollout_id
from mrl.types import Group, Rollout, Sample, Task

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")
OPTIONAL = ("env_mask", "policy_versions")
TAKEN = ("prompt", "prompts", "completion", "completions", "trainer_state", "log_extra", "log_metric", "environments")
"""What reward functions get under these names is something else."""


@dataclass(frozen=True)
class Expected:
    """What a call is to give."""

    who: str
    """The function, with file and line, for messages."""
    setup: SourceSetup
    max_model_len: int
    oldest: int
    """The policy version when the call began: that of tokens that come without one."""
    newest: int
    """No token can be of a later one."""
    prompts_once: bool
    """Whether `prompt_ids` may come once for each prompt."""


class Unusable(ValueError):
    """What is wrong with one rollout."""


def read_rollouts(returned: Any, tasks: list[Task], n: int, expected: Expected) -> list[Group]:
    """`n` rollouts of each task, in order. Raises RolloutError.

    A sample whose function gave no logprobs has `[]` there.
    """
    fields = _fields(returned, tasks, n, expected)
    groups, row = [], 0
    for task, attempts in attempts_of(tasks, n):
        group = Group(task, [])
        for attempt in attempts:
            try:
                rollout = _rollout(task, attempt, {name: values[row] for name, values in fields.items()}, expected)
            except Unusable as error:
                rollout = failed_rollout(task, attempt, f"{expected.who} returned for rollout {row}: {error}")
            rollout.extra |= {name: v[row] for name, v in fields.items() if name not in (*REQUIRED, *OPTIONAL)}
            group.rollouts.append(rollout)
            row += 1
        groups.append(group)
    return groups


def attempts_of(tasks: list[Task], n: int) -> list[tuple[Task, range]]:
    """The numbers of each task's attempts: one that is among them once more gets further ones."""
    before: Counter[str] = Counter()
    found = []
    for task in tasks:
        found.append((task, range(before[task.id], before[task.id] + n)))
        before[task.id] += n
    return found


def _fields(returned: Any, tasks: list[Task], n: int, expected: Expected) -> dict[str, list[Any]]:
    """Every field as one value per rollout."""
    who, total = expected.who, len(tasks) * n
    if not isinstance(returned, dict):
        raise RolloutError(
            f"rollout_func: {who} returned {_short(returned)}, and has to return a dict with {', '.join(REQUIRED)}"
        )
    missing = [name for name in REQUIRED if name not in returned]
    if missing:
        raise RolloutError(
            f"rollout_func: {who} returned no {' and no '.join(missing)}; it returned "
            f"{', '.join(map(str, returned)) or 'an empty dict'}"
        )
    if taken := [name for name in returned if name in TAKEN]:
        raise RolloutError(
            f"rollout_func: {who} returned {taken[0]!r}, and reward functions get something else under that name; "
            "call it otherwise"
        )
    fields: dict[str, list[Any]] = {}
    for name, given in returned.items():
        values = _listed(given)
        if not isinstance(name, str) or (isinstance(given, str) and name in REQUIRED):
            raise RolloutError(f"rollout_func: {who} returned {name!r}: {_short(given)}; it has to be a list")
        if values is None:
            if name in ("prompt_ids", "completion_ids") or (name in (*REQUIRED, *OPTIONAL) and given is not None):
                raise RolloutError(f"rollout_func: {who} returned {name!r}: {_short(given)}; it has to be a list")
            values = [given] * total  # what is no list is the same for all, as in TRL
        elif name == "prompt_ids" and expected.prompts_once and len(values) == len(tasks) != total:
            values = [value for value in values for _ in range(n)]
        if len(values) != total:
            more = f", one after the other for each of {len(tasks)} prompts" if n > 1 else ""
            raise RolloutError(
                f"rollout_func: {who} returned {len(values)} {name}, expected {total}: {n} for each prompt{more}"
            )
        fields[name] = values
    return fields


def _rollout(task: Task, attempt: int, fields: dict[str, Any], expected: Expected) -> Rollout:
    sample = _sample(fields, expected)
    # As TRL does, environments' tokens are part of what reward functions read.
    text = str(expected.setup.tokenizer.decode(sample.completion_ids, skip_special_tokens=True))
    answer = {"role": "assistant", "content": text}
    return Rollout(
        id=rollout_id(task, attempt),
        task_id=task.id,
        attempt=attempt,
        messages=[*expected.setup.encoder.messages(task.prompt), answer],
        samples=[sample],
        prompt=task.prompt,
        completion=text if isinstance(task.prompt, str) else [answer],
    )


def _sample(fields: dict[str, Any], expected: Expected) -> Sample:
    prompt_ids = _ids("prompt_ids", fields["prompt_ids"], expected)
    completion_ids = _ids("completion_ids", fields["completion_ids"], expected)
    length = len(completion_ids)
    if len(prompt_ids) + length > expected.max_model_len:
        raise Unusable(
            f"{len(prompt_ids)} tokens of prompt and {length} of completion, and {expected.max_model_len} fit the model"
        )
    mask = _mask(fields.get("env_mask"), length)
    logprobs = _logprobs(fields["logprobs"], mask)
    versions = _versions(fields.get("policy_versions"), mask, expected)
    setup = expected.setup
    ends = {setup.tokenizer.eos_token_id, setup.tokenizer.pad_token_id}
    full = sum(mask) >= setup.sampling.max_tokens or len(prompt_ids) + length == expected.max_model_len
    cut = full and completion_ids[-1] not in ends
    version: int | list[int] = versions[0] if len(set(versions)) == 1 else versions
    return Sample(prompt_ids, completion_ids, logprobs, mask, version, "length" if cut else "stop")


def _ids(name: str, given: Any, expected: Expected) -> list[int]:
    values = _listed(given)
    if values is None or isinstance(given, str):
        raise Unusable(f"{name} is {_short(given)}, not a list of token ids")
    ids = [_whole(value) for value in values]
    for value, token in zip(values, ids, strict=True):
        if token is None:
            raise Unusable(f"{name} has {_short(value)}, which is no token id")
        if not 0 <= token < expected.setup.vocabulary:
            raise Unusable(f"{name} has the id {token}, and the vocabulary ends at {expected.setup.vocabulary - 1}")
    if not ids:
        raise Unusable(f"{name} is empty")
    return [token for token in ids if token is not None]


def _mask(given: Any, length: int) -> list[int]:
    if given is None:
        return [1] * length
    values = _listed(given)
    if values is None or len(values) != length:
        raise Unusable(_lengths("env_mask", given, values, length))
    mask = [_whole(value) if not isinstance(value, bool) else int(value) for value in values]
    if wrong := [value for value, one in zip(values, mask, strict=True) if one not in (0, 1)]:
        raise Unusable(f"env_mask has {_short(wrong[0])}; 1 is the policy's token and 0 the environment's")
    if not any(mask):
        raise Unusable("env_mask is 0 everywhere, so the policy sampled nothing")
    return [int(bool(one)) for one in mask]


def _logprobs(given: Any, mask: list[int]) -> list[float]:
    if given is None:
        return []
    values = _listed(given)
    if values is None or len(values) != len(mask):
        raise Unusable(_lengths("logprobs", given, values, len(mask)))
    found = []
    for value, sampled in zip(values, mask, strict=True):
        value = _plain(value)
        number = float(value) if isinstance(value, int | float) else math.nan
        if sampled and not (math.isfinite(number) and number <= 1e-3):
            raise Unusable(f"logprobs has {_short(value)}, which is no logarithm of a probability")
        found.append(number if sampled else 0.0)
    return found


def _versions(given: Any, mask: list[int], expected: Expected) -> list[int]:
    """Of tokens that nobody sampled: that of the tokens before them."""
    if given is None:
        return [expected.oldest] * len(mask)
    values = [given] * len(mask) if _whole(given) is not None else _listed(given)
    if values is None or len(values) != len(mask):
        raise Unusable(_lengths("policy_versions", given, values, len(mask)))
    found: list[int] = []
    last = expected.oldest
    for value, sampled in zip(values, mask, strict=True):
        if sampled:
            version = _whole(value)
            if version is None or not 0 <= version <= expected.newest:
                raise Unusable(f"policy_versions has {_short(value)}, and there are 0 to {expected.newest}")
            last = version
        found.append(last)
    return found


def _lengths(name: str, given: Any, values: list[Any] | None, length: int) -> str:
    if values is None:
        return f"{name} is {_short(given)}, not a list"
    return f"{len(values)} {name} for {length} completion_ids"


def _listed(given: Any) -> list[Any] | None:
    """Lists, tuples, arrays and tensors as a list; None = it is none of them."""
    if isinstance(given, list | tuple):
        return list(given)
    convert: Callable[[], Any] | None = getattr(given, "tolist", None)
    values = convert() if convert is not None else None
    return values if isinstance(values, list) else None


def _whole(value: Any) -> int | None:
    """A whole number, also numpy's and torch's."""
    value = _plain(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _plain(value: Any) -> Any:
    """One of numpy's or torch's numbers as Python's."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
