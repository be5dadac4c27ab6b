"""torch.compile: one graph, compiled once, with fresh masks, and eager's gradients."""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
import zoo
from functorch.compile import make_boxed_func
from test_heads import made
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import halfback as hb
from halfback import attention, hooks
from halfback.bench.models import how
from halfback.ledger import Ledger
from halfback.watch import Unseen

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own, while it traces
STEPS = 20


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    assert torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint is False, "a setting of torch's was left changed"


def short(name):
    return zoo.make(name, depths=(1, 1, 3, 1)) if name in zoo.CONVNETS else zoo.make(name, layers=3)


def compiled_against_eager(model, batch, steps, backend="aot_eager"):
    """The largest difference of any gradient to eager's, relative to the largest gradient, over steps with their own masks."""
    eager = copy.deepcopy(model)
    fast = torch.compile(model, fullgraph=True, backend=backend)
    worst, masks = 0.0, set()
    for _ in range(steps):
        for m, f in ((model, fast), (eager, eager)):
            m.zero_grad()
            zoo.loss(f, batch).backward()
        pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), eager.parameters(), strict=True) if q.grad is not None]
        scale = max(q.abs().max() for _, q in pairs)
        worst = max(worst, max(((p - q).abs().max() / scale).item() for p, q in pairs))
        masks.add(sum(q.double().sum().item() for _, q in pairs))
    assert len(masks) > 1, "masks do not change"
    return worst


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("mode", ["query", "qkv"])
@pytest.mark.parametrize("name", ["vit", "llama", "convnext"])
def test_one_compilation_trains_with_fresh_masks_and_eager_gradients(name, mode, scale):
    model, batch = short(name)
    hb.apply_(model, hb.SBP(0.5, layers="paper" if name == "convnext" else "all", attention=mode, scale=scale))
    assert compiled_against_eager(model, batch, STEPS) < 1e-5
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("name", ["bert", "gpt2", "tv_vit", "timm_vit", "dinov2"])
def test_other_models_compile_too(name):
    model, batch = zoo.make(name, layers=2)
    hb.apply_(model, hb.SBP(0.5, layers="all"))
    assert compiled_against_eager(model, batch, 2) < 1e-5


class PositionsFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, norm_first=True) for _ in range(3))
        for block in self.blocks:
            block.self_attn = Own(16)  # which does not say where its samples are

    def forward(self, tokens):
        x = self.embed(tokens).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(0, 1)


class Own(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)

    def forward(self, x, *_, **__):
        x = super().forward(x).transpose(0, 1)
        return F.scaled_dot_product_attention(x, x, x).transpose(0, 1), None


def test_positions_that_come_first_are_found_in_every_length():
    torch.manual_seed(0)
    model = PositionsFirst().train()
    report = hb.apply_(model, hb.SBP(0.5, layers="all"))
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (12, 20, 28):
        fast(torch.randint(50, (3, length))).square().mean().backward()
    drew = {text.partition(" ")[0] for text in report.positions}
    assert drew >= {"11", "19"} and "2" not in drew, drew
    assert counters["stats"]["unique_graphs"] <= 2


def compiled_gradients(model, batch):
    torch._dynamo.reset()
    model.zero_grad()
    zoo.loss(torch.compile(model, fullgraph=True, backend="aot_eager"), batch).backward()
    return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["query", "qkv"])
@pytest.mark.parametrize("name", ["vit", "llama", "convnext"])
def test_recomputation_changes_no_bit_of_a_compiled_gradient(name, mode):
    model, batch = zoo.make(name, depths=(1, 1, 2, 1)) if name == "convnext" else zoo.make(name, layers=2)
    method = hb.SBP(0.5, layers="paper" if name == "convnext" else "all", attention=mode, scale=True)
    hb.apply_(model, method)
    without = compiled_gradients(model, batch)
    hb.remove_(model)
    hb.apply_(model, method, hb.Recompute())
    assert all(torch.equal(g, without[k]) for k, g in compiled_gradients(model, batch).items())
    if name != "convnext":  # which transformers cannot checkpoint
        hb.remove_(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        hb.apply_(model, method)
        assert all(torch.equal(g, without[k]) for k, g in compiled_gradients(model, batch).items())


def cut_by_inductor(seen=lambda graph: None):
    """A backend that cuts a graph into forward and backward where inductor cuts it, and runs both as they are."""
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.decomposition import select_decomp_table

    def keep(graph, inputs):
        seen(graph.graph)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition_fn, decompositions=select_decomp_table())


def graphs_of(model, batch):
    found = []
    zoo.loss(torch.compile(model, fullgraph=True, backend=cut_by_inductor(found.append)), batch).backward()
    return found


def count(graph, *ops):
    """Also of what writes to its arguments, which a graph has as the argument of another operator."""
    return sum(node.target in ops or any(a in ops for a in node.args[:1] if callable(a)) for node in graph.nodes)


@pytest.mark.parametrize(
    "methods, gradients",  # how many are settled: of what goes from one of the last three blocks to the next the dropped part, ...
    [
        ("sbp", 2),
        ("sbp+lean", 2),
        ("sbp+lean+recompute(layers='first 1/3', sparing=True)", 1 + 2 + 2),  # ... of recomputed blocks all, and what enters the three
        ("sbp+recompute", 1 + 1 + 3 * 2),
        ("recompute", 4),
    ],
)
def test_blocks_settle_what_leaves_them_and_hold_what_enters_the_first_on_streams(methods, gradients, monkeypatch):
    def made():
        torch._dynamo.reset()
        model, batch = zoo.make("tv_vit", layers=4)
        hb.apply_(model, *hb.parse(methods))  # SBP on the last three
        return graphs_of(model, batch)

    ops, products = torch.ops.halfback, (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    forward, backward = made()
    entering = int("sbp" in methods and "recompute" in methods)
    assert count(forward, ops.settle.default) == entering and count(forward, ops.settle_.default) == 0
    assert count(backward, ops.settle.default) == 0 and count(backward, ops.settle_.default) == gradients
    monkeypatch.setattr(hooks, "settle", lambda x: x)
    without = count(made()[1], *products)
    assert without > count(backward, *products) if entering else without == count(backward, *products), "a block is computed for its output"


@pytest.mark.parametrize("name", ["tv_vit", "vit", "llama"])
@pytest.mark.parametrize("methods", ["recompute", "sbp+recompute"])
def test_attention_that_is_computed_again_is_no_random_function(name, methods):
    """A random one is run apart from all others, on copies of what it reads."""
    model, batch = zoo.make(name, layers=3)
    if name == "llama":
        model.config._attn_implementation = how()["attn_implementation"]
    hb.apply_(model, *hb.parse(methods))  # SBP on the last two
    forward, backward = graphs_of(model, batch)
    ops = torch.ops.halfback
    # Of causal order what all queries give at once is held instead: nothing of the dropped is computed again.
    again = 1 if (name, methods) == ("llama", "sbp+recompute") else 3
    assert count(forward, ops.attention.default) == count(backward, ops.attention.default) == again
    assert count(forward, ops.row_attention.default) == 3 - again and count(backward, ops.row_attention.default) == 0
    assert not [n for n in backward.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]


@pytest.mark.parametrize("name", ["tv_vit", "vit", "llama", "gpt2", "bert"])
def test_lean_computes_the_sum_behind_attention_again(name):
    """From the trunk and from what attention gave, both held for others; by attention's last layer."""
    products = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
    found = []
    for methods in ((), (hb.Lean(),)):
        torch._dynamo.reset()
        model, batch = zoo.make(name, layers=3)
        if name == "llama":
            model.config._attn_implementation = how()["attn_implementation"]
        if methods:
            hb.apply_(model, *methods)
        forward, backward = graphs_of(model, batch)
        held = forward.output_node().args[0]
        found.append((count(backward, *products), sum(n.meta["val"].numel() for n in held if isinstance(n, torch.fx.Node))))
    assert found[1][0] == found[0][0] + 3 and found[1][1] < found[0][1]


@pytest.mark.parametrize("keep", [0.5, 0.25])
def test_the_causal_backward_of_long_text_goes_in_parts_from_any_offset(keep, monkeypatch):
    model, batch = zoo.make("llama", layers=2)
    monkeypatch.setattr(attention, "FEWEST_KEYS", batch["input_ids"].shape[1])
    model.config._attn_implementation = how()["attn_implementation"]
    hb.apply_(model, hb.SBP(keep, layers="all"))
    _, backward = graphs_of(model, batch)
    assert count(backward, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default) == 2 / keep
    torch._dynamo.reset()
    counters.clear()
    assert compiled_against_eager(model, batch, STEPS, cut_by_inductor()) < 1e-5
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(("method", "kept", "dtype"), [("", 1, torch.float32), ("sbp(layers='all')", 0.5, torch.bfloat16)])
def test_lean_holds_neither_norms_nor_what_a_gate_lets_through(method, kept, dtype):
    def held(text):
        torch._dynamo.reset()
        model, batch = zoo.make("llama", layers=2)
        model.to(dtype)
        if text:
            hb.apply_(model, *hb.parse(text))
        fast = torch.compile(model, fullgraph=True, backend=cut_by_inductor())
        return hb.held(model, lambda: zoo.loss(fast, batch)), model.config, batch["input_ids"].numel()

    without, sizes, tokens = held(method)
    width, inner = sizes.hidden_size, sizes.intermediate_size
    # In each block the first norm, of all tokens, for keys and values, the second, and silu(gate) * up; and the norm after all blocks.
    spared = tokens * (sizes.num_hidden_layers * (width + kept * (width + inner)) + width) * dtype.itemsize
    assert held(f"{method}+lean".strip("+"))[0] <= without - spared


def test_inductor_compiles():
    model, batch = zoo.make("timm_vit", layers=2)
    hb.apply_(model, hb.SBP(0.5, layers="all"), hb.Recompute())
    assert compiled_against_eager(model, batch, 3, "inductor") < 1e-4


def test_a_compiled_model_turns_exact_recomputed_and_back():
    model, batch = zoo.make("vit", layers=2)
    hb.apply_(model, hb.SBP(layers="all", sampler="fixed"))
    fast, gradients = torch.compile(model, fullgraph=True, backend="eager"), {}
    for exact in (False, True, False):
        for run in (model, fast):
            model.zero_grad()
            with hb.exact(model, recompute=True) if exact else contextlib.nullcontext():
                for _ in range(2):
                    zoo.loss(run, batch).backward()
            gradients[run] = [p.grad.clone() for p in model.parameters()]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients.values(), strict=True))
    assert counters["stats"]["unique_graphs"] == 2, "and the first one is used again"


def eager_and_compiled(model, fast, batch):
    """The gradients of one step each, with the same masks."""
    found = []
    for run in (model, fast):
        model.zero_grad()
        zoo.loss(run, batch).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return found


def test_a_plain_models_graph_is_not_taken_for_one_with_methods():
    model, batch = zoo.make("vit", layers=2)
    fast = torch.compile(model, fullgraph=True, backend="eager")
    exact, plain = eager_and_compiled(model, fast, batch)
    torch.testing.assert_close(plain, exact)
    hb.apply_(model, hb.SBP(layers="all", sampler="fixed"))
    masked, found = eager_and_compiled(model, fast, batch)
    torch.testing.assert_close(found, masked)
    assert (found - exact).norm() > 0.01 * exact.norm()
    hb.remove_(model)
    torch.testing.assert_close(eager_and_compiled(model, fast, batch)[1], exact)
    assert counters["stats"]["unique_graphs"] == 2


def test_every_keep_of_a_schedule_compiles_once():
    model, batch = zoo.make("vit", layers=2)
    hb.apply_(model, hb.SBP(layers="all", sampler="fixed", schedule=((0, 0.5), (0.5, 0.5), (0.5, 0.25))))
    fast = torch.compile(model, fullgraph=True, backend="eager")
    for done in (0, 0.25, 0.5, 0.75, 0):
        hb.follow_(model, done)
        torch.testing.assert_close(*eager_and_compiled(model, fast, batch))
    assert counters["stats"]["unique_graphs"] == 2


def test_skip_tokens_compiles():
    model, batch = zoo.make("vit", layers=2)
    hb.apply_(model, hb.SkipTokens(0.5, layers="all"))
    assert compiled_against_eager(model, batch, 3) < 1e-5


def test_merges_are_reported_under_compile_too():
    model, batch = zoo.make("vit", layers=2)
    model.set_attn_implementation("eager")
    report = hb.apply_(model, hb.SBP(0.5, layers="all"))
    torch.compile(model, fullgraph=True, backend="eager")(**batch)
    assert any("matmul" in what for what in report.merged)
    assert "8x8 positions after 1" in str(report)


def test_a_trace_that_fails_leaves_torchs_setting_as_it_was():
    model, batch = zoo.make("vit", layers=2)
    hb.apply_(model, hb.SBP(0.5, layers="all"))
    handle = model.vit.layers[1].register_forward_hook(lambda m, a, o: print(id(torch._dynamo.graph_break())))
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        torch.compile(model, fullgraph=True, backend="eager")(**batch)
    handle.remove()
    assert torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint is False


def test_images_of_other_sizes_compile_no_more_often_than_the_plain_model():
    import timm

    sizes = {"img_size": 64, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
    graphs = []
    for methods in ((), (hb.SBP(0.5, layers="all"),)):
        torch._dynamo.reset()
        counters.clear()
        model = timm.models.VisionTransformer(**sizes, dynamic_img_size=True).train()
        if methods:
            hb.apply_(model, *methods)
        fast = torch.compile(model, backend="eager")
        for size in (64, 72, 80, 96, 48):
            fast(torch.randn(2, 3, size, size)).sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1] <= graphs[0]
    assert model._halfback.states[0].step == 5


class Multiplied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer, self.weight = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x + self.layer(self.norm(x)) @ self.weight


def test_operands_keep_their_order_when_compiled():
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(Multiplied(), Multiplied()).double().train(), torch.randn(2, 8, 8, dtype=torch.float64)
    plain = model(x)
    hb.apply_(model, hb.SBP(layers="all"))
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), plain)


# Autocast


class Deep(nn.Module):
    """Layers behind a norm, a ReLU and a GELU; what the norm gives is float32, as a norm's output is under autocast on a GPU."""

    def __init__(self, layer, norm):
        super().__init__()
        self.first, self.norm, self.one, self.two, self.last = layer(6, 16), norm(16), layer(16, 16), layer(16, 16), layer(16, 4)

    def forward(self, x):
        x = self.one(self.norm(self.first(x).float()))
        return self.last(torch.relu(self.two(nn.functional.gelu(x))))


def for_autocast(name):
    torch.manual_seed(0)
    if name == "linear":
        return Deep(nn.Linear, nn.LayerNorm).train(), (torch.randn(8, 16, 6),)
    if name == "conv":
        model = Deep(lambda i, o: nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d).train()
        return model.to(memory_format=torch.channels_last), (torch.randn(4, 6, 8, 8).to(memory_format=torch.channels_last),)
    if name == "language":
        model, ids, _ = made(torch.float32)
        return model, (ids,)
    return zoo.make(name, layers=2)


def under_autocast(run, model, batch):
    """Scores and all gradients, as one vector."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        scores = zoo.call(run, batch)
    assert scores.dtype is torch.bfloat16
    weights = torch.linspace(-1, 1, scores[0].numel()).reshape(scores[0].shape)
    (scores.float() * weights).pow(2).mean().backward()
    return scores.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


APPROXIMATE = ("dropit(keep=0.9, exact_first=False)", "dropit(bits=8, exact_first=False)", "dropit(bits=8, activation_bits=8)")
UNDER_AUTOCAST = [
    *[(name, text) for name in ("linear", "conv") for text in (*APPROXIMATE, "lean")],
    ("tv_vit", "dropit(bits=8, exact_first=False)+recompute(sparing=True)"),
    ("tv_vit", "sbp(keep=0.5, layers='all', attention='qkv')+lean"),
    ("tv_vit", "sbp(keep=0.5, layers='all')+dropit(bits=8, activation_bits=8, exact_first=False)+recompute"),
    ("gpt2", "sbp(keep=0.5, layers='all')+lean+recompute"),
    ("llama", "sbp(keep=0.5, layers='all', attention='qkv')+dropit(bits=8, activation_bits=8)"),
    ("language", "chunkedloss+lean"),
]


@pytest.mark.parametrize(("name", "text"), UNDER_AUTOCAST)
def test_under_autocast_a_compiled_model_has_plains_scores_and_the_methods_gradients(name, text):
    model, batch = for_autocast(name)
    exact, methods = copy.deepcopy(model), hb.parse(text)
    wanted, truth = under_autocast(exact, exact, batch)
    masks = [m for m in methods if isinstance(m, hb.SBP)]  # all else is exact, or nearly
    if masks:
        hb.apply_(exact, *masks)
        _, truth = under_autocast(exact, exact, batch)
    hb.apply_(model, *methods)
    scores, found = under_autocast(torch.compile(model, fullgraph=True, backend="aot_eager"), model, batch)
    torch.testing.assert_close(scores, wanted, rtol=0.02, atol=0.02 * wanted.abs().max().item())
    assert (found - truth).norm() < 0.05 * truth.norm()


class Unflattens(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("text", ["lean", "dropit(keep=0.2)", "sbp(keep=0.5)+lean", "recompute", "lean+recompute(sparing=True)"])
def test_a_method_that_torch_wrote_in_python_compiles(text):
    torch.manual_seed(0)
    model = nn.Sequential(*(Unflattens() for _ in range(3)))
    hb.apply_(model, *hb.parse(text))
    fast, x = copy.deepcopy(model), torch.randn(2, 8, 16)
    model(x).sum().backward()
    torch.compile(fast, fullgraph=True, backend="aot_eager")(x).sum().backward()
    for p, q in zip(model.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize(
    ("text", "graphs"), [("lean", 1), ("dropit(keep=0.2)", 2), ("lean+recompute(sparing=True)", 1), ("sbp(keep=0.5)+lean", None)]
)
def test_blocks_that_are_compiled_one_by_one_have_the_gradients_of_eager_ones(text, graphs):
    torch.manual_seed(0)
    model = nn.Sequential(*(Unflattens() for _ in range(6)))
    hb.apply_(model, *hb.parse(text))
    fast, x = copy.deepcopy(model), torch.randn(2, 8, 16, requires_grad=True)
    for block in fast:
        block.compile(fullgraph="sbp" not in text, backend="aot_eager")  # SBP begins and ends between two graphs
    for _ in range(2):
        for m in (model, fast):
            m.zero_grad()
            m(x).sum().backward()
        for p, q in zip(model.parameters(), fast.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    if graphs is not None:  # with SBP each block has its own, with DropIT the one with the first layer, which stays exact
        assert counters["stats"]["unique_graphs"] == graphs


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def test_lean_holds_nothing_in_blocks_that_are_computed_again():
    def held(*methods, by=lambda block, x: block(x)):
        model, x = nn.Sequential(*(Gated() for _ in range(4))), torch.randn(2, 8, 16)
        hb.apply_(model, *methods)
        torch._dynamo.reset()

        @torch.compile(fullgraph=True, backend="aot_eager")
        def loss():
            return functools.reduce(lambda x, block: by(block, x), model, x).sum()

        return hb.held(model, loss)

    assert held(hb.Lean(), hb.Recompute(sparing=True)) == held(hb.Recompute()) < 0.2 * held(hb.Lean())
    assert held(hb.Lean(), by=lambda block, x: checkpoint(block, x, use_reentrant=False)) == 4 * 2 * 8 * 16 * 4, "what enters them"


@pytest.mark.parametrize("text", ["lean", "dropit(keep=0.2)", "dropit(activation_bits=4, lean=False)"])
def test_a_frame_does_not_see_what_runs_in_compiled_modules(text, monkeypatch):
    seen, own = [], Ledger.pack
    monkeypatch.setattr(Ledger, "pack", lambda self, t: seen.append(t.shape) or own(self, t))
    torch.manual_seed(0)
    x = torch.randn(2, 8, 16, requires_grad=True)
    model = nn.Sequential(*(Gated() for _ in range(3)), nn.LayerNorm(16))
    fast, counts = copy.deepcopy(model), []
    reports = [hb.apply_(m, *hb.parse(text)) for m in (model, fast)]
    for block in fast[:3]:
        block.compile(backend="aot_eager", fullgraph=True)
    for m in (model, fast, fast):
        seen.clear()
        m.zero_grad()
        m(x).square().sum().backward()
        counts.append(len(seen))
    assert counts[0] > 40 and counts[1] == counts[2] <= 5, "what the norm saves"
    assert ["beside what is compiled" in str(report) for report in reports] == [False, True]
    assert counters["stats"]["unique_graphs"] == (1 if text == "lean" else 2), "with DropIT the first layer, which stays exact, has its own"
    for p, q in zip(model.parameters(), fast.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    hb.remove_(fast)
    assert not [m for m in fast.modules() if isinstance(m._compiled_call_impl, Unseen)]
    seen.clear()
    fast(x).sum().backward()
    assert not seen


class Operators(nn.Module):
    """Attention as many write it by hand."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = [t.view(*t.shape[:2], 2, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)]
        weights = (q @ k.transpose(-2, -1) * 0.3).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("text", ["sbp(keep=0.5, layers='all')", "sbp(keep=0.5, layers='all')+lean"])
def test_attention_written_with_operators_is_one_graph(text):
    torch.manual_seed(0)
    model, x = nn.Sequential(Operators(), Operators(), Operators()).double(), torch.randn(2, 8, 16, dtype=torch.float64)
    wanted = model(x)
    hb.apply_(model, *hb.parse(text))
    fast = copy.deepcopy(model)
    out = torch.compile(fast, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(out, wanted)
    for y in (out, model(x)):
        y.pow(2).sum().backward()
    for p, q in zip(fast.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


IN_PLACE = {
    "relu": lambda m, x: m.b(F.relu(m.a(m.norm(x)), inplace=True)),
    "relu6": lambda m, x: m.b(F.relu6(m.a(m.norm(x)), inplace=True)),
    "leaky relu": lambda m, x: m.b(F.leaky_relu(m.a(m.norm(x)), inplace=True)),
    "elu": lambda m, x: m.b(F.elu(m.a(m.norm(x)), inplace=True)),
    "silu": lambda m, x: m.b(F.silu(m.a(m.norm(x)), inplace=True)),
    "mish": lambda m, x: m.b(F.mish(m.a(m.norm(x)), inplace=True)),
    "hardswish": lambda m, x: m.b(F.hardswish(m.a(m.norm(x)), inplace=True)),
    "a sum behind a layer": lambda m, x: m.c(m.b(F.gelu(m.a(m.norm(x)))).add_(x)),
    "a layer's output": lambda m, x: m.c(m.b(F.relu(m.a(x))).mul_(0.5)),
    "a gate of itself": lambda m, x: (lambda z: m.c(F.silu(z) * z))(m.a(x)),
}


class Written(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.norm, self.a, self.b, self.c, self.how = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), how

    def forward(self, x):
        return self.how(self, x)


@pytest.mark.parametrize(("text", "allowed"), [("lean", 1e-12), ("dropit(bits=8, activation_bits=8)", 0.05), ("dropit(keep=1.0)", 1e-12)])
@pytest.mark.parametrize("how", IN_PLACE)
def test_what_is_changed_in_place_compiles_as_it_does_in_a_plain_model(how, text, allowed):
    torch.manual_seed(0)
    model, x = Written(IN_PLACE[how]).double(), torch.randn(2, 8, 16, dtype=torch.float64)
    plain = copy.deepcopy(model)
    hb.apply_(model, *hb.parse(text))
    out = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    out.pow(2).sum().backward()
    wanted = plain(x)
    wanted.pow(2).sum().backward()
    torch.testing.assert_close(out, wanted)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if q.grad is not None:
            assert (p.grad - q.grad).norm() <= allowed * q.grad.norm(), name


class Simple(nn.Module):
    def __init__(self, breaks=False):
        super().__init__()
        self.norm, self.up, self.down, self.breaks = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16), breaks

    def forward(self, x):
        h = self.up(self.norm(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.down(torch.relu(h))


def parts_against_eager(model, parts, inputs):
    """Some modules of a model compiled, in place, against the model in eager mode, step by step."""
    eager = copy.deepcopy(model)
    for part in parts(model):
        part.compile(backend="aot_eager")
    for x in inputs:
        for m in (model, eager):
            m.zero_grad()
            m(x).pow(2).mean().backward()
        for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert (p.grad - q.grad).norm() <= 1e-5 * q.grad.norm(), name


METHODS = ("lean", "dropit(keep=0.2)", "recompute", "lean+recompute(sparing=True)", "sbp(keep=0.5)+lean", "sbp(keep=0.5)+recompute")


@pytest.mark.parametrize("parts", [lambda m: m, lambda m: [m]], ids=["blocks", "root"])
@pytest.mark.parametrize("text", METHODS)
def test_a_model_that_is_not_one_graph_trains_as_in_eager_mode(text, parts):
    torch.manual_seed(0)
    model = nn.Sequential(*(Simple(breaks=True) for _ in range(3)))
    hb.apply_(model, *hb.parse(text))
    parts_against_eager(model, parts, [torch.randn(2, 12, 16) for _ in range(2)])


@pytest.mark.parametrize("text", ["dropit(keep=0.2, exact_first=False)", "sbp(keep=0.5)", "sbp(keep=0.5)+lean"])
def test_compiled_blocks_take_other_lengths_also_beyond_torchs_limit(text):
    torch.manual_seed(0)
    model = nn.Sequential(*(Simple() for _ in range(4)))
    hb.apply_(model, *hb.parse(text))
    parts_against_eager(model, lambda m: m, [torch.randn(2, n, 16) for n in (24, 16, 31, 12, 8, 40)])


def test_dropit_on_compiled_blocks_of_other_widths():
    from torchvision.models.resnet import BasicBlock, ResNet

    torch.manual_seed(0)
    model = ResNet(BasicBlock, [2, 1, 1, 1], num_classes=5).train()
    hb.apply_(model, hb.DropIT(keep=0.2))
    for block in (m for m in model.modules() if isinstance(m, BasicBlock)):
        block.compile(backend="aot_eager")
    for _ in range(2):
        model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert hb.held(model, lambda: model(torch.randn(2, 3, 32, 32)).sum()) > 0


@pytest.mark.parametrize("which", [0, 1])
def test_dropit_on_some_layers_of_compiled_blocks(which):
    torch.manual_seed(0)
    model = nn.Sequential(*(Simple() for _ in range(3)))
    plain, x = copy.deepcopy(model), torch.randn(2, 12, 16, requires_grad=True)
    hb.apply_(model, hb.DropIT(keep=0.1, layers=[f"{which}.*"], exact_first=False))
    parts_against_eager(model, lambda m: m, [x])
    plain(x).pow(2).mean().backward()
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    far = [n for (n, p), q in pairs if (p.grad - q.grad).norm() > 0.01 * q.grad.norm()]
    assert far == [f"{which}.up.weight", f"{which}.down.weight"]


def test_an_encoder_and_a_decoder_compile_apart():
    zoo.import_torchvision()
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 100, "dropout_rate": 0.0}
    model = T5ForConditionalGeneration(T5Config(**sizes, use_cache=False, decoder_start_token_id=0)).train()
    ids = torch.randint(0, 100, (2, 24))
    batch = {"input_ids": ids, "labels": ids}
    hb.apply_(model, hb.SBP(keep=0.5))
    eager = copy.deepcopy(model)
    for part in (model.encoder, model.decoder):
        part.compile(backend="aot_eager", fullgraph=True)
    for m in (model, eager):
        m(**batch).loss.backward()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.filterwarnings("ignore")  # of torch's own, while it traces
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_block_that_is_compiled_by_itself_is_never_drawn_anew_in_a_checkpoint(fullgraph):
    """The backward computes it again, and nobody there knows which positions the forward kept."""
    torch._dynamo.reset()
    model, batch = zoo.make("vit", layers=3)
    hb.apply_(model, hb.SBP(0.5))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for block in [m for name, m in model.named_modules() if name in model._halfback.report.blocks]:
        block.compile(fullgraph=fullgraph, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported if fullgraph else RuntimeError, match="is computed again in a backward pass"):
        zoo.loss(model, batch).backward()


def test_an_eager_step_compiles_nothing_anew():
    """What hooks learn of an eager step's loss, no compiled graph was made for."""
    torch._dynamo.reset()
    model = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3))).train()
    hb.apply_(model, hb.SBP(keep=0.5))
    frames = []
    compiled = torch.compile(model, backend=lambda graph, inputs: frames.append(1) or graph)
    counts = []
    for step in (compiled, model, compiled):
        step(torch.randn(2, 12, 16)).square().sum().backward()
        counts.append(len(frames))
    assert counts[0] > 0 and counts == [counts[0]] * 3
