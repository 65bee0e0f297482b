"""`classifier`: a sequence-classification model of Hugging Face scores prompt and completion, as TRL has it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mrl.config import ModelConfig
from mrl.errors import ConfigError, ModelError
from mrl.models import load_config, load_scorer
from mrl.rewards.base import RewardRequest, Scores
from mrl.system.threads import SerialExecutor
from mrl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_NO_LIMIT = 10**6
"""Tokenizers that know no limit say an astronomic one."""


class Classifier:
    """A reward model with one output: the reward is its logit. With several outputs, the probability of `label`.

    Text: prompt and completion are joined. Messages: the tokenizer's chat template is applied to all of them. Its
    weights are only read.
    """

    paths = ("model",)
    bounded = True
    independent = True
    logged = ()

    def __init__(
        self,
        model: str | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str | None = None,
        label: str | int | None = None,
        device: str = "auto",
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        max_length: int | None = None,
        truncate: Literal["left", "right"] | None = None,
        batch_tokens: int = 16_384,
    ) -> None:
        """model: a Hub id, a folder, a run (one that trained a reward model), or a loaded model, which stays on its
        device and is put into evaluation mode. tokenizer: None = the model's own. name: of the reward; None = the
        model's. label: which of several outputs counts, by name or number. dtype: of the weights; `auto` = as saved.
        max_length: tokens; None = what the model was made for. truncate: where longer inputs are cut; None = they
        cannot be scored. batch_tokens: of one forward pass, padding included. Raises ConfigError and ModelError.
        """
        if dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"dtype: {dtype!r} is not auto, float32, bfloat16 or float16")
        if truncate not in (None, "left", "right"):
            raise ConfigError(f"truncate: {truncate!r} is not left or right; leave it out to fail what is too long")
        if batch_tokens < 1 or (max_length is not None and max_length < 1):
            raise ConfigError("batch_tokens and max_length are numbers of tokens, 1 or more")
        self._given = model
        self._recorded: dict[str, Any] = {"label": label, "device": device, "dtype": dtype, "revision": revision}
        self._recorded |= {"trust_remote_code": trust_remote_code, "max_length": max_length, "truncate": truncate}
        self._dtype, self._max_length, self._truncate = dtype, max_length, truncate
        self._tokenizer = tokenizer
        self._batch_tokens = batch_tokens
        if isinstance(model, str):
            self._source = ModelConfig(
                model=model, revision=revision, trust_remote_code=trust_remote_code, device=device
            )
            self._model: Any = None
            config = load_config(self._source)
            _check_architecture(config, model)
        else:
            self._model, config = model, model.config
        self._label = _output(config, label)
        self.name = name or Path(model if isinstance(model, str) else str(config._name_or_path or "classifier")).name
        self._executor = SerialExecutor(f"mrl-{self.name}")

    def open(self, folder: Path | None) -> None:
        """Load the model. Raises ModelError."""
        if self._model is None:
            self._model, own = load_scorer(self._source, self._dtype)
            self._tokenizer = self._tokenizer or own
        elif self._tokenizer is None:
            self._tokenizer = _own_tokenizer(self._model)
        tokenizer = self._tokenizer
        assert tokenizer is not None
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token_id is None:
            raise ModelError(f"{self.name}: its tokenizer has neither a padding token nor an end token; give it one")
        # Where the model looks for the last token that is no padding.
        self._model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        self._model.eval()
        made_for = getattr(self._model.config.get_text_config(), "max_position_embeddings", None) or _NO_LIMIT
        self._limit = int(self._max_length or min(made_for, tokenizer.model_max_length))

    async def score(self, requests: list[RewardRequest], *, trainer_state: Any) -> Scores:
        """Every completion's logit, or probability. What is too long is an error of its row."""
        return await asyncio.wrap_future(self._executor.submit("score", lambda: self._score(requests)))

    def recorded(self) -> Any:
        """As a recipe would say it; a loaded model cannot be written down."""
        if not isinstance(self._given, str):
            return f"<{type(self._given).__name__} {self.name}>"
        defaults = {"device": "auto", "dtype": "auto", "trust_remote_code": False}
        changed = {name: value for name, value in self._recorded.items() if value != defaults.get(name)}
        return {"classifier": {"model": self._given, "name": self.name, **changed}}

    def __getstate__(self) -> dict[str, Any]:
        """To other processes: without the thread, and without weights that can be loaded there."""
        state = vars(self) | {"_executor": None}
        return state | {"_model": None, "_tokenizer": None} if isinstance(self._given, str) else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._executor = SerialExecutor(f"mrl-{self.name}")

    def __copy__(self) -> Classifier:
        """Under another name, with the same weights."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    # --- on a thread of its own ---------------------------------------------------------------------------------------

    def _score(self, requests: list[RewardRequest]) -> Scores:
        if not hasattr(self, "_limit"):
            self.open(None)
        scores = Scores([None] * len(requests))
        rows = [self._encode(row, request, scores) for row, request in enumerate(requests)]
        lengths = {row: len(encoded["input_ids"]) for row, encoded in enumerate(rows) if encoded is not None}
        for batch in _batches(lengths, self._batch_tokens):
            encoded = [rows[row] for row in batch]
            for row, value in zip(batch, self._forward(encoded), strict=True):
                scores.values[row] = value
        return scores

    def _encode(self, row: int, request: RewardRequest, scores: Scores) -> dict[str, list[int]] | None:
        """A row's input; None, with its error in `scores`, for what cannot be one."""
        assert self._tokenizer is not None
        try:
            text = _text(request, self._tokenizer)
        except Exception as error:  # templates raise what they like
            scores.errors[row] = f"{self.name}: its chat template refuses the messages ({error})"
            return None
        encoded = {name: list(ids) for name, ids in self._tokenizer(text, add_special_tokens=False).items()}
        length = len(encoded["input_ids"])
        if length > self._limit and self._truncate is not None:
            kept = slice(-self._limit, None) if self._truncate == "left" else slice(0, self._limit)
            return {name: ids[kept] for name, ids in encoded.items()}
        if length == 0 or length > self._limit:
            problem = "prompt and completion are empty" if length == 0 else f"{length} tokens, it takes {self._limit}"
            scores.errors[row] = f"{self.name}: {problem}" + (" (truncate: left or right cuts)" if length else "")
            return None
        return encoded

    def _forward(self, rows: list[Any]) -> list[float]:
        import torch

        assert self._tokenizer is not None
        width = max(len(row["input_ids"]) for row in rows)
        padding = {"input_ids": self._tokenizer.pad_token_id, "token_type_ids": self._tokenizer.pad_token_type_id}
        inputs = {
            name: torch.tensor([row[name] + [padding.get(name, 0)] * (width - len(row[name])) for row in rows])
            for name in rows[0]
        }
        device = next(self._model.parameters()).device
        with torch.inference_mode():
            logits = self._model(**{name: tensor.to(device) for name, tensor in inputs.items()}).logits.float()
            values = logits[:, 0] if self._label is None else logits.softmax(-1)[:, self._label]
        return [float(value) for value in values.cpu()]


def _text(request: RewardRequest, tokenizer: PreTrainedTokenizerBase) -> str:
    if isinstance(request.prompt, str):
        assert isinstance(request.completion, str)
        return request.prompt + request.completion
    completion = request.completion
    said: list[Message] = (
        [{"role": "assistant", "content": completion}] if isinstance(completion, str) else list(completion)
    )
    return str(tokenizer.apply_chat_template([*request.prompt, *said], tokenize=False))


def _batches(lengths: dict[int, int], tokens: int) -> list[list[int]]:
    """Rows of similar length together, at most so many padded tokens, or one row."""
    batches: list[list[int]] = []
    for row in sorted(lengths, key=lambda row: -lengths[row]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _check_architecture(config: Any, model: str) -> None:
    architectures = config.architectures or []
    if not any("ForSequenceClassification" in name for name in architectures):
        raise ModelError(
            f"{model} is no sequence classifier (its config.json names {', '.join(architectures) or 'nothing'}), so it "
            "gives no score; give a reward model, or ask a language model with reward judge"
        )


def _output(config: Any, label: str | int | None) -> int | None:
    """Which output counts; None = the only one, as it is."""
    names = [str(config.id2label.get(number, number)) for number in range(config.num_labels)]
    if label is None:
        if config.num_labels == 1:
            return None
        raise ConfigError(
            f"label: the model has {config.num_labels} outputs ({', '.join(names)}); say whose probability counts, as "
            f"in {{classifier: {{model: …, label: {names[-1]}}}}}"
        )
    if config.num_labels == 1:
        raise ConfigError("label: the model has one output, whose logit is the reward; leave it out")
    if isinstance(label, int) and 0 <= label < config.num_labels:
        return label
    if str(label) not in names:
        raise ConfigError(f"label: {label!r} is none of the model's outputs: {', '.join(names)}")
    return names.index(str(label))


def _own_tokenizer(model: Any) -> PreTrainedTokenizerBase:
    """Of the place that a loaded model came from. Raises ModelError."""
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model.config._name_or_path)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise ModelError(
            f"reward_processing_classes: the tokenizer of {type(model).__name__} could not be loaded ({first}); give it"
        ) from None
    return tokenizer
