"""Folders of images: which files are there, and how one is read.

FOLDER/CLASS/*.jpg   one folder for each class; labels are the training part's classes, sorted
random crop          a box of random area and shape, resized; a pure function of the draw
centre               the shorter side resized to 256 / 224 of the crop's, and the middle of that
"""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..extras import install

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of a random crop: its share of the area, its width to its height
RESIZED = 256 / 224  # the shorter side before the centre crop, in sides of the crop


def class_names(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise FileNotFoundError(f"data '{folder}': there is no such folder. Wanted: train/CLASS/ and val/CLASS/ with an image a file.")
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())
    if not names:
        raise ValueError(f"data '{folder}' has no folders in it; wanted one for each class.")
    return names


def list_files(folder: Path, names: list[str], notes: list[str]) -> tuple[list[str], list[int]]:
    """The images in a folder's classes, with their labels. `names`: the classes of the training part."""
    found = class_names(folder)
    unknown = sorted(set(found) - set(names))
    if unknown:
        raise ValueError(f"data '{folder}' has {len(unknown)} classes that train/ has not, the first is {unknown[0]!r}.")
    paths: list[str] = []
    labels: list[int] = []
    others = 0
    for name in found:
        entries = sorted(os.listdir(folder / name))
        images = [e for e in entries if e.lower().endswith(SUFFIXES)]
        if not images:
            raise ValueError(f"data '{folder / name}' has no images; wanted files that end in {', '.join(SUFFIXES)}.")
        others += len(entries) - len(images)
        paths += [os.path.join(folder, name, e) for e in images]
        labels += [names.index(name)] * len(images)
    if others:
        notes.append(f"{others} files of {folder.name}/ are no images by their names and are left out")
    if len(found) < len(names):
        notes.append(f"{folder.name}/ has {len(found)} of the {len(names)} classes")
    return paths, labels


def check_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as e:
        raise ValueError(f"data 'folder' is read with Pillow: {install('pillow')}.") from e


@contextlib.contextmanager
def _image(path: str) -> Iterator[Any]:
    from PIL import Image

    try:
        with Image.open(path) as file:
            yield file
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as e:
        raise ValueError(
            f"data '{path}' cannot be read as an image: {e}. Replace the file; or remove it, if no training with this data has begun."
        ) from e


def read_image(path: str, size: int, draw: random.Random | None) -> np.ndarray:
    """uint8 (size, size, 3): a random crop, or, without a draw, the centre."""
    from PIL import Image

    with _image(path) as file:
        image = _in_bytes(file).convert("RGB")
    width, height = image.size
    box = random_box(width, height, draw) if draw else None
    if box:
        return np.asarray(image.crop(box).resize((size, size), Image.Resampling.BILINEAR))
    short, shortest = min(width, height), max(size, round(size * RESIZED))
    image = image.resize((int(shortest * width / short), int(shortest * height / short)), Image.Resampling.BILINEAR)
    left, top = round((image.width - size) / 2), round((image.height - size) / 2)
    return np.asarray(image.crop((left, top, left + size, top + size)))


def _in_bytes(image: Any) -> Any:
    """With a byte a channel: of 16 bits the upper eight, which convert() would cut off at 255."""
    from PIL import Image

    if image.mode == "F":
        raise ValueError("its pixels are floats, whose range is not known")
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))


def check_headers(paths: Iterable[str]) -> None:
    """Before anything is trained: is each file an image? What is behind its header is read when its turn comes."""
    for path in paths:
        with _image(path):
            pass


def random_box(width: int, height: int, draw: random.Random) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of a box of random area and shape; after ten that do not fit, the largest in the middle."""
    for _ in range(10):
        area = width * height * draw.uniform(*SCALE)
        ratio = math.exp(draw.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = draw.randint(0, width - w), draw.randint(0, height - h)
            return left, top, left + w, top + h
    w, h = min(width, max(1, round(height * RATIO[1]))), min(height, max(1, round(width / RATIO[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h
