"""What a forward may do that a ledger of storages could get wrong: each once did. Gradients equal plain training's, and no more is held."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfback as hb
from halfback.ledger import Ledger

D = 16


class Net(nn.Module):
    def __init__(self, f, **more):
        super().__init__()
        self.a, self.b, self.c, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)
        self.f = f
        for name, module in more.items():
            setattr(self, name, module)

    def forward(self, *x):
        return self.f(self, *x)


def trained(model, x, dtype, around):
    model.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None), around():
        out = model(x)
        loss = out.float().pow(2).sum()
    loss.backward()
    return loss.detach(), [x.grad, *[p.grad for p in model.parameters() if p.grad is not None]], [b.clone() for b in model.buffers()]


def check(f, method="lean", shape=(4, 8, D), dtype=None, around=torch.enable_grad, exact=None, **more):
    """Loss, gradients and buffers against plain training's."""
    torch.manual_seed(0)
    model, x = Net(f, **more).train(), torch.randn(shape)
    loss, wanted, buffers = trained(model, x, dtype, around)
    before = hb.held(model, lambda: model(x.clone().requires_grad_()).sum())
    torch.manual_seed(0)
    model = Net(f, **more).train() if not more else model
    for module in model.modules():
        if hasattr(module, "reset_running_stats"):
            module.reset_running_stats()
    hb.apply_(model, *hb.parse(method))
    mine, found, after = trained(model, x, dtype, around)
    assert torch.equal(mine, loss)
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(a, b) or (exact is not None and i not in exact), (i, (a - b).abs().max(), b.abs().max())
    assert all(torch.equal(a, b) for a, b in zip(after, buffers, strict=True))
    assert hb.held(model, lambda: model(x.clone().requires_grad_()).sum()) <= before


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_inside_an_eager_model():
    torch._dynamo.reset()
    act = torch.compile(lambda h: F.gelu(h) * torch.tanh(h), backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    model = Net(lambda m, x: m.b(act(m.a(x)))).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    losses = []
    for methods in ((), (hb.Lean(),)):
        model.load_state_dict(state)
        if methods:
            hb.apply_(model, *methods)
        losses.append([])
        for step in range(4):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = model(torch.randn(8, D)).pow(2).sum()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("rows", [D, 2 * D])
def test_under_autocast_a_cast_weight_is_not_taken_for_the_input(rows):
    check(lambda m, x: m.b(F.relu(m.a(x))), "dropit(keep=0.3)", (rows, D), torch.bfloat16, exact=(0, 1, 2, 4, 6))


def test_a_frozen_convolution_as_large_as_its_input_under_autocast():
    conv = nn.Conv2d(4, 4, 3, padding=1)
    conv.weight.requires_grad_(False)
    check(lambda m, x: m.conv(x * 2), shape=(1, 4, 6, 6), dtype=torch.bfloat16, conv=conv)


@pytest.mark.parametrize(
    "f",
    [
        lambda m, x: torch.tanh(m.a(x)).t() @ m.b(x),
        lambda m, x: m.b(x) @ (m.c(x).t() @ torch.tanh(m.a(x))),
        lambda m, x: F.linear(torch.tanh(m.a(x)).t(), m.b(x)),
    ],
)
def test_square_products_of_two_activations(f):
    check(f, shape=(D, D))


def test_complex_numbers_and_conjugates():
    def f(m, x):
        z = torch.fft.rfft(m.a(x))
        return torch.fft.irfft(z * z.conj(), n=D) + (z * z.conj()).real.sum(-1, keepdim=True)

    check(f)


def in_place_after_a_cast(m, x):
    h = m.a(x) * 1
    y = m.b(F.gelu(h.double()).float())
    h.zero_()
    return y + m.c(h)


def views_of_what_is_changed(m, x):
    both = torch.cat((m.a(x), m.b(x)), -1)
    scale, shift = both[..., :D], both[..., D:]
    y = torch.tanh(scale.double()).float() * x
    both.mul_(0.5)
    return m.c(y + torch.sigmoid(shift.double()).float())


def logged_then_changed(m, x):
    h = m.a(x)
    h.abs().mean()
    y = m.b(F.gelu(h * 2))
    h.mul_(0.5)
    return y + m.c(h)


def changed_without_a_word(m, x):
    h = torch.tanh(m.a(x)) * 2
    h.data[:, :2] = 0.0
    return m.b(h)


CHANGES = [in_place_after_a_cast, views_of_what_is_changed, logged_then_changed, changed_without_a_word]


class Identity(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self):
        super().__init__(lambda t: t, lambda t: t)


@pytest.mark.parametrize("around", [torch.enable_grad, torch.autograd.graph.save_on_cpu, Identity])
@pytest.mark.parametrize("f", CHANGES)
def test_changes_in_place_that_plain_training_allows(f, around):
    check(f, around=around)


@pytest.mark.parametrize("f", CHANGES[:3])
def test_the_same_in_a_checkpointed_block(f):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Net(f)

        def forward(self, x):
            return self.inner(x)

    blocks = nn.ModuleList([Block(), Block()])
    check(lambda m, x: checkpoint(m.blocks[1], checkpoint(m.blocks[0], x, use_reentrant=False), use_reentrant=False), blocks=blocks)


def test_dropout_before_a_layer_in_a_checkpoint():
    def f(m, x):
        torch.manual_seed(5)
        return checkpoint(lambda y: m.b(F.dropout(F.gelu(m.a(y)), 0.3)), x, use_reentrant=False)

    check(f)
    block = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.Dropout(0.3), nn.Linear(D, D))
    blocks = nn.ModuleList([block, nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.Dropout(0.2), nn.Linear(D, D))])

    def g(m, x):
        torch.manual_seed(5)
        for b in m.blocks:
            x = checkpoint(b, x, use_reentrant=False)
        return x

    check(g, blocks=blocks)


def test_statistics_are_found_once_and_used_as_they_were():
    check(lambda m, x: m.inorm(m.a(x)).relu() * 2, inorm=nn.InstanceNorm1d(8, affine=True, track_running_stats=True))

    def f(m, x):
        h = m.a(x.flatten(0, 1))
        m.bn.eval()
        early = m.b(F.gelu(m.bn(h)))
        m.bn.train()
        return early + m.c(F.gelu(m.bn(h)))

    check(f, bn=nn.BatchNorm1d(D))


def test_tensors_of_other_kinds():
    with torch.inference_mode():
        teacher = torch.randn(4, 8, D)
    check(lambda m, x: m.b(F.gelu(m.a(x) + teacher.clone())))
    coo = torch.eye(4).to_sparse()
    check(lambda m, x: m.b(torch.tanh((coo * 2) @ m.a(x))), shape=(4, D))
    check(lambda m, x: m.b(torch.vmap(lambda y: torch.tanh(y) * y.sum())(m.a(x))))


def test_gradients_of_each_sample():
    from torch.func import functional_call, grad, vmap

    torch.manual_seed(0)
    model, x = Net(lambda m, x: m.b(F.gelu(m.norm(m.a(x))))).train(), torch.randn(3, D)
    parameters = dict(model.named_parameters())
    each = vmap(grad(lambda p, y: functional_call(model, p, (y,)).pow(2).sum()), (None, 0))
    wanted = each(parameters, x)
    hb.apply_(model, hb.Lean())
    found = each(parameters, x)
    assert all(torch.allclose(found[k], wanted[k]) for k in wanted)


def test_a_small_value_does_not_keep_a_large_one():
    def f(m, x):
        h = torch.cat([m.a(x)] * 8, 1)
        (h * h).mean()  # a figure that nobody trains on
        return m.b(torch.tanh(h[:, :1].double()).float())

    check(f)


def test_a_buffer_that_is_filled_again_before_the_backward():
    torch.manual_seed(0)
    model = Net(lambda m, x: m.b(F.gelu(m.a(x.float() * 1)))).train()
    hb.apply_(model, hb.Lean())
    static = torch.randn(4, 8, D).bfloat16()
    loss = model(static).pow(2).sum()
    static.normal_()
    loss.backward()


def test_a_relus_bits_give_way_when_all_of_it_is_held():
    def f(m, x):
        h = F.relu(m.a(x))
        return m.b(h) + h * h

    check(f, "dropit(keep=0.3)")


def test_a_model_dies_without_the_garbage_collector():
    import gc
    import weakref

    model = Net(lambda m, x: m.b(F.gelu(m.a(x)))).train()
    hb.apply_(model, hb.DropIT(0.3), hb.Recompute(layers=["a", "b"]))
    model(torch.randn(4, D)).sum().backward()
    weight = weakref.ref(model.a.weight)
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()


def modes():
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


@pytest.mark.parametrize("fails", [False, True])
def test_a_frame_inside_another_sets_it_aside(fails):
    """Or the outer one would be called for every shape that the inner one looks at: half of the CPU time of a recomputed block."""
    seen = {}

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x):
            seen.setdefault("inside", modes())  # not when it is computed again
            if fails:
                raise ZeroDivisionError
            return x + self.layer(self.norm(x)).relu()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Inner(), Inner()])

        def forward(self, x):
            seen["before"] = modes()
            for block in self.blocks:
                with contextlib.suppress(ZeroDivisionError):
                    x = block(x)
                assert modes() == seen["before"]
            return x

    model = Outer()
    hb.apply_(model, hb.Lean(), hb.Recompute(sparing=True))
    model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    ours = [m for m in seen["inside"] if isinstance(m, Ledger)]
    assert len(ours) == 1 and ours != seen["before"] and [type(m) for m in seen["before"]] == [Ledger]
    assert modes() == []


def test_an_error_in_the_middle_of_a_function_leaves_the_ledger_ready():
    model = Net(
        lambda m, x: m.b(
            F.batch_norm(m.a(x), m.rm, m.rv, training=True) if x.shape[0] > 1 else F.batch_norm(x, m.rm, m.rm[:3], training=True)
        )
    )
    model.register_buffer("rm", torch.zeros(D))
    model.register_buffer("rv", torch.ones(D))
    model.train()
    hb.apply_(model, hb.Lean())
    with pytest.raises((RuntimeError, ValueError)):
        model(torch.randn(1, D))
    model(torch.randn(4, D)).sum().backward()


# Programs drawn at random


UNARY = [torch.tanh, torch.sigmoid, F.gelu, F.silu, F.relu, lambda h: h * 2, lambda h: h.double().float(), lambda h: F.leaky_relu(h, 0.1)]
UNARY += [
    lambda h: h.clone(),
    lambda h: h.transpose(0, 1).contiguous().transpose(0, 1),
    lambda h: h.chunk(2, -1)[0].repeat(1, 1, 2),
    torch.exp,
]
INPLACE = [lambda h: h.mul_(0.5), lambda h: h.add_(1), F.relu_, lambda h: h.clamp_(-1, 1), lambda h: F.silu(h, inplace=True)]
BINARY = [torch.add, torch.mul, lambda a, b: a - b, lambda a, b: torch.where(a > 0, a, b), lambda a, b: a * torch.sigmoid(b)]


def program(seed):
    draw = random.Random(seed)
    steps = [(draw.choice("uuuiibbll"), draw.random(), draw.random(), draw.random()) for _ in range(draw.randint(3, 12))]

    def f(m, x):
        values = [m.a(x)]
        for kind, p, q, r in steps:
            h = values[int(q * len(values))]
            if kind == "u":
                values.append(UNARY[int(p * len(UNARY))](h))
            elif kind == "i":
                values.append(INPLACE[int(p * len(INPLACE))](h))
            elif kind == "b":
                values.append(BINARY[int(p * len(BINARY))](h, values[int(r * len(values))]))
            else:
                values.append((m.b if p < 0.5 else m.norm)(h))
        return m.c(sum(v.tanh() for v in values[-2:]))

    return f


@pytest.mark.parametrize("part", range(4))
def test_programs_drawn_at_random(part):
    tried = 0
    for seed in range(part * 100, part * 100 + 100):
        f = program(seed)
        torch.manual_seed(0)
        model, x = Net(f).train(), torch.randn(2, 4, D)
        try:
            _, grads, _ = trained(model, x, None, torch.enable_grad)
        except RuntimeError:  # autograd forbids what it does in place
            continue
        if not all(g.isfinite().all() for g in grads):
            continue
        check(f, shape=(2, 4, D))
        tried += 1
    assert tried > 20
