"""PatchDropout: in training half of a ViT's patches enter its blocks, drawn for each sample; the class token always does."""

from torch import nn

from halfback.bench.peers import some_patches
from halfback.models import load_model
from halfback.train.nets import make_net


def dropping(model: nn.Module) -> nn.Module:
    first = model.get_submodule("blocks.0")
    first.register_forward_pre_hook(lambda block, args: some_patches(*args, 0.5) if block.training else None)
    return model


def small_vit() -> nn.Module:
    return dropping(load_model("small-vit"))


def vit_s4() -> nn.Module:
    return dropping(make_net("vit-s4", (3, 32, 32), 100))
