"""DropIT: dx and db exact, dW from the restored input, for every layer, selection and layout; and what a user may get wrong."""

from __future__ import annotations

import copy
import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
import zoo
from test_lean import gradients, resnet, worst
from torch import nn
from torch._dynamo.utils import counters

import halfback as hb
from halfback import codes
from halfback.stores import Layout
from halfback.watch import seed_of


class Product(nn.Module):
    """A weight that is used by matmul or addmm, as transformers' Conv1D does."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.weight, self.bias = nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        if self.how == "addmm":
            return torch.addmm(self.bias, x.reshape(-1, 12), self.weight).view(*x.shape[:-1], 8)
        return x @ self.weight + self.bias


def conv(n, **kwargs):
    return [nn.Conv1d, nn.Conv2d, nn.Conv3d][n - 1](12, 8, kwargs.pop("kernel", 3), **kwargs)


IMAGE = (2, 12, 9, 8)
LAYERS = {
    "linear, rows": (lambda: nn.Linear(12, 8), (24, 12)),
    "linear, tokens": (lambda: nn.Linear(12, 8), (3, 10, 12)),
    "linear, no bias": (lambda: nn.Linear(12, 8, bias=False), (3, 10, 12)),
    "addmm": (lambda: Product("addmm"), (3, 10, 12)),
    "matmul": (lambda: Product("matmul"), (3, 10, 12)),
    "conv1d": (lambda: conv(1), (3, 12, 20)),
    "conv2d": (lambda: conv(2), IMAGE),
    "conv2d, strided and padded": (lambda: conv(2, stride=2, padding=1), IMAGE),
    "conv2d, same": (lambda: conv(2, padding="same"), IMAGE),
    "conv2d, dilated": (lambda: conv(2, dilation=2), IMAGE),
    "conv2d, groups": (lambda: conv(2, groups=4, bias=False), IMAGE),
    "conv2d, pointwise": (lambda: conv(2, kernel=1), IMAGE),
    "conv3d": (lambda: conv(3, padding=1), (2, 12, 4, 5, 4)),
}
# padded outside the layer: what is stored is the padded input, which no other layer sees
PADDED = {mode: (lambda mode=mode: conv(2, padding=1, padding_mode=mode), IMAGE) for mode in ("reflect", "circular", "replicate")}
METHODS = {
    "largest": hb.DropIT(0.3, block=64, layers="all"),
    "flat": hb.DropIT(0.3, block=None, layers="all"),
    "random": hb.DropIT(0.3, "random", layers="all"),
    "channels": hb.DropIT(0.3, of="channels", layers="all"),
    "random channels": hb.DropIT(0.3, "random", of="channels", layers="all"),
    "rows": hb.DropIT(0.3, of="rows", layers="all"),
    "random rows": hb.DropIT(0.4, "random", of="rows", layers="all"),
    "4 bits": hb.DropIT(bits=4, layers="all"),
    "8 bits": hb.DropIT(bits=8, layers="all"),
    "4 bits, stochastic": hb.DropIT(bits=4, stochastic=True, layers="all"),
}


def layout_of(shape, layout):
    torch.manual_seed(1)
    x = torch.randn(shape, dtype=torch.float64)
    if layout == "channels_last" and x.ndim in (4, 5):
        return x.to(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}[x.ndim])
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        return torch.randn(*shape[:-1], shape[-1] + 3, dtype=torch.float64)[..., : shape[-1]]
    return x


def run_in(model, layer, x):
    """The layer's gradients with the model called, so that its methods work."""
    model.zero_grad()
    x.grad = None
    out = model(x)
    torch.manual_seed(2)
    out.backward(torch.randn(out.shape, dtype=out.dtype))
    return out.detach(), x.grad, layer.weight.grad, layer.bias.grad if layer.bias is not None else None


def run(layer, x):
    return run_in(layer, layer, x)


def make(name):
    torch.manual_seed(0)
    build, shape = {**LAYERS, **PADDED}[name]
    model = nn.Sequential(build().double()).train()
    return model, model[0], shape


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "sliced"])
@pytest.mark.parametrize("select", METHODS)
@pytest.mark.parametrize("name", LAYERS)
def test_weight_grad_equals_autograd_on_the_restored_input(name, select, layout):
    model, layer, shape = make(name)
    x = layout_of(shape, layout).requires_grad_()
    exact = run(layer, x)
    method = METHODS[select]
    report = hb.apply_(model, method)
    out, dx, dw, db = run_in(model, layer, x)
    axis = 1 if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) else -1
    store = method.store(grouped=getattr(layer, "groups", 1) > 1)
    whole = x.detach() if axis == 1 or name == "linear, rows" else x.detach().contiguous()
    if name in ("addmm", "matmul"):  # which fold the leading axes, so that no token is known to be a first one
        whole = whole.view(-1, 12)
    if store.bytes(Layout.of(whole), axis) >= whole.nbytes:
        restored = x.detach()
    else:
        assert report.after < report.before, report.table()
        restored = store.restore(store.compress(whole, axis, seed_of(0, 1)), Layout.of(whole)).reshape(x.shape)
    hb.remove_(model)
    _, _, wanted, _ = run(layer, restored.clone().requires_grad_())
    assert torch.equal(out, exact[0])
    assert torch.allclose(dx, exact[1], rtol=0, atol=1e-10)
    assert db is None or torch.allclose(db, exact[3], rtol=0, atol=1e-10)
    assert torch.allclose(dw, wanted, rtol=0, atol=1e-10)
    assert (restored == x).all() or not torch.allclose(dw, exact[2], rtol=0, atol=1e-6), "nothing was approximated"


@pytest.mark.parametrize("mode", PADDED)
def test_padding_modes(mode):
    model, layer, shape = make(mode)
    x = layout_of(shape, "contiguous").requires_grad_()
    exact = run(layer, x)
    hb.apply_(model, METHODS["largest"])
    out, dx, dw, db = run_in(model, layer, x)
    assert torch.equal(out, exact[0]) and torch.allclose(dx, exact[1], rtol=0, atol=1e-10) and torch.allclose(db, exact[3])
    padded = F.pad(x.detach(), layer._reversed_padding_repeated_twice, mode=mode)
    store = METHODS["largest"].store()
    restored = store.restore(store.compress(padded, 1), Layout.of(padded))
    weight = layer.weight.detach().clone().requires_grad_()
    again = F.conv2d(restored, weight, layer.bias)
    torch.manual_seed(2)
    again.backward(torch.randn(again.shape, dtype=again.dtype))
    assert torch.allclose(dw, weight.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["linear, tokens", "conv2d, strided and padded"])
@pytest.mark.parametrize("select", ["largest", "rows", "4 bits"])
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)))
def test_only_the_gradients_that_are_needed_are_computed(name, select, needs):
    model, layer, shape = make(name)
    x = layout_of(shape, "contiguous").requires_grad_(needs[0])
    layer.weight.requires_grad_(needs[1])
    layer.bias.requires_grad_(needs[2])
    if not any(needs):
        hb.apply_(model, METHODS[select])
        assert not model(x).requires_grad
        return
    exact = run(layer, x)
    hb.apply_(model, METHODS[select])
    found = run_in(model, layer, x)
    assert [g is not None for g in found[1:]] == list(needs)
    for place in (1, 3):
        assert not needs[place - 1] or torch.allclose(found[place], exact[place], rtol=0, atol=1e-10)
    if not needs[1]:
        assert hb.held(model, lambda: model(x).sum()) <= 8 * x.numel(), "a frozen weight needs no input"


@pytest.mark.parametrize("name", LAYERS)
def test_keeping_everything_is_bitwise_the_plain_layer(name):
    model, layer, shape = make(name)
    x = layout_of(shape, "contiguous").requires_grad_()
    exact = run(layer, x)
    hb.apply_(model, hb.DropIT(keep=1, layers="all"))
    assert all(a is None or torch.equal(a, b) for a, b in zip(exact, run_in(model, layer, x), strict=True))


def test_transformers_conv1d():
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model, x = nn.Sequential(Conv1D(8, 12)).double().train(), torch.randn(3, 10, 12, dtype=torch.float64, requires_grad=True)
    exact = run(model[0], x)
    hb.apply_(model, METHODS["largest"])
    out, dx, dw, db = run_in(model, model[0], x)
    store = METHODS["largest"].store()
    restored = store.restore(store.compress(x.detach()), Layout.of(x.detach()))
    torch.manual_seed(2)
    dy = torch.randn(out.shape, dtype=out.dtype).reshape(-1, 8)
    assert torch.equal(out, exact[0]) and torch.equal(dx, exact[1]) and torch.equal(db, exact[3])
    assert torch.allclose(dw, restored.reshape(-1, 12).T @ dy, rtol=0, atol=1e-10)


# Who else holds it


class MLP(nn.Module):
    def __init__(self, act, d=64):
        super().__init__()
        self.first, self.a, self.b, self.act = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d), act

    def forward(self, x):
        return self.b(self.act(self.a(self.act(self.first(x)))))


@pytest.mark.parametrize(("act", "most"), [(nn.ReLU(), 0.60), (nn.ReLU(inplace=True), 0.60), (nn.LeakyReLU(0.1), 0.60)])
def test_a_relu_before_a_layer_keeps_one_bit_so_that_the_saving_is_real(act, most):
    torch.manual_seed(0)
    model, x = MLP(act).train(), torch.randn(256, 64)
    before = hb.held(model, lambda: model(x).sum())
    exact = [p.grad.clone() for p in grads(model, x)]
    report = hb.apply_(model, hb.DropIT(0.1))
    assert hb.held(model, lambda: model(x).sum()) <= most * before
    found = [p.grad for p in grads(model, x)]
    for (name, _), a, b in zip(model.named_parameters(), found, exact, strict=True):
        if "bias" in name or "first" in name:  # the flowing gradient is exact, and the first layer is left alone
            assert torch.equal(a, b), name
        else:
            assert not torch.equal(a, b), name
    assert report.approximated == ["a", "b"]


def grads(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return list(model.parameters())


def test_a_tensor_that_somebody_else_holds_is_given_to_the_layer_exactly():
    class Shared(nn.Module):
        def __init__(self, after):
            super().__init__()
            self.w, self.after = nn.Linear(64, 64), after

        def forward(self, x):
            h = x * 1
            if self.after:
                return self.w(h) + h * h
            return h * h + self.w(h)

    for after in (False, True):
        torch.manual_seed(0)
        model, x = Shared(after).train(), torch.randn(128, 64, requires_grad=True)
        before = hb.held(model, lambda m=model, x=x: m(x).sum())
        exact = [p.grad.clone() for p in grads(model, x)]
        report = hb.apply_(model, hb.DropIT(0.1, layers="all"))
        assert all(torch.equal(p.grad, e) for p, e in zip(grads(model, x), exact, strict=True))
        assert hb.held(model, lambda m=model, x=x: m(x).sum()) == before == report.before == report.after
        assert "held for" in report.table()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keep", [0.01, 0.1, 0.5, 0.9, 0.97, 0.999])
@pytest.mark.parametrize("of", ["elements", "channels", "rows"])
def test_never_above_plain(keep, dtype, of):
    torch.manual_seed(0)
    model, x = MLP(nn.ReLU()).to(dtype).train(), torch.randn(4, 16, 64, dtype=dtype)
    before = hb.held(model, lambda: model(x).sum())
    hb.apply_(model, hb.DropIT(keep, of=of, layers="all"))
    assert hb.held(model, lambda: model(x).sum()) <= before
    grads(model, x)


@pytest.mark.parametrize("size", [(0, 64), (1, 64)])
def test_an_empty_batch_and_a_single_row(size):
    model = MLP(nn.ReLU()).train()
    for method in METHODS.values():
        hb.apply_(model, method)
        grads(model, torch.randn(size))
        hb.remove_(model)


def test_nan_reaches_the_weight_as_in_plain_training():
    model, x = MLP(nn.ReLU()).train(), torch.randn(32, 64)
    x[3, 5] = float("nan")
    for method in (hb.DropIT(0.1), hb.DropIT(bits=4)):
        hb.apply_(model, method)
        assert all(p.grad.isnan().any() for p in grads(model, x))
        hb.remove_(model)


def test_exact_switches_the_approximation_off_for_a_while():
    torch.manual_seed(0)
    model, x = MLP(nn.GELU()).train(), torch.randn(32, 64)
    exact = [p.grad.clone() for p in grads(model, x)]
    hb.apply_(model, hb.DropIT(0.1, activation_bits=4))
    with hb.exact(model):
        assert all(torch.equal(p.grad, e) for p, e in zip(grads(model, x), exact, strict=True))
    assert not torch.equal(grads(model, x)[0].grad, exact[0])


def test_train_and_eval_flipped_before_backward():
    torch.manual_seed(0)
    model, x = MLP(nn.ReLU()).train(), torch.randn(32, 64)
    hb.apply_(model, hb.DropIT(0.1))
    wanted = [p.grad.clone() for p in grads(model, x)]
    model.zero_grad()
    loss = model(x).square().sum()
    model.eval()
    loss.backward()
    assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), wanted, strict=True))


def test_double_backward_is_refused():
    model, x = MLP(nn.ReLU()).train(), torch.randn(32, 64, requires_grad=True)
    hb.apply_(model, hb.DropIT(0.1))
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(model(x).sum(), [model.b.weight], create_graph=True)


def test_random_selections_are_unbiased():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 8)).double().train(), torch.randn(4, 16, 32, dtype=torch.float64)
    exact = grads(model, x)[0].grad.clone()
    for method in ("random", "random channels", "4 bits, stochastic"):
        hb.apply_(model, METHODS[method])
        mean = sum(grads(model, x)[0].grad for _ in range(400)) / 400
        assert (mean - exact).norm() < 0.12 * exact.norm(), method
        hb.remove_(model)


def test_the_users_random_numbers_are_not_touched_and_runs_repeat():
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model, x = MLP(nn.ReLU()).train(), torch.randn(32, 64)
        hb.apply_(model, hb.DropIT(0.2, "random"))
        state = torch.get_rng_state()
        first, second = ([p.grad.clone() for p in grads(model, x)] for _ in range(2))
        assert torch.equal(torch.get_rng_state(), state)
        assert not torch.equal(first[2], second[2]), "each step draws its own"
        runs.append([*first, *second])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


# activation_bits


@pytest.mark.parametrize(("act", "name"), [(nn.GELU(), "gelu"), (nn.GELU("tanh"), "gelu_tanh"), (nn.SiLU(), "silu")])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_coded_activation_multiplies_by_its_table(act, name, bits):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), act).double().train(), torch.randn(128, 64, dtype=torch.float64, requires_grad=True)
    exact = act(x)
    hb.apply_(model, hb.DropIT(activation_bits=bits))
    z = model[0](x)
    out = model(x)
    assert torch.equal(out, act(z)) and exact.shape == out.shape
    out.sum().backward()
    edges, table = codes.table(name, bits)
    wanted = table.double()[torch.bucketize(z.detach().float(), edges)] @ model[0].weight.detach()
    assert torch.allclose(x.grad, wanted, atol=1e-6)


def test_the_error_of_a_coded_activation_grows_with_depth_and_shrinks_with_bits():
    torch.manual_seed(0)
    batch, blocks = torch.randn(16, 64), 12

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(blocks)
            )

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

    model = Deep().train()
    exact = [p.grad.clone() for p in grads(model, batch)]
    errors = {}
    for bits in (4, 8):
        hb.apply_(model, hb.DropIT(0.99, bits=8, activation_bits=bits))
        found = [p.grad for p in grads(model, batch)]
        norms = [i for i, (n, _) in enumerate(model.named_parameters()) if n.endswith(".0.bias")]  # of norms: the flowing gradient
        errors[bits] = [((found[i] - exact[i]).norm() / exact[i].norm()).item() for i in norms]
        hb.remove_(model)
    assert errors[4][0] > errors[4][-1], "the first block has the errors of all"
    assert errors[4][0] < 0.2 and errors[8][0] < 0.1 * errors[4][0]


# Models


def test_a_resnet_can_have_every_input_exactly():
    """Its inputs come from what batch norms hold; the classifier's is too small to be worth an approximation."""
    model, batch = resnet(8)
    loss, wanted = gradients(copy.deepcopy(model), batch)
    report = hb.apply_(model, hb.DropIT(0.2))
    mine, found = gradients(model, batch)
    assert torch.equal(mine, loss) and worst(found, wanted) < 1e-5
    assert "in 0 of" in str(report) and report.after < 0.65 * report.before


@pytest.mark.parametrize("method", ["dropit(keep=0.2)", "dropit(keep=0.2, of='channels')", "dropit(bits=4)"])
def test_a_network_without_norms_keeps_its_flowing_gradient(method):
    import torchvision

    torch.manual_seed(0)
    model, x = torchvision.models.vgg11(num_classes=5, dropout=0.0, init_weights=False).train(), torch.randn(2, 3, 32, 32)
    before = hb.held(model, lambda: zoo.loss(model, (x,)))
    loss, wanted = gradients(copy.deepcopy(model), (x,))
    report = hb.apply_(model, *hb.parse(method))
    mine, found = gradients(model, (x,))
    assert torch.equal(mine, loss)
    exact = [k for k in wanted if k.endswith("bias") or k == "features.0.weight"]
    assert worst({k: found[k] for k in exact}, {k: wanted[k] for k in exact}) == 0
    rough = [k for k in wanted if k.endswith("weight") and k.startswith("features") and k != "features.0.weight"]
    assert all(not torch.equal(found[k], wanted[k]) for k in rough) and len(rough) > 5
    assert hb.held(model, lambda: zoo.loss(model, (x,))) < 0.75 * before
    assert all(k.removesuffix(".weight") in [r.layer for r in report.rows if r.stored] for k in rough)


@pytest.mark.parametrize("name", ["vit", "llama"])
def test_beside_sbp_the_kept_positions_are_stored(name):
    model, batch = zoo.make(name, layers=3)
    hb.apply_(model, hb.SBP(0.5, layers="all"), hb.DropIT(0.2, activation_bits=4))
    loss, _ = gradients(model, batch)
    hb.remove_(model)
    assert torch.allclose(loss, gradients(model, batch)[0], rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *itertools.product(
            ["tv_vit", "llama"],
            ["lean", "dropit(keep=0.2, activation_bits=4)", "dropit(bits=4, activation_bits=4)", "sbp(layers='all')+lean"],
        ),
        ("tv_vit", "dropit(keep=0.2, of='rows', exact_first=False)"),
    ],
)
def test_compiled_gradients_equal_eager_ones(name, method):
    torch._dynamo.reset()
    counters.clear()
    model, batch = zoo.make(name, layers=2)
    hb.apply_(model, *hb.parse(method))
    eager = copy.deepcopy(model)
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        for m, f in ((model, fast), (eager, eager)):
            m.zero_grad()
            zoo.loss(f, batch).backward()
        pairs = [{k: p.grad for k, p in m.named_parameters() if p.grad is not None} for m in (model, eager)]
        assert worst(*pairs) < 1e-5
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_mlp_with_relu_is_stored_too():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = MLP(nn.ReLU()).train(), torch.randn(256, 64)
    before = hb.held(model, lambda: torch.compile(model, backend="aot_eager", fullgraph=True)(x).sum())
    hb.apply_(model, hb.DropIT(0.1))
    eager = [p.grad.clone() for p in grads(copy.deepcopy(model), x)]
    torch._dynamo.reset()
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert hb.held(model, lambda: fast(x).sum()) < 0.7 * before
    model.zero_grad()
    fast(x).square().sum().backward()
    assert all(torch.allclose(p.grad, e, atol=1e-4) for p, e in zip(model.parameters(), eager, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", [hb.DropIT(0.1, "random"), hb.DropIT(bits=4, stochastic=True)])
def test_compiled_random_selections_are_exact_and_the_report_says_so(method):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = MLP(nn.ReLU()).train(), torch.randn(256, 64)
    wanted = [p.grad.clone() for p in grads(copy.deepcopy(model), x)]
    report = hb.apply_(model, method)
    torch.compile(model, backend="eager", fullgraph=True)(x).square().sum().backward()
    assert all(torch.allclose(p.grad, w, atol=1e-4) for p, w in zip(model.parameters(), wanted, strict=True))
    assert "random selections and roundings are left exact" in str(report)


# What a user may get wrong


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: hb.DropIT(0), r"DropIT\(\): keep=0 must be a number in \(0, 1\]: the share of entries"),
        (lambda: hb.DropIT(1.5), "keep=1.5"),
        (lambda: hb.DropIT(select="biggest"), "select='biggest' is none of largest, random"),
        (lambda: hb.DropIT(of="pixels"), "of='pixels' is none of elements, channels, rows"),
        (lambda: hb.DropIT(block=0), "block=0 must be a positive number of elements"),
        (lambda: hb.DropIT(bits=3), "bits=3 is none of 4, 8, None"),
        (lambda: hb.DropIT(activation_bits=2), "activation_bits=2 is none of 4, 8, None"),
        (lambda: hb.DropIT(lean="no"), "lean='no' must be True or False"),
        (lambda: hb.DropIT(bits=4, of="rows"), "bits=4 keeps the whole input"),
        (lambda: hb.DropIT(stochastic=True), "give one of them"),
    ],
)
def test_bad_values_are_named(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ("bn1", r"layers='bn1' is a BatchNorm2d, which DropIT cannot rewrite"),
        (["layer9.*"], r"layers='layer9\.\*' matches none of the \d+ layers of ResNet: conv1 \.\.\. fc"),
        (lambda name, module: False, "chose none of"),
    ],
)
def test_layers_that_cannot_be_are_named_and_the_model_is_left_alone(layers, says):
    model, _ = resnet()
    before = {n: dict(m.__dict__) for n, m in model.named_modules()}
    with pytest.raises(ValueError, match=says):
        hb.apply_(model, hb.DropIT(layers=layers))
    assert all(m.__dict__.keys() == before[n].keys() for n, m in model.named_modules())


def test_a_model_without_layers_is_an_error():
    with pytest.raises(ValueError, match="has no layer with a weight matrix"):
        hb.apply_(nn.Sequential(nn.LayerNorm(8)), hb.DropIT())


def test_layers_are_chosen_by_name_pattern_or_function():
    model, _ = resnet()
    every = hb.apply_(model, hb.DropIT(layers="all")).approximated
    assert every[0] == "conv1" and "fc" in every
    for layers, names in (("fc", ["fc"]), (["layer1.*"], [n for n in every if n.startswith("layer1")]), ("all but first", every[1:])):
        hb.remove_(model)
        assert hb.apply_(model, hb.DropIT(layers=layers)).approximated == names


def test_text_and_json_round_trips():
    from halfback.methods import from_json

    for method in (*METHODS.values(), hb.Lean(), hb.DropIT(0.2, activation_bits=4)):
        assert hb.parse(str(method)) == (method,)
        assert from_json(method.to_json()) == method


class Normed(nn.Module):
    """A layer whose input can be computed from what the norm holds: DropIT has nothing to approximate there, unless it is told to."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        self.read = torch.relu(self.norm(self.conv1(x)))
        return self.conv2(self.read)


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.weight = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

    def forward(self, x):
        return F.linear(self.first(x), self.weight)


def test_a_weight_with_one_axis():
    torch.manual_seed(0)
    model, x = Scores(), torch.randn(64, 6)
    plain = model(x)
    hb.apply_(model, hb.DropIT(0.2))
    out = model(x)
    assert torch.equal(out, plain)
    out.sum().backward()
    assert model.weight.grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_every_filter_of_a_depthwise_convolution_learns(compiled):
    """The largest entries lie in the channels with the largest values; filters of the others would get no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 4, 1))
    x = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        model[0].weight *= torch.logspace(-2, 1, 8)[:, None, None, None]
        model[0].bias.zero_()

    def by_channel(method=None):
        if method is not None:
            hb.apply_(model, method)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        model.zero_grad()
        run(x).pow(2).sum().backward()
        found = model[2].weight.grad.flatten(1).clone()
        hb.remove_(model)
        torch._dynamo.reset()
        return found

    exact = by_channel()
    assert F.cosine_similarity(by_channel(hb.DropIT(0.1)), exact).min() > 0.98
    paper = by_channel(hb.DropIT(0.1, exact_first=False))
    assert (paper.norm(dim=1) < 0.05 * exact.norm(dim=1)).sum() >= 3, "nothing would have been lost"


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("block", [64, None])
def test_exact_first_can_be_turned_off(block, compiled):
    torch.manual_seed(0)
    model, x = Normed().double(), torch.randn(4, 3, 6, 6, dtype=torch.float64)
    up = torch.randn(4, 8, 6, 6, dtype=torch.float64)

    def grads(*methods):
        torch._dynamo.reset()
        own = copy.deepcopy(model)
        if methods:
            hb.apply_(own, *methods)
        out = (torch.compile(own, backend="aot_eager") if compiled else own)(x)
        (out * up).sum().backward()
        return {n: p.grad for n, p in own.named_parameters()}

    plain, default = grads(), grads(hb.DropIT(keep=0.2, block=block))
    paper = grads(hb.DropIT(keep=0.2, block=block, exact_first=False))
    for name, wanted in plain.items():
        torch.testing.assert_close(default[name], wanted, rtol=0, atol=1e-12)
        if name != "conv2.weight":
            torch.testing.assert_close(paper[name], wanted, rtol=0, atol=1e-12)
    plainly = copy.deepcopy(model)
    plainly(x)
    read = plainly.read.detach()
    store = hb.DropIT(keep=0.2, block=block).store()
    restored = store.restore(store.compress(read, 1, 0), Layout.of(read))
    assert (restored == 0).sum() > (read == 0).sum()
    wanted = torch.nn.grad.conv2d_weight(restored, model.conv2.weight.shape, up, padding=1)
    torch.testing.assert_close(paper["conv2.weight"], wanted, rtol=0, atol=1e-10)
    assert (paper["conv2.weight"] - plain["conv2.weight"]).norm() > 1e-3 * plain["conv2.weight"].norm()


@pytest.mark.parametrize("layers", ["all but first", ["0", "2"]])
def test_weights_that_others_replace_are_not_kept(layers):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    hb.apply_(model, hb.DropIT(keep=0.5, layers=layers))
    for module in (model[0], model[2]):
        before = weakref.ref(module.weight)
        module.weight = nn.Parameter(module.weight.detach().clone())  # as FSDP does
        assert before() is None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(32, 8), (4, 8, 8)])
def test_the_output_of_a_layer_that_holds_rows_may_be_changed_in_place(shape, bias):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64, bias=bias), nn.ReLU(inplace=True), nn.Linear(64, 1)).double()
    plain, x = copy.deepcopy(model), torch.randn(*shape, dtype=torch.float64)
    hb.apply_(model, hb.DropIT(keep=0.25, of="rows"))
    out, wanted = model(x), plain(x)
    assert torch.equal(out, wanted)
    out.sum().backward()
    wanted.sum().backward()
    assert torch.allclose(model[0].weight.grad, plain[0].weight.grad), "what flows on is exact"
