"""DropIT, table 3, small enough for a CPU: fine-tuning a pretrained ViT on half of Fashion-MNIST's classes."""

from halfback.train import Arm, Recipe, Settings, in_words

SET = "out/finetune/fashion-mnist"


def verdict(results: dict) -> str:
    sparse = next(a for a in results["arms"] if a["name"].startswith("DropIT, keep"))["against"]["top1"]
    gained = "gains" if sparse["mean"] > 0 else "loses"
    told = "; ".join(f"{a['name']}: {in_words(a)}" for a in results["arms"] if a["against"])
    return f"The paper's DropIT gains; here it {gained}{'' if sparse['clear'] else ', not clear of zero'}. {told}."


RECIPE = Recipe(
    title="DropIT, table 3: fine-tuning a small ViT on five classes of Fashion-MNIST",
    about="Pretrained on the other five classes by `experiments/finetune_vit/prepare.py`, once; then SGD with a cosine schedule, as in the "
    "paper. T-shirts, pullovers, coats, shirts and bags, 5,000 to test on. A seed is that of the head and the order.",
    paper="ViT-B/16, pretrained on ImageNet-21k: 90.32 to 90.90 on CIFAR-100 with Parallel Min-K, keep 0.1.",
    base=Settings(
        model="experiments/fashion/vit.py:of_five_classes",
        weights=f"{SET}/body.safetensors",
        data=f"{SET}/second.npz",
        epochs=2,
        batch=128,
        optimizer="sgd",
        lr=0.1,
        weight_decay=0.0,
        warmup=0.2,
        clip=1.0,
        best=False,
    ),
    arms=(
        Arm("exact"),
        Arm("from fresh weights, exact", changes={"weights": None}),
        Arm("DropIT, keep 0.1", "dropit(keep=0.1, exact_first=False)"),
        Arm("DropIT, 4 bits", "dropit(bits=4, activation_bits=4)"),
        Arm("SBP", "sbp(keep=0.5)"),
    ),
    seeds=(0, 1, 2, 3, 4),
    claims=("DropIT, keep 0.1", "DropIT, 4 bits", "SBP"),
    differs=("A ViT of 0.1 million weights of our own, where the paper has ViT-B/16 and ImageNet-21k.",),
    order=31,
    minutes=30,
    on="two CPU cores",
    verdict=verdict,
)
