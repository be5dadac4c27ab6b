"""Images to train on: a real set that comes with scikit-learn, or the user's own arrays.

    digits      1797 scanned handwritten digits of 8 x 8 pixels: 1437 to train on, 360 to test. Nothing is downloaded.
    FILE.npz    arrays x_train, y_train, x_test, y_test: images (N, H, W) or (N, C, H, W), uint8 or float; labels (N,) of integers

Images come out as float32 (N, C, H, W) with the training set's mean 0 and deviation 1, labels as int64.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .extras import install

KEYS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Data:
    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x_train.shape[1:])

    @property
    def classes(self) -> int:
        return int(max(self.y_train.max(), self.y_test.max())) + 1


def load_data(spec: str) -> Data:
    """The data that "digits" or "path/to/file.npz" means."""
    if spec == "digits":
        return digits()
    if spec.endswith(".npz"):
        return _from_file(Path(spec))
    raise ValueError(f"data {spec!r} is unknown. Data: digits, or a path/to/file.npz with arrays {', '.join(KEYS)}.")


def digits(test: int = 360, seed: int = 0) -> Data:
    """The digits, split the same way every time."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as e:
        raise ValueError(f"data 'digits' comes with scikit-learn: {install('scikit-learn')}.") from e
    found = load_digits()
    order = np.random.default_rng(seed).permutation(len(found.target))
    x, y = found.images[order].astype(np.float32), found.target[order]
    return _make("digits", x[test:], y[test:], x[:test], y[:test])


def _from_file(path: Path) -> Data:
    if not path.is_file():
        raise FileNotFoundError(f"data '{path}': there is no such file.")
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (zipfile.BadZipFile, OSError, ValueError, AttributeError, TypeError) as e:
        raise ValueError(f"data '{path}' is no .npz file of plain arrays.") from e
    missing = [k for k in KEYS if k not in found]
    if missing:
        raise ValueError(f"data '{path}': {', '.join(missing)} missing. It has {', '.join(found) or 'nothing'}; wanted: {', '.join(KEYS)}.")
    arrays = [found[k] for k in KEYS]
    _check(path, *arrays)
    return _make(path.name, *arrays)


def check_channels(path: Path, key: str, x: np.ndarray) -> None:
    """Channels come first: pictures of n x n in at most four channels are not n channels of n x 4 and less."""
    if x.ndim == 4 and x.shape[1] == x.shape[2] > 4 >= x.shape[3]:
        raise ValueError(
            f"data '{path}': {key} has shape {x.shape}, with channels last; wanted (N, H, W) or (N, C, H, W), "
            f"as {key}.transpose(0, 3, 1, 2)."
        )


def _check(path: Path, x_train: np.ndarray, y_train: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> None:
    for kind, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if x.ndim not in (3, 4) or x.dtype.kind not in "uf":
            raise ValueError(
                f"data '{path}': x_{kind} has shape {x.shape} and type {x.dtype}; wanted (N, H, W) or (N, C, H, W), uint8 or float."
            )
        check_channels(path, f"x_{kind}", x)
        if y.shape != x.shape[:1] or y.dtype.kind not in "iu":
            raise ValueError(f"data '{path}': y_{kind} has shape {y.shape} and type {y.dtype}; wanted ({len(x)},) integers, one an image.")
        if not len(y) or y.min() < 0:
            raise ValueError(f"data '{path}': y_{kind} has {len(y)} labels; wanted at least one, and none below 0.")
    if x_train.shape[1:] != x_test.shape[1:]:
        raise ValueError(f"data '{path}': images of x_train are {x_train.shape[1:]}, of x_test {x_test.shape[1:]}.")


def _make(name: str, x_train: np.ndarray, y_train: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> Data:
    x, z = _images(x_train), _images(x_test)
    mean, deviation = x.mean(), x.std().clamp_min(1e-6)
    labels = [torch.from_numpy(y.astype(np.int64)) for y in (y_train, y_test)]
    return Data(name, (x - mean) / deviation, labels[0], (z - mean) / deviation, labels[1])


def _images(x: np.ndarray) -> Tensor:
    images = torch.from_numpy(x.astype(np.float32))
    if x.dtype == np.uint8:
        images = images / 255
    return images.unsqueeze(1) if images.ndim == 3 else images
