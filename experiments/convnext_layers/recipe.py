"""SBP on a ConvNeXt: which of its stages cost accuracy. Small enough for a CPU."""

from halfback.train import Arm, Recipe, Settings, in_words

PAPER, LAST = "SBP", "SBP, last two thirds of the blocks"
FIVE = ("exact", PAPER, LAST)  # three seeds left open which of the two is better
WHERE = {
    PAPER: "sbp(keep=0.5, layers='paper')",  # the default, by name, as what it is has changed
    LAST: "sbp(keep=0.5, layers='last 2/3')",
    "SBP, middle stage": "sbp(keep=0.5, layers=['stages.1.*'])",
    "SBP, last stage": "sbp(keep=0.5, layers='last 2')",
}


def verdict(results: dict) -> str:
    told = {a["name"]: in_words(a) for a in results["arms"] if a["against"]}
    return (
        f"On the paper's layers, the default, which leave the last stage out: {told[PAPER]}. On the last two thirds of the blocks: "
        f"{told[LAST]}. By stages: the middle one alone {told['SBP, middle stage']}, the last one alone {told['SBP, last stage']}."
    )


RECIPE = Recipe(
    title="SBP on a small ConvNeXt: which stages, on CIFAR-100",
    about="A ConvNeXt of 0.3 million weights on 45,000 images of CIFAR-100, judged by the 5,000 others. It reads the mean of its last map "
    "of 4 x 4.",
    paper="SBP on the first two stages and the first six of nine blocks of the third; the last stage is exact. 82.1 to 81.6 on ImageNet.",
    base=Settings(
        model="experiments/convnext_layers/small.py:convnext",
        data="cifar100",
        validation=5000,
        epochs=8,
        batch=128,
        optimizer="adamw",
        lr=4e-3,
        weight_decay=0.05,
        warmup=0.5,
        clip=1.0,
        crop=4,
        flip=True,
        smoothing=0.1,
        test_every=2,
        best=False,
    ),
    arms=tuple(Arm(name, method, seeds=(0, 1, 2, 3, 4) if name in FIVE else None) for name, method in {"exact": "exact", **WHERE}.items()),
    seeds=(0, 1, 2),
    differs=("CIFAR-100 in eight epochs, where the paper has ImageNet in 300; three stages, where it has four.",),
    order=5,
    minutes=100,
    on="two busy CPU cores",
    verdict=verdict,
)
