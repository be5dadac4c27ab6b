"""Lean: gradients equal to plain's, with less held, whatever else happens to the model."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
import torch.nn.functional as F
import torchvision
import zoo
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfback as hb
from halfback.ledger import Entry
from halfback.untouched import applied_to


def resnet(batch=2, width=64):
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.Identity()  # the stem for CIFAR
    return model.train(), (torch.randn(batch, 3, 32, 32),)


def make(name):
    return resnet() if name == "resnet" else zoo.make(name)


def gradients(model, batch):
    model.zero_grad()
    loss = zoo.loss(model, batch)
    loss.backward()
    return loss.detach(), {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


def worst(found, wanted):
    assert found.keys() == wanted.keys()
    scale = max(g.abs().max() for g in wanted.values())
    return max(((found[k] - g).abs().max() / scale).item() for k, g in wanted.items())


# Bar 1: gradients


@pytest.mark.parametrize("name", [*zoo.MODELS, "resnet"])
def test_loss_and_gradients_equal_the_plain_models(name):
    model, batch = make(name)
    loss, wanted = gradients(copy.deepcopy(model), batch)
    report = hb.apply_(model, hb.Lean())
    mine, found = gradients(model, batch)
    assert torch.equal(mine, loss)
    assert worst(found, wanted) < (1e-6 if name == "resnet" else 1e-30)  # a batch norm is computed from its statistics; all else is bitwise
    assert report.after < 0.68 * report.before


def test_batch_statistics_are_updated_once():
    model, batch = resnet()
    plain = copy.deepcopy(model)
    hb.apply_(model, hb.Lean())
    for m in (model, plain):
        gradients(m, batch)
    for (k, a), b in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b), k


# Bar 2: held


def sized(name):
    if name == "vit_b_16":
        return torchvision.models.vit_b_16().train(), (torch.randn(1, 3, 224, 224),)
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    ids = {"input_ids": torch.randint(0, 1000, (2, 128))}
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)).train(), ids
    shape = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048, "vocab_size": 32000}
    return LlamaForCausalLM(LlamaConfig(**shape, use_cache=False)).train(), ids


@pytest.mark.parametrize(
    ("name", "method", "most"),
    [
        ("vit_b_16", "lean", 0.64),
        ("vit_b_16", "dropit(keep=0.1, activation_bits=4)", 0.50),
        ("vit_b_16", "dropit(bits=4, activation_bits=4)", 0.52),
        ("gpt2", "lean", 0.60),
        ("llama", "lean", 0.65),
        ("resnet", "lean", 0.80),
        ("resnet", "dropit(keep=0.2)", 0.65),
    ],
)
def test_held_bytes_of_models_in_their_real_sizes(name, method, most):
    model, batch = resnet() if name == "resnet" else sized(name)
    before = hb.held(model, lambda: zoo.loss(model, batch))
    report = hb.apply_(model, *hb.parse(method))
    after = hb.held(model, lambda: zoo.loss(model, batch))
    assert after <= most * before
    outside = before - report.before  # what the loss holds, which is not in the model
    assert report.after + outside == pytest.approx(after, rel=0.01)
    assert sum(r.before for r in report.rows) == report.before and sum(r.after for r in report.rows) == report.after


@pytest.mark.parametrize("name", ["vit", "gpt2", "llama", "convnext", "resnet"])
def test_the_report_says_what_plain_training_holds(name):
    model, batch = make(name)
    inside = {}
    handle = model.register_forward_hook(lambda *_: inside.update(held=counter.bytes()))
    with hb.memory.Held(model) as counter:
        loss = zoo.loss(model, batch)
    del loss
    handle.remove()
    report = hb.apply_(model, hb.Lean())
    gradients(model, batch)
    assert report.before == pytest.approx(inside["held"], rel=0.02)
    table = report.table()
    assert all(row.layer in table and row.function in table for row in report.rows)
    assert "computed again" in table and "held" in str(report)


def test_peak_of_a_forward_is_not_above_what_is_held_by_much():
    model, batch = zoo.make("vit")
    hb.apply_(model, hb.Lean())
    known = [*model.parameters(), *model.buffers(), *batch.values()]
    with hb.memory.Peak(*known) as peak:
        loss = zoo.loss(model, batch)
    del loss
    assert peak.most < 1.15 * hb.held(model, lambda: zoo.loss(model, batch))


# What models do


class Own(nn.Module):
    """Written-out norms and activations, in-place ones, dropout."""

    def __init__(self, kind, d=32):
        super().__init__()
        self.kind = kind
        self.a, self.b, self.c = nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.Linear(d, 4 * d)
        self.norm = {"rms": nn.RMSNorm(d), "group": nn.GroupNorm(4, d), "layer": nn.LayerNorm(d)}.get(kind, nn.Identity())

    def forward(self, x):  # noqa: C901
        x = self.norm(x)
        if self.kind == "inplace relu":
            return self.b(F.relu(self.a(x), inplace=True))
        if self.kind == "relu into a sum":
            return torch.relu(self.a(x)) + torch.relu(self.c(x))
        if self.kind == "leaky":
            return self.b(F.leaky_relu(self.a(x), 0.1))
        if self.kind == "inplace leaky":
            return self.b(F.leaky_relu(self.a(x), 0.1, inplace=True))
        if self.kind == "inplace silu":
            return self.b(F.silu(self.a(x), inplace=True))
        if self.kind == "dropout":
            return F.dropout(self.b(F.dropout(F.gelu(self.a(x)), 0.3)), 0.2)
        if self.kind == "inplace dropout":
            return self.b(F.dropout(F.gelu(self.a(x)), 0.3, inplace=True))
        if self.kind == "gated":
            return self.b(F.silu(self.a(x)) * self.c(x))
        if self.kind == "written gelu":
            x = self.a(x)
            return self.b(0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * torch.pow(x, 3)))))
        if self.kind == "written norm":
            wide = x.float()
            return self.b(F.silu(self.a((wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype))))
        if self.kind == "views":
            h = self.a(x).view(*x.shape[:-1], 4, -1).transpose(-2, -3).contiguous()
            left, right = F.gelu(h).chunk(2, -1)
            return self.b(torch.cat((right, left), -1).transpose(-2, -3).reshape(*x.shape[:-1], -1))
        if self.kind == "in place sum":
            h = self.a(x)
            h *= 2
            h += self.c(x)
            return self.b(F.gelu(h).mul_(0.5))
        return self.b(F.gelu(self.a(x)))


KINDS = ["inplace relu", "relu into a sum", "leaky", "inplace leaky", "inplace silu", "dropout", "inplace dropout", "gated", "written gelu"]
KINDS += ["written norm", "views", "in place sum", "rms", "group", "layer"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_model_writes_out_or_does_in_place(kind, dtype):
    torch.manual_seed(0)
    model = Own(kind).to(dtype).train()
    x = torch.randn(4, 32, 32, dtype=dtype, requires_grad=True)
    results = []
    for methods in ((), (hb.Lean(),)):
        model.zero_grad()
        x.grad = None
        if methods:
            hb.apply_(model, *methods)
        torch.manual_seed(3)
        with hb.memory.Held(model) as held:
            out = model(x)
            size = held.bytes()
        state = torch.get_rng_state()
        out.square().sum().backward()
        results.append((out.detach(), x.grad.clone(), [p.grad.clone() for p in model.parameters() if p.grad is not None], size, state))
    plain, lean = results
    assert torch.equal(plain[0], lean[0]) and torch.equal(plain[4], lean[4]), "the forward, or the user's random numbers"
    for a, b in zip([plain[1], *plain[2]], [lean[1], *lean[2]], strict=True):
        assert torch.equal(a, b)
    assert lean[3] <= plain[3]


@pytest.mark.parametrize(
    ("kind", "most"), [("gated", 0.70), ("written gelu", 0.45), ("relu into a sum", 0.2), ("dropout", 0.75), ("rms", 0.7)]
)
def test_it_holds_less_of_them(kind, most):
    torch.manual_seed(0)
    model, x = Own(kind).train(), torch.randn(4, 32, 32, requires_grad=True)
    before = hb.held(model, lambda: model(x).sum())
    hb.apply_(model, hb.Lean())
    assert hb.held(model, lambda: model(x).sum()) <= most * before


def test_a_convolution_with_a_frozen_weight_holds_no_input():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, stride=2), nn.Conv2d(8, 4, 1)).train()
    model[1].weight.requires_grad_(False)
    x = torch.randn(2, 3, 32, 32, requires_grad=True)
    model(x).square().sum().backward()
    wanted = [x.grad.clone(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
    before = hb.held(model, lambda: model(x).sum())
    report = hb.apply_(model, hb.Lean())
    model.zero_grad()
    x.grad = None
    model(x).square().sum().backward()
    found = [x.grad, *[p.grad for p in model.parameters() if p.grad is not None]]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert before - hb.held(model, lambda: model(x).sum()) == 4 * 2 * 8 * 30 * 30
    assert "not held: only its shape is needed" in report.table()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, 2, 1),
        nn.AvgPool2d(3, 2, 1),
        nn.AdaptiveAvgPool2d(4),
        nn.AdaptiveMaxPool2d(4),
        nn.AdaptiveAvgPool2d(1),
    ],
)
def test_pooling_holds_a_shape(pool, layout):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), pool).to(memory_format=layout).train()
    x = torch.randn(2, 3, 18, 18).to(memory_format=layout).requires_grad_()
    (model(x) ** 2).sum().backward()
    wanted = [x.grad.clone(), model[0].weight.grad.clone()]
    before = hb.held(model, lambda: model(x).sum())
    hb.apply_(model, hb.Lean())
    x.grad = None
    model.zero_grad()
    (model(x) ** 2).sum().backward()
    assert torch.equal(x.grad, wanted[0]) and torch.equal(model[0].weight.grad, wanted[1])
    left = hb.held(model, lambda: model(x).sum())
    assert left < before or isinstance(pool, nn.AdaptiveAvgPool2d)
    assert left - 4 * x.numel() <= 4 * model(x).numel(), "the input of the convolution, and indices of 32 bits"


def test_frozen_linear_layers_and_adapters():
    peft = pytest.importorskip("peft")
    grads = []
    for order in ("plain", "before", "after"):
        torch.manual_seed(0)
        model, batch = zoo.make("bert", layers=2)
        config = peft.LoraConfig(target_modules=["query", "value"], r=4, lora_dropout=0.0, init_lora_weights=False)
        if order == "before":
            hb.apply_(model, hb.Lean())
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config).train()
        if order == "after":
            hb.apply_(model, hb.Lean())
        grads.append(gradients(model, batch)[1])
    assert grads[0] and all(k.count("lora") for k in grads[0])
    assert worst(grads[1], grads[0]) == 0 and worst(grads[2], grads[0]) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["vit", "llama", "convnext", "resnet"])
def test_autocast_changes_no_bit_more(name, dtype):
    model, batch = make(name)
    plain = copy.deepcopy(model)
    hb.apply_(model, hb.Lean())
    found = []
    for m in (plain, model):
        with torch.autocast("cpu", dtype=dtype):
            loss = zoo.loss(m, batch)
        loss.backward()
        found.append((loss.detach(), {k: p.grad for k, p in m.named_parameters() if p.grad is not None}))
    assert torch.equal(found[0][0], found[1][0])
    assert worst(found[1][1], found[0][1]) == 0


@pytest.mark.parametrize("settings", [{"affine": False}, {"track_running_stats": False}, {"momentum": None}])
def test_under_autocast_a_batch_norms_output_is_bit_by_bit_what_it_was(settings):
    torch.manual_seed(0)
    parts = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, **settings), nn.GELU()) for _ in range(2)]
    model, x = nn.Sequential(*parts[0], *parts[1], nn.Conv2d(8, 8, 1)).train(), torch.randn(8, 8, 8, 8)
    plain = copy.deepcopy(model)
    hb.apply_(model, hb.Lean())
    found = []
    for m in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = m(x).float().square().sum()
        loss.backward()
        found.append([p.grad for p in m.parameters()] + list(m.buffers()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_under_autocast_a_batch_norms_output_is_computed_is_computed_again_too():
    model, (x,) = resnet(16)
    copies = sum(p.numel() * 2 for p in model.parameters() if p.ndim > 1)  # of the weights, which autocast makes
    held = []
    for m in (copy.deepcopy(model), hb.apply_(model, hb.Lean()) and model):
        with torch.autocast("cpu", torch.bfloat16):
            held.append(hb.held(m, lambda m=m: m(x).float().sum()) - copies)
    assert held[1] < 0.6 * held[0]


def test_channels_last_keeps_its_layout():
    model, (x,) = resnet()
    model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    loss, wanted = gradients(copy.deepcopy(model), (x,))
    hb.apply_(model, hb.Lean())
    mine, found = gradients(model, (x,))
    assert torch.equal(mine, loss) and worst(found, wanted) < 1e-6
    assert model.conv1.weight.grad.is_contiguous(memory_format=torch.channels_last)


# What users do


def test_changing_a_tensor_that_only_a_computation_needs_is_allowed():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(64))

        def forward(self, x):
            h = x * 1  # nobody saves h: it is held for h.float() alone
            y = h.float().pow(2) * self.w
            with torch.no_grad():
                h.zero_()
            return y

    x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
    model = Cast().train()
    model(x).sum().backward()
    wanted = x.grad.clone(), model.w.grad.clone()
    hb.apply_(model, hb.Lean())
    x.grad = model.w.grad = None
    model(x).sum().backward()
    assert torch.equal(x.grad, wanted[0]) and torch.equal(model.w.grad, wanted[1])


def test_changing_a_saved_tensor_is_an_error_as_in_plain_training():
    class Bad(nn.Module):
        def forward(self, x):
            h = x * 2
            y = h.pow(2)
            h.add_(1)
            return y

    model = Bad().train()
    hb.apply_(model, hb.Lean())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(8, 64, requires_grad=True)).sum().backward()


def test_double_backward_equals_plains():
    torch.manual_seed(0)
    model, x = Own("gated").double().train(), torch.randn(2, 3, 32, dtype=torch.float64, requires_grad=True)
    found = []
    for methods in ((), (hb.Lean(),)):
        if methods:
            hb.apply_(model, *methods)
        (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), [x, model.a.weight]))
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_a_second_backward_gives_the_same_gradient(name):
    model, batch = make(name)
    hb.apply_(model, hb.Lean())
    loss = zoo.loss(model, batch)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(first, (p for p in model.parameters() if p.grad is not None), strict=True))


def test_accumulation_equals_the_sum():
    model, batch = zoo.make("vit", layers=2)
    hb.apply_(model, hb.Lean())
    _, once = gradients(model, batch)
    (zoo.loss(model, batch) + zoo.loss(model, batch)).backward()
    assert all(torch.allclose(p.grad, 3 * once[k], rtol=1e-5, atol=1e-7) for k, p in model.named_parameters())


@pytest.mark.parametrize("how", ["recompute", "transformers", "by hand", "offload"])
@pytest.mark.parametrize("method", ["lean", "dropit(keep=0.3, activation_bits=4)"])
def test_it_composes_with_checkpointing_and_offload(how, method):
    model, batch = zoo.make("vit", layers=3)
    hb.apply_(model, *hb.parse(method))
    loss, wanted = gradients(model, batch)
    hb.remove_(model)
    context = torch.autograd.graph.save_on_cpu() if how == "offload" else torch.enable_grad()
    if how == "recompute":
        hb.apply_(model, *hb.parse(method), hb.Recompute(sparing=True))
    elif how == "transformers":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        hb.apply_(model, *hb.parse(method))
    else:
        hb.apply_(model, *hb.parse(method))
    if how == "by hand":
        loss = checkpoint(lambda: zoo.loss(model, batch), use_reentrant=False)
        model.zero_grad()
        loss.backward()
        found = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    else:
        with context:
            mine, found = gradients(model, batch)
        assert torch.equal(mine, loss)
    assert worst(found, wanted) == 0
    if how in ("recompute", "transformers"):
        small = hb.held(model, lambda: zoo.loss(model, batch))
        hb.remove_(model)
        hb.apply_(model, *hb.parse(method))
        model.gradient_checkpointing_disable()
        assert small < 0.5 * hb.held(model, lambda: zoo.loss(model, batch)), "checkpointing frees nothing"


@pytest.mark.parametrize("name", ["vit", "llama", "convnext"])
def test_beside_sbp_it_changes_no_gradient_and_holds_less(name):
    results = []
    for extra in ((), (hb.Lean(),)):
        model, batch = zoo.make(name)
        hb.apply_(model, hb.SBP(0.5), *extra)
        loss, grads = gradients(model, batch)
        results.append((loss, grads, hb.held(model, lambda m=model, b=batch: zoo.loss(m, b))))
    assert torch.equal(results[0][0], results[1][0]) and worst(results[1][1], results[0][1]) == 0
    assert results[1][2] < 0.8 * results[0][2]


@pytest.mark.parametrize("attention", ["query", "qkv"])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_beside_sbp_later_steps_hold_what_the_first_did(name, attention):
    """In the first, which is reported, every function is seen; after it, those on the parts of Streams."""
    model, batch = zoo.make(name)
    hb.apply_(model, hb.SBP(0.5, attention=attention, sampler="fixed"), hb.Lean())
    first, *later = [hb.held(model, lambda: zoo.loss(model, batch)) for _ in range(2)]
    assert later == [first]


def test_eval_and_no_grad_are_untouched(monkeypatch):
    model, batch = zoo.make("vit", layers=2)
    hb.apply_(model, hb.DropIT(0.1, activation_bits=4))
    monkeypatch.setattr(hb.ledger.Ledger, "open", lambda self: pytest.fail("a ledger was opened"))
    with torch.no_grad():
        zoo.call(model, batch)
    model.eval()
    zoo.call(model, batch)


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError, Interrupted])
def test_a_forward_that_breaks_off_leaves_nothing_behind(error):
    model, batch = zoo.make("vit", layers=2)
    hb.apply_(model, hb.Lean())

    def stop(*_):
        raise error

    handle = model.vit.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(error):
        zoo.loss(model, batch)
    handle.remove()
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert model._halfback.states[0].ledger is None
    gradients(model, batch)


def test_training_does_not_grow():
    model, batch = resnet()
    hb.apply_(model, hb.DropIT(0.2))

    def alive():
        gc.collect()
        return sum(type(o) in (Entry, torch.Tensor) for o in gc.get_objects())

    gradients(model, batch)
    gradients(model, batch)
    before = alive()
    for _ in range(5):
        gradients(model, batch)
    assert alive() <= before


def test_the_model_stays_itself():
    import inspect

    model, batch = zoo.make("bert", layers=2)
    names, keys, signature = [n for n, _ in model.named_modules()], list(model.state_dict()), inspect.signature(model.forward)
    forward = {n: dict(m.__dict__) for n, m in model.named_modules()}
    hb.apply_(model, hb.DropIT(0.5))
    assert [n for n, _ in model.named_modules()] == names and list(model.state_dict()) == keys
    assert inspect.signature(model.forward) == signature
    wanted = gradients(model, batch)[1]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other._halfback.states[0].calls = 0
        assert worst(gradients(other, batch)[1], wanted) == 0
        with torch.no_grad():
            next(other.parameters()).add_(1)
    assert worst(gradients(model, batch)[1], wanted) == 0
    hb.remove_(model)
    assert all(m.__dict__.keys() == forward[n].keys() for n, m in model.named_modules())


def test_a_tied_weight_and_a_layer_called_three_times():
    class Thrice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

        def forward(self, x):
            for _ in range(3):
                x = x + F.gelu(self.layer(self.norm(x)))
            return F.linear(x, self.layer.weight)

    torch.manual_seed(0)
    model, x = Thrice().double().train(), torch.randn(4, 5, 32, dtype=torch.float64)
    model(x).square().sum().backward()
    wanted = model.layer.weight.grad.clone()
    hb.apply_(model, hb.Lean())
    model.zero_grad()
    model(x).square().sum().backward()
    assert torch.equal(model.layer.weight.grad, wanted)


class Tripled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.first(x)
        before = F.silu(h)
        h.data = h.data * 3
        return (self.second(F.gelu(h)) + before).sum()


def test_a_tensor_that_was_given_other_data_is_another():
    torch.manual_seed(0)
    model, x = Tripled(), torch.randn(4, 8)
    model(x).backward()
    plain = model.second.weight.grad.clone()
    model.zero_grad()
    hb.apply_(model, hb.Lean())
    model(x).backward()
    assert torch.allclose(model.second.weight.grad, plain, atol=1e-6)


class Latents(nn.Module):
    """Learned queries, views of a parameter, go through blocks that are computed again."""

    def __init__(self, how, checkpoints):
        super().__init__()
        self.latents, self.blocks = nn.Parameter(torch.randn(5, 16)), nn.ModuleList(Crossed() for _ in range(2))
        self.how, self.checkpoints = how, checkpoints

    def forward(self, x):
        y = self.how(self.latents, len(x))
        for block in self.blocks:
            y = checkpoint(block, y, x, use_reentrant=False) if self.checkpoints else block(y, x)
        return y


class Crossed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.q, self.kv, self.out = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, y, x):
        k, v = self.kv(x).chunk(2, -1)
        return y + self.out(F.scaled_dot_product_attention(self.q(self.norm(y)), k, v))


@pytest.mark.parametrize("how", [lambda p, n: p.expand(n, -1, -1), lambda p, n: p[None].repeat_interleave(n, 0), lambda p, n: p[None]])
@pytest.mark.parametrize(("text", "checkpoints"), [("lean", True), ("lean+recompute(sparing=True)", False), ("lean", False)])
def test_parts_of_a_parameter_enter_blocks_that_are_computed_again(text, checkpoints, how):
    torch.manual_seed(0)
    model, x = Latents(how, checkpoints).double(), torch.randn(1, 7, 16, dtype=torch.float64)
    model(x).pow(2).sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    hb.apply_(model, *hb.parse(text))
    model(x).pow(2).sum().backward()
    assert all(torch.allclose(p.grad, wanted[name], rtol=1e-12) for name, p in model.named_parameters())


@pytest.mark.parametrize("how", ["root", "part", "checkpointed", "part, checkpointed, then root"])
def test_the_report_tells_of_a_whole_forward_however_the_model_is_run(how):
    """A part of it, block by block; with the model's own checkpointing, what is held when the forward ends."""
    model, _ = zoo.make("llama")
    ids = zoo.tokens(24)
    if "checkpointed" in how:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def run():
        return model.model(input_ids=ids, use_cache=False)[0] if how == "part" else model(input_ids=ids, use_cache=False).logits

    before = hb.held(model, run)
    report = hb.apply_(model, hb.Lean())
    if "then" in how:
        model.model(input_ids=ids, use_cache=False)
        assert report.before is None, "nothing is told of blocks that are freed as soon as they have ended"
    after = hb.held(model, run)
    told = report.before, report.after
    for _ in range(2):  # and a later forward changes nothing
        run().sum().backward()
    assert told == (report.before, report.after)
    assert report.before == pytest.approx(before, rel=0.03) and report.after == pytest.approx(after, rel=0.06)


def test_a_first_forward_that_fails_is_told_of_by_the_next():
    model, batch = zoo.make("vit")
    report = hb.apply_(model, hb.Lean())
    last = [m for m in model.modules() if isinstance(m, torch.nn.Linear)][-1]

    def fail(module, args):
        raise MemoryError

    hook = last.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        zoo.loss(model, batch).backward()
    hook.remove()
    assert report.before is None
    zoo.loss(model, batch).backward()
    assert report.before > report.after > 0


def test_a_pickle_from_before_there_was_a_word_about_the_root_trains():
    model, batch = zoo.make("vit")
    hb.apply_(model, hb.Lean())
    (watch,) = (s for a in applied_to(model) for s in a.states)
    state = {k: v for k, v in watch.__getstate__().items() if k != "told"}
    vars(watch).clear()
    watch.__setstate__(state)
    zoo.loss(model, batch).backward()
    assert watch.told


def test_a_look_at_a_model_leaves_the_account_to_its_first_step():
    model, batch = zoo.make("vit")
    report = hb.apply_(model, hb.Lean())
    hb.profile(model, batch)
    hb.audit(model, batch)
    assert report.before is None
    zoo.loss(model, batch).backward()
    assert report.before > report.after
