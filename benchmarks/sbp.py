"""Time and peak memory of SBP against what one would use instead, on one GPU, in one run.

    python benchmarks/sbp.py                 ViT-B/16 (batch 256) and ConvNeXt-T (batch 128), 224 px, weights in bf16
    python benchmarks/sbp.py --model vit     one of them

How it is measured: harness.py. Rows are appended to benchmarks/results/sbp.jsonl.
"""

from __future__ import annotations

import torch
from harness import Benchmark, Built, main, nothing

import halfback as hb

BATCH = {"vit": 256, "convnext": 128}
NAMES = {"vit": "ViT-B/16", "convnext": "ConvNeXt-T"}
LAST8 = "layers='last 2/3'"

# name -> (compiled, what is applied)
ROWS = {
    "vit": {
        "plain": (True, "plain"),
        "plain, eager": (False, "plain"),
        "checkpointing": (True, "checkpoint"),
        "accumulation, 2 micro-batches": (True, "accumulate"),
        "compile's budget 0.5": (True, "budget"),
        "Algorithm 1, last 8": (True, "algorithm1"),
        "Algorithm 1, last 8, eager": (False, "algorithm1"),
        "sbp query, last 8": (True, f"sbp({LAST8})"),
        "sbp qkv, last 8": (True, f"sbp({LAST8}, attention='qkv')"),
        "skiptokens, last 8": (True, f"skiptokens({LAST8})"),
        "sbp query, last 8, + recompute": (True, f"sbp({LAST8})+recompute"),
        "sbp qkv, all 12, + recompute": (True, "sbp(layers='all', attention='qkv')+recompute"),
        "sbp query, last 8, eager": (False, f"sbp({LAST8})"),
    },
    "convnext": {
        "plain": (True, "plain"),
        "plain, eager": (False, "plain"),
        "checkpointing": (True, "checkpoint"),
        "accumulation, 2 micro-batches": (True, "accumulate"),
        "compile's budget 0.5": (True, "budget"),
        "sbp, paper's layers": (True, "sbp(layers='paper')"),
        "sbp, all blocks of three stages": (True, "sbp(layers=('features.1.*', 'features.3.*', 'features.5.*'))"),
        "sbp, paper's layers, eager": (False, "sbp(layers='paper')"),
    },
}


def build(name: str, method: str, device: str) -> Built:
    """torchvision's own models, unmodified."""
    from torchvision.models import convnext_tiny, vit_b_16

    torch.manual_seed(0)
    model = vit_b_16() if name == "vit" else convnext_tiny(stochastic_depth_prob=0.0)
    model = model.to(device, torch.bfloat16).train()
    before = nothing
    if method == "checkpoint":
        hb.apply_(model, hb.Recompute())  # alone it is torch's checkpoint around every block
    elif method == "algorithm1":
        from algorithm1 import Algorithm1, Masks

        masks, drawn = Masks(14, device), {}

        def before() -> None:
            drawn["keep"], drawn["drop"] = masks.draw()

        layers = model.encoder.layers
        for i in range(4, 12):
            layers[i] = Algorithm1(layers[i], drawn)
    elif method == "budget":
        torch._functorch.config.activation_memory_budget = 0.5
    elif method not in ("plain", "accumulate"):
        hb.apply_(model, *hb.parse(method))
    return Built(model, before)


def check() -> None:
    """Attention of kept positions on this GPU's kernels against its definition, before anything is timed."""
    from halfback.attention import kept_attention
    from halfback.positions import Positions

    for dtype, kernel, allowed in ((torch.bfloat16, "flash", 3e-2), (torch.float32, "efficient", 5e-3)):
        for causal in (False, True):
            torch.manual_seed(0)
            n = 197
            at = Positions.of([0, *range(1, n, 2)], (n,))
            index = at.index.cuda()
            q, k, v = (torch.randn(4, 6, n, 64, device="cuda", dtype=dtype) for _ in range(3))
            parts = [x.index_select(2, i).requires_grad_() for x in (q, k, v) for i in (index[0, : at.k], index[0, at.k :])]
            order = index[1] if causal else torch.arange(n, device="cuda")
            joined = [torch.cat((parts[i], parts[i + 1]), 2).index_select(2, order).detach() for i in (0, 2, 4)]
            out1, _, _ = kept_attention(parts[0], parts[2], parts[4], *joined, None, index, kernel, causal, None)
            weight = torch.randn(out1.shape, device="cuda", dtype=torch.float64)
            (out1 * weight).sum().backward()
            exact = [p.detach().double().requires_grad_() for p in parts]
            whole = [torch.cat(exact[i : i + 2], 2).index_select(2, index[1]) for i in (0, 2, 4)]
            m = whole[0] @ whole[1].mT / 8.0
            if causal:
                m = m.masked_fill(~torch.ones(n, n, dtype=torch.bool, device="cuda").tril(), float("-inf"))
            s = m.softmax(-1)
            a = s @ whole[2]
            dA = torch.zeros_like(a).index_copy(2, index[0, : at.k], weight)
            dM = s * (dA @ whole[2].mT - (dA * a).sum(-1, keepdim=True))
            keep = index[0, : at.k]
            dM, s = (x.index_select(2, keep).index_select(3, keep) for x in (dM, s))
            want = (dM @ exact[2] / 8.0, dM.mT @ exact[0] / 8.0, s.mT @ weight)
            got = (parts[0].grad, parts[2].grad, parts[4].grad)
            worst = max(((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True))
            forward = (out1.double() - a.index_select(2, keep)).abs().max().item()
            print(f"check {kernel} {dtype} causal={causal}: gradient {worst:.1e}, forward {forward:.1e}", flush=True)
            assert worst < allowed and parts[1].grad is None and parts[3].grad is None


if __name__ == "__main__":
    main(Benchmark(__file__, __doc__, NAMES, BATCH, ROWS, build, check=check))
