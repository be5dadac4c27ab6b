"""The command line. Bad input gives one line and exit code 2; a traceback is always a bug of ours."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .methods import METHODS as KNOWN

ABOUT = "Train PyTorch models with a fraction of the backward pass."
EXAMPLES = """\
examples:
  halfback compare                                     a small ViT on scanned digits, eight ways, about four minutes
  halfback compare --methods "sbp(keep=0.25), sbp(keep=0.5)" --seeds 5
  halfback compare --model timm:vit_tiny_patch16_224 --data images.npz --device cuda
  halfback compare --model mymodel.py:make --epochs 3
"""
COMPARE = """\
Trains the same model with each method, from the same weights and on the same batches, and reports accuracy, memory and time.
It begins with what a ViT-B/16 would hold on a GPU with each method, and ends with one table, compare.json and compare.png.

held   bytes alive for the backward pass when the forward ends
peak   the most bytes alive during a step, above weights and gradients
"""
WRITING = f"""\
methods:
  exact                          plain training; added if it is missing. The first method is what ratios are relative to
  sbp(keep=0.5)                  the backward pass through half of the positions; attention='qkv' holds less still
  lean                           exact gradients; what is cheap to compute from what is held anyway is not held
  dropit(keep=0.1)               lean, and weight gradients from sparse inputs where nobody else holds them; activation_bits=4 holds
                                 less after gelu and silu, whose derivative is then approximate
  recompute                      blocks are computed again in the backward pass instead of held
  skiptokens(keep=0.5)           half of the tokens skip the blocks, which changes the forward in training
  sbp(keep=0.5)+lean             both; any of these can be joined, as sbp(keep=0.5)+recompute, but for skiptokens with sbp
  Known: {", ".join(KNOWN)}. Separate by commas; quote the list for the shell.

"""


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser("halfback", description=ABOUT, epilog=EXAMPLES, formatter_class=raw)
    top.add_argument("--version", action="version", version=f"halfback {__version__}")
    commands = top.add_subparsers(dest="command", metavar="command", required=True)
    _add_compare(
        commands.add_parser(
            "compare", help="train with each method and compare", description=COMPARE, epilog=WRITING + EXAMPLES, formatter_class=raw
        )
    )
    return top


def _add_compare(compare: argparse.ArgumentParser) -> None:
    from .compare import Settings  # the defaults live there

    d = Settings()
    add = compare.add_argument
    add(
        "--model", default=d.model, metavar="SPEC", help="small-vit, timm:NAME, torchvision:NAME, or file.py:factory (default: %(default)s)"
    )
    add("--data", default=d.data, metavar="SPEC", help="digits, or file.npz with x_train, y_train, x_test, y_test (default: %(default)s)")
    add("--methods", default=d.methods, metavar="LIST", help=f"see below (default: {d.methods})")
    add("--seeds", default=d.seeds, type=int, metavar="N", help="how many trainings a method (default: %(default)s)")
    add("--epochs", default=d.epochs, type=int, metavar="N", help="(default: %(default)s)")
    add("--batch", default=d.batch, type=int, metavar="N", help="images a step (default: %(default)s)")
    add("--lr", default=d.lr, type=float, metavar="X", help="the highest learning rate, of AdamW (default: %(default)s)")
    add("--device", default=d.device, help="cpu or cuda (default: %(default)s)")
    add("--out", default="out/compare", type=Path, metavar="DIR", help="where compare.json and compare.png go (default: %(default)s)")


def main(argv: Sequence[str] | None = None) -> int:
    args = vars(parser().parse_args(argv))
    args.pop("command")
    from .compare import Settings, compare

    try:
        out = args.pop("out")
        compare(Settings(**args), out)
    except (ValueError, OSError) as e:
        print(f"halfback: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("halfback: stopped.", file=sys.stderr)
        return 130
    return 0
