"""Sets: what is read is what the files hold, what is wrong is named, and order and crops are pure functions."""

from __future__ import annotations

import gzip
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import zoo  # noqa: F401  before torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.transforms import RandomResizedCrop, v2

from halfback.data import digits
from halfback.train import sets
from halfback.train.folder import random_box, read_image
from halfback.train.sets import Files, Part, batches, load_set, order, seed_from


@pytest.fixture(autouse=True)
def _no_data_folder(monkeypatch):
    monkeypatch.delenv("HALFBACK_DATA", raising=False)


REAL = Path(os.environ["HALFBACK_DATA"]) / "cifar100" if "HALFBACK_DATA" in os.environ else None


def records(n, labels, classes, seed=0):
    rows = np.random.default_rng(seed).integers(0, 256, (n, labels + 3072), np.uint8)
    rows[:, labels - 1] = np.arange(n) % classes
    return rows


def cifar100(folder, n=20, m=6, change=None):
    folder.mkdir(parents=True, exist_ok=True)
    train, test = records(n, 2, 100), records(m, 2, 100, seed=1)
    if change:
        change(train, test)
    train.tofile(folder / "train.bin")
    test.tofile(folder / "test.bin")
    return train, test


def arrays(path, **changed):
    g = np.random.default_rng(0)
    found = {
        "x_train": g.integers(0, 256, (12, 3, 4, 5), np.uint8),
        "y_train": np.arange(12) % 4,
        "x_test": g.integers(0, 256, (5, 3, 4, 5), np.uint8),
        "y_test": np.arange(5) % 4,
    }
    found.update(changed)
    found = {k: v for k, v in found.items() if v is not None}
    np.savez(path, **found)
    return found


def clips(root, **changed):
    g = np.random.default_rng(0)
    found = {}
    for name, n in (("train", 7), ("test", 3)):
        found[name] = {"clips": g.integers(0, 256, (n, 2, 4, 5, 3), np.uint8), "labels": np.arange(n, dtype=np.uint8) % 3}
        if name == "test":
            found[name].update(changed)
        np.savez(root / f"{name}.npz", **found[name])
    return found


def folder(root, train=5, val=2, size=(40, 30)):
    g = np.random.default_rng(0)
    for kind, n in (("train", train), ("val", val)):
        for name in ("b_cat", "a_dog", "c_owl"):
            (root / kind / name).mkdir(parents=True)
            for i in range(n):
                image = Image.fromarray(g.integers(0, 256, (*size, 3), np.uint8))
                image.save(root / kind / name / f"{i}.{'png' if i % 2 else 'JPEG'}")
    return root


# CIFAR


@pytest.mark.parametrize("below", ["", "cifar-100-binary"])
def test_cifar100_is_read_as_its_records_say(tmp_path, below):
    train, test = cifar100(tmp_path / below)
    found = load_set("cifar100", root=tmp_path)
    assert (found.name, found.kind, found.classes, found.shape) == ("cifar100", "images", 100, (3, 32, 32))
    for part, rows in ((found.train, train), (found.test, test)):
        assert part.inputs.dtype == torch.uint8 and part.labels.dtype == torch.int64
        assert torch.equal(part.labels, torch.from_numpy(rows[:, 1].astype(np.int64)))
        assert part.inputs[3, 1, 7, 9] == rows[3, 2 + 1024 + 7 * 32 + 9]
        assert part.inputs.numpy().tobytes() == rows[:, 2:].tobytes()
    scaled = train[:, 2:].reshape(-1, 3, 1024) / 255
    assert torch.allclose(found.mean, torch.from_numpy(scaled.mean((0, 2))).float(), atol=1e-6)
    assert torch.allclose(found.deviation, torch.from_numpy(scaled.std((0, 2))).float(), atol=1e-6)
    assert found.notes == ()


def test_cifar10_joins_its_batches_in_order(tmp_path):
    rows = [records(4, 1, 10, seed=i) for i in range(6)]
    for i, found in enumerate(rows):
        found.tofile(tmp_path / (f"data_batch_{i + 1}.bin" if i < 5 else "test_batch.bin"))
    found = load_set("cifar10", root=str(tmp_path))
    assert found.classes == 10 and len(found.train) == 20 and len(found.test) == 4
    assert found.train.inputs.numpy().tobytes() == np.concatenate(rows[:5])[:, 1:].tobytes()
    assert found.train.labels.tolist() == [0, 1, 2, 3] * 5


def test_test_images_that_are_training_images_are_counted(tmp_path):
    def change(train, test):
        test[[1, 4], 2:] = train[7, 2:]
        test[2, 2:] = train[3, 2:]
        test[3, 2:] = train[3, 2:]
        test[3, 9] ^= 1

    cifar100(tmp_path, change=change)
    assert load_set("cifar100", root=tmp_path).notes == ("3 of the 6 test images are byte-identical to one of the training images",)


def test_a_truncated_file_names_both_sizes(tmp_path):
    cifar100(tmp_path)
    with open(tmp_path / "test.bin", "r+b") as file:
        file.truncate(10000)
    with pytest.raises(ValueError, match=r"test.bin' has 10000 bytes, which is no multiple of a record's 3074"):
        load_set("cifar100", root=tmp_path)
    (tmp_path / "test.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="has 0 bytes"):
        load_set("cifar100", root=tmp_path)


def test_a_label_out_of_range_names_its_record(tmp_path):
    def change(train, test):
        train[5, 1] = 100

    cifar100(tmp_path, change=change)
    with pytest.raises(ValueError, match=r"train.bin': record 5 has label 100; wanted 0 ... 99"):
        load_set("cifar100", root=tmp_path)


def test_a_missing_set_says_where_it_is_to_be_had(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"train.bin': there is no such file. .*CIFAR-100 binary version.*kriz/cifar.html"):
        load_set("cifar100", root=tmp_path)
    with pytest.raises(ValueError, match=r"Give root, or set HALFBACK_DATA to the folder that holds cifar100/. .*kriz/cifar.html"):
        load_set("cifar100")
    with pytest.raises(ValueError, match=r"that holds video/.$"):
        load_set("video")
    monkeypatch.setenv("HALFBACK_DATA", str(tmp_path))
    cifar100(tmp_path / "cifar100")
    assert len(load_set("cifar100").train) == 20


# MNIST


def idx(values):
    values = np.asarray(values, np.uint8)
    return bytes((0, 0, 8, values.ndim)) + b"".join(n.to_bytes(4, "big") for n in values.shape) + values.tobytes()


def mnist(folder, packed=False, **changed):
    """The four files, of which some may be replaced by name; what the images are."""
    draw = np.random.default_rng(0)
    images = {kind: draw.integers(0, 256, (n, 4, 6), dtype=np.uint8) for kind, n in (("train", 7), ("t10k", 3))}
    files = {f"{kind}_images": idx(x) for kind, x in images.items()} | {
        f"{kind}_labels": idx(np.arange(len(x)) % 5) for kind, x in images.items()
    }
    for name, data in (files | changed).items():
        if data is not None:
            name = name.replace("_images", "-images-idx3-ubyte").replace("_labels", "-labels-idx1-ubyte")
            (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(data) if packed else data)
    return images


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_mnist_is_read_as_published(tmp_path, name, packed):
    images = mnist(tmp_path, packed)
    found = load_set(name, root=tmp_path)
    assert (found.name, found.kind, found.classes, found.shape) == (name, "images", 5, (1, 4, 6))
    for part, kind in ((found.train, "train"), (found.test, "t10k")):
        assert part.inputs.dtype == torch.uint8 and np.array_equal(part.inputs[:, 0].numpy(), images[kind])
        assert part.labels.tolist() == [i % 5 for i in range(len(images[kind]))]
    part = found.train
    part.inputs[0, 0, 0, 0] = 1  # what was read can be written to


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"t10k_labels": None}, r"t10k-labels-idx1-ubyte': there is no such file, nor with .gz. Wanted: train-images-idx3-ubyte, "),
        ({"train_images": idx(np.zeros((7, 4, 6)))[:-3]}, r"has 165 bytes of values, and its sizes \[7, 4, 6\] want 168"),
        ({"train_images": idx(np.zeros((7, 24)))}, r"begins with 00 00 08 02; 3 sizes of bytes in IDX begin with 00 00 08 03"),
        ({"train_images": b""}, r"begins with ; 3 sizes"),
        ({"train_labels": idx(np.zeros(6))}, r"labels has shape \(6,\) and type uint8; wanted \(7,\) integers"),
        ({"t10k_images": idx(np.zeros((3, 5, 5)))}, r"training samples are \(1, 4, 6\), test samples \(1, 5, 5\)"),
        ({"train_images": idx(np.zeros((0, 4, 6))), "train_labels": idx(np.zeros(0))}, r"wanted at least one"),
    ],
)
def test_what_is_wrong_in_mnist_is_told(tmp_path, changed, text):
    mnist(tmp_path, **changed)
    with pytest.raises((ValueError, FileNotFoundError), match=text):
        load_set("mnist", root=tmp_path)


def test_a_cut_packed_file_is_told(tmp_path):
    mnist(tmp_path, packed=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz' is no whole .gz file: .* Download it again"):
        load_set("mnist", root=tmp_path)


@pytest.mark.skipif(REAL is None or not REAL.is_dir(), reason="needs the real set: HALFBACK_DATA with cifar100/ in it")
def test_the_real_cifar100_is_the_published_one():
    found = load_set("cifar100", root=REAL)
    assert (len(found.train), len(found.test)) == (50000, 10000)
    assert torch.equal(found.train.labels.bincount(), torch.full((100,), 500))
    assert torch.allclose(found.mean, torch.tensor([0.5071, 0.4865, 0.4409]), atol=5e-5)
    assert torch.allclose(found.deviation, torch.tensor([0.2673, 0.2564, 0.2762]), atol=5e-5)
    assert found.notes == ("10 of the 10000 test images are byte-identical to one of the training images",)


# Arrays


def test_digits_are_scikit_learns_in_the_split_of_compare():
    found, split = load_set("digits"), digits()
    assert found.shape == (1, 8, 8) and found.classes == 10
    assert torch.equal(found.train.labels, split.y_train) and torch.equal(found.test.labels, split.y_test)
    permuted = np.random.default_rng(0).permutation(1797)
    wanted = np.rint(load_digits().images[permuted] * 255 / 16).astype(np.uint8)
    joined = torch.cat((found.test.inputs, found.train.inputs)).squeeze(1)
    assert torch.equal(joined, torch.from_numpy(wanted))


def test_arrays_are_taken_as_they_are(tmp_path):
    wanted = arrays(tmp_path / "own.npz")
    found = load_set(str(tmp_path / "own.npz"))
    assert (found.name, found.classes, found.shape, found.notes) == ("own.npz", 4, (3, 4, 5), ())
    assert np.array_equal(found.train.inputs.numpy(), wanted["x_train"]) and np.array_equal(found.test.labels.numpy(), wanted["y_test"])


def test_floats_in_the_unit_interval_become_bytes_with_a_note(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (12, 4, 5))
    arrays(tmp_path / "a.npz", x_train=(x / 255).astype(np.float32), x_test=x[:5].astype(np.uint8))
    found = load_set(str(tmp_path / "a.npz"))
    assert np.array_equal(found.train.inputs.numpy(), x[:, None]) and found.shape == (1, 4, 5)
    assert found.notes[0] == "x_train was float32 in [0, 1] and is held in 256 steps" and len(found.notes) == 2


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"x_test": None}, r"x_test missing. It has x_train, y_train, y_test; wanted: x_train"),
        ({"x_train": np.zeros((12, 3, 4, 5), np.int16)}, r"x_train has shape \(12, 3, 4, 5\) and type int16; wanted"),
        ({"x_train": np.full((12, 3, 4, 5), 2.0)}, r"x_train is of floats from 2 to 2; wanted \[0, 1\]"),
        ({"x_train": np.full((12, 3, 4, 5), np.nan)}, "floats from nan to nan"),
        ({"x_train": np.zeros((12, 5), np.uint8)}, r"x_train has shape \(12, 5\)"),
        ({"x_train": np.zeros((12, 8, 8, 3), np.uint8)}, r"shape \(12, 8, 8, 3\), with channels last; wanted .* \(N, C, H, W\)"),
        ({"x_test": np.zeros((5, 8, 8, 1))}, r"x_test has shape \(5, 8, 8, 1\), with channels last; .* x_test.transpose\(0, 3, 1, 2\)"),
        ({"y_test": np.zeros(4, np.int64)}, r"y_test has shape \(4,\) and type int64; wanted \(5,\) integers"),
        ({"y_test": np.zeros(5)}, "y_test has shape .* and type float64"),
        ({"y_test": np.full(5, -1)}, "none below 0"),
        ({"x_test": np.zeros((0, 3, 4, 5), np.uint8), "y_test": np.zeros(0, np.int64)}, "wanted at least one"),
        ({"x_test": np.zeros((5, 3, 4, 4), np.uint8)}, r"training samples are \(3, 4, 5\), test samples \(3, 4, 4\)"),
        ({"x_test": np.array([{}], object)}, "no .npz file of plain arrays"),
        ({"y_test": np.full(5, 10**9)}, "a label is 1000000000, so there would be more classes than the 17 samples. Labels number"),
    ],
)
def test_wrong_arrays_are_named(tmp_path, changed, text):
    arrays(tmp_path / "a.npz", **changed)
    with pytest.raises(ValueError, match=text):
        load_set(str(tmp_path / "a.npz"))


def test_a_file_that_is_no_npz_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"a.npz': there is no such file"):
        load_set(str(tmp_path / "a.npz"))
    for content in (b"", b"text", b"PK\x03\x04"):
        (tmp_path / "a.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"a.npz' is no .npz file of plain arrays"):
            load_set(str(tmp_path / "a.npz"))


def test_classes_that_training_never_sees_are_noted(tmp_path):
    arrays(tmp_path / "a.npz", y_test=np.array([0, 1, 2, 9, 7]))
    found = load_set(str(tmp_path / "a.npz"))
    assert found.classes == 10
    assert found.notes == ("2 classes of the test part do not occur in the training part, the first is 7",)


def test_a_constant_channel_has_a_deviation_that_can_be_divided_by(tmp_path):
    arrays(tmp_path / "a.npz", x_train=np.full((12, 3, 4, 5), 51, np.uint8))
    found = load_set(str(tmp_path / "a.npz"))
    assert torch.allclose(found.mean, torch.tensor(0.2)) and torch.allclose(found.deviation, torch.tensor(1e-6))


def test_clips_have_their_channels_first(tmp_path):
    wanted = clips(tmp_path)
    found = load_set("video", root=tmp_path)
    assert (found.kind, found.shape, found.classes) == ("clips", (3, 2, 4, 5), 3)
    assert np.array_equal(found.train.inputs.numpy(), wanted["train"]["clips"].transpose(0, 4, 1, 2, 3))
    assert found.test.labels.tolist() == [0, 1, 2]
    x, y = found.test.batch(torch.tensor([2, 0]))
    assert x.dtype == torch.uint8 and x.shape == (2, 3, 2, 4, 5) and y.tolist() == [2, 0]
    assert torch.allclose(found.mean.double(), torch.from_numpy(wanted["train"]["clips"].mean((0, 1, 2, 3)) / 255))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"clips": np.zeros((3, 2, 4, 5, 4), np.uint8)}, r"test.npz': clips has shape \(3, 2, 4, 5, 4\).*wanted \(N, T, H, W, 3\)"),
        ({"clips": np.zeros((3, 2, 4, 5, 3))}, "type float64; wanted"),
        ({"clips": np.zeros((3, 9, 4, 5, 3), np.uint8)}, r"training samples are \(3, 2, 4, 5\), test samples \(3, 9, 4, 5\)"),
        ({"labels": np.zeros((3, 1), np.int64)}, r"labels has shape \(3, 1\)"),
    ],
)
def test_wrong_clips_are_named(tmp_path, changed, text):
    clips(tmp_path, **changed)
    with pytest.raises(ValueError, match=text):
        load_set("video", root=tmp_path)


# Text


def test_text_is_cut_into_windows_that_follow_each_other(tmp_path):
    (tmp_path / "train.txt").write_bytes(bytes(range(101)))
    (tmp_path / "test.txt").write_bytes(bytes(range(50, 61)))
    found = load_set("text", root=tmp_path, seq=10)
    assert (found.kind, found.classes, found.shape, found.mean.shape) == ("text", 256, (10,), (0,))
    assert len(found.train) == 10 and len(found.test) == 1 and found.train.labels is None
    x, y = found.train.batch(torch.tensor([0, 9]))
    assert x.dtype == y.dtype == torch.int64
    assert x.tolist() == [list(range(10)), list(range(90, 100))] and y.tolist() == [list(range(1, 11)), list(range(91, 101))]


def test_the_last_tenth_of_a_single_text_is_the_test_part(tmp_path):
    (tmp_path / "own.txt").write_bytes(bytes(range(200)))
    found = load_set("text", root=tmp_path / "own.txt", seq=6)
    assert found.train.inputs.max() < 180 and found.test.inputs.tolist()[0] == list(range(180, 187)) and len(found.test) == 3
    with pytest.raises(ValueError, match=r"own.txt': the test part has 20 tokens, and a window takes 21. Give more text, or a smaller seq"):
        load_set("text", root=tmp_path / "own.txt", seq=20)
    with pytest.raises(FileNotFoundError, match=r"a folder with train.txt"):
        load_set("text", root=tmp_path)


def tokens(folder, rows=5, **changed):
    both, train = changed.pop("both", {}), changed.pop("train", {})
    for name, own in (("train", train), ("test", changed)):
        np.savez(folder / name, **{"tokens": np.arange(rows * 4).reshape(rows, 4), **own, **both})
    return load_set("tokens", root=folder)


def test_tokens_with_labels_are_classified(tmp_path):
    found = tokens(tmp_path, both={"labels": np.array([0, 2, 1, 0, 2])})
    assert (found.kind, found.classes, found.shape) == ("text", 3, (4,))
    x, y = found.test.batch(torch.tensor([1]))
    assert x.tolist() == [[4, 5, 6, 7]] and y.tolist() == [2]


def test_of_tokens_without_labels_the_next_one_is_learned(tmp_path):
    found = tokens(tmp_path, both={"vocabulary": np.array(30)})
    assert (found.kind, found.classes, found.shape) == ("text", 30, (3,))
    x, y = found.train.batch(torch.tensor([1]))
    assert x.tolist() == [[4, 5, 6]] and y.tolist() == [[5, 6, 7]]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"both": {"tokens": np.zeros((5, 4))}}, r"train.npz': tokens has shape \(5, 4\) and type float64; wanted \(N, L\) integers"),
        ({"both": {"labels": np.arange(4)}}, r"labels has shape \(4,\)"),
        ({}, "without labels, vocabulary is the number of words, here above 19; it is 0"),
        ({"both": {"vocabulary": np.array(19)}}, "here above 19; it is 19"),
        ({"both": {"vocabulary": np.array([30.5])}}, "here above 19; it is 0"),
        ({"both": {"tokens": np.full((5, 4), 2**32)}}, r"tokens are 4294967296 to 4294967296; wanted integers from 0 on, of 32 bits"),
        ({"both": {"tokens": np.full((5, 4), -1)}}, r"tokens are -1 to -1; wanted integers from 0 on"),
        (
            {"vocabulary": np.array(20), "tokens": np.zeros((5, 7), int), "train": {"vocabulary": np.array(20)}},
            r"training samples are \(4,\), test samples \(7,\)",
        ),
        ({"vocabulary": np.array(25), "train": {"vocabulary": np.array(20)}}, "vocabulary is 20 in train.npz and 25 in test.npz"),
        ({"labels": np.arange(5), "both": {"vocabulary": np.array(20)}}, "one of train.npz and test.npz has labels"),
    ],
)
def test_wrong_tokens_are_named(tmp_path, changed, text):
    with pytest.raises(ValueError, match=text):
        tokens(tmp_path, **changed)


# Folders


def test_a_folder_gives_its_classes_sorted_and_its_images_in_order(tmp_path):
    found = load_set("folder", root=folder(tmp_path), size=16)
    assert (found.kind, found.classes, found.shape) == ("images", 3, (3, 16, 16))
    assert found.train.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5 and len(found.test) == 6
    assert [Path(p).parent.name for p in found.test.paths[::2]] == ["a_dog", "b_cat", "c_owl"]
    assert found.notes == ("mean and deviation are those of the centres of 15 of the 15 training images",)
    assert found.mean.shape == (3,) and bool((found.mean > 0.4).all() and (found.mean < 0.6).all())


def test_test_images_are_resized_and_cropped_as_torchvision_does(tmp_path):
    found = load_set("folder", root=folder(tmp_path, size=(57, 83)), size=28)
    x, y = found.test.batch(torch.arange(6))
    known = v2.Compose([v2.Resize(32, antialias=True), v2.CenterCrop(28)])
    for i, path in enumerate(found.test.paths):
        assert np.array_equal(x[i].permute(1, 2, 0).numpy(), np.asarray(known(Image.open(path).convert("RGB"))))
    assert x.dtype == torch.uint8 and x.is_contiguous() and y.tolist() == [0, 0, 1, 1, 2, 2]


def test_random_crops_are_a_pure_function_of_seed_epoch_and_file(tmp_path):
    root = folder(tmp_path)
    found = load_set("folder", root=root, size=16, seed=1)
    one, _ = found.train.batch(torch.tensor([3, 8, 3]), epoch=2)
    assert torch.equal(one[0], one[2])
    assert torch.equal(found.train.batch(torch.tensor([8]), epoch=2)[0][0], one[1])
    assert not torch.equal(found.train.batch(torch.tensor([3]), epoch=3)[0][0], one[0])
    other = load_set("folder", root=root, size=16, seed=2)
    assert not torch.equal(other.train.batch(torch.tensor([3]), epoch=2)[0][0], one[0])
    assert torch.equal(other.mean, found.mean)
    assert torch.equal(other.test.batch(torch.tensor([3]), epoch=2)[0], found.test.batch(torch.tensor([3]), epoch=5)[0])


@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 400), height=st.integers(1, 400), seed=st.integers(0, 2**40))
def test_a_random_box_lies_in_the_image(width, height, seed):
    left, top, right, bottom = random_box(width, height, random.Random(seed))
    assert 0 <= left < right <= width and 0 <= top < bottom <= height


def test_random_boxes_have_the_areas_and_shapes_asked_for():
    boxes = [random_box(500, 400, random.Random(i)) for i in range(2000)]
    areas = np.array([(r - x) * (b - y) for x, y, r, b in boxes]) / 200000
    ratios = np.array([(r - x) / (b - y) for x, y, r, b in boxes])
    assert 0.075 < areas.min() < 0.1 and areas.max() > 0.9 and 0.74 < ratios.min() < 0.78 and 1.28 < ratios.max() < 1.35
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        known = [RandomResizedCrop.get_params(torch.empty(3, 400, 500), [0.08, 1], [3 / 4, 4 / 3]) for _ in range(2000)]
    top, left, height, width = np.array(known).T
    assert abs(areas.mean() - (height * width).mean() / 200000) < 0.03  # four deviations
    assert abs(np.mean([x for x, *_ in boxes]) - left.mean()) < 12 and abs(np.mean([b[1] for b in boxes]) - top.mean()) < 10


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_images_of_any_mode_become_rgb(tmp_path, mode):
    path = str(tmp_path / ("a.jpg" if mode == "CMYK" else "a.png"))
    Image.new("RGB", (9, 7), (255, 255, 255)).convert(mode).save(path)
    for draw in (None, random.Random(0)):
        found = read_image(path, 8, draw)
        assert found.shape == (8, 8, 3) and found.dtype == np.uint8 and found.min() >= 250


def test_images_of_sixteen_bits_keep_their_greys(tmp_path):
    """They became all white."""
    path = str(tmp_path / "a.png")
    Image.fromarray(np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)).save(path)
    found = read_image(path, 64, None)
    assert found[:4].mean() < 40 and found[-4:].mean() > 215 and 120 < found.mean() < 135
    Image.fromarray(np.zeros((8, 8), np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(ValueError, match=r"a.tif' cannot be read as an image: its pixels are floats, whose range is not known"):
        read_image(str(tmp_path / "a.tif"), 8, None)


BROKEN = r"0.JPEG' cannot be read as an image: .* Replace the file; or remove it, if no training with this data has begun"


def test_a_broken_image_is_named(tmp_path, monkeypatch):
    """Of the part that is tested on, before an epoch is trained; if its header is whole, when it is read."""
    root = folder(tmp_path)
    whole = (root / "train" / "a_dog" / "0.JPEG").read_bytes()
    monkeypatch.setattr(sets, "ESTIMATED", 1)
    for content in (b"no image", b""):
        (root / "val" / "c_owl" / "0.JPEG").write_bytes(content)
        with pytest.raises(ValueError, match=BROKEN):
            load_set("folder", root=root, size=8)
    (root / "val" / "c_owl" / "0.JPEG").write_bytes(whole[: len(whole) // 2])
    found = load_set("folder", root=root, size=8)
    with pytest.raises(ValueError, match=BROKEN):
        list(batches(found.test, torch.arange(6), 2, epoch=0))


def test_folders_that_do_not_fit_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train': there is no such folder. Wanted: train/CLASS/"):
        load_set("folder", root=tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match="train' has no folders in it"):
        load_set("folder", root=tmp_path)
    (tmp_path / "train" / "ant").mkdir()
    with pytest.raises(ValueError, match=r"ant' has no images; wanted files that end in .jpg, "):
        load_set("folder", root=tmp_path)
    Image.new("RGB", (4, 4)).save(tmp_path / "train" / "ant" / "a.png")
    with pytest.raises(FileNotFoundError, match="val': there is no such folder"):
        load_set("folder", root=tmp_path)
    (tmp_path / "val" / "bee").mkdir(parents=True)
    with pytest.raises(ValueError, match="val' has 1 classes that train/ has not, the first is 'bee'"):
        load_set("folder", root=tmp_path)


def test_files_that_are_no_images_and_missing_classes_are_noted(tmp_path):
    root = folder(tmp_path)
    (root / "train" / "a_dog" / "readme.txt").write_text("x")
    for path in (root / "val" / "b_cat").iterdir():
        path.unlink()
    (root / "val" / "b_cat").rmdir()
    found = load_set("folder", root=root, size=8)
    assert "1 files of train/ are no images by their names and are left out" in found.notes
    assert "val/ has 2 of the 3 classes" in found.notes and found.test.labels.tolist() == [0, 0, 2, 2]


def test_reading_ahead_keeps_the_order_and_its_threads_end(tmp_path):
    import threading

    found = load_set("folder", root=folder(tmp_path, train=9), size=8)
    indices = order(27, 0, 0)
    one = list(batches(found.train, indices, 4, epoch=1))
    assert [len(y) for _, y in one] == [4] * 6 + [3]
    assert torch.equal(torch.cat([x for x, _ in one]), found.train.batch(indices, epoch=1)[0])
    assert torch.equal(torch.cat([y for _, y in one]), found.train.labels[indices])
    stream = batches(found.train, indices, 4, epoch=1, first=2)
    assert torch.equal(next(stream)[0], one[2][0])
    stream.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("halfback-read")]


# Validation


def test_validation_holds_out_the_same_share_of_every_class_for_every_seed(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (100, 1, 4, 4), np.uint8)
    y = np.repeat([0, 1, 2], [50, 30, 20])
    arrays(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:5])
    found = load_set(str(tmp_path / "a.npz"), validation=10)
    assert found.test.labels.bincount().tolist() == [5, 3, 2] and len(found.train) == 90
    rows = sorted(r.tobytes() for p in (found.train, found.test) for r in p.inputs.numpy())
    assert rows == sorted(r.tobytes() for r in x)
    other = load_set(str(tmp_path / "a.npz"), validation=10, seed=7)
    assert torch.equal(other.test.inputs, found.test.inputs)
    assert found.notes == ("tested on 10 samples held out of the training part; the test set is not used",)
    assert torch.allclose(found.mean, (found.train.inputs.double() / 255).mean().float())
    assert len(load_set(str(tmp_path / "a.npz"), validation=99).train) == 1


@settings(max_examples=40, deadline=None)
@given(labels=st.lists(st.integers(0, 5), min_size=2, max_size=60), data=st.data())
def test_any_number_held_out_is_stratified_to_one_sample(labels, data):
    count = data.draw(st.integers(1, len(labels) - 1))
    y = torch.tensor(labels)
    held = sets._drawn(y, len(y), count)
    assert len(set(held.tolist())) == count == len(held)
    shares = y.bincount(minlength=6).double() * count / len(y)
    assert ((y[held].bincount(minlength=6) - shares).abs() < 1).all()


def test_validation_of_text_and_of_a_folder(tmp_path):
    (tmp_path / "own.txt").write_bytes(bytes(range(200)))
    found = load_set("text", root=tmp_path / "own.txt", seq=6, validation=4)
    firsts = [*found.train.inputs[:, 0].tolist(), *found.test.inputs[:, 0].tolist()]
    assert len(found.test) == 4 and sorted(firsts) == list(range(0, 174, 6))
    found = load_set("folder", root=folder(tmp_path / "f"), size=8, validation=6)
    assert found.test.labels.tolist() == [0, 0, 1, 1, 2, 2] and len(found.train) == 9
    assert isinstance(found.test, Files) and found.train.random and not found.test.random
    assert not set(found.train.inputs.tolist()) & set(found.test.inputs.tolist())
    assert torch.equal(found.test.batch(torch.arange(6), epoch=1)[0], found.test.batch(torch.arange(6), epoch=2)[0])
    whole = load_set("folder", root=tmp_path / "f", size=8)
    assert torch.equal(found.train.batch(torch.tensor([4]))[0], whole.train.batch(found.train.inputs[[4]])[0])


@pytest.mark.parametrize("count", [-1, 12, 13])
def test_more_validation_than_there_is_is_refused(tmp_path, count):
    arrays(tmp_path / "a.npz")
    with pytest.raises(ValueError, match=rf"validation={count} does not lie in 0 ... 11; the training part has 12 samples"):
        load_set(str(tmp_path / "a.npz"), validation=count)


# Arguments


@pytest.mark.parametrize(
    ("spec", "options", "text"),
    [
        (
            "imagenet",
            {},
            r"data 'imagenet' is unknown. Data: cifar10, cifar100, mnist, fashion-mnist, digits, folder, video, text, tokens",
        ),
        ("digits", {"size": 8}, "size=8 means something for 'folder' only"),
        ("folder", {"seq": 8}, "seq=8 means something for 'text' only"),
        ("text", {"seq": 0}, "seq=0 must be at least 1"),
        ("digits", {"root": "x"}, "root='x' means nothing here"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(spec, options, text):
    with pytest.raises(ValueError, match=text):
        load_set(spec, **options)


# Order and batches


@settings(max_examples=50, deadline=None)
@given(n=st.integers(0, 200), seed=st.integers(-5, 2**70), epoch=st.integers(0, 10**6))
def test_order_is_a_permutation_and_pure(n, seed, epoch):
    state = torch.get_rng_state()
    one = order(n, seed, epoch)
    assert torch.equal(one.sort().values, torch.arange(n)) and torch.equal(one, order(n, seed, epoch))
    assert torch.equal(torch.get_rng_state(), state)


def test_orders_of_neighbouring_seeds_and_epochs_differ():
    seen = {tuple(order(50, seed, epoch).tolist()) for seed in range(20) for epoch in range(20)}
    assert len(seen) == 400
    assert len({seed_from(a, b) for a in (0, 1, 11, 2**32) for b in (0, 1, 11, 2**32)}) == 16


@settings(max_examples=40, deadline=None)
@given(n=st.integers(0, 30), size=st.integers(1, 12), first=st.integers(0, 5))
def test_batches_resume_where_they_would_have_been(n, size, first):
    part = Part(torch.arange(30, dtype=torch.uint8).view(30, 1, 1, 1), torch.arange(30) * 2)
    indices = order(30, 0, 0)[:n]
    every = list(batches(part, indices, size, epoch=0))
    assert [len(x) for x, _ in every] == [size] * (n // size) + ([n % size] if n % size else [])
    assert torch.equal(torch.cat([y for _, y in every]) if every else indices, 2 * indices if every else indices)
    later = list(batches(part, indices, size, epoch=0, first=first))
    assert len(later) == max(0, len(every) - first)
    for (a, b), (c, d) in zip(later, every[first:], strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)


def test_batches_of_no_size_are_refused_at_once():
    with pytest.raises(ValueError, match="size=0 must be at least 1"):
        batches(Part(torch.zeros(3, 1, 1, 1), torch.zeros(3)), torch.arange(3), 0, epoch=0)


def test_a_set_moves_to_a_device_whole(tmp_path):
    arrays(tmp_path / "a.npz")
    moved = load_set(str(tmp_path / "a.npz")).to("meta")
    assert {t.device.type for t in (moved.train.inputs, moved.train.labels, moved.test.inputs, moved.mean, moved.deviation)} == {"meta"}
    x, y = moved.train.batch(torch.tensor([1, 2]))
    assert x.device.type == y.device.type == "meta" and x.shape == (2, 3, 4, 5)
