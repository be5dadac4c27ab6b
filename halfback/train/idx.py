"""IDX, the format in which MNIST is published, and what took its place: Fashion-MNIST.

bytes   0 0 8 d     8: values are unsigned bytes; d: how many sizes follow
        d sizes     of 32 bits, the most significant byte first
        values      as many as the sizes' product; nothing follows
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

KINDS = ("train", "t10k")
SOURCE = "Wanted: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte, plain or as .gz."


def read_images(root: Path, kind: str) -> tuple[Path, np.ndarray, np.ndarray]:
    """Where they lie, uint8 images (N, H, W), and uint8 labels (N,)."""
    path = _file(root, f"{kind}-images-idx3-ubyte")
    images, labels = _read(path, 3), _read(_file(root, f"{kind}-labels-idx1-ubyte"), 1)
    return path, images, labels


def _file(root: Path, name: str) -> Path:
    """The file, or its packed form."""
    found = next((p for p in (root / name, root / f"{name}.gz") if p.is_file()), None)
    if found is None:
        raise FileNotFoundError(f"data '{root / name}': there is no such file, nor with .gz. {SOURCE}")
    return found


def _read(path: Path, ndim: int) -> np.ndarray:
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as e:
        raise ValueError(f"data '{path}' is no whole .gz file: {e}. Download it again.") from e
    head = 4 + 4 * ndim
    if len(data) < head or data[:4] != bytes((0, 0, 8, ndim)):
        raise ValueError(f"data '{path}' begins with {data[:4].hex(' ')}; {ndim} sizes of bytes in IDX begin with 00 00 08 0{ndim}.")
    sizes = np.frombuffer(data, ">u4", ndim, 4).tolist()
    if len(data) - head != math.prod(sizes):
        raise ValueError(
            f"data '{path}' has {len(data) - head} bytes of values, and its sizes {sizes} want {math.prod(sizes)}. Download it again."
        )
    return np.frombuffer(data, np.uint8, offset=head).reshape(sizes)
