"""What a judge is asked to answer, and how its answer is read. An answer that leaves a doubt is not read at all."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mrl.rewards.judge.options import JudgeOptions

SCORE, SCORES, ORDER, REASON = "score", "scores", "order", "reason"
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_REASON_SHOWN = 1000


class Unreadable(Exception):
    """An answer holds no verdict, or more than one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one answer says. Values are as the reward counts them: 0 to 1 unless `normalize` is off."""

    values: dict[str, float]
    """By criterion, or by the label of a completion; one score is under `score`."""
    reason: str | None = None


# --- one completion ---------------------------------------------------------------------------------------------------


def score_format(options: JudgeOptions) -> str:
    """Tells the judge how to answer; empty where the rubric does."""
    low, high = options.scale
    span = f"from {low:g} (worst) to {high:g} (best)"
    if options.criteria:
        listed = "\n".join(f"- {name}: {criterion.about}" for name, criterion in options.criteria.items())
        shape = ", ".join(f'"{name}": number' for name in options.criteria)
        return (
            f"Give a score {span} for each of these:\n{listed}\n"
            f'Answer with one JSON object and nothing else: {{"reason": "one or two sentences", "scores": {{{shape}}}}}'
        )
    if options.answer == "json":
        return (
            f"Give a score {span}. Answer with one JSON object and nothing else: "
            '{"reason": "one or two sentences", "score": number}'
        )
    return f"Answer with one number {span}, and nothing else." if options.answer == "number" else ""


def score_schema(options: JudgeOptions) -> dict[str, Any] | None:
    """The same as a JSON schema; None where the answer is no JSON."""
    if options.answer != "json":
        return None
    number = {"type": "number"}
    scores = _object(dict.fromkeys(options.criteria, number))
    return _object({REASON: {"type": "string"}, **({SCORES: scores} if options.criteria else {SCORE: number})})


def read_score(text: str, options: JudgeOptions) -> Verdict:
    """Raises Unreadable."""
    text = _said(text)
    if options.answer == "json":
        key = SCORES if options.criteria else SCORE
        found = _only_object(text, key)
        scores = found[key] if options.criteria else {SCORE: found[SCORE]}
        names = list(options.criteria) or [SCORE]
        if not isinstance(scores, dict) or not set(names) <= set(scores):
            raise Unreadable(f"the answer does not score {', '.join(names)}")
        return Verdict({name: _value(scores[name], options) for name in names}, _reason(found))
    pattern = r"\s*([+-]?(?:\d+\.?\d*|\.\d+))\s*\.?\s*" if options.answer == "number" else options.answer
    whole = re.fullmatch(pattern, text) if options.answer == "number" else None
    found_all = {whole[1]} if whole else set() if options.answer == "number" else set(re.findall(pattern, text))
    if len(found_all) != 1:
        raise Unreadable("the answer holds no score" if not found_all else "the answer holds several scores")
    return Verdict({SCORE: _value(found_all.pop(), options)})


# --- a group ----------------------------------------------------------------------------------------------------------


def group_format(options: JudgeOptions, labels: Sequence[str]) -> str:
    """Tells the judge how to answer."""
    if options.groupwise == "scores":
        shape = ", ".join(f'"{label}": number' for label in labels)
        low, high = options.scale
        return (
            f"Give each answer a score from {low:g} (worst) to {high:g} (best). Answer with one JSON object and "
            f'nothing else: {{"reason": "one or two sentences", "scores": {{{shape}}}}}'
        )
    example = ", ".join([f'["{labels[-1]}"]', *(f'["{label}"]' for label in labels[:-1])])
    return (
        "Put the answers in order, best first. Each of them is named once; those that are equally good share a place. "
        'Answer with one JSON object and nothing else: {"reason": "one or two sentences", "order": list of places, '
        f'each a list of letters}}. If all differ, there are {len(labels)} places: {{"reason": "…", "order": '
        f"[{example}]}}."
    )


def group_schema(options: JudgeOptions, labels: Sequence[str]) -> dict[str, Any]:
    """The same as a JSON schema."""
    if options.groupwise == "scores":
        part: dict[str, Any] = {SCORES: _object({label: {"type": "number"} for label in labels})}
    else:
        place = {"type": "array", "items": {"type": "string", "enum": list(labels)}}
        part = {ORDER: {"type": "array", "items": place}}
    return _object({REASON: {"type": "string"}, **part})


def read_group(text: str, options: JudgeOptions, labels: Sequence[str]) -> Verdict:
    """Every label's value; of an order, how many places come after its own. Raises Unreadable, also where a label is
    missing or named twice."""
    key = SCORES if options.groupwise == "scores" else ORDER
    found = _only_object(_said(text), key)
    if key == SCORES:
        scores = found[SCORES]
        if not isinstance(scores, dict) or set(scores) != set(labels):
            raise Unreadable(f"the answer does not score {', '.join(labels)}, each once")
        return Verdict({label: _value(scores[label], options) for label in labels}, _reason(found))
    order = found[ORDER]
    places = [place if isinstance(place, list) else [place] for place in order] if isinstance(order, list) else []
    named = [label for place in places for label in place]
    if sorted(map(str, named)) != sorted(labels):
        raise Unreadable(f"the order does not name {', '.join(labels)}, each once")
    values = {label: float(after) for after, place in enumerate(reversed(places)) for label in place}
    return Verdict(values, _reason(found))


def shares_beaten(values: Sequence[float]) -> list[float]:
    """Of each, the share of the others that are below it, equal ones counting half. At least two values."""
    wins = [sum((mine > other) + (mine == other) / 2 for other in values) - 0.5 for mine in values]
    return [win / (len(values) - 1) for win in wins]


# --- reading ----------------------------------------------------------------------------------------------------------


def _said(text: str) -> str:
    """The answer after what was thought before it. One that is JSON as a whole may quote what ends a thought."""
    if text.lstrip().startswith("{"):
        try:
            _DECODER.decode(text)
        except (ValueError, RecursionError):
            pass
        else:
            return text
    return _THOUGHT.sub("", text).rpartition("</think>")[2].strip()


def _without_doubt(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises Unreadable where it says one thing twice: which of them counts?"""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Unreadable("the answer holds a JSON object with one name twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_without_doubt)


def _only_object(text: str, key: str) -> dict[str, Any]:
    """The JSON object that has `key`. Several that differ are none: one may be quoted from what is judged."""
    found: list[dict[str, Any]] = []
    at = text.find("{")
    while at >= 0:
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            if isinstance(value, dict) and key in value and value not in found:
                found.append(value)
        at = text.find("{", end)
    if len(found) != 1:
        raise Unreadable(f"the answer holds {'no' if not found else 'several'} JSON objects with {key!r}")
    return found[0]


def _value(score: Any, options: JudgeOptions) -> float:
    """A score as a reward. Raises Unreadable for what is no number of the scale."""
    low, high = options.scale
    try:
        number = float(score) if isinstance(score, int | float | str) and not isinstance(score, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not low <= number <= high:
        raise Unreadable(f"the score {str(score)[:40]!r} is no number from {low:g} to {high:g}")
    return (number - low) / (high - low) if options.normalize else number


def _reason(found: dict[str, Any]) -> str | None:
    reason = found.get(REASON)
    return reason[:_REASON_SHOWN] if isinstance(reason, str) else None


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
