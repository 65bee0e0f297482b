"""Prompts with images in the decode loop.

A request's image tokens are replaced by keys (mrl.modeling.images) before it is queued, so the loop and its caches
treat an image like any tokens: equal ones share their prefill, different ones never do. Where keys go through the
model, this file says what it is given in their place; and for models whose positions have several dimensions, where
tokens are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mrl.errors import DataError, EngineError, ModelError
from mrl.modeling.images import ImageModel, ImageReader, ImageTokens, Keys
from mrl.system.transfers import to_device
from mrl.types import Completion, GenerateRequest, Media, TokenSequence

if TYPE_CHECKING:
    from mrl.engines.transformers.decode_queue import RequestState


class Model(Protocol):
    """What this file needs of a `CausalLM`."""

    @property
    def inner(self) -> Any:
        """The model itself."""

    @property
    def device(self) -> torch.device:
        """Where input ids go."""

    @property
    def images(self) -> ImagePrompts | None:
        """How prompts with images go through it."""


class ImagePrompts:
    """An engine's images. processor: the model's (`mrl.models.load_processor`)."""

    def __init__(self, processor: Any, causal_lm: Any) -> None:
        reader = ImageReader(processor)
        self.tokens = ImageTokens(reader)
        self.model: ImageModel | None = None
        self.problem = ""
        """Why there is none."""
        try:
            self.model = ImageModel(causal_lm, reader)
        except ModelError as error:
            self.problem = str(error)

    def with_keys(self, states: list[RequestState], *, version: int) -> list[RequestState]:
        """The states of a call's requests, with keys in the place of their image tokens. A request whose images are not
        what its prompt says is answered here."""
        found = []
        for state in states:
            request = state.request
            if request.media:
                try:
                    request = replace(request, prompt_ids=self.keys(request.prompt_ids, request.media))
                except DataError as error:
                    failed = Completion.failed(request, f"request {request.id!r}: {error}", version)
                    state.call.take(state.index, failed)
                    continue
                state = replace(state, request=request, tokens=request.prompt_ids)
            found.append(state)
        return found

    def keys(self, ids: Sequence[int], media: Sequence[Media]) -> Keys:
        """Raises DataError."""
        return self.tokens.keys(ids, media)

    def keyed(self, sequence: TokenSequence) -> TokenSequence:
        """A sequence to score, with keys in the place of its image tokens. Raises EngineError."""
        if not sequence.media:
            return sequence
        try:
            keys = self.keys((*sequence.prompt_ids, *sequence.completion_ids), sequence.media)
        except DataError as error:
            raise EngineError(str(error)) from error
        end = len(sequence.prompt_ids)
        return replace(sequence, prompt_ids=keys[:end], completion_ids=keys[end:])

    @property
    def shifts(self) -> bool:
        """Whether positions after an image may be other than tokens' indices."""
        return self.model is not None and self.model.turns

    def keep_only(self, requests: Sequence[GenerateRequest]) -> None:
        """Forget images that none of these has."""
        self.tokens.keep_only({image.sha256 for request in requests for image in request.media})

    def forget_features(self) -> None:
        """The weights are others now."""
        self.tokens.features = {}

    def inputs(self, lm: Model, rows: Sequence[Keys], first_B: Sequence[int], columns: int) -> dict[str, Tensor]:
        """What the model gets instead of ids and positions; nothing where no row has an image.

        rows: whole sequences. first_B: the index in its row of each row's token in the first column; below 0, and from
        the row's end on, there is padding.
        """
        if self.model is None or all(min(row, default=0) >= 0 for row in rows):
            return {}
        keys_BT = np.zeros((len(rows), columns), dtype=np.int64)
        for row, (keys, first) in enumerate(zip(rows, first_B, strict=True)):
            part = keys[max(first, 0) : max(first + columns, 0)]
            keys_BT[row, max(-first, 0) : max(-first, 0) + len(part)] = part
        given = {"inputs_embeds": self.model.embeddings(lm.inner, self.tokens, keys_BT, keep=True)}
        if self.model.turns:
            positions_3BT = torch.zeros(3, len(rows), columns, dtype=torch.int64)
            for row, (keys, first) in enumerate(zip(rows, first_B, strict=True)):
                start, end = max(first, 0), min(first + columns, len(keys))
                if start >= end:
                    continue
                positions_3BT[:, row, start - first : end - first] = self._positions(lm, keys)[:, start:end]
            given["position_ids"] = to_device(lm.device, positions_3BT)
        return given

    def shift(self, lm: Model, keys: Keys) -> int:
        """How much further on the positions of tokens after `keys` are than their indices."""
        if self.model is None or not self.model.turns:
            return 0
        return int(self._positions(lm, keys).max()) + 1 - len(keys)

    def _positions(self, lm: Model, keys: Keys) -> Tensor:
        assert self.model is not None
        found = self.model.positions(lm.inner, self.tokens, keys)
        return torch.arange(len(keys)).expand(3, -1) if found is None else found


class PositionShift:
    """For rows that decode: how much further on their positions are than their tokens' indices."""

    def __init__(self, lm: Model) -> None:
        self.lm = lm
        self.shift_B: Tensor | None = None
        """None = no row has any."""

    def clear(self) -> None:
        """There are no rows."""
        self.shift_B = None

    def put(self, prompts: Sequence[Keys], index_N: Tensor, slots_N: Tensor, rows: int) -> None:
        """Row `slots_N[n]` becomes the prompt `index_N[n]`. rows: number of rows afterwards."""
        images = self.lm.images
        if images is None:
            return
        shifts = [images.shift(self.lm, prompt) for prompt in prompts]
        if self.shift_B is None and not any(shifts):
            return
        shift_B = torch.zeros(rows, dtype=torch.int64, device=self.lm.device)
        if self.shift_B is not None:
            shift_B[: len(self.shift_B)] = self.shift_B
        shift_B[slots_N] = to_device(self.lm.device, shifts)[index_N]
        self.shift_B = shift_B

    def keep(self, kept: list[int]) -> None:
        """Keep these rows, in that order."""
        if self.shift_B is not None:
            self.shift_B = self.shift_B[to_device(self.lm.device, kept)]

    def inputs(self, position_B1: Tensor) -> dict[str, Tensor]:
        """What the model gets instead of these positions."""
        return {} if self.shift_B is None else {"position_ids": position_B1 + self.shift_B[:, None]}
