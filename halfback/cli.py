"""The command line. Bad input gives one line and exit code 2; a traceback is always a bug of ours."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import __version__
from .methods import METHODS as KNOWN
from .train.settings import Shared, Stopped

ABOUT = """\
Train PyTorch models with a fraction of the backward pass.

profile, plan and fit count on tensors without contents: no GPU, no weights and next to no memory are needed, whatever the model.
"""
EXAMPLES = """\
examples:
  halfback profile torchvision:vit_b_16 --batch 256                       who holds the memory
  halfback plan hf:gpt2 --budget 16GiB --batch 16                         what to do to fit a budget
  halfback fit torchvision:convnext_tiny --gpu 16GiB                      the largest batch, with each method
  halfback audit small-vit --data digits --method "sbp(keep=0.5)"         how far a gradient is from the exact one
  halfback compare                                                        a small ViT on scanned digits, eight ways, about four minutes
  halfback train --data cifar100 --model resnet18 --method lean           train, stop, resume
  halfback reproduce --list                                               the papers' experiments, and what came out
  halfback bench                                                          time and memory against every peer, on your GPU
"""
MODELS = """\
models:
  hf:gpt2, hf:bert, hf:llama, hf:vit     a model type of transformers, in its default size
  hf:FOLDER, hf:FILE.json                a configuration of transformers; hf:ORG/NAME takes one from the hub. Weights are not needed
  timm:NAME, torchvision:NAME            an image classifier
  path/to/file.py:factory                a function of no arguments that returns your model, or (model, batch), or (model, make_batch)
                                         with make_batch(n) for n samples. A batch is a tensor, (inputs, targets), a dict of arguments,
                                         or a function that runs the model and returns the loss. A model alone gets images of --size,
                                         or with --seq token ids
  small-vit                              the small ViT of halfback compare
  resnet18, vit-s4, vit-s4-mean, convnext      those of halfback train, for images of 32 pixels

"""
PROFILE = """\
Who holds the memory of one training step, module by module; and with --method, what changes.

held    bytes alive for the backward pass when the forward ends, each storage once: what saves memory when it falls
peak    the most bytes alive at once in forward and backward, above weights, gradients, optimizer state and batch
all     the peak and all of that together. CUDA itself comes on top

A module's line has what it saved first; 'the largest' names its largest tensor and the function that it is saved for.
"""
PROFILE_EXAMPLES = """\
examples:
  halfback profile torchvision:vit_b_16 --batch 256
  halfback profile hf:llama --batch 4 --seq 2048 --method "recompute"
  halfback profile timm:convnext_base --size 384 --method "sbp(keep=0.5)+lean" --html convnext.html
  halfback profile mymodel.py:make --dtype fp32 --json - | python -m json.tool
"""
PLAN = """\
Methods that meet a memory budget at the least cost, exact ones first: Lean, recomputed blocks, and mixtures of them; approximate ones
(SBP, DropIT) only where no exact means fit, or with --prefer fast where they are faster and were seen to cost at most a point.

peak    the most bytes alive in a step with these methods, against what the budget allows
total   what the process would take on the device, CUDA itself included
time    a step's, relative to plain training; estimated for a usual GPU
"""
PLAN_EXAMPLES = """\
examples:
  halfback plan torchvision:vit_b_16 --batch 256 --budget 10GiB       10 GiB on the device, for everything
  halfback plan torchvision:vit_b_16 --batch 256 --budget 0.4         0.4 of the peak of plain training
  halfback plan hf:gpt2 --batch max --budget 24GiB --curve
In Python: hb.apply_(model, budget="10GiB", batch=batch)
"""
FIT = """\
The largest batch, image or text that fits on a GPU, with each method. Every answer was counted: it fits, and the next step does not.

on the device   weights, gradients, optimizer, batch, the peak, CUDA itself, and what lies unused between tensors
time            of a step, at the largest that plain training fits, relative to plain; estimated for a usual GPU
accumulation    a large batch in several small ones before each step of the optimizer: exact, but for BatchNorm and losses over the batch
"""
FIT_EXAMPLES = """\
examples:
  halfback fit torchvision:convnext_tiny --gpu 16GiB
  halfback fit hf:llama --gpu 80GiB --largest seq
  halfback fit torchvision:vit_b_16 --gpu 24GiB --largest size --methods "plain, lean, sbp(keep=0.25)+recompute"
"""
AUDIT = """\
The approximate gradient of a method against the exact one, layer by layer, on a real model in float32.

cosine     1: the same direction. It does not rank methods by the accuracy that they end in
scale      how much of the exact gradient is there; below 1 is a smaller learning rate for that layer
bias²      what no number of steps averages away, relative to the gradient
variance   from mask to mask; noise is the same from batch to batch, which a training lives with anyway
"""
AUDIT_EXAMPLES = """\
examples:
  halfback audit small-vit --data digits --batch 64 --method "sbp(keep=0.5)"
  halfback audit hf:bert --seq 64 --method "dropit(keep=0.1, activation_bits=4)" --all
  halfback audit small-vit --method "sbp(keep=0.5)" --train           also trains both, and says how far apart they end
"""
COMPARE = """\
Trains the same model with each method, from the same weights and on the same batches, and reports accuracy, memory and time.
It begins with what a ViT-B/16 would hold on a GPU with each method, and ends with one table, compare.json and compare.png.

held   bytes alive for the backward pass when the forward ends
peak   the most bytes alive during a step, above weights and gradients
"""
COMPARE_EXAMPLES = """\
examples:
  halfback compare                                     a small ViT on scanned digits, eight ways, about four minutes
  halfback compare --methods "sbp(keep=0.25), sbp(keep=0.5)" --seeds 5
  halfback compare --model timm:vit_tiny_patch16_224 --data images.npz --device cuda
  halfback compare --model mymodel.py:make --epochs 3
"""
REPRODUCE = """\
Runs a recipe of experiments/: the same model and data with each method and each seed. What is done is skipped, what was cut goes on, so a
long one can be run in pieces. Ends with results.json (means, differences paired by seed with their 95 % interval) and a figure.
"""
REPRODUCE_EXAMPLES = """\
examples:
  halfback reproduce --list                                          what there is, what the paper says, what came out
  halfback reproduce dropit_table2 --side-by-side 8 --minutes 10     ten minutes of it, eight trainings at a time
  halfback reproduce vit_main sbp_sweep low_memory --side-by-side 5 --graphs     three of them in one queue, launched as CUDA graphs
  halfback reproduce --page                                          write docs/results.md anew
"""
BENCH = """\
Time and peak memory of a training step with each method and with what one would use instead (checkpointing, gradient accumulation,
torch.compile's memory budget, offloading, ...), on your GPU: forward and backward, weights in bf16. One process a row: several compile side
by side, then they are timed one after the other, plain first and last. A row is written as soon as it is known and is not measured
again for the same GPU, torch and commit, so a long one can be run in pieces. Ends with a table and pictures, and with what we promise
on an H200 beside what was measured.

time, peak       relative to plain training of the same kind, compiled or eager; compiled time: relative to compiled plain
floor            the least time that the operations left of it would take
--set promised   the rows of these promises alone; required: of three models what one would use instead, too; all: ten models, all rows
--part fits      within 16 to 80 GiB the largest batch with each method and its speed; and the largest image or text at batch 1
--part growth    time and peak as depth, tokens, batch and keep grow
"""
BENCH_EXAMPLES = """\
examples:
  halfback bench --set promised --minutes 9                          what we promise, nine minutes of it; the same command goes on
  halfback bench --minutes 9                                         the same against what one would use instead
  halfback bench --set all --model vit-l --model gpt2-medium         all rows of two models
  halfback bench --model timm:vit_small_patch16_224 --batch 128 --method "sbp(keep=0.5)+lean" --method "accumulate 2"
  halfback bench --list                                              the rows, and which are done
  halfback bench --part fits --model llama-1b --rooms 24
"""
METHODS = """\
  sbp(keep=0.5)                  the backward pass through half of the positions; attention='qkv' holds less still
  lean                           exact gradients; what is cheap to compute from what is held anyway is not held
  dropit(keep=0.1)               lean, and weight gradients from sparse inputs where nobody else holds them; activation_bits=4 holds
                                 less after gelu and silu, whose derivative is then approximate
  recompute                      blocks are computed again in the backward pass instead of held
  chunkedloss                    exact; a language model's scores of all words are computed for some tokens at a time
  skiptokens(keep=0.5)           half of the tokens skip the blocks, which changes the forward in training
  sbp(keep=0.5)+lean             both; any of these can be joined, as sbp(keep=0.5)+recompute, but for skiptokens with sbp
"""
ONE_METHOD = f"""\
methods:
  exact                          plain training
{METHODS}
"""
WRITING = f"""\
methods:
  exact                          plain training; added if it is missing. The first method is what ratios are relative to
{METHODS}  Known: {", ".join(KNOWN)}. Separate by commas; quote the list for the shell.

"""


class Parser(argparse.ArgumentParser):
    """A mistake is one line."""

    def error(self, message: str) -> NoReturn:
        raise Shared(f"{message}{'' if message.endswith('?') else '.'} See {self.prog} --help.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What a command does not know it says itself, not the parser of all commands."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            asked = unknown[0].partition("=")[0]
            close = difflib.get_close_matches(asked, known, 1) if asked.strip("-") else []
            self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f". Is {close[0]} meant?" if close else ""))
        return found, unknown


def parser() -> argparse.ArgumentParser:
    from .bench import command as bench
    from .train import options, reproduce

    raw = argparse.RawDescriptionHelpFormatter
    top = Parser("halfback", description=ABOUT, epilog=EXAMPLES, formatter_class=raw)
    top.add_argument("--version", action="version", version=f"halfback {__version__}")
    commands = top.add_subparsers(dest="command", metavar="command", required=True)
    for name, told, about, more, fill in (
        ("profile", "who holds the memory of a training step", PROFILE, MODELS + WRITING + PROFILE_EXAMPLES, _add_profile),
        ("plan", "methods that meet a memory budget", PLAN, MODELS + PLAN_EXAMPLES, _add_plan),
        ("fit", "the largest batch, image or text that fits, with each method", FIT, MODELS + WRITING + FIT_EXAMPLES, _add_fit),
        ("audit", "approximate against exact gradients, layer by layer", AUDIT, MODELS + WRITING + AUDIT_EXAMPLES, _add_audit),
        ("compare", "train with each method and compare", COMPARE, WRITING + COMPARE_EXAMPLES, _add_compare),
        ("train", "train a model, with any method", options.ABOUT, ONE_METHOD + options.EXAMPLES, options.add_arguments),
        ("reproduce", "run the papers' experiments again", REPRODUCE, REPRODUCE_EXAMPLES, reproduce.add_arguments),
        ("bench", "time and memory against every peer, on your GPU", BENCH, MODELS + ONE_METHOD + BENCH_EXAMPLES, bench.add_arguments),
    ):
        fill(commands.add_parser(name, help=told, description=about, epilog=more, formatter_class=raw))
    return top


def _add_common(to: argparse.ArgumentParser, batch: Any = int) -> None:
    add = to.add_argument
    add("model", metavar="MODEL", help="see below")
    add("--batch", type=batch, metavar="N", help="samples in a batch" + (", or max: the most that fits" if batch is str else ""))
    add("--size", type=int, metavar="N", help="pixels a side of an image (default: the model's own)")
    add("--seq", type=int, metavar="N", help="tokens of a text (default: the model's own, up to 1024)")
    add("--json", metavar="FILE", help="write all figures there; - writes them to standard output, and nothing else")
    add("--html", metavar="FILE", help="write a page that can be looked at in a browser")


def _add_counted(to: argparse.ArgumentParser) -> None:
    add = to.add_argument
    add("--dtype", choices=("bf16", "fp32", "fp16"), help="of weights and inputs (default: bf16)")
    add("--optimizer", default="adamw", choices=("adamw", "adam", "sgd", "none"), help="whose state is counted (default: %(default)s)")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="count as a GPU would, which is not needed, or as a CPU (default: cuda)")


def _add_profile(to: argparse.ArgumentParser) -> None:
    _add_common(to)
    to.add_argument("--method", metavar="METHOD", help='also with this, as "sbp(keep=0.5)+lean"; see below')
    to.add_argument("--depth", type=int, metavar="N", help="parts of a module's name that make a line (default: as deep as blocks are)")
    to.add_argument("--all", action="store_true", help="every module, not the first 15")
    _add_counted(to)


def _add_plan(to: argparse.ArgumentParser) -> None:
    _add_common(to, str)
    to.add_argument("--budget", required=True, metavar="SIZE", help="10GiB: in total on the device; 0.4: of the peak of plain training")
    to.add_argument("--prefer", default="exact", choices=("exact", "fast"), help="(default: %(default)s)")
    to.add_argument("--curve", action="store_true", help="also what other budgets would give")
    _add_counted(to)


def _add_fit(to: argparse.ArgumentParser) -> None:
    from .commands import LARGEST, METHODS

    _add_common(to)
    to.add_argument("--gpu", required=True, metavar="SIZE", help="the memory of the GPU, as 16GiB")
    to.add_argument("--largest", default="batch", choices=LARGEST, help="what to make as large as it can be (default: %(default)s)")
    to.add_argument(
        "--methods",
        default=METHODS,
        metavar="LIST",
        help=f"see below (default: {METHODS}; and, for large vocabularies, recompute+chunkedloss)",
    )
    to.add_argument("--step", type=int, metavar="N", help="try multiples of it (default: 1 sample, a patch or 32 pixels, 64 tokens)")
    _add_counted(to)


def _add_audit(to: argparse.ArgumentParser) -> None:
    _add_common(to)
    add = to.add_argument
    add("--method", required=True, metavar="METHOD", help='as "sbp(keep=0.5)"; see below')
    add("--data", metavar="SPEC", help="digits, or file.npz as in compare (default: random inputs)")
    add("--batches", type=int, default=1, metavar="N", help="how many batches (default: %(default)s)")
    add("--masks", type=int, default=8, metavar="N", help="how often the method draws for each batch (default: %(default)s)")
    add("--all", action="store_true", help="every layer, not the worst three")
    add("--seed", type=int, default=0, metavar="N", help="of the weights (default: %(default)s)")
    add("--device", default="cpu", choices=("cpu", "cuda"), help="where it runs (default: %(default)s)")
    add("--train", action="store_true", help="also train with the method and without, on --data or digits, and compare what comes out")
    add("--epochs", type=int, default=8, metavar="N", help="of --train (default: %(default)s)")
    add("--seeds", type=int, default=3, metavar="N", help="of --train (default: %(default)s)")


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
    add("--html", type=Path, metavar="FILE", help="write a page that can be looked at in a browser")


def run(args: argparse.Namespace) -> int:
    from . import commands
    from .compare import Settings, compare
    from .train import options, reproduce

    if args.command == "bench":
        from .bench import command as bench

        return bench.main(args)
    if args.command in ("train", "reproduce"):
        return {"train": options, "reproduce": reproduce}[args.command].main(args) or 0
    if args.command != "compare":
        getattr(commands, args.command)(args)
        return 0
    given = {k: v for k, v in vars(args).items() if k not in ("command", "out", "html")}
    settings = Settings(**given)
    if args.html is not None:
        commands.check_writable(args.html)
    compare(settings, args.out, html=args.html)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return in_a_line(lambda: run(parser().parse_args(argv)))


def in_a_line(do: Callable[[], int]) -> int:
    """Its exit code; a mistake is told in a line."""
    try:
        return do()
    except (ValueError, OSError, ImportError, MemoryError) as e:
        tell(str(e), shared=isinstance(e, Shared))
        return 2
    except KeyboardInterrupt:
        tell("stopped.", shared=True)
        return 130
    except Stopped as e:
        tell(str(e), shared=True)
        return e.code


def tell(text: str, shared: bool) -> None:
    """Of several processes, what all of them have to say the first one says."""
    rank = int(os.environ.get("RANK", 0))
    if not rank or not shared:
        print(f"halfback{f', process {rank}' if rank else ''}: {text}", file=sys.stderr)
