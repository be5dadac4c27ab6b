"""A ViT for 28 x 28 pixels, in patches of 4: 49 tokens, 6 blocks of width 32. A CPU trains it in minutes."""

from torch import nn

from halfback.models import ViT


def from_class_token() -> nn.Module:
    return ViT(28, 4, 1, 32, 6, 2, 10, "class")


def from_mean() -> nn.Module:
    return ViT(28, 4, 1, 32, 6, 2, 10, "mean")


def of_five_classes() -> nn.Module:
    return ViT(28, 4, 1, 32, 6, 2, 5, "class")
