"""Time of every kernel on one GPU, against a plain copy of the tensor it works on.

    python benchmarks/kernels.py                     a 50176 x 3072 tensor in bf16: the hidden layer of ViT-B's MLP, 256 images
    python benchmarks/kernels.py --out rows.jsonl    rows go there instead of benchmarks/results/kernels.jsonl

First every fused kernel is compared with its reference, bit by bit, on the GPU; then each is timed: the median of CUDA events over 30
calls after 5. What fails is a row that says so, and the last line; the others are timed anyway. Rows marked * are what halfback runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from halfback import codes, keep
from halfback.kernels import GROUP, fused, reference

SHAPE = (50176, 3072)
CALLS, WARMUP = 30, 5
WRITERS = ("rounds", "scatter", "gather")
RESULTS = Path(__file__).parent / "results" / "kernels.jsonl"

Row = tuple[str, Callable[[], object]]


def equal(a, b) -> bool:
    if isinstance(a, tuple):
        return all(equal(u, v) for u, v in zip(a, b, strict=True))
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.5), b.nan_to_num(0.5))


def variant(output: str, per_program: int = 4, num_warps: int = 1) -> dict:
    return {"output": output, "per_program": per_program, "num_warps": num_warps}


# Are they right?


def samples(dtype: torch.dtype) -> Iterator[Tensor]:
    """Many blocks and a rest, less than a block; ties, zeros, NaN."""
    torch.manual_seed(0)
    for n in (1000, 1_048_579):
        x = torch.randn(n, device="cuda")
        yield F.gelu(x * 2).to(dtype)
        yield (x * 2).round().to(dtype)
        yield (x - 1.5).relu().to(dtype)
        x[::97] = float("nan")
        yield x.to(dtype)


# (block, keep, ways to write): each is compiled, so few of them
CHECKED = [(1000, 0.1, ()), (1024, 0.1, WRITERS), (1024, 0.5, ("scatter",)), (2048, 0.1, ("rounds",)), (4096, 0.1, ("rounds", "scatter"))]


def selections(x: Tensor) -> Iterator[tuple[str, Callable, Callable]]:
    for block, ratio, writers in CHECKED:
        expected = reference.select(x, ratio, block)
        for way in ("plain", *(variant(w) for w in writers if x.dtype.itemsize == 2)):
            yield f"select {block} {way}", lambda b=block, r=ratio, w=way: fused.select(x, r, b, w), lambda e=expected: e
        yield (
            f"restore {block}",
            lambda b=block, r=ratio, e=expected: fused.restore(*e, x.numel(), r, b),
            lambda b=block, r=ratio, e=expected: reference.restore(*e, x.numel(), r, b),
        )


def elementwise(x: Tensor) -> Iterator[tuple[str, Callable, Callable]]:
    n, bits = x.numel(), reference.signs(x)
    calls = [("signs", (x,)), ("pack_bits", (x > 0,)), ("unpack_bits", (bits, n))]
    for width in (4, 8):
        edges, table = codes.table("gelu", width, "cuda")
        calls += [("quantise", (x, width, GROUP, None)), ("quantise", (x, width, GROUP, 3)), ("encode", (x, edges))]
        calls += [("dequantise", (*reference.quantise(x, width), n, width, GROUP, x.dtype))]
        calls += [("scale_by_code", (x, reference.encode(x, edges), table))]
    for name, args in calls:
        yield name, lambda f=name, a=args: getattr(fused, f)(*a), lambda f=name, a=args: getattr(reference, f)(*a)


def wrong() -> list[str]:
    """Every kernel that differs from its reference, or fails, with the first case."""
    found: dict[str, str] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for at, x in enumerate(samples(dtype)):
            for name, ours, defined in (*selections(x), *elementwise(x)):
                if name in found:
                    continue
                try:
                    if not equal(ours(), defined()):
                        found[name] = f"{name}: differs from the reference, {dtype}, n = {x.numel()}, sample {at}"
                except Exception as e:  # whatever it is, the other kernels are still worth measuring
                    found[name] = f"{name}: {type(e).__name__}: {str(e)[:300]}"
    return list(found.values())


# How fast?


def selecting(x: Tensor) -> Iterator[Row]:
    yield "select, keep 0.1 *", lambda: fused.select(x, 0.1, keep.BLOCK)
    yield "select, keep 0.5 *", lambda: fused.select(x, 0.5, keep.BLOCK)
    for way, per in (("rounds", 1), ("rounds", 4), ("rounds", 16), ("scatter", 4), ("gather", 4)):
        yield f"select 1024, {way}, {per} a program", lambda w=way, p=per: fused.select(x, 0.1, 1024, variant(w, p))
    for block, way, warps in ((2048, "rounds", 1), (2048, "scatter", 1), (4096, "rounds", 1), (4096, "rounds", 4), (4096, "scatter", 4)):
        yield f"select {block}, {way}, {warps} warps", lambda b=block, w=way, n=warps: fused.select(x, 0.1, b, variant(w, 4, n))
    yield "select 1024, scatter, keep 0.5", lambda: fused.select(x, 0.5, 1024, variant("scatter"))
    yield "select 1024, rounds, keep 0.5", lambda: fused.select(x, 0.5, 1024, variant("rounds"))
    yield "select 1024, plain bisection", lambda: fused.select(x, 0.1, 1024, "plain")


def restoring(x: Tensor) -> Iterator[Row]:
    for ratio in (0.1, 0.5):
        held = fused.select(x, ratio, keep.BLOCK)
        yield f"restore, keep {ratio} *", lambda r=ratio, h=held: fused.restore(*h, x.numel(), r, keep.BLOCK)
    for block, warps in ((1024, 2), (1024, 4), (2048, 1), (2048, 2), (4096, 1), (4096, 4)):
        held = fused.select(x, 0.1, block)
        yield f"restore {block}, {warps} warps", lambda b=block, w=warps, h=held: fused.restore(*h, x.numel(), 0.1, b, w)


def others(x: Tensor) -> Iterator[Row]:
    yield "signs *", lambda: fused.signs(x)
    for width in (4, 8):
        held = fused.quantise(x, width)
        yield f"quantise {width} bits *", lambda w=width: fused.quantise(x, w)
        yield f"quantise {width} bits, noise *", lambda w=width: fused.quantise(x, w, GROUP, 1)
        yield f"dequantise {width} bits *", lambda w=width, h=held: fused.dequantise(*h, x.numel(), w, GROUP, x.dtype)
        edges, table = codes.table("gelu", width, "cuda")
        code = fused.encode(x, edges)
        yield f"encode {width} bits *", lambda e=edges: fused.encode(x, e)
        yield f"scale_by_code {width} bits *", lambda c=code, t=table: fused.scale_by_code(x, c, t)


def plain(x: Tensor) -> Iterator[Row]:
    yield "copy", lambda: x.clone()
    yield "flat top-k, keep 0.1", lambda: x.abs().topk(keep.count(0.1, x.numel()), sorted=False)
    yield "gelu", lambda: F.gelu(x)


def milliseconds(call: Callable[[], object]) -> float:
    for _ in range(WARMUP):
        call()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(CALLS)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def rows(shape: tuple[int, int]) -> Iterator[dict]:
    """GELU's outputs, and once more normal numbers for what depends on data."""
    x = F.gelu(torch.randn(shape, device="cuda", dtype=torch.bfloat16)).view(-1)
    copy = milliseconds(lambda: x.clone())
    for group in (plain, selecting, restoring, others):
        for label, call in group(x):
            try:
                ms = milliseconds(call)
                yield {"kernel": label, "ms": round(ms, 4), "copies": round(ms / copy, 2)}
            except Exception as e:
                yield {"kernel": label, "error": f"{type(e).__name__}: {str(e)[:200]}"}
    x.normal_()
    label, call = next(selecting(x))
    ms = milliseconds(call)
    yield {"kernel": f"{label} normal numbers", "ms": round(ms, 4), "copies": round(ms / copy, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rows", type=int, default=SHAPE[0], help="rows of the tensor, for a smaller GPU")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/kernels.py: no CUDA device is visible. The kernels run on one; on a CPU the reference does.", file=sys.stderr)
        return 1
    failures = wrong()
    print("fused equals reference" if not failures else "\n".join(failures), flush=True)
    about = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": os.environ.get("HALFBACK_COMMIT", ""),
        "shape": [asked.rows, SHAPE[1]],
        "dtype": "bfloat16",
        "block": keep.BLOCK,
        "wrong": failures,
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    with asked.out.open("a") as file:
        for row in rows((asked.rows, SHAPE[1])):
            print(f"{row['kernel']:40}" + (f"{row['ms']:9.3f} ms {row['copies']:6.2f}" if "ms" in row else row["error"]), flush=True)
            file.write(json.dumps({**about, **row}) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
