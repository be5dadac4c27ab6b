"""The peak of compiled training steps on a CUDA GPU, and how many kernels they start, without one.

    python benchmarks/no_gpu/count.py --model vit-b plain "sbp(keep=0.5)+lean" "sbp(keep=0.5)+recompute"

torch's own allocator and inductor's code for CUDA, on a GPU that does nothing: a library in the place of CUDA's runtime gives out addresses
with no memory behind them and starts no kernels, products of matrices and convolutions are left out, and attention is flash's. So the
peak is what `max_memory_allocated` would be on the device, and nothing else means anything: neither results nor times. Kernels are counted
that the compiler's code starts, its own, ours, and products: where the GPU waits for the CPU, a step takes as long as those.

Needs Linux, a C compiler, and a torch that was built for CUDA, with no GPU in the machine. Compiling takes a minute a method on one core.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
INSIDE = "HALFBACK_NO_GPU"
STARTED: list[Any] = []  # kernels
GIB = 2**30


def package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"count.py: no {name} is installed. A torch that was built for CUDA brings it.")
    return Path(next(iter(found.submodule_search_locations)))


def libraries(folder: Path) -> tuple[Path, Path]:
    """The runtime, and the folder of a driver whose functions all succeed and do nothing."""
    triton = package("triton") / "backends" / "nvidia" / "include"
    (folder / "include").mkdir()
    (folder / "include" / "crt").symlink_to(triton / "crt")
    names = set(re.findall(r"CUDAAPI\s+(cu\w+)\s*\(|#define\s+cu\w+\s+(cu\w+_v\d+)\b", (triton / "cuda.h").read_text()))
    names = {a or b for a, b in names}
    (folder / "driver.c").write_text("".join(f"int {n}() {{ return 0; }}\n" for n in sorted(names)))
    headers = ["-I", str(package("nvidia") / "cu13" / "include"), "-I", str(folder / "include")]
    for source, made, more in (
        (HERE / "cudart.c", "cudart.so", headers),
        (folder / "driver.c", "libcuda.so.1", ["-fno-builtin", "-Wl,-soname,libcuda.so.1"]),
    ):
        subprocess.run(["cc", "-w", "-shared", "-fPIC", *more, str(source), "-o", str(folder / made)], check=True)
    return folder / "cudart.so", folder


def restarted() -> int:
    """This command again, in a process that has the two libraries."""
    with tempfile.TemporaryDirectory(prefix="halfback-no-gpu-") as folder:
        runtime, driver = libraries(Path(folder))
        env = {**os.environ, "LD_PRELOAD": str(runtime), "LD_LIBRARY_PATH": str(driver), INSIDE: "1"}
        return subprocess.run([sys.executable, *sys.argv], env=env).returncode


# Inside


def leave_out() -> None:
    """What cannot be run: libraries for products and convolutions, Triton's kernels, and initialisation by a compiler of CUDA's own."""
    import torch
    import triton.runtime.jit
    from torch._inductor import async_compile, config
    from torch._inductor.select_algorithm import extern_kernels

    class Nothing:
        def run(self, *args: Any, **kwargs: Any) -> None:
            STARTED.append(self)

        def __getattr__(self, name: str) -> None:
            return None

    def left_out(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        STARTED.append(left_out)
        return out

    config.compile_threads, config.fx_graph_cache, config.size_asserts = 1, False, False
    config.shape_padding = False  # it would be timed
    torch._functorch.config.enable_autograd_cache = False  # type: ignore[attr-defined]
    async_compile.AsyncCompile.triton = lambda *args, **kwargs: Nothing()  # type: ignore[method-assign]
    triton.runtime.jit.JITFunction.run = left_out
    torch.nn.init._no_grad_trunc_normal_ = left_out  # type: ignore[attr-defined]
    torch.backends.cuda.enable_cudnn_sdp(False)
    for name in ("mm", "addmm", "bmm", "baddbmm"):
        setattr(extern_kernels, name, left_out)
    library = torch.library.Library("aten", "IMPL")
    leave_out.kept = library  # type: ignore[attr-defined]

    def as_meta(op: Any) -> Any:
        """What an operator returns, with nothing in it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            given = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
            out = op(*given[0], **given[1])
            return torch.utils._pytree.tree_map_only(
                torch.Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda"), out
            )

        return run

    aten = torch.ops.aten
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution_backward",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
    ):
        library.impl(name, as_meta(getattr(aten, name).default), "CUDA")
    for name in ("mm.out", "addmm.out", "bmm.out", "baddbmm.out"):
        library.impl(name, left_out, "CUDA")
    library.impl("addmm_", lambda x, *args, **kwargs: x, "CUDA")

    def convolution(x: Any, w: Any, padding: Any, stride: Any, dilation: Any, groups: int, *rest: Any) -> Any:
        return as_meta(aten.convolution.default)(x, w, None, stride, padding, dilation, False, [0] * len(stride), groups)

    library.impl("cudnn_convolution", convolution, "CUDA")


def counted(model: str, text: str, compiled: bool, batch: int | None, size: int | None, seq: int | None) -> tuple[float, int]:
    """The peak in GiB, and kernels."""
    import torch

    from halfback.bench.rows import rows_of
    from halfback.bench.work import Place, Step, Turn

    place = Place("cuda", batch=batch, size=size, seq=seq)
    spec = place.spec(model)
    plain = next(r for r in rows_of(spec, "all") if r.is_plain)
    step = Step(spec, dataclasses.replace(plain, method=text, text=text, compiled=compiled), place, Turn(None))
    step.warm_up()
    step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    STARTED.clear()
    step()
    return (torch.cuda.max_memory_allocated() - before) / GIB, len(STARTED)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+", help="as for `halfback bench --method`; `plain` among them makes ratios")
    parser.add_argument("--model", required=True, help="as for `halfback bench --model`")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument("--seq", type=int)
    parser.add_argument("--eager", action="store_true", help="not compiled")
    args = parser.parse_args()
    if not os.environ.get(INSIDE):
        import torch

        if not torch.version.cuda or torch.cuda.is_available():
            there = "with a GPU" if torch.cuda.is_available() else "not built for CUDA"
            raise SystemExit(f"count.py: here is torch {torch.__version__}, {there}. It needs one built for CUDA, without a GPU.")
        return restarted()
    leave_out()
    found: dict[str, float] = {}
    for method in args.methods:
        found[method], kernels = counted(args.model, method, not args.eager, args.batch, args.size, args.seq)
        ratio = f"{found[method] / found['plain']:8.3f}" if "plain" in found else ""
        started = "" if args.eager else f"{kernels:8} kernels"
        print(f"{args.model:12} {method:70} {found[method]:9.3f} GiB{ratio}{started}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
