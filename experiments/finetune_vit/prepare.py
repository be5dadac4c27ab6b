"""A ViT that is pretrained on every second class of a set, and the other classes to fine-tune it on.

    python experiments/finetune_vit/prepare.py cifar100 --root DIR --device cuda
    python experiments/finetune_vit/prepare.py fashion-mnist --root DIR

Into --out, which is out/finetune/SET unless told:

    first.npz, second.npz           images of classes 1, 3, 5, ..., and of classes 0, 2, 4, ..., numbered anew
    pretrained/                     a training on first.npz. Cut, it goes on with the same command
    body.safetensors                the weights that tested best, without the head
"""

import argparse
import dataclasses
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file
from torch import Tensor

from halfback.train.loop import train
from halfback.train.recipes import load
from halfback.train.sets import Part, load_set

MAIN = {"cifar100": "vit_main", "fashion-mnist": "fashion"}  # the recipe whose settings it is pretrained with
MODELS = {"cifar100": "vit-s4", "fashion-mnist": "experiments/fashion/vit.py:of_five_classes"}


def half(part: Part, odd: bool) -> tuple[Tensor, Tensor]:
    assert part.labels is not None
    chosen = part.take((part.labels % 2 == int(odd)).nonzero().squeeze(1))
    assert chosen.labels is not None
    return chosen.inputs, chosen.labels // 2


def split(name: str, root: str | None, out: Path) -> None:
    found = load_set(name, root=root)
    out.mkdir(parents=True, exist_ok=True)
    for file, odd in (("first", True), ("second", False)):
        (x, y), (z, w) = half(found.train, odd), half(found.test, odd)
        np.savez(out / f"{file}.npz", x_train=x.numpy(), y_train=y.numpy(), x_test=z.numpy(), y_test=w.numpy())
        print(f"{out}/{file}.npz: {len(x)} to train on, {len(z)} to test, {1 + int(y.max())} classes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=MODELS)
    parser.add_argument("--root", help="where it lies (default: $HALFBACK_DATA/SET)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="(default: out/finetune/SET)")
    args = parser.parse_args()
    out = args.out or Path("out/finetune") / args.set
    split(args.set, args.root, out)
    own = {"model": MODELS[args.set], "data": str(out / "first.npz"), "root": None, "device": args.device, "best": True, "test_every": 1}
    recipe = load(Path(__file__).parents[1] / MAIN[args.set] / "recipe.py")
    exact = next(a for a in recipe.arms if a.name.startswith("exact, class token"))
    settings = dataclasses.replace(recipe.settings(exact, 0), **own)
    train(settings, out / "pretrained", resume=True)
    weights = load_file(out / "pretrained" / "best.safetensors")
    save_file({k: t for k, t in weights.items() if not k.startswith("head.")}, out / "body.safetensors")
    print(f"{out}/body.safetensors")


if __name__ == "__main__":
    main()
