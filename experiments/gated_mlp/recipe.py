"""Gated MLPs whose two factors are held in few bits: what it costs a small language model that is trained from scratch."""

from halfback.train import Arm, Recipe, Settings


def verdict(results: dict) -> str:
    found = {a["name"]: a for a in results["arms"]}

    def told(name: str) -> str:
        difference = found[name]["against"]["test_loss"]
        held = found[name]["mean"]["held"] / found["exact"]["mean"]["held"]
        clear = "" if difference["clear"] else ", not clear of zero"
        return f"{difference['mean']:+.3f}".replace("-", "\u2212") + f"{clear}, at {held:.2f} of what exact training holds"

    return (
        f"In 8 bits the test loss changes by {told('8 bits')}; in 4 bits by {told('4 bits')}. Here numbers have 32 bits; of numbers of "
        "16 bits, few bits save less."
    )


RECIPE = Recipe(
    title="Gated MLPs in few bits, on Shakespeare",
    about="A decoder of four layers with gated MLPs, `silu(g) * u`, learns tinyshakespeare byte by byte. `activation_bits` holds few-bit "
    "copies of both factors, and the layer behind them takes its weight's gradient from those. Judged by the loss of the test part.",
    paper="Not in the papers.",
    base=Settings(
        model="experiments/gated_mlp/decoder.py:decoder",
        data="text",
        epochs=3,
        batch=8,
        optimizer="adamw",
        lr=3e-3,
        weight_decay=0.05,
        warmup=0.1,
        clip=1.0,
        best=False,
    ),
    arms=(
        Arm("exact"),
        Arm("Lean", "lean", like="exact"),
        Arm("8 bits", "dropit(activation_bits=8)"),
        Arm("4 bits", "dropit(activation_bits=4)"),
    ),
    seeds=(0, 1, 2),
    differs=(
        "On a CPU the copies are made by plain torch functions, and take time; compiled on a GPU they are one kernel with the product.",
        "A toy, trained for three passes over a million bytes.",
    ),
    order=22,
    minutes=12,
    on="two CPU cores",
    measure="test_loss",
    verdict=verdict,
)
