"""Where the time of a compiled step goes: its kernels by kind, beside plain training's.

    python benchmarks/where.py --model smollm2 "lean+chunkedloss" "dropit(activation_bits=8)+chunkedloss"
    python benchmarks/where.py --recipe vit_main "exact-class-token_s0" "sbp-class-token_s0" --data DIR

Of each method, or of each run of a recipe, with its augmentation and optimizer, the GPU's milliseconds a step, by torch's profiler; what is
between kernels is not in it (`halfback bench` times whole steps, and says what the CPU needs). The longest kernels of each follow, or with
--kernels 0 none.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from halfback.bench.rows import rows_of
from halfback.bench.work import Place, Step, Turn
from halfback.train.loop import Training
from halfback.train.pieces import tuned
from halfback.train.recipes import find, load
from halfback.train.sets import batches, order

KINDS = {  # the first that fits
    "attention": r"flash|fmha|attention|cudnn.*(sdpa|mha)",
    "convolutions": r"conv|wgrad|dgrad|implicit",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|aten::(mm|addmm|bmm)",
    "ours": r"^_(cross_entropy|gate|quantise|dequantise|select|restore|encode|scale|pack|unpack|normalise|rows)",
    "norms and sums": r"triton_(red|per)|softmax|norm|reduce",
    "elementwise": r"triton_poi|elementwise|vectorized",
    "copies": r"copy|memcpy|memset|fill",
}
WARMUP, STEPS = 5, 5


def kernels(step: Callable[[], object], device: str) -> dict[str, float]:
    """Milliseconds a step of each kernel."""
    for _ in range(WARMUP):
        step()
    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        for _ in range(STEPS):
            step()
        if cuda:
            torch.cuda.synchronize()
    times: dict[str, float] = defaultdict(float)
    for event in found.key_averages():
        times[event.key] += (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1000 / STEPS
    return {name: ms for name, ms in times.items() if ms > 0}


def by_kind(times: dict[str, float]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for name, ms in times.items():
        found[next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "others")] += ms
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    """A row for each kind, a column for each method, by number."""
    kinds = [k for k in (*KINDS, "others") if any(k in by for by in found.values())]
    rows = [["", *(f"({i})" for i in range(len(found)))]]
    rows += [[kind, *(f"{by.get(kind, 0.0):.2f}" for by in found.values())] for kind in kinds]
    rows.append(["all", *(f"{sum(by.values()):.2f}" for by in found.values())])
    names = [f"({i}) {name}" for i, name in enumerate(found)]
    return "\n".join([*names, "", *(f"{row[0]:16}" + "".join(f"{cell:>10}" for cell in row[1:]) for row in rows)])


def of_methods(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], object]]]:
    """A step of plain training, and of each method."""
    place = Place(args.device, args.tiny, args.batch)
    spec = place.spec(args.model)
    plain = next(r for r in rows_of(spec, "all") if r.is_plain)
    for text in dict.fromkeys(("plain", *args.what)):
        step = Step(spec, dataclasses.replace(plain, method=text, text=text), place, Turn(None))
        step.warm_up()

        def whole(step: Step = step) -> None:
            step.model.zero_grad(set_to_none=True)
            step()

        yield text, whole


def of_runs(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], object]]]:
    """A step of the trainings of a recipe."""
    runs = {r.id: r for r in load(find(args.recipe)).runs()}
    if unknown := set(args.what) - set(runs):
        raise SystemExit(f"where.py: {args.recipe} has no run {', '.join(sorted(unknown))}. Runs: {', '.join(runs)}.")
    for name in args.what:
        settings = dataclasses.replace(runs[name].settings, device=args.device, root=args.data or runs[name].settings.root)
        with tempfile.TemporaryDirectory(prefix="halfback-where-") as folder, tuned():
            training = Training(settings, Path(folder) / name, say=lambda text: None)
            data = training.data.train
            coming = batches(data, order(len(data), settings.seed, 0)[: (WARMUP + STEPS) * settings.batch], settings.batch, epoch=0)
            yield name, lambda training=training, coming=coming: training.train_step(*next(coming))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", help="methods, as for `halfback bench --method`; plain comes first anyway. Or runs of a recipe")
    parser.add_argument("--model", help="as for `halfback bench --model`")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--recipe", help="instead of --model: a folder of experiments/, or a path to a recipe.py")
    parser.add_argument("--data", metavar="DIR", help="of --recipe: where the data lies")
    parser.add_argument("--kernels", type=int, default=12, metavar="N", help="of each, the N longest (default: 12)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a size for tests")
    args = parser.parse_args()
    if (args.model is None) == (args.recipe is None):
        parser.error("give --model or --recipe")
    found: dict[str, dict[str, float]] = {}
    longest: list[str] = []
    for name, step in of_methods(args) if args.model else of_runs(args):
        times = kernels(step, args.device)
        found[name] = by_kind(times)
        top = sorted(times.items(), key=lambda item: -item[1])[: args.kernels]
        longest += [f"\n{name}", *(f"  {ms:8.3f} ms  {kernel[:150]}" for kernel, ms in top)]
        print(f"{name}: {sum(times.values()):.2f} ms", flush=True)
        torch._dynamo.reset()
    if args.kernels:
        print("\n".join(longest))
    print("\n" + table(found))


if __name__ == "__main__":
    main()
