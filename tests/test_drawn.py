"""A tensor that goes through several forwards before any of their backwards: a checkpoint that runs again finds its own positions."""

from __future__ import annotations

import gc

import pytest
import torch
import zoo
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfback as hb
from halfback.drawn import ROOM, Ambiguous, Drawn, frame_now
from halfback.untouched import applied_to


class Block(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks that begin with a batch as it was given, or with what was learned; `checkpointed` is the model's own doing."""

    def __init__(self, latents, checkpointed):
        super().__init__()
        self.blocks, self.mix, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(16, 16), nn.Linear(16, 5)
        self.latents = nn.Parameter(torch.randn(1, 12, 16)) if latents else None
        self.checkpointed = checkpointed

    def forward(self, x):
        h = x if self.latents is None else self.latents.expand(len(x), -1, -1)
        for i, block in enumerate(self.blocks):
            h = checkpoint(block, h, use_reentrant=False) if self.checkpointed else block(h)
            h = h + self.mix(x.mean(1, keepdim=True)) if i == 0 else h
        return self.head(h.mean(1))


def gradients(latents, checkpointed, text, batches):
    torch.manual_seed(0)
    model = Net(latents, checkpointed).double().train()
    hb.apply_(model, *hb.parse(text))
    scores = [model(x) for x in batches]
    sum(s.pow(2 + i % 2).sum() for i, s in enumerate(scores)).backward()
    return {k: p.grad for k, p in model.named_parameters()}


@pytest.mark.parametrize("sampler", ["grid", "random"])
@pytest.mark.parametrize("latents", [False, True])
@pytest.mark.parametrize("same", [True, False])
def test_several_forwards_before_a_backward_have_their_own_masks_in_a_checkpoint(sampler, latents, same):
    torch.manual_seed(1)
    x, other = torch.randn(3, 12, 16).double(), torch.randn(3, 12, 16).double()
    batches = [x, x, x] if same else [x, other]
    text = f"sbp(keep=0.5, layers='all', sampler='{sampler}')"
    plain, own = gradients(latents, False, text, batches), gradients(latents, True, text, batches)
    assert all(torch.allclose(plain[k], own[k], atol=1e-12) for k in plain)
    exact = gradients(latents, False, "lean", batches)
    assert not all(torch.allclose(plain[k], exact[k]) for k in plain), "and they are SBP's"


def test_a_decoder_that_is_given_the_same_embeddings_twice():
    model, _ = zoo.make("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = {}
    for checkpointed in (True, False):
        if not checkpointed:
            model.gradient_checkpointing_disable()
        torch.manual_seed(0)
        x = model.get_input_embeddings()(zoo.tokens(12)).detach()
        hb.apply_(model, hb.SBP(keep=0.5, layers="all"))
        model.zero_grad()
        one, two = (model(inputs_embeds=x, use_cache=False).logits for _ in range(2))
        (one.square().sum() + two.pow(3).sum()).backward()
        found[checkpointed] = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
        hb.remove_(model)
    assert all(torch.allclose(g, found[False][k], rtol=1e-4, atol=1e-5 * g.abs().max().item()) for k, g in found[True].items())


def test_many_forwards_before_a_backward():
    torch.manual_seed(0)
    batches = [torch.randn(2, 12, 16).double() for _ in range(70)]
    text = "sbp(keep=0.5, layers='all')"
    plain, own = gradients(False, False, text, batches), gradients(False, True, text, batches)
    assert all(torch.allclose(plain[k], own[k], atol=1e-9) for k in plain)


def split_in_checkpoint(drawn, x, positions, key):
    """What holds the checkpoint's frame alive."""

    def run(x):
        drawn.keep(x, positions, key)
        return x.exp()

    return checkpoint(run, x, use_reentrant=False)


def in_nested(drawn, x, found):
    """A checkpoint of its own, in which what was drawn is looked up in a backward."""

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            def run(y):
                try:
                    found.append(drawn.look_up(x))
                except Ambiguous:
                    found.append("ambiguous")
                return y.exp()

            with torch.enable_grad():
                checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=False)
            return grad

    Asks.apply(torch.ones(1, requires_grad=True)).sum().backward()


def test_what_cannot_be_told_apart_raises_and_is_forgotten_with_its_graph():
    drawn, x, found = Drawn(), torch.ones(3, requires_grad=True), []
    one, two = (split_in_checkpoint(drawn, x, [i], object()) for i in (1, 2))
    in_nested(drawn, x, found)
    del one
    gc.collect()
    in_nested(drawn, x, found)
    assert drawn.look_up(x) is None, "a forward in a checkpoint is for checkpoints alone"
    del two
    gc.collect()
    in_nested(drawn, x, found)
    assert found[0] == "ambiguous" and found[1][0] == [2] and found[2] is None


def test_what_was_split_at_an_address_is_not_what_another_tensor_has_there():
    drawn = Drawn()
    x = torch.ones(1000)
    drawn.keep(x, [], None)
    assert drawn.look_up(x.view(10, 100)) == ([], None)
    addresses = {x.untyped_storage()._cdata}
    del x
    for _ in range(200):
        y = torch.ones(1000)
        assert y.untyped_storage()._cdata not in addresses and drawn.look_up(y) is None


def test_what_nobody_can_ask_for_does_not_pile_up():
    drawn = Drawn()
    for _ in range(20 * ROOM):
        drawn.keep(torch.ones(1), [], None)
    assert len(drawn.storages) <= ROOM + 1
    held = [torch.ones(1) for _ in range(5 * ROOM)]
    for x in held:
        drawn.keep(x, [], None)
    assert all(drawn.look_up(x) for x in held)


@pytest.mark.parametrize("latents", [False, True])
def test_two_forwards_in_one_checkpoint_raise(latents):
    torch.manual_seed(0)
    model, x = Net(latents, False).train(), torch.randn(2, 12, 16, requires_grad=True)
    hb.apply_(model, hb.SBP(keep=0.5, layers="all"))
    loss = checkpoint(lambda x: model(x).square().sum() + model(x).pow(3).sum(), x, use_reentrant=False)
    with pytest.raises(RuntimeError, match=r"cannot tell of which of several forwards.* Run one forward in a checkpoint"):
        loss.backward()


@pytest.mark.parametrize("text", ["sbp(keep=0.5, layers='all')", "sbp(keep=0.5, layers='all')+lean"])
@pytest.mark.parametrize("around", ["the model", "its blocks", "what comes before them, too"])
def test_a_checkpoint_around_more_than_a_block_draws_once_a_step(text, around):
    """An input that is made inside the checkpoint comes back in another storage; and no step's draw is used up by a second run."""
    found = {}
    for checkpointed in (True, False):
        torch.manual_seed(0)
        model, x = Net(False, False).double().train(), torch.randn(2, 12, 16, requires_grad=True).double()
        hb.apply_(model, *hb.parse(text))

        def blocks(h, model=model):
            for block in model.blocks:
                h = block(h)
            return h.square().sum()

        run = {
            "the model": lambda x, m=model: m(x).square().sum(),
            "its blocks": blocks,
            "what comes before them, too": lambda x, b=blocks: b(x * 2),
        }
        for _ in range(3):
            loss = checkpoint(run[around], x, use_reentrant=False) if checkpointed else run[around](x)
            loss.backward()
        steps = [s.mark() for a in applied_to(model) for s in a.states]
        found[checkpointed] = steps, {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    assert found[True][0] == found[False][0]
    assert all(torch.allclose(g, found[False][1][k], atol=1e-12) for k, g in found[True][1].items())


def test_hooks_of_others_are_no_checkpoints():
    def pack(t):
        return later(t)  # a cell that is empty when the forward begins

    model = Net(False, False).train()
    hb.apply_(model, hb.SBP(keep=0.5))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        assert frame_now() is None

    def later(t):
        return t

    class Anything:
        def __getattr__(self, name):
            return self

        def __call__(self, t):
            return t

    with torch.autograd.graph.saved_tensors_hooks(Anything(), lambda t: t):
        model(torch.randn(2, 12, 16)).sum().backward()
