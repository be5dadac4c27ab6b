"""Blocks written in unusual ways: the forward stays the plain model's and no gradient is lost, or an error says what to do."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfback as hb

D, N = 8, 12


class Block(nn.Module):
    """x + branch, with the body of the case at hand."""

    def __init__(self, body):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)
        self.g = nn.Parameter(torch.linspace(0.5, 1.5, D))
        self.c = nn.Conv1d(D, D, 3, padding=1)
        self.body = body

    def branch(self, x):
        return self.b(F.gelu(self.a(self.norm(x))))

    def forward(self, x):
        return self.body(self, x)


def model_of(body, blocks=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, D), nn.Sequential(*[Block(body) for _ in range(blocks)])).double().train()


def into(target, name, value):
    getattr(target, name)(value)
    return target


FINE = {
    "x + y": lambda m, x: x + m.branch(x),
    "y + x": lambda m, x: m.branch(x) + x,
    "alpha": lambda m, x: torch.add(x, m.branch(x), alpha=0.5),
    "by keyword": lambda m, x: torch.add(input=x, other=m.branch(x)),
    "minus minus": lambda m, x: x - (-m.branch(x)),
    "addcmul": lambda m, x: torch.addcmul(x, m.g, m.branch(x)),
    "accumulated in zeros": lambda m, x: x + into(torch.zeros_like(x), "add_", m.branch(x)),
    "plain tensor times streams in place": lambda m, x: x + into(torch.ones(2, N, D, dtype=x.dtype), "mul_", m.branch(x)),
    "in place on a branch": lambda m, x: x + m.branch(x).mul_(3.0).clamp_(-1, 1),
    "relu in place": lambda m, x: x + m.b(F.relu(m.a(m.norm(x)), inplace=True)),
    "type_as": lambda m, x: x + m.branch(x).type_as(x) * m.g.type_as(x),
    "to another": lambda m, x: x + m.branch(x).to(x) * m.g.to(x),
    "expand_as": lambda m, x: x + m.branch(x) * m.g.expand_as(x),
    "keyword matmul": lambda m, x: x + torch.matmul(input=m.norm(x), other=m.a.weight),
    "keyword mean": lambda m, x: x + m.branch(x) * torch.mean(input=m.branch(x), dim=-1, keepdim=True),
    "keyword chunk": lambda m, x: x + torch.cat(torch.chunk(input=m.branch(x), chunks=2, dim=-1)[::-1], -1),
    "keyword convolution": lambda m, x: x + F.conv1d(input=x.transpose(1, 2), weight=m.c.weight, padding=1).transpose(1, 2),
    "folded": lambda m, x: x + m.branch(x.reshape(-1, D)).view(x.shape),
    "pooled gate": lambda m, x: x + m.branch(x) * torch.sigmoid(m.a(x.mean(1, keepdim=True))),
    "first token": lambda m, x: x + m.branch(x) * m.a(x[:, :1]),
    "new axis": lambda m, x: x + (m.branch(x)[:, :, None] * torch.ones(2, 1, dtype=x.dtype)).sum(2),
    "strided": lambda m, x: x + torch.stack((-m.branch(x)[..., 1::2], m.branch(x)[..., ::2]), -1).flatten(-2),
    "einsum": lambda m, x: x + torch.einsum("bnd,ed->bne", m.norm(x), m.a.weight),
    "dropout in place": lambda m, x: x + F.dropout(m.branch(x), 0.0, True, True),
    "checkpointed part": lambda m, x: x + checkpoint(lambda z: m.branch(z), x, use_reentrant=False),
    "chosen features": lambda m, x: x + torch.zeros_like(x).scatter(2, m.a(x).topk(2, -1).indices, m.branch(x).topk(k=2).values),
    "sorted features": lambda m, x: x + m.branch(x).gather(2, m.a(x).sort(descending=True)[1]) * m.a(x).max(-1, True).values,
    "best feature": lambda m, x: x + m.branch(x) * m.a(x).amax(-1, True) * m.b(x).min(2)[0].sigmoid()[..., None],
    "argmax": lambda m, x: x + m.branch(x) * F.one_hot(m.a(x).argmax(-1), D),
    "where": lambda m, x: x + m.branch(x).index_put((torch.where(m.a(x) > 9)), torch.zeros((), dtype=x.dtype)),
    "sorted by name": lambda m, x: x + m.branch(x) * torch.sort(m.a(x), dim=-1, stable=True).values,
    "largest by name": lambda m, x: x + m.branch(x) * torch.topk(m.a(x), k=1, dim=2, largest=False, sorted=True).values,
    "order": lambda m, x: x + m.branch(x).gather(-1, m.a(x).argsort(dim=-1, descending=True)),
    "gathered by a plain index": lambda m, x: x + m.branch(x).gather(2, torch.arange(D).flip(0).expand(2, N, D)),
    "where by name": lambda m, x: torch.where(condition=m.a(x) > 0, input=x, other=x + m.branch(x)),
    "norm of a function": lambda m, x: x + m.branch(x) * torch.norm(m.a(x), dim=1, keepdim=True),
    "as numbers": lambda m, x: x + m.branch(x) * (m.a(x) > 0).long() * m.a(x).bool(),
    "a folded plain tensor": lambda m, x: x + (m.branch(x).view(-1, D) * torch.arange(2.0 * N).to(x)[:, None]).view(x.shape),
    "a norm over positions": lambda m, x: x + m.branch(x) * m.a(x).norm(p=2, dim=1, keepdim=True),
    "looked at without gradients": lambda m, x: looked_at(m, x),
    "chosen without gradients": lambda m, x: chosen_without(m, x),
    "transposed": lambda m, x: x + m.branch(x.mT.mT).permute(2, 1, 0).movedim(0, -1).transpose(0, 1),
}


COMPILED = ("chosen features", "sorted features", "sorted by name", "largest by name", "best feature", "argmax", "where by name")


@pytest.mark.filterwarnings("ignore")  # of torch's own, while it traces
@pytest.mark.parametrize("case", COMPILED)
def test_what_chooses_compiles_with_the_gradients_of_eager_mode(case):
    torch._dynamo.reset()
    x, found = torch.randn(2, N, 3, dtype=torch.float64), []
    for compiled in (False, True):
        model = model_of(FINE[case], 2)
        hb.apply_(model, hb.SBP(0.5, layers="all", seed=3))
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        run(x).square().mean().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", FINE)
def test_the_forward_stays_and_no_gradient_is_lost(case):
    model, x = model_of(FINE[case]), torch.randn(2, N, 3, dtype=torch.float64)
    plain = model(x)
    plain.pow(2).mean().backward()
    wanted = {k for k, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    model.zero_grad()
    hb.apply_(model, hb.SBP(0.5, layers="all", always=0))
    out = model(x)
    assert (out - plain).abs().max() < 1e-9
    out.pow(2).mean().backward()
    assert wanted == {k for k, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x.detach() * w

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


def in_place_on_view(m, x):
    y = m.branch(x)
    y[..., :4].mul_(3.0)
    return x + y


def assigned(m, x):
    y = m.branch(x)
    y[..., :4] = 0
    return x + y


def hooked(m, x):
    y = m.branch(x)
    y.register_hook(lambda g: g)
    return x + y


def looked_at(m, x):
    with torch.no_grad():
        m.seen = x.abs().mean()
        m.ema = torch.zeros(D, dtype=x.dtype)
        m.ema.lerp_(m.norm(x).mean((0, 1)), 0.5)
    return x + m.branch(x)


@torch.no_grad()
def best(m, x):
    """Which positions an attention that chooses them looks at."""
    return (m.a(x) @ m.b(x).transpose(1, 2)).topk(4, -1).indices


def chosen_without(m, x):
    y = m.branch(x)
    kept = torch.zeros(2, N, N, dtype=x.dtype).scatter(2, best(m, x), 1.0)
    return x + kept @ y * (1 - best(m, x)[..., :1].type_as(x) / N)


def changed_without(m, x):
    with torch.no_grad():
        x.mul_(2.0)
    return x + m.branch(x)


def view_without(m, x):
    y = m.branch(x)
    with torch.no_grad():
        y[..., :2].mul_(2.0)
    return x + y


def assigned_without(m, x):
    y = m.branch(x)
    with torch.no_grad():
        y[..., :4] = 0
    return x + y


def out_without(m, x):
    y = m.branch(x)
    with torch.no_grad():
        torch.mul(y, 2.0, out=y)
    return x + y


REFUSED = {
    "in place on a view": (in_place_on_view, "in place on a view"),
    "assigned": (assigned, "cannot assign to a part"),
    "copied into": (lambda m, x: x + into(m.branch(x), "copy_", m.branch(x)), r"cannot run copy_\(\) in place"),
    "zeroed": (lambda m, x: x + m.branch(x).zero_(), r"cannot run zero_\(\) in place"),
    "tensor hook": (hooked, r"register_hook\(\) .* would never be called"),
    "custom function": (lambda m, x: x + Reverse.apply(m.branch(x), m.g), "opaque="),
    "in place on a view without gradients": (view_without, r"cannot run mul_\(\) in place"),
    "into a view without gradients": (out_without, r"cannot run mul\(\) in place"),
    "assigned without gradients": (assigned_without, "cannot assign to a part"),
    "in place on data": (lambda m, x: x + into(m.branch(x).data, "mul_", 2.0), "in place on a view"),
    "in place without gradients": (changed_without, r"cannot run mul_\(\) in place"),
    "reentrant": (lambda m, x: x + checkpoint(m.branch, x, use_reentrant=True), "use_reentrant=False"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_wrong_in_silence_is_refused(case):
    body, message = REFUSED[case]
    model, x = model_of(body), torch.randn(2, N, 3, dtype=torch.float64)
    hb.apply_(model, hb.SBP(0.5, layers="all"))
    with pytest.raises(RuntimeError, match=message):
        model(x)


NORMS = {  # each with the same, written so that it is merged
    "of a vector": (lambda y: torch.linalg.vector_norm(y, dim=1, keepdim=True), lambda y: y.square().sum(1, True).sqrt()),
    "of a tensor": (lambda y: y.norm(dim=(1,))[:, None], lambda y: y.square().sum(1, True).sqrt()),
    "sums": (lambda y: torch.linalg.vector_norm(y, 1, -2, True), lambda y: y.abs().sum(1, True)),
    "largest": (lambda y: torch.linalg.vector_norm(y, torch.inf, dim=[1], keepdim=True), lambda y: y.abs().amax(1, True)),
}


@pytest.mark.filterwarnings("ignore")  # of torch's own, while it traces
@pytest.mark.parametrize("case", NORMS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_norm_over_positions_has_the_gradients_of_a_merged_one(case, compiled):
    torch._dynamo.reset()
    found, x = [], torch.randn(2, N, 3, dtype=torch.float64)
    for norm in NORMS[case]:
        model = model_of(lambda m, x, norm=norm: x + m.branch(x) * norm(m.a(x)))
        report = hb.apply_(model, hb.SBP(0.5, layers="all", seed=3))
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        run(x).square().mean().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
        assert bool(report.merged) == (norm is NORMS[case][1])
    for mine, merged in zip(*found, strict=True):
        torch.testing.assert_close(mine, merged, rtol=1e-10, atol=1e-12)


def test_what_is_looked_at_without_gradients_is_what_the_plain_model_sees():
    model, x = model_of(looked_at), torch.randn(2, N, 3, dtype=torch.float64)
    model(x)
    plain = [(block.seen, block.ema) for block in model[1]]
    report = hb.apply_(model, hb.SBP(0.5, layers="all"))
    model(x).sum().backward()
    for block, was in zip(model[1], plain, strict=True):
        torch.testing.assert_close((block.seen, block.ema), was)
        assert not block.seen.requires_grad
    assert not report.merged, "no gradient is lost there, and nothing held"


def test_a_frozen_input_does_not_hide_a_custom_function():
    model, x = model_of(lambda m, x: x + Reverse.apply(x, m.g), 2), torch.randn(2, N, 3, dtype=torch.float64)
    model[0].requires_grad_(False)
    hb.apply_(model, hb.SBP(0.5, layers="all"))
    with pytest.raises(RuntimeError, match="opaque="):
        model(x)


@pytest.mark.parametrize("mode", ["query", "qkv"])
def test_gemma_and_its_type_as(mode):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=50
    )
    model, ids = Gemma2ForCausalLM(config).train(), torch.randint(0, 50, (2, 16))
    plain = model(ids, use_cache=False).logits
    hb.apply_(model, hb.SBP(layers="all", attention=mode))
    assert (model(ids, use_cache=False).logits - plain).abs().max() < 1e-5


def bart():
    from transformers import BartConfig, BartModel

    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = BartConfig(**sizes, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=50, dropout=0.0, max_position_embeddings=64)
    return BartModel(config).train(), torch.randint(3, 50, (2, 16))


def test_encoder_and_decoder_and_an_encoder_alone():
    model, ids = bart()
    plain = model(ids, decoder_input_ids=ids, use_cache=False).last_hidden_state
    hb.apply_(model, hb.SBP(layers="all"))
    out = model(ids, decoder_input_ids=ids, use_cache=False).last_hidden_state
    assert (out - plain).abs().max() < 1e-5
    steps = model._halfback.states[0].step.item()
    for i in range(3):
        assert isinstance(model.get_encoder()(ids).last_hidden_state, torch.Tensor)
        assert model._halfback.states[0].step == steps + 1 + i, "each call has its own mask"


@dataclasses.dataclass
class Output:
    features: list


class Collects(nn.Module):
    def __init__(self):
        super().__init__()
        self.stack = nn.ModuleList([Block(FINE["x + y"]) for _ in range(3)])

    def forward(self, x):
        features = []
        for block in self.stack:
            x = block(x=x)
            features.append(x)
        return Output(features)


@pytest.mark.parametrize("methods", ["sbp(layers='all')", "sbp(layers='all')+recompute"])
def test_blocks_called_by_keyword_and_features_in_a_dataclass(methods):
    model, x = Collects().train(), torch.randn(2, N, D)
    plain = model(x).features
    hb.apply_(model, *hb.parse(methods))
    ours = model(x).features
    assert all(isinstance(a, torch.Tensor) and (a - b).abs().max() < 1e-5 for a, b in zip(ours, plain, strict=True))
    ours[-1].sum().backward()


def test_a_part_of_a_model_with_methods_is_refused():
    model, _ = zoo.make("vit", layers=3)
    hb.apply_(model, hb.SBP())
    with pytest.raises(ValueError, match="is part of a model that has methods"):
        hb.apply_(model.vit, hb.Recompute())


def test_a_block_that_is_exact_throughout_is_said_to_be():
    model = model_of(lambda m, x: x + m.branch(x.sort(1).values), 2)
    report = hb.apply_(model, hb.SBP(layers="all"))
    model(torch.randn(2, N, 3, dtype=torch.float64))
    assert "nothing was cut" in str(report)


def test_users_forward_hooks_on_the_last_block_see_a_tensor():
    model, batch = zoo.make("vit", layers=3)
    seen = []
    model.vit.layers[2].register_forward_hook(lambda m, a, o: seen.append(type(o)))
    hb.apply_(model, hb.SBP(layers="all"))
    model.vit.layers[2].register_forward_hook(lambda m, a, o: seen.append(type(o)))
    zoo.call(model, batch)
    assert seen == [torch.Tensor, torch.Tensor]


def test_backward_hooks_that_cannot_fire_are_reported():
    model, _ = zoo.make("vit", layers=3)
    model.vit.layers[1].mlp.register_full_backward_hook(lambda m, a, b: None)
    assert "backward hooks" in str(hb.apply_(model, hb.SBP(layers="all")))


def test_alibi_masks_and_other_value_widths():
    torch.manual_seed(0)
    alibi = torch.randn(4, N, N)

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.q, self.v = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(D, 4 * 5)
            self.o = nn.Linear(20, D)

        def forward(self, x):
            n = self.norm(x)
            q = self.q(n).view(2, N, 4, D).transpose(1, 2)
            v = self.v(n).view(2, N, 4, 5).transpose(1, 2)
            a = F.scaled_dot_product_attention(q, q, v, alibi)
            return x + self.o(a.transpose(1, 2).reshape(2, N, 20))

    model, x = nn.Sequential(Attends(), Attends()).train(), torch.randn(2, N, D)
    plain = model(x)
    for mode in ("query", "qkv", "heads"):
        hb.apply_(model, hb.SBP(layers="all", attention=mode))
        assert (model(x) - plain).abs().max() < 1e-5
        model(x).sum().backward()
        hb.remove_(model)
