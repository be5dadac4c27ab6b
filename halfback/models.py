"""Models to try a method on: a small ViT of our own, and anyone else's by name.

    x = patches(image) + places                      one token a patch, a class token in front
    x = x + attention(norm(x));  x = x + mlp(norm(x))    in every block
    y = head(norm(x)[class])   or, with pool="mean", head(mean of norm(x) over the patches)

The ViT is plain PyTorch and knows nothing of halfback, which is the point: methods reach it as they reach any other model.

Shapes: B images, n tokens, D width, H heads.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POOLS = ("class", "mean")
VIT_B16 = {"image": 224, "patch": 16, "channels": 3, "width": 768, "depth": 12, "heads": 12, "classes": 1000}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.out(x.transpose(1, 2).reshape(b, n, d))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, image: int, patch: int, channels: int, width: int, depth: int, heads: int, classes: int, pool: str):
        super().__init__()
        self.pool = pool
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.empty(1, 1 + (image // patch) ** 2, width))
        nn.init.normal_(self.places, std=0.5)  # as strong as the patches; at 0.02 eight epochs of digits are too few
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(x), -1, -1), x), 1) + self.places
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x[:, 0] if self.pool == "class" else x[:, 1:].mean(1))


def small_vit(
    image: int = 8,
    patch: int = 2,
    channels: int = 1,
    width: int = 48,
    depth: int = 4,
    heads: int = 3,
    classes: int = 10,
    pool: str = "class",
) -> ViT:
    """A ViT for `image` x `image` pictures; the defaults suit the digits of `data.py`."""
    if image % patch:
        raise ValueError(f"small_vit(): patch={patch} does not divide image={image}.")
    if width % heads:
        raise ValueError(f"small_vit(): heads={heads} does not divide width={width}.")
    if pool not in POOLS:
        raise ValueError(f"small_vit(): pool={pool!r} is none of {', '.join(POOLS)}.")
    return ViT(image, patch, channels, width, depth, heads, classes, pool)


# Models by name


def load_model(spec: str, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> nn.Module:
    """A model with fresh weights, for images of `shape` (channels, height, width).

    spec   "small-vit", "timm:NAME", "torchvision:NAME", or "path/to/file.py:factory", a function of no arguments
    """
    if spec == "small-vit":
        return _small_vit_for(shape, classes)
    source, colon, name = spec.rpartition(":")
    if colon and source.endswith(".py"):
        return _from_file(Path(source), name)
    if source in SOURCES and name:
        return SOURCES[source](name, shape, classes)
    raise ValueError(f"model {spec!r} is unknown. Models: {', '.join(FORMS)}.")


def _small_vit_for(shape: tuple[int, ...], classes: int) -> ViT:
    channels, height, width = shape
    if height != width:
        raise ValueError(f"model 'small-vit' wants square images, found {height} x {width}. Models: {', '.join(FORMS)}.")
    # about seven patches a side: enough tokens for a choice among them to mean something
    patch = max(p for p in range(1, max(2, height // 7) + 1) if height % p == 0)
    return small_vit(height, patch, channels, classes=classes)


def _from_timm(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    timm = _import("timm", name)
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.split('_')[0]}*")[:6]
        raise ValueError(
            f"model 'timm:{name}': timm has no such model. " + (f"Near it: {', '.join(near)}." if near else "See timm.list_models().")
        )
    sized = {"img_size": shape[1:]} if "vit" in name else {}  # only models with learned places need to know
    return timm.create_model(name, num_classes=classes, in_chans=shape[0], **sized)


def _from_torchvision(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    models = _import("torchvision", name).models
    if name not in models.list_models():
        near = [m for m in models.list_models() if m.startswith(name[:3])][:6] or models.list_models()[:6]
        raise ValueError(f"model 'torchvision:{name}': torchvision has no such model. Some that it has: {', '.join(near)}.")
    if shape[0] != 3:
        raise ValueError(f"model 'torchvision:{name}' wants images of 3 channels, the data has {shape[0]}.")
    sized = {"image_size": shape[1]} if name.startswith("vit") else {}
    return models.get_model(name, weights=None, num_classes=classes, **sized)


def _import(package: str, name: str) -> Any:
    """A package that may be missing, or built for another torch: torchvision then raises RuntimeError."""
    try:
        module = importlib.import_module(package)
        if package == "torchvision":
            importlib.import_module("torchvision.models")
        return module
    except ImportError as e:
        raise ValueError(f"model '{package}:{name}' needs {package}: pip install {package}. ({e})") from e
    except RuntimeError as e:
        raise ValueError(
            f"model '{package}:{name}': importing {package} failed ({e}). Its build of torchvision does not fit torch {torch.__version__}: "
            "install the one made for it."
        ) from e


def _from_file(path: Path, factory: str) -> nn.Module:
    if not path.is_file():
        raise FileNotFoundError(f"model '{path}:{factory}': there is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make = getattr(module, factory, None)
    if not callable(make):
        has = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_") and getattr(v, "__module__", "") == path.stem]
        raise ValueError(f"model '{path}:{factory}': the file has no function {factory}. It has: {', '.join(has) or 'none'}.")
    model = make()
    if not isinstance(model, nn.Module):
        raise ValueError(f"model '{path}:{factory}': the function returned {type(model).__name__}, not a torch.nn.Module.")
    return model


SOURCES = {"timm": _from_timm, "torchvision": _from_torchvision}
FORMS = ("small-vit", *(f"{s}:NAME" for s in SOURCES), "path/to/file.py:factory")
