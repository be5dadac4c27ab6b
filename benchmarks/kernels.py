"""Time of every kernel on one GPU, against a plain copy of the tensor it works on.

    python benchmarks/kernels.py                     a 50176 x 3072 tensor in bf16: the hidden layer of ViT-B's MLP, 256 images
    python benchmarks/kernels.py --out rows.jsonl    rows go there instead of benchmarks/results/kernels.jsonl
    python benchmarks/kernels.py --only gate --only loss    those rows alone

First every fused kernel is compared with its reference, bit by bit, on the GPU; then each is timed: the median of CUDA events over 30
calls after 5. What fails is a row that says so, and the last line; the others are timed anyway. Rows marked * are what halfback runs.
Rows of losses are of a language model's last layer, forward and backward, with so many rows in a part (ChunkedLoss), and whole.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from halfback import codes, heads, keep
from halfback.kernels import GROUP, fused, reference

SHAPE = (50176, 3072)
CALLS, WARMUP = 30, 5
WRITERS = ("rounds", "scatter", "gather")
TOKENS, WIDTH, VOCABULARY = 32768, 576, 49152  # of SmolLM2-135M, 64 texts of 512 tokens
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


def gates(x: Tensor) -> Iterator[tuple[str, Callable, Callable]]:
    """Not bit by bit: exponentials differ in the last place, and the reference rounds what it restores."""
    for width in (4, 8):
        held = reference.gate(x, x.flip(0), "silu", width)[1:]
        calls = [("gate", (x, x.flip(0), "silu", width)), ("gate_again", (*held, x.numel(), "silu", width, x.dtype))]
        for name, args in (*calls, ("gate_backward", (x, *held, "silu", width))):
            yield f"{name} {width} bits", lambda f=name, a=args: getattr(fused, f)(*a), lambda f=name, a=args: getattr(reference, f)(*a)


def close(a, b) -> bool:
    if isinstance(a, tuple):
        return all(close(u, v) for u, v in zip(a, b, strict=True))
    if a.dtype == torch.uint8 or a.ndim == 2:  # codes and scales
        return equal(a, b)
    near = 1e-5 if a.dtype == torch.float32 else 3e-2
    return torch.allclose(a.float(), b.float(), rtol=near, atol=near, equal_nan=True)


def wrong() -> list[str]:
    """Every kernel that differs from its reference, or fails, with the first case."""
    found: dict[str, str] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for at, x in enumerate(samples(dtype)):
            cases = [(*case, equal) for case in (*selections(x), *elementwise(x))] + [(*case, close) for case in gates(x)]
            for name, ours, defined, same in cases:
                if name in found:
                    continue
                try:
                    if not same(ours(), defined()):
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


def gated(x: Tensor) -> Iterator[Row]:
    u = x.flip(0)
    yield "silu(x) * u, compiled", torch.compile(lambda: F.silu(x) * u)
    for width in (4, 8):
        held = fused.gate(x, u, "silu", width)[1:]
        yield f"gate {width} bits *", lambda w=width: fused.gate(x, u, "silu", w)
        yield f"gate_again {width} bits *", lambda w=width, h=held: fused.gate_again(*h, x.numel(), "silu", w, x.dtype)
        yield f"gate_backward {width} bits *", lambda w=width, h=held: fused.gate_backward(u, *h, "silu", w)


def losses(x: Tensor) -> Iterator[Row]:
    hidden = torch.randn(TOKENS, WIDTH, device="cuda", dtype=x.dtype, requires_grad=True)
    weight = (0.02 * torch.randn(VOCABULARY, WIDTH, device="cuda")).to(x.dtype).requires_grad_()
    target = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")
    whole = torch.compile(lambda: F.cross_entropy(F.linear(hidden, weight).float(), target))
    yield "loss, whole, compiled", lambda: torch.autograd.grad(whole(), (hidden, weight))
    for rows in (1024, heads.rows_of_a_part(VOCABULARY), 2048, 2688, 4096, 5376, 8192):
        star = " *" if rows == heads.rows_of_a_part(VOCABULARY) else ""
        part = functools.partial(heads.cross_entropy, hidden, weight, None, target, rows)
        yield f"loss, {rows} rows a part{star}", lambda part=part: torch.autograd.grad(part(), (hidden, weight))


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


def rows(shape: tuple[int, int], only: Sequence[str]) -> Iterator[dict]:
    """GELU's outputs, and once more normal numbers for what depends on data."""

    def wanted(label: str) -> bool:
        return not only or any(word in label for word in only)

    x = F.gelu(torch.randn(shape, device="cuda", dtype=torch.bfloat16)).view(-1)
    copy = milliseconds(lambda: x.clone())
    for group in (plain, selecting, restoring, others, gated, losses):
        for label, call in group(x):
            if not wanted(label):
                continue
            try:
                ms = milliseconds(call)
                yield {"kernel": label, "ms": round(ms, 4), "copies": round(ms / copy, 2)}
            except Exception as e:
                yield {"kernel": label, "error": f"{type(e).__name__}: {str(e)[:200]}"}
    x.normal_()
    label, call = next(selecting(x))
    if not wanted(label):
        return
    ms = milliseconds(call)
    yield {"kernel": f"{label} normal numbers", "ms": round(ms, 4), "copies": round(ms / copy, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rows", type=int, default=SHAPE[0], help="rows of the tensor, for a smaller GPU")
    parser.add_argument("--only", action="append", default=[], help="rows whose name has this in it; may be given again")
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
        for row in rows((asked.rows, SHAPE[1]), asked.only):
            print(f"{row['kernel']:40}" + (f"{row['ms']:9.3f} ms {row['copies']:6.2f}" if "ms" in row else row["error"]), flush=True)
            file.write(json.dumps({**about, **row}) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
