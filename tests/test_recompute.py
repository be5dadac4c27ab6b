"""The second run of a recomputed block finds what its first one found: buffers that it changed, parameters that stood there for one
forward. And what torch.func runs is plain."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import zoo
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, grad, vmap
from torch.nn.utils.parametrizations import spectral_norm

import halfback as hb
from halfback.recompute import SMALL, Had

D = 16
BESIDE = {
    "recompute": "",
    "lean+recompute": "lean",
    "lean+recompute(sparing=True)": "lean",
    "sbp(layers='all')+recompute": "sbp(layers='all')",
    "sbp(layers='all')+lean+recompute(sparing=True)": "sbp(layers='all')+lean",
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        h = self.up(self.norm(x))
        self.follow(h.detach())
        return x + self.down(self.scaled(h).tanh())

    def scaled(self, h):
        return h / self.scale

    def follow(self, h):
        pass


class Reassigned(Block):
    def follow(self, h):
        self.scale = 0.5 * self.scale + 0.5 * h.abs().mean()


class InPlace(Block):
    """What is divided by is the buffer itself, which the backward finds as it was left."""

    def follow(self, h):
        self.scale.mul_(0.5).add_(0.5 * h.abs().mean())


class Unseen(Block):
    """No version tells of this."""

    def follow(self, h):
        self.scale.data.mul_(0.5).add_(0.5 * h.abs().mean())


class Late(Block):
    """The buffer is read before it is changed."""

    def scaled(self, h):
        out = h / self.scale.clone()
        self.scale.mul_(0.5).add_(0.5 * h.detach().abs().mean())
        return out


class Large(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(SMALL // 4 + 1))

    def follow(self, h):
        self.table.mul_(0.5).add_(0.5 * h.abs().mean())
        self.scale = self.table[7].clone()


class Begun(Block):
    """A number says whether the buffer means something."""

    def __init__(self):
        super().__init__()
        self.begun = False

    def follow(self, h):
        if not self.begun:
            self.scale.copy_(h.abs().mean())
            self.begun = True


class Tied(Block):
    """One buffer in two places."""

    def __init__(self):
        super().__init__()
        self.norm.register_buffer("scale", self.scale)

    def follow(self, h):
        self.norm.scale.mul_(0.5).add_(0.5 * h.abs().mean())


class Spectral(Block):
    def __init__(self):
        super().__init__()
        self.up, self.down = spectral_norm(self.up), spectral_norm(self.down)


class Attending(nn.TransformerEncoderLayer):
    """SBP leaves the dropped positions out of the second run of such a block."""

    def __init__(self):
        super().__init__(D, 2, 2 * D, 0.0, batch_first=True, norm_first=True)
        self.linear1 = spectral_norm(self.linear1)


CHANGING = (Reassigned, InPlace, Unseen, Late, Large, Begun, Tied, Spectral, Attending)


def made(kind, blocks=2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, D), *[kind() for _ in range(blocks)], nn.Linear(D, 1)).double().train()
    return model, torch.randn(4, 6, 4, dtype=torch.float64)


def gradients(model, loss, **how):
    model.zero_grad()
    loss.backward(**how)
    return {k: p.grad.clone() for k, p in model.named_parameters()}


def step(model, x):
    """Gradients and the buffers after them; then the weights move."""
    found = gradients(model, model(x).square().sum())
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(0.01 * p.grad)
    return found | {k: b.clone() for k, b in model.named_buffers()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def furthest(one, two):
    assert one.keys() == two.keys()
    return max(float((one[k] - two[k]).abs().max() / two[k].abs().max().clamp(min=1e-12)) for k in one)


# Buffers


@pytest.mark.parametrize("text", BESIDE)
@pytest.mark.parametrize("kind", CHANGING)
def test_a_block_that_changes_its_buffers_trains_as_without_recompute(kind, text):
    model, x = made(kind)
    other = copy.deepcopy(model)
    if BESIDE[text]:
        hb.apply_(model, *hb.parse(BESIDE[text]))
    hb.apply_(other, *hb.parse(text))
    for _ in range(3):
        assert same(step(other, x), step(model, x))


@pytest.mark.parametrize("kind", CHANGING)
def test_a_second_backward_finds_it_once_more(kind):
    model, x = made(kind)
    other = copy.deepcopy(model)
    wanted = gradients(model, model(x).square().sum())
    hb.apply_(other, hb.Recompute())
    loss = other(x).square().sum()
    assert same(gradients(other, loss, retain_graph=True), wanted) and same(gradients(other, loss), wanted)
    assert same(dict(other.named_buffers()), dict(model.named_buffers()))


@pytest.mark.parametrize("kind", [Reassigned, Late, Large, Begun, Spectral, Attending])
def test_two_forwards_before_a_backward_have_each_their_own(kind):
    model, x = made(kind)
    other = copy.deepcopy(model)
    hb.apply_(other, hb.Recompute())
    wanted, found = (gradients(m, m(x).square().sum() + m(-x).exp().sum()) for m in (model, other))
    assert same(found, wanted)


def test_the_modules_own_buffers_are_back_after_the_second_run():
    model, x = made(InPlace)
    before = [(b, b.data_ptr()) for b in model.buffers()]
    hb.apply_(model, hb.Recompute())
    loss = model(x).sum()
    values = [float(b) for b in model.buffers()]
    loss.backward()
    assert all(b is was and b.data_ptr() == place for b, (was, place) in zip(model.buffers(), before, strict=True))
    assert [float(b) for b in model.buffers()] == values


def test_also_after_a_second_run_that_fails():
    class Fails(InPlace):
        runs = 0

        def scaled(self, h):
            Fails.runs += 1
            if Fails.runs > 1:
                raise KeyError("again")
            return super().scaled(h)

    model, x = made(Fails, blocks=1)
    hb.apply_(model, hb.Recompute(layers=["1"]))
    loss, buffer = model(x).sum(), model[1].scale
    value = float(buffer)
    with pytest.raises(KeyError, match="again"):
        loss.backward()
    assert model[1].scale is buffer and float(buffer) == value


def test_a_large_buffer_that_does_not_change_is_not_kept():
    block = Block()
    block.register_buffer("mask", torch.ones(SMALL + 1, dtype=torch.bool))
    had = Had(block, ())
    assert id(block.mask) in had.copies
    block(torch.randn(2, 3, D))
    had.ran()
    assert had.copies.keys() == {id(block.scale)}
    large = Large()
    had = Had(large, ())
    large(torch.randn(2, 3, D))
    had.ran()
    assert id(large.table) in had.copies


class Roped(Block):
    """A table that grows with what it is asked for, and a number that says how far it reaches."""

    def __init__(self):
        super().__init__()
        self.reach = 0
        self.register_buffer("table", None, persistent=False)

    def scaled(self, h):
        if h.shape[1] > self.reach:
            self.reach = h.shape[1]
            self.register_buffer("table", torch.arange(1.0, self.reach + 1, dtype=h.dtype)[:, None], persistent=False)
        return h / self.table[: h.shape[1]]


def test_a_table_that_grows_in_a_forward_is_there_in_the_second_run():
    model, x = made(Roped)
    other = copy.deepcopy(model)
    hb.apply_(other, hb.Recompute())
    for n in (3, 6, 4):
        wanted, found = (gradients(m, m(x[:, :n]).square().sum()) for m in (model, other))
        assert same(found, wanted)


def test_a_block_that_materializes_in_its_first_forward_updates_statistics_once():
    class Lazy(Block):
        def __init__(self):
            super().__init__()
            self.batch = nn.LazyBatchNorm1d()

        def scaled(self, h):
            return self.batch(h.mT).mT

    (model, x), (other, _) = made(Lazy, blocks=1), made(Lazy, blocks=1)
    hb.apply_(other, hb.Recompute(layers=["1"]))
    for _ in range(2):
        assert same(step(other, x), step(model, x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
def test_compiled_a_buffer_that_is_exchanged_is_too():
    model, x = made(Reassigned)
    other = copy.deepcopy(model)
    hb.apply_(other, hb.Recompute())
    fast = torch.compile(other, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        wanted, found = (gradients(m, f(x).square().sum()) for m, f in ((model, model), (other, fast)))
        assert furthest(found, wanted) < 1e-10
    assert furthest(dict(other.named_buffers()), dict(model.named_buffers())) < 1e-10


@pytest.mark.parametrize("kind", CHANGING)
def test_in_parts_a_buffer_that_changes_is_a_named_error_and_is_left_alone(kind):
    model, x = made(kind)
    hb.apply_(model, hb.Recompute(parts=2))
    before = {k: b.clone() for k, b in model.named_buffers()}
    with pytest.raises(ValueError, match=r"parts=2\): 1 changes its buffer '(scale|norm.scale|table|.*parametrizations.weight.0._[uv])'"):
        model(x)
    assert same(dict(model.named_buffers()), before) and all(m.training for m in model.modules())


def test_in_parts_a_buffer_that_does_not_change_is_none():
    model, x = made(Block)
    other = copy.deepcopy(model)
    hb.apply_(other, hb.Recompute(parts=2))
    wanted, found = (gradients(m, m(x).square().sum()) for m in (model, other))
    assert furthest(found, wanted) < 1e-10


# What is handed in


def cached(text):
    """Gradients of a decoder whose blocks are handed a cache, to which each adds; and how long it is after the backward."""
    model, batch = zoo.make("llama", layers=4)
    model.double()
    if text:
        hb.apply_(model, *hb.parse(text))
    out = model(**batch, use_cache=True)
    found = gradients(model, out.logits.square().mean())
    return found, [layer.keys.shape[-2] for layer in out.past_key_values.layers]


@pytest.mark.parametrize("text", BESIDE)
def test_a_cache_that_blocks_add_to_has_each_token_once(text):
    (wanted, length), (found, also) = cached(BESIDE[text]), cached(text)
    assert same(found, wanted) and also == length == [48] * 4


class Gathering(Block):
    """It reads what the blocks before it left, and leaves something itself: in a list, a dict, or an attribute."""

    def forward(self, x, left):
        more = sum(left["each"]) + left["last"].value
        out = super().forward(x + more)
        left["each"].append(out.sin())
        left["last"] = Left(out.cos())
        left["last"].calls += 1
        return out


class Left:
    def __init__(self, value):
        self.value, self.calls, self.itself = value, 0, self


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Gathering() for _ in range(4))

    def forward(self, x, left):
        for block in self.blocks:
            x = block(x, left)
        return x


def test_what_blocks_leave_for_each_other_is_there_as_it_was():
    torch.manual_seed(0)
    model, x = Stack().double(), torch.randn(2, 3, D, dtype=torch.float64)
    other, found = copy.deepcopy(model), []
    hb.apply_(other, hb.Recompute())
    for m in (model, other):
        left = {"each": [x.tanh()], "last": Left(x)}
        loss = m(x, left).square().sum() + left["last"].value.sum()
        made = [*left["each"], left["last"]]
        found.append(gradients(m, loss))
        assert [*left["each"], left["last"]] == made and left["last"].calls == 1  # the first run's own
    assert same(*found)


def test_what_is_kept_by_a_cache_is_told_once(caplog):
    model, batch = zoo.make("llama", layers=4)
    report = hb.apply_(model, hb.Recompute())
    for _ in range(2):
        model(**batch, use_cache=True).logits.sum().backward()
    told = "puts tensors into what it is handed, as a cache of keys and values, which is held until the backward then"
    assert [told in r.getMessage() for r in caplog.records] == [
        True
    ] and f"CAUTION, behind model.layers.0 ... model.layers.3: {told}" in str(report)
    hb.remove_(model)
    report = hb.apply_(model, hb.Recompute())
    model(**batch, use_cache=False).logits.sum().backward()
    assert len(caplog.records) == 1 and "CAUTION" not in str(report)


def test_a_tensor_that_is_changed_in_place_where_it_was_handed_is_told(caplog):
    class Adding(Block):
        def forward(self, x, sums):
            sums[0].add_(x.detach())
            return super().forward(x)

    model, sums = nn.ModuleDict({"blocks": nn.ModuleList([Adding()])}), [torch.zeros(2, 3, D)]
    report = hb.apply_(model, hb.Recompute(layers=["blocks.0"]))
    model["blocks"][0](torch.randn(2, 3, D), sums).sum().backward()
    assert "CAUTION, behind blocks.0: changes in place a tensor that it finds in an object or a list" in str(report)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("text", ["recompute(parts=2)", "sbp+recompute(parts=2)"])
def test_parts_of_a_batch_share_no_cache(text):
    model, batch = zoo.make("llama", layers=4)
    hb.apply_(model, *hb.parse(text))
    with pytest.raises(ValueError, match=r"Recompute\(parts=2\): model.layers.0 changes what it is handed.*use_cache=False"):
        model(**batch, use_cache=True)
    model(**batch, use_cache=False).logits.sum().backward()


def test_no_plan_has_parts_where_blocks_share_a_cache():
    model, batch = zoo.make("llama", layers=4)
    tight = hb.planner.Planner(model, {**batch, "use_cache": True}), hb.planner.Planner(model, {**batch, "use_cache": False})
    kind = hb.planner.Kind("lean", parts=2)
    assert [p.way(kind, True) is not None for p in tight] == [False, True]


# Parameters


def louder(model):
    return {n: 1.1 * p for n, p in model.named_parameters()}


def narrower(model):
    return {n: p.float() for n, p in model.named_parameters()} | {n: b.float() for n, b in model.named_buffers()}


def anothers(model):
    torch.manual_seed(1)
    return {n: nn.Parameter(p + torch.randn_like(p)) for n, p in model.named_parameters()} | {n: b + 1 for n, b in model.named_buffers()}


@pytest.mark.parametrize("weights", [louder, narrower, anothers])
@pytest.mark.parametrize("kind", [Block, Reassigned, Attending])
@pytest.mark.parametrize("text", BESIDE)
def test_functional_call_with_other_weights_has_plains_gradients(text, kind, weights):
    model, x = made(kind)
    found = []
    for methods in (BESIDE[text], text):
        other = copy.deepcopy(model)
        if methods:
            hb.apply_(other, *hb.parse(methods))
        given = weights(other)
        inner = [t for t in given.values() if t.requires_grad]
        loss = functional_call(other, given, (x.to(inner[0].dtype),)).square().sum()
        found.append(dict(enumerate(torch.autograd.grad(loss, inner))))
        assert all(type(p) is nn.Parameter for p in other.parameters())
    assert same(found[1], found[0])


@pytest.mark.parametrize("text", ["recompute", "recompute(parts=2)", "lean+recompute(sparing=True)", "sbp(layers='all')+recompute"])
def test_a_parameter_that_is_changed_before_the_backward_is_a_named_error(text):
    model, x = made(Block)
    hb.apply_(model, *hb.parse(text))
    loss = model(x).square().sum()
    with torch.no_grad():
        model[2].up.bias.add_(1)
    with pytest.raises(RuntimeError, match=r"Recompute\(\): 2: its parameter 'up.bias' was changed in place"):
        loss.backward()
    gradients(model, model(x).square().sum())


@torch.no_grad()
def stepped(p):
    p.sub_(0.01 * p.grad)


def test_an_optimizer_that_steps_in_the_backward_may():
    models = [made(Block)[0] for _ in range(2)]
    x = made(Block)[1]
    hb.apply_(models[1], hb.Recompute())
    for model in models:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(stepped)
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
    assert same(*(dict(m.named_parameters()) for m in models))


def test_a_weight_that_its_own_forward_renormalizes_may():
    class Looked(Block):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(6, 2 * D, max_norm=1.0)

        def scaled(self, h):
            return h + self.table(torch.arange(6))

    model, x = made(Looked)
    other = copy.deepcopy(model)
    hb.apply_(other, hb.Recompute())
    wanted = gradients(model, model(x).square().sum())
    loss = other(x).square().sum()
    assert same(gradients(other, loss, retain_graph=True), wanted) and same(gradients(other, loss), wanted)


@pytest.fixture
def alone():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # a linear layer returns a view
@pytest.mark.parametrize("text", ["recompute", "lean+recompute", "lean+recompute(sparing=True)"])
@pytest.mark.parametrize("kind", [Block, Reassigned])
def test_fsdp_exchanges_parameters_of_a_blocks_layers_as_it_wants(alone, kind, text):
    model, x = made(kind)
    other = copy.deepcopy(model)
    hb.apply_(other, *hb.parse(text))
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for layer in (m for block in other[1:3] for m in (block.up, block.down, block)):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(other, mesh=mesh)
    for _ in range(2):
        other.zero_grad()  # before a forward, after which the root's parameters are whole
        wanted = gradients(model, model(x).square().sum())
        other(x).square().sum().backward()
        assert furthest({k: p.grad.full_tensor() for k, p in other.named_parameters()}, wanted) < 1e-10


# torch.func, and checkpointing of the model's own


@pytest.mark.parametrize("text", ["sbp(layers='all')", "skiptokens", "recompute", "recompute(parts=2)", "sbp+lean+recompute"])
def test_what_torch_func_runs_is_plain(text):
    model, x = made(Block)
    other = copy.deepcopy(model)
    hb.apply_(other, *hb.parse(text))

    def loss(p, m, x):
        return functional_call(m, p, (x,)).square().sum()

    results = []
    for m in (model, other):
        p = {k: v.detach() for k, v in m.named_parameters()}
        all_at_once = grad(loss)(p, m, x)
        each = vmap(lambda a, m=m, p=p: grad(loss)(p, m, a[None]))(x)
        results.append({**all_at_once, **{f"each {k}": v for k, v in each.items()}, "out": vmap(lambda a, m=m: m(a[None])[0])(x).detach()})
    assert furthest(results[1], results[0]) < 1e-12


def test_leans_inputs_under_checkpointing_of_the_models_own_have_the_positions_of_their_forward():
    """The first block's input is one that Lean computes again: it comes back in another storage."""
    found = []
    for checkpointed in (True, False):
        model, batch = zoo.make("bert", layers=2)
        hb.apply_(model, hb.SBP(layers="all"), hb.Lean())
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for _ in range(2):
            zoo.loss(model, batch).backward()
        found.append({k: p.grad for k, p in model.named_parameters() if p.grad is not None})
    assert all(torch.allclose(g, found[1][k], atol=1e-6) for k, g in found[0].items())
