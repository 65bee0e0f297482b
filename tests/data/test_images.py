"""Images in datasets: placed as TRL places them, read when they are needed, and named when they cannot be."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from mrl.data import load_tasks
from mrl.data.images import Picture, as_message, opened, pictures_in
from mrl.errors import DataError
from tests.vision_models import image, png

ASK = [{"role": "system", "content": "Look."}, {"role": "user", "content": "What colour?"}]


def shown(prompt: Any) -> Any:
    """Messages with hashes in the place of images."""
    return [
        {
            **message,
            "content": [
                {**part, "image": part["image"].media().sha256} if "image" in part else part
                for part in message["content"]
            ],
        }
        if isinstance(message["content"], list)
        else message
        for message in prompt
    ]


def test_images_are_placed_as_trl_does() -> None:
    from trl.data_utils import prepare_multimodal_messages

    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}]}]
    for messages, pictures in ((ASK, [png("red")]), (ASK, [png("red"), png("blue")]), (parts, [png("red"), png()])):
        (task,) = load_tasks([{"prompt": messages, "images": pictures}])
        expected = prepare_multimodal_messages(messages, [Picture(data) for data in pictures])
        for mine, theirs in zip(shown(task.prompt), shown(expected), strict=True):
            if isinstance(mine["content"], list):  # texts without an image stay texts
                assert mine == theirs
            else:
                assert [{"type": "text", "text": mine["content"]}] == theirs["content"]
        assert [picture.data for picture in pictures_in(task.prompt)] == pictures


@pytest.mark.parametrize("given", ["pil", "bytes", "dict", "path", "data url", "part", "dataset", "datasets"])
def test_every_way_to_give_an_image(given: str, tmp_path: Path) -> None:
    import datasets

    (tmp_path / "a.png").write_bytes(png())
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    rows: Any = {
        "pil": [{"prompt": "p", "image": image()}],
        "bytes": [{"prompt": "p", "image": png()}],
        "dict": [{"prompt": "p", "image": {"bytes": png(), "path": None}}],
        "path": [{"prompt": "p", "images": [str(tmp_path / "a.png")]}],
        "data url": [{"prompt": "p", "image": url}],
        "part": [{"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}],
    }.get(given)
    if rows is None:
        column, kind = (
            ("image", datasets.Image()) if given == "dataset" else ("images", datasets.List(datasets.Image()))
        )
        value = image() if given == "dataset" else [image()]
        features = datasets.Features({"prompt": datasets.Value("string"), column: kind})
        rows = datasets.Dataset.from_dict({"prompt": ["p"], column: [value]}, features=features)
    (task,) = load_tasks(rows)
    (picture,) = pictures_in(task.prompt)
    media = picture.media()
    assert media.sha256 == hashlib.sha256(media.data).hexdigest() == picture.record()["sha256"]
    assert picture.open().tobytes() == image().tobytes()
    assert picture.size == (28, 28)
    if given == "dataset":
        assert rows.features["image"].decode, "the user's own dataset is left as it was"
    if "image" in task.columns:
        assert opened(task.columns)["image"].size == (28, 28)


def test_nothing_is_read_before_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p", "image": f"{tmp_path}/{n}.png"}) + "\n" for n in range(3)))
    tasks = load_tasks(path)
    assert len({task.id for task in tasks}) == 3
    (tmp_path / "1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"row 0, column 'image': there is no file .*0\.png"):
        pictures_in(tasks[0].prompt)[0].check()
    with pytest.raises(DataError, match=r"row 1, column 'image' \(.*1\.png\) is no image that can be read"):
        pictures_in(tasks[1].prompt)[0].check()
    cut = png()[:60]
    with pytest.raises(DataError, match="is no image that can be read"):
        Picture(cut).media()


def test_a_column_of_words_is_no_image() -> None:
    (task,) = load_tasks([{"prompt": "p", "image": "a red ball"}])
    assert task.prompt == "p"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"image": png(), "images": [png()]}, "has images in both columns"),
        (
            {"images": [png()], "prompt": [{"role": "user", "content": [{"type": "image"}] * 2}]},
            "no image, and the row",
        ),
        ({"images": [png()] * 2, "prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "the row has 2 images"),
        ({"image": "data:image/png,abc"}, "data URL that is not base64"),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "url": "https://a/b.png"}]}]}, "is a web address"),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "image": 3}]}]}, "of type int"),
    ],
)
def test_what_is_refused_names_the_row(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"row 1.*{message}"):
        load_tasks([{"prompt": "p"}, {"prompt": "p", **row}])


def test_photographs_are_turned_as_they_were_taken() -> None:
    import io

    import PIL.Image

    photo = PIL.Image.new("RGB", (8, 4))
    exif = photo.getexif()
    exif[0x0112] = 6
    encoded = io.BytesIO()
    photo.save(encoded, "JPEG", exif=exif)
    picture = Picture(encoded.getvalue())
    assert picture.size == (8, 4), "height and width"
    assert picture.open().size == (4, 8)


def test_a_message_needs_its_image() -> None:
    with pytest.raises(DataError, match="here: a part of type 'image' has no image"):
        as_message({"role": "tool", "content": [{"type": "image"}]}, "here")


def test_photographs_of_pil_are_turned_as_files_are(tmp_path: Path) -> None:
    photograph = PIL.Image.new("CMYK", (40, 20))
    turned = PIL.Image.Exif()
    turned[0x0112] = 6
    photograph.save(tmp_path / "a.jpg", exif=turned)
    with PIL.Image.open(tmp_path / "a.jpg") as lazy:
        for picture in (Picture(tmp_path / "a.jpg"), Picture(lazy)):
            assert (picture.size, picture.open().size, picture.size) == ((40, 20), (20, 40), (40, 20))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("~nobody-of-this-name/a.png", "is no path"),
        ("a\0b.png", "embedded null byte"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n", "EPS is not taken"),
        (png()[:40] + b"\0" * 60, "no image that can be read"),
    ],
)
def test_what_is_no_image_is_an_error_of_the_data(source: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        Picture(source).media()


def test_a_damaged_image_that_was_not_read_yet() -> None:
    data = png(size=(64, 64))
    at = data.index(b"IDAT")
    with pytest.raises(DataError, match="cannot be written as PNG"):
        Picture(PIL.Image.open(io.BytesIO(data[:at] + b"IDAT" + b"\1" * 60))).media()
