"""What happens to a training batch, on its device, each sample by its own draw.

    images     uint8 -> float32 in [0, 1]: random crop and flip (one gather), then RandAugment
    normalise  (x - mean) / deviation
    erase      a box of random size is set to 0, the mean colour after normalising
    mixed      x = w x + (1 - w) x', targets = s y + (1 - s) y'    x', y': the sample before it in the batch
                   mixup    w = s = lambda ~ Beta(alpha, alpha)
                   CutMix   w = 0 in a box of (1 - lambda) of the image, 1 outside; s = the share outside after the image cuts the box

Every function is pure in its inputs and a generator on their device. None waits for the device: no shape depends on a value.

RandAugment draws an operation and a sign for every sample, `randaugment` times. With strength = magnitude / 10:

    brightness, contrast, saturation, sharpness   blend with black, mean grey, grey, blurred: factor 1 ± 0.9 strength
    posterize, solarize                           8 - 4 strength bits; values from 256 (1 - strength) on are inverted
    autocontrast, equalize, identity              of no strength
    shear, translate, rotate                      ± 0.3, ± 0.45 of the side, ± 30 degrees, each times strength; bilinear, filled with grey
Values are those of Pillow before it rounds. A clip is one sample: all of its frames get the same draw and share their statistics.

Shapes: N samples, C channels, T frames of a clip, H height, W width. Images (N, C, H, W), clips (N, C, T, H, W).

Papers: RandAugment, arxiv.org/abs/1909.13719. Random erasing, 1708.04896. mixup, 1710.09412. CutMix, 1905.04899.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

BLENDS = ("brightness", "contrast", "saturation", "sharpness")
MOVES = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
OPERATIONS = (*BLENDS, *MOVES, "posterize", "solarize", "autocontrast", "equalize", "identity")
FILL = 128.0  # what a turned or shifted image leaves bare
ERASED_AREA = (0.02, 1 / 3)
ERASED_RATIO = (0.3, 3.3)


@dataclass(frozen=True)
class Augment:
    """What happens to a training batch. The defaults change nothing.

    crop          pixels of padding around a random crop, black unless `reflect`
    flip          mirror half of the samples, left to right
    randaugment   how many operations for each sample, of `magnitude` 0 ... 10
    erase         the probability that a box of a sample is erased
    mixup         alpha of mixup; 0: none
    cutmix        alpha of CutMix; 0: none. With both, each batch takes one of them, by a coin
    mixing        the chance that a sample is mixed at all
    compiled      RandAugment by torch.compile: a few kernels for each operation instead of sixty
    """

    crop: int = 0
    flip: bool = False
    randaugment: int = 0
    magnitude: float = 9
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    reflect: bool = False
    mixing: float = 1.0
    compiled: bool = False

    def __post_init__(self) -> None:
        for name in ("crop", "randaugment", "mixup", "cutmix"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"Augment: {name}={getattr(self, name)} must be at least 0.")
        for name, most in (("magnitude", 10), ("erase", 1), ("mixing", 1)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"Augment: {name}={getattr(self, name)} must lie in 0 ... {most}.")
        if self.mixing < 1 and not (self.mixup or self.cutmix):
            raise ValueError(
                f"Augment: mixing={self.mixing} is the chance that a sample is mixed, and nothing mixes. Give mixup or cutmix."
            )
        if self.reflect and not self.crop:
            raise ValueError("Augment: reflect=True says how a crop is padded, and crop=0 pads nothing. Give crop, or leave reflect out.")

    def images(self, x: Tensor, generator: Generator) -> Tensor:
        """uint8 images or clips, cropped, flipped and through RandAugment: float32 in [0, 1]."""
        if x.dtype != torch.uint8 or x.ndim not in (4, 5):
            raise ValueError(f"Augment: found {tuple(x.shape)} of {x.dtype}; wanted uint8 images (N, C, H, W) or clips (N, C, T, H, W).")
        if self.crop or self.flip:
            x = crop_and_flip(x, self.crop, self.flip, generator, reflect=self.reflect)
        if self.randaugment:
            x = randaugment(x.float(), self.randaugment, self.magnitude / 10, generator, _compiled() if self.compiled else operate)
        return x / 255

    def prepared(self, x: Tensor, mean: Tensor, deviation: Tensor, generator: Generator) -> Tensor:
        """A training batch up to mixing: `images`, normalised, with boxes erased."""
        x = normalise(self.images(x, generator), mean, deviation)
        return erased(x, self.erase, generator) if self.erase else x

    def mixed(self, x: Tensor, y: Tensor, generator: Generator, classes: int) -> tuple[Tensor, Tensor]:
        """Samples mixed with each other, and soft targets (N, classes). Both as they are where nothing mixes."""
        if not (self.mixup or self.cutmix):
            return x, y
        if not x.is_floating_point() or x.ndim not in (4, 5):
            raise ValueError(
                f"Augment: found {tuple(x.shape)} of {x.dtype}; only images and clips that went through prepared() can be mixed."
            )
        own = self._own(x, generator)
        if self.mixing < 1:
            own = torch.where(torch.rand(len(x), 1, 1, generator=generator, device=generator.device) < self.mixing, own, 1.0)
        pixels = own.to(x.dtype).view(len(x), *[1] * (x.ndim - 3), *own.shape[1:])
        hot = (y[:, None] == torch.arange(classes, device=y.device)).float()
        return torch.lerp(x.roll(1, 0), x, pixels), torch.lerp(hot.roll(1, 0), hot, own.mean((1, 2))[:, None])

    def _own(self, x: Tensor, generator: Generator) -> Tensor:
        """How much of each pixel is the sample's own: (N, H, W), or (N, 1, 1) where it is the same everywhere."""
        n, h, w = len(x), x.shape[-2], x.shape[-1]
        if not self.cutmix:
            return beta(n, self.mixup, generator)[:, None, None]
        cut = (~cutmix_boxes(n, h, w, self.cutmix, generator)).float()
        if not self.mixup:
            return cut
        coin = torch.rand((), generator=generator, device=generator.device) < 0.5
        return torch.where(coin, beta(n, self.mixup, generator)[:, None, None], cut)


def normalise(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    """uint8, or floats in [0, 1], to float32 of the given mean 0 and deviation 1, channel by channel."""
    if x.ndim not in (4, 5) or mean.shape != x.shape[1:2] or deviation.shape != mean.shape:
        raise ValueError(
            f"normalise(): found {tuple(x.shape)}, a mean of {tuple(mean.shape)} and a deviation of {tuple(deviation.shape)}; "
            "wanted (N, C, H, W) or (N, C, T, H, W), (C,) and (C,)."
        )
    shape = (-1, *[1] * (x.ndim - 2))
    scale = 1 if x.is_floating_point() else 255
    return (x.to(torch.promote_types(x.dtype, torch.float32)) - (scale * mean).view(shape)).div_((scale * deviation).view(shape)).float()


# Crop and flip


def crop_and_flip(x: Tensor, crop: int, flip: bool, generator: Generator, *, reflect: bool = False) -> Tensor:
    """A window of each sample's padded self, mirrored for half of them, in one gather."""
    n, (h, w) = len(x), x.shape[-2:]
    if reflect and crop >= min(h, w):
        raise ValueError(f"Augment: crop={crop} is too much to reflect in {h} x {w} pixels. At most {min(h, w) - 1}.")
    shape, stride = x.shape, w
    rows, columns = torch.arange(h, device=x.device)[None], torch.arange(w, device=x.device)[None]
    if flip:
        mirrored = torch.randint(2, (n, 1), generator=generator, device=x.device)
        columns = (columns - mirrored * (w - 1)).abs()
    if crop:
        shift = torch.randint(2 * crop + 1, (2, n, 1), generator=generator, device=x.device)
        rows, columns = rows + shift[0], columns + shift[1]
        if reflect:
            rows, columns = _reflected(rows - crop, h), _reflected(columns - crop, w)
        else:
            x, stride = F.pad(x, (crop,) * 4), w + 2 * crop
    at = (rows[:, :, None] * stride + columns[:, None]).flatten(1)
    flat = x.flatten(1, -3).flatten(2)
    return flat.gather(2, at[:, None].expand(-1, flat.shape[1], -1)).view(shape)


def _reflected(at: Tensor, size: int) -> Tensor:
    return size - 1 - (size - 1 - at.abs()).abs()


# RandAugment


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(operate, dynamic=False)


def randaugment(x: Tensor, count: int, strength: float, generator: Generator, do: Callable[..., Tensor]) -> Tensor:
    """`count` operations on each sample, one after the other. Values in 0 ... 255, in and out."""
    for _ in range(count):
        which = torch.randint(len(OPERATIONS), (len(x),), generator=generator, device=x.device)
        sign = 2 * torch.randint(2, (len(x),), generator=generator, device=x.device) - 1
        x = do(x, which, sign, strength)
    return x


def operate(x: Tensor, which: Tensor, sign: Tensor, strength: float) -> Tensor:
    """Operation `which[n]` of OPERATIONS on sample n. Values in 0 ... 255.

    x: (N, C, H, W) or (N, C, T, H, W) of floats. which, sign: (N,), a number and 1 or -1. strength: 0 ... 1.
    """
    if x.shape[1] not in (1, 3):
        raise ValueError(f"RandAugment wants images of 1 or 3 channels, found {x.shape[1]}. Set randaugment=0.")
    if not len(x):
        return x  # affine_grid refuses a batch of none
    frames = x.flatten(1, -3)  # (N, C T, H, W): what the frames of a clip share, they share here
    drawn = (which == torch.arange(len(OPERATIONS), device=x.device)[:, None])[..., None, None, None]
    on = dict(zip(OPERATIONS, drawn, strict=True))  # each (N, 1, 1, 1)
    amounts = drawn * (strength * sign).view(-1, 1, 1, 1)
    frames = _blended(frames, x.shape[1], on, amounts[: len(BLENDS)].sum(0))
    frames = torch.where(on["posterize"], _posterised(frames, strength), frames)
    frames = torch.where(on["solarize"] & (frames >= 256 * (1 - strength)), 255 - frames, frames)
    frames = torch.where(on["autocontrast"], _stretched(frames, x.shape[1]), frames)
    frames = torch.where(on["equalize"], _equalised(frames, x.shape[1]), frames)
    moves = slice(len(BLENDS), len(BLENDS) + len(MOVES))
    frames = torch.where(drawn[moves].any(0), _moved(frames, *amounts[moves].view(len(MOVES), -1)), frames)
    return frames.clamp_(0, 255).reshape(x.shape)  # a stretch or an interpolation can round to above 255


def _blended(x: Tensor, channels: int, on: dict[str, Tensor], amount: Tensor) -> Tensor:
    """Moved away from, or to, what the operation would leave at a factor of 0. An amount of 0 leaves x to the bit."""
    grey = _grey(x, channels)
    without = torch.where(on["contrast"], grey.mean((1, 2, 3), keepdim=True), torch.where(on["saturation"], grey, _smooth(x)))
    return torch.lerp(without * ~on["brightness"], x, 1 + 0.9 * amount).clamp_(0, 255)


def _grey(x: Tensor, channels: int) -> Tensor:
    """Luma, in the shape of x: (N, C T, H, W)."""
    if channels == 1:
        return x
    red, green, blue = x.unflatten(1, (channels, -1)).unbind(1)
    return (0.299 * red + 0.587 * green + 0.114 * blue).repeat(1, channels, 1, 1)


def _smooth(x: Tensor) -> Tensor:
    """A pixel weighs 5, each of its eight neighbours 1; the border stays."""
    if min(x.shape[-2:]) < 3:
        return x
    smooth = x.clone()
    smooth[..., 1:-1, 1:-1] = (F.avg_pool2d(x, 3, 1, divisor_override=1) + 4 * x[..., 1:-1, 1:-1]) / 13
    return smooth


def _posterised(x: Tensor, strength: float) -> Tensor:
    level = 2 ** round(4 * strength)
    return (x / level).floor_().mul_(level)


def _stretched(x: Tensor, channels: int) -> Tensor:
    """Each channel's darkest value to 0, its brightest to 255; a channel of one value as it is."""
    y = x.unflatten(1, (channels, -1)).flatten(2)
    low, high = y.amin(2, keepdim=True), y.amax(2, keepdim=True)
    wide = high > low
    low = low * wide
    return ((y - low) * torch.where(wide, 255 / (high - low), 1.0)).view(x.shape)


def _equalised(x: Tensor, channels: int) -> Tensor:
    """Each channel by its own cumulated histogram, with Pillow's whole-number steps."""
    y = x.unflatten(1, (channels, -1)).flatten(2)
    values = y.round().long()
    one = torch.ones((), dtype=torch.int32, device=x.device).expand_as(values)
    counts = torch.zeros(*y.shape[:2], 256, dtype=torch.int32, device=x.device).scatter_add_(2, values, one)
    step = (y.shape[2] - counts.gather(2, values.amax(2, keepdim=True))) // 255
    below = counts.cumsum(2, dtype=torch.int32) - counts
    table = ((step // 2 + below) // step.clamp(min=1)).clamp_(max=255)
    return torch.where(step > 0, table.gather(2, values).to(x.dtype), y).view(x.shape)


def _moved(x: Tensor, shear_x: Tensor, shear_y: Tensor, translate_x: Tensor, translate_y: Tensor, rotate: Tensor) -> Tensor:
    """Sheared, shifted or turned about the centre: one map for each sample, of output places to input places. Amounts: (N,)."""
    h, w = x.shape[-2:]
    angle = math.radians(30) * rotate
    cos, sin = angle.cos(), angle.sin()
    right, down = (0.3 * shear_x + sin) * (h / w), (0.3 * shear_y - sin) * (w / h)
    # in the grid's units the sides are 2 long
    theta = torch.stack((cos, right, 0.9 * translate_x, down, cos, 0.9 * translate_y), 1).view(-1, 2, 3)
    grid = F.affine_grid(theta.to(x.dtype), [len(x), 1, h, w], align_corners=False)
    moved = F.grid_sample(x, grid, padding_mode="border", align_corners=False)
    return moved.masked_fill_((grid.abs().amax(3) >= 1)[:, None], FILL)


# Boxes and mixtures


def erased(x: Tensor, probability: float, generator: Generator) -> Tensor:
    """Each sample with that probability loses a box of 2 ... 33 % of its area; a box longer than a side is cut to it."""
    h, w = x.shape[-2:]
    hit, area, ratio, top, left = torch.rand(5, len(x), generator=generator, device=x.device)
    area = (ERASED_AREA[0] + (ERASED_AREA[1] - ERASED_AREA[0]) * area) * (h * w)
    ratio = (math.log(ERASED_RATIO[0]) + math.log(ERASED_RATIO[1] / ERASED_RATIO[0]) * ratio).exp()
    tall, wide = (area * ratio).sqrt().round().clamp(1, h), (area / ratio).sqrt().round().clamp(1, w)
    top, left = (top * (h - tall + 1)).floor(), (left * (w - wide + 1)).floor()
    box = _box(top, top + tall, left, left + wide, h, w) & (hit < probability)[:, None, None]
    return x.masked_fill(box.view(len(x), *[1] * (x.ndim - 3), h, w), 0)


def cutmix_boxes(n: int, h: int, w: int, alpha: float, generator: Generator) -> Tensor:
    """Where each of n samples shows its neighbour: bool (n, h, w), a box around any pixel, cut by the image."""
    side = (1 - beta(n, alpha, generator)).sqrt()
    tall, wide = (h * side / 2).floor(), (w * side / 2).floor()
    y = torch.randint(h, (n,), generator=generator, device=generator.device)
    x = torch.randint(w, (n,), generator=generator, device=generator.device)
    return _box(y - tall, y + tall, x - wide, x + wide, h, w)


def _box(top: Tensor, bottom: Tensor, left: Tensor, right: Tensor, h: int, w: int) -> Tensor:
    """bool (N, h, w): the rows of top <= row < bottom, the columns likewise."""
    rows, columns = torch.arange(h, device=top.device), torch.arange(w, device=top.device)
    tall = (rows >= top[:, None]) & (rows < bottom[:, None])
    wide = (columns >= left[:, None]) & (columns < right[:, None])
    return tall[:, :, None] & wide[:, None]


def beta(n: int, alpha: float, generator: Generator) -> Tensor:
    """n draws of Beta(alpha, alpha) on the generator's device.

        g / (g + g'),  log g = log Gamma(alpha + 1) + log(uniform) / alpha

    In logarithms, since Gamma(alpha) itself is 0 in float32 for many draws of a small alpha.
    """
    gamma = torch._standard_gamma(torch.full((2, n), alpha + 1.0, device=generator.device), generator=generator)
    uniform = 1 - torch.rand(2, n, generator=generator, device=generator.device)  # in (0, 1]
    logs = gamma.log() + uniform.log() / alpha
    return (logs[0] - logs[1]).sigmoid()
