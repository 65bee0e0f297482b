"""Whether a run can take its tasks' images, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mrl.config import OrchestratorConfig
from mrl.data.images import pictures_in, pictures_of_row
from mrl.data.tasks import Row
from mrl.engines import ENGINES
from mrl.errors import ConfigError
from mrl.models import load_processor
from mrl.types import Task

if TYPE_CHECKING:
    from transformers import ProcessorMixin


def processor_of(config: OrchestratorConfig) -> ProcessorMixin | None:
    """What makes pixels of images; None where the model or the engine takes none."""
    return load_processor(config.model) if _engine_takes_images(config) else None


def check_images(config: OrchestratorConfig, tasks: Sequence[Task], *, taken: bool) -> None:
    """Raise ConfigError for tasks with images where the model or the engine takes none; DataError, naming the row, for
    an image whose file cannot be read. taken: whether both take images."""
    pictures = [[] if isinstance(task.prompt, str) else pictures_in(task.prompt) for task in tasks]
    with_images = [task for task, own in zip(tasks, pictures, strict=True) if own]
    if not with_images:
        return
    first = with_images[0]
    if not _engine_takes_images(config):
        raise ConfigError(
            f"engine: {config.runtime.engine} takes no images, and {len(with_images)} of the tasks have some (the "
            f"first is {first.id!r}); use engine: transformers"
        )
    if not taken:
        raise ConfigError(
            f"model: {config.model.model} takes no images, and {len(with_images)} of the tasks have some (the first is "
            f"{first.id!r}); use a model of images and text, or leave out the columns image and images"
        )
    for picture in (picture for own in pictures for picture in own):
        picture.check()


def _engine_takes_images(config: OrchestratorConfig) -> bool:
    return bool(getattr(ENGINES.get(config.runtime.engine), "takes_images", False))


def refuse_images(rows: Sequence[Row], where: str) -> None:
    """Raise ConfigError for rows with images, where nobody takes them."""
    for index, row in enumerate(rows):
        lists = [value for value in row.values() if isinstance(value, list)]
        messages = [item for value in lists for item in value if isinstance(item, dict)]
        contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
        parts = [part for content in contents for part in content if isinstance(part, dict)]
        seen = any(part.get("type") in ("image", "image_url") for part in parts)
        if seen or pictures_of_row(row, f"{where}: row {index}")[1]:
            raise ConfigError(
                f"mode: simple takes no images, and {where}, row {index}, has some; use mode: orchestrated, or leave "
                "out the columns image and images"
            )
