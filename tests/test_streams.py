"""The promises of SBP, on real models."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle

import pytest
import torch
import torch.nn.functional as F
import zoo
from reference import Cut, bert_block, convnext_block, llama_block, vit_block
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

import halfback as hb
from halfback.hooks import LOOKED_AT, Leave
from halfback.methods import ATTENTION, parse
from halfback.models import ViT
from halfback.positions import Positions
from halfback.train.nets import DroppedBlock, Mixer

ALL = {name: "all" if name in zoo.TRANSFORMERS else "paper" for name in zoo.MODELS}


def short(name):
    """The same model with fewer blocks, where depth does not matter."""
    return zoo.make(name, depths=(2, 2, 3, 2)) if name in zoo.CONVNETS else zoo.make(name, layers=3)


def gradients(model, batch, loss=zoo.loss):
    model.zero_grad()
    loss(model, batch).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def state(model):
    return model._halfback.states[0]


def drawn(model, batch) -> Positions:
    """The positions of the next forward (sampler="fixed": of every forward)."""
    seen = []
    real = type(state(model))._draw

    def spy(self, *args):
        out = real(self, *args)
        seen.append(out[0])
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(state(model)), "_draw", spy)
        zoo.call(model, batch)
    return seen[0]


# Bar 1


@pytest.mark.parametrize("mode", ATTENTION)
@pytest.mark.parametrize("name", zoo.MODELS)
def test_the_forward_is_the_models_own(name, mode):
    model, batch = zoo.make(name)
    plain = zoo.call(model, batch).detach()
    hb.apply_(model, hb.SBP(0.5, layers=ALL[name], attention=mode))
    out = zoo.call(model, batch)
    assert (out - plain).abs().max() <= 1e-5
    assert out.requires_grad


@pytest.mark.parametrize("name", zoo.MODELS)
def test_keeping_everything_is_bitwise_the_plain_model(name):
    model, batch = short(name)
    plain, exact = zoo.call(model, batch), gradients(model, batch)
    report = hb.apply_(model, hb.SBP(1.0, layers="all"))
    assert report.blocks == [] and "keeps everything" in str(report)
    assert torch.equal(plain, zoo.call(model, batch))
    for key, grad in gradients(model, batch).items():
        assert torch.equal(grad, exact[key]), key


# Bar 2


def _reference_logits(name, model, batch, at, mode, scale):
    cut = Cut(at.kept, at.n, scale, at.always)
    if name == "vit":
        x = model.vit.embeddings(batch["pixel_values"])
        for block in model.vit.layers:
            x = vit_block(block, x, cut, mode)
        return x, model.vit.layernorm(x)
    if name == "bert":
        x = model.bert.embeddings(batch["input_ids"])
        for block in model.bert.encoder.layer:
            x = bert_block(block, x, cut, mode)
        return x, x
    x = model.model.embed_tokens(batch["input_ids"])
    rope = model.model.rotary_emb(x, torch.arange(x.shape[1])[None])
    for block in model.model.layers:
        x = llama_block(block, x, cut, mode, rope)
    return x, model.model.norm(x)


ONE = -1  # the first would be exact in a causal model: it sees itself alone, and is always kept
HEADS = {
    "one token": lambda x: x[:, ONE],
    "average": lambda x: x.mean(1),
    "every token": lambda x: x,
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("mode", ["query", "qkv"])
@pytest.mark.parametrize("name", ["vit", "bert", "llama"])
def test_gradients_equal_sbp_done_by_hand(name, mode, scale, head):
    model, batch = zoo.make(name, layers=3)
    model = model.double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    inner = getattr(model, "vit", None) or getattr(model, "bert", None) or model.model
    hb.apply_(inner, hb.SBP(0.4, layers="all", attention=mode, sampler="fixed", scale=scale))
    at = drawn(inner, batch)
    assert at.always == 1 < at.k < at.n

    def objective(x):
        y = HEADS[head](x)
        return (y * torch.linspace(-1, 1, y[0].numel(), dtype=y.dtype).reshape(y[0].shape)).pow(2).mean()

    approximate = gradients(model, batch, lambda m, b: objective(inner(**b).last_hidden_state))
    hb.remove_(inner)
    by_hand = gradients(model, batch, lambda m, b: objective(_reference_logits(name, model, b, at, mode, scale)[1]))
    exact = gradients(model, batch, lambda m, b: objective(inner(**b).last_hidden_state))
    assert approximate.keys() == by_hand.keys()
    for key, grad in by_hand.items():
        assert (approximate[key] - grad).abs().max() <= 1e-10, key
    assert any((approximate[key] - exact[key]).abs().max() > 1e-6 for key in exact), "nothing was approximated"


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("pooled", [True, False])
def test_gradients_of_convnext_equal_sbp_done_by_hand(pooled, scale):
    model, batch = zoo.make("convnext", depths=(2, 2, 3, 2))
    model, x = model.convnext.double(), batch["pixel_values"].double()
    hb.apply_(model, hb.SBP(0.25, layers="paper", sampler="fixed", scale=scale))
    at = drawn(model, {"pixel_values": x})
    masks = []
    while at is not None:
        mask = torch.zeros(at.n, dtype=torch.bool)
        mask[at.kept] = True
        masks.append(mask.reshape(at.grid))
        at = at.coarse
    assert [m.shape[0] for m in masks] == [32, 16, 8]

    def objective(y):
        y = y.mean((2, 3)) if pooled else y
        return (y * torch.linspace(-1, 1, y[0].numel(), dtype=y.dtype).reshape(y[0].shape)).pow(2).mean()

    def by_hand(x):
        y = model.embeddings(x)
        for stage, mask, chosen in zip(model.encoder.stages, [*masks, None], [2, 2, 2, 0], strict=True):
            for layer in stage.downsampling_layer:
                y = layer(y)
            for i, block in enumerate(stage.layers):
                y = convnext_block(block, y, mask, 4.0 if scale else 1.0) if i < chosen else block(y)
        return y

    approximate = gradients(model, x, lambda m, x: objective(m(x).last_hidden_state))
    hb.remove_(model)
    wanted = gradients(model, x, lambda m, x: objective(by_hand(x)))
    for key, grad in wanted.items():
        assert (approximate[key] - grad).abs().max() <= 1e-10, key


class OneMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, 8, 2, 2), nn.ModuleList([Mixer(8, 0.0)]), nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


ONE_BLOCK = {  # and the weights that gradients reach through other positions
    "attention": (lambda: ViT(8, 2, 3, 8, 1, 2, 5, "mean"), {"blocks.0.attention.qkv.weight": slice(8, None)}),
    "convolution": (OneMixer, {"blocks.0.mix.weight": slice(None)}),
}


@pytest.mark.parametrize("name", ONE_BLOCK)
def test_scaled_what_goes_back_to_other_positions_is_right_in_the_mean_over_masks(name):
    torch.manual_seed(0)
    make, weights = ONE_BLOCK[name]
    model, x = make().double(), torch.randn(3, 3, 8, 8, dtype=torch.double)
    exact = gradients(model, x, lambda m, x: m(x).pow(2).sum())

    def mean_of_masks(scale):
        hb.apply_(model, hb.SBP(0.5, layers=["blocks.0"], scale=scale))
        found = [gradients(model, x, lambda m, x: m(x).pow(2).sum()) for _ in range(16)]
        hb.remove_(model)
        key = next(iter(weights))
        masks = {round(f[key].abs().sum().item(), 9): f for f in found}
        assert len(masks) == 2, "a checkerboard, and the other one"
        return {k: sum(f[k] for f in masks.values()) / 2 for k in weights}

    scaled, unscaled = mean_of_masks(True), mean_of_masks(False)
    for key, part in weights.items():
        assert torch.allclose(scaled[key][part], exact[key][part], atol=1e-10, rtol=0), key
        assert not torch.allclose(unscaled[key][part], exact[key][part], rtol=0.2), key


@pytest.mark.parametrize(
    ("given", "says"), [({"scale": 2}, "scale=2 must be True"), ({"scale": True, "attention": "heads"}, "counts positions")]
)
def test_a_scale_that_cannot_be_is_told(given, says):
    with pytest.raises(ValueError, match=says):
        hb.SBP(**given)


@pytest.mark.parametrize("more", ["", "+lean", "+recompute"])
@pytest.mark.parametrize("name", ["vit", "llama", "convnext"])
def test_scaling_holds_nothing(name, more):
    model, batch = short(name)

    def held(scale):
        hb.apply_(model, *parse(f"sbp(keep=0.5, layers={ALL[name]!r}, scale={scale}){more}"))
        zoo.loss(model, batch).backward()
        found = hb.held(model, lambda: zoo.loss(model, batch))
        hb.remove_(model)
        return found

    assert held(True) == held(False)


# Bar 3


@pytest.mark.parametrize(
    "name, mode, bar",
    [(n, m, b) for n in zoo.TRANSFORMERS if n != "bert" for m, b in (("query", 0.68), ("qkv", 0.57))] + [("bert", "qkv", 0.60)],
)
def test_held_bytes_fall(name, mode, bar):
    model, batch = zoo.make(name)
    plain = hb.held(model, lambda: zoo.loss(model, batch))
    hb.apply_(model, hb.SBP(0.5, layers="all", attention=mode))
    held = hb.held(model, lambda: zoo.loss(model, batch))
    assert held / plain <= bar
    with hb.memory.Peak(*model.parameters(), *model.buffers()) as peak:
        zoo.loss(model, batch)
    assert peak.most <= 1.08 * held


def test_held_bytes_of_convnext_tiny_fall():
    from transformers import ConvNextConfig, ConvNextForImageClassification

    model = ConvNextForImageClassification(ConvNextConfig()).train()
    x = torch.randn(4, 3, 224, 224)
    plain = hb.held(model, lambda: model(x).logits.sum())
    hb.apply_(model, hb.SBP(0.5, layers="paper"))
    assert hb.held(model, lambda: model(x).logits.sum()) / plain <= 0.64


# Bar 5


@pytest.mark.parametrize("mode", ["query", "qkv", "heads"])
@pytest.mark.parametrize("name", ["vit", "bert", "llama", "gpt2", "convnext", "tv_vit"])
def test_recompute_changes_no_gradient_and_holds_less(name, mode):
    model, batch = short(name)
    method = hb.SBP(0.5, layers=ALL[name], attention=mode, scale=mode != "heads")
    hb.apply_(model, method)
    without, more = gradients(model, batch), hb.held(model, lambda: zoo.loss(model, batch))
    hb.remove_(model)
    hb.apply_(model, method, hb.Recompute())
    assert all(torch.equal(g, without[k]) for k, g in gradients(model, batch).items())
    assert hb.held(model, lambda: zoo.loss(model, batch)) < 0.5 * more


@torch.compile(backend="eager")
def activated(h):
    return F.silu(h) * h


@torch.compile(backend="eager")
def turned(h):
    return h.flip(1)


COMPILED = ("compiled", "compiled to its end", "compiled merge")


class Peculiar(nn.Module):
    """A block of which dropped positions are wanted, or random numbers drawn, behind its attention; or which has another one there."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.norm, self.qkv, self.out = kind, nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU() if kind == "relu" else nn.GELU(), nn.Linear(64, 32))
        self.bias = nn.Parameter(torch.randn(4, 18, 18))

    def attend(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        mask = self.bias if self.kind == "bias" else None
        return self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attend(x)
        if self.kind == "twice":
            x = x + self.attend(x)
        if self.kind == "post-norm":
            x = self.norm(x)
        if self.kind == "checkpoint":  # of two functions that save tensors of one shape
            return x + checkpoint(lambda h: F.gelu(F.gelu(h)), x, use_reentrant=False)
        if self.kind == "own stream":  # of random numbers, the same in both runs
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(2)
                return x + F.dropout(self.out(F.dropout(x, 0.1)), 0.1)
        if self.kind == "compiled":
            return x + self.mlp[3](activated(self.mlp[1](self.mlp[0](x))))
        y = self.mlp(x)
        if self.kind == "compiled to its end":
            return activated(x + y)
        if self.kind == "compiled merge":
            return turned(x + y)
        if self.kind == "tree":
            y = tree_map_only(torch.Tensor, lambda t: t.sin() if t.is_floating_point() else t, y)
        if self.kind == "sum":
            y = y + y.cumsum(1)
        return x + (F.dropout(y, 0.5) if self.kind == "dropout" else y)


@pytest.mark.parametrize("more", ["recompute", "lean+recompute(sparing=True)", "dropit(bits=8, activation_bits=8)+recompute(sparing=True)"])
@pytest.mark.parametrize("keep", [0.3, 0.47])  # 9 of 18 positions: parts of one shape
@pytest.mark.parametrize("kind", ["plain", "sum", "dropout", "twice", "bias", "post-norm", "checkpoint", "own stream", "tree", *COMPILED])
@pytest.mark.filterwarnings("ignore")  # of torch's own, while it traces
def test_what_a_block_wants_of_dropped_positions_is_computed_again(kind, keep, more):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Peculiar(kind) for _ in range(3))), torch.randn(2, 18, 32, requires_grad=True)

    def found(text):
        hb.apply_(model, *hb.parse(text))
        grads = []
        for _ in range(2):
            torch.manual_seed(1)
            grads += torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()], materialize_grads=True, allow_unused=True)
        hb.remove_(model)
        return grads

    sbp = f"sbp(keep={keep}, layers='all', sampler='fixed')"
    without = more.removesuffix("recompute").removesuffix("recompute(sparing=True)").rstrip("+")
    for a, b in zip(found(f"{sbp}+{more}"), found(f"{sbp}+{without}" if without else sbp), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["plain", "relu", "post-norm", "bias"])
def test_what_goes_past_the_checkpoint_is_not_held(kind):
    """Counted at the allocations: hooks are told of nothing that goes past them."""

    class Alive(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.storages = {}

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in tree_leaves(out):
                if isinstance(t, torch.Tensor):
                    storage = t.untyped_storage()
                    self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            return out

        def bytes(self):
            return sum(size for ref, size in self.storages.values() if not ref.expired())

    torch.manual_seed(0)
    model, x = nn.Sequential(*(Peculiar(kind) for _ in range(3))), torch.randn(2, 18, 32, requires_grad=True)

    def alive(text):
        hb.apply_(model, *hb.parse(text))
        for _ in range(2):
            torch.autograd.grad(model(x).square().sum(), x)
        gc.collect()
        gc.disable()  # nothing is to wait for it
        try:
            with Alive() as count:
                loss = model(x).square().sum()
                held = count.bytes()
                torch.autograd.grad(loss, x)
                del loss
            left = count.bytes()
        finally:
            gc.enable()
        hb.remove_(model)
        return held, left

    (held, left), (less, least) = alive("sbp(keep=0.3, layers='all', sampler='fixed')+recompute"), alive("recompute")
    assert held <= 1.1 * less + 1024 and left <= least + 1024


def test_an_activation_that_was_detached_to_be_looked_at_later_is_whole_after_the_backward():
    model, x, logged = nn.Sequential(*(Peculiar("plain") for _ in range(3))), torch.randn(2, 17, 32), {}
    for block in model:
        block.mlp[1].register_forward_hook(lambda module, args, output: logged.__setitem__(module, output.detach()))
    model(x).sum().backward()
    exact = [float(y.mean()) for y in logged.values()]
    hb.apply_(model, *hb.parse("sbp(keep=0.3, layers='all')+recompute"))
    for _ in range(3):
        model(x).square().sum().backward()
        assert [float(y.mean()) for y in logged.values()] == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("mode", ["query", "qkv"])
@pytest.mark.parametrize("keep", [0.1, 0.4])
def test_a_block_that_draws_random_numbers_by_itself_is_counted_as_it_runs(keep, mode):
    """Fake tensors draw none: that a path is dropped is not seen at the generator."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(DroppedBlock(32, 4, 0.1 * i) for i in range(4))), torch.randn(2, 49, 32)
    hb.apply_(model, *hb.parse(f"sbp(keep={keep}, layers='all', attention='{mode}')+recompute"))
    counted = hb.profile(model, x, optimizer="none").peak
    assert all(hb.profile(model, x, optimizer="none", real=True).peak == counted for _ in range(2))


def test_dropped_positions_are_not_computed_again():
    class Rows(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.addmm.default:  # a linear layer's forward
                self.seen.append(tuple(args[1].shape))
            return func(*args, **(kwargs or {}))

    def again(text, n=17):
        model, x = nn.Sequential(*(Peculiar("plain") for _ in range(3))), torch.randn(2, n, 32)
        hb.apply_(model, *hb.parse(text))
        model(x).square().sum().backward()  # the first block learns that it can do without, for all of its kind
        loss = model(x).square().sum()
        with Rows() as rows:
            loss.backward()
        return rows.seen

    seen = again("sbp(keep=0.3, layers='all')+recompute")  # of 17 positions 6 are kept
    assert seen.count((2 * 11, 32)) == 3 and seen.count((2 * 6, 64)) <= 3  # keys and values of dropped ones, in three blocks
    assert (2 * 11, 64) not in seen
    assert again("recompute").count((2 * 17, 32)) >= 6
    seen = again("sbp(keep=0.47, layers='all')+recompute", n=18)  # 9 are kept, 9 dropped
    assert seen.count((2 * 9, 64)) == 3  # the last layer of kept ones, as these blocks run again to their ends


@pytest.mark.parametrize("ramp", ["uniform", "increasing"])
@pytest.mark.parametrize("name", ["vit", "bert", "llama", "gpt2", "dinov2"])
def test_transformers_own_checkpointing_changes_no_gradient(name, ramp):
    model, batch = short(name)
    method = hb.SBP(0.5, layers="all", ramp=ramp)
    hb.apply_(model, method)
    without = gradients(model, batch)
    hb.remove_(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    hb.apply_(model, method)
    assert all(torch.equal(g, without[k]) for k, g in gradients(model, batch).items())


def test_two_forwards_before_a_checkpointed_backward_keep_their_own_masks():
    model, batch = zoo.make("vit", layers=3)
    hb.apply_(model, hb.SBP(0.5, layers="all"))
    one, two = zoo.loss(model, batch), zoo.loss(model, {"pixel_values": batch["pixel_values"].flip(0) * 2})
    (one + two).backward()
    without = {k: p.grad.clone() for k, p in model.named_parameters()}
    state(model).step.zero_()
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    one, two = zoo.loss(model, batch), zoo.loss(model, {"pixel_values": batch["pixel_values"].flip(0) * 2})
    (one + two).backward()
    assert all(torch.equal(p.grad, without[k]) for k, p in model.named_parameters())


def test_reentrant_checkpointing_is_refused():
    model, batch = zoo.make("vit", layers=3)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    hb.apply_(model, hb.SBP(0.5, layers="all"))
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        zoo.loss(model, batch).backward()


# Bar 6


@pytest.mark.parametrize("name", ["vit", "convnext", "gpt2"])
def test_the_model_stays_itself(name):
    model, batch = short(name)
    keys, names = list(model.state_dict()), [n for n, _ in model.named_modules()]
    before = {n: {k: dict(v) if isinstance(v, dict) else v for k, v in vars(m).items()} for n, m in model.named_modules()}
    exact = gradients(model, batch)
    hb.apply_(model, hb.SBP(0.5, layers="all"), hb.Recompute())
    assert list(model.state_dict()) == keys and [n for n, _ in model.named_modules()] == names
    model.load_state_dict(model.state_dict(), strict=True)
    approximate = gradients(model, batch)
    assert any(not torch.equal(approximate[k], exact[k]) for k in exact)
    hb.remove_(model)
    after = {n: {k: dict(v) if isinstance(v, dict) else v for k, v in vars(m).items()} for n, m in model.named_modules()}
    for n in before:
        assert before[n].keys() == after[n].keys(), n
        assert all(len(after[n][k]) == len(v) for k, v in before[n].items() if "hooks" in k)
    assert all(torch.equal(g, exact[k]) for k, g in gradients(model, batch).items())


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_its_own_weights_and_is_still_applied(copier):
    model, batch = zoo.make("timm_vit", layers=3)
    hb.apply_(model, hb.SBP(0.5, layers="all"), hb.Recompute())
    other = copier(model)
    first, second = gradients(model, batch), gradients(other, batch)
    assert all(torch.equal(second[k], g) for k, g in first.items()), "a copy draws the same masks from the same step"
    with torch.no_grad():
        other.blocks[1].attn.qkv.weight.zero_()
    changed = gradients(other, batch)
    state(model).step.fill_(1)
    assert not torch.equal(changed["blocks.0.mlp.fc1.weight"], gradients(model, batch)["blocks.0.mlp.fc1.weight"])
    hb.remove_(other)
    assert hb.held(other, lambda: zoo.loss(other, batch)) > 2 * hb.held(model, lambda: zoo.loss(model, batch))


def test_an_optimizer_made_before_or_after_trains():
    for early in (True, False):
        model, batch = zoo.make("vit", layers=3)
        optimizer = torch.optim.SGD(model.parameters(), 0.05) if early else None
        hb.apply_(model, hb.SBP(0.5, layers="all"))
        optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.05)
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = zoo.loss(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]


# The other promises


def test_eval_and_no_grad_are_untouched():
    model, batch = zoo.make("vit", layers=3)
    plain = zoo.call(model.eval(), batch)
    hb.apply_(model, hb.SBP(0.5, layers="all"), hb.Recompute())
    assert torch.equal(zoo.call(model, batch), plain)
    with torch.no_grad():
        zoo.call(model.train(), batch)
    with torch.inference_mode():
        zoo.call(model, batch)
    assert state(model).step == 0


def test_our_randomness_is_ours():
    model, batch = zoo.make("vit", layers=3)
    hb.apply_(model, hb.SBP(0.5, layers="all", sampler="random"))
    before = torch.random.get_rng_state()
    first = gradients(model, batch)
    assert torch.equal(torch.random.get_rng_state(), before)
    second = gradients(model, batch)
    assert any(not torch.equal(first[k], second[k]) for k in first), "every step has its own mask"
    state(model).step.zero_()
    assert all(torch.equal(g, first[k]) for k, g in gradients(model, batch).items()), "a step is reproduced by its number"


def test_exact_for_a_while():
    model, batch = zoo.make("vit", layers=3)
    exact = gradients(model, batch)
    hb.apply_(model, hb.SBP(0.5, layers="all"))
    with hb.exact(model):
        assert all(torch.equal(g, exact[k]) for k, g in gradients(model, batch).items())
    assert any(not torch.equal(g, exact[k]) for k, g in gradients(model, batch).items())


def test_accumulated_gradients_are_the_sum():
    model, batch = zoo.make("vit", layers=3)
    hb.apply_(model, hb.SBP(0.5, layers="all"))
    parts = [gradients(model, batch) for _ in range(2)]
    state(model).step.zero_()
    model.zero_grad()
    for _ in range(2):
        zoo.loss(model, batch).backward()
    for k, p in model.named_parameters():
        assert torch.allclose(p.grad, parts[0][k] + parts[1][k], atol=1e-7)


@pytest.mark.parametrize("mode", ATTENTION)
@pytest.mark.parametrize("name", ["vit", "llama", "convnext"])
def test_autocast_runs_in_its_dtype_with_the_same_forward(name, mode):
    model, batch = short(name)
    with torch.autocast("cpu", torch.bfloat16):
        plain = zoo.call(model, batch)
        hb.apply_(model, hb.SBP(0.5, layers=ALL[name], attention=mode))
        out = zoo.call(model, batch)
    assert out.dtype == plain.dtype
    assert (out - plain).abs().max() <= 0.05 * plain.abs().max() + 0.02
    zoo.loss(model, batch).backward()


def test_maps_that_a_backbone_returns_of_inner_stages_are_tensors():
    from torchvision.models._utils import IntermediateLayerGetter

    class Detector(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.backbone = IntermediateLayerGetter(model.features, {str(i): str(i) for i in (1, 3, 5, 7)})

        def forward(self, x):
            maps = self.backbone(x)
            assert all(type(m) is torch.Tensor for m in maps.values()), "a detector's code outside of blocks gets plain tensors"
            return torch.cat([m.mean((2, 3)) for m in maps.values()], 1)

    model, (x,) = zoo.make("tv_convnext", depths=(1, 1, 3, 1))
    detector = Detector(model).train()
    plain = detector(x)
    hb.apply_(detector, hb.SBP(0.5, layers="paper"))
    out = detector(x)
    torch.testing.assert_close(out, plain)
    out.sum().backward()


def test_hidden_states_come_out_as_tensors():
    model, batch = zoo.make("vit", layers=3)
    plain = model(**batch, output_hidden_states=True).hidden_states
    hb.apply_(model, hb.SBP(0.5, layers="all"))
    states = model(**batch, output_hidden_states=True).hidden_states
    assert len(states) == len(plain)
    for ours, theirs in zip(states, plain, strict=True):
        assert isinstance(ours, torch.Tensor) and (ours - theirs).abs().max() < 1e-5


def test_a_part_of_a_model_can_be_called_alone():
    model, batch = zoo.make("timm_vit", layers=3)
    plain = model.forward_features(*batch)
    hb.apply_(model, hb.SBP(0.5, layers="all"))
    out = model.forward_features(*batch)
    assert (out - plain).abs().max() < 1e-5 and state(model).step == 1
    model.forward_features(*batch)
    assert state(model).step == 2


@pytest.mark.parametrize("of_transformers", [False, True])
@pytest.mark.parametrize("method", ["lean", "dropit(bits=8)"])
def test_what_is_not_held_beside_sbp_is_computed_again_in_a_checkpoint(method, of_transformers):
    """Sines come to queries and keys: a checkpoint has to find as many tensors as it saw."""
    model, batch = zoo.make("llama", layers=3)
    if of_transformers:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    sbp = "sbp(layers='all', sampler='fixed')"
    hb.apply_(model, *hb.parse(sbp))
    without = gradients(model, batch)
    hb.remove_(model)
    hb.apply_(model, *hb.parse(f"{sbp}+{method}" + "+recompute(sparing=True)" * (not of_transformers)))
    found = gradients(model, batch)
    allowed = 1e-5 if method == "lean" else 2e-2
    assert all((g - without[k]).abs().max() <= allowed * without[k].abs().max() + 1e-6 for k, g in found.items())


def test_llama_with_its_cache_trains():
    model, batch = zoo.make("llama", layers=3)
    hb.apply_(model, hb.SBP(0.5, layers="all", attention="qkv"))
    without = gradients(model, batch)
    model.config.use_cache = True
    state(model).step.zero_()
    assert all(torch.equal(g, without[k]) for k, g in gradients(model, batch).items())
    cache = model(**batch).past_key_values
    hb.remove_(model)
    for mine, plain in zip(cache.layers, model(**batch).past_key_values.layers, strict=True):
        assert type(mine.keys) is type(mine.values) is torch.Tensor, "what a model returns are tensors, in a cache too"
        torch.testing.assert_close((mine.keys, mine.values), (plain.keys, plain.values), rtol=1e-5, atol=1e-5)


def test_unfused_attention_keeps_its_gradients():
    model, batch = zoo.make("vit", layers=3)
    method = hb.SBP(0.5, layers="all", sampler="fixed")
    hb.apply_(model, method)
    fused = gradients(model, batch)
    hb.remove_(model)
    model.set_attn_implementation("eager")
    report = hb.apply_(model, method)
    for key, grad in gradients(model, batch).items():
        assert torch.allclose(grad, fused[key], atol=1e-5), key
    assert any("matmul" in what for what in report.merged)


def test_stochastic_depth_is_drawn_once_for_both_parts():
    from torchvision.models import convnext_tiny

    torch.manual_seed(0)
    model, x = convnext_tiny(stochastic_depth_prob=0.5).train(), torch.randn(2, 3, 64, 64)
    torch.manual_seed(1)
    plain = model(x)
    hb.apply_(model, hb.SBP(0.5, layers="paper"))
    torch.manual_seed(1)
    assert (model(x) - plain).abs().max() < 1e-5


class Parallel(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x)), with a residual in fp32 and layer scale."""

    def __init__(self, width=32):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.mlp = nn.Linear(width, width), nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x):
        n = self.norm(x)
        q, k, v = self.qkv(n).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x.float() + self.scale * self.out(attended) + self.mlp(n)


def own_model(block=Parallel, depth=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Sequential(*[block() for _ in range(depth)]), nn.Linear(32, 3)).train()


def test_parallel_blocks_of_a_users_own_model():
    model, x = own_model(), torch.randn(2, 21, 8)
    plain, exact = model(x), gradients(model, x, lambda m, x: m(x).pow(2).mean())
    held = hb.held(model, lambda: model(x))
    report = hb.apply_(model, hb.SBP(0.5, layers="all", always=0))
    assert torch.allclose(model(x), plain, atol=1e-5)
    approximate = gradients(model, x, lambda m, x: m(x).pow(2).mean())
    assert any(not torch.allclose(approximate[k], g) for k, g in exact.items())
    assert hb.held(model, lambda: model(x)) < 0.72 * held and not report.merged


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 * ctx.saved_tensors[0]


class Gate(nn.Module):
    def forward(self, x):
        return Square.apply(x)


class Hidden(nn.Module):
    """A block whose activation is a custom Function, which cannot be seen."""

    def __init__(self, width=32):
        super().__init__()
        self.norm, self.one, self.gate, self.two = nn.LayerNorm(width), nn.Linear(width, width), Gate(), nn.Linear(width, width)

    def forward(self, x):
        return x + self.two(self.gate(self.one(self.norm(x))))


def test_what_cannot_be_seen_raises_and_opaque_is_the_way_round():
    model, x = own_model(Hidden), torch.randn(2, 21, 8)
    exact, plain = gradients(model, x, lambda m, x: m(x).pow(2).mean()), model(x)
    hb.apply_(model, hb.SBP(0.5, layers="all"))
    with pytest.raises(RuntimeError, match=r"1\.0 calls .* SBP\(opaque=\['\*\.gate'\]\)"):
        model(x)
    assert state(model).open is False, "a forward that failed leaves nothing behind"
    hb.remove_(model)
    hb.apply_(model, hb.SBP(0.5, layers="all", opaque=["*.gate"]))
    assert torch.allclose(model(x), plain, atol=1e-6)
    after = gradients(model, x, lambda m, x: m(x).pow(2).mean())
    assert all((after[k] != 0).any() for k in exact), "every parameter still gets a gradient"


@pytest.mark.parametrize("frozen", [True, False], ids=["in eval mode", "without gradients"])
def test_an_opaque_module_gets_tensors_whatever_mode_it_is_in(frozen):
    model, x = own_model(Hidden), torch.randn(2, 21, 8)
    for block in model[1]:
        block.gate.eval()
        if not frozen:
            block.gate.forward = torch.no_grad()(block.gate.forward)
    plain = model(x)
    hb.apply_(model, hb.SBP(0.5, layers="all", opaque=["*.gate"]))
    out = model(x)
    assert torch.allclose(out, plain, atol=1e-6)
    out.pow(2).mean().backward()
    assert all((block.two.weight.grad != 0).any() for block in model[1])


class Odd(nn.Module):
    """A block with an operation that mixes positions in a way nobody knows: a sort."""

    def __init__(self, width=32):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        y = self.one(self.norm(x))
        x = x + y.sort(1).values
        return x + self.two(self.norm(x))


def test_what_is_not_understood_is_merged_exactly_and_reported():
    model, x = own_model(Odd), torch.randn(2, 21, 8)
    plain = model(x)
    report = hb.apply_(model, hb.SBP(0.5, layers="all"))
    assert torch.allclose(model(x), plain, atol=1e-6)
    assert report.merged == {"sort": ["1.0", "1.1", "1.2", "1.3"]}
    assert "sort" in str(report)
    grads = gradients(model, x, lambda m, x: m(x).pow(2).mean())
    assert all((g != 0).any() for g in grads.values())


def told(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "halfback"]


@pytest.mark.parametrize("text, warned", [("sbp", True), ("skiptokens", True), ("sbp(layers='first 1/2')", False), ("lean", False)])
def test_a_loss_that_reads_one_position_is_told(text, warned, caplog):
    """A decoder that classifies by its last token, at another place in each sample; told once, however many steps there are."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    tokens = zoo.tokens(12).clamp(min=3)
    tokens[1, 7:] = 0  # padding
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = GPT2ForSequenceClassification(GPT2Config(n_embd=32, n_layer=4, n_head=2, vocab_size=256, num_labels=3, **ends)).train()
    report = hb.apply_(model, *parse(text))
    for _ in range(3):
        model(input_ids=tokens, attention_mask=(tokens > 0).long()).logits.sum().backward()
    said = told(caplog)
    assert len(said) == warned == ("CAUTION, behind transformer.h.3: of each sample the loss reads one of 12 positions" in str(report))
    assert not warned or "as layers='first 2/3', or use Lean" in said[0]


def reading_one(*losses, first=True, block=nn.TransformerEncoderLayer):
    """What is told of these losses of a stack of blocks, one after the other."""
    torch.manual_seed(0)
    layers = [block(16, 2, 32, dropout=0.0, batch_first=first) for _ in range(4)]
    model = nn.Sequential(*layers).train()
    report = hb.apply_(model, hb.SBP(keep=0.5))
    for loss in losses:
        loss(model)
    return str(report).count("CAUTION")


def last(model):
    model(torch.randn(2, 12, 16))[:, -1].square().sum().backward()


def all_of_them(model):
    model(torch.randn(2, 12, 16)).square().sum().backward()


def none_yet(model):  # a head that begins with zeros
    (0 * model(torch.randn(2, 12, 16))[:, -1]).sum().backward()


def nothing(model):
    model(torch.randn(0, 12, 16)).sum().backward()


def batched(model):
    out = model(torch.randn(2, 12, 16))[:, -1]
    torch.autograd.grad(out, list(model.parameters()), torch.randn(3, *out.shape), is_grads_batched=True)


@pytest.mark.parametrize(
    "losses, warned",
    [
        ([last] * 3, True),
        ([last] * 2, False),  # of few masked tokens one may be alone by chance
        ([last, all_of_them, last, last, last], False),
        ([none_yet] * 3 + [last] * 3, True),
        ([nothing, batched, last, last, last], True),
        ([batched] * 3, False),
    ],
)
def test_a_single_position_is_told_when_three_losses_in_a_row_read_one(losses, warned):
    assert reading_one(*losses) == warned


def two_of_many(model):
    model(torch.randn(2, 12, 16))[:, -2:].square().sum().backward()


def test_a_loss_that_reads_few_is_told_where_often_none_of_them_is_kept():
    torch.manual_seed(0)
    for keep, warned in ((0.125, True), (0.5, False)):  # half of the positions: one of two neighbours
        model = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(4))).train()
        report = hb.apply_(model, hb.SBP(keep=keep, always=0))
        without = 0
        for _ in range(LOOKED_AT):
            model.zero_grad()
            two_of_many(model)
            without += not model[-1].linear2.weight.grad.any()
        assert (without >= 3) == warned and ("steps the loss read none of the 12 positions" in str(report)) == warned


def last_of_the_first(model):
    model(torch.randn(12, 2, 16))[-1].square().sum().backward()


class Branch(nn.TransformerEncoderLayer):
    """Without a join nothing is cut, and all of it has a gradient whatever is read."""

    def forward(self, x):
        return self.norm1(self.self_attn(x, x, x)[0])


def test_positions_may_come_first_and_where_nothing_is_cut_any_may_be_read():
    assert reading_one(*[last_of_the_first] * 3, first=False)
    assert not reading_one(*[last] * 3, block=Branch)


def test_what_is_read_is_not_asked_of_tensors_without_contents():
    model = nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3))).to("meta").train()
    hb.apply_(model, hb.SBP(keep=0.5))
    for _ in range(3):
        model(torch.randn(2, 12, 16, device="meta"))[:, -1].sum().backward()


@pytest.mark.parametrize("name", sorted(zoo.MODELS))
def test_a_class_token_a_mean_and_next_tokens_are_no_single_position(name, caplog):
    model, batch = short(name)
    report = hb.apply_(model, hb.SBP(keep=0.5))
    for _ in range(3):
        zoo.loss(model, batch).backward()
    looked = [hook.looks > 0 for m in model.modules() for hook in m._forward_hooks.values() if isinstance(hook, Leave)]
    assert any(looked) != ("convnext" in name)  # maps are not asked
    assert report.positions and not told(caplog) and "CAUTION" not in str(report)


class SamplesSecond(nn.Module):
    """(positions, samples, features), by hand."""

    def __init__(self, d=16, heads=2):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out, self.mlp = (
            nn.Linear(d, 3 * d),
            nn.Linear(d, d),
            nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)),
        )

    def forward(self, x):
        n, b, d = x.shape
        q, k, v = (t.reshape(n, b, self.heads, d // self.heads).permute(1, 2, 0, 3) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).reshape(n, b, d))
        return x + self.mlp(self.norm2(x))


class SamplesFirst(SamplesSecond):
    def forward(self, x):
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("method", [hb.SBP, hb.SkipTokens])
def test_samples_that_were_taken_for_positions_are_told_and_axis_says_where_those_are(method, caplog):
    torch.manual_seed(0)
    second = nn.Sequential(*(SamplesSecond() for _ in range(3))).double().train()
    first = nn.Sequential(*(SamplesFirst() for _ in range(3))).double().train()
    first.load_state_dict(second.state_dict())
    x = torch.randn(12, 6, 16).double()
    report = hb.apply_(second, method(keep=0.5, layers="all"))
    with contextlib.nullcontext() if method is hb.SBP else pytest.raises(RuntimeError, match="needs all positions"):
        second(x).square().sum().backward()
    where = "0, 1, 2" if method is hb.SBP else "0"
    assert f"CAUTION, in {where}: what is split stands where attention has samples" in str(report)
    assert any(f"say {method.__name__}(axis=0)" in said for said in told(caplog))
    hb.remove_(second)
    second.zero_grad()
    caplog.clear()
    for model, axis, batch in ((second, 0, x), (first, None, x.transpose(0, 1))):
        report = hb.apply_(model, method(keep=0.5, layers="all", axis=axis))
        out = model(batch)
        (out if model is second else out.transpose(0, 1)).pow(3).sum().backward()
        assert "CAUTION" not in str(report) and not told(caplog)
    assert all(torch.allclose(p.grad, q.grad, atol=1e-10) for p, q in zip(second.parameters(), first.parameters(), strict=True))


@pytest.mark.parametrize("axis", [3, -1, "0", True])
def test_an_axis_that_cannot_be_is_refused(axis):
    for method in (hb.SBP, hb.SkipTokens):
        with pytest.raises(ValueError, match=r"axis=.* must be 0, 1 or 2: on which of a block's input positions lie, or None"):
            method(axis=axis)


def test_a_gradient_of_a_gradient_raises_unless_it_is_exact():
    x = torch.randn(2, 12, 16, requires_grad=True)
    model = nn.Sequential(*(Block16() for _ in range(3))).train()
    (plain,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    hb.apply_(model, hb.SBP(keep=0.5, layers="all"))
    with pytest.raises(RuntimeError, match=r"create_graph=True\) through SBP is not supported.* Use hb.exact\(model\)"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with hb.exact(model):
        (exact,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert torch.allclose(plain, exact)
    exact.square().sum().backward()
    assert model[0].mlp[0].weight.grad.any()
    torch.autograd.grad(model(x).sum(), x)  # and one gradient alone is SBP's


class AsDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block16()

    def forward(self, x):
        return {"hidden": self.block(x["hidden"] if isinstance(x, dict) else x)}


@pytest.mark.parametrize("what", ["a dict", "hidden states"])
def test_a_gradient_of_a_gradient_raises_however_it_leaves_the_blocks(what):
    x = torch.randn(2, 12, 16, requires_grad=True)
    model = nn.Sequential(*((AsDict if what == "a dict" else Block16)() for _ in range(3))).train()
    hb.apply_(model, hb.SBP(keep=0.5, layers=["0", "1"] if what == "a dict" else "all"))
    inner = []
    if what != "a dict":
        model[1].register_forward_hook(lambda module, args, out: inner.append(out.sum()))
    out = model(x)
    loss = out["hidden"].sum() if what == "a dict" else inner[0]
    with pytest.raises(RuntimeError, match="through SBP is not supported"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_a_gradient_of_a_gradient_that_passes_no_cut_is_exact():
    x = torch.randn(2, 12, 16, requires_grad=True)
    model, head = nn.Sequential(*(Block16() for _ in range(3))).train(), nn.Linear(16, 1)
    hb.apply_(model, hb.SBP(keep=0.5, layers="all"))
    h = model(x)
    (g,) = torch.autograd.grad(head(h).pow(2).sum(), h, create_graph=True)
    g.square().sum().backward()
    assert head.weight.grad.any()
    hb.remove_(model)
    hb.apply_(model, hb.SkipTokens(keep=0.5, layers="all"))  # whose gradient is that of a forward
    (g,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    assert g.requires_grad


def test_backward_hooks_that_come_after_apply_are_told():
    model = nn.Sequential(*(Block16() for _ in range(3))).train()
    report = hb.apply_(model, hb.SBP(keep=0.5, layers="all"))
    model[1].mlp.register_full_backward_hook(lambda module, grads, outs: None)
    with pytest.warns(UserWarning, match="For backward hooks to be called"):  # torch's own
        model(torch.randn(2, 12, 16)).sum().backward()
    assert "not seen: backward hooks of its modules, which do not fire on streams in 1" in str(report)


class Block16(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def test_dropout_in_attention_falls_back_and_is_reported():
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, intermediate_size=96, image_size=32, patch_size=8)
    config.attention_probs_dropout_prob = 0.1
    model = ViTForImageClassification(config).train()
    report = hb.apply_(model, hb.SBP(0.5, layers="all", attention="qkv"))
    model(torch.randn(2, 3, 32, 32)).logits.sum().backward()
    assert len(report.fallbacks) == 1 and "dropout" in next(iter(report.fallbacks))


@pytest.mark.parametrize("first", ["apply_", "peft"])
def test_lora_adapters_get_their_gradients(first):
    from peft import LoraConfig, get_peft_model

    model, batch = zoo.make("vit", layers=3)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    method = hb.SBP(0.5, layers="all")
    plain = get_peft_model(copy.deepcopy(model), config)
    if first == "apply_":
        hb.apply_(model, method)
        model = get_peft_model(model, config)
    else:
        model = get_peft_model(model, config)
        hb.apply_(model, method)
    plain.load_state_dict(model.state_dict())
    assert (zoo.call(model, batch) - zoo.call(plain, batch)).abs().max() < 1e-5
    zoo.loss(model, batch).backward()
    adapters = [p for k, p in model.named_parameters() if "lora_" in k]
    assert len(adapters) == 12 and all(p.grad.abs().max() > 0 for p in adapters)
    assert hb.held(model, lambda: zoo.loss(model, batch)) < 0.8 * hb.held(plain, lambda: zoo.loss(plain, batch))


# Ramps and other masks


@pytest.mark.parametrize("ramp", ["increasing", "decreasing"])
@pytest.mark.parametrize("masks", ["shared", "independent", "disjoint"])
@pytest.mark.parametrize("name", ["vit", "convnext"])
def test_other_ramps_and_masks_keep_the_forward(name, ramp, masks):
    model, batch = short(name)
    plain = zoo.call(model, batch)
    hb.apply_(model, hb.SBP(0.4, layers=ALL[name], ramp=ramp, masks=masks))
    out = zoo.call(model, batch)
    assert (out - plain).abs().max() < 1e-5
    out.sum().backward()


# SkipTokens


@pytest.mark.parametrize("name", ["vit", "llama", "tv_vit", "timm_vit"])
def test_skip_tokens_changes_the_forward_in_training_only(name):
    model, batch = short(name)
    model.eval()
    plain = zoo.call(model, batch)
    held = hb.held(model, lambda: zoo.loss(model, batch))
    report = hb.apply_(model, hb.SkipTokens(0.5, layers="all", carry=False))
    assert torch.equal(zoo.call(model, batch), plain)
    assert "CHANGES THE FORWARD" in str(report)
    out = zoo.call(model.train(), batch)
    assert out.shape == plain.shape and (out - plain).abs().max() > 1e-4
    zoo.loss(model, batch).backward()
    assert hb.held(model, lambda: zoo.loss(model, batch)) < 0.62 * held


def test_skip_tokens_equals_the_model_on_kept_tokens():
    model, batch = zoo.make("vit", layers=3)
    hb.apply_(model, hb.SkipTokens(0.5, layers="all", sampler="fixed"))
    at = drawn(model, batch)
    ours = gradients(model, batch)
    logits = zoo.call(model, batch)
    hb.remove_(model)

    def alone(m, b):
        x = m.vit.embeddings(b["pixel_values"])[:, at.kept]
        for block in m.vit.layers:
            x = block(x)
        return m.classifier(m.vit.layernorm(x)[:, 0])

    assert torch.allclose(alone(model, batch), logits, atol=1e-6)
    weights = torch.linspace(-1, 1, 5)
    theirs = gradients(model, batch, lambda m, b: (alone(m, b) * weights).pow(2).mean())
    for key, grad in theirs.items():
        assert torch.allclose(ours[key], grad, atol=1e-6), key


def test_skip_tokens_carries_tokens_along_where_there_is_no_class_token():
    model, x = own_model(), torch.randn(2, 20, 8)
    hb.apply_(model, hb.SkipTokens(0.5, layers="all", always=0, sampler="fixed"))
    at = drawn(model, (x,))
    out = model(x)
    assert out.shape == (2, 20, 3)
    out[:, at.dropped].sum().backward()
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in model[:2].parameters()), "a carried token gives no gradient"
    model(x)[:, at.kept].sum().backward()
    assert all(p.grad.abs().max() > 0 for p in model[:2].parameters())


def test_skip_tokens_says_where_it_cannot_go():
    model, batch = short("convnext")
    hb.apply_(model, hb.SkipTokens(0.5, layers="paper", carry=False))
    with pytest.raises(RuntimeError, match=r"SkipTokens: .* needs all positions"):
        zoo.call(model, batch)


def test_skiptokens_on_a_convolution_is_told():
    """It left nothing out there, and its report said that it did."""
    model, batch = zoo.make("convnext", depths=(1, 1, 2, 1))
    hb.apply_(model, hb.SkipTokens(0.5))
    with pytest.raises(ValueError, match=r"SkipTokens leaves positions out, and a convolution needs its neighbours.* Use SBP, or"):
        zoo.call(model, batch)


def test_sizes_of_a_view_may_be_tensors_of_no_dimensions():
    """As Longformer's are; they are not changed."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            return x + self.linear(self.norm(x)).view(2, chunks, 4, 8).flatten(1, 2)

    chunks = torch.tensor(3)
    model, x = nn.Sequential(Layer(), Layer(), Layer()), torch.randn(2, 12, 8)
    plain = model(x)
    hb.apply_(model, hb.SBP(0.5))
    torch.testing.assert_close(model(x), plain)
    assert chunks == 3
