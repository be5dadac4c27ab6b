"""The kernels in Triton: the same names, signatures and results as reference.py, on CUDA.

Selection. A warp takes a block of 1024 elements of 16 bits, 32 neighbouring ones a lane, and turns them: plane p is a word a lane that holds bit p
of the lane's 32 elements, as the two steps of a bit-matrix transpose. The k-th largest key is then found from its highest bit down, in
15 steps whatever the data are: of the elements that still tie, how many have the next bit set? One AND, one population count and one sum over the
warp answer that for 1024 elements. What is left are two words a lane, the elements above the k-th key and those equal to it, which are the
bits to store. Counted in the machine code for sm_90, 620 instructions do a block of 1024 (0.6 an element) without shared memory or a barrier;
bisection by comparing elements takes 950 with the best guesses that we know, and 2,000 without.

Other sizes and dtypes go through plain bisection (`_select_plain`); blocks above 4096, whole tensors, fp64 and blocks that do not end at
a byte of bits go through the reference.

NOTE [what Triton wants]
 1. Everything floating is fp32 right after its load: bf16 arithmetic is wrong in Triton's interpreter, which tests these kernels.
 2. Multiplications and additions that are rounded apart in the reference must not be fused: enable_fp_fusion=False.
 3. `_ones` is the well-known sum of bits by halves. The compiler knows it too and makes it one instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import keep as _keep
from . import reference
from .reference import GROUP, TINY, code_bits

# How the selected values are written. `rounds`: each lane writes its first kept element, then its second...: few rounds if few are kept.
# `scatter`: 32 stores a lane, each of those lanes whose element is kept. `gather`: each lane looks up where the output that it writes comes from.
# Sparse is what keeps up to a quarter. The one table to edit after measuring (benchmarks/kernels.py).
VARIANTS = {
    "sparse": {"output": "rounds", "per_program": 4, "num_warps": 1},
    "dense": {"output": "scatter", "per_program": 4, "num_warps": 1},
}
LARGEST = 4096
TILE = 2048  # elements a program takes in the kernels that go through a tensor once
_WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


# Selection: planes of bits


@triton.jit
def _ones(x):
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _nth(mask, r):
    """Where the r-th lowest set bit of mask stands, r >= 1."""
    at = r * 0
    for s in tl.static_range(5):
        step = 16 >> s
        at = tl.where(_ones(mask & ((1 << (at + step)) - 1)) < r, at + step, at)
    return at


@triton.jit
def _lowest(mask):
    """Where the lowest set bit stands: the exponent of that power of two as a float."""
    return ((mask & -mask).to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _swap(a, b, shift: tl.constexpr, mask: tl.constexpr):
    """One step of a transpose: a's high part and b's low part change places, in every field of 2 * shift bits."""
    t = ((a >> shift) ^ b) & mask
    return a ^ (t << shift), b ^ t


@triton.jit
def _rows(words, row, valid):
    """Four tensors (L, 4) of words: word (i, r) of (even, odd)(low, high) has in its halves elements r' and r' + 16 of lane i,
    r' = 2 r + (0 for even, 1 for odd) + (0 for low, 8 for high)."""
    at = words + row[:, None] * 16 + tl.arange(0, 4)[None, :]
    inside = valid[:, None]
    q0 = tl.load(at, mask=inside, other=0)
    q1 = tl.load(at + 4, mask=inside, other=0)
    q2 = tl.load(at + 8, mask=inside, other=0)
    q3 = tl.load(at + 12, mask=inside, other=0)
    even_low, odd_low = (q0 & 0xFFFF) | (q2 << 16), ((q0 >> 16) & 0xFFFF) | (q2 & -65536)
    even_high, odd_high = (q1 & 0xFFFF) | (q3 << 16), ((q1 >> 16) & 0xFFFF) | (q3 & -65536)
    return even_low, odd_low, even_high, odd_high


@triton.jit
def _planes(x, L: tl.constexpr):
    """The last two steps of the transpose, inside a tensor (L, 4): its planes s, s + 2, s + 4, s + 6."""
    a, b = tl.split(tl.reshape(x, (L, 2, 2)))
    a, b = _swap(a, b, 2, 0x33333333)
    p0, p4 = tl.split(a)
    p2, p6 = tl.split(b)
    p0, p4 = _swap(p0, p4, 4, 0x0F0F0F0F)
    p2, p6 = _swap(p2, p6, 4, 0x0F0F0F0F)
    return p0, p2, p4, p6


@triton.jit
def _narrow(tied, above, need, plane):
    """One bit further: `need` of the tied elements belong to the largest. Are there so many with this bit set?"""
    hit = tied & plane
    found = tl.sum(_ones(hit))
    enough = found >= need
    above = tl.where(enough, above, above | hit)
    tied = tl.where(enough, hit, tied ^ hit)
    return tied, above, tl.where(enough, need, need - found)


@triton.jit
def _threshold(even_low, odd_low, even_high, odd_high, valid, k, L: tl.constexpr):
    """(tied, above, need): the elements equal to the k-th largest and those above it, a bit each, and how many of the tied are kept."""
    e0, e1 = _swap(even_low, even_high, 8, 0x00FF00FF)
    o0, o1 = _swap(odd_low, odd_high, 8, 0x00FF00FF)
    e0, o0 = _swap(e0, o0, 1, 0x55555555)
    e1, o1 = _swap(e1, o1, 1, 0x55555555)
    p0, p2, p4, p6 = _planes(e0, L)
    p1, p3, p5, p7 = _planes(o0, L)
    p8, p10, p12, p14 = _planes(e1, L)
    p9, p11, p13, _ = _planes(o1, L)  # plane 15 is the sign
    tied = tl.where(valid, -1, 0)
    above = tl.zeros((L,), tl.int32)
    tied, above, need = _narrow(tied, above, k, p14)
    tied, above, need = _narrow(tied, above, need, p13)
    tied, above, need = _narrow(tied, above, need, p12)
    tied, above, need = _narrow(tied, above, need, p11)
    tied, above, need = _narrow(tied, above, need, p10)
    tied, above, need = _narrow(tied, above, need, p9)
    tied, above, need = _narrow(tied, above, need, p8)
    tied, above, need = _narrow(tied, above, need, p7)
    tied, above, need = _narrow(tied, above, need, p6)
    tied, above, need = _narrow(tied, above, need, p5)
    tied, above, need = _narrow(tied, above, need, p4)
    tied, above, need = _narrow(tied, above, need, p3)
    tied, above, need = _narrow(tied, above, need, p2)
    tied, above, need = _narrow(tied, above, need, p1)
    tied, above, need = _narrow(tied, above, need, p0)
    return tied, above, need


@triton.jit
def _kept(tied, above, need):
    """(kept, before): the bits that stay, and how many stay in the lanes before. One scan counts both kinds, 16 bits each."""
    equal = _ones(tied)
    both = _ones(above) + (equal << 16)
    before = tl.cumsum(both, 0) - both
    rank = before >> 16
    left = need - rank
    if tl.max(((left > 0) & (left < equal)).to(tl.int32)) > 0:  # the last tied one that stays may stand inside a lane's 32
        tied = tl.where(left < equal, tied & ((2 << _nth(tied, tl.maximum(left, 1))) - 1), tied)
    return above | tl.where(left > 0, tied, 0), (before & 0xFFFF) + tl.minimum(rank, need)


@triton.jit
def _put(values, at, kept, words, bit: tl.constexpr):
    here = (kept & (1 << bit if bit < 31 else -2147483648)) != 0
    tl.store(values + at, (words if bit < 16 else words >> 16).to(tl.int16), mask=here)
    return tl.where(here, at + 1, at)


@triton.jit
def _split(x, L: tl.constexpr):
    a, b = tl.split(tl.reshape(x, (L, 2, 2)))
    w0, w2 = tl.split(a)
    w1, w3 = tl.split(b)
    return w0, w1, w2, w3


@triton.jit
def _put_eight(values, at, kept, even, odd, bit: tl.constexpr, L: tl.constexpr):
    e0, e1, e2, e3 = _split(even, L)
    o0, o1, o2, o3 = _split(odd, L)
    at = _put(values, at, kept, e0, bit)
    at = _put(values, at, kept, o0, bit + 1)
    at = _put(values, at, kept, e1, bit + 2)
    at = _put(values, at, kept, o1, bit + 3)
    at = _put(values, at, kept, e2, bit + 4)
    at = _put(values, at, kept, o2, bit + 5)
    at = _put(values, at, kept, e3, bit + 6)
    at = _put(values, at, kept, o3, bit + 7)
    return at


@triton.jit
def _scatter(values, at, kept, even_low, odd_low, even_high, odd_high, L: tl.constexpr):
    at = _put_eight(values, at, kept, even_low, odd_low, 0, L)
    at = _put_eight(values, at, kept, even_high, odd_high, 8, L)
    at = _put_eight(values, at, kept, even_low, odd_low, 16, L)
    at = _put_eight(values, at, kept, even_high, odd_high, 24, L)


@triton.jit
def _rounds(x, values, at, kept, row):
    """The values are read again: a warp has just read them, so they are in its cache."""
    while tl.max((kept != 0).to(tl.int32)) > 0:
        here = kept != 0
        tl.store(values + at, tl.load(x + row * 32 + _lowest(kept), mask=here, other=0), mask=here)
        at += 1
        kept = kept & (kept - 1)


@triton.jit
def _gather(x, values, at, kept, k, L: tl.constexpr, K: tl.constexpr):
    """Output j comes from the last lane that starts at or before j. All stores are whole."""
    j = tl.arange(0, K)
    lane = tl.zeros((K,), tl.int32)
    for s in tl.static_range(12):
        step = (L // 2) >> s
        if step > 0:
            lane = tl.where(tl.gather(at, lane + step, 0) <= j, lane + step, lane)
    bit = _nth(tl.gather(kept, lane, 0), j - tl.gather(at, lane, 0) + 1)
    tl.store(values + j, tl.load(x + lane * 32 + bit, mask=j < k, other=0), mask=j < k)


@triton.jit
def _select_sliced(
    words, x, values, bits, blocks, k, block,
    L: tl.constexpr, K: tl.constexpr, PER: tl.constexpr, WHOLE: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """words and bits are int32, x and values int16. L: lanes of 32 elements, a power of two that holds the block."""
    row = tl.arange(0, L)
    valid = row >= 0 if WHOLE else row * 32 < block
    for p in range(PER):
        b = (tl.program_id(0) * PER + p).to(tl.int64)
        if b < blocks:
            e0, o0, e1, o1 = _rows(words + b * (block // 2), row, valid)
            tied, above, need = _threshold(e0, o0, e1, o1, valid, k, L)
            kept, at = _kept(tied, above, need)
            tl.store(bits + b * (block // 32) + row, kept, mask=valid)
            if OUTPUT == "scatter":
                _scatter(values + b * k, at, kept, e0, o0, e1, o1, L)
            elif OUTPUT == "rounds":
                _rounds(x + b * block, values + b * k, at, kept, row)
            else:
                _gather(x + b * block, values + b * k, at, kept, k, L, K)


# Selection: plain bisection


@triton.jit
def _bisect(key, k):
    """The largest t with at least k keys from t on, or any with exactly k."""
    low = 0
    high = tl.max(key)
    while low < high:
        middle = low + ((high - low) >> 1) + ((high - low) & 1)
        found = tl.sum((key >= middle).to(tl.int32))
        low = tl.where(found >= k, middle, low)
        high = tl.where(found > k, high, tl.where(found == k, middle, middle - 1))
    return low


@triton.jit
def _select_plain(x, values, bits, n, block, each, last, MAGNITUDE: tl.constexpr, BLOCK: tl.constexpr):
    """A program takes a block; x is its words as integers."""
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    size = tl.minimum(n - b * block, block)
    k = tl.where(size == block, each, last)
    word = tl.load(x + b * block + i, mask=i < size, other=0)
    key = tl.where(i < size, word.to(tl.int32) & MAGNITUDE, -1)
    t = _bisect(key, k)
    above = (key > t).to(tl.int32)
    both = above + ((key == t).to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both
    rank = before >> 16
    room = k - tl.sum(above)
    kept = (key > t) | ((key == t) & (rank < room))
    tl.store(values + b * each + (before & 0xFFFF) + tl.minimum(rank, room), word, mask=kept)
    g = tl.arange(0, BLOCK // 8)
    tl.store(bits + b * (block // 8) + g, _byte(kept, BLOCK // 8), mask=g * 8 < size)


@triton.jit
def _byte(flags, G: tl.constexpr):
    return tl.sum(tl.reshape(flags.to(tl.int32), (G, 8)) << tl.arange(0, 8)[None, :], 1).to(tl.uint8)


def select(x: Tensor, keep: float, block: int | None, variant: dict | str | None = None) -> tuple[Tensor, Tensor]:
    """`variant`: "plain", or how the sliced kernel runs, as in VARIANTS; by default what stands there."""
    n = x.numel()
    if not _fits(x, n, block):
        return reference.select(x, keep, block)
    full, each, rest, last = _keep.counts(keep, n, block)
    size = (n - rest) // full
    values = x.new_empty(full * each + last)
    bits = x.new_empty(-(-n // 8), dtype=torch.uint8)
    done = 0
    if variant != "plain" and x.dtype.itemsize == 2 and size % 32 == 0 and size >= 256 and x.data_ptr() % 16 == 0:
        _sliced(x[: full * size], values, bits, full, each, size, variant if isinstance(variant, dict) else _variant(each, size))
        done = full
    if n > done * size:
        _plain(x[done * size :], values[done * each :], bits[done * size // 8 :], size, each, last)
    return values, bits


def _fits(x: Tensor, n: int, block: int | None) -> bool:
    return x.dtype in _WORDS and n > 0 and block is not None and (n <= block or block % 8 == 0) and min(n, block) <= LARGEST


def _variant(each: int, size: int) -> dict:
    return VARIANTS["sparse" if each * 4 <= size else "dense"]


def _sliced(x: Tensor, values: Tensor, bits: Tensor, blocks: int, k: int, block: int, variant: dict) -> None:
    lanes = triton.next_power_of_2(block // 32)
    per = variant["per_program"]
    _select_sliced[(triton.cdiv(blocks, per),)](
        x.view(torch.int32), x.view(torch.int16), values.view(torch.int16), bits[: x.numel() // 8].view(torch.int32), blocks, k, block,
        L=lanes, K=triton.next_power_of_2(k), PER=per, WHOLE=lanes * 32 == block, OUTPUT=variant["output"], num_warps=variant["num_warps"],
    )  # fmt: skip


def _plain(x: Tensor, values: Tensor, bits: Tensor, block: int, each: int, last: int) -> None:
    words = _WORDS[x.dtype]
    size = max(8, triton.next_power_of_2(block))
    _select_plain[(triton.cdiv(x.numel(), block),)](
        x.view(words), values.view(words), bits, x.numel(), block, each, last,
        MAGNITUDE=torch.iinfo(words).max, BLOCK=size, num_warps=max(1, size // 1024),
    )  # fmt: skip


# Restoring, and bits


@triton.jit
def _restore(values, bits, x, n, block, each, BLOCK: tl.constexpr):
    """Eight elements a lane: one byte of bits, one store of 16 bytes."""
    b = tl.program_id(0).to(tl.int64)
    size = tl.minimum(n - b * block, block)
    g = tl.arange(0, BLOCK // 8)
    byte = tl.load(bits + b * (block // 8) + g, mask=g * 8 < size, other=0).to(tl.int32)
    number = _ones(byte)
    before = tl.cumsum(number, 0) - number
    e = tl.arange(0, 8)[None, :]
    kept = (byte[:, None] >> e) & 1
    at = before[:, None] + _ones(byte[:, None] & ((1 << e) - 1))
    found = tl.load(values + b * each + at, mask=kept != 0, other=0.0)
    i = g[:, None] * 8 + e
    tl.store(x + b * block + i, found, mask=i < size)


def restore(values: Tensor, bits: Tensor, n: int, keep: float, block: int | None, num_warps: int | None = None) -> Tensor:
    if not _fits(values, n, block):
        return reference.restore(values, bits, n, keep, block)
    full, each, rest, _ = _keep.counts(keep, n, block)
    size = (n - rest) // full
    x = values.new_empty(n)
    padded = max(8, triton.next_power_of_2(size))
    warps = num_warps or max(1, padded // 1024)
    _restore[(triton.cdiv(n, size),)](values, bits, x, n, size, each, BLOCK=padded, num_warps=warps)
    return x


@triton.jit
def _tile(TILE: tl.constexpr):
    """(first group of eight, groups, elements) of this program: element numbers are (TILE // 8, 8)."""
    g = tl.program_id(0).to(tl.int64) * (TILE // 8) + tl.arange(0, TILE // 8)
    return g, g[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _pack(x, bits, n, TILE: tl.constexpr):
    """The bits of x > 0, for masks and numbers alike."""
    g, i = _tile(TILE)
    positive = tl.load(x + i, mask=i < n, other=0).to(tl.float32) > 0
    tl.store(bits + g, tl.sum(positive.to(tl.int32) << tl.arange(0, 8)[None, :], 1).to(tl.uint8), mask=g * 8 < n)


@triton.jit
def _unpack(bits, mask, n, TILE: tl.constexpr):
    g, i = _tile(TILE)
    byte = tl.load(bits + g, mask=g * 8 < n, other=0).to(tl.int32)
    tl.store(mask + i, ((byte[:, None] >> tl.arange(0, 8)[None, :]) & 1).to(tl.int8), mask=i < n)


@triton.jit
def _gate(grad, bits, out, scale, n, TILE: tl.constexpr):
    g, i = _tile(TILE)
    byte = tl.load(bits + g, mask=g * 8 < n, other=0).to(tl.int32)
    passes = ((byte[:, None] >> tl.arange(0, 8)[None, :]) & 1) != 0
    through = tl.load(grad + i, mask=passes & (i < n), other=0).to(tl.float32) * scale
    tl.store(out + i, tl.where(passes, through, 0.0).to(out.dtype.element_ty), mask=i < n)


def signs(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:  # fp32 would round the smallest to zero
        return reference.signs(x)
    bits = x.new_empty(-(-x.numel() // 8), dtype=torch.uint8)
    _through(_pack, x.numel(), x, bits)
    return bits


def pack_bits(mask: Tensor) -> Tensor:
    return signs(mask.view(torch.int8))


def unpack_bits(bits: Tensor, n: int) -> Tensor:
    mask = bits.new_empty(n, dtype=torch.bool)
    _through(_unpack, n, bits, mask.view(torch.int8))
    return mask


def gate(grad: Tensor, bits: Tensor, scale: float) -> Tensor:
    if grad.dtype == torch.float64:
        return reference.gate(grad, bits, scale)
    out = torch.empty_like(grad)
    _through(_gate, grad.numel(), grad, bits, out, float(scale))
    return out


def _through(kernel, n: int, *args, **options) -> None:
    """One program for each TILE of n elements."""
    if n:
        kernel[(triton.cdiv(n, TILE),)](*args, n, TILE=TILE, num_warps=4, **options)


# Few bits


@triton.jit
def _mix(h):
    """keep.mix, in words of 32 bits."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _range(x, inside, TOP: tl.constexpr, TINY: tl.constexpr):
    """reference._range, along the last axis. Triton's min and max do not hand NaN on."""
    broken = tl.max((x != x).to(tl.int32), 1) > 0
    word = tl.min(tl.where(inside, x, float("inf")), 1).to(tl.int32, bitcast=True)
    low = ((word + ((word >> 31) & 0xFFFF)) & -65536).to(tl.float32, bitcast=True)
    span = tl.max(tl.where(inside, x, float("-inf")), 1) - low
    word = (span * (1.0 / TOP)).to(tl.int32, bitcast=True)
    step = ((word + 0xFFFF) & -65536).to(tl.float32, bitcast=True)
    broken = broken | ~(tl.abs(span) < float("inf"))
    inverse = tl.where(step > TINY, tl.div_rn(1.0, tl.where(step > TINY, step, 1.0)), 0.0)
    return tl.where(broken, float("nan"), low), tl.where(broken, float("nan"), step), tl.where(broken, 0.0, inverse), broken


@triton.jit
def _quantise(
    x, codes, scales, salt, n, TILE: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr, NOISE: tl.constexpr, TINY: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * TILE
    r = tl.arange(0, TILE // G)
    i = first + r[:, None] * G + tl.arange(0, G)[None, :]
    inside = i < n
    v = tl.load(x + i, mask=inside, other=0).to(tl.float32)
    low, step, inverse, broken = _range(v, inside, 2**BITS - 1, TINY)
    group = first // G + r
    tl.store(scales + group * 2, low.to(tl.bfloat16), mask=group * G < n)
    tl.store(scales + group * 2 + 1, step.to(tl.bfloat16), mask=group * G < n)
    at = (v - low[:, None]) * inverse[:, None]
    if NOISE:
        h = _mix(i.to(tl.uint32) * 0x9E3779B1 + salt.to(tl.uint32))
        at += (h >> 8).to(tl.float32) * 5.9604644775390625e-08
    else:
        at += 0.5
    at = tl.where(inside & ~broken[:, None], at, 0.0)
    code = tl.minimum(tl.maximum(tl.floor(at), 0.0), 2.0**BITS - 1).to(tl.int32)
    if BITS == 8:
        tl.store(codes + i, code.to(tl.uint8), mask=inside)
    else:
        even, odd = tl.split(tl.reshape(code, (TILE // 2, 2)))
        j = first // 2 + tl.arange(0, TILE // 2)
        tl.store(codes + j, (even | (odd << 4)).to(tl.uint8), mask=j * 2 < n)


@triton.jit
def _codes(codes, first, n, TILE: tl.constexpr, BITS: tl.constexpr):
    """The codes of TILE elements."""
    if BITS == 8:
        i = first + tl.arange(0, TILE)
        return tl.load(codes + i, mask=i < n, other=0).to(tl.int32)
    j = first // 2 + tl.arange(0, TILE // 2)
    byte = tl.load(codes + j, mask=j * 2 < n, other=0).to(tl.int32)
    return tl.reshape(tl.join(byte & 15, byte >> 4), (TILE,))


@triton.jit
def _dequantise(codes, scales, x, n, TILE: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    group = first // G + tl.arange(0, TILE // G)
    low = tl.load(scales + group * 2, mask=group * G < n, other=0).to(tl.float32)
    step = tl.load(scales + group * 2 + 1, mask=group * G < n, other=0).to(tl.float32)
    code = tl.reshape(_codes(codes, first, n, TILE, BITS), (TILE // G, G)).to(tl.float32)
    i = first + tl.arange(0, TILE)
    v = tl.reshape(code * step[:, None] + low[:, None], (TILE,))
    tl.store(x + i, v.to(x.dtype.element_ty), mask=i < n)


def quantise(x: Tensor, bits: int, group: int = GROUP, seed: int | None = None) -> tuple[Tensor, Tensor]:
    n = x.numel()
    codes = x.new_empty(-(-n * bits // 8), dtype=torch.uint8)
    scales = x.new_empty((-(-n // group), 2), dtype=torch.bfloat16)
    salt = 0 if seed is None else _keep.salt(seed)
    options = {"BITS": bits, "G": group, "NOISE": seed is not None, "TINY": TINY}
    _through(_quantise, n, x, codes, scales, salt, **options, enable_fp_fusion=False)
    return codes, scales


def dequantise(codes: Tensor, scales: Tensor, n: int, bits: int, group: int = GROUP, dtype: torch.dtype = torch.float32) -> Tensor:
    x = codes.new_empty(n, dtype=dtype)
    _through(_dequantise, n, codes, scales, x, BITS=bits, G=group, enable_fp_fusion=False)
    return x


# Codes of a derivative


@triton.jit
def _encode(x, edges, codes, n, TILE: tl.constexpr, BITS: tl.constexpr):
    """Of 15 edges each is asked; of 255 eight, by halving. `not below or at` counts NaN above all, as the reference does."""
    first = tl.program_id(0).to(tl.int64) * TILE
    i = first + tl.arange(0, TILE)
    v = tl.load(x + i, mask=i < n, other=0).to(tl.float32)
    cell = tl.zeros((TILE,), tl.int32)
    if BITS == 4:
        for e in tl.static_range(15):
            cell += (~(v <= tl.load(edges + e))).to(tl.int32)
        even, odd = tl.split(tl.reshape(tl.where(i < n, cell, 0), (TILE // 2, 2)))
        j = first // 2 + tl.arange(0, TILE // 2)
        tl.store(codes + j, (even | (odd << 4)).to(tl.uint8), mask=j * 2 < n)
    else:
        for s in tl.static_range(8):
            up = cell + (128 >> s)
            cell = tl.where(v <= tl.load(edges + up - 1), cell, up)
        tl.store(codes + i, cell.to(tl.uint8), mask=i < n)


@triton.jit
def _scale(grad, codes, table, out, n, TILE: tl.constexpr, BITS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    i = first + tl.arange(0, TILE)
    factor = tl.load(table + _codes(codes, first, n, TILE, BITS))
    tl.store(out + i, (tl.load(grad + i, mask=i < n, other=0).to(tl.float32) * factor).to(out.dtype.element_ty), mask=i < n)


def encode(x: Tensor, edges: Tensor) -> Tensor:
    bits = code_bits(edges.numel() + 1)
    codes = x.new_empty(-(-x.numel() * bits // 8), dtype=torch.uint8)
    _through(_encode, x.numel(), x, edges, codes, BITS=bits)
    return codes


def scale_by_code(grad: Tensor, codes: Tensor, table: Tensor) -> Tensor:
    out = torch.empty_like(grad)
    _through(_scale, grad.numel(), grad, codes, table.to(torch.float32), out, BITS=code_bits(table.numel()))
    return out
