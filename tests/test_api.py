"""Methods, errors, Algorithm 1: what a user types."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import zoo
from torch import nn

import halfback as hb
from halfback.blocks import find_blocks
from halfback.methods import from_json, parse
from halfback.positions import Positions

METHODS = [
    hb.SBP(),
    hb.SBP(0.25, layers=("a.*", "b"), attention="qkv", grid=(14, 14), always=1, opaque="x", seed=3),
    hb.SkipTokens(0.5, carry=True),
    hb.Recompute(layers="last 1/2"),
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_methods_have_one_text_form_and_a_json_form(method):
    assert parse(str(method)) == (method,)
    assert from_json(json.loads(json.dumps(method.to_json()))) == method


def test_text_composes():
    assert parse("sbp(keep=0.5)+recompute") == (hb.SBP(0.5), hb.Recompute())
    assert parse("exact") == ()


@pytest.mark.parametrize(
    "text, message",
    [
        ("sbp(keep=0.5", "is no method"),
        ("spb(keep=0.5)", "none of the methods sbp, skiptokens, recompute"),
        ("sbp(0.5)", "name every argument"),
        ("sbp(sampler=grid)", "'text' in quotes"),
        ("sbp(ratio=0.5)", "sbp takes keep, layers"),
        ("sbp(keep=2)", r"must be a number in \(0, 1\]"),
    ],
)
def test_text_that_is_no_method_says_what_is_possible(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"keep": 0}, r"SBP\(\): keep=0 must be a number in \(0, 1\]"),
        ({"keep": 1.5}, "keep=1.5"),
        ({"keep": "half"}, "keep='half'"),
        ({"sampler": "checker"}, "none of grid, random, frames, fixed"),
        ({"attention": "rows"}, "none of query, qkv, heads"),
        ({"ramp": "up"}, "none of uniform, increasing, decreasing"),
        ({"masks": "own"}, "none of shared, independent, disjoint"),
        ({"grid": (0, 3)}, "one to three positive sizes"),
        ({"always": -1}, "number of leading tokens"),
    ],
)
def test_bad_fields_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        hb.SBP(**fields)


def unchanged(model):
    return all(not m._forward_pre_hooks and not m._forward_hooks and "forward" not in vars(m) for m in model.modules())


@pytest.mark.parametrize(
    "methods, message",
    [
        ((), "no method given"),
        (("sbp",), "'sbp' is no method"),
        ((hb.SBP(), hb.SBP()), "cannot be combined"),
        ((hb.SBP(), hb.SkipTokens()), "cannot be combined"),
        (
            (hb.SBP(layers="blocks.9*"),),
            r"layers='blocks.9\*' matches none of the 3 blocks of ViTForImageClassification. Blocks: vit.layers.0 ... vit.layers.2",
        ),
        ((hb.SBP(), hb.Recompute(layers=["nothing"])), "matches none of the 3 blocks"),
        ((hb.SBP(layers=lambda name, module: False),), "matches none"),
        ((hb.SBP(layers=range(2)),), r"layers=range\(0, 2\): 0 is no name. Give names or patterns, as"),
        ((hb.SBP(), hb.Recompute(layers=3)), r"layers=3: 3 is no name"),
        ((hb.SBP(opaque=(1,)),), r"opaque=\(1,\): 1 is no name"),
        ((hb.DropIT(layers=[1]),), r"layers=\[1\]: 1 is no name"),
        ((hb.SBP(opaque=["nowhere"]),), "opaque='nowhere' matches no module"),
    ],
)
def test_what_cannot_be_applied_is_said_and_the_model_is_unchanged(methods, message):
    model, _ = zoo.make("vit", layers=3)
    before = set(vars(model))
    with pytest.raises((ValueError, TypeError), match=message):
        hb.apply_(model, *methods)
    assert unchanged(model) and set(vars(model)) == before


def test_other_bad_input():
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, found int"):
        hb.apply_(3, hb.SBP())
    with pytest.raises(ValueError, match="no blocks found in Linear"):
        hb.apply_(nn.Linear(2, 2), hb.SBP())
    model, _ = zoo.make("vit", layers=3)
    hb.apply_(model, hb.SBP())
    with pytest.raises(ValueError, match=r"already has sbp. Call hb.remove_"):
        hb.apply_(model, hb.Recompute())
    with pytest.raises(ValueError, match=r"0 already has sbp"):
        hb.apply_(nn.Sequential(model), hb.SBP())
    hb.remove_(model)
    hb.remove_(model)
    assert unchanged(model)


def test_a_grid_that_does_not_fit_is_said():
    model, batch = zoo.make("vit", layers=3)
    hb.apply_(model, hb.SBP(grid=(7, 7), always=1))
    with pytest.raises(ValueError, match=r"grid=\(7, 7\) does not fit: vit.layers.1 has 65 tokens"):
        zoo.call(model, batch)
    hb.remove_(model)
    report = hb.apply_(model, hb.SBP(grid=(4, 16), always=1))
    zoo.call(model, batch)
    assert "4x16 positions after 1" in str(report)


@pytest.mark.parametrize(
    "layers, chosen",
    [
        ("all", range(12)),
        ("last 2/3", range(4, 12)),
        ("paper", range(4, 12)),
        ("last 3", range(9, 12)),
        ("first 1/4", range(3)),
        (["vit.layers.2", "vit.layers.1?"], [2, 10, 11]),
        (lambda name, module: name.endswith("7"), [7]),
    ],
)
def test_layers(layers, chosen):
    model, batch = zoo.make("vit")
    plain = zoo.call(model, batch)
    report = hb.apply_(model, hb.SBP(layers=layers))
    assert report.blocks == [f"vit.layers.{i}" for i in chosen]
    assert (zoo.call(model, batch) - plain).abs().max() < 1e-5


@pytest.mark.parametrize("name", zoo.CONVNETS)
@pytest.mark.parametrize("depths, third", [((3, 3, 9, 3), 6), ((3, 3, 27, 3), 21)])
def test_the_papers_layers_of_convnext(name, depths, third):
    model, _ = zoo.make(name, depths=depths)
    blocks = [n for n, _ in find_blocks(model)]
    assert len(blocks) == sum(depths)
    assert hb.apply_(model, hb.SBP(layers="paper")).blocks == blocks[: 6 + third]


def blocks_of(widths, depths):
    return [nn.ModuleList(nn.TransformerEncoderLayer(w, 2, 2 * w) for _ in range(d)) for w, d in zip(widths, depths, strict=True)]


@pytest.mark.parametrize(
    "widths, depths, chosen",
    [
        ([8, 8, 8], [3, 3, 3], range(3, 9)),  # of one width, as of one list
        ([16, 8, 16], [3, 3, 3], range(3, 9)),  # branches
        ([8, 16, 24], [3, 3, 3], [0, 1, 2, 3, 4]),  # stages
        ([8, 16, 24], [1, 1, 4], range(2, 6)),  # a stack, and what leads up to it
    ],
)
def test_stages_are_lists_each_wider_than_the_one_before(widths, depths, chosen):
    """What takes its input from nobody before it is no later stage: by default the last two thirds of all blocks are chosen then. They
    are also where the last stage has most of the blocks."""
    model = nn.ModuleDict({"stages": nn.ModuleList(blocks_of(widths, depths))})
    blocks = [name for name, _ in find_blocks(model)]
    assert hb.apply_(model, hb.SBP()).blocks == [blocks[i] for i in chosen]


@pytest.mark.parametrize(
    "names, widths, depths, chosen",
    [
        (("text.layers", "vision.layers"), [8, 8], [3, 6], [1, 2, *range(5, 9)]),
        (("encoder.layers", "decoder.layers"), [8, 16], [3, 3], [1, 2, 4, 5]),
        (("audio2.layers", "adapter.layers", "text1.layers"), [8, 16, 24], [3, 3, 3], [1, 2, 4, 5, 7, 8]),  # no stages
        (("stem", "blocks", "head"), [8, 8, 8], [1, 6, 1], range(3, 7)),
        (("stage1", "stage2", "stage3"), [8, 16, 24], [2, 4, 2], [0, 1, 2, 3, 4]),
    ],
)
def test_of_each_stack_the_last_two_thirds_are_chosen(names, widths, depths, chosen):
    """Of two towers it was all of the one that was registered last, and a third of the other."""
    model = nn.Module()
    for name, blocks in zip(names, blocks_of(widths, depths), strict=True):
        outer, _, inner = name.partition(".")
        model.add_module(outer, nn.ModuleDict({inner: blocks}) if inner else blocks)
    blocks = [name for name, _ in find_blocks(model)]
    assert hb.apply_(model, hb.SBP()).blocks == [blocks[i] for i in chosen]


def test_a_stem_and_what_embeds_between_stages_are_no_part_of_the_papers_layers():
    class Embed(nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.linear, self.norm = nn.Linear(a, b), nn.LayerNorm(b)
            self.places = nn.Parameter(torch.zeros(1, 4, b))

    model = nn.ModuleDict({"embed": nn.ModuleList([Embed(4, 8), Embed(8, 16), Embed(16, 24)])})
    model["stages"] = nn.ModuleList(blocks_of((8, 16, 24), (3, 3, 3)))
    assert len(find_blocks(model)) == 12
    assert hb.apply_(model, hb.SBP()).blocks == [f"stages.{i}" for i in ("0.0", "0.1", "0.2", "1.0", "1.1")]


@pytest.mark.parametrize(
    ("norm", "found"), [(lambda: nn.LayerNorm(8, elementwise_affine=False), 3), (lambda: nn.LayerNorm(8), 3), (nn.Identity, 0)]
)
def test_a_norm_without_weights_is_known_by_its_name(norm, found):
    """As diffusion transformers have them: their scale and shift are computed."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.linear = norm(), nn.Linear(8, 8)

        def forward(self, x):
            return x + self.linear(self.norm1(x))

    assert len(find_blocks(nn.Sequential(Layer(), Layer(), Layer()))) == found


@pytest.mark.parametrize("method", ["lean", "dropit(keep=0.2, exact_first=False)", "recompute", "sbp+lean+recompute"])
def test_removal_reaches_a_forward_that_others_wrapped(method):
    model, batch = zoo.make("vit", layers=2)
    held = hb.held(model, lambda: zoo.loss(model, batch))
    hb.apply_(model, *parse(method))
    for module in model.modules():
        if "forward" in module.__dict__:
            ours = module.forward
            module.forward = lambda *args, ours=ours, **kwargs: ours(*args, **kwargs)
    assert hb.held(model, lambda: zoo.loss(model, batch)) < held
    hb.remove_(model)
    assert hb.held(model, lambda: zoo.loss(model, batch)) == held


def test_notebooks_show_what_print_shows():
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 4)
    profile = hb.profile(model, batch)
    report = hb.apply_(model, hb.DropIT(keep=0.5))
    for shown in (profile, profile.compare(profile), report, hb.audit(model, batch, steps=1)):
        assert repr(shown) == str(shown)


def test_blocks_are_found_by_structure():
    from transformers import MixtralConfig, MixtralForCausalLM, SwinConfig, SwinForImageClassification

    config = MixtralConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=50,
    )
    assert [n for n, _ in find_blocks(MixtralForCausalLM(config))] == [f"model.layers.{i}" for i in range(3)]
    swin = SwinForImageClassification(SwinConfig(image_size=64, embed_dim=12, depths=[2, 2], num_heads=[2, 2], window_size=4))
    assert len(find_blocks(swin)) == 4


@pytest.mark.parametrize(
    ("name", "count", "first"),
    [("efficientnet_b0", 15, "blocks.1.0"), ("resnetv2_50", 16, "stages.0.blocks.0"), ("skresnet18", 8, "layer1.0")],
)
def test_norms_with_an_activation_and_layers_within_blocks(name, count, first):
    import timm

    with torch.device("meta"):
        blocks = [n for n, _ in find_blocks(timm.create_model(name))]
    assert (len(blocks), blocks[0]) == (count, first)


def test_channels_come_first_where_norms_and_layers_say_so():
    import timm

    model = timm.models.EdgeNeXt(num_classes=5, dims=(16, 24, 32, 48), depths=(1, 1, 1, 1), heads=(2, 2, 2, 2)).train()
    report = hb.apply_(model, hb.SBP(layers="all"))
    model(zoo.images(64)).sum().backward()
    assert report.positions == ["16x16 positions, drawn on 2x2; 50.0% of them kept"]


def test_swin_trains_with_exact_merges():
    from transformers import SwinConfig, SwinForImageClassification

    torch.manual_seed(0)
    model = SwinForImageClassification(SwinConfig(image_size=64, embed_dim=12, depths=[2, 2], num_heads=[2, 2], window_size=4)).train()
    x = torch.randn(2, 3, 64, 64)
    torch.manual_seed(0)
    plain = model(x).logits
    held = hb.held(model, lambda: model(x).logits.sum())
    report = hb.apply_(model, hb.SBP(layers="all"))
    torch.manual_seed(0)
    assert (model(x).logits - plain).abs().max() < 1e-5
    assert report.merged and hb.held(model, lambda: model(x).logits.sum()) < 0.95 * held


VISION = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 96, "image_size": 32}


@pytest.mark.parametrize("sampler", ["grid", "frames"])
def test_videos_lie_on_a_grid_of_three_dimensions(sampler):
    from transformers import VivitConfig, VivitForVideoClassification

    config = VivitConfig(**VISION, tubelet_size=[2, 8, 8], num_frames=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model, x = VivitForVideoClassification(config).train(), torch.randn(2, 8, 3, 32, 32)
    plain = model(x).logits
    report = hb.apply_(model, hb.SBP(layers="all", sampler=sampler))
    assert (model(x).logits - plain).abs().max() < 1e-5
    assert report.positions == ["4x4x4 positions after 1 that are always kept; 50.0% of them kept"]


def test_class_and_register_tokens_are_always_kept():
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersForImageClassification

    config = Dinov2WithRegistersConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, image_size=32, patch_size=8)
    model = Dinov2WithRegistersForImageClassification(config).train()
    report = hb.apply_(model, hb.SBP(layers="all"))
    model(torch.randn(2, 3, 32, 32))
    assert report.positions == ["4x4 positions after 5 that are always kept; 50.0% of them kept"]


def test_frames_of_an_image_are_refused():
    model, batch = zoo.make("vit", layers=3)
    hb.apply_(model, hb.SBP(layers="all", sampler="frames"))
    with pytest.raises(ValueError, match=r"needs a \(T, H, W\) grid; vit.layers.0 has \(8, 8\)"):
        zoo.call(model, batch)


# Algorithm 1


def test_algorithm_1_for_any_operation():
    torch.manual_seed(0)
    f = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 5)).double()
    x = torch.randn(2, 10, 6, dtype=torch.float64, requires_grad=True)
    at = Positions.of([1, 4, 5, 9], (10,))
    ours = hb.sbp(f, x, at)
    by_hand = torch.zeros(2, 10, 5, dtype=torch.float64)
    by_hand[:, at.kept] = f(x[:, at.kept])
    with torch.no_grad():
        by_hand[:, at.dropped] = f(x[:, at.dropped])
    assert torch.allclose(ours, by_hand, atol=1e-12)
    inputs = [x, *f.parameters()]
    weight = torch.randn(ours.shape, dtype=torch.float64)
    for a, b in zip(torch.autograd.grad((ours * weight).sum(), inputs), torch.autograd.grad((by_hand * weight).sum(), inputs), strict=True):
        assert torch.allclose(a, b, atol=1e-10)


def test_positions_that_do_not_fit_are_said():
    at = Positions.of([0, 1], (4,))
    with pytest.raises(ValueError, match=r"has \(5,\) at dim=1"):
        hb.sbp(nn.Identity(), torch.randn(2, 5, 3), at)
    with pytest.raises(ValueError, match=r"has \(3, 3\) at dim=2"):
        hb.sbp(nn.Identity(), torch.randn(2, 5, 3, 3), Positions.of([0], (2, 2)), dim=2, pointwise=False)


def test_a_general_convolution_gets_zero_gradient_at_dropped_outputs():
    torch.manual_seed(0)
    f = nn.Conv2d(3, 4, 3, padding=1).double()
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    at = Positions.of([i for i in range(36) if (i // 6 + i % 6) % 2], (6, 6))
    ours = hb.sbp(f, x, at, dim=2, pointwise=False)
    assert torch.equal(ours, f(x))
    weight = torch.randn(ours.shape, dtype=torch.float64)
    mask = torch.zeros(36, dtype=torch.float64)
    mask[at.kept] = 1
    inputs = [x, *f.parameters()]
    wanted = torch.autograd.grad((f(x) * weight * mask.reshape(6, 6)).sum(), inputs)
    for a, b in zip(torch.autograd.grad((ours * weight).sum(), inputs), wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_importing_is_light():
    """What takes long to import, or is an extra, is imported by who needs it; and CUDA is left alone."""
    code = (
        "import sys, torch; before = set(sys.modules); import halfback, halfback.cli; "
        "heavy = ('torch._dynamo', 'torch._inductor', 'triton', 'sympy', 'scipy', 'matplotlib', 'tqdm', 'sklearn', 'safetensors', "
        "'transformers', 'timm', 'torchvision', 'PIL', 'torch.distributed.fsdp'); "
        "found = [m for m in heavy if m in sys.modules and m not in before]; "
        "assert not found, found; assert not torch.cuda.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("data", [1, "sbp", None, ["sbp"]])
def test_json_that_is_no_object_is_no_method(data):
    with pytest.raises(ValueError, match=r"from_json\(\): .* is no method: wanted an object, as {'method': 'sbp', 'keep': 0.5}"):
        from_json(data)


def test_what_fails_half_way_leaves_the_model_as_it_was():
    class Layer(nn.TransformerEncoderLayer):
        refuses = False

        def register_forward_hook(self, *args, **kwargs):
            if self.refuses:
                raise RuntimeError("no hooks here")
            return super().register_forward_hook(*args, **kwargs)

    model = nn.Sequential(*(Layer(16, 2, 32, batch_first=True) for _ in range(3)))
    model[2].refuses = True
    before = [(dict(m.__dict__), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    for text in ("sbp(layers='all')", "sbp(layers='all')+lean+recompute"):
        with pytest.raises(RuntimeError, match="no hooks here"):
            hb.apply_(model, *hb.parse(text))
        now = [(dict(m.__dict__), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
        assert [a[0].keys() for a in now] == [b[0].keys() for b in before] and [a[1:] for a in now] == [b[1:] for b in before]
    hb.apply_(model, hb.Lean())


def test_weights_without_a_shape_are_told_before_anything_changes():
    block = nn.Sequential(nn.LayerNorm(8), nn.LazyLinear(8), nn.Linear(8, 8))
    model = nn.ModuleDict({"blocks": nn.ModuleList([block])})
    with pytest.raises(ValueError, match=r"blocks.0 has parameters without a shape yet. Run a batch through the model first"):
        hb.apply_(model, hb.SBP(layers=["blocks.0"]))
    hb.apply_(model, hb.Recompute(layers=["blocks.0"]))
