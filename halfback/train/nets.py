"""The small networks of the experiments, for images of 32 pixels. Plain PyTorch; they know nothing of halfback.

    resnet18     ResNet-18 with the stem for small images: a 3 x 3 convolution of stride 1, and no pooling        11.2 million parameters
    vit-s4       ViT-S with patches of 4 pixels (8 x 8 tokens and a class token), read from the class token        21.4 million
    vit-s4-mean  the same, read from the mean of its tokens
    convnext     ConvNeXt with a stem of 2 x 2 pixels, 2, 6 and 2 blocks of 96, 192 and 384 channels                 4.8 million

`drop_path` is the chance that the last block's branches are skipped for a sample; earlier ones less, linearly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models import Block, ViT


class DropPath(nn.Module):
    """A branch left out for some samples, and scaled for the others."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        stays = torch.rand(x.shape[0], *(1,) * (x.ndim - 1), device=x.device, dtype=x.dtype) >= self.p
        return x * (stays.to(x.dtype) / (1 - self.p))


def _rising(p: float, n: int) -> list[float]:
    return [p * i / max(1, n - 1) for i in range(n)]


# ResNet


class Basic(nn.Module):
    def __init__(self, ins: int, outs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(ins, outs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outs)
        self.conv2 = nn.Conv2d(outs, outs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outs)
        fits = stride == 1 and ins == outs
        self.shortcut = nn.Identity() if fits else nn.Sequential(nn.Conv2d(ins, outs, 1, stride, bias=False), nn.BatchNorm2d(outs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, channels: int, classes: int, width: int = 64):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        stages = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2), (4 * width, 8 * width, 2)]
        self.layers = nn.ModuleList(b for ins, outs, stride in stages for b in (Basic(ins, outs, stride), Basic(outs, outs, 1)))
        self.head = nn.Linear(8 * width, classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for block in self.layers:
            x = block(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def resnet18(channels: int, size: int, classes: int, drop_path: float) -> nn.Module:
    if drop_path:
        raise ValueError(f"model 'resnet18' has no drop path; drop_path {drop_path} means nothing to it.")
    return ResNet(channels, classes)


# ViT


class DroppedBlock(Block):
    def __init__(self, width: int, heads: int, drop_path: float):
        super().__init__(width, heads)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attention(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


def vit_s4(channels: int, size: int, classes: int, drop_path: float, pool: str = "class") -> nn.Module:
    if size % 4:
        raise ValueError(f"model 'vit-s4' has patches of 4 pixels, which do not divide images of {size}.")
    model = ViT(size, 4, channels, 384, 12, 6, classes, pool)
    model.blocks = nn.ModuleList(DroppedBlock(384, 6, p) for p in _rising(drop_path, 12))
    for m in model.modules():
        if isinstance(m, nn.Linear):
            nn.init.trunc_normal_(m.weight, std=0.02)
            nn.init.zeros_(m.bias)
    nn.init.trunc_normal_(model.places, std=0.02)
    nn.init.trunc_normal_(model.class_token, std=0.02)
    return model


# ConvNeXt


class Norm(nn.LayerNorm):
    """A LayerNorm over the channels of a picture."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Mixer(nn.Module):
    """A ConvNeXt block: mixing over places, then over channels."""

    def __init__(self, width: int, drop_path: float):
        super().__init__()
        self.mix = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale = nn.Parameter(torch.full((width,), 0.1))
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x).permute(0, 2, 3, 1)
        y = self.scale * self.mlp(self.norm(y))
        return x + self.drop_path(y.permute(0, 3, 1, 2))


class ConvNeXt(nn.Module):
    def __init__(self, channels: int, classes: int, drop_path: float, depths: tuple[int, ...] = (2, 6, 2), width: int = 96):
        super().__init__()
        widths = [width * 2**i for i in range(len(depths))]
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 2, 2), Norm(width, eps=1e-6))
        rates = iter(_rising(drop_path, sum(depths)))
        self.stages = nn.ModuleList()
        for i, depth in enumerate(depths):
            down = [] if i == 0 else [Norm(widths[i - 1], eps=1e-6), nn.Conv2d(widths[i - 1], widths[i], 2, 2)]
            self.stages.append(nn.Sequential(*down, *(Mixer(widths[i], next(rates)) for _ in range(depth))))
        self.norm = nn.LayerNorm(widths[-1], eps=1e-6)
        self.head = nn.Linear(widths[-1], classes)
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Conv2d)) and m.bias is not None:
                nn.init.trunc_normal_(m.weight, std=0.02)
                nn.init.zeros_(m.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(x.mean((2, 3))))


def convnext(channels: int, size: int, classes: int, drop_path: float) -> nn.Module:
    if size % 8:
        raise ValueError(f"model 'convnext' halves an image three times; {size} pixels cannot be.")
    return ConvNeXt(channels, classes, drop_path)


NETS: dict[str, Callable[[int, int, int, float], nn.Module]] = {
    "resnet18": resnet18,
    "vit-s4": vit_s4,
    "vit-s4-mean": functools.partial(vit_s4, pool="mean"),
    "convnext": convnext,
}


def make_net(name: str, shape: tuple[int, ...], classes: int, drop_path: float = 0.0) -> nn.Module:
    if len(shape) != 3 or shape[1] != shape[2]:
        raise ValueError(f"model {name!r} wants square images (C, H, W), found {shape}.")
    return NETS[name](shape[0], shape[1], classes, drop_path)
