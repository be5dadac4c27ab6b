"""How many bytes are alive for the backward pass, and who holds them. It measures any model and knows nothing of our methods.

*Held*: bytes alive when the forward ends, each storage once, parameters and buffers excluded.
*Peak*: the most bytes alive at once during forward and backward, of all that operations made, whoever holds it: above weights,
gradients, optimizer state and the batch.

    before = hb.profile(model, batch)
    hb.apply_(model, hb.Lean())
    after = hb.profile(model, batch)
    print(before.compare(after))
"""

from __future__ import annotations

import bisect
import contextlib
import json
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as hooking
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .batches import Batch, check_batch, loss_of, size_of
from .report import readable, rows
from .untouched import untouched
from .weightless import UNKNOWN, backward, faked, weightless

PAGE = 512  # bytes; the CUDA allocator gives whole ones
Self = TypeVar("Self", bound="Held")
OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD, "none": None}


def _parts(t: Tensor) -> tuple[Tensor, ...]:
    """The dense tensors that a tensor is made of."""
    if t.is_nested:
        return (t.values(), t.offsets()) if t.layout is torch.jagged else tuple(t.unbind())  # type: ignore[attr-defined]
    if t.layout is torch.strided:
        return (t,)
    if t.layout is torch.sparse_coo:
        return t._indices(), t._values()
    along_rows = t.layout in (torch.sparse_csr, torch.sparse_bsr)
    return (t.crow_indices(), t.col_indices(), t.values()) if along_rows else (t.ccol_indices(), t.row_indices(), t.values())


# What autograd saves


class Held:
    """Counts, within `with`, what autograd saves; `bytes()` is what of it is alive at the moment.

    The pack hook keeps `t.detach()`, a new tensor on the same storage: keeping an output itself would close a cycle through its
    grad_fn, and nothing would ever be freed.
    """

    def __init__(self, *ignore: nn.Module):
        self.refs: dict[int, tuple[StorageWeakRef, int]] = {}
        self.ignored = {t.untyped_storage()._cdata for m in ignore for t in [*m.parameters(), *m.buffers()] for t in _parts(t)}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)

    def _pack(self, t: torch.Tensor) -> torch.Tensor:
        t = t.detach()
        for part in _parts(t):
            storage = part.untyped_storage()
            if storage._cdata not in self.ignored:
                self.refs[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.saw(part, storage)
        return t

    _pack.gives_storage_back = True  # type: ignore[attr-defined]  # and not only the view: see ledger.Exact

    def saw(self, t: Tensor, storage: torch.UntypedStorage) -> None:
        """A tensor was saved; for those who want to know more than bytes."""

    def alive(self) -> list[tuple[int, int]]:
        return [(key, size) for key, (ref, size) in self.refs.items() if not ref.expired()]

    def bytes(self) -> int:
        return sum(size for _, size in self.alive())

    def __enter__(self: Self) -> Self:
        self.hooks.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.hooks.__exit__(*exc)


def held(model: nn.Module, forward: Callable[[], Any]) -> int:
    """Bytes held for backward after `forward()`, which runs the model and returns its loss."""
    with Held(model) as count:
        loss = forward()
        total = count.bytes()
    del loss
    return total


# Where in a model something happens


@dataclass(frozen=True)
class Where:
    module: str = ""
    operation: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.operation, self.module or "the model itself") if part)


class Place(TorchFunctionMode):
    """Within `with`, which module and which torch function are running; between functions, the last one that had a gradient. In the
    backward the module is that of the forward which made the node, known by its sequence number."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.names = {m: name for name, m in model.named_modules()}
        self.stack: list[str] = []
        self.function = ""
        self.bounds: list[int] = [0]  # sequence numbers from which on nodes are made in ...
        self.owners: list[str] = [""]  # ... these modules

    def __torch_function__(self, func, types, args=(), kwargs=None):
        before, name = self.function, getattr(func, "__name__", "")
        if name.startswith("__"):  # attributes
            return func(*args, **(kwargs or {}))
        self.function = name
        out = None
        try:
            out = func(*args, **(kwargs or {}))
            return out
        finally:
            self.function = name if isinstance(out, Tensor) and out.requires_grad else before

    def _turn(self, module: str) -> None:
        self.bounds.append(torch.autograd._get_sequence_nr())
        self.owners.append(module)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.stack.append(self.names.get(module, self.module))
        if not self.backward:
            self._turn(self.stack[-1])

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self.stack:
            self.stack.pop()
        if not self.backward:
            self._turn(self.module)

    @property
    def backward(self) -> bool:
        return torch._C._current_graph_task_id() != -1

    @property
    def module(self) -> str:
        if self.stack:
            return self.stack[-1]
        node = torch._C._current_autograd_node() if self.backward else None
        if node is None:
            return ""
        return self.owners[bisect.bisect_right(self.bounds, node._sequence_nr()) - 1]

    def __enter__(self) -> Place:
        self._handles = [
            hooking.register_module_forward_pre_hook(self._enter),
            hooking.register_module_forward_hook(self._leave, always_call=True),
        ]
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*exc)


# What is alive


class Peak(TorchDispatchMode):
    """Within `with`, how many bytes of storages that operations made are alive: `alive` now, `most` at once; `known` tensors are left
    out. A storage counts from the operation that made it until it is freed."""

    def __init__(self, *known: Tensor, place: Place | None = None, page: int = 1):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in known for t in _parts(t)}
        self.made: dict[int, tuple[Any, int, Where]] = {}  # by storage: a reference, bytes, by whom
        self.place, self.page = place, page
        self.alive = self.most = 0
        self.most_at = Where()
        self.most_in = "forward"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and not t.is_meta:
                for part in _parts(t):
                    self._count(part.untyped_storage(), func)
        if self.alive > self.most:
            self.most = self.alive
            self.most_at = self._where(func)
            self.most_in = "backward" if self.place is not None and self.place.backward else "forward"
        self.did(func, args, kwargs or {}, out)
        return out

    def did(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An operation ran; for those who want to know more than bytes."""

    def _where(self, func: Any) -> Where:
        return Where(self.place.module if self.place else "", func._schema.name.partition("::")[2])

    def _count(self, storage: torch.UntypedStorage, func: Any) -> None:
        key = storage._cdata
        if key in self.known or key in self.made:
            return
        # A view is of what was there before, as a batch that a function closes over; it counts nothing, until it is freed too.
        size, where = (0, Where("", "the batch")) if func.is_view else (-(-storage.nbytes() // self.page) * self.page, self._where(func))
        self.made[key] = (weakref.ref(storage, lambda _: self._freed(key)), size, where)
        self.alive += size

    def _freed(self, key: int) -> None:
        gone = self.made.pop(key, None)
        if gone is not None:
            self.alive -= gone[1]


# The profile


@dataclass
class Storage:
    """One storage that is held for backward."""

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    made_by: Where
    saved_by: list[Where]

    @property
    def holder(self) -> Where:
        return self.saved_by[0] if self.saved_by else self.made_by

    @property
    def what(self) -> str:
        """Shape and dtype of what was saved, which may be a part of the storage that it keeps alive."""
        part = math.prod(self.shape) * getattr(torch, self.dtype).itemsize < self.bytes
        return ("a part, " if part else "") + f"{'x'.join(map(str, self.shape)) or 'one number'} {self.dtype}"

    def __str__(self) -> str:
        shared = f", and {len(self.saved_by) - 1} more" if len(self.saved_by) > 1 else ""
        return f"{readable(self.bytes)}  {self.what}, saved by {self.holder}{shared}"


@dataclass
class Profile:
    """Who holds how much for backward, and all else that a training step needs. Sizes are in bytes."""

    model: str
    device: str
    counted: str  # "fake": on tensors without contents; "real"
    batch: int | None
    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    optimizer_name: str
    optimizer_peak: int  # what the optimizer's step has alive for a moment
    inputs: int
    held: int
    peak: int
    peak_in: str  # "forward" or "backward"
    peak_at: Where
    unseen: int  # alive when the forward ends, and not saved through autograd: outputs, and what custom Functions put aside
    measured_peak: int | None = None  # CUDA's own figure, of a step that nobody watched
    storages: list[Storage] = field(default_factory=list)

    @property
    def fixed(self) -> int:
        """What is there whatever the method."""
        return self.parameters + self.buffers + self.gradients + self.optimizer + self.inputs

    @property
    def total(self) -> int:
        """The most allocated in a step, with weights, gradients, optimizer and batch."""
        return self.fixed + max(self.peak, self.optimizer_peak)

    def by_module(self, depth: int | None = None) -> dict[str, int]:
        """Bytes held, by the module that saved them first; names are cut after `depth` parts."""
        found: dict[str, int] = {}
        for s in self.storages:
            name = ".".join(s.holder.module.split(".")[:depth])
            found[name] = found.get(name, 0) + s.bytes
        return found

    def table(self, depth: int | None = None) -> str:
        """A line for each module that holds something, the largest first."""
        cells = [["module", "held", "share", "storages", "the largest"]]
        for name, size in sorted(self.by_module(depth).items(), key=lambda pair: -pair[1]):
            own = [s for s in self.storages if ".".join(s.holder.module.split(".")[:depth]) == name]
            largest = max(own, key=lambda s: s.bytes)
            what = f"{largest.what} for {largest.holder.operation or 'a custom Function'}"
            cells.append([name or "(the model itself)", readable(size), f"{size / max(1, self.held):.1%}", str(len(own)), what])
        cells.append(["all", readable(self.held), "100.0%" if self.held else "", str(len(self.storages)), ""])
        return rows(cells, texts=1)

    def __str__(self) -> str:
        size = f", batch {self.batch}" if self.batch else ""
        how = "counted on tensors without contents" if self.counted == "fake" else "counted while it ran"
        lines = [f"{self.model} on {self.device}{size}, {how}"]
        lines.append(f"  held for backward   {readable(self.held):>12}   in {len(self.storages)} storages")
        lines.append(f"  peak of a step      {readable(self.peak):>12}   in the {self.peak_in}, at {self.peak_at}")
        if self.measured_peak is not None:
            off = self.peak / max(1, self.measured_peak) - 1
            lines.append(f"    as CUDA counts it {readable(self.measured_peak):>12}   the count is off by {off:+.1%}")
        lines.append(f"  parameters          {readable(self.parameters + self.buffers):>12}")
        lines.append(f"  gradients           {readable(self.gradients):>12}")
        moment = f", and {readable(self.optimizer_peak)} for a moment" if self.optimizer_peak else ""
        lines.append(f"  optimizer           {readable(self.optimizer):>12}   {self.optimizer_name}{moment}")
        lines.append(f"  batch               {readable(self.inputs):>12}")
        lines.append(
            f"  all                 {readable(self.total):>12}   allocated; CUDA itself and unused parts of its blocks come on top"
        )
        if self.unseen > self.held // 100:
            lines.append(f"  {readable(self.unseen)} more is alive when the forward ends and not saved through autograd: outputs, or what")
            lines.append("  custom autograd.Functions put aside")
        return "\n".join(lines)

    __repr__ = __str__  # what notebooks show

    def to_json(self) -> dict[str, Any]:
        out = asdict(self)
        out["peak_at"] = {"phase": out.pop("peak_in"), **out["peak_at"]}
        return {**out, "total": self.total}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Profile:
        data = {k: v for k, v in data.items() if k not in ("total", "name")}
        where = dict(data.pop("peak_at"))
        phase = where.pop("phase")
        storages = [
            Storage(s["bytes"], tuple(s["shape"]), s["dtype"], Where(**s["made_by"]), [Where(**w) for w in s["saved_by"]])
            for s in data.pop("storages")
        ]
        return cls(**data, peak_in=phase, peak_at=Where(**where), storages=storages)

    def compare(self, after: Profile) -> Comparison:
        """What changed from this profile to another of the same model, and who holds what did not fall."""
        return Comparison(self, after)

    def save(self, path: Any) -> None:
        """As JSON, which `from_json` reads."""
        with open(path, "w") as f:
            json.dump(self.to_json(), f)


@dataclass
class Comparison:
    """Two profiles of one model, before and after something was done to it."""

    before: Profile
    after: Profile

    @property
    def held(self) -> float:
        """The share of bytes that is still held."""
        return self.after.held / max(1, self.before.held)

    def modules(self, depth: int | None = None) -> list[tuple[str, int, int]]:
        """Module, bytes held before, bytes held after, in the model's order."""
        a, b = self.before.by_module(depth), self.after.by_module(depth)
        return [(name, a.get(name, 0), b.get(name, 0)) for name in dict.fromkeys([*a, *b])]

    def _kinds(self) -> list[tuple[str, int, int, Storage | None]]:
        """Bytes by what a function saves, over all modules: before, after, and the largest that is still there."""
        found: dict[str, list[Any]] = {}
        for i, profile in enumerate((self.before, self.after)):
            for s in profile.storages:
                entry = found.setdefault(s.holder.operation or "custom Functions", [0, 0, None])
                entry[i] += s.bytes
                if i and (entry[2] is None or s.bytes > entry[2].bytes):
                    entry[2] = s
        return sorted(((k, *v) for k, v in found.items()), key=lambda row: -max(row[1], row[2]))

    def table(self, depth: int | None = None) -> str:
        cells = [["module", "before", "after", "left"]]
        for name, before, after in sorted(self.modules(depth), key=lambda row: -max(row[1:])):
            cells.append([name or "(the model itself)", readable(before), readable(after), f"{after / before:.2f}" if before else "new"])
        return rows([*cells, ["all", readable(self.before.held), readable(self.after.held), f"{self.held:.2f}"]])

    def __str__(self) -> str:
        lines = []
        for name, a, b in (("held", self.before.held, self.after.held), ("peak", self.before.peak, self.after.peak)):
            lines.append(f"{name}: {readable(a)} -> {readable(b)} ({b / max(1, a):.2f})")
        fell = (self.before.held - self.after.held) - (self.before.peak - self.after.peak)
        if fell > self.before.peak // 50:
            lines.append(
                f"The peak fell by {readable(fell)} less than what is held: it is in the {self.after.peak_in}, at {self.after.peak_at}."
            )
        cells = [["saved by", "before", "after", "left", "what is still held"]]
        for kind, before, after, largest in self._kinds():
            if max(before, after) * 200 < max(1, self.before.held):
                continue
            left = f"{after / before:.2f}" if before else "new"
            cells.append([kind, readable(before), readable(after), left, self._why(before, after, largest)])
        return "\n".join([*lines, "", rows(cells, texts=1)])

    __repr__ = __str__  # what notebooks show

    def _why(self, before: int, after: int, largest: Storage | None) -> str:
        if largest is None:
            return "nothing"
        others = [str(w) for w in largest.saved_by[1:]]
        text = f"{largest.what} in {largest.holder.module or 'the model itself'}"
        if others:
            return f"{text}, also for {others[0]}" + (f" and {len(others) - 1} more" if len(others) > 1 else "")
        return text if after < before else f"{text}, for itself alone" if before else f"{text}, made by {largest.made_by}"


class Savers(Held):
    """What autograd saves, with who saved it and what it is."""

    def __init__(self, model: nn.Module, place: Place):
        super().__init__(model)
        self.place = place
        self.found: dict[int, tuple[StorageWeakRef, tuple[int, ...], str, list[Where]]] = {}

    def saw(self, t: Tensor, storage: torch.UntypedStorage) -> None:
        known = self.found.get(storage._cdata)
        if known is None or known[0].expired():
            known = (StorageWeakRef(storage), tuple(t.shape), str(t.dtype).removeprefix("torch."), [])
            self.found[storage._cdata] = known
        where = Where(self.place.module, self.place.function)
        if where not in known[3]:
            known[3].append(where)


def profile(
    model: nn.Module,
    batch: Batch,
    *,
    real: bool = False,
    device: str | None = None,
    optimizer: Any = "adamw",
) -> Profile:
    """Who holds how many bytes for the backward pass of one training step, per module and per storage; the model is left as it was.

    batch       a tensor, (inputs, targets), a dict of arguments, or a function that runs the model and returns the loss
    real        False: on tensors without contents, so that nothing is computed and no memory is needed. True: run the step, on the
                device that the model is on; on CUDA the allocator's own peak is measured too
    device      "cuda": count what a GPU would hold, for a model that is on the CPU
    optimizer   "adamw", "adam", "sgd", "none", or your own: its state is counted, and what its step has alive for a moment
    """
    check_batch(model, batch, "profile")
    on_gpu = _on_gpu(model, device, real)
    tensors = [] if callable(batch) else [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
    with untouched(model, *tensors):
        if real:
            out = _watched(model, batch, _state_of(model, optimizer, None), _device_of(model), False)
            if out.device == "cuda":
                out.measured_peak = _measured(model, batch)
            return out
        with weightless(model, on_gpu) as mode:
            kind = "cuda" if on_gpu else _device_of(model)
            where = next((p.device for p in model.parameters()), torch.device("cpu"))
            return _watched(model, faked(mode, batch, where), _state_of(model, optimizer, mode), kind, True)


def _device_of(model: nn.Module) -> str:
    first = next(iter([*model.parameters(), *model.buffers()]), None)
    return "cpu" if first is None or first.is_meta else first.device.type


def _on_gpu(model: nn.Module, device: str | None, real: bool) -> bool:
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"profile(): device={device!r} is none of cpu, cuda.")
    own = _device_of(model)
    if real and any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise ValueError("profile(): the model is on the meta device, without contents, so real=True cannot run it. Leave real=False.")
    if real and device not in (None, own):
        raise ValueError(f"profile(): the model is on {own}, so real=True runs there. Move it to {device} first, or leave real=False.")
    return device == "cuda" and own == "cpu"


def _watched(model: nn.Module, batch: Any, state: tuple[str, int, int], device: str, fake: bool) -> Profile:
    """One step, and what was seen of it."""
    inputs = [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
    with gradients_there(model):
        known = known_tensors(model, inputs)
        place = Place(model)
        with place, Peak(*known, place=place, page=PAGE if device == "cuda" else 1) as peak:
            with Savers(model, place) as savers:
                savers.ignored |= {t.untyped_storage()._cdata for t in known_tensors(model, [])}
                loss = loss_of(model, batch)
            storages = [_storage(savers, peak, key, size) for key, size in savers.alive()]
            saved = {key for key, _ in savers.alive()}
            unseen = sum(size for key, (_, size, _) in peak.made.items() if key not in saved)
            _check_loss(model, loss)
            backward(loss)
            del loss
    sizes = _sizes(model, inputs)
    return Profile(
        type(model).__name__,
        device,
        "fake" if fake else "real",
        size_of(batch),
        *sizes[:3],
        optimizer=state[1],
        optimizer_name=state[0],
        optimizer_peak=state[2],
        inputs=sizes[3],
        held=sum(s.bytes for s in storages),
        peak=peak.most,
        peak_in=peak.most_in,
        peak_at=peak.most_at,
        unseen=unseen,
        storages=storages,
    )


def _check_loss(model: nn.Module, loss: Tensor) -> None:
    if not loss.requires_grad:
        raise ValueError(f"the loss of {type(model).__name__} requires no gradient: are all parameters frozen, or is it under no_grad?")


def _storage(savers: Savers, peak: Peak, key: int, size: int) -> Storage:
    _, shape, dtype, saved_by = savers.found[key]
    made_by = peak.made[key][2] if key in peak.made else Where("", "the batch")
    return Storage(size, shape, dtype, made_by, saved_by)


@contextlib.contextmanager
def gradients_there(model: nn.Module) -> Iterator[None]:
    """Gradients are allocated before, as they are from the second step of a training on; so the peak is above them."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    try:
        yield
    finally:
        for p in model.parameters():
            p.grad = None


def known_tensors(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """What is there before a step, and so no part of its peak. On fake tensors a parameter has a twin, which is known too."""
    own = [*model.parameters(), *model.buffers()]
    known = [*own, *inputs, *(p.grad for p in model.parameters() if p.grad is not None)]
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    if mode is not None:
        known += [mode.from_tensor(t) for t in own if not isinstance(t, FakeTensor)]
    return known


def _sizes(model: nn.Module, inputs: list[Tensor]) -> tuple[int, int, int, int]:
    def unique(tensors: Sequence[Tensor]) -> int:
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())

    parameters = list(model.parameters())
    gradients = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    return unique(parameters), unique(list(model.buffers())), gradients, unique(inputs)


def _measured(model: nn.Module, batch: Any) -> int:
    """What CUDA's allocator had at most during a step, above what it had before."""
    with gradients_there(model):
        for _ in range(2):  # the first one makes room for the libraries' own workspaces
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            loss_of(model, batch).backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


# The optimizer


def _state_of(model: nn.Module, optimizer: Any, mode: Any) -> tuple[str, int, int]:
    """Name, bytes of state, and bytes that a step has alive for a moment. Two steps are taken on fake parameters; your own optimizer's
    class, groups and settings are used, and itself left alone."""
    groups, make = _groups(model, optimizer)
    if make is None or not any(group["params"] for group in groups):
        return "no optimizer", 0, 0
    try:
        with mode or FakeTensorMode(allow_non_fake_inputs=True):
            return (make.__name__, *_two_steps(make, groups))
    except (*UNKNOWN, TypeError) as e:
        state = getattr(optimizer, "state", {})
        if not state:
            raise ValueError(
                f"profile(): a step of {make.__name__} cannot be counted without contents ({str(e)[:80]}). Take a step with it first, so "
                f"that its state is there, or give one of {', '.join(OPTIMIZERS)}."
            ) from e
        tensors = [t for s in state.values() for t in tree_leaves(s) if isinstance(t, Tensor)]
        return make.__name__, sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values()), 0


def _groups(model: nn.Module, optimizer: Any) -> tuple[list[dict[str, Any]], Any]:
    """An optimizer's groups of parameters with their settings, and its class."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer.param_groups, type(optimizer)
    if not isinstance(optimizer, str):
        raise TypeError(f"profile(): optimizer is {type(optimizer).__name__}; give a name ({', '.join(OPTIMIZERS)}) or a torch optimizer.")
    if optimizer.lower() not in OPTIMIZERS:
        raise ValueError(f"profile(): optimizer={optimizer!r} is none of {', '.join(OPTIMIZERS)}; or pass your own.")
    momentum = {"momentum": 0.9} if optimizer.lower() == "sgd" else {}
    return [{"params": [p for p in model.parameters() if p.requires_grad], **momentum}], OPTIMIZERS[optimizer.lower()]


def _two_steps(make: Any, groups: list[dict[str, Any]]) -> tuple[int, int]:
    twins: list[Tensor] = []
    copies = []
    for group in groups:
        own = [torch.empty(p.shape, dtype=p.dtype, requires_grad=True) for p in group["params"] if p.requires_grad]
        fast = group.get("foreach") is None and not group.get("fused")  # torch's default on CUDA
        copies.append({k: v for k, v in group.items() if k != "params"} | {"params": own} | ({"foreach": True} if fast else {}))
        twins += own
    for t in twins:
        t.grad = torch.empty_like(t)
    stepping = make([group for group in copies if group["params"]])
    stepping.step()
    state = [t for s in stepping.state.values() for t in tree_leaves(s) if isinstance(t, Tensor)]
    with Peak(*twins, *state, *(t.grad for t in twins if t.grad is not None)) as peak:
        stepping.step()
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in state}.values()), peak.most
