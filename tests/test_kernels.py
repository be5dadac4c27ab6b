"""The kernels: what they compute, that the fused ones compute the same, and that they compile for the GPUs they are meant for.

Run as a program under TRITON_INTERPRET=1, this file compares every fused kernel with its reference on a CPU."""

import functools
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from halfback import codes, keep, kernels
from halfback.kernels import reference

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)
KINDS = ("normal", "ties", "nan", "zeros")
WRITERS = ("scatter", "rounds", "gather")


def drawn(n, dtype=torch.float32, kind="normal"):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    if kind == "ties":
        x = (x * 2).round()
    elif kind == "zeros":
        x = (x - 1.5).relu()
    elif kind == "nan" and n:
        x[::7] = float("nan")
        x[1::11] = -float("inf")
    return x.to(dtype)


def equal(a, b):
    """Bit by bit, NaN included, of tensors or tuples of them."""
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(equal(u, v) for u, v in zip(a, b, strict=True))
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.5), b.nan_to_num(0.5))


# The definitions


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1000])
def test_bits_are_little_endian_and_come_back(n):
    mask = drawn(n) > 0
    bits = kernels.pack_bits(mask)
    assert (bits.dtype, bits.numel()) == (torch.uint8, -(-n // 8))
    assert [bool(int(bits[i // 8]) >> (i % 8) & 1) for i in range(n)] == mask.tolist()
    assert torch.equal(kernels.unpack_bits(bits, n), mask)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
def test_signs_are_all_that_the_backward_of_relu_needs(dtype):
    x = drawn(101, dtype).requires_grad_()
    grad = drawn(102, dtype)[:101]
    torch.relu(x).backward(grad)
    assert torch.equal(torch.where(kernels.unpack_bits(kernels.signs(x.detach()), x.numel()), grad, 0), x.grad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "block"), [(0, 8), (1, 8), (100, None), (100, 32), (96, 32), (50, 64), (33, 7)])
def test_what_is_selected_is_restored(n, block, kind):
    x = drawn(n, torch.bfloat16, kind)
    mask = keep.elements(x, 0.3, "largest", block)
    values, bits = kernels.select(x, 0.3, block)
    assert equal(values, x[mask])
    assert torch.equal(kernels.unpack_bits(bits, n), mask)
    assert equal(kernels.restore(values, bits, n, 0.3, block), torch.where(mask, x, 0))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", codes.ACTIVATIONS)
def test_a_code_counts_the_edges_below_and_finds_the_derivative(bits, name):
    x, (edges, values) = drawn(999) * 3, codes.table(name, bits)
    packed = kernels.encode(x, edges)
    cells = (x[:, None] > edges).sum(1)
    assert torch.equal(reference.unpack_codes(packed, 999, bits), cells.to(torch.uint8))
    assert torch.equal(kernels.scale_by_code(x, packed, values), x * values[cells])
    slope = torch.from_numpy(codes.derivative(name, x.double().numpy()))
    assert (values[cells] - slope).square().mean().sqrt() < (0.03 if bits == 4 else 0.003)


def test_the_even_code_is_in_the_low_half():
    edges, _ = codes.table("gelu", 4)
    assert kernels.encode(torch.tensor([-100.0, 100.0, 100.0]), edges).tolist() == [0xF0, 0x0F]


def test_another_number_of_edges_is_named():
    with pytest.raises(ValueError, match=r"16 or 256 cells \(15 or 255 edges\), found 4. Make them with codes.table"):
        reference.encode(torch.zeros(3), torch.zeros(3))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_error_of_a_weight_gradient_from_few_bits(bits):
    x, dy = drawn(512 * 96).view(512, 96), drawn(512 * 64 + 0).view(512, 64)
    x_hat = kernels.dequantise(*kernels.quantise(x.view(-1), bits), x.numel(), bits).view_as(x)
    error = (dy.T @ (x_hat - x)).norm() / (dy.T @ x).norm()
    assert error < (0.12 if bits == 4 else 0.007)


# The operators


@pytest.mark.parametrize("bits", [4, 8])
def test_operators_pass_torchs_own_checks(bits):
    x, (edges, table) = drawn(130), codes.table("silu", bits)
    values, mask = reference.select(x, 0.2, 32)
    quantised, packed = reference.quantise(x, bits), reference.encode(x, edges)
    calls = {
        "select": (x, 0.2, 32), "restore": (values, mask, 130, 0.2, 32), "pack_bits": (x > 0,), "unpack_bits": (mask, 130), "signs": (x,),
        "quantise": (x, bits, 64, 5), "gate": (x, x + 1, "silu", bits), "dequantise": (*quantised, 130, bits), "encode": (x, edges),
        "gate_again": (*quantised, *quantised, 130, "silu", bits, x.dtype), "gate_backward": (x, *quantised, *quantised, "silu", bits),
        "scale_by_code": (x, packed, table), "cross_entropy": (x.view(13, 10).clone(), torch.arange(13) % 10, 3, 0.1, True),
    }  # fmt: skip
    for name, args in calls.items():
        torch.library.opcheck(getattr(torch.ops.halfback, name), args, test_utils=("test_schema", "test_faketensor"))


def test_gates_of_fp64_are_not_computed_in_fp32(monkeypatch):
    class OnGPU:
        is_cuda = True

    monkeypatch.setattr(kernels, "_fused", lambda: "fused")
    assert kernels._at(OnGPU()) == kernels._at(OnGPU(), torch.float32) == "fused"
    assert kernels._at(OnGPU(), torch.float64) is reference


def test_the_fused_kernels_are_not_imported_on_a_cpu():
    code = """if True:
        import sys, torch, halfback
        from halfback import codes, kernels, stores
        kernels.restore(*kernels.select(torch.randn(100), 0.1, 32), 100, 0.1, 32)
        assert "halfback.kernels.fused" not in sys.modules"""
    subprocess.run([sys.executable, "-c", code], check=True)


# The fused kernels


CASES = pytest.mark.parametrize("case", ["select", "elementwise", "few_bits", "norms", "cross_entropy"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@CASES
def test_fused_equals_reference_on_the_gpu(case):
    globals()[f"compare_{case}"]("cuda")


@CASES
def test_fused_equals_reference_in_the_interpreter(case):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, __file__, case], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# (n, block, keep): whole blocks, a rest, padded lanes, one short block, several words a lane; the last two go to the reference
SIZES = [(1024, 1024, 0.1), (600, 256, 0.5), (700, 320, 0.3), (300, 1000, 0.1), (2300, 2048, 0.01), (9, 8, 0.5), (0, 8, 0.1), (30, 7, 0.5)]


def compare_select(device):
    from halfback.kernels import fused

    ways = ("plain", *({"output": writer, "per_program": 2, "num_warps": 1} for writer in WRITERS))
    for at, (n, block, ratio) in enumerate(SIZES):
        for dtype in FLOATS:
            for kind in KINDS if (n, dtype) == (600, torch.bfloat16) else (KINDS[at % 4],):
                x = drawn(n, dtype, kind).to(device)
                expected = reference.select(x, ratio, block)
                for way in {torch.bfloat16: ways, torch.float16: ways[2:3], torch.float32: ways[:1]}[dtype]:
                    assert equal(fused.select(x, ratio, block, way), expected), (n, block, ratio, dtype, kind, way)
                assert equal(fused.restore(*expected, n, ratio, block), reference.restore(*expected, n, ratio, block)), (n, block, dtype)
    odd = drawn(257, torch.bfloat16).to(device)[1:]  # not aligned to 16 bytes
    assert equal(fused.select(odd, 0.1, 256), reference.select(odd, 0.1, 256))


def compare_elementwise(device):
    from halfback.kernels import fused

    for n in (1, 130, 2100):
        for dtype in FLOATS:
            x = drawn(n, dtype, "nan").to(device)
            mask = x > 0.5
            bits = reference.pack_bits(mask)
            assert equal(fused.signs(x), reference.signs(x))
            assert equal(fused.pack_bits(mask), bits)
            assert equal(fused.unpack_bits(bits, n), mask)
            for width in (4, 8):
                edges, table = codes.table("gelu", width, device)
                code = reference.encode(x, edges)
                assert equal(fused.encode(x, edges), code)
                if dtype in _rounded(device):
                    assert equal(fused.scale_by_code(x, code, table), reference.scale_by_code(x, code, table))


def compare_few_bits(device):
    from halfback.kernels import fused

    for n in (1, 65, 2102, 4096):
        for kind in ("normal", "nan", "zeros"):
            for width in (4, 8):
                x = drawn(n, FLOATS[n % 3], kind).to(device)
                for seed in (None, 3, 2**40):
                    assert equal(fused.quantise(x, width, 64, seed), reference.quantise(x, width, 64, seed)), (n, kind, width, seed)
                held = reference.quantise(x, width)
                compare_gates(x, width)
                for dtype in _rounded(device):
                    assert equal(fused.dequantise(*held, n, width, 64, dtype), reference.dequantise(*held, n, width, 64, dtype))


def compare_gates(x, width):
    from halfback.kernels import fused

    for name in codes.ACTIVATIONS:
        (h, *held), (wanted, *copies) = (where.gate(x, x.flip(0), name, width) for where in (fused, reference))
        assert equal(tuple(held), tuple(copies)), (name, width)
        near = 1e-5 if x.dtype is torch.float32 else 1e-2
        close = functools.partial(torch.allclose, rtol=near, atol=near, equal_nan=True)
        assert close(h.float(), wanted.float()), (name, width, x.dtype)
        if x.dtype is torch.float32:  # the reference rounds what it restores to other dtypes, and all that it makes of that
            ours, theirs = (where.gate_backward(x, *copies, name, width) for where in (fused, reference))
            assert close(ours[0], theirs[0]) and close(ours[1], theirs[1]), (name, width)
            assert close(*(where.gate_again(*copies, len(x), name, width, x.dtype) for where in (fused, reference))), (name, width)


def compare_norms(device):
    from halfback.kernels import fused

    def close(a, b):
        return a.stride() == b.stride() and torch.allclose(a.float(), b.float(), rtol=2e-2 if a.dtype in HALVES else 1e-5, atol=1e-5)

    for dtype in _rounded(device):
        for layout in (torch.contiguous_format, torch.channels_last):
            x, other = (drawn(2 * 24 * 5 * 7 + i, dtype)[i:].view(2, 24, 5, 7).to(device).contiguous(memory_format=layout) for i in (0, 1))
            mean, inverse = drawn(24).to(device), drawn(24).abs().to(device) + 0.5
            weight, bias = drawn(24, dtype).to(device), drawn(25, dtype).to(device)[:24]
            for affine in ((weight, bias), (None, None)):
                for residual in (None, other):
                    for relu in (False, True):
                        args = (x, mean, inverse, *affine, residual, relu)
                        assert close(fused.normalise_channels(*args), reference.normalise_channels(*args)), (dtype, layout, relu)
        x = drawn(5 * 7 * 48, dtype).view(5, 7, 48).to(device)
        mean, inverse = drawn(35).view(5, 7).to(device), drawn(36)[1:].view(5, 7).abs().to(device)
        weight, bias = drawn(48, dtype).to(device), drawn(49, dtype).to(device)[:48]
        for swap in (False, True):
            turned = [t.transpose(0, 1) if swap else t for t in (x, mean, inverse)]
            for affine in ((weight, bias), (None, None)):
                assert close(fused.normalise_rows(*turned, *affine), reference.normalise_rows(*turned, *affine))
            assert equal(fused.copy_rows(turned[0]), reference.copy_rows(turned[0]))
        uneven = (x.transpose(0, 1), mean.T.contiguous(), inverse.T, weight, bias)
        assert close(fused.normalise_rows(*uneven), reference.normalise_rows(*uneven))


def compare_cross_entropy(device):
    from halfback.kernels import fused

    for dtype in _rounded(device):
        for classes in (5, 4096, 5003):
            scores, target = drawn(7 * classes, dtype).view(7, classes), torch.arange(7) * (classes // 7)
            scores[6, 1] = float("inf")
            scores[0] *= 10
            scores[1, : classes // 2] = -float("inf")  # its target among them
            scores[2, :-1] = -float("inf")
            scores[4, 1] = float("nan")
            target[5] = -100
            for smoothing in (0.0, 0.1):
                for gradient in (True, False):
                    one, two = (scores.clone().to(device) for _ in range(2))
                    losses = fused.cross_entropy_(one, target.to(device), -100, smoothing, gradient)
                    expected = reference.cross_entropy_(two, target.to(device), -100, smoothing, gradient)
                    near = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
                    assert torch.allclose(losses, expected, **near), (dtype, classes, smoothing)
                    assert torch.allclose(one.float(), two.float(), **{**near, "rtol": 1e-5 if dtype is torch.float32 else 1e-2})
                    assert equal(one[5].isfinite(), two[5].isfinite()) and gradient is not torch.equal(one[3], scores[3].to(device))


def _rounded(device):
    """The dtypes to which fp32 is rounded as torch rounds it. (The interpreter cuts bf16.)"""
    return FLOATS if device == "cuda" else (torch.float16, torch.float32)


def compiled(kernel, types, capability, warps=1, aligned=("n", "m"), **constants):
    """A kernel for a GPU that need not be here: pointers aligned to 16 bytes, sizes multiples of 16, as large tensors have them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = iter(types.split())
    signature = {name: "constexpr" if name in constants else next(given) for name in kernel.arg_names}
    sixteen = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if signature[name][0] == "*" or name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=sixteen)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


CAPABILITIES = pytest.mark.parametrize("capability", [80, 90])


@CAPABILITIES
@pytest.mark.parametrize("output", WRITERS)
def test_the_selection_stays_in_registers(capability, output):
    fused = pytest.importorskip("halfback.kernels.fused")
    lanes = {"BLOCK": 1024, "L": 32, "K": 128, "PER": 4, "OUTPUT": output}
    built = compiled(fused._select_sliced, "*i32 *i16 *i16 *i32 i32 i32", capability, **lanes)
    assert built.metadata.shared == 0
    code = built.asm["ptx"]
    assert code.count("ld.global.v4.b32") == 4
    assert code.count("popc.b32") >= 17  # the idiom was understood
    assert "bar.sync" not in code


@CAPABILITIES
def test_selection_compiles_for_other_sizes(capability):
    fused = pytest.importorskip("halfback.kernels.fused")
    lanes = {"BLOCK": 320, "L": 16, "K": 1, "PER": 2, "OUTPUT": "rounds"}
    compiled(fused._select_sliced, "*i32 *i16 *i16 *i32 i32 i32", capability, **lanes)
    for word, magnitude in (("i16", 2**15 - 1), ("i32", 2**31 - 1)):
        compiled(fused._select_plain, f"*{word} *{word} *u8 i32 i32 i32 i32", capability, warps=2, MAGNITUDE=magnitude, BLOCK=256)
        half = word == "i16"
        built = compiled(fused._restore, f"*{word} *u8 *i32 i32 i32", capability, SIZE=1024, BLOCK=1024, HALF=half)
        assert "st.global.v4.b32" in built.asm["ptx"]


@CAPABILITIES
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_others_compile_with_whole_loads(capability, dtype):
    fused = pytest.importorskip("halfback.kernels.fused")
    whole, masked = {"TILE": 2048, "warps": 4, "WHOLE": True}, {"TILE": 2048, "warps": 4}
    built = [
        compiled(fused._pack, f"*{dtype} *u8 i32", capability, **masked),
        compiled(fused._encode, f"*{dtype} *fp32 *u8 i32 i32", capability, BITS=4, **masked),
        compiled(fused._scale, f"*{dtype} *u8 *fp32 *{dtype} i32 i32", capability, BITS=4, **masked),
        compiled(fused._quantise, f"*{dtype} *u8 *i32 i64 i32 i32", capability, BITS=4, G=64, NOISE=True, TINY=reference.TINY, **whole),
        compiled(fused._dequantise, f"*u8 *i32 *{dtype} i32 i32", capability, BITS=4, G=64, **whole),
        *[gates(kind, dtype, capability, name, bits) for kind in GATES for name in codes.ACTIVATIONS for bits in (4, 8)],
    ]
    for kernel in built:
        assert "global.v4.b32" in kernel.asm["ptx"], kernel.metadata.name


GATES = {"forward": 50, "backward": 45, "again": 25}  # instructions an element on an H100 or H200, with 4 bits and silu


def gates(kind, dtype, capability, name, bits):
    from halfback.kernels import fused

    same = {"NAME": name, "BITS": bits, "G": 64, "FAST": True, "WHOLE": True, "TILE": 2048, "warps": 4}
    few = "*u8 *i32 *u8 *i32"
    if kind == "forward":
        return compiled(fused._gate, f"*{dtype} *{dtype} *{dtype} {few} i32 i32", capability, TINY=reference.TINY, **same)
    return compiled(fused._gate_again, f"{few} *{dtype} *{dtype} *{dtype} i32 i32", capability, BACK=kind == "backward", **same)


@pytest.mark.parametrize("kind", GATES)
def test_gates_take_few_instructions(kind, tmp_path):
    pytest.importorskip("halfback.kernels.fused")
    import triton

    dump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not dump.exists():
        pytest.skip("this triton has no cuobjdump")
    (tmp_path / "cubin").write_bytes(gates(kind, "bf16", 90, "silu", 4).asm["cubin"])
    code = subprocess.run([dump, "-sass", tmp_path / "cubin"], capture_output=True, text=True, check=True).stdout
    count = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+\S", code, re.MULTILINE))
    assert 0 < count * 4 * 32 / 2048 <= GATES[kind]


@CAPABILITIES
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_norms_compile(capability, dtype):
    fused = pytest.importorskip("halfback.kernels.fused")
    for last in (True, False):
        types = f"*{dtype} *fp32 *fp32 *{dtype} *{dtype} *{dtype} *{dtype} i32 i32 i32"
        compiled(fused._normalise_channels, types, capability, warps=4, LAST=last, JOIN=True, RELU=True, R=8, C=256)
    types = f"*{dtype} *fp32 *fp32 *{dtype} *{dtype} *{dtype} i32 i32 i32 i32 i32 i32 i32"
    for norm in (True, False):
        compiled(fused._rows_out, types, capability, warps=4, NORM=norm, R=2, WIDTH=1024)


@CAPABILITIES
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_cross_entropy_compiles_with_whole_loads(capability, dtype):
    fused = pytest.importorskip("halfback.kernels.fused")
    types = f"*{dtype} *i64 *{dtype} *fp32 i32 i32 fp32"
    built = compiled(fused._cross_entropy, types, capability, warps=8, aligned=("classes",), SMOOTH=True, GRADIENT=True, TILE=4096)
    assert "ld.global.v4.b32" in built.asm["ptx"] and "st.global.v4.b32" in built.asm["ptx"]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_torchs_and_its_gradient_autograds(smoothing, monkeypatch):
    monkeypatch.setattr(reference, "AT_ONCE", 3 * 41)
    scores = drawn(7 * 41, torch.float64).view(7, 41).requires_grad_()
    target = torch.arange(7) * 5
    target[2] = -1
    wanted = torch.nn.functional.cross_entropy(scores, target, reduction="none", label_smoothing=smoothing, ignore_index=-1)
    wanted.sum().backward()
    mine = scores.detach().clone()
    assert torch.allclose(kernels.cross_entropy_(mine, target, -1, smoothing, False), wanted, rtol=1e-13)
    assert torch.equal(mine, scores)
    assert torch.allclose(kernels.cross_entropy_(mine, target, -1, smoothing, True), wanted, rtol=1e-13)
    assert torch.allclose(mine, scores.grad, rtol=1e-12, atol=1e-15)


def test_norms_are_what_torch_makes():
    x = drawn(4 * 6 * 5 * 5).view(4, 6, 5, 5)
    weight, bias = drawn(6), drawn(7)[:6]
    out, mean, inverse = torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    assert torch.allclose(kernels.normalise_channels(x, mean, inverse, weight, bias, None, False), out, atol=1e-6)
    joined = kernels.normalise_channels(x, mean, inverse, weight, bias, x, True)
    assert torch.allclose(joined, torch.relu(out + x), atol=1e-6)
    rows = x.view(4, 6, 25)
    weight, bias = drawn(25), drawn(26)[:25]
    out, mean, inverse = torch.native_layer_norm(rows, (25,), weight, bias, 1e-5)
    assert torch.allclose(kernels.normalise_rows(rows, mean[..., 0], inverse[..., 0], weight, bias), out, atol=1e-6)


@CAPABILITIES
def test_codes_of_a_byte_compile(capability):
    fused = pytest.importorskip("halfback.kernels.fused")
    masked = {"TILE": 2048, "warps": 4, "BITS": 8}
    whole = {**masked, "WHOLE": True}
    compiled(fused._unpack, "*u8 *i8 i32", capability, TILE=2048, warps=4)
    compiled(fused._encode, "*bf16 *fp32 *u8 i32 i32", capability, **masked)
    compiled(fused._scale, "*bf16 *u8 *fp32 *bf16 i32 i32", capability, **masked)
    compiled(fused._quantise, "*bf16 *u8 *i32 i32 i32 i32", capability, G=64, NOISE=False, TINY=reference.TINY, **whole)
    compiled(fused._dequantise, "*u8 *i32 *bf16 i32 i32", capability, G=64, **whole)


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of infinities in the interpreter
    globals()[f"compare_{sys.argv[1]}"]("cpu")


def test_a_second_import_takes_the_operators_of_the_first():
    """As notebooks do that load changed modules anew."""
    script = """
import gc, sys, torch
import halfback
from halfback.kernels import select
for name in [n for n in sys.modules if n.split(".")[0] == "halfback"]:
    del sys.modules[name]
from halfback.kernels import select as again
gc.collect()
assert again is not select
for f in (select, again):
    values, bits = torch.compile(f, backend="eager", fullgraph=True)(torch.arange(64.0), 0.25, 32)
    assert values.tolist() == [*range(24, 32), *range(56, 64)]
"""
    subprocess.run([sys.executable, "-c", script], check=True)
