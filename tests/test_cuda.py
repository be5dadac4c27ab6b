"""The same gradients on a GPU as on the CPU. Skipped where there is none; also runs as a script: python tests/test_cuda.py"""

from __future__ import annotations

import copy

import torch
import zoo

import halfback as hb

MODES = ("query", "qkv", "heads")
NAMES = ("vit", "bert", "llama", "gpt2", "convnext", "tv_vit")


def to(batch, device):
    return {k: v.to(device) for k, v in batch.items()} if isinstance(batch, dict) else tuple(x.to(device) for x in batch)


def difference(name: str, mode: str, methods=()) -> float:
    """The largest difference of a gradient between CPU and GPU, relative to the largest gradient, in fp32."""
    model, batch = zoo.make(name, depths=(1, 1, 3, 1)) if name in zoo.CONVNETS else zoo.make(name, layers=3)
    hb.apply_(model, hb.SBP(0.5, layers="paper" if name in zoo.CONVNETS else "all", attention=mode), *methods)
    other = copy.deepcopy(model).cuda()
    zoo.loss(model, batch).backward()
    zoo.loss(other, to(batch, "cuda")).backward()
    pairs = [(p.grad, q.grad.cpu()) for p, q in zip(model.parameters(), other.parameters(), strict=True) if p.grad is not None]
    scale = max(p.abs().max().item() for p, _ in pairs)
    return max((p - q).abs().max().item() for p, q in pairs) / scale


def autocast(name: str, mode: str) -> float:
    """The largest difference of an output to plain's under bf16 autocast."""
    model, batch = zoo.make(name, layers=3)
    model, batch = model.cuda(), to(batch, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        plain = zoo.call(model, batch)
        hb.apply_(model, hb.SBP(0.5, layers="all", attention=mode))
        out = zoo.call(model, batch)
        zoo.loss(model, batch).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    return ((out - plain).abs().max() / plain.abs().max()).item()


def check() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for name in NAMES:
        for mode in MODES:
            found = difference(name, mode)
            again = difference(name, mode, (hb.Recompute(),))
            print(f"{name:9} {mode:6} gradient {found:.1e}, recomputed {again:.1e}", flush=True)
            assert max(found, again) < 1e-3
    for name in ("vit", "llama", "tv_vit"):
        for mode in MODES:
            found = autocast(name, mode)
            print(f"{name:9} {mode:6} autocast forward {found:.1e}", flush=True)
            assert found < 0.05


def test_gradients_on_a_gpu_are_the_cpus():
    import pytest

    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    check()


if __name__ == "__main__":
    check()
