"""PatchDropout: in training half of a ViT's patches enter its blocks, drawn for each sample; the class token always does."""

import torch
from torch import Tensor, nn

from halfback.models import load_model
from halfback.train.nets import make_net

KEPT = 0.5


def drop(block: nn.Module, args: tuple[Tensor]) -> tuple[Tensor] | None:
    if not block.training:
        return None
    (x,) = args
    n, tokens, width = x.shape
    kept = 1 + torch.rand(n, tokens - 1, device=x.device).topk(round(KEPT * (tokens - 1))).indices
    return (torch.cat((x[:, :1], x.gather(1, kept[..., None].expand(-1, -1, width))), 1),)


def dropping(model: nn.Module) -> nn.Module:
    model.get_submodule("blocks.0").register_forward_pre_hook(drop)
    return model


def small_vit() -> nn.Module:
    return dropping(load_model("small-vit"))


def vit_s4() -> nn.Module:
    return dropping(make_net("vit-s4", (3, 32, 32), 100))
