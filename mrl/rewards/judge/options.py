"""What a judge is made with."""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from mrl.config.section import Section
from mrl.errors import ConfigError
from mrl.rewards.judge.rubric import names_in

EXAMPLE = "{judge: {model: gpt-4o-mini, base_url: 'https://api.openai.com/v1', rubric: rubric.md}}"
_FILES = (".md", ".txt")


class Criterion(Section):
    """One of several things that a completion is scored by."""

    about: str
    """What the judge is told of it."""
    weight: float = Field(1.0, gt=0)
    """Its weight in the mean over the criteria."""


class JudgeOptions(Section):
    """Who judges, by what, how the verdict is read, and what it may take."""

    paths: ClassVar[tuple[str, ...]] = ("rubric",)
    """Options that may name local files."""

    name: str = Field("judge", pattern=r"^\w[\w.-]*$")
    """Of the reward, in metrics and errors."""
    model: str
    """The model's name at the endpoint."""
    base_url: str
    """The endpoint up to `/v1`, e.g. `https://api.openai.com/v1` or `http://localhost:8000/v1`."""
    api_key_env: str | None = None
    """Environment variable with the key; it has to be set where reward workers run. None = no key is sent."""
    rubric: str
    """What is good and what is not; text, or a file (.md, .txt). `{prompt}`, `{completion}` and `{any_column}` stand
    for the row's values (with `groupwise`, `{completions}`); without `{completion}`, prompt and completion follow."""
    criteria: dict[str, Criterion] = Field(default_factory=dict)
    """Several scores in one answer, by name: a text, or `{about: text, weight: 2}`. The reward is their weighted mean,
    each is a metric. None given = one score."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest score; one outside is no readable answer."""
    normalize: bool = True
    """The reward is the score's place on the scale, 0 to 1; off = the score itself."""
    answer: str = "json"
    """How a score is written: `json`, `number` (nothing but a number), or a regular expression whose group is the
    number; then the rubric has to say how to answer."""
    structured: bool = True
    """Ask the endpoint to keep to the JSON schema; one that refuses that is asked without."""
    groupwise: Literal["order", "scores"] | None = None
    """All completions of a task in one request: `order` = the judge puts them in order, and the reward is the share of
    the others that one is better than; `scores` = a score for each. None = each completion by itself."""
    samples: int = Field(1, ge=1)
    """Verdicts that are asked for and averaged; above 1 they need a temperature, or `groupwise`, where each has the
    completions in another order."""
    temperature: float | None = Field(0.0, ge=0)
    """Of the judge's answers; None = not sent, for models that refuse it."""
    max_tokens: int | None = Field(1024, ge=1)
    """Of the judge's answers; None = not sent."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request, e.g. `{max_completion_tokens: 2000}`."""
    seed: int = 0
    """Of the order in which completions are shown with `groupwise`."""
    concurrency: int = Field(16, ge=1)
    """Requests at a time, for each reward worker."""
    timeout: float = Field(60.0, gt=0)
    """Seconds for an answer."""
    retries: int = Field(4, ge=0)
    """Further tries where the endpoint does not answer, or answers 408, 409, 425, 429 or 5xx: after 1, 2, 4 … seconds,
    and not before its Retry-After."""
    cache: str | None = None
    """File with the answers so far; a request that was answered is not sent again. None = `judge_cache.db` in the run's
    folder, or, where there is none, memory."""
    prompt_price: float | None = Field(None, ge=0)
    """Price of a million prompt tokens; with `completion_price` it makes cost a metric."""
    completion_price: float | None = Field(None, ge=0)
    """Price of a million completion tokens."""
    max_cost: float | None = Field(None, gt=0)
    """Once the run's requests have cost so much, none are sent: what is not cached cannot be scored. Needs prices."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, values: Any) -> Any:
        known = list(cls.model_fields)
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"
                raise ConfigError(f"judge has no option {name!r}; {hint}")
        if missing := [name for name, field in cls.model_fields.items() if field.is_required() and name not in values]:
            raise ConfigError(f"judge needs {' and '.join(missing)}, as in {EXAMPLE}")
        return values

    @field_validator("base_url")
    @classmethod
    def _url(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
        except ValueError:  # a port that is no number, or none of a port
            wrong = True
        if wrong:
            raise ConfigError(f"base_url: {value!r} is no URL, e.g. http://localhost:8000/v1")
        if parts.username or parts.password or parts.query:
            raise ConfigError("base_url: it is written into the run's record, so it holds no key; use api_key_env")
        return value.rstrip("/").removesuffix("/chat/completions")

    @field_validator("rubric")
    @classmethod
    def _text(cls, value: str) -> str:
        path = Path(value).expanduser() if "\n" not in value and value.endswith(_FILES) else None
        if path is not None:
            try:
                value = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"rubric: {path} cannot be read ({getattr(error, 'strerror', error)})") from None
        if not value.strip():
            raise ConfigError("rubric: it is empty; say what a good completion is")
        return value

    @field_validator("criteria", mode="before")
    @classmethod
    def _short_criteria(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if wrong := [name for name in value if not re.fullmatch(r"\w+", str(name))]:
            raise ConfigError(f"criteria: {wrong[0]!r} is no name of letters, digits and underscores")
        return {name: {"about": about} if isinstance(about, str) else about for name, about in value.items()}

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        low, high = self.scale
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError(f"scale: {low:g} to {high:g} is no range; give [lowest, highest], e.g. [0, 10]")
        if self.criteria and (self.groupwise or self.answer != "json"):
            raise ConfigError("criteria: several scores need answer: json and no groupwise; name them in the rubric")
        if self.groupwise and self.answer != "json":
            raise ConfigError("answer: with groupwise the answer is JSON; leave it out")
        if self.groupwise == "order" and not self.normalize:
            raise ConfigError("normalize: with groupwise: order there is no scale; leave it out, or use scores")
        if self.answer not in ("json", "number"):
            self._check_pattern()
        if self.samples > 1 and self.temperature == 0 and self.groupwise is None:
            raise ConfigError("samples: several verdicts at temperature 0 are one; set temperature, e.g. 0.7")
        if self.max_cost is not None and (self.prompt_price is None or self.completion_price is None):
            raise ConfigError("max_cost: needs prompt_price and completion_price")
        if (self.prompt_price is None) != (self.completion_price is None):
            raise ConfigError("prompt_price: the cost needs completion_price as well (0 = free)")
        if reserved := {"messages", "model", "stream", "n", "response_format"} & set(self.params):
            raise ConfigError(f"params: {min(reserved)} is set by the judge; leave it out")
        if self.api_key_env is not None and not re.fullmatch(r"[A-Za-z_]\w*", self.api_key_env):
            raise ConfigError("api_key_env: give the name of an environment variable, not the key itself")
        return self

    def _check_pattern(self) -> None:
        try:
            groups = re.compile(self.answer).groups
        except re.error as error:
            raise ConfigError(f"answer: {self.answer!r} is no regular expression ({error})") from None
        if groups != 1:
            raise ConfigError(
                f"answer: {self.answer!r} has {groups} groups; one has to hold the number, e.g. 'Score: ([0-9.]+)' "
                "(or use json or number)"
            )

    @property
    def columns(self) -> set[str]:
        """What the rubric needs of the dataset."""
        return names_in(self.rubric) - {"prompt", "completions" if self.groupwise else "completion"}

    def cost(self, prompt_tokens: float, completion_tokens: float) -> float | None:
        """In the prices' currency; None where they are not known."""
        if self.prompt_price is None or self.completion_price is None:
            return None
        return (prompt_tokens * self.prompt_price + completion_tokens * self.completion_price) / 1e6
