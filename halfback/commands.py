"""What the commands profile, plan, fit and audit do. Each asks the library, says what it found, and writes JSON and a page if asked to.

Nothing is written before all is known, so what fails leaves no file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from . import memory, planner, rewrite, ways
from .blocks import find_blocks
from .compare import Settings, made_of, split_list
from .data import load_data
from .files import write_text
from .heads import find_heads
from .memory import Comparison, Profile
from .methods import SBP, DropIT, Method, parse
from .models import Subject, Wanted, load_model, load_subject
from .page import page
from .planner import CONTEXT, Planner, largest, parse_size, plan_with, total_of
from .report import readable, rows
from .timing import Clock
from .untouched import untouched
from .ways import Way
from .weightless import faked, weightless

LARGE_VOCABULARY = "recompute+chunkedloss"  # one more method for models that have one
METHODS = (
    "plain, accumulation, recompute, lean, dropit(keep=0.1, activation_bits=4), sbp(keep=0.5), sbp(keep=0.5)+lean, sbp(keep=0.5)+recompute"
)
LARGEST = ("batch", "size", "seq")
TOP = 15  # lines of a table
AUDITED = 8  # samples of a batch
SHORTEST = 64  # tokens
Say = Callable[[str], Any]


# Asked and told


def wanted_of(args: argparse.Namespace, **others: Any) -> Wanted:
    given = {"samples": args.batch, "size": args.size, "seq": args.seq, "dtype": args.dtype, **others}
    return Wanted(args.model, **given)


@contextmanager
def telling(args: argparse.Namespace) -> Iterator[Say]:
    """With `--json -` standard output is JSON and nothing else."""
    for path in (args.json, args.html):
        if path is not None and str(path) != "-":
            check_writable(Path(path))
    yield (lambda text: None) if str(args.json) == "-" else print


def check_writable(path: Path) -> None:
    """Known before anything is counted."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file.")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}.")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise PermissionError(f"{path} cannot be written: permission denied.")


def write(args: argparse.Namespace, say: Say, data: Any, content: Callable[[], dict[str, Any]]) -> None:
    text = json.dumps(data, indent=1) + "\n" if args.json is not None else ""
    drawn = page(content()) if args.html is not None else ""
    written = []
    if str(args.json) == "-":
        print(text, end="")
    elif text:
        write_text(Path(args.json), text)
        written.append(str(args.json))
    if drawn:
        write_text(Path(args.html), drawn)
        written.append(str(args.html))
    if written:
        say(f"\nWritten: {', '.join(written)}")


def waiting(text: str) -> None:
    """Said on a terminal while something takes its time."""
    if sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr, flush=True)


def introduce(subject: Subject, say: Say) -> None:
    say("\n".join([str(subject), *subject.notes]))


def parsed(method: str | None) -> tuple[Method, ...]:
    return () if method in (None, "plain") else parse(method)


@contextmanager
def applied(model: nn.Module, methods: tuple[Method, ...]) -> Iterator[None]:
    if methods:
        rewrite.apply_(model, *methods)
    try:
        yield
    finally:
        rewrite.remove_(model)


# profile


def profile(args: argparse.Namespace) -> None:
    with telling(args) as say:
        methods = parsed(args.method)
        subject = load_subject(wanted_of(args))
        introduce(subject, say)
        waiting("halfback: counting one training step on tensors without contents")
        before, after = profiles(subject, methods, args)
        depth = args.depth or depth_of_blocks(subject.model)
        say(f"\n{before}\n\n{top(before.table(depth), args.all)}")
        if after is not None:
            say(f"\nWith {args.method}:\n\n{before.compare(after)}")
            if args.all:
                say(f"\n{Comparison(before, after).table(depth)}")
        data = {"before": before.to_json(), "after": None if after is None else after.to_json()}
        write(args, say, data, lambda: profile_page(subject, args, [("plain", before), (args.method, after)]))


def profiles(subject: Subject, methods: tuple[Method, ...], args: argparse.Namespace) -> tuple[Profile, Profile | None]:
    def count() -> Profile:
        return memory.profile(subject.model, subject.batch(), device=args.device, optimizer=args.optimizer)

    before = count()
    if not methods:
        return before, None
    with applied(subject.model, methods):
        return before, count()


def depth_of_blocks(model: nn.Module) -> int:
    return max((name.count(".") + 1 for name, _ in find_blocks(model)), default=2)


def top(table: str, everything: bool = False) -> str:
    """The first lines of a table, and its last."""
    head, between, last = table.splitlines()[:2], table.splitlines()[2:-1], table.splitlines()[-1]
    if everything or len(between) <= TOP:
        return table
    return "\n".join([*head, *between[:TOP], f"... and {len(between) - TOP} more: --all", last])


def profile_page(subject: Subject, args: argparse.Namespace, found: list[tuple[str, Profile | None]]) -> dict[str, Any]:
    shown = [{"name": name, **p.to_json()} for name, p in found if p is not None]
    return {**head_of(subject, args), "profiles": shown}


def head_of(subject: Subject, args: argparse.Namespace) -> dict[str, Any]:
    how = "counted as on a GPU, on tensors without contents" if args.device == "cuda" else "counted as on a CPU"
    return {"title": f"halfback {args.command} {args.model}", "subtitle": f"{subject}; {how}", "made": made_of("cpu")}


# plan


def plan(args: argparse.Namespace) -> None:
    with telling(args) as say:
        budget = budget_of(args.budget)
        most = args.batch == "max"
        if most and isinstance(budget, float):
            raise ValueError(f"--batch max needs a budget as 10GiB; {budget} of the plain peak grows with the batch.")
        subject = load_subject(wanted_of(args, samples=1 if most else number(args.batch, "--batch")))
        introduce(subject, say)
        waiting("halfback: counting the ways to run each block" + (", for several batches" if most else ""))
        curve = args.curve or args.html is not None or args.json is not None
        choices = most_samples(subject, budget, args) if most else planner_of(subject, args)
        found = plan_with(choices, budget, args.prefer, curve)
        say(f"\n{found}")
        if curve:
            say(f"\n{curve_table(found, choices)}")
        write(args, say, found.to_json(), lambda: plan_page(subject, args, found, choices))


def planner_of(subject: Subject, args: argparse.Namespace) -> Planner:
    return Planner(subject.model, subject.batch(), args.device, args.optimizer)


def most_samples(subject: Subject, budget: float | str, args: argparse.Namespace) -> Planner:
    """The planner of the largest batch that has a plan; the subject has that batch afterwards."""
    subject.samples = planner.most_samples(lambda n: planner_of(replace(subject, samples=n), args), budget)
    return planner_of(subject, args)


def budget_of(text: str) -> float | str:
    """A fraction of the plain peak, or a size."""
    try:
        share = float(text)
    except ValueError:
        parse_size(text, "--budget")
        return text
    if not 0 < share <= 1:
        raise ValueError(f"--budget {text} has no unit. Write a size as 10GiB, or a fraction of the plain peak up to 1, as 0.4.")
    return share


def number(text: str | int | None, name: str) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        raise ValueError(f"{name} {text} is no number of samples; write it as 64, or as max.") from None


def curve_table(found: planner.Plan, choices: Planner) -> str:
    cells = [["methods", "budget", "peak", "of plain", "time", "gradients"]]
    for p in distinct(found.curve):
        size, share = readable(total_with(choices, p["peak"])), f"{p['peak'] / max(1, choices.plain.peak):.2f}"
        cells.append([p["label"], size, readable(p["peak"]), share, f"{p['time']:.2f}", "exact" if p["exact"] else "approximate"])
    return f"Other budgets, and what they would give:\n\n{rows(cells)}"


def total_with(choices: Planner, peak: int) -> int:
    return total_of(choices.plain, choices.needs(peak))


def distinct(curve: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without choices that differ in nothing but which of equal blocks they take."""
    return list({(p["label"], readable(p["peak"]), round(p["time"], 2)): p for p in reversed(curve)}.values())[::-1]


def plan_page(subject: Subject, args: argparse.Namespace, found: planner.Plan, choices: Planner) -> dict[str, Any]:
    label = " + ".join(planner._short(m) for m in found.methods)
    planned = None
    if found.methods:
        with applied(subject.model, found.methods):
            planned = memory.profile(subject.model, subject.batch(), device=args.device, optimizer=args.optimizer)
    own = {"peak": found.peak, "time": found.time_ratio, "exact": found.exact, "label": label}
    own["methods"] = " + ".join(str(m) for m in found.methods)
    points = [p for p in distinct(found.curve) if p["methods"] not in ("exact", own["methods"])] + ([own] if found.methods else [])
    points = [{**p, "budget": total_with(choices, p["peak"])} for p in points]
    pareto = {"unit": "bytes", "plain_peak": choices.plain.peak, "chosen": len(points) - 1 if found.methods else None, "points": points}
    return {**profile_page(subject, args, [("plain", choices.plain), (label, planned)]), "pareto": pareto}


# fit


@dataclass
class Fitted:
    """The largest that one method fits."""

    method: str
    largest: int | None = None  # None: not even the smallest fits, or the method does not apply
    total: int | None = None  # bytes on the device at the largest; where nothing fits, at the smallest
    peak: int | None = None  # at plain's largest
    time: float | None = None  # relative to plain, at plain's largest
    exact: bool = True
    bounded: bool = False  # larger ones were not tried
    any: bool = False  # any batch, in parts of the largest
    why: str = ""


@dataclass
class Fitting:
    """Subjects of each batch, size or length, and what a training step of each needs; nothing is counted twice."""

    subject: Subject
    what: str
    device: str
    optimizer: str
    needs: Callable[[int], int]  # a peak with what no count sees of it
    tick: Callable[[str], Any] = lambda text: None
    made: dict[int, Subject] = field(default_factory=dict)
    fixed: dict[int, Profile] = field(default_factory=dict)

    def at(self, n: int) -> Subject:
        if self.what == "batch":
            return replace(self.subject, samples=n)
        if n not in self.made:
            self.made[n] = load_subject(self.subject.wanted.sized(self.what, n))
        return self.made[n]

    def without_a_step(self, n: int) -> Profile:
        """What is there whatever the method: weights, gradients, optimizer, batch."""
        subject, key = self.at(n), 0 if self.what == "batch" else n
        if key not in self.fixed:
            first = next(p for p in subject.model.parameters() if p.requires_grad)
            self.fixed[key] = memory.profile(subject.model, lambda: first.sum(), device=self.device, optimizer=self.optimizer)
        return replace(self.fixed[key], inputs=bytes_of(subject.batch()))

    def count(self, method: str, n: int) -> Way:
        self.tick(f"{method}, {self.what} {n}")
        subject = self.at(n)
        model, batch = subject.model, subject.batch()
        with untouched(model), applied(model, parsed(method)), weightless(model, self.device == "cuda") as mode:
            model.train()
            return ways.count(model, faked(mode, batch), (), Clock(), self.device)


def bytes_of(batch: Any) -> int:
    tensors = [t for t in tree_leaves(dict(batch) if hasattr(batch, "keys") else batch) if isinstance(t, Tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def fit(args: argparse.Namespace) -> None:
    with telling(args) as say:
        room = gpu_of(args.gpu)
        methods = fit_methods(args.methods)
        subject = first_subject(args)
        if args.methods == METHODS and find_heads(subject.model, [name for name, _ in find_blocks(subject.model)]):
            methods.append(LARGE_VOCABULARY)
        step = args.step or (1 if args.largest == "batch" else subject.step)
        introduce(subject if args.largest == "batch" else replace(subject, inputs="", notes=()), say)
        with ticking(len(methods)) as (tick, done):
            needs = planner_of(subject, args).needs
            fitting = Fitting(subject, args.largest, args.device, args.optimizer, needs, tick)
            found = fit_all(fitting, methods, room, step, done)
        say(f"\n{fit_table(found, args, room, step)}\n")
        say("\n".join(fit_remarks(found, args, subject, step)))
        data = {"model": args.model, "largest": args.largest, "gpu": room, "step": step, "subject": str(subject)}
        write(args, say, {**data, "methods": [asdict(f) for f in found]}, lambda: fit_page(subject, args, found))


def gpu_of(text: str) -> int:
    if text.strip().replace(".", "", 1).isdigit():
        raise ValueError(f"--gpu {text} has no unit; write it as {text.strip()}GiB.")
    room = parse_size(text, "--gpu")
    if room <= CONTEXT:
        raise ValueError(f"--gpu {text} is less than the {readable(CONTEXT)} that CUDA itself takes.")
    return room


def fit_methods(text: str) -> list[str]:
    """Plain first, whatever the list: it is what the others are compared with."""
    found = ["plain" if m == "exact" else m for m in split_list(text)]
    for m in found:
        if m != "accumulation":
            parsed(m)
        if found.count(m) > 1:
            raise ValueError(f"--methods: {m} is in the list twice.")
    return ["plain", *(m for m in found if m != "plain")]


def first_subject(args: argparse.Namespace) -> Subject:
    """The model in the sizes that were given; what is searched for is not given."""
    if args.step is not None and args.step < 1:
        raise ValueError(f"--step {args.step} must be at least 1.")
    if args.largest == "batch":
        return load_subject(wanted_of(args))
    if getattr(args, args.largest) is not None:
        raise ValueError(f"--largest {args.largest} finds what --{args.largest} would say; leave one of them out.")
    sized = {"seq": args.step or SHORTEST} if args.largest == "seq" else {}
    subject = load_subject(wanted_of(args, samples=args.batch or 1, **sized))
    if args.largest == "size" and subject.inputs.endswith("tokens"):
        raise ValueError(f"--largest size: model {args.model!r} takes texts; give --largest seq.")
    if not subject.inputs.endswith(("pixels", "tokens")):
        raise ValueError(f"--largest {args.largest}: model {args.model!r} comes with its own batch, whose samples keep their size.")
    return subject


@contextmanager
def ticking(methods: int) -> Iterator[tuple[Callable[[str], Any], Callable[[], Any]]]:
    """A bar on a terminal."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield (lambda text: None), (lambda: None)
        return
    with tqdm(total=methods, unit="method", leave=False, disable=None) as bar:
        yield bar.set_postfix_str, bar.update


def fit_all(fitting: Fitting, methods: list[str], room: int, step: int, done: Callable[[], Any]) -> list[Fitted]:
    plain, ways = fit_one(fitting, "plain", room, step, 8 * step)
    common = plain.largest or step
    way = ways.get(common) or fitting.count("plain", common)
    plain.peak, plain.time = way.peak, 1.0
    done()
    found = [plain]
    for method in methods[1:]:
        found.append(accumulated(plain, fitting) if method == "accumulation" else beside(fitting, method, room, step, common, way))
        done()
    return found


def beside(fitting: Fitting, method: str, room: int, step: int, common: int, plain: Way) -> Fitted:
    """A method other than plain; one that does not apply says why."""
    exact = not any(isinstance(m, (SBP, DropIT)) or m.changes_forward for m in parse(method))
    try:
        found, ways = fit_one(fitting, method, room, step, common)
        way = ways.get(common) or fitting.count(method, common)
    except ValueError as e:
        return Fitted(method, exact=exact, why=str(e))
    return replace(found, peak=way.peak, time=way.time / plain.time, exact=exact)


def accumulated(plain: Fitted, fitting: Fitting) -> Fitted:
    if fitting.what != "batch":
        return replace(plain, method="accumulation", why="It makes a batch of smaller ones; a single sample stays as it is.")
    norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in fitting.subject.model.modules())
    why = "BatchNorm takes its statistics from the micro-batch, so the training is another one." if norm else ""
    return replace(plain, method="accumulation", any=plain.largest is not None, exact=not norm, why=why)


def fit_one(fitting: Fitting, method: str, room: int, step: int, start: int) -> tuple[Fitted, dict[int, Way]]:
    ways: dict[int, Way] = {}

    def need(n: int) -> int:
        ways[n] = fitting.count(method, n)
        return total_of(fitting.without_a_step(n), fitting.needs(ways[n].peak))

    fixed = total_of(fitting.without_a_step(step), fitting.needs(0))
    n, total, bounded = largest(need, room, step, start, fixed, power=2 if fitting.what == "size" else 1)
    return Fitted(method, n, total, bounded=bounded), ways


def fit_table(found: list[Fitted], args: argparse.Namespace, room: int, step: int) -> str:
    name = {"batch": "largest batch", "size": "largest image", "seq": "longest text"}[args.largest]
    cells = [["method", name, "of plain's", "on the device", "time", "gradients"]]
    plain = found[0].largest
    for f in found:
        time = "" if f.time is None else f"{f.time:.2f}"
        ratio = f"{f.largest / plain:.2f}" if f.largest and plain and not f.any else ""
        total = "" if f.total is None else readable(f.total)
        cells.append([f.method, _largest_of(f, args.largest, step), ratio, total, time, "" if f.total is None else _gradients(f)])
    return f"What fits into {readable(room)}:\n\n{rows(cells)}"


def _gradients(f: Fitted) -> str:
    return "exact" if f.exact else "of other statistics" if f.method == "accumulation" else "approximate"


def _largest_of(f: Fitted, what: str, step: int) -> str:
    if f.total is None:
        return "does not apply"
    if f.largest is None:
        return f"not even {step}"
    unit = {"batch": "", "size": " pixels", "seq": " tokens"}[what]
    return f"any, in micro-batches of {f.largest}" if f.any else f"{f.largest}{unit}" + (" or more" if f.bounded else "")


def fit_remarks(found: list[Fitted], args: argparse.Namespace, subject: Subject, step: int) -> list[str]:
    said = [f"On the device: all that a training takes there (optimizer: {args.optimizer}), with CUDA itself."]
    if any(f.largest is None and f.total is not None for f in found):
        said[0] += f" Where nothing fits, what {step} would need."
    unit = {"batch": "samples", "size": "pixels", "seq": "tokens"}[args.largest]
    at = found[0].largest or step
    said.append(f"Time: of a step at {at} {unit}, relative to plain; estimated for a usual GPU.")
    if args.largest != "batch":
        said.append(f"Samples in a batch: {subject.samples}. Tried in steps of {step} {unit}.")
    if args.largest == "seq" and hasattr(getattr(subject.model, "config", None), "max_position_embeddings"):
        said.append("Where a length is above the positions of the configuration, they were raised to it.")
    said += [f"{f.method}: {f.why}" for f in found if f.why]
    if any(not f.exact and f.total is not None and f.method != "accumulation" for f in found):
        said.append(f"Approximate gradients may cost accuracy: halfback audit {args.model}, and halfback compare.")
    return said


def fit_page(subject: Subject, args: argparse.Namespace, found: list[Fitted]) -> dict[str, Any]:
    points = [
        {
            "budget": None,
            "peak": f.peak,
            "time": f.time,
            "exact": f.exact,
            "methods": f.method,
            "label": f"{f.method}: {f.largest or 'none'}",
        }
        for f in found[1:]
        if f.peak is not None and f.method != "accumulation"
    ]
    head = head_of(subject, args)
    at = found[0].largest or "one step"
    said = f"{head['subtitle']}. The largest {args.largest} for {args.gpu} stands beside each method; memory and time are at {at}, plain's"
    return {**head, "subtitle": said, "pareto": {"unit": "bytes", "plain_peak": found[0].peak, "chosen": None, "points": points}}


# audit


def audit(args: argparse.Namespace) -> None:
    from .audit import audit as run_audit
    from .trained import compare_trained

    with telling(args) as say:
        if not parse(args.method):
            raise ValueError(f"--method {args.method}: exact gradients need no audit. Methods to look at: sbp(keep=0.5), dropit(keep=0.1).")
        check_device(args.device)
        torch.manual_seed(args.seed)
        model, batches, told = audited(args)
        say(f"{told}\nThe weights are fresh; hb.audit(model, batch) in a training shows what becomes of the figures.\n")
        found = run_audit(model.to(args.device), _there(batches, args.device), args.masks, args.method)
        say(f"{found.table()}\n" if args.all else "")
        say(str(found) + ("" if args.all else "\n  Every layer: --all"))
        trained = None
        if args.train:
            settings = Settings(
                args.model, args.data or "digits", args.method, args.seeds, args.epochs, args.batch or 64, device=args.device
            )
            say(f"\nTraining {args.model} on {settings.data}, to see where that ends")
            trained = compare_trained(settings, say)
        shown = {"title": f"halfback audit {args.model}", "subtitle": told, "made": made_of(args.device), "audit": found.to_json()}
        write(args, say, {"audit": found.to_json(), "trained": trained}, lambda: shown)


def check_device(device: str) -> None:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as e:
        raise ValueError(f"--device {device} cannot be used: {str(e).splitlines()[0]}") from e


def audited(args: argparse.Namespace) -> tuple[nn.Module, list[Any], str]:
    """A real model in float32, batches for it, and what they are."""
    n = args.batch or AUDITED
    for name, value in (("--batch", n), ("--batches", args.batches), ("--masks", args.masks)):
        if value < 1:
            raise ValueError(f"{name} {value} must be at least 1.")
    if args.data:
        model, several, told = _on_data(args, n)
    else:
        subject = load_subject(Wanted(args.model, args.batch, args.size, args.seq, "fp32", light=False, usual=(n, n, SHORTEST)))
        model, told, n = subject.model, f"{subject}, random inputs", subject.samples
        several = subject.batch() if args.batches == 1 else subject.make(n * args.batches)
    told = f"{told}; batches: {args.batches}, samples in each: {n}"
    return model, [several] if args.batches == 1 else [part(several, i * n, (i + 1) * n) for i in range(args.batches)], told


def _on_data(args: argparse.Namespace, n: int) -> tuple[nn.Module, Any, str]:
    if args.size or args.seq:
        raise ValueError(f"--data {args.data} has images of its own size; leave --size and --seq out.")
    data = load_data(args.data)
    wanted = n * args.batches
    if len(data.y_train) < wanted:
        raise ValueError(f"--data {args.data} has {len(data.y_train)} samples, fewer than the {wanted} of --batches times --batch.")
    model = load_model(args.model, data.shape, data.classes).train()
    return model, (data.x_train[:wanted], data.y_train[:wanted]), f"{args.model} on {args.data}"


def part(batch: Any, start: int, stop: int) -> Any:
    return tree_map_only(Tensor, lambda t: t[start:stop], batch)


def _there(batches: list[Any], device: str) -> list[Any]:
    return tree_map_only(Tensor, lambda t: t.to(device), batches)
