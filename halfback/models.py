"""Models to try a method on: a small ViT of our own, and anyone else's by name, with batches that they take.

    x = patches(image) + places                      one token a patch, a class token in front
    x = x + attention(norm(x));  x = x + mlp(norm(x))    in every block
    y = head(norm(x)[class])   or, with pool="mean", head(mean of norm(x) over the patches)

The ViT is plain PyTorch and knows nothing of halfback, which is the point: methods reach it as they reach any other model.

Shapes: B images, n tokens, D width, H heads.

`load_model` makes a model for given images. `load_subject` makes one in its own size, with batches for it, and without its memory: on
the meta device, where parameters have shapes and no contents; for real only where a model's constructor asks for values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .batches import check_batch, loss_of, resized, size_of
from .extras import install
from .untouched import applied_to, untouched
from .weightless import UNKNOWN, faked, weightless

POOLS = ("class", "mean")
SMALL = {"small-vit": "class", "small-vit-mean": "mean"}
NETS_32 = 3, 32, 100  # channels, pixels and classes of the small networks in train/nets.py
NAMES = ("resnet18", "vit-s4", "vit-s4-mean", "convnext")
VIT_B16 = {"image": 224, "patch": 16, "channels": 3, "width": 768, "depth": 12, "heads": 12, "classes": 1000}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.out(x.transpose(1, 2).reshape(b, n, d))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, image: int, patch: int, channels: int, width: int, depth: int, heads: int, classes: int, pool: str):
        super().__init__()
        self.pool = pool
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.empty(1, 1 + (image // patch) ** 2, width))
        nn.init.normal_(self.places, std=0.5)  # as strong as the patches; at 0.02 eight epochs of digits are too few
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(len(x), -1, -1), x), 1) + self.places
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x[:, 0] if self.pool == "class" else x[:, 1:].mean(1))


def small_vit(
    image: int = 8,
    patch: int = 2,
    channels: int = 1,
    width: int = 48,
    depth: int = 4,
    heads: int = 3,
    classes: int = 10,
    pool: str = "class",
) -> ViT:
    """A ViT for `image` x `image` pictures; the defaults suit the digits of `data.py`."""
    if image % patch:
        raise ValueError(f"small_vit(): patch={patch} does not divide image={image}.")
    if width % heads:
        raise ValueError(f"small_vit(): heads={heads} does not divide width={width}.")
    if pool not in POOLS:
        raise ValueError(f"small_vit(): pool={pool!r} is none of {', '.join(POOLS)}.")
    return ViT(image, patch, channels, width, depth, heads, classes, pool)


# Models by name


def load_model(spec: str, shape: tuple[int, ...] = (1, 8, 8), classes: int = 10) -> nn.Module:
    """A model with fresh weights, for images of `shape` (channels, height, width).

    spec   "small-vit", "timm:NAME", "torchvision:NAME", or "path/to/file.py:factory", a function of no arguments
    """
    if spec in SMALL:
        return _small_vit_for(shape, classes, SMALL[spec])
    if spec in NAMES:
        return _net(spec, shape, classes, 0.0)
    source, name = _parts(spec, IMAGE_FORMS)
    if not source.endswith(".py"):
        return SOURCES[source](name, shape, classes)
    model = _from_file(Path(source), name)[0]
    if there := [str(m) for applied in applied_to(model) for m in applied.report.methods]:
        raise ValueError(
            f"model {spec!r} has methods already ({' + '.join(there)}): what is trained would be told to be something else. Give a "
            "factory without apply_(), and the methods by their option."
        )
    return model


def load_for(spec: str, kind: str, shape: tuple[int, ...], classes: int, drop_path: float = 0.0) -> nn.Module:
    """A model with fresh weights, to be trained on images, clips or text (`kind`) of `shape` with so many classes, or words."""
    own = spec.rpartition(":")[0].endswith(".py")
    if drop_path and spec not in NAMES[1:] and not spec.startswith("timm:"):
        raise ValueError(f"drop_path {drop_path} is for {', '.join(NAMES[1:])} and timm's models; {spec!r} takes none.")
    if kind == "text" and not own and not spec.startswith("hf:"):
        raise ValueError(f"model {spec!r} takes no text. Give hf:NAME, as hf:gpt2, or a file.py:factory.")
    if kind == "clips" and not own and not spec.startswith("torchvision:"):
        raise ValueError(
            f"model {spec!r} takes no clips. Give one of torchvision's for video, as torchvision:r3d_18, or a file.py:factory."
        )
    return _called(Wanted(spec, light=False), lambda: _made_for(spec, kind, shape, classes, drop_path))


def _made_for(spec: str, kind: str, shape: tuple[int, ...], classes: int, drop_path: float) -> nn.Module:
    if spec in NAMES:
        return _net(spec, shape, classes, drop_path)
    if spec.startswith("hf:"):
        return _hf_for(spec, kind, shape, classes)
    if spec not in SMALL:
        _parts(spec, FORMS)
    if drop_path:
        try:
            return _from_timm(spec[5:], shape, classes, drop_path_rate=drop_path)
        except TypeError as e:
            if "drop_path_rate" not in str(e):
                raise
            raise ValueError(f"model {spec!r} takes no drop path; leave drop_path {drop_path} out.") from e
    return load_model(spec, shape, classes)


def _net(spec: str, shape: tuple[int, ...], classes: int, drop_path: float) -> nn.Module:
    from .train.nets import make_net

    return make_net(spec, shape, classes, drop_path)


def _hf_for(spec: str, kind: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """A model of transformers in the size that the data has."""
    transformers = _import("transformers", spec[3:])
    wanted = Wanted(spec, dtype="fp32", light=False)
    with _quiet(transformers):
        config = _config(transformers, spec[3:])
        head = _head(transformers, config)
        fits = {"images": "ImageClassification", "text": "CausalLM"}[kind]
        if head != fits:  # a model that sees the whole text would be asked for a token that it sees
            raise ValueError(f"model {spec!r} is made for {head or 'no task that is known'}; {kind} wants one for {fits}.")
        if kind == "images":
            config.num_labels, holder = classes, getattr(config, "vision_config", config)
            for name, value in (("image_size", shape[-1]), ("num_channels", shape[0])):
                if hasattr(holder, name):
                    setattr(holder, name, value)
        else:
            text = config.get_text_config()
            text.vocab_size = classes
            if (getattr(text, "max_position_embeddings", None) or shape[0]) < shape[0]:
                text.max_position_embeddings = shape[0]
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                ids = getattr(config, name, None)
                if any(i is not None and i >= classes for i in (ids if isinstance(ids, (list, tuple)) else [ids])):
                    setattr(config, name, None)
        return _hf_model(wanted, transformers, config, head)


def _parts(spec: str, forms: tuple[str, ...]) -> tuple[str, str]:
    source, colon, name = spec.partition(":") if spec.startswith("hf:") else spec.rpartition(":")
    if not colon or not name or not (source.endswith(".py") or any(f.startswith(f"{source}:") for f in forms)):
        raise ValueError(f"model {spec!r} is unknown. Models: {', '.join(forms)}.")
    return source, name


def _small_vit_for(shape: tuple[int, ...], classes: int, pool: str = "class") -> ViT:
    channels, height, width = shape
    if height != width:
        raise ValueError(f"model 'small-vit' wants square images (C, H, W), found {shape}. Models: {', '.join(IMAGE_FORMS)}.")
    # about seven patches a side: enough tokens for a choice among them to mean something
    patch = max(p for p in range(1, max(2, height // 7) + 1) if height % p == 0)
    return small_vit(height, patch, channels, classes=classes, pool=pool)


def _from_timm(name: str, shape: tuple[int, ...], classes: int, **more: Any) -> nn.Module:
    timm = _import("timm", name)
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.split('_')[0]}*")[:6]
        raise ValueError(
            f"model 'timm:{name}': timm has no such model. " + (f"Near it: {', '.join(near)}." if near else "See timm.list_models().")
        )
    given = {"num_classes": classes, "in_chans": shape[0], **more}
    try:
        return timm.create_model(name, img_size=shape[1:], **given)
    except TypeError as e:  # only models with learned places need to know
        if "img_size" not in str(e):
            raise
        return timm.create_model(name, **given)


def _from_torchvision(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    models = _import("torchvision", name).models
    if name not in models.list_models():
        near = [m for m in models.list_models() if m.startswith(name[:3])][:6] or models.list_models()[:6]
        raise ValueError(f"model 'torchvision:{name}': torchvision has no such model. Some that it has: {', '.join(near)}.")
    if shape[0] != 3:
        raise ValueError(f"model 'torchvision:{name}' wants images of 3 channels, the data has {shape[0]}.")
    sized = {"image_size": shape[1]} if name.startswith("vit") else {}
    return models.get_model(name, weights=None, num_classes=classes, **sized)


def _import(package: str, name: str) -> Any:
    """A package that may be missing, or built for another torch: torchvision then raises RuntimeError."""
    source = "hf" if package == "transformers" else package
    try:
        module = importlib.import_module(package)
        if package == "torchvision":
            importlib.import_module("torchvision.models")
        return module
    except ImportError as e:
        raise ValueError(f"model '{source}:{name}' needs {package}: {install(package)}. ({e})") from e
    except RuntimeError as e:
        raise ValueError(
            f"model '{source}:{name}': importing {package} failed ({e}). Its build of torchvision does not fit torch {torch.__version__}: "
            "install the one made for it."
        ) from e


def _from_file(path: Path, factory: str) -> tuple[nn.Module, Any]:
    """What a function in a file returns: a model, and a batch, a function that makes one, or None."""
    make = _function(path, factory)
    made = make()
    model, batch = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        found = type(made).__name__
        raise ValueError(f"model '{path}:{factory}': the function returned {found}, not a torch.nn.Module, or (model, batch).")
    return model, batch


def _function(path: Path, name: str) -> Callable[[], Any]:
    if not path.is_file():
        raise FileNotFoundError(f"model '{path}:{name}': there is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make = getattr(module, name, None)
    if not callable(make):
        has = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_") and getattr(v, "__module__", "") == path.stem]
        raise ValueError(f"model '{path}:{name}': the file has no function {name}. It has: {', '.join(has) or 'none'}.")
    return make


SOURCES = {"timm": _from_timm, "torchvision": _from_torchvision}
IMAGE_FORMS = (*SMALL, *NAMES, *(f"{s}:NAME" for s in SOURCES), "path/to/file.py:factory")
FORMS = (*IMAGE_FORMS, "hf:NAME or config")


# Models with batches


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
USUAL = 64, 8, 1024  # images, texts, and tokens of a text, where nothing was asked for
CLASSES = 1000
PATCH = 8  # pixels; a smaller first convolution makes no patches
STEP = 32  # pixels; what models without patches shrink an image by


@dataclass(frozen=True)
class Wanted:
    """What was asked for. None: as the model has it, or as is usual."""

    spec: str
    samples: int | None = None
    size: int | None = None  # pixels a side
    seq: int | None = None  # tokens
    dtype: str | None = None
    light: bool = True  # without memory
    usual: tuple[int, int, int] = USUAL

    def __post_init__(self) -> None:
        if self.size is not None and self.seq is not None:
            raise ValueError(f"--size {self.size} and --seq {self.seq}: images have a size, texts a length. Give one of them.")
        for name, value in (("--batch", self.samples), ("--size", self.size), ("--seq", self.seq)):
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} must be at least 1.")
        if self.dtype not in (None, *DTYPES):
            raise ValueError(f"--dtype {self.dtype} is none of {', '.join(DTYPES)}.")

    def sized(self, what: str, n: int) -> Wanted:
        return dataclasses.replace(self, size=n) if what == "size" else dataclasses.replace(self, seq=n)

    def only(self, kind: str) -> None:
        """Images have no length, texts no size."""
        if kind == "images" and self.seq is not None:
            raise ValueError(f"model {self.spec!r} takes images, which have no --seq; give --size, in pixels.")
        if kind == "texts" and self.size is not None:
            raise ValueError(f"model {self.spec!r} takes texts, which have no --size; give --seq, in tokens.")


@dataclass
class Subject:
    """A model and batches for it."""

    wanted: Wanted
    model: nn.Module
    tries: Sequence[Callable[[int], Any]]  # batches of so many samples; the first that the model takes is used
    samples: int
    inputs: str = ""  # in words
    step: int = STEP  # sizes or lengths of inputs are multiples of it
    notes: tuple[str, ...] = ()

    @property
    def make(self) -> Callable[[int], Any]:
        return self.tries[0]

    def batch(self) -> Any:
        return self.make(self.samples)

    def __str__(self) -> str:
        kind = next((name for name, d in DTYPES.items() if d is _dtype_of(self.model)), str(_dtype_of(self.model)))
        return ", ".join(part for part in (self.wanted.spec, self.inputs, f"weights in {kind}") if part)


def load_subject(wanted: Wanted) -> Subject:
    """The model that was asked for, in training, with batches that it was seen to take."""
    try:
        return _tried(_made(wanted))
    except ValueError as e:
        if not (wanted.light and isinstance(e.__cause__, UNKNOWN)):
            raise
    return _tried(_made(dataclasses.replace(wanted, light=False)))  # it wants the values of its buffers


def _made(wanted: Wanted) -> Subject:
    if wanted.spec in SMALL:
        return _named(wanted, 1, 8, 10, 2)
    if wanted.spec in NAMES:
        return _named(wanted, *NETS_32, 4)
    source, name = _parts(wanted.spec, FORMS)
    if source == "hf":
        return _hf(wanted, name)
    if source.endswith(".py"):
        return _own(wanted, Path(source), name)
    return _named(wanted, 3, 224 if source == "torchvision" else _timm_size(name), CLASSES, None)


def _tried(subject: Subject) -> Subject:
    """One forward on tensors without contents. What fails here is the model's, or that it does not take such a batch."""
    model, spec = subject.model.train(), subject.wanted.spec
    for i, make in enumerate(subject.tries):
        last = i == len(subject.tries) - 1
        batch = make(subject.samples)
        try:
            check_batch(model, batch, f"model {spec!r}")
            with untouched(model), weightless(model) as mode:
                loss_of(model, faked(mode, batch))
        except (KeyboardInterrupt, MemoryError):
            raise
        except Exception as e:
            if isinstance(e.__cause__, UNKNOWN):
                raise
            if not last:
                continue
            hint = "Give another --size or --seq, or a file.py:factory that returns (model, batch)."
            raise ValueError(f"model {spec!r}: a training step on {_told(batch)} fails: {line_of(e)} {hint}") from e
        subject.tries = [make]
        break
    return subject


def line_of(e: BaseException) -> str:
    """What an error says, in a line."""
    text = next((line.strip() for line in str(e).splitlines() if line.strip()), "")
    return f"{type(e).__name__}: {text}".rstrip(".: ") + "."


def _told(batch: Any) -> str:
    shapes: list[str] = []
    tree_map_only(
        Tensor, lambda t: shapes.append("x".join(map(str, t.shape)) or "a number"), dict(batch) if hasattr(batch, "keys") else batch
    )
    return ", ".join(shapes) or "the function's batch"


def _dtype_of(model: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def _built(wanted: Wanted, build: Callable[[], Any]) -> Any:
    """What `build` makes, without memory if it can be; what it raises is the model's."""
    try:
        if wanted.light:
            with contextlib.suppress(NotImplementedError, RuntimeError), torch.device("meta"):
                return build()
        return build()
    except (ValueError, OSError):
        raise
    except Exception as e:
        raise ValueError(f"model {wanted.spec!r}: making it fails: {line_of(e)}") from e


def _cast(wanted: Wanted, model: nn.Module, default: str | None = "bf16") -> nn.Module:
    dtype = wanted.dtype or (default if wanted.light else "fp32")
    return model.to(DTYPES[dtype]) if dtype else model


# Images


def _named(wanted: Wanted, channels: int, usual: int, classes: int, patch: int | None) -> Subject:
    wanted.only("images")
    size = wanted.size or usual
    small = SMALL.get(wanted.spec)
    build = (lambda: small_vit(size, pool=small)) if small else (lambda: load_model(wanted.spec, (channels, size, size), classes))
    model = _cast(wanted, _built(wanted, build))
    samples = wanted.samples or wanted.usual[0]
    return Subject(wanted, model, _image_batches(wanted, model, channels, size, classes), samples, f"{size} pixels", patch or _step(model))


def _timm_size(name: str) -> int:
    timm = _import("timm", name)
    found = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    return found.input_size[-1] if found is not None and found.input_size else 224


def _step(model: nn.Module) -> int:
    """The side of a patch, which the first convolution tells."""
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    patches = first is not None and first.kernel_size == first.stride and first.stride[0] >= PATCH
    return first.stride[0] if patches and first is not None else STEP


def _pictures(wanted: Wanted, model: nn.Module, n: int, channels: int, size: int) -> Tensor:
    shape = n, channels, size, size
    if wanted.light:
        return torch.empty(shape, dtype=_dtype_of(model), device="meta")
    return torch.randn(shape, generator=torch.Generator().manual_seed(n), device="cpu")


def _classes(n: int, classes: int) -> Tensor:
    return torch.arange(n) % max(1, classes)


def _image_batches(wanted: Wanted, model: nn.Module, channels: int, size: int, classes: int) -> list[Callable[[int], Any]]:
    """With labels, for models that return a score for each class; or images alone."""

    def alone(n: int) -> Tensor:
        return _pictures(wanted, model, n, channels, size)

    return [lambda n: (alone(n), _classes(n, classes)), alone]


# transformers


HEADS = {  # what a model is for, in the order in which it is asked: the name of its loss
    "CausalLM": "ForCausalLM",
    "Seq2SeqLM": "ForCausalLM",
    "SequenceClassification": "ForSequenceClassification",
    "ImageClassification": "ForImageClassification",
    "MaskedLM": "ForMaskedLM",
}


def _hf(wanted: Wanted, name: str) -> Subject:
    transformers = _import("transformers", name)
    with _quiet(transformers):
        config = _config(transformers, name)
        head = _head(transformers, config)
        images = head == "ImageClassification" or (not head and not hasattr(config.get_text_config(), "vocab_size"))
        wanted.only("images" if images else "texts")
        feed = _hf_images if images else _hf_texts
        return feed(wanted, transformers, config, head)


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _config(transformers: Any, name: str) -> Any:
    """A folder or file, else a type that transformers knows, else a name on the hub."""
    path, auto = Path(name), transformers.AutoConfig
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _config_of(auto, path)
    if name.endswith(".json") or path.is_absolute():
        raise FileNotFoundError(f"model 'hf:{name}': there is no file {path}.")
    if name in transformers.CONFIG_MAPPING:
        return auto.for_model(name)
    return _from_hub(auto, name)


def _config_of(auto: Any, path: Path) -> Any:
    try:
        found = json.loads(path.read_text())
        return auto.for_model(found.pop("model_type"), **found)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ValueError(f"model 'hf:{path}' is no configuration of transformers: {line_of(e)} It needs a model_type.") from e


def _from_hub(auto: Any, name: str) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return auto.from_pretrained(name, local_files_only=True)
    what = "Give a model type (hf:gpt2, hf:bert, hf:llama, hf:vit), or a folder or file with a config.json."
    if not _online():
        raise ValueError(f"model 'hf:{name}' is no model type of transformers, not in its cache, and the hub cannot be reached. {what}")
    try:
        return auto.from_pretrained(name)
    except (OSError, ValueError) as e:
        raise ValueError(f"model 'hf:{name}': {str(e).strip().splitlines()[0]} {what}") from e


def _online() -> bool:
    """Can the hub be reached? Asked once and briefly: transformers would try for half a minute."""
    if os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE"):
        return False
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return True  # the proxy knows
    hub = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        socket.create_connection((hub.hostname or "", hub.port or 443), timeout=5).close()
    except OSError:
        return False
    return True


def _head(transformers: Any, config: Any) -> str:
    """As the configuration says, else the first that transformers has for it. An encoder is no causal language model."""
    there = [h for h in HEADS if type(config) in getattr(transformers, f"AutoModelFor{h}")._model_mapping]
    says = [h for a in getattr(config, "architectures", None) or () for h in there if str(a).endswith(f"For{h}")]
    encoder = "MaskedLM" in there and getattr(config, "is_decoder", None) is False
    both = bool(getattr(config, "is_encoder_decoder", False))
    fit = [h for h in there if not (h == "CausalLM" and (encoder or both)) and (h == "Seq2SeqLM") <= both]
    return next(iter([*says, *fit]), "")


def _hf_model(wanted: Wanted, transformers: Any, config: Any, head: str) -> nn.Module:
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if head == "SequenceClassification":
        config.problem_type = "single_label_classification"
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    auto = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")
    model: Any = _cast(wanted, _built(wanted, lambda: auto.from_config(config)))
    if head:
        model.loss_type = HEADS[head]  # it is read off the name of the class, which GPT2LMHeadModel does not have
    return model


def _hf_images(wanted: Wanted, transformers: Any, config: Any, head: str) -> Subject:
    holder = getattr(config, "vision_config", config)
    own = getattr(holder, "image_size", None) or 224
    size = wanted.size or (own if isinstance(own, int) else own[-1])
    if hasattr(holder, "image_size"):
        holder.image_size = size
    model = _hf_model(wanted, transformers, config, head)
    channels, labels = getattr(holder, "num_channels", 3), getattr(config, "num_labels", 2)

    def batch(n: int) -> dict[str, Tensor]:
        pictures = {"pixel_values": _pictures(wanted, model, n, channels, size)}
        return {**pictures, "labels": _classes(n, labels)} if head else pictures

    return Subject(wanted, model, [batch], wanted.samples or wanted.usual[0], f"{size} pixels", _step(model))


def _hf_texts(wanted: Wanted, transformers: Any, config: Any, head: str) -> Subject:
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None)
    seq = wanted.seq or min(wanted.usual[2], most or wanted.usual[2])
    notes: tuple[str, ...] = ()
    if most and seq > most:
        text.max_position_embeddings = seq
        notes = (f"Positions: {most} in the configuration, raised to {seq}.",)
    model = _hf_model(wanted, transformers, config, head)
    words = getattr(text, "vocab_size", 2)

    def batch(n: int) -> dict[str, Tensor]:
        ids = _ids(n, seq, words)
        labels = {"labels": _classes(n, config.num_labels) if head == "SequenceClassification" else ids} if head else {}
        return {"input_ids": ids, **labels}

    return Subject(wanted, model, [batch], wanted.samples or wanted.usual[1], f"{seq} tokens", 64, notes)


def _ids(n: int, seq: int, words: int) -> Tensor:
    return torch.randint(min(1, words - 1), max(2, words), (n, seq), generator=torch.Generator().manual_seed(n), device="cpu")


# A user's own


def _own(wanted: Wanted, path: Path, factory: str) -> Subject:
    model, given = _called(wanted, lambda: _from_file(path, factory))
    if callable(given) and not isinstance(given, (Tensor, nn.Module)) and not _takes_a_number(given):
        if wanted.light:  # a function holds on to what it was made with, so that has to be real
            model, given = _called(dataclasses.replace(wanted, light=False), lambda: _from_file(path, factory))
        if wanted.samples is not None:
            raise ValueError(f"model {wanted.spec!r} comes with a function of no arguments as batch, which has no --batch.")
        return Subject(wanted, _cast(wanted, model, None) if wanted.light else model, [lambda n: given], 1)
    model = _cast(wanted, model)
    if given is None:
        return _alone(wanted, model)
    for name, value in (("--size", wanted.size), ("--seq", wanted.seq)):
        if value is not None:
            raise ValueError(f"model {wanted.spec!r} comes with its own batch, so {name} {value} has no meaning. Leave it out.")

    def batch(n: int) -> Any:
        made = _called(wanted, lambda: given(n)) if callable(given) and not isinstance(given, Tensor) else resized(given, n)
        dtype = _dtype_of(model)
        return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, dict(made) if hasattr(made, "keys") else made)

    own = None if callable(given) and not isinstance(given, Tensor) else size_of(given)
    return Subject(wanted, model, [batch], wanted.samples or own or wanted.usual[1], "its own batch")


def _called(wanted: Wanted, function: Callable[[], Any]) -> Any:
    """A user's function; all that it raises is told with its name."""
    try:
        return _built(wanted, function)
    except (FileNotFoundError, ValueError) as e:
        ours = str(e).startswith("model ")
        raise e if ours else ValueError(f"model {wanted.spec!r}: making it fails: {line_of(e)}") from e
    except OSError as e:
        raise ValueError(f"model {wanted.spec!r}: making it fails: {line_of(e)}") from e


def _takes_a_number(function: Callable[..., Any]) -> bool:
    needed = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(needed) == 1


def _alone(wanted: Wanted, model: nn.Module) -> Subject:
    """A model without a batch takes images, or with --seq token ids."""
    if wanted.seq is None:
        size = wanted.size or 224
        tries = _image_batches(wanted, model, 3, size, 2)
        return Subject(wanted, model, tries, wanted.samples or wanted.usual[0], f"{size} pixels", _step(model))
    seq = wanted.seq
    words = next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), 2)

    def named(n: int) -> dict[str, Tensor]:
        ids = _ids(n, seq, words)
        return {"input_ids": ids, "labels": ids}

    def following(n: int) -> tuple[Tensor, Tensor]:
        ids = _ids(n, seq, words)
        return ids, ids

    tries = [named, following, lambda n: (_ids(n, seq, words), _classes(n, 2)), lambda n: _ids(n, seq, words)]
    return Subject(wanted, model, tries, wanted.samples or wanted.usual[1], f"{seq} tokens", 64)
