"""A run's images: once each, within a bound, and as they were."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.errors import StoreError
from mrl.store.media import FOLDER, MediaFolder, read_image
from mrl.store.rows import to_rollout
from mrl.types import Group, Media, Rollout, Sample, Task
from tests.vision_models import png


def group(*images: bytes) -> Group:
    media = tuple(Media(data, start=place, length=1) for place, data in enumerate(images))
    sample = Sample([1] * len(images), [2], [-1.0], [1], 0, media=media)
    return Group(Task("t", "p"), [Rollout("r", "t", 0, [], [sample])])


def test_an_image_is_kept_once_while_there_is_room(tmp_path: Path) -> None:
    told: list[str] = []
    red, blue, green = (Media(png(colour)) for colour in ("red", "blue", "green"))
    folder = MediaFolder(tmp_path, told.append, most=len(red.data) + len(blue.data))
    folder.add([group(red.data, blue.data), group(red.data)])
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == sorted([red.sha256, blue.sha256])
    assert read_image(tmp_path, red.sha256) == red.data
    again = MediaFolder(tmp_path, told.append, most=folder.most)  # a resumed run
    for _ in range(2):
        again.add([group(green.data, red.data)])
    assert len(told) == 1
    assert "recorded by hash alone" in told[0]
    with pytest.raises(StoreError, match="only its hash"):
        read_image(tmp_path, green.sha256)
    (tmp_path / FOLDER / red.sha256).write_bytes(b"another")
    with pytest.raises(StoreError, match="is not the image any more"):
        read_image(tmp_path, red.sha256)


def test_a_record_without_its_images_says_so() -> None:
    from mrl.store.arrays import decode_samples, encode_samples

    (rollout,) = group(png()).rollouts
    (row,) = decode_samples(encode_samples(rollout.samples))
    assert row["media"] == [{"sha256": Media(png()).sha256, "bytes": len(png()), "start": 0, "length": 1}]
    fields = {name: getattr(rollout, name) for name in Rollout.__dataclass_fields__}
    assert to_rollout({**fields, "samples": [row]}, lambda sha256: png()) == rollout
    with pytest.raises(StoreError, match="only its hash"):
        to_rollout({**fields, "samples": [row]})
