"""The kernels in Triton: the same names, signatures and results as reference.py, on CUDA.

Selection. A warp takes a block of 1024 elements of 16 bits, 32 neighbouring ones a lane, and transposes their bits: plane p is one word a
lane that holds bit p of the lane's 32 elements. The k-th largest key is then found from its highest bit down, in 15 steps whatever
the data are: of the elements that still tie, how many have the next bit set? One AND, one population count and one sum over the warp
answer that for 1024 elements. What is left are two words a lane, the elements above the k-th key and those equal to it: the
bits to store. In machine code for sm_90 a block takes 380 instructions, and 160 to 240 more to write the values: 17 to 19 an element,
without shared memory or a barrier. Bisection by comparing elements takes 30 with a good first guess, and 60 without.

Other sizes and dtypes go through plain bisection (`_select_plain`); blocks above 4096, whole tensors, fp64 and blocks that do not end at
a byte of bits go through the reference.

NOTE [what Triton wants]
 1. Everything floating is fp32 right after its load: bf16 arithmetic is wrong in Triton's interpreter, which tests these kernels.
 2. Multiplications and additions that are rounded apart in the reference must not be fused: enable_fp_fusion=False.
 3. `_ones` is the well-known sum of bits by halves. The compiler knows it too and makes it one instruction.
 4. Counts are not specialised: layers differ in them, and would compile anew.
 5. Offsets inside a program are 32 bits wide and stand behind a base of 64; sizes that align loads are constants. Otherwise addresses
    cost more than the work, and loads fall apart.
 6. Between 2^23 and 2^24 the numbers of fp32 are the integers, the last bits of the word: adding 2^23 rounds to the nearest, half to even,
    and is one instruction, where conversions run at a quarter of the speed.
 7. A kernel that goes through a tensor once may take about 50 instructions an element of 16 bits, or the memory is not the limit any more.
    WHOLE, a count that tiles divide, leaves out what masks cost: a tenth of them in `_gate`.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import keep as _keep
from . import reference
from .reference import GROUP, TINY, code_bits

# How the selected values are written. `rounds`: each lane writes its first kept element, then its second, and so on; few rounds if few are
# kept. `scatter`: 32 stores a lane, by the lanes whose element is kept. `gather`: each lane looks up where the output that it writes comes
# from. Sparse means up to a quarter kept. This is the one table to edit after measuring (benchmarks/kernels.py).
VARIANTS = {
    "sparse": {"output": "rounds", "per_program": 4, "num_warps": 1},
    "dense": {"output": "gather", "per_program": 4, "num_warps": 1},
}
LARGEST = 4096
TILE = 2048  # elements a program takes in the kernels that go through a tensor once
FAST = not os.environ.get("TRITON_INTERPRET") and torch.version.hip is None  # the interpreter knows no PTX, nor do others
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


@triton.jit(do_not_specialize=["blocks", "k"])
def _select_sliced(
    words, x, values, bits, blocks, k,
    BLOCK: tl.constexpr, L: tl.constexpr, K: tl.constexpr, PER: tl.constexpr, OUTPUT: tl.constexpr,
):  # fmt: skip
    """words and bits are int32, x and values int16. L: lanes of 32 elements, a power of two that holds the block."""
    row = tl.arange(0, L)
    valid = row * 32 < BLOCK
    for p in range(PER):
        b = (tl.program_id(0) * PER + p).to(tl.int64)
        if b < blocks:
            e0, o0, e1, o1 = _rows(words + b * (BLOCK // 2), row, valid)
            tied, above, need = _threshold(e0, o0, e1, o1, valid, k, L)
            kept, at = _kept(tied, above, need)
            tl.store(bits + b * (BLOCK // 32) + row, kept, mask=valid)
            if OUTPUT == "scatter":
                _scatter(values + b * k, at, kept, e0, o0, e1, o1, L)
            elif OUTPUT == "rounds":
                _rounds(x + b * BLOCK, values + b * k, at, kept, row)
            else:
                _gather(x + b * BLOCK, values + b * k, at, kept, k, L, K)


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


@triton.jit(do_not_specialize=["n", "block", "each", "last"])
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
    per, output = variant["per_program"], variant["output"]
    outputs = triton.next_power_of_2(k) if output == "gather" else 1
    _select_sliced[(triton.cdiv(blocks, per),)](
        x.view(torch.int32), x.view(torch.int16), values.view(torch.int16), bits[: x.numel() // 8].view(torch.int32), blocks, k,
        BLOCK=block, L=lanes, K=outputs, PER=per, OUTPUT=output, num_warps=variant["num_warps"],
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
def _next(values, at, byte, bit: tl.constexpr):
    """(the element of this bit or 0, where the next stands)."""
    here = (byte & (1 << bit)) != 0
    return tl.load(values + at, mask=here, other=0), tl.where(here, at + 1, at)


@triton.jit
def _next_two(values, at, byte, bit: tl.constexpr):
    a, at = _next(values, at, byte, bit)
    b, at = _next(values, at, byte, bit + 1)
    return (a.to(tl.int32) & 0xFFFF) | (b.to(tl.int32) << 16), at


@triton.jit
def _join(a, b, c, d, G: tl.constexpr):
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (G, 4))


@triton.jit(do_not_specialize=["each", "left"])
def _restore(values, bits, x, each, left, SIZE: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr):
    """Eight neighbouring elements a lane: a byte of bits, and stores of 16 bytes. values are integers, x words of 32 bits (HALF: of two
    elements). SIZE of a block; 0 for one short block, of `left` elements."""
    b = tl.program_id(0).to(tl.int64)
    size = SIZE if SIZE > 0 else left
    g = tl.arange(0, BLOCK // 8)
    byte = tl.load(bits + b * (SIZE // 8) + g, mask=g * 8 < size, other=0).to(tl.int32)
    number = _ones(byte)
    at = tl.cumsum(number, 0) - number
    values += b * each
    e = tl.arange(0, 4)[None, :]
    if HALF:
        a0, at = _next_two(values, at, byte, 0)
        a1, at = _next_two(values, at, byte, 2)
        a2, at = _next_two(values, at, byte, 4)
        a3, at = _next_two(values, at, byte, 6)
        i = g[:, None] * 4 + e
        tl.store(x + b * (SIZE // 2) + i, _join(a0, a1, a2, a3, BLOCK // 8), mask=i < (size + 1) // 2)
    else:
        a0, at = _next(values, at, byte, 0)
        a1, at = _next(values, at, byte, 1)
        a2, at = _next(values, at, byte, 2)
        a3, at = _next(values, at, byte, 3)
        i = g[:, None] * 8 + e
        tl.store(x + b * SIZE + i, _join(a0, a1, a2, a3, BLOCK // 8), mask=i < size)
        a0, at = _next(values, at, byte, 4)
        a1, at = _next(values, at, byte, 5)
        a2, at = _next(values, at, byte, 6)
        a3, at = _next(values, at, byte, 7)
        tl.store(x + b * SIZE + i + 4, _join(a0, a1, a2, a3, BLOCK // 8), mask=i + 4 < size)


def restore(values: Tensor, bits: Tensor, n: int, keep: float, block: int | None, num_warps: int | None = None) -> Tensor:
    if not _fits(values, n, block):
        return reference.restore(values, bits, n, keep, block)
    full, each, rest, _ = _keep.counts(keep, n, block)
    size = (n - rest) // full
    words, half = _WORDS[values.dtype], values.dtype.itemsize == 2
    x = values.new_empty(n + n % 2 if half else n)  # whole words
    done = full * size if size % 8 == 0 else 0

    def launch(blocks: int, start: int, block: int, exact: bool) -> None:
        padded = max(8, triton.next_power_of_2(block))
        _restore[(blocks,)](
            values[start // size * each :].view(words), bits[start // 8 :], x[start:].view(torch.int32), each, block,
            SIZE=block if exact else 0, BLOCK=padded, HALF=half, num_warps=num_warps or max(1, padded // 1024),
        )  # fmt: skip

    if done:
        launch(full, 0, size, True)
    if n > done:
        launch(1, done, n - done, False)
    return x[:n]


@triton.jit
def _tile(n, TILE: tl.constexpr):
    """(first element, how many are left from there, groups of eight, elements) of this program; the last two count from the first.
    (No minimum in `left`: the compiler would no longer see that it is a multiple of 16, and split the loads.)"""
    first = tl.program_id(0).to(tl.int64) * TILE
    g = tl.arange(0, TILE // 8)
    return first, n - first, g, g[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def _pack(x, bits, n, TILE: tl.constexpr):
    """The bits of not x <= 0, for masks and numbers alike."""
    first, left, g, i = _tile(n, TILE)
    below = tl.load(x + first + i, mask=i < left, other=0).to(tl.float32) <= 0
    byte = tl.sum((below == 0).to(tl.int32) << tl.arange(0, 8)[None, :], 1)
    tl.store(bits + first // 8 + g, byte.to(tl.uint8), mask=g * 8 < left)


@triton.jit
def _flags(bits, first, left, g):
    byte = tl.load(bits + first // 8 + g, mask=g * 8 < left, other=0).to(tl.int32)
    return ((byte[:, None] >> tl.arange(0, 8)[None, :]) & 1) != 0


@triton.jit
def _unpack(bits, mask, n, TILE: tl.constexpr):
    first, left, g, i = _tile(n, TILE)
    tl.store(mask + first + i, _flags(bits, first, left, g).to(tl.int8), mask=i < left)


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
def _least(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _range(x, inside, WHOLE: tl.constexpr, TOP: tl.constexpr, TINY: tl.constexpr):
    """reference._range, along the last axis. A NaN goes through the least element."""
    word = tl.reduce(x if WHOLE else tl.where(inside, x, float("inf")), 1, _least).to(tl.int32, bitcast=True)
    low = ((word + ((word >> 31) & 0xFFFF)) & -65536).to(tl.float32, bitcast=True)
    span = tl.max(x if WHOLE else tl.where(inside, x, float("-inf")), 1) - low
    word = (span * (1.0 / TOP)).to(tl.int32, bitcast=True)
    step = ((word + 0xFFFF) & -65536).to(tl.float32, bitcast=True)
    step = tl.where(tl.abs(span) < float("inf"), step, float("nan"))
    inverse = tl.where(step > TINY, tl.div_rn(1.0, tl.where(step > TINY, step, 1.0)), 0.0)
    return low, step, inverse


@triton.jit(do_not_specialize=["salt"])
def _quantise(
    x, codes, scales, salt, m, n,
    WHOLE: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr, NOISE: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * TILE
    left = n - first
    i = tl.arange(0, TILE // G)[:, None] * G + tl.arange(0, G)[None, :]
    inside = None if WHOLE else i < left
    v = tl.load(x + first + i, mask=inside, other=None if WHOLE else 0).to(tl.float32)
    _hold(v, inside, codes, scales, salt, first, left, m, WHOLE, TILE, BITS, G, NOISE, TINY)


@triton.jit
def _hold(
    v, inside, codes, scales, salt, first, left, m,
    WHOLE: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr, NOISE: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """A tile's elements (groups, G) in few bits; see rule 6. Where a step is NaN, 1 / step is 0, and codes are 0."""
    r = tl.arange(0, TILE // G)
    low, step, inverse = _range(v, inside, WHOLE, 2**BITS - 1, TINY)
    pair = (step.to(tl.int32, bitcast=True) & -65536) | ((low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)
    tl.store(scales + first // G + r, pair, mask=None if WHOLE else r * G < left)
    at = (v - low[:, None]) * inverse[:, None]
    if NOISE:
        i = r[:, None] * G + tl.arange(0, G)[None, :]
        h = _mix((first + i).to(tl.uint32) * 0x9E3779B1 + salt.to(tl.uint32))
        at = tl.floor(at + (h >> 8).to(tl.float32) * 5.9604644775390625e-08)
    at = tl.maximum(at if WHOLE else tl.where(inside, at, 0.0), 0.0)  # of NaN and 0 it takes the 0, and a minimum would take its other side
    if NOISE:
        at = tl.minimum(at, 2.0**BITS - 1)
    word = (at + 8388608.0).to(tl.int32, bitcast=True)
    _store_codes(codes, tl.reshape(word, (TILE,)), first, m, WHOLE, TILE, BITS)


@triton.jit
def _store_codes(codes, code, first, m, WHOLE: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr):
    """The last bits of words, whose last byte has no others. m is how many bytes all codes take. Beyond the last element they are 0."""
    if BITS == 8:
        i = tl.arange(0, TILE)
        tl.store(codes + first + i, code.to(tl.uint8), mask=None if WHOLE else i < m - first)
    else:
        even, odd = tl.split(tl.reshape(code, (TILE // 2, 2)))
        j = tl.arange(0, TILE // 2)
        tl.store(codes + first // 2 + j, (even + (odd << 4)).to(tl.uint8), mask=None if WHOLE else j < m - first // 2)


@triton.jit
def _codes(codes, first, m, WHOLE: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr):
    """The codes of TILE elements."""
    if BITS == 8:
        i = tl.arange(0, TILE)
        return tl.load(codes + first + i, mask=None if WHOLE else i < m - first, other=None if WHOLE else 0).to(tl.int32)
    j = tl.arange(0, TILE // 2)
    byte = tl.load(codes + first // 2 + j, mask=None if WHOLE else j < m - first // 2, other=None if WHOLE else 0).to(tl.int32)
    return tl.reshape(tl.join(byte & 15, byte >> 4), (TILE,))


@triton.jit
def _restored(codes, scales, first, left, m, WHOLE: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr):
    """A tile's elements (groups, G) from few bits. A code times its step has no more than 16 bits, so nothing is rounded before the sum."""
    r = tl.arange(0, TILE // G)
    pair = tl.load(scales + first // G + r, mask=None if WHOLE else r * G < left, other=None if WHOLE else 0)
    low, step = (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    code = tl.reshape(_codes(codes, first, m, WHOLE, TILE, BITS), (TILE // G, G))
    code = (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0  # see rule 6
    return tl.fma(code, step[:, None], low[:, None])


@triton.jit
def _dequantise(codes, scales, x, m, n, WHOLE: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    left = n - first
    i = tl.arange(0, TILE // G)[:, None] * G + tl.arange(0, G)[None, :]
    v = _restored(codes, scales, first, left, m, WHOLE, TILE, BITS, G)
    tl.store(x + first + i, v.to(x.dtype.element_ty), mask=None if WHOLE else i < left)


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    """Two instructions of the GPU that are right to a few units of fp32's last place; Triton's own guard them for the smallest numbers."""
    if FAST:
        e = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], tl.float32, True, 1)
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e], tl.float32, True, 1)
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _active(x, NAME: tl.constexpr, FAST: tl.constexpr):
    """f(x) and f'(x)."""
    if NAME == "gelu":
        below = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * below, below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    if NAME == "silu":
        below = _sigmoid(x, FAST)
        return x * below, below * (1.0 + x * (1.0 - below))
    inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 0.5 (1 + tanh(y)) = sigmoid(2 y)
    below = _sigmoid(inner, FAST)
    return x * below, below + x * below * (1.0 - below) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)


@triton.jit
def _gate(
    g, u, h, codes_g, scales_g, codes_u, scales_u, m, n,
    NAME: tl.constexpr, FAST: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr,
    TINY: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * TILE
    left = n - first
    i = tl.arange(0, TILE // G)[:, None] * G + tl.arange(0, G)[None, :]
    inside = None if WHOLE else i < left
    a = tl.load(g + first + i, mask=inside, other=None if WHOLE else 0).to(tl.float32)
    b = tl.load(u + first + i, mask=inside, other=None if WHOLE else 0).to(tl.float32)
    active, _ = _active(a, NAME, FAST)
    tl.store(h + first + i, (active * b).to(h.dtype.element_ty), mask=inside)
    _hold(a, inside, codes_g, scales_g, 0, first, left, m, WHOLE, TILE, BITS, G, False, TINY)
    _hold(b, inside, codes_u, scales_u, 0, first, left, m, WHOLE, TILE, BITS, G, False, TINY)


@triton.jit
def _gate_again(
    codes_g, scales_g, codes_u, scales_u, grad, one, two, m, n,
    NAME: tl.constexpr, BACK: tl.constexpr, FAST: tl.constexpr, WHOLE: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr,
    G: tl.constexpr,
):  # fmt: skip
    """From both factors in few bits: their product, into `one`; or with BACK their gradients, into `one` and `two`."""
    first = tl.program_id(0).to(tl.int64) * TILE
    left = n - first
    i = tl.arange(0, TILE // G)[:, None] * G + tl.arange(0, G)[None, :]
    inside = None if WHOLE else i < left
    a = _restored(codes_g, scales_g, first, left, m, WHOLE, TILE, BITS, G)
    b = _restored(codes_u, scales_u, first, left, m, WHOLE, TILE, BITS, G)
    active, slope = _active(a, NAME, FAST)
    if BACK:
        d = tl.load(grad + first + i, mask=inside, other=None if WHOLE else 0).to(tl.float32)
        tl.store(one + first + i, (d * b * slope).to(one.dtype.element_ty), mask=inside)
        tl.store(two + first + i, (d * active).to(two.dtype.element_ty), mask=inside)
    else:
        tl.store(one + first + i, (active * b).to(one.dtype.element_ty), mask=inside)


def _few_bits(x: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    n = x.numel()
    return x.new_empty(-(-n * bits // 8), dtype=torch.uint8), x.new_empty((-(-n // group), 2), dtype=torch.bfloat16)


def _words(held: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Codes, and each group's low and step as one word."""
    return held[0], held[1].view(torch.int32)


def gate(g: Tensor, u: Tensor, name: str, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    h, of_g, of_u = torch.empty_like(g), _few_bits(g, bits, GROUP), _few_bits(u, bits, GROUP)
    options = {"NAME": name, "FAST": FAST, "WHOLE": g.numel() % TILE == 0, "BITS": bits, "G": GROUP, "TINY": TINY}
    _through(_gate, g.numel(), g, u, h, *_words(of_g), *_words(of_u), of_g[0].numel(), **options, enable_fp_fusion=False)
    return h, *of_g, *of_u


def gate_again(
    codes_g: Tensor, scales_g: Tensor, codes_u: Tensor, scales_u: Tensor, n: int, name: str, bits: int, dtype: torch.dtype
) -> Tensor:
    h = codes_g.new_empty(n, dtype=dtype)
    _gate_through((codes_g, scales_g), (codes_u, scales_u), h, h, h, name, bits, back=False)
    return h


def gate_backward(
    grad: Tensor, codes_g: Tensor, scales_g: Tensor, codes_u: Tensor, scales_u: Tensor, name: str, bits: int
) -> tuple[Tensor, Tensor]:
    of_g, of_u = torch.empty_like(grad), torch.empty_like(grad)
    _gate_through((codes_g, scales_g), (codes_u, scales_u), grad, of_g, of_u, name, bits, back=True)
    return of_g, of_u


def _gate_through(of_g: tuple, of_u: tuple, grad: Tensor, one: Tensor, two: Tensor, name: str, bits: int, back: bool) -> None:
    n = grad.numel()
    options = {"NAME": name, "BACK": back, "FAST": FAST, "WHOLE": n % TILE == 0, "BITS": bits, "G": GROUP}
    _through(_gate_again, n, *_words(of_g), *_words(of_u), grad, one, two, of_g[0].numel(), **options)


def quantise(x: Tensor, bits: int, group: int = GROUP, seed: int | None = None) -> tuple[Tensor, Tensor]:
    n = x.numel()
    codes, scales = _few_bits(x, bits, group)
    salt = 0 if seed is None else _keep.salt(seed)
    options = {"WHOLE": n % TILE == 0, "BITS": bits, "G": group, "NOISE": seed is not None, "TINY": TINY}
    _through(_quantise, n, x, codes, scales.view(torch.int32), salt, codes.numel(), **options, enable_fp_fusion=False)
    return codes, scales


def dequantise(codes: Tensor, scales: Tensor, n: int, bits: int, group: int = GROUP, dtype: torch.dtype = torch.float32) -> Tensor:
    x = codes.new_empty(n, dtype=dtype)
    _through(_dequantise, n, codes, scales.view(torch.int32), x, codes.numel(), WHOLE=n % TILE == 0, BITS=bits, G=group)
    return x


# Codes of a derivative


@triton.jit
def _above(v, edge):
    """Counts NaN above all, as the reference does."""
    return ~(v <= edge)


@triton.jit
def _cell16(v, edges):
    """By halving. The edges are in registers, and a choice among them costs less than asking all 15."""
    e0, e1, e2, e3, e4 = tl.load(edges), tl.load(edges + 1), tl.load(edges + 2), tl.load(edges + 3), tl.load(edges + 4)
    e5, e6, e7, e8, e9 = tl.load(edges + 5), tl.load(edges + 6), tl.load(edges + 7), tl.load(edges + 8), tl.load(edges + 9)
    e10, e11, e12, e13, e14 = tl.load(edges + 10), tl.load(edges + 11), tl.load(edges + 12), tl.load(edges + 13), tl.load(edges + 14)
    a = _above(v, e7)
    b = _above(v, tl.where(a, e11, e3))
    c = _above(v, tl.where(a, tl.where(b, e13, e9), tl.where(b, e5, e1)))
    upper = tl.where(b, tl.where(c, e14, e12), tl.where(c, e10, e8))
    lower = tl.where(b, tl.where(c, e6, e4), tl.where(c, e2, e0))
    d = _above(v, tl.where(a, upper, lower))
    return tl.where(a, 8, 0) + tl.where(b, 4, 0) + tl.where(c, 2, 0) + tl.where(d, 1, 0)


@triton.jit
def _encode(x, edges, codes, m, n, TILE: tl.constexpr, BITS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    left = n - first
    i = tl.arange(0, TILE)
    v = tl.load(x + first + i, mask=i < left, other=0).to(tl.float32)
    if BITS == 4:
        cell = _cell16(v, edges)
    else:
        cell = tl.zeros((TILE,), tl.int32)
        for s in tl.static_range(8):
            up = cell + (128 >> s)
            cell = tl.where(_above(v, tl.load(edges + up - 1)), up, cell)
    _store_codes(codes, tl.where(i < left, cell, 0), first, m, False, TILE, BITS)


@triton.jit
def _scale(grad, codes, table, out, m, n, TILE: tl.constexpr, BITS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    left = n - first
    i = tl.arange(0, TILE)
    factor = tl.load(table + _codes(codes, first, m, False, TILE, BITS))
    g = tl.load(grad + first + i, mask=i < left, other=0).to(tl.float32)
    tl.store(out + first + i, (g * factor).to(out.dtype.element_ty), mask=i < left)


def encode(x: Tensor, edges: Tensor) -> Tensor:
    bits = code_bits(edges.numel() + 1)
    codes = x.new_empty(-(-x.numel() * bits // 8), dtype=torch.uint8)
    _through(_encode, x.numel(), x, edges, codes, codes.numel(), BITS=bits)
    return codes


def scale_by_code(grad: Tensor, codes: Tensor, table: Tensor) -> Tensor:
    out = torch.empty_like(grad)
    _through(_scale, grad.numel(), grad, codes, table.to(torch.float32), out, codes.numel(), BITS=code_bits(table.numel()))
    return out


# Norms, computed again from their statistics: one pass each


@triton.jit
def _normalise_channels(
    x, mean, inverse, weight, bias, residual, out, rows, columns, channels,
    LAST: tl.constexpr, JOIN: tl.constexpr, RELU: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """x as a matrix in memory: (positions, channels) if LAST, else (samples and channels, positions)."""
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    c = tl.program_id(1) * C + tl.arange(0, C)
    there = (r < rows)[:, None] & (c < columns)[None, :]
    at = r[:, None] * columns + c[None, :]
    if LAST:
        m = tl.load(mean + c, mask=c < columns, other=0).to(tl.float32)[None, :]
        i = tl.load(inverse + c, mask=c < columns, other=0).to(tl.float32)[None, :]
        w = tl.load(weight + c, mask=c < columns, other=0).to(tl.float32)[None, :]
        b = tl.load(bias + c, mask=c < columns, other=0).to(tl.float32)[None, :]
    else:
        k = r % channels
        m = tl.load(mean + k).to(tl.float32)[:, None]
        i = tl.load(inverse + k).to(tl.float32)[:, None]
        w = tl.load(weight + k).to(tl.float32)[:, None]
        b = tl.load(bias + k).to(tl.float32)[:, None]
    y = (w * (tl.load(x + at, mask=there, other=0).to(tl.float32) - m) * i + b).to(out.dtype.element_ty)  # in the order of torch's kernel
    if JOIN:
        y = (y.to(tl.float32) + tl.load(residual + at, mask=there, other=0).to(tl.float32)).to(out.dtype.element_ty)
    if RELU:
        y = tl.where(y < 0, 0.0, y)  # NaN stays
    tl.store(out + at, y, mask=there)


@triton.jit
def _rows_out(
    x, mean, inverse, weight, bias, out, B, C, xa, xb, ma, mb, rows,
    NORM: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    c = tl.arange(0, WIDTH)
    there = (r < rows)[:, None] & (c < C)[None, :]
    row, column = r // B, r % B
    y = tl.load(x + (row * xa + column * xb)[:, None] + c[None, :], mask=there, other=0)
    if NORM:
        where = row * ma + column * mb
        m = tl.load(mean + where, mask=r < rows, other=0).to(tl.float32)[:, None]
        i = tl.load(inverse + where, mask=r < rows, other=0).to(tl.float32)[:, None]
        w = tl.load(weight + c, mask=c < C, other=0).to(tl.float32)[None, :]
        b = tl.load(bias + c, mask=c < C, other=0).to(tl.float32)[None, :]
        y = (w * (i * (y.to(tl.float32) - m)) + b).to(out.dtype.element_ty)  # in the order of torch's kernel
    tl.store(out + r[:, None] * C + c[None, :], y, mask=there)


def normalise_channels(
    x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, relu: bool
) -> Tensor:
    last = not x.is_contiguous() and x.transpose(1, -1).is_contiguous() if x.ndim == 3 else _channels_last(x)
    ordinary = x.dtype in _WORDS and (last or x.is_contiguous()) and x.numel() > 0
    if not ordinary or (residual is not None and (residual.stride() != x.stride() or residual.dtype != x.dtype)):
        return reference.normalise_channels(x, mean, inverse, weight, bias, residual, relu)
    channels = x.shape[1]
    columns = channels if last else x.numel() // (x.shape[0] * channels)
    rows = x.numel() // columns
    wide = min(1024, triton.next_power_of_2(columns))
    high = max(1, 2048 // wide)
    weight = torch.ones_like(mean) if weight is None else weight
    bias = torch.zeros_like(mean) if bias is None else bias
    out = torch.empty_like(x)
    _normalise_channels[(triton.cdiv(rows, high), triton.cdiv(columns, wide))](
        x, mean, inverse, weight, bias, x if residual is None else residual, out, rows, columns, channels,
        LAST=last, JOIN=residual is not None, RELU=relu, R=high, C=wide, num_warps=4,
    )  # fmt: skip
    return out


def _channels_last(x: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.ndim in formats and not x.is_contiguous() and x.is_contiguous(memory_format=formats[x.ndim])


WIDEST = 8192  # channels of a row that a program holds


def normalise_rows(x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if x.dtype not in _WORDS or x.stride(2) != 1 or x.shape[2] > WIDEST or x.numel() == 0:
        return reference.normalise_rows(x, mean, inverse, weight, bias)
    weight = x.new_ones(x.shape[2]) if weight is None else weight
    bias = x.new_zeros(x.shape[2]) if bias is None else bias
    if mean.stride() != inverse.stride():
        mean, inverse = mean.contiguous(), inverse.contiguous()
    return _launch_rows(x, (mean, inverse, weight, bias), mean.stride())


def copy_rows(x: Tensor) -> Tensor:
    if x.stride(2) != 1 or x.shape[2] > WIDEST or x.numel() == 0:
        return reference.copy_rows(x)
    return _launch_rows(x, None, (0, 0))


def _launch_rows(x: Tensor, norm: tuple[Tensor, ...] | None, strides: tuple[int, ...]) -> Tensor:
    a, b, c = x.shape
    out = torch.empty((a, b, c), dtype=x.dtype, device=x.device)
    wide = triton.next_power_of_2(c)
    high = max(1, 2048 // wide)
    _rows_out[(triton.cdiv(a * b, high),)](
        x, *(norm or (x, x, x, x)), out, b, c, x.stride(0), x.stride(1), strides[0], strides[1], a * b,
        NORM=norm is not None, R=high, WIDTH=wide, num_warps=4,
    )  # fmt: skip
    return out


# Cross entropy


@triton.jit
def _cross_entropy(
    scores, target, picked, losses, classes, ignored, smoothing,
    SMOOTH: tl.constexpr, GRADIENT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A row a program, twice: for its sum of exponentials, relative to the largest score so far, and for its gradient."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * classes
    wanted = tl.load(target + row)
    counts = wanted != ignored
    column = tl.arange(0, TILE)
    largest, exponentials, total = -float("inf"), 0.0, 0.0
    for i in range(0, classes, TILE):
        there = i + column < classes
        x = tl.load(scores + i + column, mask=there, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(x, 0))
        base = tl.where(new == -float("inf"), 0.0, new)
        exponentials = exponentials * tl.exp(largest - base) + tl.sum(tl.exp(x - base), 0)
        largest = new
        if SMOOTH:
            total += tl.sum(tl.where(there, x, 0.0), 0)
    normal = largest + tl.log(exponentials)
    loss = normal - tl.load(picked + row).to(tl.float32)
    if SMOOTH:
        loss = (1 - smoothing) * loss + smoothing * (normal - total / classes)
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    if GRADIENT:
        for i in range(0, classes, TILE):
            there = i + column < classes
            y = tl.exp(tl.load(scores + i + column, mask=there, other=0).to(tl.float32) - normal)
            if SMOOTH:
                y -= smoothing / classes
            y = tl.where(i + column == wanted, y + smoothing - 1, y) * counts.to(tl.float32)
            tl.store(scores + i + column, y.to(scores.dtype.element_ty), mask=there)


def cross_entropy_(scores: Tensor, target: Tensor, ignored: int, smoothing: float, gradient: bool) -> Tensor:
    if scores.dtype not in _WORDS or not scores.is_contiguous() or scores.numel() == 0:
        return reference.cross_entropy_(scores, target, ignored, smoothing, gradient)
    picked = scores.gather(1, torch.where(target == ignored, 0, target)[:, None])  # a target that is no class is torch's error
    losses = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
    _cross_entropy[(len(scores),)](
        scores, target.contiguous(), picked, losses, scores.shape[1], ignored, float(smoothing),
        SMOOTH=smoothing != 0, GRADIENT=gradient, TILE=2 * TILE, num_warps=8,
    )  # fmt: skip
    return losses
