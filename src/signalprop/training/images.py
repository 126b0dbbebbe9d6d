"""Images with classes: read from where they are kept, brought to one size, cut into patches."""

from __future__ import annotations

import gzip
import io
import math
import zlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from signalprop.errors import InputError, require
from signalprop.memory import check_fits
from signalprop.moments import FloatArray
from signalprop.storage import opened
from signalprop.training.recipe import Data
from signalprop.training.sources import IDX_FILES, IMAGE, LABEL, Place, is_hub_name, missing, open_table, read_arrays

Pixels = NDArray[np.uint8]  # (channels, size, size)
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
_IDX = {"train": "train", "test": "t10k"}  # what the files of MNIST and its kin begin with
_IDX_BYTES = 0x08
_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class Labelled:
    """An image and the class that it is said to be of: a number, or a name."""

    pixels: Pixels
    label: Any


def labelled_images(data: Data, place: Place) -> tuple[Iterator[Labelled], tuple[str, ...] | None]:
    """The images of a source, in data.channels and data.image_size, and the names of their classes, if it has any.

    A source is `digits` (scikit-learn), a NumPy file (.npz with x_train, y_train, x_test, y_test), a directory of idx
    files as MNIST has them, a directory class/image.png (or split/class/image.png), a table with a column of images, or
    a set of `datasets`.

    Raises:
        InputError: nothing there, damaged, or of another shape.
    """
    path = Path(place.source)
    if place.source == "digits":
        return _digits(data), None
    if path.is_file() and path.suffix == ".npz":
        return _arrays(data, *_npz(path, place.split)), None
    if path.is_dir() and list(path.glob(IDX_FILES)):
        return _arrays(data, *_idx_files(path, place.split)), None
    if path.is_dir() and (folders := _class_folders(path, place.split)):
        return _folder(data, folders), tuple(folder.name for folder in folders)
    if not path.exists() and not is_hub_name(place.source):
        raise missing(place.source)
    return _table(data, place)


def patches_of(images: FloatArray, patch_size: int) -> FloatArray:
    """(..., channels, size, size) as (..., patches, patch_dim): row by row, and in a patch channel by channel."""
    *batch, channels, size, _ = images.shape
    grid = size // patch_size
    blocks = images.reshape(*batch, channels, grid, patch_size, grid, patch_size)
    n = len(batch)
    order = (*range(n), n + 1, n + 3, n, n + 2, n + 4)
    return blocks.transpose(order).reshape(*batch, grid * grid, channels * patch_size * patch_size)


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


def _npz(path: Path, split: str) -> tuple[NDArray[Any], NDArray[Any], str]:
    names = (f"x_{split}", f"y_{split}")
    found, known = read_arrays(path, names)
    for name in names:
        if name not in found:
            raise InputError(
                f"{path} has no array {name!r}; its arrays: {known}; expected x_train, y_train, x_test, y_test"
            )
    return found[names[0]], found[names[1]], str(path)


def _idx_files(path: Path, split: str) -> tuple[NDArray[Any], NDArray[Any], str]:
    if split not in _IDX:
        raise InputError(f"{path} has no split {split!r}; its splits: {', '.join(_IDX)}")
    found = []
    for kind in ("images-idx3", "labels-idx1"):
        files = sorted(path.glob(f"{_IDX[split]}-{kind}-ubyte*"))
        if not files:
            raise InputError(f"{path} has no file {_IDX[split]}-{kind}-ubyte or {_IDX[split]}-{kind}-ubyte.gz")
        found.append(_idx(files[0]))
    return found[0], found[1], str(path)


def _idx(path: Path) -> NDArray[np.uint8]:
    """An array of bytes in the idx format: two zeros, the type, the number of axes, their lengths, the values."""
    unpack: Any = gzip.open if path.suffix == ".gz" else nullcontext
    shape: tuple[int, ...] = ()
    content = b""
    try:
        with opened(path) as raw, unpack(raw) as file:
            head = file.read(4)
            if len(head) == 4 and head[:3] == bytes([0, 0, _IDX_BYTES]):
                lengths = file.read(4 * head[3])
                shape = tuple(int(n) for n in np.frombuffer(lengths[: len(lengths) // 4 * 4], ">u4"))
                whole = len(shape) == head[3] > 0
                n = math.prod(shape) if whole else 0
                check_fits(2 * n, f"the array of {path}", "it is damaged, or too large")
                content = _at_most(file, n + 1)  # a packed file can hold more than it says
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {' '.join(str(error).split())}") from None
    if not shape or len(content) != math.prod(shape):
        raise InputError(f"{path} is no idx file of bytes, or it is cut short")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _at_most(file: Any, n: int) -> bytes:
    """What a file holds from here on, up to n bytes; memory is taken for what is there."""
    parts = []
    while n > 0 and (block := file.read(min(_BLOCK, n))):
        parts.append(block)
        n -= len(block)
    return b"".join(parts)


def _arrays(data: Data, images: NDArray[Any], labels: NDArray[Any], name: str) -> Iterator[Labelled]:
    labels = labels.reshape(-1) if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if images.ndim not in (3, 4) or labels.shape != images.shape[:1] or images.dtype.kind not in "uif":
        raise InputError(
            f"{name} has images of shape {images.shape} and labels of shape {labels.shape}; expected "
            "(n, height, width) or (n, height, width, channels), and (n,)"
        )
    if images.ndim == 4 and images.shape[-1] not in (1, 3):
        raise InputError(f"{name} has images with {images.shape[-1]} channels in the last axis; expected 1 or 3")
    for image, label in zip(_as_bytes(images, name), labels, strict=True):
        yield Labelled(_sized(image, data), label.item())


def _as_bytes(images: NDArray[Any], name: str) -> NDArray[np.uint8]:
    if images.dtype == np.uint8 or not images.size:
        return images.astype(np.uint8)
    low, high = float(images.min()), float(images.max())
    if not (low >= 0 and high <= 255):
        raise InputError(f"{name} has pixels from {low:g} to {high:g}; expected 0 to 255, or 0 to 1")
    factor = 255.0 if images.dtype.kind == "f" and high <= 1 else 1.0
    return np.round(images * factor).astype(np.uint8)


def _sized(image: NDArray[np.uint8], data: Data) -> Pixels:
    """(height, width) or (height, width, channels) as (data.channels, data.image_size, data.image_size)."""
    if image.ndim == 3 and image.shape[-1] == 1:
        image = image[..., 0]
    size = data.image_size
    if image.shape == (size, size) and data.channels == 1:
        return image[None]
    if image.shape == (size, size, 3) and data.channels == 3:
        return np.ascontiguousarray(image.transpose(2, 0, 1))
    return _from_pillow(require("PIL.Image", "training").fromarray(image), data)


def _from_pillow(picture: Any, data: Data) -> Pixels:
    picture = picture.convert("L" if data.channels == 1 else "RGB")
    if picture.size != (data.image_size, data.image_size):
        picture = picture.resize((data.image_size, data.image_size), resample=2)  # bilinear
    array = np.asarray(picture, np.uint8)
    return array[None] if data.channels == 1 else np.ascontiguousarray(array.transpose(2, 0, 1))


def _class_folders(path: Path, split: str) -> list[Path]:
    """The directories of the classes, by their names."""

    def with_images(folder: Path) -> list[Path]:
        inside = sorted(item for item in folder.iterdir() if item.is_dir())
        return [item for item in inside if any(file.suffix.lower() in _SUFFIXES for file in item.iterdir())]

    return with_images(path / split if (path / split).is_dir() else path)


def _folder(data: Data, folders: list[Path]) -> Iterator[Labelled]:
    for folder in folders:
        for file in sorted(folder.iterdir()):
            if file.suffix.lower() in _SUFFIXES:
                yield Labelled(_decoded(file, str(file), data), folder.name)


def _decoded(content: Path | bytes, name: str, data: Data) -> Pixels:
    pillow = require("PIL.Image", "training")
    try:
        file = io.BytesIO(content) if isinstance(content, bytes) else opened(content)
        with file, pillow.open(file) as picture:
            return _from_pillow(picture, data)
    except Exception as error:  # pillow's decoders have many kinds of their own
        raise InputError(f"cannot read the image {name}: {' '.join(str(error).split())[:200]}") from None


def _table(data: Data, place: Place) -> tuple[Iterator[Labelled], tuple[str, ...] | None]:
    table = open_table(data, place)
    image = table.column(data.image, "data.image", IMAGE)
    label = table.column(data.label, "data.label", LABEL)
    base = Path(place.source) if Path(place.source).is_dir() else Path(place.source).parent

    def read() -> Iterator[Labelled]:
        for where, row in table.read([image, label]):
            yield Labelled(_pixels_in(row[image], f"{table.name}: {where}", base, data), row[label])

    return read(), table.classes(label)


def _pixels_in(value: Any, where: str, base: Path, data: Data) -> Pixels:
    """The image in a cell: decoded, encoded ({"bytes": ..., "path": ...}), a path, or nested lists."""
    if hasattr(value, "convert"):
        return _from_pillow(value, data)
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return _decoded(value, where, data)
    if isinstance(value, str):
        return _decoded(base / value, f"{base / value} of {where}", data)
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.zeros(0)
    if array.ndim not in (2, 3) or array.dtype.kind not in "uif":
        raise InputError(f"{where} holds no image; expected one, its path, or its pixels")
    return _sized(_as_bytes(array, where), data)
