"""Where the time of a compiled step goes: its kernels by kind, beside plain training's.

    python benchmarks/where.py --model smollm2 "lean+chunkedloss" "dropit(activation_bits=8)+chunkedloss"

Of each method the GPU's milliseconds a step, by torch's profiler; what is between kernels is not in it (`halfback bench` times whole steps,
and says what the CPU needs). The longest kernels of each method follow, or with --kernels none.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from halfback.bench.rows import rows_of
from halfback.bench.work import Place, Step, Turn

KINDS = {  # the first that fits
    "attention": r"flash|fmha|attention|cudnn.*(sdpa|mha)",
    "convolutions": r"conv|wgrad|dgrad|implicit",
    "products": r"gemm|nvjet|cutlass|xmma|cublas|aten::(mm|addmm|bmm)",
    "ours": r"^_(cross_entropy|gate|quantise|dequantise|select|restore|encode|scale|pack|unpack|normalise|rows)",
    "norms and sums": r"triton_(red|per)|softmax|norm|reduce",
    "elementwise": r"triton_poi|elementwise|vectorized",
    "copies": r"copy|memcpy|memset|fill",
}
STEPS = 5


def kernels(step: Step, device: str) -> dict[str, float]:
    """Milliseconds a step of each kernel."""
    step.warm_up()
    for _ in range(3):
        step()
    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        for _ in range(STEPS):
            step.model.zero_grad(set_to_none=True)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", help="as for `halfback bench --method`; plain comes first anyway")
    parser.add_argument("--model", required=True, help="as for `halfback bench --model`")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--kernels", type=int, default=12, metavar="N", help="of each method, the N longest (default: 12)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a size for tests")
    args = parser.parse_args()
    place = Place(args.device, args.tiny, args.batch)
    spec = place.spec(args.model)
    plain = next(r for r in rows_of(spec, "all") if r.is_plain)
    found: dict[str, Any] = {}
    longest: list[str] = []
    for text in dict.fromkeys(("plain", *args.methods)):
        torch._dynamo.reset()
        times = kernels(Step(spec, dataclasses.replace(plain, method=text, text=text), place, Turn(None)), args.device)
        found[text] = by_kind(times)
        top = sorted(times.items(), key=lambda item: -item[1])[: args.kernels]
        longest += [f"\n{text}", *(f"  {ms:8.3f} ms  {name[:150]}" for name, ms in top)]
        print(f"{text}: {sum(times.values()):.2f} ms", flush=True)
    if args.kernels:
        print("\n".join(longest))
    print("\n" + table(found))


if __name__ == "__main__":
    main()
