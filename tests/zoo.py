"""Small real models of transformers, timm and torchvision, with 12 blocks, dropout 0, and a batch for each."""

from __future__ import annotations

import torch
from torch import nn


def import_torchvision() -> None:
    """torchvision may be a CUDA build beside a CPU torch: its import then misses two operators, which are declared here."""
    try:
        import torchvision
    except RuntimeError as e:
        if "torchvision::nms" not in str(e):
            raise
        import sys

        for name in [m for m in sys.modules if m.startswith("torchvision")]:
            del sys.modules[name]
        lib = torch.library.Library("torchvision", "DEF")
        lib.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        lib.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401

        import_torchvision.library = lib  # type: ignore[attr-defined]


import_torchvision()
D, HEADS = 48, 3


def images(size=64, batch=2):
    torch.manual_seed(1)
    return torch.randn(batch, 3, size, size)


def tokens(n=48, batch=2):
    torch.manual_seed(1)
    return torch.randint(0, 100, (batch, n))


def _common(layers):
    return {"hidden_size": D, "num_hidden_layers": layers, "num_attention_heads": HEADS, "intermediate_size": 4 * D}


def vit(layers=12):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        **_common(layers), image_size=64, patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=5
    )
    return ViTForImageClassification(config), {"pixel_values": images()}


def dinov2(layers=12):
    from transformers import Dinov2Config, Dinov2ForImageClassification

    config = Dinov2Config(
        hidden_size=D, num_hidden_layers=layers, num_attention_heads=HEADS, mlp_ratio=4, image_size=64, patch_size=8, num_labels=5
    )
    return Dinov2ForImageClassification(config), {"pixel_values": images()}


def bert(layers=12):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**_common(layers), vocab_size=100, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=5)
    return BertForSequenceClassification(config), {"input_ids": tokens()}


def llama(layers=12):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**_common(layers), "num_attention_heads": 4}, num_key_value_heads=2, vocab_size=100, use_cache=False)
    return LlamaForCausalLM(config), {"input_ids": tokens()}


def gpt2(layers=12):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=D, n_layer=layers, n_head=HEADS, vocab_size=100, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False
    )
    return GPT2LMHeadModel(config), {"input_ids": tokens()}


def convnext(depths=(3, 3, 9, 3)):
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(depths=list(depths), hidden_sizes=[8, 16, 32, 64], num_labels=5)
    return ConvNextForImageClassification(config), {"pixel_values": images(128)}


def timm_vit(layers=12):
    import timm

    return timm.models.VisionTransformer(img_size=64, patch_size=8, embed_dim=D, depth=layers, num_heads=HEADS, num_classes=5), (images(),)


def timm_convnext(depths=(3, 3, 9, 3)):
    import timm

    return timm.models.ConvNeXt(depths=depths, dims=(8, 16, 32, 64), num_classes=5), (images(128),)


def tv_vit(layers=12):
    from torchvision.models import VisionTransformer

    return VisionTransformer(64, 8, layers, HEADS, D, 4 * D, num_classes=5), (images(),)


def tv_convnext(depths=(3, 3, 9, 3)):
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    widths = [8, 16, 32, 64, None]
    return ConvNeXt([CNBlockConfig(widths[i], widths[i + 1], d) for i, d in enumerate(depths)], num_classes=5), (images(128),)


TRANSFORMERS = {"vit": vit, "dinov2": dinov2, "bert": bert, "llama": llama, "gpt2": gpt2, "timm_vit": timm_vit, "tv_vit": tv_vit}
CONVNETS = {"convnext": convnext, "timm_convnext": timm_convnext, "tv_convnext": tv_convnext}
MODELS = {**TRANSFORMERS, **CONVNETS}


_IMPORTED: set[str] = set()


def make(name: str, seed: int = 0, **kwargs) -> tuple[nn.Module, dict | tuple]:
    if name not in _IMPORTED:  # importing a model's module draws random numbers
        MODELS[name](**kwargs)
        _IMPORTED.add(name)
    torch.manual_seed(seed)
    model, batch = MODELS[name](**kwargs)
    with torch.no_grad():  # small models start so flat that mistakes would hide: give every parameter something to do
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model.train(), batch


def call(model: nn.Module, batch: dict | tuple) -> torch.Tensor:
    return logits(model(**batch) if isinstance(batch, dict) else model(*batch))


def logits(out) -> torch.Tensor:
    return out.logits if hasattr(out, "logits") else out


def loss(model: nn.Module, batch: dict | tuple) -> torch.Tensor:
    out = call(model, batch)
    weights = torch.linspace(-1, 1, out[0].numel(), dtype=out.dtype, device=out.device).reshape(out[0].shape)
    return (out * weights).pow(2).mean()


def most_memory() -> int:
    """KiB that this process had at most. (getrusage tells also what the process that started it had.)"""
    from pathlib import Path

    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
