"""Messages of a conversation, in the fields and the JSON of OpenAI's chat completions and of Eval Protocol."""

from __future__ import annotations

import json
import uuid
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from mrl.types import Message as PlainMessage

NOT_ASKED = {"control_plane_step", "reasoning_content", "weight", "logprobs"}
"""Fields that no chat completion takes."""


class _Mapping(BaseModel):
    """A model whose fields can also be read as those of a dict."""

    def __getitem__(self, key: str) -> Any:
        if key not in type(self).model_fields:
            raise KeyError(key)
        return getattr(self, key)

    def get(self, key: str, default: Any = None) -> Any:
        """As a dict's."""
        return getattr(self, key, default)


class FunctionCall(BaseModel):
    """What a call calls. `arguments` is JSON text, as the model wrote it."""

    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str = "{}"

    @field_validator("arguments", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class ToolCall(BaseModel):
    """A call of a tool."""

    model_config = ConfigDict(extra="allow")

    id: str = Field(default_factory=lambda: f"call_{uuid.uuid4().hex[:12]}")
    function: FunctionCall
    type: Literal["function"] = "function"


class TextPart(_Mapping):
    """A part of a message that is text."""

    text: str
    type: Literal["text"] = "text"


class ImagePart(_Mapping):
    """A part of a message that is an image: `{"url": …}`."""

    image_url: dict[str, Any]
    type: Literal["image_url"] = "image_url"


class Message(BaseModel):
    """One message."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str | list[TextPart | ImagePart] | None = ""
    reasoning_content: str | None = None
    """What the model thought before it answered."""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    control_plane_step: dict[str, Any] | None = None
    """What an environment said beside the conversation: reward, terminated …"""
    weight: int | None = None
    """0 = not to be learned from."""
    logprobs: Any = None

    @model_validator(mode="before")
    @classmethod
    def _ids_for_calls(cls, value: Any) -> Any:
        """Calls without an id get one."""
        calls = value.get("tool_calls") if isinstance(value, dict) else None
        if not isinstance(calls, list):
            return value
        kept = [{k: v for k, v in c.items() if k != "id" or v} if isinstance(c, dict) else c for c in calls]
        return value | {"tool_calls": kept}

    @property
    def text(self) -> str:
        """Its content as text, images left out."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content if isinstance(part, TextPart))

    def for_completion(self) -> dict[str, Any]:
        """As a chat completion's request takes it."""
        return self.model_dump(exclude_none=True, exclude=NOT_ASKED)

    def plain(self) -> PlainMessage:
        """As chat templates take it: the arguments of calls are values, not text."""
        message = self.model_dump(exclude_none=True, exclude=NOT_ASKED - {"reasoning_content"})
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = _values(call["function"]["arguments"])
        return message

    @classmethod
    def of(cls, message: PlainMessage) -> Message:
        """From a chat template's."""
        return cls.model_validate(message)


def _values(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
