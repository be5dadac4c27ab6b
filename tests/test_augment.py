"""Augmentation: known answers, Pillow as the reference, and draws that depend on the generator alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from torch.utils._python_dispatch import TorchDispatchMode

from halfback.train.augment import FILL, OPERATIONS, Augment, beta, crop_and_flip, cutmix_boxes, erased, normalise, operate, randaugment

EVERYTHING = Augment(crop=2, flip=True, randaugment=2, erase=0.5, mixup=0.4, cutmix=1.0)
MEAN, DEVIATION = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.25, 0.3])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def pixels(*shape, seed=0):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=seeded(seed))


def photo(h=24, w=32, seed=0):
    """Something smooth with noise on it, so that interpolation and histograms have something to do: uint8 (3, h, w)."""
    y, x = torch.meshgrid(torch.linspace(0, 3, h), torch.linspace(0, 4, w), indexing="ij")
    smooth = torch.stack([(x + y).sin(), (x - y).cos(), (x * y).sin()]) * 90 + 120
    return (smooth + 20 * torch.randn(3, h, w, generator=seeded(seed))).clamp(10, 240).to(torch.uint8)


# Crop and flip


@pytest.mark.parametrize("reflect", [False, True])
@pytest.mark.parametrize("shape", [(40, 2, 5, 7), (40, 2, 3, 5, 7)])
def test_a_crop_is_a_shifted_window_of_the_padded_sample_and_all_shifts_occur(shape, reflect):
    x = pixels(*shape) | 1  # no pixel is as black as the padding
    out = crop_and_flip(x, 1, False, seeded(), reflect=reflect)
    frames = x.flatten(1, -3)
    if reflect:
        padded = torch.nn.functional.pad(frames.float(), (1,) * 4, mode="reflect").to(torch.uint8)
    else:
        padded = torch.nn.functional.pad(frames, (1,) * 4)
    h, w = shape[-2:]
    seen = set()
    for n in range(len(x)):
        fits = [(i, j) for i in range(3) for j in range(3) if torch.equal(out[n].flatten(0, -3), padded[n, :, i : i + h, j : j + w])]
        assert len(fits) == 1
        seen.update(fits)
    assert len(seen) == 9


def test_a_crop_of_a_coordinate_image_is_shifted_coordinates():
    h, w, p = 16, 12, 3
    x = torch.stack(torch.meshgrid(torch.arange(1, h + 1), torch.arange(1, w + 1), indexing="ij")).to(torch.uint8).expand(200, 2, h, w)
    out = crop_and_flip(x, p, False, seeded()).long()
    middle = out[:, :, h // 2, w // 2] - torch.tensor([h // 2 + 1, w // 2 + 1])
    assert middle.abs().max() == p
    for n in range(200):
        dy, dx = middle[n].tolist()
        rows, columns = torch.arange(1, h + 1) + dy, torch.arange(1, w + 1) + dx
        inside = ((rows >= 1) & (rows <= h))[:, None] & ((columns >= 1) & (columns <= w))
        assert torch.equal(out[n, 0], rows[:, None] * inside) and torch.equal(out[n, 1], columns * inside)


@pytest.mark.parametrize("shape", [(400, 3, 4, 5), (400, 3, 2, 4, 5)])
def test_half_of_the_samples_are_exactly_mirrored_and_the_rest_untouched(shape):
    x = pixels(*shape)
    out = crop_and_flip(x, 0, True, seeded())
    same = [torch.equal(a, b) for a, b in zip(out, x, strict=True)]
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(out, x, strict=True)]
    assert all(a != b for a, b in zip(same, mirrored, strict=True))
    assert abs(sum(mirrored) - 200) < 60  # six deviations


def test_reflection_wider_than_the_image_is_refused():
    with pytest.raises(ValueError, match=r"crop=4 is too much to reflect in 4 x 9 pixels. At most 3"):
        Augment(crop=4, reflect=True).images(pixels(2, 3, 4, 9), seeded())


# The whole


def everything(x, y, seed):
    g = seeded(seed)
    return EVERYTHING.mixed(EVERYTHING.prepared(x, MEAN, DEVIATION, g), y, g, 10)


@pytest.mark.parametrize("shape", [(16, 3, 9, 8), (6, 3, 2, 9, 8)])
def test_draws_depend_on_the_generator_alone(shape):
    x, y = pixels(*shape), torch.arange(shape[0]) % 10
    state, before = torch.get_rng_state(), x.clone()
    one, two, other = everything(x, y, 1), everything(x, y, 1), everything(x, y, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one[0], other[0]) and not torch.equal(one[1], other[1])
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(x, before)
    assert one[0].shape == shape and one[0].dtype == one[1].dtype == torch.float32


class NoWaiting(TorchDispatchMode):
    """Refuses what would make the host wait for a device: a value asked for, or a shape that depends on one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "equal", "is_nonzero"), name
        assert name not in ("index", "index_put", "index_put_", "_index_put_impl_"), name  # a mask among the indices waits
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(16, 3, 9, 8), (6, 3, 2, 9, 8)])
def test_nothing_waits_for_the_device(shape):
    x, y = pixels(*shape), torch.arange(shape[0]) % 10
    with NoWaiting():
        everything(x, y, 1)
        Augment(crop=1, reflect=True).images(x, seeded())
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoWaiting():
        y.sum().item()


def test_the_defaults_only_scale_and_leave_labels():
    x, y = pixels(3, 3, 4, 4), torch.arange(3)
    assert torch.equal(Augment().images(x, seeded()), x.float() / 255)
    assert Augment().mixed(x, y, seeded(), 3) == (x, y)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(0, 4),
    c=st.sampled_from([1, 3]),
    t=st.integers(0, 3),
    h=st.integers(1, 9),
    w=st.integers(1, 9),
    magnitude=st.floats(0, 10),
)
def test_any_shape_and_magnitude_stays_finite_and_in_range(n, c, t, h, w, magnitude):
    x = pixels(n, c, *([t] if t else []), h, w)
    out = Augment(crop=2, flip=True, randaugment=3, magnitude=magnitude).images(x, seeded())
    assert out.shape == x.shape and out.isfinite().all() and bool(((out >= 0) & (out <= 1)).all())
    mixed, targets = Augment(mixup=0.1, cutmix=1.0).mixed(out, torch.zeros(n, dtype=torch.int64), seeded(), 2)
    assert mixed.shape == x.shape and torch.allclose(targets, torch.tensor([1.0, 0.0]).expand(n, 2))


def test_frames_of_a_clip_share_their_draw():
    x = pixels(30, 3, 1, 8, 8).expand(30, 3, 4, 8, 8)
    out = Augment(crop=2, flip=True, randaugment=2).images(x, seeded())
    assert torch.equal(out, out[:, :, :1].expand_as(out)) and not torch.equal(out, x / 255)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_the_memory_layout_of_the_images_does_not_matter(layout):
    x = pixels(20, 3, 8, 8)
    assert torch.equal(Augment(randaugment=2).images(x.to(memory_format=layout), seeded()), Augment(randaugment=2).images(x, seeded()))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"crop": -1}, "crop=-1 must be at least 0"),
        ({"mixup": math.nan}, "mixup=nan must be at least 0"),
        ({"mixup": 1.0, "mixing": 1.5}, "mixing=1.5 must lie in 0 ... 1"),
        ({"mixing": 0.5}, "mixing=0.5 is the chance that a sample is mixed, and nothing mixes"),
        ({"magnitude": 11}, "magnitude=11 must lie in 0 ... 10"),
        ({"erase": 1.5}, "erase=1.5 must lie in 0 ... 1"),
        ({"reflect": True}, "crop=0 pads nothing"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, text):
    with pytest.raises(ValueError, match=text):
        Augment(**wrong)


def test_inputs_of_the_wrong_kind_are_refused():
    with pytest.raises(ValueError, match=r"found \(2, 3, 4, 4\) of torch.float32; wanted uint8 images"):
        Augment(flip=True).images(torch.zeros(2, 3, 4, 4), seeded())
    with pytest.raises(ValueError, match=r"1 or 3 channels, found 2. Set randaugment=0"):
        Augment(randaugment=1).images(pixels(2, 2, 4, 4), seeded())
    with pytest.raises(ValueError, match="only images and clips that went through prepared"):
        Augment(mixup=1.0).mixed(pixels(2, 2, 4, 4), torch.zeros(2), seeded(), 2)


# Normalising and erasing


@pytest.mark.parametrize("shape", [(5, 3, 4, 4), (5, 3, 2, 4, 4)])
def test_normalise_takes_bytes_and_floats_to_the_same_values(shape):
    x = pixels(*shape)
    wanted = (x.double() / 255 - MEAN.view(-1, *[1] * (x.ndim - 2))) / DEVIATION.view(-1, *[1] * (x.ndim - 2))
    for given_ in (x, x.float() / 255, x.double() / 255):
        out = normalise(given_, MEAN, DEVIATION)
        assert out.dtype == torch.float32 and torch.allclose(out.double(), wanted, atol=1e-5)
    with pytest.raises(ValueError, match=r"a mean of \(2,\)"):
        normalise(x, MEAN[:2], DEVIATION[:2])


def test_normalise_leaves_what_it_was_given():
    x = torch.rand(2, 3, 4, 4)
    before = x.clone()
    normalise(x, MEAN, DEVIATION)
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(600, 2, 20, 30), (600, 2, 2, 20, 30)])
def test_erasing_zeroes_one_box_in_the_given_share_of_samples(shape):
    out = erased(torch.ones(shape), 0.25, seeded())
    holes = out.flatten(1, -3) == 0
    assert torch.equal(holes, holes[:, :1].expand_as(holes))
    holes = holes[:, 0]
    hit = holes.any(2).any(1)
    assert abs(int(hit.sum()) - 150) < 64  # six deviations
    for hole in holes[hit]:
        area = int(hole.any(1).sum()) * int(hole.any(0).sum())
        assert area == int(hole.sum()) and 0.015 < area / 600 < 0.36
    assert holes.any(0).any(0).all() and holes.any(0).any(1).all()  # no row and no column is safe


# Mixing


@pytest.mark.parametrize("shape", [(8, 3, 5, 6), (8, 3, 2, 5, 6)])
def test_mixup_targets_are_the_same_combination_as_the_pixels(shape):
    x, y = torch.arange(8.0).view(8, *[1] * (len(shape) - 1)).expand(shape), torch.arange(8)
    mixed, targets = Augment(mixup=0.8).mixed(x, y, seeded(), 9)
    assert torch.allclose(mixed.flatten(1), (targets * torch.arange(9.0)).sum(1, keepdim=True).expand(8, mixed[0].numel()), atol=1e-5)
    assert torch.allclose(targets.sum(1), torch.ones(8))
    assert len(set(targets.diagonal().tolist())) == 8  # each sample its own draw


@pytest.mark.parametrize("shape", [(64, 3, 16, 12), (64, 3, 2, 16, 12)])
def test_cutmix_shows_the_neighbour_in_one_box_and_its_label_to_the_same_share(shape):
    x = torch.randn(shape, generator=seeded(3))
    mixed, targets = Augment(cutmix=1.0).mixed(x, torch.arange(64), seeded(), 64)
    own = (mixed == x).flatten(1, -3)[:, 0]
    assert torch.equal(torch.where(own.view(64, *[1] * (len(shape) - 3), 16, 12), x, x.roll(1, 0)), mixed)
    assert (targets.diagonal() - own.float().mean((1, 2))).abs().max() < 1e-6
    assert torch.allclose(targets.sum(1), torch.ones(64)) and (~own).any()
    for other in ~own:
        assert int(other.any(1).sum()) * int(other.any(0).sum()) == int(other.sum())


@pytest.mark.parametrize("alphas", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
def test_a_share_of_the_samples_is_mixed_and_the_others_are_themselves(alphas):
    x, y = torch.randn(4000, 1, 8, 8, generator=seeded()), torch.arange(4000) % 7
    mixed, targets = Augment(**alphas, mixing=0.3).mixed(x, y, seeded(), 7)
    same = (mixed == x).flatten(1).all(1)
    assert 0.68 < same.float().mean() < 0.8  # a box may be empty, and a lambda 1
    assert torch.equal(targets[same], torch.nn.functional.one_hot(y, 7).float()[same])
    assert (Augment(**alphas, mixing=0.0).mixed(x, y, seeded(), 7)[0] == x).all()


def test_with_both_a_batch_takes_one_of_them():
    x, y = torch.randn(8, 1, 9, 9, generator=seeded()), torch.arange(8)
    kinds = []
    for seed in range(60):
        mixed, _ = Augment(mixup=5.0, cutmix=1.0).mixed(x, y, seeded(seed), 8)
        kinds.append(bool(((mixed == x) | (mixed == x.roll(1, 0))).all()))
    assert 10 < sum(kinds) < 50


def test_cutmix_boxes_have_the_areas_of_their_draws_where_the_image_cuts_none():
    boxes = cutmix_boxes(20000, 64, 64, 1.0, seeded())
    corners = boxes[:, 0, :].any(1) | boxes[:, -1, :].any(1) | boxes[:, :, 0].any(1) | boxes[:, :, -1].any(1)
    assert 0.3 < corners.float().mean() < 0.95
    # uniform centre and uniform lambda: the expected cut area is the mean over side s of (s - s s / 4) ^ 2, s s uniform
    s = torch.linspace(0, 1, 100001).sqrt()
    assert abs(boxes.float().mean() - ((s - s * s / 4) ** 2).mean()) < 0.02


@pytest.mark.parametrize("alpha", [0.01, 0.2, 1.0, 4.0])
def test_beta_has_the_moments_of_a_beta(alpha):
    draws = beta(40000, alpha, seeded()).double()
    assert draws.isfinite().all() and draws.min() >= 0 and draws.max() <= 1
    assert abs(draws.mean() - 0.5) < 0.012
    assert abs(draws.var() - 1 / (4 * (2 * alpha + 1))) < 0.005


# RandAugment against Pillow


def ours(name, image, sign, strength):
    which = torch.tensor([OPERATIONS.index(name)])
    return operate(image[None].float(), which, torch.tensor([sign]), strength)[0]


def pillow(image):
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def tensor(image):
    return torch.tensor(list(image.tobytes())).view(image.height, image.width, -1).permute(2, 0, 1).float()


def affine(image, a, b, c, d, e, f):
    """Pillow's map of output to input pixels, about the centre."""
    x, y = image.width / 2, image.height / 2
    data = (a, b, c + x - a * x - b * y, d, e, f + y - d * x - e * y)
    return image.transform(image.size, Image.Transform.AFFINE, data, Image.Resampling.BILINEAR, fillcolor=(int(FILL),) * 3)


def turned(image, v):
    angle = math.radians(30 * v)
    return affine(image, math.cos(angle), math.sin(angle), 0, -math.sin(angle), math.cos(angle), 0)


REFERENCES = {
    "identity": lambda i, v: i,
    "brightness": lambda i, v: ImageEnhance.Brightness(i).enhance(1 + 0.9 * v),
    "contrast": lambda i, v: ImageEnhance.Contrast(i).enhance(1 + 0.9 * v),
    "saturation": lambda i, v: ImageEnhance.Color(i).enhance(1 + 0.9 * v),
    "sharpness": lambda i, v: ImageEnhance.Sharpness(i).enhance(1 + 0.9 * v),
    "posterize": lambda i, v: ImageOps.posterize(i, 8 - round(4 * abs(v))),
    "solarize": lambda i, v: ImageOps.solarize(i, 256 * (1 - abs(v))),
    "autocontrast": lambda i, v: ImageOps.autocontrast(i),
    "equalize": lambda i, v: ImageOps.equalize(i),
    "shear_x": lambda i, v: affine(i, 1, 0.3 * v, 0, 0, 1, 0),
    "shear_y": lambda i, v: affine(i, 1, 0, 0, 0.3 * v, 1, 0),
    "translate_x": lambda i, v: affine(i, 1, 0, 0.45 * v * i.width, 0, 1, 0),
    "translate_y": lambda i, v: affine(i, 1, 0, 0, 0, 1, 0.45 * v * i.height),
    "rotate": turned,
}
EXACT = ("identity", "posterize", "solarize", "equalize")


@pytest.mark.parametrize("strength", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_pillows_before_it_rounds(name, sign, strength):
    image = photo()
    wanted, found = tensor(REFERENCES[name](pillow(image), sign * strength)), ours(name, image, sign, strength)
    # Pillow rounds once or twice; contrast and saturation lean on its rounded grey
    assert (found - wanted).abs().max() <= (0 if name in EXACT else 1.6)
    if strength >= 0.3 and name != "identity":
        assert (found - image).abs().max() >= 1  # it does something


def test_a_turn_is_pillows_rotate():
    image = photo(24, 24)
    wanted = tensor(pillow(image).rotate(15, Image.Resampling.BILINEAR, fillcolor=(int(FILL),) * 3))
    assert (ours("rotate", image, -1, 0.5) - wanted).abs().max() <= 1.6


def test_the_operations_without_strength_leave_flat_images_alone():
    for name in ("autocontrast", "equalize"):
        flat = torch.full((3, 8, 8), 77, dtype=torch.uint8)
        assert torch.equal(ours(name, flat, 1, 0.9), flat.float())


def test_samples_of_one_batch_get_each_their_own_operation():
    images = torch.stack([photo(seed=i) for i in range(len(OPERATIONS))])
    sign = torch.tensor([1, -1] * (len(OPERATIONS) // 2))
    together = operate(images.float(), torch.arange(len(OPERATIONS)), sign, 0.7)
    for i, name in enumerate(OPERATIONS):
        assert torch.allclose(together[i], ours(name, images[i], int(sign[i]), 0.7), atol=1e-3)


def test_all_operations_and_both_signs_are_drawn():
    seen = []
    randaugment(torch.zeros(2000, 3, 2, 2), 2, 0.9, seeded(), lambda x, which, sign, strength: seen.append((which, sign)) or x)
    assert len(seen) == 2
    for which, sign in seen:
        assert which.bincount(minlength=len(OPERATIONS)).min() > 80
        assert set(sign.tolist()) == {1, -1} and abs(sign.float().mean()) < 0.14


@pytest.mark.filterwarnings("ignore")  # of torch's own, while it traces
def test_compiled_it_draws_and_does_the_same():
    x = torch.stack([photo(seed=i) for i in range(64)])
    plain, compiled = (Augment(4, True, 2, 9, compiled=c).images(x, seeded()) for c in (False, True))
    apart = (plain - compiled).abs() > 1e-4  # a value that lies on a step of the second operation may fall to either side
    assert apart.float().mean() < 1e-3 and (plain != x / 255).float().mean() > 0.8


def test_grey_images_keep_their_one_channel():
    image = photo()[:1]
    for name in OPERATIONS:
        three = ours(name, image.expand(3, -1, -1), 1, 0.6)
        assert torch.allclose(ours(name, image, 1, 0.6).expand_as(three), three, atol=1e-3)
