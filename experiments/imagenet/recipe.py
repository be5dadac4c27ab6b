"""SBP, table 1, as the paper has it: for who has ImageNet, in folders, and the days that it takes.

halfback reproduce imagenet --root IMAGENET --minutes 600
"""

from halfback.train import Arm, Recipe, Settings

VIT = {"model": "timm:vit_tiny_patch16_224", "drop_path": 0.0}
CONVNEXT = {"model": "timm:convnext_tiny", "drop_path": 0.1, "channels_last": True}

RECIPE = Recipe(
    title="SBP, table 1: ImageNet",
    about="ViT-Tiny and ConvNeXt-Tiny at 224 pixels, 300 epochs, by the recipe of ConvNeXt's authors.",
    paper="ViT-Tiny 73.68 exact, 73.09 with SBP at keep 0.5; ConvNeXt-Tiny 82.1 and 81.61.",
    base=Settings(
        data="folder",
        size=224,
        epochs=300,
        batch=4096,
        accumulate=16,
        optimizer="adamw",
        lr=4e-3,
        weight_decay=0.05,
        warmup=20.0,
        flip=True,
        randaugment=2,
        magnitude=9.0,
        erase=0.25,
        mixup=0.8,
        cutmix=1.0,
        smoothing=0.1,
        device="cuda",
        dtype="bf16",
    ),
    arms=(
        Arm("ViT-Tiny, exact", "exact", VIT, paper=73.68, group="ViT-Tiny"),
        Arm("ViT-Tiny, SBP", "sbp(keep=0.5)", VIT, paper=73.09, group="ViT-Tiny"),
        Arm("ConvNeXt-Tiny, exact", "exact", CONVNEXT, paper=82.1, group="ConvNeXt-Tiny"),
        Arm(
            "ConvNeXt-Tiny, SBP",
            "sbp(keep=0.5, layers='paper')",
            CONVNEXT,
            paper=81.61,
            group="ConvNeXt-Tiny",
            against="ConvNeXt-Tiny, exact",
        ),
    ),
    seeds=(0,),
    against="ViT-Tiny, exact",
    differs=("Never run by us: we do not have ImageNet. One seed, as in the paper; give it more if you have the time.",),
    order=90,
)
