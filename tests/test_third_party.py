"""Models of other people's libraries, as they are, train with SBP and with DropIT."""

from __future__ import annotations

import copy
import dataclasses
import functools

import pytest
import torch
import torch.nn.functional as F
import zoo

import halfback as hb

STEPS = 20
METHODS = hb.SBP(keep=0.5, layers="all"), hb.DropIT(keep=0.2, activation_bits=8)
SIZES = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
TEXT = {**SIZES, "vocab_size": 100, "use_cache": False}
LABELS = torch.tensor([1, 2])

# transformers


def of_transformers(name: str, task: str, inputs: dict | None = None, **settings):
    import transformers

    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    return getattr(transformers, f"{name}For{task}")(config(**settings)), {"input_ids": zoo.tokens(24)} if inputs is None else inputs


def classifier(name: str, size: int, **settings):
    return of_transformers(name, "ImageClassification", {"pixel_values": zoo.images(size)}, **settings, num_labels=5)


def vit_mae():
    places = torch.linspace(1, 0, 16).repeat(2, 1)  # which patches are masked
    sizes = {**SIZES, **{f"decoder_{k}": v for k, v in SIZES.items()}, "image_size": 32, "patch_size": 8}
    return of_transformers("ViTMAE", "PreTraining", {"pixel_values": zoo.images(32), "noise": places}, **sizes)


def qwen3():
    return of_transformers("Qwen3", "CausalLM", **TEXT, num_key_value_heads=1, head_dim=12)


def mixtral():
    return of_transformers("Mixtral", "CausalLM", **TEXT, num_key_value_heads=1, num_local_experts=4)


def deepseek_v3():
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    heads = {"q_lora_rank": 12, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
    return of_transformers("DeepseekV3", "CausalLM", **TEXT, **experts, **heads, num_key_value_heads=2, moe_intermediate_size=32)


def gpt_oss():
    return of_transformers("GptOss", "CausalLM", **TEXT, num_key_value_heads=1, head_dim=12, num_local_experts=4, num_experts_per_tok=2)


def olmo():
    """Its norms have no weights."""
    return of_transformers("Olmo", "CausalLM", **TEXT, eos_token_id=None)


def gemma3():
    return of_transformers("Gemma3", "CausalLM", **TEXT, num_key_value_heads=1, head_dim=12, sliding_window=8)


def mamba():
    return of_transformers("Mamba", "CausalLM", hidden_size=24, num_hidden_layers=3, vocab_size=100, state_size=4, use_cache=False)


def t5():
    sizes = {"d_model": 24, "d_kv": 12, "d_ff": 48, "num_layers": 3, "num_heads": 2, "vocab_size": 100, "dropout_rate": 0.0}
    inputs = {"input_ids": zoo.tokens(24), "decoder_input_ids": zoo.tokens(16)}
    return of_transformers("T5", "ConditionalGeneration", inputs, **sizes, use_cache=False)


def xlnet():
    sizes = {"d_model": 24, "n_layer": 3, "n_head": 2, "d_inner": 48, "vocab_size": 100, "dropout": 0.0}
    return of_transformers("XLNet", "SequenceClassification", **sizes, num_labels=5)


def fsmt():
    sizes = {"d_model": 24, "src_vocab_size": 100, "tgt_vocab_size": 100, "langs": ["en", "de"], "dropout": 0.0, "use_cache": False}
    parts = {f"{part}_{k}": n for part in ("encoder", "decoder") for k, n in (("layers", 3), ("attention_heads", 2), ("ffn_dim", 48))}
    inputs = {"input_ids": zoo.tokens(24), "decoder_input_ids": zoo.tokens(16)}
    return of_transformers("FSMT", "ConditionalGeneration", inputs, **sizes, **parts)


def clip():
    """A text as long as four tokens and the grid of the images."""
    from transformers import CLIPConfig, CLIPModel

    sizes = {"text_config": {**SIZES, "vocab_size": 100}, "vision_config": {**SIZES, "image_size": 32, "patch_size": 8}}
    return CLIPModel(CLIPConfig(**sizes, projection_dim=12)), {"input_ids": zoo.tokens(20), "pixel_values": zoo.images(32)}


def wav2vec2():
    torch.manual_seed(1)
    sizes = {**SIZES, "conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2], "classifier_proj_size": 24, "num_labels": 5}
    places = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0}
    none = {f"{k}_dropout": 0.0 for k in ("hidden", "attention", "activation", "feat_proj", "final")}
    inputs = {"input_values": torch.randn(2, 400)}
    return of_transformers("Wav2Vec2", "SequenceClassification", inputs, **sizes, **places, **none, num_feat_extract_layers=2)


def swin():
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
    return classifier("Swin", 32, **sizes, drop_path_rate=0.0)


def convnext_v2():
    return classifier("ConvNextV2", 64, depths=[1, 1, 2, 1], hidden_sizes=[8, 16, 24, 32])


def segformer():
    sizes = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 2, 2], "decoder_hidden_size": 24}
    return classifier("Segformer", 64, **sizes, hidden_dropout_prob=0.0, drop_path_rate=0.0, classifier_dropout_prob=0.0)


# timm


def of_timm(kind: str, size: int = 32, **settings):
    import timm

    return getattr(timm.models, kind)(num_classes=5, **settings), (zoo.images(size),)


def eva02():
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2, "ref_feat_shape": (4, 4)}
    return of_timm("Eva", **sizes, swiglu_mlp=True, scale_mlp=True, use_rot_pos_emb=True, qkv_fused=False)


def mixer():
    return of_timm("MlpMixer", img_size=32, patch_size=8, num_blocks=3, embed_dim=24)


def beit():
    return of_timm("Beit", img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=2)


def timm_swin():
    sizes = {"img_size": 32, "patch_size": 2, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 2), "window_size": 4}
    return of_timm("SwinTransformer", **sizes, drop_path_rate=0.0)


def timm_convnext_v2():
    return of_timm("ConvNeXt", 64, depths=(1, 1, 2, 1), dims=(8, 16, 24, 32), use_grn=True, ls_init_value=None)


def pit():
    """Stages of tokens, with a convolution between them that pools them; a class and a distillation token."""
    sizes = {"img_size": 64, "patch_size": 8, "stride": 8, "base_dims": (12, 12), "depth": (2, 2), "heads": (2, 4), "mlp_ratio": 2}
    model, batch = of_timm("PoolingVisionTransformer", 64, **sizes, stem_type="overlap", distilled=True)
    model.distilled_training = False
    return model, batch


def crossvit():
    """Two embeddings of patches, of two sizes."""
    sizes = {"img_size": 48, "img_scale": (1.0, 1.0), "patch_size": (8, 16), "embed_dim": (12, 24), "num_heads": (2, 2)}
    return of_timm("CrossVit", 48, **sizes, depth=((1, 2, 0), (1, 2, 0)), mlp_ratio=(2.0, 2.0, 1.0))


def hybrid():
    """A convolutional backbone, with blocks of its own, in front of the patches."""
    from timm.models.resnetv2 import ResNetV2
    from timm.models.vision_transformer_hybrid import HybridEmbed

    backbone = ResNetV2((1, 2), (128, 128), num_classes=0, global_pool="", stem_chs=32, preact=False)
    embed = functools.partial(HybridEmbed, backbone=backbone)
    return of_timm("VisionTransformer", 64, img_size=64, patch_size=1, embed_dim=24, depth=3, num_heads=2, embed_layer=embed)


def davit():
    return of_timm("DaVit", 64, depths=(1, 1, 1, 1), embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 2, 2))


def edgenext():
    return of_timm("EdgeNeXt", 64, dims=(16, 24, 32, 48), depths=(1, 1, 2, 1), heads=(2, 2, 2, 2))


def coatnet():
    from timm.models.maxxvit import MaxxVit, MaxxVitCfg

    return MaxxVit(MaxxVitCfg((16, 32), (1, 2), ("C", "T"), stem_width=8), img_size=64, num_classes=5), (zoo.images(64),)


# torchvision


def tv_swin(**kinds):
    from torchvision.models import SwinTransformer

    model = SwinTransformer([2, 2], 12, [2, 2], [2, 2], [4, 4], num_classes=5, stochastic_depth_prob=0.0, **kinds)
    return model, (zoo.images(32),)


def tv_swin_v2():
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

    return tv_swin(block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2)


def tv_swin_3d():
    from torchvision.models.video import SwinTransformer3d

    model = SwinTransformer3d([2, 4, 4], 12, [2, 2], [2, 2], [2, 4, 4], num_classes=5, stochastic_depth_prob=0.0)
    return model, (zoo.images(32)[:, :, None] * torch.linspace(0.5, 1, 4).reshape(4, 1, 1),)


def resnet():
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5), (zoo.images(64),)


def efficientnet():
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    settings = [MBConvConfig(*s, 1.0, 1.0) for s in ((1, 3, 1, 16, 16, 1), (4, 3, 2, 16, 24, 2), (4, 5, 2, 24, 32, 2))]
    return EfficientNet(settings, 0.0, stochastic_depth_prob=0.0, num_classes=5, last_channel=64), (zoo.images(64),)


# with einops


def einops_vit():
    from vit_pytorch import ViT

    return ViT(image_size=32, patch_size=8, num_classes=5, dim=24, depth=3, heads=2, mlp_dim=48, dim_head=12), (zoo.images(32),)


def einops_cct():
    from vit_pytorch.cct import CCT

    sizes = {"img_size": 32, "embedding_dim": 24, "num_layers": 3, "num_heads": 2, "mlp_ratio": 2, "num_classes": 5}
    return CCT(**sizes, attention_dropout=0.0, stochastic_depth_rate=0.0), (zoo.images(32),)


TRANSFORMERS = [vit_mae, qwen3, mixtral, deepseek_v3, gpt_oss, olmo, gemma3, mamba, t5, xlnet, fsmt, wav2vec2, swin, convnext_v2, segformer]
TIMM = [pit, crossvit, eva02, mixer, beit, timm_swin, timm_convnext_v2, davit, edgenext, coatnet]
TORCHVISION = [tv_swin, tv_swin_v2, tv_swin_3d, resnet, efficientnet]
EINOPS = [einops_vit, einops_cct]
MODELS = {f.__name__: f for f in TRANSFORMERS + TIMM + TORCHVISION + EINOPS}
MODELS |= {n: functools.partial(f, **({"depths": (1, 1, 2, 1)} if n in zoo.CONVNETS else {"layers": 3})) for n, f in zoo.MODELS.items()}
MIXTURES = ("mixtral", "deepseek_v3", "gpt_oss")
UNCUT = ("resnet", "efficientnet", "einops_vit")  # BatchNorm sees all positions; a block that is a branch alone has no trunk to join


def make(name: str):
    MODELS[name]()  # importing a model's module draws random numbers
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return model.train(), batch


def loss_of(model, batch) -> torch.Tensor:
    out = model(**batch) if isinstance(batch, dict) else model(*batch)
    if getattr(out, "loss", None) is not None:
        return out.loss
    out = zoo.logits(out)
    if out.ndim == 2:
        return F.cross_entropy(out, LABELS)
    return F.cross_entropy(out.flatten(0, 1), batch.get("decoder_input_ids", batch["input_ids"]).flatten())


def train(model, batch) -> torch.Tensor:
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-3), []
    for _ in range(STEPS):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@functools.cache
def plain(name: str) -> tuple[torch.Tensor, int]:
    """The loss of the first step, and what is held for it."""
    model, batch = make(name)
    return loss_of(model, batch).detach(), hb.held(model, lambda: loss_of(model, batch))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", METHODS, ids=["sbp", "dropit"])
def test_it_trains(name, method):
    first, held = plain(name)
    model, batch = make(name)
    if isinstance(method, hb.SBP) and name in MIXTURES:
        method = dataclasses.replace(method, apart=("*.experts",))
    report = hb.apply_(model, method)
    losses = train(model, batch)
    torch.testing.assert_close(losses[0], first, rtol=1e-5, atol=1e-6)
    assert losses.isfinite().all() and losses[-1] < losses[0]
    if isinstance(method, hb.SBP) and name in UNCUT:
        assert f"nothing was cut, so gradients are exact and no less is held, maybe more, in {report.blocks[0]}" in str(report)
    else:
        assert hb.held(model, lambda: loss_of(model, batch)) < held
    if isinstance(method, hb.DropIT):
        assert report.approximated and report.after < report.before


@pytest.mark.parametrize(("make", "leading", "grids"), [(pit, 2, 2), (crossvit, 1, 2), (hybrid, 1, 1)])
def test_class_tokens_are_always_kept_wherever_tokens_come_from(make, leading, grids):
    """Where they were not, whole stages got no gradient in half of the steps, and a backbone in front of them never."""

    def reached() -> set[str]:
        model.zero_grad()
        loss_of(model, batch).backward()
        return {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}

    model, batch = make()
    model.train()
    plain = reached()
    report = hb.apply_(model, hb.SBP(keep=0.5))
    assert [reached() for _ in range(4)] == [plain] * 4
    assert len([text for text in report.positions if f"after {leading} that are always kept" in text]) == grids


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (xlnet, ["23 positions after 1 that are always kept"]),  # (positions, samples, features), of blocks that do not say so
        (fsmt, ["23 positions after 1 that are always kept", "15 positions after 1 that are always kept"]),
        (clip, ["4x4 positions after 1 that are always kept", "19 positions after 1 that are always kept"]),  # no image, of a text
    ],
)
def test_positions_are_found(make, found):
    """In XLNet and FSMT it was the samples that were kept or dropped."""
    model, batch = make()
    report = hb.apply_(model.train(), hb.SBP(keep=0.5))
    model(**batch)
    assert sorted(text.partition(";")[0] for text in report.positions) == sorted(found)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_scripted_function_in_a_block_is_told_with_the_module_that_calls_it():
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    settings = {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    del settings["use_cache"]
    model, batch = DebertaV2ForSequenceClassification(DebertaV2Config(**settings, num_labels=5)).train(), {"input_ids": zoo.tokens(24)}
    hb.apply_(model, hb.SBP(keep=0.5), hb.Lean())
    with pytest.raises(RuntimeError, match=r"DebertaV2Layer.attention.self calls a scripted .* SBP\(opaque=\['\*.attention.self'\]\)"):
        loss_of(model, batch)
    hb.remove_(model)
    hb.apply_(model, hb.SBP(keep=0.5, opaque=["*.attention.self"]), hb.Lean())
    loss_of(model, batch).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("name", "size"), [("efficientvit_b0", 32), ("mobilenetv4_conv_small", 64)])
def test_what_a_batch_norm_of_two_values_makes_of_rounding_is_all_that_changes(name, size, monkeypatch):
    """In single precision they differ by up to 2e-3, as plain training does if an input changes by a unit in its last place."""
    import timm

    def attention(self, q, k, v):  # as it is, but for its own cast to single precision
        out = q @ (k.transpose(-1, -2) @ v)
        return out[..., :-1] / (out[..., -1:] + self.eps)

    monkeypatch.setattr(timm.models.efficientvit_mit.LiteMLA, "_attn", attention)
    torch.manual_seed(0)
    model, x = timm.create_model(name, num_classes=5).double().train(), zoo.images(size).double()
    found = []
    for other in (copy.deepcopy(model), model):
        if other is model:
            hb.apply_(model, METHODS[0])
        torch.manual_seed(1)
        found.append([other(x).detach(), *other.buffers()])
    for mine, plain in zip(*found, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", METHODS, ids=["sbp", "dropit"])
def test_what_timm_does_to_models_still_works(method, tmp_path):
    from timm.utils import ModelEmaV3, unwrap_model

    (plain, batch), (model, _) = make("timm_vit"), make("timm_vit")
    hb.apply_(model, method)
    ema = ModelEmaV3(model, decay=0.5)
    train(model, batch)
    ema.update(model)
    assert unwrap_model(model) is model and unwrap_model(ema) is ema.module
    assert not torch.equal(ema.module.head.weight, model.head.weight)
    loss_of(ema.module, batch).backward()  # a copy with the method, and weights of its own
    assert ema.module.head.weight.grad is not None

    for m in (plain, model):
        m.reset_classifier(7)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    plain.load_state_dict(torch.load(tmp_path / "weights.pt"), strict=True)
    torch.testing.assert_close(zoo.call(model, batch), zoo.call(plain, batch))
    model.zero_grad()
    model.bfloat16()(batch[0].bfloat16()).float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in model.parameters())
