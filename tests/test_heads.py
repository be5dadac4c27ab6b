"""ChunkedLoss: the loss of a large vocabulary without its scores; and Recompute in parts of a batch."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn

import halfback as hb
from halfback import heads

V, D = 4100, 16


class Small(nn.Module):
    """Two blocks and a head with a bias."""

    def __init__(self, classes: int = V, bias: bool = True):
        super().__init__()
        self.embed = nn.Embedding(50, D)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(D, classes, bias=bias)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(D), nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def made(dtype=torch.float64, **kw):
    torch.manual_seed(0)
    model = Small(**kw).to(dtype).train()
    return model, torch.randint(0, 50, (3, 7)), torch.randint(0, V, (3, 7))


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


def furthest(a, b):
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max() / (b[k].abs().max() + 1e-30)) for k in b)


@pytest.fixture
def few_rows(monkeypatch):
    monkeypatch.setattr(heads, "rows_of_a_part", lambda classes: 4)


LOSSES = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "smoothing": {"label_smoothing": 0.1},
    "ignored": {"ignore_index": 7},
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", LOSSES)
def test_loss_and_gradients_are_autograds_in_fp64(kind, bias, few_rows):
    model, ids, y = made(bias=bias)
    y[0, :3] = LOSSES[kind].get("ignore_index", -100)

    def loss():
        return F.cross_entropy(model(ids).view(-1, V), y.view(-1), **LOSSES[kind])

    plain = loss()
    wanted = gradients(model, plain)
    report = hb.apply_(model, hb.ChunkedLoss())
    mine = loss()
    assert torch.allclose(mine, plain, rtol=1e-14)
    assert furthest(gradients(model, mine), wanted) < 1e-12
    assert "loss in parts: 4 rows" in str(report) and "after all" not in str(report)


@pytest.mark.parametrize("rows", [1, 5, 21, 1000])
def test_parts_have_the_rows_that_were_asked_for(rows, monkeypatch):
    model, ids, y = made()
    wanted = gradients(model, F.cross_entropy(model(ids).view(-1, V), y.view(-1)))
    report = hb.apply_(model, hb.ChunkedLoss(rows=rows))
    seen, loss = [], heads.cross_entropy_
    monkeypatch.setattr(heads, "cross_entropy_", lambda scores, *args: seen.append(len(scores)) or loss(scores, *args))
    found = gradients(model, F.cross_entropy(model(ids).view(-1, V), y.view(-1)))
    assert furthest(found, wanted) < 1e-12
    assert seen == [rows] * (21 // rows) + [21 % rows] * (21 % rows > 0)
    assert f"loss in parts: {rows} rows at a time" in str(report) and f"chunkedloss(rows={rows})" in str(report)


@pytest.mark.parametrize("rows", [0, -4, 2.5, True, "many"])
def test_rows_that_cannot_be_are_named(rows):
    with pytest.raises(ValueError, match=rf"ChunkedLoss\(\): rows={rows!r} must be a positive number of rows, as 4096, or None."):
        hb.ChunkedLoss(rows=rows)


def test_the_scores_of_a_single_row_are_computed():
    model, ids, y = made()

    def loss():
        return F.cross_entropy(model(ids)[0, 0], y[0, 0])

    wanted = gradients(model, loss())
    hb.apply_(model, hb.ChunkedLoss())
    assert furthest(gradients(model, loss()), wanted) < 1e-12


@pytest.mark.parametrize("factor", [3.0, 1e-4])
def test_a_factor_of_the_loss_reaches_the_gradient_and_a_second_backward_gives_it_again(factor, few_rows):
    model, ids, y = made()
    wanted = gradients(model, factor * F.cross_entropy(model(ids).flatten(0, 1), y.flatten()))
    hb.apply_(model, hb.ChunkedLoss())
    loss = factor * F.cross_entropy(model(ids).flatten(0, 1), y.flatten())
    model.zero_grad()
    loss.backward(retain_graph=True)
    once = {k: p.grad.clone() for k, p in model.named_parameters()}
    assert furthest(once, wanted) < 1e-12
    loss.backward()
    assert all(torch.allclose(p.grad, 2 * once[k], rtol=1e-12) for k, p in model.named_parameters())


def test_all_targets_ignored_is_nan_with_gradients_of_zero_as_in_torch(few_rows):
    model, ids, y = made()
    hb.apply_(model, hb.ChunkedLoss())
    loss = F.cross_entropy(model(ids).view(-1, V), torch.full_like(y, -100).view(-1))
    assert loss.isnan() and all(not g.any() for g in gradients(model, loss).values())


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return -grad


SEEN = {
    "a custom Function": lambda model, ids, y: F.cross_entropy(Reversed.apply(model(ids)).view(-1, V), y.view(-1)),
    "a hook that scales": lambda model, ids, y: _hooked(model(ids), y),
    "a hook on the flat ones": lambda model, ids, y: _hooked(model(ids).view(-1, V), y),
}


def _hooked(scores, y):
    scores.register_hook(lambda g: 3 * g)
    return F.cross_entropy(scores.view(-1, V), y.view(-1))


@pytest.mark.parametrize("how", SEEN)
def test_whoever_stands_between_scores_and_loss_sees_the_gradient(how, few_rows):
    model, ids, y = made()
    wanted = gradients(model, SEEN[how](model, ids, y))
    hb.apply_(model, hb.ChunkedLoss())
    assert furthest(gradients(model, SEEN[how](model, ids, y)), wanted) < 1e-12


def test_full_backward_hooks_and_retained_gradients(few_rows):
    model, ids, y = made()
    wanted = gradients(model, F.cross_entropy(model(ids).view(-1, V), y.view(-1)))
    hb.apply_(model, hb.ChunkedLoss())
    handle = model.register_full_backward_hook(lambda *a: None)
    with pytest.warns(UserWarning, match="Full backward hook"):  # torch's own: token ids have no gradient
        assert furthest(gradients(model, F.cross_entropy(model(ids).view(-1, V), y.view(-1))), wanted) < 1e-12
    handle.remove()
    scores = model(ids)
    scores.retain_grad()
    assert scores.requires_grad and not scores.is_leaf and scores.grad_fn is not None
    assert furthest(gradients(model, F.cross_entropy(scores.view(-1, V), y.view(-1))), wanted) < 1e-12
    assert scores.grad.shape == scores.shape


IN_PLACE = {
    "div_": lambda s: s.div_(2),
    "temperature": lambda s: s.__itruediv__(2),
    "masked_fill_": lambda s: s.masked_fill_(torch.ones(V, dtype=torch.bool), 0),
    "setitem": lambda s: s.__setitem__((Ellipsis, 0), 0),
    "relu": lambda s: F.relu(s, inplace=True),
    "zeros_": lambda s: nn.init.zeros_(s),
}


@pytest.mark.parametrize("how", IN_PLACE)
def test_changing_scores_in_place_is_refused_by_name(how):
    model, ids, _ = made()
    hb.apply_(model, hb.ChunkedLoss())
    with pytest.raises(RuntimeError, match=r"in place.*logits.clone\(\)"):
        IN_PLACE[how](model(ids))


def test_no_grad_and_double_backward(few_rows):
    model, ids, y = made()

    def loss():
        scores = model(ids)
        with torch.no_grad():
            target = scores[:, :].softmax(-1).flip(1)
        return F.cross_entropy(scores.view(-1, V), y.view(-1)) + 1e3 * F.mse_loss(scores.softmax(-1), target)

    wanted = gradients(model, loss())
    hb.apply_(model, hb.ChunkedLoss())
    assert furthest(gradients(model, loss()), wanted) < 1e-12
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(F.cross_entropy(model(ids).view(-1, V), y.view(-1)), model.embed.weight, create_graph=True)


ASKED = {
    "argmax": lambda s: s.argmax(-1),
    "add": lambda s: s + 1,
    "softmax": lambda s: s.softmax(-1),
    "transpose": lambda s: s.transpose(1, 2),
    "last axis": lambda s: s[..., :5],
    "data": lambda s: s.data,
    "cat": lambda s: torch.cat([s, s]),
    "tolist": lambda s: s.tolist(),
    "other view": lambda s: s.view(-1, V // 2),
}


@pytest.mark.parametrize("what", ASKED)
def test_whoever_asks_for_scores_gets_them(what):
    model, ids, _ = made()
    wanted = ASKED[what](model(ids))
    report = hb.apply_(model, hb.ChunkedLoss())
    found = ASKED[what](model(ids))
    assert found == wanted if isinstance(wanted, list) else torch.equal(found, wanted)
    assert "scores computed after all" in str(report)


ROWS = {
    "shift": lambda s: s[..., :-1, :],
    "first": lambda s: s[0],
    "row": lambda s: s[:, 2],
    "mask": lambda s: s[torch.tensor([True, False, True])],
    "slices": lambda s: s[1:, ::2, :],
    "flatten": lambda s: s.flatten(0, 1),
    "reshape": lambda s: s.reshape(7, 3, V),
    "float": lambda s: s.float(),
    "to": lambda s: s.to(torch.bfloat16),
    "none": lambda s: s[None],
}


@pytest.mark.parametrize("what", ROWS)
def test_rows_in_other_shapes_stay_uncomputed_and_are_right_when_computed(what):
    model, ids, _ = made()
    wanted = ROWS[what](model(ids))
    hb.apply_(model, hb.ChunkedLoss())
    found = ROWS[what](model(ids))
    assert isinstance(found, heads.Scores) and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert torch.allclose(found + 0, wanted, rtol=1e-2 if wanted.dtype is torch.bfloat16 else 1e-6)


def test_gradients_of_a_loss_that_also_asks_for_scores_are_summed(few_rows):
    model, ids, y = made()

    def loss():
        scores = model(ids)
        return F.cross_entropy(scores.view(-1, V), y.view(-1)) + 1e-3 * scores.logsumexp(-1).square().mean()

    wanted = gradients(model, loss())
    hb.apply_(model, hb.ChunkedLoss())
    assert furthest(gradients(model, loss()), wanted) < 1e-12


def test_losses_that_it_does_not_know_are_torchs(few_rows):
    model, ids, y = made()
    weights = torch.rand(V, dtype=torch.float64)
    asked = [
        lambda s: F.cross_entropy(s.view(-1, V), y.view(-1), weight=weights),
        lambda s: F.cross_entropy(s.view(-1, V), y.view(-1), reduction="none").sum(),
        lambda s: F.cross_entropy(s.transpose(1, 2), y),
        lambda s: F.cross_entropy(s.view(-1, V), torch.full((21, V), 1 / V, dtype=torch.float64)),
    ]
    wanted = [gradients(model, f(model(ids))) for f in asked]
    hb.apply_(model, hb.ChunkedLoss())
    for f, want in zip(asked, wanted, strict=True):
        assert furthest(gradients(model, f(model(ids))), want) < 1e-12


def test_scores_after_a_step_raise_instead_of_being_others():
    model, ids, y = made()
    hb.apply_(model, hb.ChunkedLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scores = model(ids)
    F.cross_entropy(scores.view(-1, V), y.view(-1)).backward()
    assert scores.argmax(-1).shape == ids.shape
    optimizer.step()
    for ask in (lambda: scores.argmax(-1), lambda: F.cross_entropy(scores.view(-1, V), y.view(-1))):
        with pytest.raises(RuntimeError, match=r"before optimizer.step\(\)"):
            ask()


def test_eval_and_no_grad_give_plain_tensors_and_remove_undoes():
    model, ids, _ = made()
    hb.apply_(model, hb.ChunkedLoss())
    with torch.no_grad():
        assert type(model(ids)) is torch.Tensor
    assert type(model.eval()(ids)) is torch.Tensor
    assert type(model.train()(ids)) is heads.Scores
    hb.remove_(model)
    assert type(model(ids)) is torch.Tensor and all("forward" not in m.__dict__ for m in model.modules())


def test_blocks_run_under_no_mode():
    model, ids, _ = made()
    hb.apply_(model, hb.ChunkedLoss())
    modes = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: modes.append(torch._C._len_torch_function_stack()))
    assert type(model(ids)) is heads.Scores and modes == [0, 0]


def test_frozen_head_and_frozen_body(few_rows):
    for frozen in ("head", "blocks"):
        model, ids, y = made()
        model.get_submodule(frozen).requires_grad_(False)
        wanted = gradients(model, F.cross_entropy(model(ids).view(-1, V), y.view(-1)))
        hb.apply_(model, hb.ChunkedLoss())
        assert furthest(gradients(model, F.cross_entropy(model(ids).view(-1, V), y.view(-1))), wanted) < 1e-12


def test_copies_and_pickles_train_too(few_rows):
    model, ids, y = made()
    hb.apply_(model, hb.ChunkedLoss(), hb.Lean())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        scores = other(ids)
        assert type(scores) is heads.Scores and scores.inputs[1] is other.head.weight
        F.cross_entropy(scores.view(-1, V), y.view(-1)).backward()
        assert other.head.weight.grad is not None and model.head.weight.grad is None


def gpt2(dtype=torch.float32):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=5000, n_embd=48, n_head=3, n_layer=2, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
        bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM",
    )  # fmt: skip
    ids = torch.randint(0, 5000, (4, 33))
    labels = ids.clone()
    labels[0, :9] = -100
    return GPT2LMHeadModel(config).to(dtype).train(), {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("others", ["", "+lean", "+recompute", "+sbp(keep=1.0)+lean"])
def test_a_transformers_model_with_tied_weights_holds_no_scores(others, few_rows):
    model, batch = gpt2()
    wanted = gradients(model, model(**batch).loss)
    before = hb.profile(model, batch)
    assert any(s.bytes >= 4 * 33 * 5000 * 4 for s in before.storages)
    hb.apply_(model, *hb.parse(f"chunkedloss{others}"))
    after = hb.profile(model, batch)
    assert not any(s.bytes >= 4 * 33 * 5000 * 2 for s in after.storages), "scores are held"
    assert after.peak < 0.5 * before.peak
    assert hb.profile(model, batch, real=True).held == after.held
    assert furthest(gradients(model, model(**batch).loss), wanted) < 1e-4


class Two(nn.Module):
    """A head inside of one part, and blocks in another."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*(Block() for _ in range(3)))
        self.decoder = Small()

    def forward(self, x, ids):
        return self.decoder(ids) + self.encoder(x).mean()


@pytest.mark.parametrize(
    ("model", "wanted"),
    [(lambda: gpt2()[0], ["transformer"]), (Small, ["blocks.0", "blocks.1"]), (Two, ["encoder", "decoder.blocks.0", "decoder.blocks.1"])],
)
def test_what_comes_before_a_head_is_found(model, wanted):
    model = model()
    hb.apply_(model, hb.ChunkedLoss())
    head = next(name for name, m in model.named_modules() if isinstance(m.__dict__.get("forward"), heads.Spared))
    assert heads.bodies(model, [head]) == wanted and heads.bodies(model, []) == [""]


@pytest.mark.parametrize(
    "others",
    [
        "",
        "+lean",
        "+lean+recompute(sparing=True)",
        "+sbp(keep=0.5)+lean",
        "+sbp(keep=0.5)+lean+recompute(layers='first 1/3', sparing=True)",
    ],
)
@pytest.mark.filterwarnings("ignore")  # of torch's own, while it traces
def test_with_a_compiled_body_losses_and_gradients_are_those_of_eager_mode(others, few_rows):
    torch._dynamo.reset()
    model, batch = gpt2(torch.float64)
    report = hb.apply_(model, *hb.parse(f"chunkedloss{others}"))
    fast = copy.deepcopy(model)
    graphs, real = [], torch._dynamo.lookup_backend("aot_eager")

    def backend(graph, inputs):
        graphs.append(graph)
        return real(graph, inputs)

    assert heads.compile_(fast, backend=backend, fullgraph=True) is fast
    for _ in range(2):
        loss = model(**batch).loss
        own = fast(**batch).loss
        assert torch.allclose(own, loss, rtol=1e-12)
        assert furthest(gradients(fast, own), gradients(model, loss)) < 1e-10
    assert len(graphs) == 1, "hooks around the body are no graphs of their own"
    ours, eager = (hb.held(m, lambda m=m: m(**batch).loss) for m in (fast, model))
    assert ours < 1.05 * eager, "no scores are held, and as little else"
    assert [what for kind, what in report.notes if kind == "loss in parts"]


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_head_computes_all_scores_and_says_what_to_do(few_rows, caplog):
    torch._dynamo.reset()
    model, batch = gpt2()
    wanted = gradients(model, model(**batch).loss)
    report = hb.apply_(model, hb.ChunkedLoss())
    fast = torch.compile(model, backend="aot_eager")
    assert furthest(gradients(model, fast(**batch).loss), wanted) < 1e-4
    said = "Compile what comes before it: model.transformer.compile()"
    assert [r for r in caplog.records if r.levelname == "WARNING" and said in r.getMessage()]
    assert "model.transformer.compile()" in str(report)
    hb.remove_(model)
    assert heads.compile_(model, backend="aot_eager") is not model, "without a loss in parts it is torch.compile"


@pytest.mark.parametrize("others", ["", "+lean"])
def test_beside_transformers_own_checkpointing_and_adapters(others, few_rows):
    peft = pytest.importorskip("peft")
    model, batch = gpt2()
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    model = peft.get_peft_model(model, config).train()
    wanted = gradients(model, model(**batch).loss)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    report = hb.apply_(model, *hb.parse(f"chunkedloss{others}"))
    assert furthest(gradients(model, model(**batch).loss), wanted) < 1e-4
    assert [what for kind, what in report.notes if kind == "loss in parts"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_no_further_from_fp64_than_torch_is(dtype, few_rows):
    truth, batch = gpt2(torch.float64)
    wanted = gradients(truth, truth(**batch).loss)
    model, _ = gpt2(dtype)
    scale = 1024.0 if dtype is torch.float16 else 1.0

    def off():
        found = gradients(model, scale * model(**batch).loss)
        return sum(float((found[k].double() / scale - wanted[k]).square().sum()) for k in wanted) ** 0.5

    torchs = off()
    hb.apply_(model, hb.ChunkedLoss())
    assert off() < 1.5 * torchs


def test_under_autocast_the_scores_have_its_dtype(few_rows):
    model, batch = gpt2()
    truth = gradients(model, model(**batch).loss)

    def off():
        with torch.autocast("cpu", torch.bfloat16):
            out = model(**batch)
        found = gradients(model, out.loss)
        return out, sum(float((found[k] - truth[k]).square().sum()) for k in truth) ** 0.5

    plain, torchs = off()
    hb.apply_(model, hb.ChunkedLoss())
    mine, ours = off()
    assert mine.logits.dtype == plain.logits.dtype and torch.allclose(mine.loss, plain.loss, rtol=1e-3)
    assert ours < 1.5 * torchs


def test_a_model_without_a_large_head_is_a_named_error():
    model, _, _ = made(classes=10)
    with pytest.raises(ValueError, match="no linear layer outside of its blocks with 4096 outputs"):
        hb.apply_(model, hb.ChunkedLoss())
    assert all("forward" not in m.__dict__ for m in model.modules())


# Recompute in parts of a batch


@pytest.mark.parametrize("name", ["vit", "gpt2", "llama", "convnext", "bert"])
@pytest.mark.parametrize("text", ["recompute(parts=2)", "lean+recompute(parts=3)", "lean+recompute(parts=2, sparing=True)"])
def test_in_parts_of_a_batch_gradients_are_plains(name, text):
    model, batch = zoo.make(name)
    loss = zoo.loss(model, batch)
    wanted = gradients(model, loss)
    hb.apply_(model, *hb.parse(text))
    mine = zoo.loss(model, batch)
    assert torch.allclose(mine, loss, rtol=1e-6)
    found = gradients(model, mine)
    scale = max(float(g.abs().max()) for g in wanted.values())
    assert max(float((found[k] - wanted[k]).abs().max()) for k in wanted) < 1e-5 * scale


def test_in_parts_a_block_has_less_alive():
    ids, y = torch.randint(0, 50, (32, 64)), torch.randint(0, V, (32, 64))
    small, batch = Small(classes=16).train(), (ids, y % 16)
    peaks = []
    for parts in (1, 4):
        hb.apply_(small, hb.Recompute(parts=parts))
        peaks.append(hb.profile(small, batch).peak)
        hb.remove_(small)
    assert peaks[1] < 0.6 * peaks[0]


class Mixing(Block):
    def forward(self, x):
        return super().forward(x) - x.mean(0, keepdim=True)


class Normed(Block):
    def __init__(self):
        super().__init__()
        self.batch = nn.BatchNorm1d(D)


@pytest.mark.parametrize("n", [2, 5])
def test_samples_that_see_each_other_are_a_named_error(n):
    model, ids, _ = made()
    model.blocks = nn.ModuleList(Mixing() for _ in range(2)).double()
    hb.apply_(model, hb.Recompute(parts=2))
    with pytest.raises(ValueError, match=r"see each other in blocks.0"):
        model(ids[:, :n])
    assert all(m.training for m in model.modules())


class Forward(Block):
    def forward(self, x):
        return super().forward(x) + x.cumsum(0)


def test_samples_that_see_those_before_them_are_a_named_error():
    model, ids, _ = made()
    model.blocks = nn.ModuleList(Forward() for _ in range(2)).double()
    hb.apply_(model, hb.Recompute(parts=2))
    with pytest.raises(ValueError, match=r"see each other in blocks.0"):
        model(ids)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ScaledBlock() for _ in range(2))

    def forward(self, x, p):
        for block in self.blocks:
            x = block(x, p)
        return x


class ScaledBlock(Block):
    def forward(self, x, p):
        return super().forward(x) * p


def test_what_had_no_samples_in_the_first_step_has_none_when_it_is_as_long_as_the_batch():
    torch.manual_seed(0)
    model, p = Scaled().double().train(), torch.randn(4, 1, dtype=torch.float64)
    batches = [torch.randn(n, 4, D, dtype=torch.float64) for n in (6, 4)]
    wanted = [gradients(model, model(x, p).square().sum()) for x in batches]
    hb.apply_(model, hb.Recompute(parts=4))
    for x, want in zip(batches, wanted, strict=True):
        assert furthest(gradients(model, model(x, p).square().sum()), want) < 1e-10


def resnet():
    from torchvision.models import resnet18

    torch.manual_seed(0)
    return resnet18(num_classes=4).train(), torch.randn(2, 3, 32, 32)


@pytest.mark.parametrize("text", ["recompute", "lean+recompute", "lean+recompute(sparing=True)"])
def test_statistics_of_recomputed_blocks_are_updated_once(text):
    model, x = resnet()
    other = copy.deepcopy(model)
    hb.apply_(other, *hb.parse(text))
    for m in (model, other):
        m(x).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), other.buffers(), strict=True))
    assert furthest({k: p.grad for k, p in other.named_parameters()}, {k: p.grad for k, p in model.named_parameters()}) < 1e-5


@pytest.mark.parametrize("also", ["", "+lean"])
def test_statistics_of_recomputed_streams_are_updated_once(also):
    model, x = resnet()
    model, x = model.double(), x.double()
    other = copy.deepcopy(model)
    hb.apply_(other, *hb.parse(f"sbp(keep=0.5)+recompute{also}"))
    for m in (model, other):
        m(x).sum().backward()
    assert all(torch.allclose(a, b, rtol=1e-10) for a, b in zip(model.buffers(), other.buffers(), strict=True))


def test_an_optimizer_in_the_backward_takes_no_step_in_a_profile_or_a_plan():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    steps = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: steps.append(type(p)))
    hb.profile(model, torch.randn(3, 4))
    hb.profile(model, torch.randn(3, 4), real=True)
    hb.plan(model, torch.randn(3, 4), 1.0)
    assert not steps
    model(torch.randn(3, 4)).sum().backward()
    assert len(steps) == 4


def test_a_batch_norm_is_refused_before_anything_is_changed():
    model, _, _ = made()
    model.blocks = nn.ModuleList(Normed() for _ in range(2))
    with pytest.raises(ValueError, match=r"blocks.0 has a BatchNorm1d"):
        hb.apply_(model, hb.Recompute(parts=2))
    assert all("forward" not in m.__dict__ for m in model.modules())
    with pytest.raises(ValueError, match="parts=0"):
        hb.Recompute(parts=0)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_batch_that_is_smaller_than_the_parts_works(batch):
    model, ids, y = made()
    wanted = gradients(model, F.cross_entropy(model(ids[:batch]).view(-1, V), y[:batch].view(-1)))
    hb.apply_(model, hb.Recompute(parts=8))
    assert furthest(gradients(model, F.cross_entropy(model(ids[:batch]).view(-1, V), y[:batch].view(-1))), wanted) < 1e-12
