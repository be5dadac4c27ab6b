"""Sets to train on: images, clips and text, held as bytes on the device where training happens.

    cifar10, cifar100   ROOT/train.bin, test.bin (cifar10: data_batch_1 ... 5.bin, test_batch.bin): the official binary versions
    mnist, fashion-mnist   ROOT/train-images-idx3-ubyte.gz and its three companions, as published (`idx.py`)
    digits              scikit-learn's 1797 digits of 8 x 8 pixels, split as in `data.py`; nothing to download
    FILE.npz            arrays x_train, y_train, x_test, y_test: images (N, H, W) or (N, C, H, W) of uint8, or of floats in [0, 1]
    folder              ROOT/train/CLASS/*.jpg, ROOT/val/CLASS/*.jpg: read from disk batch by batch
    video               ROOT/train.npz, test.npz: clips (N, T, H, W, 3) of uint8, labels (N,)
    text                ROOT is a file.txt, whose last tenth is the test part, or a folder of train.txt and test.txt; a token is a byte
    tokens              ROOT/train.npz, test.npz: `tokens` (N, L), and `labels` (N,), or `vocabulary`, a number: then the next token is
                        learned, of windows of L - 1

ROOT is `root`, or $HALFBACK_DATA/NAME. A set is read and checked whole when it is loaded, but for a folder, whose images are checked
when they are read.

What a run sees is a pure function of its seed: `order` of (seed, epoch), a folder's random crops of (seed, epoch, file).
With `validation=N` the test part is N samples held out of the training part, the same ones for every seed. The test set is then not used.

Shapes: N samples, C channels, T frames, H height, W width, L tokens.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import zipfile
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..data import KEYS, check_channels, digits
from .folder import check_headers, check_pillow, class_names, list_files, read_image
from .idx import KINDS, SOURCE, read_images
from .settings import Settings

VARIABLE = "HALFBACK_DATA"
PIXELS = (3, 32, 32)  # of CIFAR
SIZE, SEQ = 224, 256  # of a folder's images, of a window of text
ESTIMATED = 512  # images of a folder that its mean and deviation are taken from
WORKERS = min(16, os.cpu_count() or 1)  # threads that read images; Pillow decodes and resizes without the interpreter's lock
AHEAD = 3  # batches under way
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Part:
    """The training part of a set, or the part that is tested on.

    inputs   uint8 images (N, C, H, W) or clips (N, C, T, H, W), or int32 windows of tokens (N, L + 1)
    labels   int64 (N,); None where the next token is learned
    """

    inputs: Tensor
    labels: Tensor | None

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def device(self) -> torch.device:
        return self.inputs.device

    def to(self, device: torch.device | str) -> Part:
        return replace(self, inputs=self.inputs.to(device), labels=None if self.labels is None else self.labels.to(device))

    def take(self, indices: Tensor) -> Part:
        """The part of these samples."""
        return replace(self, inputs=self.inputs[indices], labels=None if self.labels is None else self.labels[indices])

    def batch(self, indices: Tensor, *, epoch: int = 0) -> tuple[Tensor, Tensor | None]:
        """Inputs, still uint8, and labels; of text without labels int64 tokens and their successors."""
        indices = indices.to(self.device)
        inputs = self.inputs.index_select(0, indices)
        if self.labels is None:
            tokens = inputs.long()
            return tokens[:, :-1], tokens[:, 1:]
        return inputs, self.labels.index_select(0, indices)

    def stream(self, chunks: list[Tensor], epoch: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        for chunk in chunks:
            yield self.batch(chunk, epoch=epoch)


@dataclass(frozen=True)
class Files(Part):
    """A part whose images lie in files. `inputs` are the numbers of its files (N,), on the CPU."""

    paths: tuple[str, ...] = field(default=(), repr=False)
    size: int = SIZE
    seed: int = 0
    random: bool = False  # a random crop, else the centre
    home: torch.device = CPU

    @property
    def device(self) -> torch.device:
        return self.home

    def to(self, device: torch.device | str) -> Files:
        assert self.labels is not None
        return replace(self, labels=self.labels.to(device), home=torch.device(device))

    def batch(self, indices: Tensor, *, epoch: int = 0) -> tuple[Tensor, Tensor | None]:
        (batch,) = self.stream([indices], epoch)
        return batch

    def stream(self, chunks: list[Tensor], epoch: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Batches in order, with the next ones already under way."""
        waiting: deque[tuple[Tensor, list[Future[np.ndarray]]]] = deque()
        pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="halfback-read")
        try:
            for chunk in chunks:
                chunk = chunk.cpu()
                waiting.append((chunk, [pool.submit(self._read, n, epoch) for n in self.inputs[chunk].tolist()]))
                if len(waiting) == AHEAD:
                    yield self._ready(*waiting.popleft())
            while waiting:
                yield self._ready(*waiting.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _ready(self, chunk: Tensor, images: list[Future[np.ndarray]]) -> tuple[Tensor, Tensor | None]:
        assert self.labels is not None
        stacked = np.empty((len(images), self.size, self.size, 3), np.uint8)
        for i, image in enumerate(images):
            stacked[i] = image.result()
        x = torch.from_numpy(stacked).permute(0, 3, 1, 2).contiguous()
        if self.home.type == "cuda":
            x = x.pin_memory()
        return x.to(self.home, non_blocking=True), self.labels.index_select(0, chunk.to(self.home))

    def _read(self, number: int, epoch: int) -> np.ndarray:
        draw = random.Random(seed_from("crop", self.seed, epoch, number)) if self.random else None
        return read_image(self.paths[number], self.size, draw)


@dataclass(frozen=True)
class DataSet:
    """A set with its parts, and what is known of it.

    kind             "images", "clips" or "text"
    classes          of the labels; where the next token is learned, the size of the vocabulary
    shape            of a sample: (C, H, W), (C, T, H, W) or (L,)
    mean, deviation  (C,), of the training part's values in [0, 1]; empty for text
    notes            what its user should know
    """

    name: str
    kind: str
    train: Part
    test: Part
    classes: int
    shape: tuple[int, ...]
    mean: Tensor
    deviation: Tensor
    notes: tuple[str, ...] = ()

    def to(self, device: torch.device | str) -> DataSet:
        """The whole set on a device; of a folder only the labels."""
        moved = {name: getattr(self, name).to(device) for name in ("train", "test", "mean", "deviation")}
        return replace(self, **moved)


class _Read(NamedTuple):
    """What a reader found."""

    kind: str
    train: Part
    test: Part
    classes: int
    notes: tuple[str, ...] = ()


# Loading


def load_set(
    spec: str,
    *,
    root: Path | str | None = None,
    validation: int = 0,
    seed: int = 0,
    size: int | None = None,
    seq: int | None = None,
) -> DataSet:
    """The set that `spec` names, on the CPU.

    root         where its files lie; $HALFBACK_DATA/NAME unless told
    validation   test on this many samples of the training part, held out of it, instead of on the test part
    seed         of a folder's random crops
    size         of a folder's images, 224 unless told
    seq          tokens in a window of text, 256 unless told
    """
    if spec not in READERS and not spec.endswith(".npz"):
        raise ValueError(f"data {spec!r} is unknown. Data: {', '.join(READERS)}, or a path/to/file.npz with arrays {', '.join(KEYS)}.")
    for name, value, owner in (("size", size, "folder"), ("seq", seq, "text")):
        if value is not None and spec != owner:
            raise ValueError(f"data {spec!r}: {name}={value} means something for {owner!r} only. Leave it out.")
        if value is not None and value < 1:
            raise ValueError(f"data {spec!r}: {name}={value} must be at least 1.")
    if root is not None and (spec == "digits" or spec.endswith(".npz")):
        raise ValueError(f"data {spec!r}: root='{root}' means nothing here, no folder is looked into. Leave it out.")
    options: dict[str, dict[str, int]] = {"folder": {"size": size or SIZE, "seed": seed}, "text": {"seq": seq or SEQ}}
    if spec.endswith(".npz"):
        found = _arrays(Path(spec))
    else:
        found = _digits() if spec == "digits" else READERS[spec](_root(spec, root), **options.get(spec, {}))
    return _finished(Path(spec).name, _held_out(spec, found, validation))


def set_of(settings: Settings) -> DataSet:
    """The set that a training is asked to be on."""
    s = settings
    return load_set(s.data, root=s.root, validation=s.validation, seed=s.seed, size=s.size, seq=s.seq)


def content_of(data: DataSet) -> int:
    """A number that another content changes; of a folder it is that of its files' names and classes."""
    found = 0
    for part in (data.train, data.test):
        if isinstance(part, Files):
            found = zlib.crc32("\n".join("/".join(Path(p).parts[-2:]) for p in part.paths).encode(), found)
        else:
            found = zlib.crc32(part.inputs.contiguous().numpy().data, found)
        found = found if part.labels is None else zlib.crc32(part.labels.numpy().data, found)
    return found


def _root(spec: str, root: Path | str | None) -> Path:
    if root is not None:
        return Path(root)
    if VARIABLE in os.environ:
        return Path(os.environ[VARIABLE]) / spec
    where = f" {SOURCES[spec]}" if spec in SOURCES else ""
    raise ValueError(f"data {spec!r}: where it lies is not known. Give root, or set {VARIABLE} to the folder that holds {spec}/.{where}")


def _finished(name: str, found: _Read) -> DataSet:
    kind, train, test, classes, notes = found
    if kind == "text":
        length = train.inputs.shape[1] - (train.labels is None)
        return DataSet(name, kind, train, test, classes, (length,), torch.empty(0), torch.empty(0), notes)
    if isinstance(train, Files):
        chosen = order(len(train), 0, 0)[:ESTIMATED]
        pixels, _ = replace(train, random=False).batch(chosen)
        notes += (f"mean and deviation are those of the centres of {len(chosen)} of the {len(train)} training images",)
    else:
        pixels = train.inputs
        notes += _repeats(train, test, kind) + _strangers(train, test)
    return DataSet(name, kind, train, test, classes, tuple(pixels.shape[1:]), *_statistics(pixels), notes)


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, in [0, 1], from exact histograms. A channel of one value gets a deviation of 1e-6."""
    counts = torch.zeros(x.shape[1], 256, dtype=torch.int64)
    for rows in x.split(4096):
        counts += torch.stack([torch.bincount(c.flatten(), minlength=256) for c in rows.unbind(1)])
    shares = counts / counts.sum(1, keepdim=True).double()
    values = torch.arange(256) / 255.0
    mean = (shares * values).sum(1, keepdim=True)
    deviation = (shares * (values - mean) ** 2).sum(1).sqrt()
    return mean.squeeze(1).float(), deviation.clamp_min(1e-6).float()


def _repeats(train: Part, test: Part, kind: str) -> tuple[str, ...]:
    tested = Counter(row.tobytes() for row in test.inputs.numpy())
    found = {row for row in map(bytes, train.inputs.flatten(1).numpy()) if row in tested}
    count = sum(tested[row] for row in found)
    return (f"{count} of the {len(test)} test {kind} are byte-identical to one of the training {kind}",) if count else ()


def _strangers(train: Part, test: Part) -> tuple[str, ...]:
    assert train.labels is not None and test.labels is not None
    strange = sorted(set(test.labels.tolist()) - set(train.labels.tolist()))
    return (f"{len(strange)} classes of the test part do not occur in the training part, the first is {strange[0]}",) if strange else ()


def _held_out(spec: str, found: _Read, count: int) -> _Read:
    """With a count, that many samples of the training part as the test part."""
    train, total = found.train, len(found.train)
    if not 0 <= count < total:
        raise ValueError(f"data {spec!r}: validation={count} does not lie in 0 ... {total - 1}; the training part has {total} samples.")
    if not count:
        return found
    held = _drawn(train.labels, total, count)
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[held] = True
    rest, test = train.take((~chosen).nonzero().squeeze(1)), train.take(chosen.nonzero().squeeze(1))
    if isinstance(test, Files):
        test = replace(test, random=False)
    note = f"tested on {count} samples held out of the training part; the test set is not used"
    return found._replace(train=rest, test=test, notes=(*found.notes, note))


def _drawn(labels: Tensor | None, total: int, count: int) -> Tensor:
    """The last `count` samples of a shuffled order, of each class its share, to the nearest sample. The same for every seed."""
    shuffled = order(total, 0, 0)
    if labels is None:
        return shuffled[-count:]
    classes, sizes = labels.unique(return_counts=True)
    shares = sizes.double() * count / total
    quotas = shares.floor().long()
    rest = count - int(quotas.sum())
    quotas[(shares.floor() - shares).argsort(stable=True)[:rest]] += 1
    drawn = labels[shuffled]
    groups = [shuffled[drawn == c][-quota:] for c, quota in zip(classes.tolist(), quotas.tolist(), strict=True) if quota]
    return torch.cat(groups)


# Order


def seed_from(*parts: int | str) -> int:
    """63 bits that depend on every part and on their order."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def order(n: int, seed: int, epoch: int) -> Tensor:
    """The shuffled order of an epoch: a pure function of its arguments, on the CPU."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed_from("order", seed, epoch)))


def batches(part: Part, indices: Tensor, size: int, *, epoch: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Consecutive batches of `indices`, from batch number `first` on. The last may be smaller."""
    if size < 1 or first < 0:
        raise ValueError(f"batches(): size={size} must be at least 1, first={first} at least 0.")
    if not isinstance(part, Files):
        indices = indices.to(part.device)  # once, not in every step
    return part.stream(list(indices[first * size :].split(size)) if first * size < len(indices) else [], epoch)


# CIFAR


def _cifar10(root: Path) -> _Read:
    root = _unpacked(root, "cifar-10-batches-bin", "test_batch.bin")
    train = [_records(root / f"data_batch_{i}.bin", 1, 10) for i in range(1, 6)]
    return _Read("images", _joined(train), _joined([_records(root / "test_batch.bin", 1, 10)]), 10)


def _cifar100(root: Path) -> _Read:
    root = _unpacked(root, "cifar-100-binary", "train.bin")
    train, test = (_joined([_records(root / f"{name}.bin", 2, 100)]) for name in ("train", "test"))
    return _Read("images", train, test, 100)


def _unpacked(root: Path, name: str, file: str) -> Path:
    """The folder of the files: the root, or the archive's own folder in it."""
    return root / name if (root / name / file).is_file() else root


def _records(path: Path, labels: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels of records of `labels` label bytes, the last of them the class, and 3072 pixels."""
    pixels = math.prod(PIXELS)
    if not path.is_file():
        raise FileNotFoundError(f"data '{path}': there is no such file. {SOURCES[f'cifar{classes}']}")
    data, record = np.fromfile(path, np.uint8), labels + pixels
    if not len(data) or len(data) % record:
        raise ValueError(f"data '{path}' has {len(data)} bytes, which is no multiple of a record's {record}. Unpack or download it again.")
    rows = data.reshape(-1, record)
    y = rows[:, labels - 1]
    if y.max() >= classes:
        raise ValueError(f"data '{path}': record {y.argmax()} has label {y.max()}; wanted 0 ... {classes - 1}.")
    return rows[:, labels:], y


def _joined(records: list[tuple[np.ndarray, np.ndarray]]) -> Part:
    x, y = (np.concatenate(arrays) for arrays in zip(*records, strict=True))
    return Part(torch.from_numpy(x).view(-1, *PIXELS), torch.from_numpy(y.astype(np.int64)))


# Arrays


def _mnist(root: Path) -> _Read:
    parts = []
    for path, x, y in (read_images(root, kind) for kind in KINDS):
        parts.append(_labelled(x[:, None].copy(), path, "labels", {"labels": y}))
    train, test = parts
    return _Read("images", train, test, _classes(root, train, test))


def _digits() -> _Read:
    found = digits()
    low, high = found.x_train.aminmax()  # scikit-learn's 0 and 16, normalised
    train, test = (((x - low) / (high - low) * 16).round().mul(255 / 16).round().to(torch.uint8) for x in (found.x_train, found.x_test))
    return _Read("images", Part(train, found.y_train), Part(test, found.y_test), found.classes)


def _arrays(path: Path) -> _Read:
    found = _npz(path, KEYS)
    notes: list[str] = []
    train, test = (_labelled(_images(path, f"x_{k}", found, notes), path, f"y_{k}", found) for k in ("train", "test"))
    return _Read("images", train, test, _classes(path, train, test), tuple(notes))


def _video(root: Path) -> _Read:
    parts = []
    for path in (root / "train.npz", root / "test.npz"):
        found = _npz(path, ("clips", "labels"))
        clips = found["clips"]
        if clips.ndim != 5 or clips.shape[-1] != 3 or clips.dtype != np.uint8:
            raise ValueError(f"data '{path}': clips has shape {clips.shape} and type {clips.dtype}; wanted (N, T, H, W, 3), uint8.")
        parts.append(_labelled(np.ascontiguousarray(clips.transpose(0, 4, 1, 2, 3)), path, "labels", found))
    train, test = parts
    return _Read("clips", train, test, _classes(root, train, test))


def _made_tokens(root: Path) -> _Read:
    parts, words = [], []
    for path in (root / "train.npz", root / "test.npz"):
        found = _npz(path, ("tokens",), ("labels", "vocabulary"))
        tokens = found["tokens"]
        if tokens.ndim != 2 or tokens.dtype.kind not in "iu" or tokens.shape[0] < 1 or tokens.shape[1] < 2:
            raise ValueError(f"data '{path}': tokens has shape {tokens.shape} and type {tokens.dtype}; wanted (N, L) integers.")
        if tokens.min() < 0 or tokens.max() > np.iinfo(np.int32).max:
            raise ValueError(f"data '{path}': tokens are {tokens.min()} to {tokens.max()}; wanted integers from 0 on, of 32 bits.")
        if "labels" in found:
            parts.append(_labelled(tokens.astype(np.int32), path, "labels", found))
            continue
        told = found.get("vocabulary", np.zeros(()))
        words.append(told.item() if told.size == 1 and told.dtype.kind in "iu" else 0)
        if words[-1] <= tokens.max():
            raise ValueError(
                f"data '{path}': without labels, vocabulary is the number of words, here above {tokens.max()}; it is {words[-1]}."
            )
        parts.append(Part(torch.from_numpy(tokens.astype(np.int32)), None))
    train, test = parts
    if len(words) == 1:
        raise ValueError(f"data '{root}': one of train.npz and test.npz has labels. Give both labels, or none.")
    if len(set(words)) > 1:
        raise ValueError(f"data '{root}': vocabulary is {words[0]} in train.npz and {words[1]} in test.npz. Give both the same.")
    _check_alike(root, train, test)
    return _Read("text", train, test, words[0] if words else _classes(root, train, test))


def _npz(path: Path, keys: tuple[str, ...], further: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(f"data '{path}': there is no such file.")
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            names = list(file.files)
            found = {name: file[name] for name in (*keys, *further) if name in names}
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, AttributeError, TypeError) as e:
        raise ValueError(f"data '{path}' is no .npz file of plain arrays.") from e
    missing = [k for k in keys if k not in found]
    if missing:
        raise ValueError(f"data '{path}': {', '.join(missing)} missing. It has {', '.join(names) or 'nothing'}; wanted: {', '.join(keys)}.")
    return found


def _images(path: Path, key: str, found: dict[str, np.ndarray], notes: list[str]) -> np.ndarray:
    """uint8 (N, C, H, W)."""
    x = found[key]
    if x.ndim not in (3, 4) or not (x.dtype == np.uint8 or x.dtype.kind == "f"):
        raise ValueError(
            f"data '{path}': {key} has shape {x.shape} and type {x.dtype}; wanted (N, H, W) or (N, C, H, W), uint8 or floats in [0, 1]."
        )
    check_channels(path, key, x)
    if x.dtype != np.uint8:
        if x.size and not (x.min() >= 0 and x.max() <= 1):
            raise ValueError(f"data '{path}': {key} is of floats from {x.min():g} to {x.max():g}; wanted [0, 1], or uint8.")
        notes.append(f"{key} was {x.dtype} in [0, 1] and is held in 256 steps")
        x = np.rint(x * 255).astype(np.uint8)
    return np.ascontiguousarray(x[:, None] if x.ndim == 3 else x)


def _labelled(x: np.ndarray, path: Path, key: str, found: dict[str, np.ndarray]) -> Part:
    y = found[key]
    if y.shape != x.shape[:1] or y.dtype.kind not in "iu":
        raise ValueError(f"data '{path}': {key} has shape {y.shape} and type {y.dtype}; wanted ({len(x)},) integers, one a sample.")
    if not x.size or y.min() < 0:
        raise ValueError(f"data '{path}': {key} has {len(y)} labels for samples of {x.shape[1:]}; wanted at least one, and none below 0.")
    return Part(torch.from_numpy(x), torch.from_numpy(y.astype(np.int64)))


def _classes(path: Path, train: Part, test: Part) -> int:
    """The number of classes of two parts, which fit each other."""
    _check_alike(path, train, test)
    largest = max(int(part.labels.max()) for part in (train, test) if part.labels is not None)
    if largest >= len(train) + len(test):
        raise ValueError(
            f"data '{path}': a label is {largest}, so there would be more classes than the {len(train) + len(test)} samples. Labels number "
            "the classes, from 0 on."
        )
    return 1 + largest


def _check_alike(path: Path, train: Part, test: Part) -> None:
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        raise ValueError(
            f"data '{path}': training samples are {tuple(train.inputs.shape[1:])}, test samples {tuple(test.inputs.shape[1:])}."
        )


# Folders of images


def _folder(root: Path, size: int, seed: int) -> _Read:
    check_pillow()
    names = class_names(root / "train")
    notes: list[str] = []
    train, test = (
        Files(torch.arange(len(paths)), torch.tensor(labels), tuple(paths), size, seed, random=kind == "train")
        for kind in ("train", "val")
        for paths, labels in [list_files(root / kind, names, notes)]
    )
    check_headers(test.paths)  # before an epoch is trained that they would end; of the training part each is read when its turn comes
    return _Read("images", train, test, len(names), tuple(notes))


# Text


def _text(root: Path, seq: int) -> _Read:
    if root.is_dir():
        train = _tokens(root / "train.txt")
        test = _tokens(root / "test.txt") if (root / "test.txt").exists() else None
    else:
        train, test = _tokens(root), None
    if test is None:
        cut = len(train) - len(train) // 10
        train, test = train[:cut], train[cut:]
    return _Read("text", _windows(root, "training", train, seq), _windows(root, "test", test, seq), 256)


def _tokens(path: Path) -> Tensor:
    if not path.is_file():
        raise FileNotFoundError(f"data '{path}': there is no such file. Wanted: a file.txt, or a folder with train.txt.")
    return torch.from_numpy(np.fromfile(path, np.uint8))


def _windows(root: Path, kind: str, tokens: Tensor, seq: int) -> Part:
    """Windows of seq tokens and the one that follows; each begins with the last token of the one before."""
    if len(tokens) <= seq:
        raise ValueError(
            f"data '{root}': the {kind} part has {len(tokens)} tokens, and a window takes {seq + 1}. Give more text, or a smaller seq."
        )
    return Part(tokens.int().unfold(0, seq + 1, seq).contiguous(), None)


READERS: dict[str, Callable[..., _Read]] = {
    "cifar10": _cifar10,
    "cifar100": _cifar100,
    "mnist": _mnist,
    "fashion-mnist": _mnist,
    "digits": _digits,
    "folder": _folder,
    "video": _video,
    "text": _text,
    "tokens": _made_tokens,
}
SOURCES = {
    f"cifar{n}": f'Download the "CIFAR-{n} binary version" from https://www.cs.toronto.edu/~kriz/cifar.html and unpack it.'
    for n in (10, 100)
} | dict.fromkeys(("mnist", "fashion-mnist"), SOURCE)
