"""A rollout as the exact tokens it was trained on: who wrote each, how likely it was, what it was worth."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from markupsafe import Markup

from mrl.logs.catalog import flat_options_of
from mrl.logs.text import plain, shown
from mrl.store.checkpoints import list_checkpoints

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENS = 3_000
"""Of a sample, on one page."""
Colour = Literal["logprob", "gap", "advantage", "source", "version"]
COLOURS: dict[Colour, str] = {
    "logprob": "logprob of the sampler",
    "gap": "trainer − sampler",
    "advantage": "advantage",
    "source": "who wrote it",
    "version": "policy version",
}
LOGPROB_BOUNDS = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Nats below which a token gets the paler of two colours."""
GAP_BOUNDS = (0.001, 0.01, 0.05, 0.2, 1.0)
ADVANTAGE_BOUNDS = (0.001, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Token:
    """One token as it is drawn."""

    html: Markup
    css: str
    title: str
    newline: bool


@dataclass(frozen=True)
class Stream:
    """A sample's tokens from `start` on."""

    number: int
    tokens: list[Token]
    start: int
    count: int
    """Of prompt and completion."""
    prompt: int
    sampled: int
    finish_reason: str
    mean_logprob: float | None
    """None where the sampler told none, as in simple mode."""
    mean_gap: float | None
    """Of what the trainer found to what the sampler said, per sampled token; None where it was not recorded."""


def unrecorded(samples: list[dict[str, Any]]) -> set[Colour]:
    """The colours that say nothing of these samples."""
    told = any(logprob == logprob for sample in samples for logprob in sample["logprobs"])
    compared = any(sample.get("trainer_gap") is not None for sample in samples)
    missing: dict[Colour, bool] = {"logprob": told, "gap": compared}
    return {colour for colour, there in missing.items() if not there}


class Tokenizers:
    """Those of runs, kept when they were read."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, float], Tokenizer] = {}
        self._lock = threading.Lock()

    def of(self, run: Path) -> tuple[Tokenizer | None, str]:
        """The tokenizer of the run's model, found on this machine; or None and why."""
        path = find_tokenizer(run)
        if path is None:
            return None, (
                "The model's tokenizer.json is neither in a checkpoint of this run nor elsewhere on this machine: "
                "tokens are shown by their ids."
            )
        try:
            key = (path, path.stat().st_mtime)
            with self._lock:
                if key not in self._known:
                    from tokenizers import Tokenizer

                    self._known[key] = Tokenizer.from_file(str(path))
                return self._known[key], ""
        except Exception as error:  # the library raises plain Exception for what it cannot read
            return None, f"{path} cannot be read ({error}): tokens are shown by their ids."


def find_tokenizer(run: Path) -> Path | None:
    """A checkpoint's, that of a local model, the starter's, or what the Hub's cache has. Never asks a network."""
    options = flat_options_of(run)
    model = str(options.get("model") or "")
    places = [checkpoint.path for checkpoint in reversed(list_checkpoints(run))]
    if model == "starter":
        places.append(Path(__file__).parents[1] / "starter" / "policy")
    elif model:
        places += [Path(model).expanduser(), Path(model).expanduser() / "checkpoints"]
    for place in places:
        if (place / "tokenizer.json").is_file():
            return place / "tokenizer.json"
    if model.count("/") <= 1 and model and not Path(model).is_absolute():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(model, "tokenizer.json", revision=options.get("revision") or None)
        except HFValidationError:
            return None
        if isinstance(cached, str):
            return Path(cached)
    return None


def stream(
    sample: dict[str, Any],
    number: int,
    rollout: dict[str, Any],
    tokenizer: Tokenizer | None,
    colour: Colour,
    start: int,
) -> Stream:
    """A sample's tokens from `start` on, coloured by one of COLOURS."""
    prompt, completion, mask = sample["prompt_ids"], sample["completion_ids"], sample["mask"]
    gaps = sample.get("trainer_gap")
    advantages = sample.get("advantages")
    versions = sample["policy_version"]
    silent = "logprob" in unrecorded([sample])
    newest = max(versions) if isinstance(versions, list) and versions else versions
    tokens = []
    for place in range(start, min(start + TOKENS, len(prompt) + len(completion))):
        at = place - len(prompt)
        if at < 0:
            tokens.append(_token(tokenizer, prompt[place], place, "prompt", "p", []))
            continue
        if not mask[at]:
            tokens.append(_token(tokenizer, completion[at], place, "environment", "e", []))
            continue
        logprob = sample["logprobs"][at]
        gap = None if gaps is None else gaps[at]
        advantage = rollout["advantage"] if advantages is None else advantages[at]
        version = versions[at] if isinstance(versions, list) else versions
        css = {
            "logprob": "none" if silent else _scale("l", -logprob, LOGPROB_BOUNDS),
            "gap": _signed(gap, GAP_BOUNDS),
            "advantage": _signed(advantage, ADVANTAGE_BOUNDS),
            "source": "s",
            "version": "s" if version == newest else "old",
        }[colour]
        facts = [] if silent else [f"logprob {logprob:.4g} (p {math.exp(min(logprob, 0.0)):.3g})"]
        facts += [f"policy version {version}"]
        facts += [] if gap is None else [f"trainer {logprob + gap:.4g}, gap {gap:+.2g}"]
        facts += [] if advantage is None else [f"advantage {advantage:+.3g}"]
        tokens.append(_token(tokenizer, completion[at], place, "sampled", css, facts))
    sampled = [at for at, ours in enumerate(mask) if ours]
    return Stream(
        number,
        tokens,
        start,
        len(prompt) + len(completion),
        len(prompt),
        len(sampled),
        sample["finish_reason"],
        None if silent else _mean([sample["logprobs"][at] for at in sampled]),
        None if gaps is None else _mean([abs(gaps[at]) for at in sampled]),
    )


def _token(tokenizer: Tokenizer | None, token: int, place: int, who: str, css: str, facts: list[str]) -> Token:
    text = _text(tokenizer, token)
    html = shown(text.replace("\n", "⏎\n").replace("\t", "⇥\t") if text else "∅")
    title = " · ".join([f"#{place}", f"id {token}", who, *facts])
    return Token(html, css, plain(title), text.endswith("\n"))


def _text(tokenizer: Tokenizer | None, token: int) -> str:
    """What a token says by itself; bytes that are no text alone by their hex."""
    if tokenizer is None:
        return f"{token} "
    try:
        piece = tokenizer.id_to_token(token)
        text: str = tokenizer.decode([token], skip_special_tokens=False)
    except (OverflowError, TypeError):
        return f"[{token}]"
    if piece is None:
        return f"[{token}]"
    if "\ufffd" in text and (raw := _bytes_of(piece)) is not None:
        return "".join(f"\\x{byte:02x}" for byte in raw)
    if piece.startswith("▁") and not text.startswith(" "):
        return f" {text}"
    return text


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level tokenizers write bytes with (GPT-2's table)."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in kept}
    others = [byte for byte in range(256) if byte not in kept]
    return letters | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_letters()


def _bytes_of(piece: str) -> bytes | None:
    if all(letter in _BYTES for letter in piece):
        return bytes(_BYTES[letter] for letter in piece)
    return None


def _scale(prefix: str, value: float, bounds: tuple[float, ...]) -> str:
    if value != value:
        return "odd"
    return f"{prefix}{sum(value >= bound for bound in bounds)}"


def _signed(value: float | None, bounds: tuple[float, ...]) -> str:
    if value is None:
        return "none"
    if value != value:
        return "odd"
    return f"{'n' if value < 0 else 'g'}{sum(abs(value) >= bound for bound in bounds)}"


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
