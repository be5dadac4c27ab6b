"""The models of the benchmark: how to build each, how to feed it, what its loss is. They are torchvision's and transformers' own,
unmodified, with fresh weights and without dropout and stochastic depth, so that every method computes the same forward.

To add one, write a row in MODELS. Users' own models come by the names that the other commands take, too (halfback/models.py).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..batches import loss_of
from ..blocks import find_blocks
from ..heads import find_heads
from ..models import CLASSES, FORMS, Wanted, load_subject


def summed(model: nn.Module, batch: Any) -> Tensor:
    """Of a model that returns its losses by name, as torchvision's detectors do."""
    return sum(model(*batch).values())  # type: ignore[return-value]


@dataclass(frozen=True)
class Spec:
    """A model in its size, and batches for it."""

    name: str
    about: str
    kind: str  # which rows it is offered: see rows.py. A user's own is text (with a large vocabulary), patches (a ViT), other or bare
    make: Callable[..., nn.Module]  # of a size and of the settings
    feed: Callable[[int, int], Any]  # of a number of samples and a size: a batch
    batch: int
    size: int  # pixels of a side, or tokens
    settings: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[nn.Module, Any], Tensor] = loss_of
    unit: str = "images"
    step: int = 32  # sizes are multiples of it
    autocast: bool = False  # weights in float32, and on a GPU autocast to bf16
    layout: torch.memory_format = torch.contiguous_format

    def build(self, device: str, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        with torch.device(device):
            model = self.make(self.size, **self.settings)
        model.to(device, torch.float32 if self.autocast else dtype).to(memory_format=self.layout)  # type: ignore[call-overload]
        return model.train()

    def samples(self, n: int, device: str, dtype: torch.dtype) -> Any:
        torch.manual_seed(1)
        with torch.device(device):
            batch = self.feed(n, self.size)

        def put(t: Tensor) -> Tensor:
            t = t.to(device, dtype if t.is_floating_point() and not self.autocast else t.dtype)
            return t.to(memory_format=self.layout) if t.ndim == 4 else t

        return tree_map_only(Tensor, put, dict(batch) if hasattr(batch, "keys") else batch)

    def run(self, model: Any, batch: Any, device: str) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=self.autocast and device == "cuda"):
            return self.loss(model, batch)


# Images


def pictures(n: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, size, size), torch.randint(0, CLASSES, (n,))


def vit(size: int, patch: int, layers: int, heads: int, width: int) -> nn.Module:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(size, patch, layers, heads, width, 4 * width)
    nn.init.trunc_normal_(model.heads[-1].weight, std=0.02)  # torchvision's zeros would make every gradient zero
    return model


def convnext(size: int, depths: tuple[int, ...], widths: tuple[int, ...]) -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    stages = [CNBlockConfig(w, after, d) for w, after, d in zip(widths, (*widths[1:], None), depths, strict=True)]
    return ConvNeXt(stages, stochastic_depth_prob=0.0)


def swin(size: int, depths: tuple[int, ...], heads: tuple[int, ...], width: int, window: int) -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], width, list(depths), list(heads), [window, window], stochastic_depth_prob=0.0)


def resnet(size: int, depths: tuple[int, ...]) -> nn.Module:
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, list(depths))


def long_side(size: int) -> int:
    return round(size * 1333 / 800)


def mask_rcnn(size: int, depths: tuple[int, ...], widths: tuple[int, ...], channels: int, proposals: int = 2000) -> nn.Module:
    """torchvision's Mask R-CNN on the features of all four stages of a ConvNeXt."""
    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.backbone_utils import BackboneWithFPN

    layers = {str(2 * i + 1): str(i) for i in range(len(widths))}
    backbone = BackboneWithFPN(convnext(size, depths, widths).features, layers, list(widths), channels)
    few = {"rpn_pre_nms_top_n_train": proposals, "rpn_post_nms_top_n_train": proposals, "box_batch_size_per_image": min(512, proposals)}
    return MaskRCNN(backbone, 91, min_size=size, max_size=long_side(size), **few)


def people(n: int, size: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Photographs with a few upright figures: boxes, labels and masks, of noise."""
    height, width = size, long_side(size)
    y, x = torch.arange(height)[:, None], torch.arange(width)[None]
    centres = torch.linspace(0.15, 0.85, 4) * width
    high, wide = 0.35 * height, 0.08 * width
    masks = torch.stack([((y - height / 2) / high) ** 2 + ((x - c) / wide) ** 2 < 1 for c in centres]).to(torch.uint8)
    boxes = torch.stack([torch.stack([c - wide, c * 0 + height / 2 - high, c + wide, c * 0 + height / 2 + high]) for c in centres])
    target = {"boxes": boxes, "labels": torch.ones(len(centres), dtype=torch.int64), "masks": masks}
    return [torch.rand(3, height, width) for _ in range(n)], [target] * n


# Text


def how() -> dict[str, Any]:
    """Settings of a decoder's configuration. Its attention is transformers' own, by a name for which it makes no mask: while compiling it
    would make a whole one, which keeps plain training off the fast kernels, and plain is to be as fast as it can be."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
    return {"attn_implementation": "causal_sdpa", "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}


def llama(size: int, layers: int, heads: int, keys: int, width: int, inner: int, words: int, tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"hidden_size": width, "intermediate_size": inner, "vocab_size": words, "max_position_embeddings": size}
    sizes["tie_word_embeddings"] = tied
    blocks: Any = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": keys}
    return LlamaForCausalLM(LlamaConfig(**sizes, **blocks, **how()))


def gpt2(size: int, layers: int, heads: int, width: int, words: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: Any = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": size, "vocab_size": words}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **how()))
    model.loss_type = "ForCausalLM"  # it is read off the name of the class otherwise, which has none
    return model


def texts(words: int) -> Callable[[int, int], dict[str, Tensor]]:
    def feed(n: int, size: int) -> dict[str, Tensor]:
        ids = torch.randint(0, words, (n, size))
        return {"input_ids": ids, "labels": ids}

    return feed


# The table


CONVNEXT_T = {"depths": (3, 3, 9, 3), "widths": (96, 192, 384, 768)}
CONVNEXT_B = {"depths": (3, 3, 27, 3), "widths": (128, 256, 512, 1024)}
VIT_B = {"patch": 16, "layers": 12, "heads": 12, "width": 768}
VIT_L = {"patch": 16, "layers": 24, "heads": 16, "width": 1024}
SWIN_T = {"depths": (2, 2, 6, 2), "heads": (3, 6, 12, 24), "width": 96, "window": 7}
GPT2_M = {"layers": 24, "heads": 16, "width": 1024, "words": 50257}
LLAMA_1B = {"layers": 16, "heads": 32, "keys": 8, "width": 2048, "inner": 8192, "words": 32000}
SMOLLM2 = {"layers": 30, "heads": 9, "keys": 3, "width": 576, "inner": 1536, "words": 49152, "tied": True}
TEXT: Any = {"unit": "tokens", "step": 128}

MODELS = {
    s.name: s
    for s in (
        Spec("vit-b", "ViT-B/16", "vit", vit, pictures, 256, 224, VIT_B),
        Spec("convnext-t", "ConvNeXt-T", "convnext", convnext, pictures, 128, 224, CONVNEXT_T),
        Spec("llama-1b", "Llama, 1.1B", "llama", llama, texts(32000), 8, 2048, LLAMA_1B, **TEXT),
        Spec("vit-l", "ViT-L/16", "vit", vit, pictures, 128, 224, VIT_L),
        Spec("convnext-b", "ConvNeXt-B", "convnext", convnext, pictures, 128, 224, CONVNEXT_B),
        Spec("swin-t", "Swin-T", "swin", swin, pictures, 128, 224, SWIN_T),
        Spec("resnet-50", "ResNet-50", "resnet", resnet, pictures, 256, 224, {"depths": (3, 4, 6, 3)}, layout=torch.channels_last),
        Spec("smollm2", "SmolLM2-135M", "llama", llama, texts(49152), 64, 512, SMOLLM2, **TEXT),
        Spec("gpt2-medium", "GPT-2 medium", "gpt2", gpt2, texts(50257), 16, 1024, GPT2_M, **TEXT),
        Spec(
            "mask-rcnn",
            "Mask R-CNN, ConvNeXt-T",
            "detector",
            mask_rcnn,
            people,
            4,
            800,
            {**CONVNEXT_T, "channels": 256},
            summed,
            autocast=True,
        ),
    )
}
REQUIRED = ("vit-b", "convnext-t", "llama-1b")

SMALL: dict[str, dict[str, Any]] = {  # by kind: the same in a size for tests
    "vit": {"patch": 8, "layers": 3, "heads": 2, "width": 32},
    "convnext": {"depths": (1, 1, 3, 1), "widths": (8, 16, 24, 32)},
    "swin": {"depths": (2, 2), "heads": (2, 4), "width": 16, "window": 4},
    "resnet": {"depths": (1, 1, 1, 1)},
    "llama": {"layers": 3, "heads": 4, "keys": 2, "width": 32, "inner": 64, "words": 4096},
    "gpt2": {"layers": 3, "heads": 2, "width": 32, "words": 4096},
    "detector": {"depths": (1, 1, 3, 1), "widths": (8, 16, 24, 32), "channels": 16, "proposals": 16},
}


def tiny(spec: Spec) -> Spec:
    feed = texts(4096) if spec.unit == "tokens" else spec.feed
    size = {"tokens": 32, "images": 96 if spec.kind == "detector" else 64}[spec.unit]
    return dataclasses.replace(spec, batch=8 if spec.kind != "detector" else 2, size=size, settings=SMALL[spec.kind], feed=feed, step=32)


def find(name: str, batch: int | None = None, size: int | None = None, seq: int | None = None, small: bool = False) -> Spec:
    """A model of the table, or a user's own, in the size that was asked for."""
    spec = tiny(MODELS[name]) if small and name in MODELS else MODELS.get(name) or own(name, batch, size, seq)
    if name in MODELS:
        Wanted(name, batch, size, seq).only("texts" if spec.unit == "tokens" else "images")
    return dataclasses.replace(spec, batch=batch or spec.batch, size=size or seq or spec.size)


PLACES = ("encoder.dropout", "patch_drop")  # where torchvision's and timm's ViT have class token and patches, with their places


def own(name: str, batch: int | None, size: int | None, seq: int | None) -> Spec:
    try:
        seen = load_subject(Wanted(name, batch, size, seq))
    except ValueError as e:
        if "is unknown" in str(e):
            raise ValueError(f"bench: model {name!r} is unknown. Models: {', '.join((*MODELS, *FORMS))}.") from e
        raise
    if callable(seen.batch()) and not isinstance(seen.batch(), Tensor):
        raise ValueError(f"bench: model {name!r} comes with a function as batch, which has no size; return (model, make_batch) instead.")
    blocks = [n for n, _ in find_blocks(seen.model)]
    patches = any(n in PLACES for n, _ in seen.model.named_modules())
    kind = "bare" if not blocks else "text" if find_heads(seen.model, blocks) else "patches" if patches else "other"
    text = kind == "text" or seq is not None
    given = seen.inputs.split()[0]

    @functools.cache
    def real() -> Any:
        with torch.device("cpu"):
            return load_subject(Wanted(name, batch, size, seq, dtype="fp32", light=False))

    return Spec(
        name,
        name,
        kind,
        lambda size: copy.deepcopy(real().model),
        lambda n, size: real().make(n),
        seen.samples,
        int(given) if given.isdigit() else 0,
        unit="tokens" if text else "images",
    )
