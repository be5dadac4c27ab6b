"""Modules that treat each position by itself: run once for kept and once for dropped positions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

import halfback as hb

D, N, E = 8, 12, 4


class Experts(nn.Module):
    """As transformers has them: tokens are picked by index, expert by expert."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(E, 2 * D, D)), nn.Parameter(torch.randn(E, D, 2 * D))

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for e in range(E):
            token, place = torch.where(index == e)
            y = F.linear(F.gelu(F.linear(x[token], self.up[e])), self.down[e])
            out.index_add_(0, token, y * weights[token, place, None])
        return out


class Dense(Experts):
    """The same, of all experts for all tokens: no index is needed."""

    def forward(self, x, index, weights):
        shares = torch.stack([((index == e) * weights).sum(-1) for e in range(E)], -1)
        made = [F.linear(F.gelu(F.linear(x, self.up[e])), self.down[e]) for e in range(E)]
        return sum(y * shares[..., e : e + 1] for e, y in enumerate(made))


class Limited(Experts):
    """An expert takes no more than three tokens, the first ones."""

    def forward(self, x, index, weights):
        for e in range(E):
            chosen = (index == e).any(-1)
            weights = weights * (~((chosen.cumsum(0) > 3) & chosen))[:, None]
        return super().forward(x, index, weights)


class Counting(Experts):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, index, weights):
        self.seen += len(x)
        if self.training:
            torch.rand(())
        return super().forward(x, index, weights)


class Mean(Experts):
    def forward(self, x, index, weights):
        out = super().forward(x, index, weights)
        return out + out.mean(0)


class Block(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.norm, self.gate, self.experts = nn.LayerNorm(D), nn.Linear(D, E), experts()

    def forward(self, x):
        flat = self.norm(x).view(-1, D)
        weights, index = self.gate(flat).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        return x + self.experts(flat, index, weights).view(x.shape)


def model_of(experts, blocks=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, D), nn.Sequential(*[Block(experts) for _ in range(blocks)])).double().train()


def inputs():
    return torch.randn(2, N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gradients(model, x=None):
    model.zero_grad()
    model(inputs() if x is None else x).square().mean().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def test_a_mixtures_gradients_are_those_of_the_same_mixture_without_indices():
    dense, mixture = model_of(Dense), model_of(Experts)
    for model in (dense, mixture):
        report = hb.apply_(model, hb.SBP(0.5, layers="all"))
    for _ in range(3):
        wanted = gradients(dense)
        torch.testing.assert_close(gradients(mixture), wanted, rtol=1e-10, atol=1e-12)
    assert not report.merged


def test_less_is_held_and_the_forward_is_the_plain_models():
    model, x = model_of(Experts), inputs()
    plain, held = model(x), hb.held(model, lambda: model(x).sum())
    hb.apply_(model, hb.SBP(0.5, layers="all", apart=()))
    merged = hb.held(model, lambda: model(x).sum())
    hb.remove_(model)
    hb.apply_(model, hb.SBP(0.5, layers="all"))
    assert hb.held(model, lambda: model(x).sum()) < 0.75 * held < 0.75 * merged
    torch.testing.assert_close(model(x), plain, rtol=1e-10, atol=1e-12)
    hb.remove_(model)
    assert all("forward" not in m.__dict__ for m in model.modules())


@pytest.mark.parametrize("experts", [Limited, Mean])
def test_experts_that_look_at_other_positions_are_merged_or_where_they_were_named_an_error(experts):
    model, x = model_of(experts), inputs()
    plain, exact = model(x), gradients(model)
    report = hb.apply_(model, hb.SBP(0.5, layers="all"))
    torch.testing.assert_close(model(x), plain, rtol=1e-10, atol=1e-12)
    assert report.merged and all(g.any() for name, g in gradients(model).items() if exact[name].any())
    hb.remove_(model)
    hb.apply_(model, hb.SBP(0.5, layers="all", apart=["1.*.experts"]))
    with pytest.raises(ValueError, match=r"SBP\(apart=\.\.\.\): 1\.0\.experts .* Leave it out of apart="):
        model(x)


def test_comparing_draws_no_noise_of_the_user_and_changes_no_buffer():
    found = []
    for known in (False, True):
        model = model_of(Counting)
        hb.apply_(model, hb.SBP(0.5, layers="all"))
        for block in model[1]:
            block.experts.forward.fits = block.experts.forward.compared = known or None
        torch.manual_seed(3)
        model(inputs())
        assert all(block.experts.forward.fits for block in model[1])
        found.append((torch.get_rng_state(), *model.buffers()))
        assert all(m.training for m in model.modules())
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert found[0][1] == 2 * N


@pytest.mark.parametrize("more", ["recompute", "lean", "dropit(keep=1)+recompute"])
def test_methods_that_are_exact_change_no_gradient_beside_it(more):
    model = model_of(Experts)
    hb.apply_(model, hb.SBP(0.5, layers="all"))
    wanted = [gradients(model) for _ in range(3)]
    hb.remove_(model)
    hb.apply_(model, *hb.parse(f"sbp(layers='all')+{more}"))
    for each in wanted:
        torch.testing.assert_close(gradients(model), each, rtol=1e-9, atol=1e-11)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class Fused(nn.Module):
    """A custom Function in a map with channels last."""

    def __init__(self):
        super().__init__()
        self.norm, self.act, self.a, self.b = nn.LayerNorm(D), Activation(), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return x + self.b(self.act(self.a(self.norm(x)), x.new_ones(x.shape)))


class Activation(nn.Module):
    def forward(self, x, ones):
        assert x.shape == ones.shape and x.ndim == 4
        return Square.apply(x) * ones


def test_a_custom_function_runs_on_parts_that_have_the_axes_of_the_whole():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, D), nn.Sequential(*[Fused() for _ in range(3)])).double().train()
    x = torch.randn(2, 4, 6, 3, dtype=torch.float64)
    plain = model(x)
    hb.apply_(model, hb.SBP(0.5, layers="all", opaque=["*.act"], apart=()))
    merged = gradients(model, x)
    hb.remove_(model)
    report = hb.apply_(model, hb.SBP(0.5, layers="all", apart="*.act"))
    torch.testing.assert_close(model(x), plain, rtol=1e-10, atol=1e-12)
    assert "1x" not in str(report) and not report.merged
    hb.remove_(model)
    hb.apply_(model, hb.SBP(0.5, layers="all", apart="*.act"))
    found = gradients(model, x)
    assert found.keys() == merged.keys() and all(g.any() for g in found.values())


@pytest.mark.filterwarnings("ignore")  # of torch's own, while it traces
@pytest.mark.parametrize("named", [False, True])
def test_compiled_one_that_nobody_named_is_merged_before_it_was_compared(named):
    torch._dynamo.reset()
    model, x = model_of(Dense), inputs()
    plain = model(x)
    given = {"apart": "*.experts"} if named else {}
    report = hb.apply_(model, hb.SBP(0.5, layers="all", **given))
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    out = fast(x)
    torch.testing.assert_close(out, plain, rtol=1e-10, atol=1e-12)
    out.square().mean().backward()
    assert all(p.grad.any() for p in model.parameters()) and not report.merged


def test_names_that_match_nothing_are_told_and_the_text_form_has_them():
    model = model_of(Experts)
    with pytest.raises(ValueError, match=r"apart='\*\.mlp' matches no module"):
        hb.apply_(model, hb.SBP(apart=["*.mlp"]))
    (method,) = hb.parse("sbp(apart='*.mlp')")
    assert method == hb.SBP(apart=("*.mlp",)) and str(hb.SBP()) == "sbp" and str(method) == "sbp(apart=('*.mlp',))"


def mixtral(**more):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**sizes, vocab_size=100, num_local_experts=4, use_cache=False, **more)).train()


def test_what_is_counted_without_contents_is_what_is_held():
    model, batch = mixtral().bfloat16(), {"input_ids": zoo.tokens(24), "labels": zoo.tokens(24)}
    plain = hb.profile(model, batch).held
    hb.apply_(model, hb.SBP(0.5, layers="all"))
    foreseen = hb.profile(model, batch).held
    assert foreseen == hb.profile(model, batch, real=True).held < 0.7 * plain


def test_the_loss_that_balances_experts_is_the_plain_models():
    model, tokens = mixtral(output_router_logits=True), zoo.tokens(24)
    mask = torch.ones_like(tokens)
    mask[1, 17:] = 0
    plain = model(input_ids=tokens, attention_mask=mask, labels=tokens)
    hb.apply_(model, hb.SBP(0.5, layers="all"))
    out = model(input_ids=tokens, attention_mask=mask, labels=tokens)
    torch.testing.assert_close((out.aux_loss, out.loss), (plain.aux_loss, plain.loss), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.router_logits, plain.router_logits, rtol=1e-5, atol=1e-5)
    out.loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
