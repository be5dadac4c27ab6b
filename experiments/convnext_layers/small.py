"""The ConvNeXt of `halfback train` at a quarter of its width, which a CPU trains in minutes."""

from torch import nn

from halfback.train.nets import ConvNeXt


def convnext() -> nn.Module:
    return ConvNeXt(3, 100, drop_path=0.0, depths=(2, 4, 2), width=24)
