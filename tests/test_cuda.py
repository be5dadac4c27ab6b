"""The same gradients on a GPU as on the CPU. Skipped where there is none; also runs as a script, which may be told what to check:

python tests/test_cuda.py losses compiled
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import zoo
from torch import nn

import halfback as hb
from halfback import attention, heads
from halfback.attention import _chosen, kept_attention, row_attention
from halfback.positions import Positions, draw
from halfback.stores import Channels, Elements, Layout, Rows
from halfback.train import Settings, checkpoint
from halfback.train.loop import train

KERNELS = ("flash", "cudnn")
MODES = ("query", "qkv", "heads")
NAMES = ("vit", "bert", "llama", "gpt2", "convnext", "tv_vit")


def to(batch, device):
    return {k: v.to(device) for k, v in batch.items()} if isinstance(batch, dict) else tuple(x.to(device) for x in batch)


def difference(name: str, mode: str, methods=()) -> float | None:
    """The largest difference of a gradient between CPU and GPU, relative to the largest gradient, in fp32; None where attention fell back
    on the GPU (a head's width that its kernels do not take), and so means something else there."""
    model, batch = zoo.make(name, depths=(1, 1, 3, 1)) if name in zoo.CONVNETS else zoo.make(name, layers=3)
    hb.apply_(model, hb.SBP(0.5, layers="paper" if name in zoo.CONVNETS else "all", attention=mode), *methods)
    other = copy.deepcopy(model).cuda()
    zoo.loss(model, batch).backward()
    zoo.loss(other, to(batch, "cuda")).backward()
    if other._halfback.report.fallbacks:
        return None
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


def check(parts: Sequence[str] = ()) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for name in parts or PARTS:
        PARTS[name]()


def check_attention() -> None:
    print("heads of 64 in bf16, fp32 and fp64:", [_chosen(0, d, 64) for d in (torch.bfloat16, torch.float32, torch.float64)], flush=True)
    check_kept_attention()
    check_row_attention()


def check_sbp() -> None:
    for name in NAMES:
        for mode in MODES:
            found, again = difference(name, mode), difference(name, mode, (hb.Recompute(),))
            if found is None or again is None:
                print(f"{name:9} {mode:6} fell back", flush=True)
                continue
            print(f"{name:9} {mode:6} gradient {found:.1e}, recomputed {again:.1e}", flush=True)
            assert max(found, again) < 1e-3
    for name in ("vit", "llama", "tv_vit"):
        for mode in MODES:
            found = autocast(name, mode)
            print(f"{name:9} {mode:6} autocast forward {found:.1e}", flush=True)
            assert found < 0.05


def check_dropit() -> None:
    for name in (*NAMES, "resnet", "resnet, channels_last"):
        for text, dtype, allowed in (
            ("lean", torch.float32, 1e-5),
            ("lean", torch.bfloat16, 2e-2),
            ("dropit(keep=1)", torch.float32, 1e-5),
        ):
            found, before, after = against_plain(name, text, dtype)
            print(f"{name:21} {text:14} {dtype} gradient {found:.1e}, held {after / before:.2f}", flush=True)
            assert found <= allowed and after < 0.75 * before
        for text in ("dropit(keep=0.2, activation_bits=4)", "dropit(bits=4, activation_bits=4)"):
            found = against_cpu(name, text)
            print(f"{name:21} {text:38} against the CPU {'other layers' if found is None else f'{found:.1e}'}", flush=True)
            assert found is None or found < 1e-3
    for store in (Elements(0.3, "random"), Elements(0.3, "random", None), Channels(0.4, "random"), Rows(0.4, "random")):
        print(store, "drawn as on the CPU", flush=True)
        assert drawn_alike(store)


def check_kept_attention() -> None:
    """Attention of kept positions on this GPU's kernels against its definition."""
    kinds = [(torch.bfloat16, kernel, 3e-2) for kernel in KERNELS] + [(torch.float32, "efficient", 5e-3)]
    for dtype, kernel, allowed in kinds:
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
            print(f"kept attention {kernel} {dtype} causal={causal}: gradient {worst:.1e}, forward {forward:.1e}", flush=True)
            assert worst < allowed and parts[1].grad is None and parts[3].grad is None


def check_row_attention() -> None:
    """Causal attention with the gradient of kept queries, of all keys and values, against its definition; no mask is made."""
    by_hand = Positions.of([0, *range(1, 197, 2)], (197,))
    drawn = [draw(torch.tensor([0, step]), (m,), [1 / s], a)[0] for s in (2, 4) for m, a in ((196, 0), (197, 1)) for step in range(3)]
    kinds = [(torch.bfloat16, kernel, 3e-2) for kernel in KERNELS] + [(torch.float32, "efficient", 5e-3)]
    for (dtype, kernel, allowed), at, by_tokens, fewest in itertools.product(kinds, (by_hand, *drawn), (False, True), (0, NEVER)):
        torch.manual_seed(0)
        heads, groups = 6, 2
        index = at.index.cuda()
        keep = index[0, : at.k]
        sizes = [(4, at.n, h, 64) if by_tokens else (4, h, at.n, 64) for h in (heads, groups, groups)]
        leaves = [torch.randn(size, device="cuda", dtype=dtype, requires_grad=True) for size in sizes]
        q, k, v = (x.transpose(1, 2) if by_tokens else x for x in leaves)
        out1, _, _ = row_attention(q.index_select(2, keep), k, v, q.detach(), index, at.stride, at.always, kernel, None)
        weight = torch.randn(out1.shape, device="cuda", dtype=torch.float64)
        with in_parts_from(fewest):
            found = torch.autograd.grad((out1 * weight).sum(), (q, k, v))
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        whole = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
        wanted = torch.autograd.grad((whole.index_select(2, keep) * weight).sum(), exact)
        worst = max(((g - w).norm() / w.norm()).item() for g, w in zip(found, wanted, strict=True))
        forward = (out1.double() - whole.index_select(2, keep)).abs().max().item()
        print(f"row attention {kernel} {dtype}, stride {at.stride}: gradient {worst:.1e}, forward {forward:.1e}", flush=True)
        assert worst < allowed and forward < 2e-2 and found[0][:, :, index[0, at.k :]].abs().max() == 0
    check_parts_of_long_texts()


NEVER = 2**40


@contextlib.contextmanager
def in_parts_from(keys: int) -> Iterator[None]:
    before, attention.FEWEST_KEYS = attention.FEWEST_KEYS, keys
    try:
        yield
    finally:
        attention.FEWEST_KEYS = before


def check_parts_of_long_texts() -> None:
    """What a backward in parts needs, and from how many keys on it is shorter than one with zeros: attention.FEWEST_KEYS is of that."""
    heads, groups, tokens = 32, 8, 2**14
    for n, kernel, keep in itertools.product((512, 1024, 2048, 4096, tokens), KERNELS, (0.5, 0.25)):
        shapes = [(tokens // n, h, n, 64) for h in (heads, groups, groups)]
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
        at = draw(torch.tensor([0, 0]), (n - 1,), [keep], 1)[0]
        index = at.index.cuda()
        rows = q.detach().index_select(2, index[0, : at.k]).requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out1, _, _ = row_attention(rows, k, v, q.detach(), index, at.stride, at.always, kernel, None)
        weight, found = torch.randn_like(out1), []
        for fewest in (0, NEVER):
            times = []
            with in_parts_from(fewest):
                for _ in range(5):
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    torch.autograd.grad(out1, (rows, k, v), weight, retain_graph=True)
                    torch.cuda.synchronize()
                    times.append(1000 * (time.perf_counter() - began))
            found.append(f"{min(times):.2f} ms")
        used = (torch.cuda.max_memory_allocated() - before) / q.nbytes
        print(
            f"row attention {kernel}, {n} keys, keep {keep}: in parts {found[0]}, zeros {found[1]}; {used:.1f} times the queries",
            flush=True,
        )
        assert used < 16  # a mask of n x n / 2 for each of four heads would be 16 times as much alone


def batch_norms() -> None:
    """Lean computes a batch norm's output again from what cuDNN's or torch's own kernel saved of it, under autocast too."""
    kinds = {"plain": {}, "no weight": {"affine": False}, "no statistics": {"track_running_stats": False}}
    dtypes = {"fp32": 2e-5, "fp64": 1e-12, "autocast bf16": 0.03, "autocast fp16": 0.03, "bf16": 0.03}
    for (kind, options), (dtype, allowed), last, cudnn in itertools.product(kinds.items(), dtypes.items(), (False, True), (True, False)):
        with torch.backends.cudnn.flags(enabled=cudnn, deterministic=True, allow_tf32=False):
            found, held = lean_after_batch_norms(options, dtype, last)
        print(f"batch norm, {kind}, {dtype}, {last=}, {cudnn=}: gradient {found:.1e}, held {held:.2f}", flush=True)
        assert found <= allowed and held < 0.8


def lean_after_batch_norms(options: dict, dtype: str, last: bool) -> tuple[float, float]:
    """The largest difference of a gradient, relative to the largest gradient, and the share of what is held."""
    torch.manual_seed(0)
    layers = [m for _ in range(3) for m in (nn.LazyConv2d(32, 3, padding=1), nn.BatchNorm2d(32, **options), nn.ReLU(inplace=True))]
    plain, x = nn.Sequential(*layers, nn.LazyConv2d(4, 1)).cuda(), torch.randn(16, 3, 16, 16, device="cuda")
    plain(x)
    own = {"fp64": torch.float64, "bf16": torch.bfloat16}.get(dtype, torch.float32)
    layout = torch.channels_last if last else torch.contiguous_format
    plain, x = plain.to(dtype=own, memory_format=layout), x.to(own).contiguous(memory_format=layout)
    lean, grads, held = copy.deepcopy(plain), [], []
    hb.apply_(lean, hb.Lean())

    def loss(m: nn.Module) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16 if "fp16" in dtype else torch.bfloat16, enabled="autocast" in dtype):
            return m(x).double().square().mean()

    for m in (plain, lean):
        held.append(hb.held(m, lambda m=m: loss(m)))
        m.zero_grad()
        loss(m).backward()
        grads.append([p.grad.double() for p in m.parameters()])
    scale = max(g.abs().max() for g in grads[0])
    return max(((a - b).abs().max() / scale).item() for a, b in zip(*grads, strict=True)), held[1] / held[0]


def check_compiled() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own modules
        for name, text in COMPILED:
            found = as_compiled(name, text)
            print(f"{name:21} {text:38} compiled {found:.1e}", flush=True)
            assert found < 1e-3
        checkpointing, beside = compiled_peaks()
    print(f"peaks, compiled: checkpointing {checkpointing:.3f}, SBP with it {beside:.3f} of plain's", flush=True)
    assert beside < checkpointing


COMPILED = (
    ("tv_vit", "sbp(keep=0.5)+recompute"),
    ("tv_vit", "dropit(keep=0.2, activation_bits=4)"),
    ("llama", "dropit(bits=4, activation_bits=4)"),
    ("llama", "dropit(activation_bits=8)"),
    ("resnet", "dropit(bits=8)"),
    ("resnet, channels_last", "dropit(bits=8)"),
    ("resnet, channels_last", "dropit(keep=0.2, exact_first=False)"),
)


GRAPHED = (
    ("tv_vit", "sbp(keep=0.5)"),
    ("llama", "sbp(keep=0.5)+dropit(activation_bits=4)"),
    ("resnet, channels_last", "dropit(keep=0.2, exact_first=False)"),
)


def check_graphs() -> None:
    """CUDA graphs repeat what they recorded: kept positions have to be drawn anew by each step all the same."""
    for name, text in GRAPHED:
        found = as_graphed(name, text)
        print(f"{name:21} {text:38} by CUDA graphs {found:.1e}", flush=True)
        assert found < 1e-5


def as_graphed(name: str, text: str, steps: int = 6) -> float:
    """The largest difference of gradients in several steps, between a compiled model and one that is launched by CUDA graphs."""
    model, batch = made(name)
    model, batch = model.cuda(), to(batch, "cuda")
    hb.apply_(model, *hb.parse(text))
    plain, graphed = model, copy.deepcopy(model)
    runs = (torch.compile(plain), torch.compile(graphed, mode="reduce-overhead"))
    apart = []
    for _ in range(steps):
        for m, run in zip((plain, graphed), runs, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            m.zero_grad(set_to_none=True)
            zoo.loss(run, batch).backward()
        apart.append(worst(graphed, plain))
    return max(apart)


TRAINED = (
    {"method": "sbp(keep=0.5)", "drop_path": 0.2, "randaugment": 2, "mixup": 0.8, "cutmix": 1.0},
    {"method": "dropit(keep=0.2, exact_first=False)", "model": "resnet18", "optimizer": "sgd", "channels_last": True, "accumulate": 2},
)


def check_trainings() -> None:
    """A training by CUDA graphs comes to the weights that it comes to without: what it draws is drawn anew in each step."""
    for changed in TRAINED:
        with tempfile.TemporaryDirectory(prefix="halfback-cuda-") as folder:
            one, two = (trained(Path(folder) / str(graphs), graphs=graphs, **changed) for graphs in (False, True))
        found = {}
        for kind in {kind_of(k) for k in one}:  # each by its own scale
            keys = [k for k in one if kind_of(k) == kind]
            scale = max(1e-12, *(float(one[k].abs().max()) for k in keys))
            found[kind] = max(float((two[k] - one[k]).abs().max()) for k in keys) / scale
        print(f"{changed['method']:38} trained by CUDA graphs", *(f"{k} {x:.1e}" for k, x in sorted(found.items())), flush=True)
        assert max(found.values()) < 1e-2


def kind_of(key: str) -> str:
    """Of a tensor of a checkpoint: weights, or what of the optimizer's."""
    return key.split("/")[0] + (" " + key.split("/")[-1]) * key.startswith("optimizer/")


def trained(folder: Path, **changed) -> dict[str, torch.Tensor]:
    """Weights after some steps on noise."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    parts = {"train": 320, "test": 32}
    pictures = {f"x_{k}": draw.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8) for k, n in parts.items()}
    np.savez(folder / "noise.npz", **pictures, **{f"y_{k}": draw.integers(0, 10, n) for k, n in parts.items()})
    given = {"model": "vit-s4", "data": str(folder / "noise.npz"), "batch": 32, "epochs": 2, "device": "cuda", "compile": True, "lr": 1e-4}
    train(Settings(**{**given, **changed}), folder / "out", say=lambda text: None)
    tensors = checkpoint.load(checkpoint.latest(folder / "out" / "checkpoints"))[0]
    return {k: t.double() for k, t in tensors.items() if t.is_floating_point()}


def as_compiled(name: str, text: str) -> float:
    """A compiled graph's gradients against the same graph run as it is, node by node."""
    model, batch = made(name)
    model, batch = model.cuda(), to(batch, "cuda")
    hb.apply_(model, *hb.parse(text))
    models = (model, copy.deepcopy(model))
    for m, backend in zip(models, ("inductor", "aot_eager"), strict=True):
        torch._dynamo.reset()
        zoo.loss(torch.compile(m, backend=backend), batch).backward()
    return worst(*models)


def compiled_peaks() -> list[float]:
    """The peak of a compiled step relative to plain's: of checkpointing, and of SBP beside it."""
    from torchvision.models import VisionTransformer

    peaks = []
    for text in ("exact", "recompute", "sbp(keep=0.5)+recompute"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = VisionTransformer(224, 16, 12, 4, 256, 1024).to("cuda", torch.bfloat16)
        if text != "exact":
            hb.apply_(model, *hb.parse(text))
        run = torch.compile(model)
        x = torch.randn(64, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run(x).float().logsumexp(-1).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    return [p / peaks[0] for p in peaks[1:]]


def drawn_alike(store) -> bool:
    """Whether what a random store holds, and what comes back, are the CPU's bit for bit."""
    x = torch.randn(5, 24, 13, 17).to(memory_format=torch.channels_last)
    held, there = store.compress(x, 1, seed=3), store.compress(x.cuda(), 1, seed=3)
    pairs = [*zip(held, there, strict=True), (store.restore(held, Layout.of(x)), store.restore(there, Layout.of(x.cuda())))]
    return all(torch.equal(a, b.cpu()) for a, b in pairs)


def made(name: str):
    if name.startswith("resnet"):
        from test_lean import resnet

        model, (x,) = resnet(4)
        layout = torch.channels_last if "last" in name else torch.contiguous_format
        return model.to(memory_format=layout), (x.to(memory_format=layout),)
    return zoo.make(name, depths=(1, 1, 3, 1)) if name in zoo.CONVNETS else zoo.make(name, layers=3)


def worst(found, wanted) -> float:
    pairs = [(p.grad.cpu(), q.grad.cpu()) for p, q in zip(found.parameters(), wanted.parameters(), strict=True) if q.grad is not None]
    scale = max(q.abs().max().item() for _, q in pairs)
    return max((p - q).abs().max().item() for p, q in pairs) / scale


def floating(batch, dtype):
    cast = lambda x: x.to(dtype) if x.is_floating_point() else x  # noqa: E731
    return {k: cast(v) for k, v in batch.items()} if isinstance(batch, dict) else tuple(cast(x) for x in batch)


def against_plain(name: str, text: str, dtype: torch.dtype) -> tuple[float, int, int]:
    """Lean on the GPU against plain training there, and what each holds."""
    model, batch = made(name)
    plain, batch = model.to("cuda", dtype), floating(to(batch, "cuda"), dtype)
    model = copy.deepcopy(plain)
    hb.apply_(model, *hb.parse(text))
    for m in (plain, model):
        zoo.loss(m, batch).backward()
    return worst(model, plain), *(hb.held(m, lambda m=m: zoo.loss(m, batch)) for m in (plain, model))


def against_cpu(name: str, text: str) -> float | None:
    """DropIT on the GPU's kernels against the reference on the CPU; None where other layers are approximated there: attention that pads its
    heads holds another output than the next layer reads."""
    model, batch = made(name)
    other = copy.deepcopy(model)
    reports = [hb.apply_(m, *hb.parse(text)) for m in (model, other)]
    other.cuda()
    zoo.loss(model, batch).backward()
    zoo.loss(other, to(batch, "cuda")).backward()
    stored = [[r.layer for r in report.rows if r.stored] for report in reports]
    return worst(other, model) if stored[0] == stored[1] else None


def loss_error(dtype: torch.dtype, classes: int, smoothing: float) -> tuple[float, float]:
    """How far gradients of a loss in parts are from fp64's, and torch's own."""
    torch.manual_seed(0)
    x, weight = torch.randn(700, 64, device="cuda").to(dtype), (0.3 * torch.randn(classes, 64, device="cuda")).to(dtype)
    target = torch.randint(0, classes, (700,), device="cuda")
    target[::7] = -100

    def gradients(how, kind):
        given = [t.to(kind, copy=True).requires_grad_() for t in (x, weight)]
        how(*given).backward()
        return torch.cat([t.grad.double().flatten() for t in given])

    def plain(x, weight):
        return F.cross_entropy(F.linear(x, weight), target, label_smoothing=smoothing)

    truth = gradients(plain, torch.float64)
    ours = gradients(lambda x, w: heads.cross_entropy(x, w, None, target, 256, smoothing=smoothing), dtype)
    return tuple(((found - truth).norm() / truth.norm()).item() for found in (ours, gradients(plain, dtype)))


def check_losses() -> None:
    for dtype, classes, smoothing in itertools.product((torch.float32, torch.bfloat16, torch.float16), (4096, 5003), (0.0, 0.1)):
        ours, torchs = loss_error(dtype, classes, smoothing)
        print(f"loss in parts, {classes} classes, {dtype}, smoothing {smoothing}: error {ours:.1e}, torch's {torchs:.1e}", flush=True)
        assert ours < 1.5 * torchs + 1e-6


PARTS = {
    "attention": check_attention,
    "losses": check_losses,
    "sbp": check_sbp,
    "dropit": check_dropit,
    "norms": batch_norms,
    "compiled": check_compiled,
    "graphs": check_graphs,
    "trainings": check_trainings,
}


def test_gradients_on_a_gpu_are_the_cpus():
    import pytest

    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    check()


if __name__ == "__main__":
    check(sys.argv[1:])
