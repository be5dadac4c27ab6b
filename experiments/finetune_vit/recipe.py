"""DropIT, table 3: fine-tuning a pretrained ViT, here one of our own."""

from halfback.train import Arm, Recipe, Settings

SET = "out/finetune/cifar100"

RECIPE = Recipe(
    title="DropIT, table 3: fine-tuning a ViT-S/4 on 50 classes of CIFAR-100",
    about="Pretrained on the other 50 classes by `experiments/finetune_vit/prepare.py`, once; then SGD with a cosine schedule, as in the "
    "paper. A seed is that of the head, the order and the augmentation.",
    paper="ViT-B/16, pretrained on ImageNet-21k: 90.32 to 90.90 on CIFAR-100 with Parallel Min-K, keep 0.1.",
    base=Settings(
        model="vit-s4",
        weights=f"{SET}/body.safetensors",
        data=f"{SET}/second.npz",
        epochs=10,
        batch=256,
        optimizer="sgd",
        lr=0.03,
        weight_decay=0.0,
        warmup=0.5,
        clip=1.0,
        crop=4,
        flip=True,
        device="cuda",
        dtype="bf16",
        compile=True,
        test_every=5,
        best=False,
    ),
    arms=(
        Arm("exact"),
        Arm("DropIT, keep 0.1", "dropit(keep=0.1, exact_first=False)"),
        Arm("DropIT, 4 bits", "dropit(bits=4, activation_bits=4)"),
        Arm("SBP", "sbp(keep=0.5)"),
    ),
    seeds=(0, 1, 2, 3, 4),
    claims=("DropIT, keep 0.1",),
    differs=("A ViT-S/4 of our own, pretrained on 25,000 images of 32 pixels, where the paper has ViT-B/16 and ImageNet-21k.",),
    order=9,
    minutes=5,
)
