"""Every kind of model that transformers, timm and torchvision have, small and with random weights: do our methods leave it what it is?

Of a model that runs by itself, in double precision where it can and without dropout, each method is asked:

    forward    is what it returns in training what the plain model returns, to rounding?
    gradients  Lean, Recompute: the plain model's, to rounding? SBP: has each parameter one, that has one in plain training, in four steps?
    held       what is held for the backward pass, of plain training's
    uncut      SBP: nothing was cut, as its report says
    error      what it says where it refuses

    python benchmarks/third_party.py                 writes benchmarks/results/third_party.jsonl, a line a model; goes on where it was cut
    python benchmarks/third_party.py --only 'timm:*' --again --jobs 2

What does not run by itself with the inputs made here, or is large, says so in its line.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import functools
import inspect
import json
import multiprocessing.pool
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

import tables  # noqa: E402
import zoo  # noqa: E402, F401  declares what a CPU torch lacks, before anything imports torchvision

import halfback as hb  # noqa: E402
from halfback.compare import surroundings  # noqa: E402
from halfback.files import write_text  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "third_party.jsonl"
METHODS = ("sbp(keep=0.5)", "lean", "dropit(keep=0.2, activation_bits=8)", "recompute")
EXACT = ("lean", "recompute")
STEPS = 4  # of SBP, to look for gradients
NOTHING = 1e-12  # of the largest gradient: of a bias before a softmax, say, rounding alone
SECONDS = 60  # for one model

# What configurations of transformers call their sizes

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "decoder_hidden_size", "model_dim"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_inner", "n_inner", "hidden_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth"), 3),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "decoder_num_hidden_layers", "num_block"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(
        ("num_key_value_heads", "decoder_num_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 2
    ),
    **dict.fromkeys(("vocab_size", "src_vocab_size", "tgt_vocab_size", "decoder_vocab_size"), 100),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts_per_tok", "num_queries", "n_group", "topk_group"), 2),
    **{"head_dim": 16, "d_kv": 16, "attention_head_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0},
    **{"image_size": 64, "patch_size": 8, "num_labels": 5, "use_cache": False, "num_mel_bins": 16, "sliding_window": 8},
}
FEW = [name for name in SMALL if "layer" in name or "vocab" in name or name in ("depth", "use_cache", "pad_token_id", "num_labels")]
LARGEST = 30_000_000  # weights
WHOLE = ("pretraining_tp", "is_encoder_decoder", "model_type", "transformers_version", "architectures", "dtype", "torch_dtype")


def shrunk(kind: str, sizes: Collection[str]) -> Any:
    """A configuration of this kind where these sizes are small, and those of its parts."""
    from transformers import AutoConfig

    def small(had: dict[str, Any]) -> dict[str, Any]:
        new = {}
        for key, value in had.items():
            if isinstance(value, dict) and ("model_type" in value or key.endswith("_config")):
                new[key] = {**small(value), **({"model_type": value["model_type"]} if "model_type" in value else {})}
            elif key in ("layer_types", "layers_block_type", "mlp_layer_types") and isinstance(value, list):
                new[key] = value[:3]
            elif isinstance(value, float) and ("drop" in key or key in ("mask_time_prob", "mask_feature_prob")):
                new[key] = 0.0
            elif key in sizes and type(value) in (type(SMALL[key]), type(None)) and not (value is None and key not in ("pad_token_id",)):
                new[key] = SMALL[key]
        return new

    plain = AutoConfig.for_model(kind)
    had = {k: v for k, v in plain.to_dict().items() if k not in WHOLE}
    return type(plain)(**small(had))


def inputs_of(model: Any, config: Any) -> dict[str, Tensor]:
    """By the name of the main input, and for a decoder its own."""

    def of(name: str, default: int) -> int:
        value = next((v for c in (config, *parts) if (v := getattr(c, name, None)) is not None), default)
        return value if isinstance(value, int) else value[0] if isinstance(value, (list, tuple)) else default

    parts = [c for k, c in vars(config).items() if k.endswith("_config") and c is not None]
    takes, text = inspect.signature(model.forward).parameters, torch.randint(3, 90, (2, 24))
    side = of("image_size", 64)
    made = {
        "input_ids": text,
        "pixel_values": torch.randn(2, of("num_channels", 3), side, side),
        "input_values": torch.randn(2, 2000),
        "input_features": torch.randn(2, of("num_mel_bins", 16), 64),
    }
    found = {name: t for name, t in made.items() if name in takes} or {"input_ids": text}
    if "decoder_input_ids" in takes and config.is_encoder_decoder:
        found["decoder_input_ids"] = text[:, :16]
    return found


# The models


def of_transformers(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Some want sizes that belong together: then all but the number of layers, and of words, are as they are."""
    from transformers import AutoModel

    try:
        config = shrunk(kind, SMALL)
        model = AutoModel.from_config(config)
        batch = inputs_of(model, config)
        run(model, batch)
        return model, batch
    except Exception as e:
        config = shrunk(kind, FEW)
        with torch.device("meta"):
            weights = sum(p.numel() for p in AutoModel.from_config(config).parameters())
        if weights > LARGEST:
            raise e
        model = AutoModel.from_config(config)
        return model, inputs_of(model, config)


def of_timm(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    import timm

    model = timm.create_model(name, num_classes=5)
    channels, side, _ = model.pretrained_cfg.get("input_size", (3, 64, 64))
    fixed = model.pretrained_cfg.get("fixed_input_size", False)
    return model, {"x": torch.randn(2, channels, *[side if fixed else min(side, 128)] * 2)}


def of_torchvision(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    from torchvision import models

    backbone = {"weights_backbone": None} if "segmentation" in models.get_model_builder(name).__module__ else {}
    model = models.get_model(name, weights=None, **backbone)
    clip = "video" in type(model).__module__
    side = 224 if "vit" in name or "maxvit" in name else 112 if clip else 96
    return model, {"x": torch.randn(2, 3, *[8] * clip, side, side)}


LIBRARIES: dict[str, Callable[[str], tuple[nn.Module, dict[str, Tensor]]]] = {
    "transformers": of_transformers,
    "timm": of_timm,
    "torchvision": of_torchvision,
}


def smallest(names: list[str], make: Callable[[str], nn.Module], most: int = LARGEST) -> Iterator[str]:
    """Of each class of models, and each way its blocks are made, the one with fewest weights."""
    found: dict[Any, tuple[int, str]] = {}
    for name in names:
        try:
            with torch.device("meta"):
                model = make(name)
        except Exception:  # needs weights, or contents to begin with
            continue
        size = sum(p.numel() for p in model.parameters())
        kinds = frozenset(type(m) for m in model.modules() if "block" in type(m).__name__.lower() or "layer" in type(m).__name__.lower())
        key = (type(model), kinds)
        if size <= most:
            found[key] = min(found.get(key, (size, name)), (size, name))
    return (name for _, name in sorted(found.values(), key=lambda known: known[1]))


def names(libraries: Collection[str]) -> list[str]:
    import timm
    from torchvision import models
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    vision = [n for n in models.list_models() if not n.startswith(("quantized", "raft", "retinanet", "fcos", "ssd")) and "rcnn" not in n]
    found = {
        "transformers": lambda: sorted(MODEL_MAPPING_NAMES),
        "timm": lambda: smallest(timm.list_models(), functools.partial(timm.create_model, num_classes=5)),
        "torchvision": lambda: smallest(vision, lambda name: of_torchvision(name)[0]),  # but detectors, which want a GPU, and flow
    }
    return [f"{library}:{name}" for library, make in found.items() if library in libraries for name in make()]


# What is asked of a model


def quiet(model: nn.Module) -> None:
    """No random numbers: they would be drawn for other shapes."""
    for m in model.modules():
        if isinstance(m, nn.modules.dropout._DropoutNd):
            m.p = 0.0
        for name in ("drop_prob", "p", "dropout", "attention_dropout", "activation_dropout", "layerdrop"):
            if isinstance(getattr(m, name, None), float):
                setattr(m, name, 0.0)


def moved(model: nn.Module) -> None:
    """Small models begin so flat that mistakes would hide."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.add_(torch.randn_like(p) * 0.02)


def run(model: nn.Module, batch: dict[str, Tensor], seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    out = model(*batch.values()) if "x" in batch else model(**batch)
    return [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point() and t.requires_grad]


def loss_of(outs: list[Tensor]) -> Tensor:
    """Of all that it returns, each element in another way."""
    return sum((t.double() * torch.linspace(-1, 1, t.numel(), dtype=torch.double).reshape(t.shape)).square().mean() for t in outs)


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    model.zero_grad()
    outs = run(model, batch)
    loss_of(outs).backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    least = NOTHING * max([g.nan_to_num().abs().max() for g in found.values()], default=torch.tensor(0.0))
    return [t.detach() for t in outs], {n: g for n, g in found.items() if not g.abs().max() <= least}


def apart(mine: list[Tensor], plain: list[Tensor]) -> float:
    """The largest difference, of the largest value."""
    if [t.shape for t in mine] != [t.shape for t in plain]:
        return float("inf")
    pairs = [(a.double(), b.double()) for a, b in zip(mine, plain, strict=True) if a.numel()]
    return max([((a - b).abs().max() / (b.abs().max() + 1e-12)).item() for a, b in pairs], default=0.0)


def asked(model: nn.Module, batch: dict[str, Tensor], method: str, plain: tuple, held: int) -> dict[str, Any]:
    try:
        report = hb.apply_(model, *hb.parse(method))
        outs, found = gradients(model, batch)
        told: dict[str, Any] = {"forward": apart(outs, plain[0])}
        if method in EXACT:
            told["gradients"] = max([apart([found[n]], [plain[1][n]]) for n in plain[1] if n in found], default=0.0)
        if method.startswith("sbp"):
            found = {n for step in range(STEPS) for n in (gradients(model, batch)[1] if step else found)}
            told |= {"uncut": "nothing was cut" in str(report), "merged": sorted(report.merged)}
        if not method.startswith("dropit"):
            told["lost"] = sorted(plain[1].keys() - found)
        told["held"] = round(hb.held(model, lambda: loss_of(run(model, batch))) / held, 4)
        return told
    except Exception as e:
        return {"error": f"{type(e).__name__}: {e}"[:400]}


def look(name: str) -> dict[str, Any]:
    library, _, kind = name.partition(":")
    torch.manual_seed(0)
    try:
        model, batch = LIBRARIES[library](kind)
        quiet(model)
        moved(model)
        model, batch, plain = in_double(model.train(), batch)
        differs = apart(gradients(model, batch)[0], plain[0])
        if not differs < tables.ROUNDING:
            return {"model": name, "not_run": f"two runs of it differ by {differs:.1e}"}
        if not plain[1] or not all(g.isfinite().all() for g in plain[1].values()):
            return {"model": name, "not_run": "its gradients are not finite" if plain[1] else "it has no gradient"}
        held = hb.held(model, lambda: loss_of(run(model, batch)))
    except Exception as e:
        return {"model": name, "not_run": f"{type(e).__name__}: {e}"[:200]}
    told = {method: asked(copy.deepcopy(model), batch, method, plain, held) for method in METHODS}
    return {"model": name, "kind": type(model).__name__, "weights": sum(p.numel() for p in model.parameters()), "methods": told}


def in_double(model: nn.Module, batch: dict[str, Tensor]) -> tuple[nn.Module, dict[str, Tensor], tuple]:
    """With its outputs and gradients; in single precision where it casts by itself."""
    single = copy.deepcopy(model)
    try:
        double = {k: t.double() if t.is_floating_point() else t for k, t in batch.items()}
        return model.double(), double, gradients(model, double)
    except (RuntimeError, TypeError, ValueError):
        return single, batch, gradients(single, batch)


def in_child(name: str, to: Any) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    to.send(look(name))


def looked(name: str) -> dict[str, Any]:
    """In a process of its own, which may hang or die."""
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=in_child, args=(name, there))
    child.start()
    there.close()
    try:
        told = here.recv() if here.poll(SECONDS) else {"model": name, "not_run": f"not done in {SECONDS} s"}
    except EOFError:
        told = {"model": name, "not_run": "its process died"}
    child.kill()
    child.join()
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="models whose name, LIBRARY:MODEL, matches one of these, as 'timm:*,*:bert'")
    parser.add_argument("--again", action="store_true", help="models that there is a line of, too")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    known = {} if not args.out.exists() else {r["model"]: r for r in map(json.loads, args.out.read_text().splitlines())}
    globs = args.only.split(",")
    libraries = [library for library in LIBRARIES if any(fnmatch.fnmatch(library, g.partition(":")[0]) for g in globs)]
    wanted = [n for n in names(libraries) if any(fnmatch.fnmatch(n, g) for g in globs) and (args.again or n not in known)]
    import timm
    import torchvision
    import transformers

    here = surroundings("cpu")
    versions = {m.__name__: m.__version__ for m in (transformers, timm, torchvision)}
    with multiprocessing.pool.ThreadPool(args.jobs) as pool:
        bar = tqdm(pool.imap_unordered(looked, wanted), total=len(wanted), unit="model", dynamic_ncols=True)
        for told in bar:
            bar.set_postfix_str(told["model"])
            library = told["model"].partition(":")[0]
            made = {library: versions[library], "torch": torch.__version__, "commit": here["commit"], "date": here["date"][:10]}
            known[told["model"]] = {**told, **made}
            write_text(args.out, "".join(json.dumps(known[n]) + "\n" for n in sorted(known)))
    print(tables.third_party_table(list(known.values())))


if __name__ == "__main__":
    main()
