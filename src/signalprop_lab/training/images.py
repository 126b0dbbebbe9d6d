"""Images with classes: read from where they are kept, brought to one size, cut into patches."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from signalprop.errors import refusing, require
from signalprop.files.storage import opened
from signalprop.network.moments import FloatArray
from signalprop_lab.training.recipe import Data
from signalprop_lab.training.sources import IMAGE, LABEL, Place, Row, open_table
from signalprop_lab.training.stream_offset import StreamOffset, together

Pixels = NDArray[np.uint8]  # (channels, size, size)


@dataclass(frozen=True, eq=False)
class Labelled:
    """An image and the class that it is said to be of: a number, or a name."""

    pixels: Pixels
    label: Any


def labelled_images(
    data: Data, place: Place, offset: StreamOffset | None = None
) -> tuple[Iterator[Labelled], tuple[str, ...] | None]:
    """The images of a source, in data.channels and data.image_size, and the names of their classes, if it has any.

    A source is `digits` (scikit-learn), a directory class/image.png (or split/class/image.png), a table with a column
    of images, or a set of `datasets`. offset: as `Table.read`.
    """
    if place.source == "digits":
        return _digits(data), None
    table = open_table(data, place)
    image = table.column(data.image, "data.image", IMAGE)
    label = table.column(data.label, "data.label", LABEL)
    names = table.classes(label)
    table = table.decoded(image, require("datasets", "training").Image(decode=False))

    def made(found: Row) -> Labelled:
        where, row = found
        return Labelled(_decoded(row[image], f"in {image!r} of {where}", data), row[label])

    def read() -> Iterator[Labelled]:
        with ThreadPoolExecutor() as pool:  # decoders let go of the interpreter
            for rows in together(table.read(image, label, offset=offset)):
                yield from pool.map(made, rows)

    return read(), names


def augmented(image: FloatArray, rng: np.random.Generator) -> FloatArray:
    """A random crop of the image with an eighth of its size as a margin of zeros, flipped left to right or not."""
    size = image.shape[-1]
    margin = max(1, size // 8)
    wide = np.pad(image, ((0, 0), (margin, margin), (margin, margin)))
    row, column = rng.integers(0, 2 * margin + 1, 2)
    crop = wide[:, row : row + size, column : column + size]
    return crop[..., ::-1] if rng.random() < 0.5 else crop


def _digits(data: Data) -> Iterator[Labelled]:
    """scikit-learn's digits (8 x 8), enlarged without smoothing as `signalprop.data.image_batch` does."""
    digits = require("sklearn.datasets", "models").load_digits()
    pick = np.arange(data.image_size) * 8 // data.image_size
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, pick][:, :, pick]
    for image, label in zip(images, digits.target, strict=True):
        yield Labelled(np.repeat(image[None], data.channels, axis=0), int(label))


def _decoded(cell: Any, where: str, data: Data) -> Pixels:
    """A picture ({"bytes": ..., "path": ...}) as (data.channels, data.image_size, data.image_size)."""
    pillow = require("PIL.Image", "training")
    with refusing(f"cannot read the image {where}", "expected a picture that Pillow reads"):
        file = io.BytesIO(cell["bytes"]) if cell["bytes"] else opened(cell["path"])
        size = (data.image_size, data.image_size)
        with file, pillow.open(file) as opened_picture:
            picture = opened_picture.convert("L" if data.channels == 1 else "RGB")
            if picture.size != size:
                picture = picture.resize(size, resample=2)  # bilinear
            array = np.asarray(picture, np.uint8)
    return array[None] if data.channels == 1 else np.ascontiguousarray(array.transpose(2, 0, 1))
