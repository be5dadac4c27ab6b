"""`halfback train`: its options, which are the fields of Settings, and what it does."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from . import checkpoint
from .settings import DECAYS, DTYPES, OPTIMIZERS, SCHEDULES, Settings, Shared, read_json

ABOUT = """\
Trains a model with any method, on your data. It can be stopped at any moment, even killed: --resume goes on from the last checkpoint to
the same weights, bit for bit on a CPU. Ctrl-C and SIGTERM finish the step and save first; the exit code is then 130 or 75. A second
Ctrl-C stops at once.

Written to --out: settings.json, metrics.jsonl (a line an epoch), checkpoints/, best.safetensors, with --budget methods.json, and at the
end result.json, summary.csv, curves.png and report.html. One process trains there at a time: it holds a lock on the file `lock`.
"""
EXAMPLES = """\
data:
  digits                  1797 scanned digits that come with scikit-learn
  cifar100, cifar10       the official binary version, unpacked, in --root DIR or in $HALFBACK_DATA/cifar100
  mnist, fashion-mnist    the four files as published, train-images-idx3-ubyte.gz ..., in --root DIR or in $HALFBACK_DATA/mnist
  folder                  --root DIR with train/CLASS/*.jpg and val/CLASS/*.jpg, as ImageNet has; --size 224
  video                   --root DIR with train.npz and test.npz: clips (N, T, H, W, 3) and labels
  text                    --root FILE.txt, or DIR with train.txt and test.txt; a token is a byte. For language models: hf:gpt2
  tokens                  --root DIR with train.npz and test.npz: tokens (N, L), and labels (N,) or the size of the vocabulary
  FILE.npz                x_train, y_train, x_test, y_test

models:
  resnet18, vit-s4, vit-s4-mean, convnext    small ones for images of 32 pixels; small-vit for digits
  timm:NAME, torchvision:NAME, hf:NAME, path/to/file.py:factory

examples:
  halfback train                                                                     a small ViT on digits, a minute
  halfback train --model resnet18 --data cifar100 --epochs 30 --crop 4 --flip --device cuda --dtype bf16
  halfback train --model vit-s4 --data cifar100 --method "sbp(keep=0.5)+lean" --optimizer adamw --lr 1e-3 --weight-decay 0.05
  halfback train --method "sbp(keep=0.5, schedule=((0, 1.0), (0.3, 0.5)))" --exact-tail 0.1
                                       all positions at first, half of them from three tenths of the training on, exact in its last tenth
  halfback train --model timm:convnext_tiny --data folder --root imagenet --size 224 --budget 16GiB --device cuda --dtype bf16
  halfback train --weights out/mine/best.safetensors --data flowers.npz --model resnet18 --optimizer sgd --lr 0.01      fine-tune
  halfback train --out out/train --resume                                            go on
  torchrun --nproc-per-node 4 -m -- halfback train ...                               share each batch among four GPUs
  torchrun --nproc-per-node 4 -m -- halfback train ... --parallel fsdp               and the weights too
"""
GROUPS: dict[str, dict[str, str]] = {
    "what is trained": {
        "model": "see below",
        "weights": "a safetensors file to begin with, as best.safetensors of another training; what does not fit, as a head, begins fresh",
        "data": "see below",
        "root": "where the data lies (default: $HALFBACK_DATA/NAME)",
        "method": 'as "sbp(keep=0.5)+recompute", or a JSON list of methods',
        "budget": "memory instead of a method: 10GiB in all on the device, or 0.4 of the peak of plain training",
        "size": "pixels a side, of a folder's images (default: 224)",
        "seq": "tokens of a window of --data text (default: 256)",
        "seed": "of weights, data order and noise (default: 0)",
        "validation": "test on so many samples of the training set, and leave the test set alone: for choosing settings",
    },
    "how": {
        "epochs": "how often all data is seen",
        "batch": "samples of a step of the optimizer",
        "accumulate": "parts in which a batch is run, one after the other",
        "optimizer": f"{' or '.join(OPTIMIZERS)}",
        "lr": "the highest learning rate (default: 0.001 for adamw, 0.1 for sgd)",
        "momentum": "of sgd",
        "nesterov": "of sgd",
        "betas": "of adamw",
        "weight_decay": "of what --decay says (default: 0.05 for adamw, 0.0005 for sgd)",
        "decay": f"{' or '.join(DECAYS)}: what weight decay is for (default: all for sgd, matrices for adamw)",
        "schedule": f"{', '.join(SCHEDULES)}: how the learning rate falls; of keep, see the examples",
        "milestones": "of --schedule step: the shares of the training after which the rate falls",
        "fall": "of --schedule step: what the rate is multiplied by, each time",
        "warmup": "epochs in which the rate rises to --lr (default: 0)",
        "clip": "the most that the gradient's norm may be",
        "exact_tail": "0.1: the last tenth of the steps with exact gradients, all blocks recomputed so that no more is held (default: 0)",
    },
    "regularisation": {
        "crop": "pixels of padding that a random crop is taken from",
        "flip": "mirror half of the images",
        "randaugment": "so many operations an image",
        "magnitude": "of them, 0 to 10",
        "erase": "the chance that a box is erased",
        "mixup": "alpha of mixup",
        "cutmix": "alpha of CutMix; with both, each batch gets one of them",
        "mixing": "the chance that a sample is mixed (default: 1)",
        "smoothing": "of labels",
        "drop_path": "the chance that a branch of the last block is skipped; earlier blocks less",
        "ema": "average the weights with this decay, and test those",
    },
    "where": {
        "device": "cpu or cuda",
        "dtype": f"{', '.join(DTYPES)}: of activations; weights are fp32",
        "parallel": "with torchrun. ddp: each process has all weights; fsdp: a part of each, and of the optimizer's state",
        "compile": "with torch.compile",
        "graphs": "with --compile on a GPU: launch kernels as CUDA graphs, for small models, where the GPU would wait for the CPU",
        "channels_last": "images and clips, and the weights of convolutions, with their channels last in memory",
    },
    "what is kept": {
        "save_every": "steps between checkpoints (default: an epoch)",
        "test_every": "epochs between tests; the last epoch is always tested",
        "keep_last": "checkpoints that stay",
        "best": "the weights that tested best, in a file of their own",
        "monitor": "compare with the exact gradient every so many steps",
        "tensorboard": "write its files too",
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    fields = {f.name: f for f in dataclasses.fields(Settings)}
    for title, options in GROUPS.items():
        group = parser.add_argument_group(title)
        for name, text in options.items():
            _add(group, fields.pop(name), text)
    assert not fields, f"options without help: {', '.join(fields)}"
    group = parser.add_argument_group("files")
    group.add_argument(
        "--out", type=Path, default=Path("out/train"), metavar="DIR", help="the folder of this training (default: %(default)s)"
    )
    group.add_argument("--resume", action="store_true", help="go on where --out stands, with its settings; with nothing there, begin")
    group.add_argument("--settings", type=Path, metavar="FILE", help="settings as JSON; options that are given override them")


def _add(group: Any, field: Any, text: str) -> None:
    option, default = "--" + field.name.replace("_", "-"), field.default
    usual = "on" if default is True else " ".join(map(str, default)) if isinstance(default, tuple) else default
    shown = "" if "default" in text or default in (None, False, 0, ()) else f" (default: {usual})"
    about = {"dest": field.name, "default": argparse.SUPPRESS, "help": text + shown}
    if isinstance(default, bool):
        group.add_argument(option, action=argparse.BooleanOptionalAction, **about)
    elif isinstance(default, tuple):
        group.add_argument(option, type=float, nargs=len(default) if field.name == "betas" else "+", metavar="X", **about)
    else:
        kind = int if "int" in str(field.type) else float if "float" in str(field.type) else str
        group.add_argument(option, type=kind, metavar={int: "N", float: "X", str: field.name.upper()}[kind], **about)


def settings_from(args: argparse.Namespace) -> Settings:
    """What was given, over what a file says, or over what the folder was begun with."""
    known = {f.name for f in dataclasses.fields(Settings)}
    given = {k: v for k, v in vars(args).items() if k in known}
    path = args.settings or (args.out / "settings.json" if args.resume and (args.out / "settings.json").is_file() else None)
    if path is not None and not path.is_file():
        raise FileNotFoundError(f"--settings {path}: there is no such file.")
    if path is None:
        last = checkpoint.latest(args.out / "checkpoints") if args.resume else None  # which has them, too
        begun = {} if last is None else Settings.from_json(checkpoint.load_state(last).get("settings"), str(last)).to_json()
        return Settings.from_json({**begun, **given})
    try:
        Settings.load(path)  # what is wrong in the file is told as of the file
    except ValueError as e:
        if args.settings is None and checkpoint.latest(args.out / "checkpoints") is not None:
            raise ValueError(f"{e} Remove that file: the checkpoints have the settings, too.") from e
        raise
    return Settings.from_json({**read_json(path), **given}, str(path))


def main(args: argparse.Namespace) -> None:
    from .loop import train

    try:
        settings = settings_from(args)
    except ValueError as e:
        raise Shared(str(e)) from e
    train(settings, args.out, resume=args.resume)
