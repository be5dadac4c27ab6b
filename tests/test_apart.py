"""Modules that treat each position by itself: run once for kept and once for dropped positions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

import halfback as hb

D, N, E = 8, 12, 4
NAMES = ("*.experts",)


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
        report = hb.apply_(model, hb.SBP(0.5, layers="all", apart=NAMES))
    for _ in range(3):
        wanted = gradients(dense)
        torch.testing.assert_close(gradients(mixture), wanted, rtol=1e-10, atol=1e-12)
    assert not report.merged


def test_less_is_held_and_the_forward_is_the_plain_models():
    model, x = model_of(Experts), inputs()
    plain, held = model(x), hb.held(model, lambda: model(x).sum())
    hb.apply_(model, hb.SBP(0.5, layers="all"))
    merged = hb.held(model, lambda: model(x).sum())
    hb.remove_(model)
    hb.apply_(model, hb.SBP(0.5, layers="all", apart=NAMES))
    assert hb.held(model, lambda: model(x).sum()) < 0.75 * held < 0.75 * merged
    torch.testing.assert_close(model(x), plain, rtol=1e-10, atol=1e-12)
    hb.remove_(model)
    assert all("forward" not in m.__dict__ for m in model.modules())


class Doubling(Experts):
    def forward(self, x, index, weights):
        weights *= 2
        return super().forward(x, index, weights)


class Remembering(Counting):
    def forward(self, x, index, weights):
        self.aux = weights.square().mean()
        return super().forward(x, index, weights)


class Averaging(Counting):
    def forward(self, x, index, weights):
        self.seen.lerp_(weights.mean().detach(), 0.5)
        return Experts.forward(self, x, index, weights)


class Asserting(Experts):
    def forward(self, x, index, weights):
        assert len(x) == 2 * N
        return super().forward(x, index, weights)


@pytest.mark.parametrize(
    ("experts", "says"),
    [
        (Limited, "what it returns differs, so it looks at other positions"),
        (Mean, "what it returns differs, so it looks at other positions"),
        (Doubling, "it changes an argument in place"),
        (Remembering, "it leaves something else in its buffers or attributes"),
        (Averaging, "it leaves something else in its buffers or attributes"),
        (Asserting, "AssertionError"),
    ],
)
def test_what_does_something_else_in_two_runs_is_an_error_and_merged_otherwise(experts, says):
    model, x = model_of(experts), inputs()
    plain, exact = model(x), gradients(model)
    buffers = [b.clone() for b in model.buffers()]
    hb.apply_(model, hb.SBP(0.5, layers="all", apart=NAMES))
    with pytest.raises(ValueError, match=rf"(?s)SBP\(apart=\.\.\.\): 1\.0\.experts .*{says}.* Leave it out of apart="):
        model(x)
    hb.remove_(model)
    torch.testing.assert_close(list(model.buffers()), buffers, rtol=0, atol=0)
    assert all(m.training for m in model.modules())
    if experts is not Doubling:  # which halfback refuses
        hb.apply_(model, hb.SBP(0.5, layers="all"))
        torch.testing.assert_close(model(x), plain, rtol=1e-10, atol=1e-12)
        assert all(g.any() for name, g in gradients(model).items() if exact[name].any())


def test_comparing_draws_no_noise_of_the_user_and_changes_no_buffer():
    found = []
    for known in (False, True):
        model = model_of(Counting)
        hb.apply_(model, hb.SBP(0.5, layers="all", apart=NAMES))
        for block in model[1]:
            block.experts.forward.compared = known
        torch.manual_seed(3)
        model(inputs())
        assert all(block.experts.forward.compared for block in model[1])
        found.append((torch.get_rng_state(), *model.buffers()))
        assert all(m.training for m in model.modules())
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert found[0][1] == 2 * N


class Merging(Experts):
    """As LoRA that is merged into the weights when a model is set to eval mode."""

    def train(self, mode=True):
        with torch.no_grad():
            self.up.mul_(1 if mode else 0)
        return super().train(mode)


def test_comparing_calls_nobodys_train_and_a_map_that_is_whole_keeps_its_gradient():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts, self.merging = Activation(), Merging()

        def forward(self, x):
            return x + self.experts(x, torch.ones_like(x))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, D), nn.Sequential(*[Whole() for _ in range(3)])).double().train()
    model[1][0].experts.merging = model[1][0].merging
    up = model[1][0].merging.up.detach().clone()
    hb.apply_(model, hb.SBP(0.5, layers=["1.*"], apart=NAMES))
    model(torch.randn(2, 4, 6, 3, dtype=torch.float64)).square().mean().backward()
    assert model[0].weight.grad.any() and torch.equal(model[1][0].merging.up, up)


class Early(nn.Module):
    """Tokens are sent to experts before attention mixes them."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.one, self.two, self.gate, self.experts = nn.LayerNorm(D), nn.LayerNorm(D), nn.Linear(D, E), Experts()

    def forward(self, x):
        weights, index = self.gate(self.one(x)).view(-1, E).softmax(-1).topk(2, -1)
        y = self.one(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.experts(self.two(x).view(-1, D), index, weights).view(x.shape)


def test_experts_that_are_chosen_before_attention_are_recomputed():
    found = []
    for more in ("", "+recompute"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, D), nn.Sequential(*[Early() for _ in range(3)])).double().train()
        hb.apply_(model, *hb.parse(f"sbp(keep=0.25, layers='all', apart='*.experts'){more}"))
        found.append([gradients(model) for _ in range(3)])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("more", ["recompute", "lean", "dropit(keep=1)+recompute"])
def test_methods_that_are_exact_change_no_gradient_beside_it(more):
    model = model_of(Experts)
    hb.apply_(model, hb.SBP(0.5, layers="all", apart=NAMES))
    wanted = [gradients(model) for _ in range(3)]
    hb.remove_(model)
    hb.apply_(model, *hb.parse(f"sbp(layers='all', apart='*.experts')+{more}"))
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


class Written(nn.Module):
    """The same activation by torch's own functions."""

    def forward(self, x, ones):
        return x * x * ones


def test_a_custom_function_runs_on_parts_and_has_the_gradients_of_torchs_own_functions():
    found, x = [], torch.randn(2, 4, 6, 3, dtype=torch.float64)
    for activation, names in ((Activation, "*.act"), (Written, ())):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, D), nn.Sequential(*[Fused() for _ in range(3)])).double().train()
        for block in model[1]:
            block.act = activation()
        plain = model(x)
        report = hb.apply_(model, hb.SBP(0.5, layers="all", apart=names))
        torch.testing.assert_close(model(x), plain, rtol=1e-10, atol=1e-12)
        assert not report.merged
        found.append(gradients(model, x))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore")  # of torch's own, while it traces
@pytest.mark.parametrize("named", [False, True])
def test_it_compiles(named):
    torch._dynamo.reset()
    model, x = model_of(Dense), inputs()
    plain = model(x)
    report = hb.apply_(model, hb.SBP(0.5, layers="all", apart=NAMES if named else ()))
    wanted = gradients(model)
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(fast(x), plain, rtol=1e-10, atol=1e-12)
    assert not report.merged and report.apart == [f"1.{i}.experts" for i in range(3)] * named
    for m in model.modules():
        if hasattr(m, "_halfback"):
            m._halfback.states[0].step.zero_()
    model.zero_grad()
    fast(x).square().mean().backward()
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters()}, wanted, rtol=1e-9, atol=1e-11)


def test_names_that_match_nothing_are_told_and_the_text_form_has_them():
    model = model_of(Experts)
    with pytest.raises(ValueError, match=r"apart='\*\.mlp' matches no module"):
        hb.apply_(model, hb.SBP(apart=["*.mlp"]))
    with pytest.raises(ValueError, match=r"apart=\('0',\): 0 is not inside of a chosen block, as 1\.1"):
        hb.apply_(model, hb.SBP(apart="0"))
    model[1][1].experts.norm = nn.BatchNorm1d(D)
    with pytest.raises(ValueError, match=r"1\.1\.experts has a BatchNorm1d, whose statistics are of all positions"):
        hb.apply_(model, hb.SBP(apart="*.experts"))
    assert "if each position goes through 1.1.experts, 1.2.experts by itself, SBP(apart=['*.experts'])" in str(hb.apply_(model, hb.SBP()))
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
    hb.apply_(model, hb.SBP(0.5, layers="all", apart=NAMES))
    foreseen = hb.profile(model, batch).held
    assert foreseen == hb.profile(model, batch, real=True).held < 0.7 * plain


def test_the_loss_that_balances_experts_is_the_plain_models():
    model, tokens = mixtral(output_router_logits=True), zoo.tokens(24)
    mask = torch.ones_like(tokens)
    mask[1, 17:] = 0
    plain = model(input_ids=tokens, attention_mask=mask, labels=tokens)
    hb.apply_(model, hb.SBP(0.5, layers="all", apart=NAMES))
    out = model(input_ids=tokens, attention_mask=mask, labels=tokens)
    torch.testing.assert_close((out.aux_loss, out.loss), (plain.aux_loss, plain.loss), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.router_logits, plain.router_logits, rtol=1e-5, atol=1e-5)
    out.loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
