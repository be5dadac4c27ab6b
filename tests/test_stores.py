"""How entries are held: what comes back, in which layout, and in how many bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from halfback import keep, kernels
from halfback.stores import Channels, Elements, FewBits, Layout, Rows, Signs, is_dense

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STORES = [
    *(Elements(0.3, select, block) for select in keep.SELECTS for block in (None, 8, keep.BLOCK)),
    *(Channels(0.4, select) for select in keep.SELECTS),
    *(Rows(0.4, select, always) for select in keep.SELECTS for always in (0, 1)),
    *(FewBits(bits, stochastic) for bits in (4, 8) for stochastic in (False, True)),
    Signs(),
]
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(
        memory_format={4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    ),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "sliced": lambda x: torch.stack([x, x], -1)[..., 1],
    "expanded": lambda x: x[:1].expand(x.shape) if x.shape[0] else x,
}
# (shape, channel axis); batch 0, one element and one channel among them
SHAPES = [
    *[((2, 9, 12), -1), ((3, 8, 5, 6), 1), ((2, 4, 3, 5, 2), 1), ((7, 5), -1)],
    *[((0, 5), -1), ((0, 4, 3, 3), 1), ((1,), -1), ((13,), -1), ((4, 1), -1)],
]

name = repr


def drawn(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def nbytes(held):
    return sum(t.untyped_storage().nbytes() for t in held)


@pytest.mark.parametrize("store", STORES, ids=name)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bytes_size_strides_and_dtype_are_as_promised(store, dtype):
    for shape, axis in SHAPES:
        for lay in LAYOUTS.values():
            x = lay(drawn(shape, dtype))
            layout = Layout.of(x)
            held = store.compress(x, axis, seed=3)
            x_hat = store.restore(held, layout)
            assert nbytes(held) == store.bytes(layout, axis)
            assert (x_hat.shape, x_hat.dtype, x_hat.stride()) == (x.shape, x.dtype, layout.stride)
            assert not is_dense(x) or layout.stride == x.stride()


@pytest.mark.parametrize("store", STORES, ids=name)
def test_no_shape_depends_on_data(store):
    with FakeTensorMode():
        for shape, axis in SHAPES:
            x = torch.empty(shape, dtype=torch.bfloat16)
            layout = Layout.of(x)
            held = store.compress(x, axis, seed=3)
            assert sum(t.nbytes for t in held) == store.bytes(layout, axis)
            assert store.restore(held, layout).shape == x.shape


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(1, 100), st.sampled_from(STORES[:10]), st.data())
def test_any_shape_any_axis_any_keep(shape, percent, store, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    store = type(store)(percent / 100, store.select)
    x = drawn(shape, torch.bfloat16)
    held = store.compress(x, axis, seed=percent)
    assert nbytes(held) == store.bytes(Layout.of(x), axis)
    x_hat = store.restore(held, Layout.of(x))
    kept = x_hat != 0
    if store.select == "largest":
        assert torch.equal(x_hat, torch.where(kept, x, 0))
    if percent == 100:
        assert torch.equal(x_hat, x)


@pytest.mark.parametrize("lay", LAYOUTS, ids=str)
def test_elements_are_kept_where_they_stand(lay):
    x = LAYOUTS[lay](drawn((3, 8, 5, 6)))
    store = Elements(0.25, block=None)
    x_hat = store.restore(store.compress(x), Layout.of(x))
    threshold = x.abs().flatten().topk(180).values[-1]
    assert torch.equal(x_hat != 0, x.abs() >= threshold) or lay == "expanded"  # there all tie threefold
    assert torch.equal(x_hat, torch.where(x_hat != 0, x, 0))


@pytest.mark.parametrize("lay", LAYOUTS, ids=str)
@pytest.mark.parametrize("select", keep.SELECTS)
def test_channels_are_kept_where_they_stand(lay, select):
    for shape, axis in SHAPES:
        x, store = LAYOUTS[lay](drawn(shape)), Channels(0.4, select)
        values, index = store.compress(x, axis, seed=3)
        assert torch.equal(index, keep.channels(x, 0.4, select, axis, seed=3))
        scale = shape[axis] / len(index) if select == "random" else 1
        expected = torch.zeros(shape).index_copy(axis, index.long(), x.index_select(axis, index) * scale)
        assert torch.equal(store.restore((values, index), Layout.of(x)), expected)


def test_channels_are_held_in_the_order_of_memory():
    x = drawn((3, 8, 5, 6))
    assert Channels(0.5).compress(x, 1)[0].shape == (3, 4, 30)
    assert Channels(0.5).compress(x.to(memory_format=torch.channels_last), 1)[0].shape == (90, 4, 1)
    assert Channels(0.5).compress(x, -1)[0].shape == (120, 3, 1)


def test_a_dense_layout_is_not_copied():
    x = drawn((2, 3, 4, 5)).to(memory_format=torch.channels_last)
    layout = Layout.of(x)
    assert layout.of_flat(x.as_strided((120,), (1,))).data_ptr() == x.data_ptr()
    assert torch.equal(layout.of_flat(x.as_strided((120,), (1,))), x)
    assert [is_dense(LAYOUTS[k](drawn((2, 3, 4, 5)))) for k in LAYOUTS] == [True, True, True, False, False]


def test_half_of_the_elements_in_bf16_take_at_most_057():
    x = drawn((64, 384), torch.bfloat16)
    assert nbytes(Elements(0.5).compress(x)) <= 0.57 * x.nbytes
    assert nbytes(FewBits(4).compress(x)) <= 0.29 * x.nbytes
    assert nbytes(Signs().compress(x)) * 16 == x.nbytes


@pytest.mark.parametrize(
    "store", [Elements(0.3, "random", None), Elements(0.3, "random", 16), Channels(0.4, "random"), Rows(0.4, "random", 1)], ids=name
)
def test_random_entries_are_unbiased(store):
    x = drawn((3, 7, 5), torch.float64) + 2
    layout = Layout.of(x)
    mean = sum(store.restore(store.compress(x, -1, seed), layout) for seed in range(4000)) / 4000
    assert ((mean - x) / x).abs().max() < 0.15  # a deviation is 0.025


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("n", "block"), [(0, 8), (5, 8), (8, 8), (100, None), (96, 32), (100, 32), (100, 50), (104, 7), (3000, keep.BLOCK)]
)
def test_random_elements_are_those_that_keep_says_divided_by_their_chance(n, block, dtype):
    x, store = drawn((n,), dtype), Elements(0.3, "random", block)
    mask = keep.elements(x, 0.3, "random", block, seed=4)
    values, bits = store.compress(x, -1, seed=4)
    chance = torch.cat([torch.full((len(part),), len(part) / max(1, int(part.sum()))) for part in mask.split(block or max(1, n))])
    assert torch.equal(bits, kernels.pack_bits(mask))
    assert torch.allclose(values.double(), (x * chance.to(torch.float64))[mask].double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_sums_of_random_elements_have_the_mean_and_variance_of_blocks_drawn_by_themselves():
    x, store, seeds = drawn((100,), torch.float64) + torch.arange(100) % 8, Elements(0.25, "random", 16), 6000
    sums = torch.stack([store.restore(store.compress(x, -1, seed), Layout.of(x)).sum() for seed in range(seeds)])
    parts = [(part, len(part), keep.count(0.25, len(part))) for part in x.split(16)]
    variance = sum(size**2 * (1 - k / size) / k * part.var() for part, size, k in parts)
    assert abs(sums.mean() - x.sum()) < 4 * (variance / seeds).sqrt()
    assert abs(sums.var() / variance - 1) < 0.1  # a deviation is 0.02 of normal sums


def test_rounding_by_noise_is_unbiased():
    x = drawn((130,), torch.float64)
    layout, store = Layout.of(x), FewBits(4, stochastic=True)
    drawn_many = torch.stack([store.restore(store.compress(x, -1, seed), layout) for seed in range(2000)])
    step = 2 * x.abs().max() / 15
    assert (drawn_many.mean(0) - x).abs().max() < 5 * step / 2000**0.5
    assert ((drawn_many - x).abs() <= step).all()
    assert not torch.equal(drawn_many[0], drawn_many[1])


def test_class_tokens_come_back_as_they_were():
    x, store = drawn((4, 10, 3)), Rows(0.5, "random", always=1)
    x_hat = store.restore(store.compress(x, -1, seed=1), Layout.of(x))
    assert torch.equal(x_hat[:, 0], x[:, 0])
    rest = x_hat[:, 1:][x_hat[:, 1:].any(-1)]
    assert len(rest) == 16
    assert torch.allclose(x_hat[x_hat.any(-1)][:, None].sum(), (torch.where(x_hat != 0, x, 0)[:, 1:] * 36 / 16).sum() + x[:, 0].sum())


@pytest.mark.parametrize(("shape", "axis"), [((4, 6, 8), -1), ((2, 8, 3, 4), 1)])
@pytest.mark.parametrize("select", keep.SELECTS)
def test_rows_give_the_weight_gradient_without_densifying(shape, axis, select):
    x, store = drawn(shape, torch.float64), Rows(0.5, select)
    held = store.compress(x, axis, seed=2)
    values, index = store.rows(held, Layout.of(x))
    dy = drawn((24, 5), torch.float64, seed=1)
    dense = store.restore(held, Layout.of(x)).movedim(axis, -1).reshape(24, 8)
    assert values.shape == (len(index), 8)
    assert torch.allclose(dy[index].T @ values, dy.T @ dense)


def test_signs_are_all_that_relu_needs():
    x = torch.tensor([1.0, 0.0, -0.0, -2.0, float("nan"), float("inf"), 1e-45])
    store = Signs()
    assert store.restore(store.compress(x), Layout.of(x)).tolist() == [1, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_few_bits_are_within_half_a_step(bits, dtype):
    x = (drawn((3, 200)) + 5).to(dtype)
    store = FewBits(bits)
    x_hat = store.restore(store.compress(x), Layout.of(x)).double()
    groups = torch.cat([x.double().flatten(), x.double().flatten()[-1:].expand(-600 % 64)]).view(-1, 64)
    low = groups.amin(1)
    span = groups.amax(1) - low + low.abs() * 2**-7  # low is rounded down to bf16
    half = (span / (2**bits - 1) * (1 + 2**-7) / 2)[:, None].expand(-1, 64).flatten()[:600].view(3, 200)
    assert ((x_hat - x.double()).abs() <= half + x.double().abs() * torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_constants_and_zeros_come_back_exactly(bits):
    store = FewBits(bits)
    for value in (0.0, 1.0, -0.5, 1e-40, -3e38):
        x = torch.full((100,), value)
        assert torch.allclose(store.restore(store.compress(x), Layout.of(x)), x, rtol=2**-7, atol=1e-38)


@pytest.mark.parametrize("bad", [0x7FC00000, 0x7F800000, -0x800000, 0x7FFFFFFF], ids=["nan", "inf", "-inf", "the GPU's nan"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_what_is_not_finite_spoils_its_group_and_no_other(bad, stochastic):
    x = drawn((192,))
    x.view(torch.int32)[70] = bad
    store = FewBits(4, stochastic)
    finite = store.restore(store.compress(x), Layout.of(x)).isfinite().view(3, 64)
    assert finite[0].all()
    assert finite[2].all()
    assert not finite[1].all()


@pytest.mark.parametrize("store", [s for s in STORES if isinstance(s, (Elements, Channels, Rows)) and s.select == "largest"], ids=name)
def test_nan_survives_where_the_largest_are_kept(store):
    x = drawn((4, 6, 8))
    x[1, 2, 3] = float("nan")
    assert store.restore(store.compress(x), Layout.of(x))[1, 2, 3].isnan()


@pytest.mark.parametrize("store", STORES, ids=name)
def test_the_same_seed_holds_the_same_and_the_users_generator_is_untouched(store):
    x, state = drawn((4, 6, 8)), torch.get_rng_state()
    for a, b in zip(store.compress(x, -1, 7), store.compress(x, -1, 7), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("store", STORES, ids=name)
def test_nothing_held_is_the_input_or_remembers_its_graph(store):
    x = drawn((4, 6, 8)).requires_grad_()
    for held in store.compress(x, -1, 0):
        assert held.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert not held.requires_grad
