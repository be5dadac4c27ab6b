"""The rows of the benchmark: which methods are run on which models.

A line of the table: what it is called, what is applied (peers.py, or a method's text form), on which kinds of models, in which modes there
is such a row (c: compiled, e: eager), and in which it is required. Rows that something is promised of (promises.py) are required too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..methods import parse
from .models import Spec
from .peers import is_peer
from .promises import PROMISED

CHANGES = "changes the forward"
OTHER = "trains adapters, not the model"


@dataclass(frozen=True)
class Row:
    method: str
    text: str
    compiled: bool
    ours: bool = False
    note: str = ""
    required: bool = False

    @property
    def plain(self) -> str:
        """The row that it is compared to."""
        return "plain" if self.compiled else "plain, eager"

    @property
    def is_plain(self) -> bool:
        return self.text == "plain"


class Line(NamedTuple):
    name: str
    text: str
    kinds: str  # words; "*" is all
    modes: str
    required: str = ""
    note: str = ""


BLOCKS = "vit convnext swin resnet llama gpt2 detector patches other text"  # models that have any
STREAMS = "vit swin llama gpt2 patches other text"  # SBP on its default layers
QKV = "vit llama gpt2 patches other text"  # the same, without the keys and values of dropped tokens
STAGES = "convnext detector"  # the same, by the name that the layers have in the paper
PAPER = "sbp(layers='paper')"
BITS = "activation_bits=4"

PEERS = (
    Line("plain", "plain", "*", "ce", "ce"),
    Line("checkpointing", "recompute", BLOCKS, "ce", "c"),
    Line("accumulation, 2 micro-batches", "accumulate 2", "*", "ce", "c"),
    Line("accumulation, 4 micro-batches", "accumulate 4", "*", "ce", "c"),
    Line("accumulation, 8 micro-batches", "accumulate 8", "*", "ce", "c"),
    Line("compile's budget 0.5", "budget 0.5", "*", "c", "c"),
    Line("Algorithm 1", "algorithm1 0.5", "vit convnext llama", "ce", "c"),
    Line("compile's budget 0.3", "budget 0.3", "*", "c"),
    Line("compile's budget 0.7", "budget 0.7", "*", "c"),
    Line("selective checkpointing", "selective", BLOCKS, "e"),
    Line("offload to the CPU", "offload", "*", "e"),
    Line("saved tensors in 8 bits", "fewbits 8", "*", "e"),
    Line("saved tensors in 4 bits", "fewbits 4", "*", "e"),
    Line("PatchDropout 0.5", "patchdropout 0.5", "vit patches", "ce", "", CHANGES),
    Line("LoRA, rank 16", "lora 16", "vit convnext llama patches", "ce", "", OTHER),
    Line("flat Min-K, keep 0.1", "mink 0.1", "vit convnext llama", "e"),
    Line("flat Min-K, keep 0.2", "mink 0.2", "resnet", "e"),
)
OURS = (
    Line("sbp", "sbp(keep=0.5)", STREAMS, "ce", "ce"),
    Line("sbp + lean", "sbp(keep=0.5)+lean", STREAMS, "ce", "ce"),
    Line("sbp + recompute", "sbp(keep=0.5)+recompute", STREAMS, "ce", "c"),
    Line("sbp, paper's layers", PAPER, STAGES, "ce", "ce"),
    Line("sbp, paper's layers, + lean", f"{PAPER}+lean", STAGES, "ce", "c"),
    Line("sbp, paper's layers, + recompute", f"{PAPER}+recompute", STAGES, "ce", "c"),
    Line("lean", "lean", "*", "ce", "c"),
    Line("sbp keep 1", "sbp(keep=1.0)", BLOCKS, "e", "e"),
    Line("skiptokens", "skiptokens(keep=0.5)", "vit patches", "ce", "c", CHANGES),
    Line(f"dropit 0.1, {BITS}", f"dropit(keep=0.1, {BITS})", "vit convnext swin resnet gpt2 detector patches other text", "ce", "c"),
    Line("dropit 0.2", "dropit(keep=0.2)", "resnet", "ce", "c"),
    Line("lean + chunkedloss", "lean+chunkedloss", "llama gpt2 text", "ce", "e"),
    Line("sbp + lean + chunkedloss", "sbp(keep=0.5)+lean+chunkedloss", "llama gpt2 text", "ce", "e"),
    Line("sbp qkv", "sbp(keep=0.5, attention='qkv')", QKV, "ce", "c"),
    Line("sbp qkv, all, + recompute", "sbp(keep=0.5, layers='all', attention='qkv')+recompute", QKV, "ce", "c"),
    Line("sbp, all, + recompute", "sbp(keep=0.5, layers='all')+recompute", STREAMS, "ce", "c"),
    Line("sbp + lean + recompute", "sbp(keep=0.5)+lean+recompute(sparing=True)", STREAMS, "ce"),
    Line("sbp keep 0.25", "sbp(keep=0.25)", STREAMS, "ce"),
    Line("lean + recompute", "lean+recompute(sparing=True)", BLOCKS, "ce"),
    Line(f"sbp + dropit 0.1, {BITS}", f"sbp(keep=0.5)+dropit(keep=0.1, {BITS})", "vit swin gpt2 patches other text", "ce"),
    Line("dropit 0.1", "dropit(keep=0.1)", "vit convnext llama gpt2", "e"),
    Line(f"dropit bits=4, {BITS}", f"dropit(bits=4, {BITS})", "vit convnext", "ce"),
    Line("sbp, all blocks of three stages", "sbp(layers=('features.1.*', 'features.3.*', 'features.5.*'))", "convnext", "ce"),
)
MODES = (("c", True, ""), ("e", False, ", eager"))
EAGER = ("detector",)  # kinds that do not compile
SETS = ("promised", "required", "all")  # each has the rows of the one before


def rows_of(spec: Spec, which: str = "required", texts: Iterable[str] = ()) -> list[Row]:
    """The rows of a model: "promised", "required" or "all", see SETS; or plain and what is asked for. Plain ones come first, then what is
    promised, then what is required, ours before the peers."""
    lines = [(line, ours) for table, ours in ((PEERS, False), (OURS, True)) for line in table]
    fit = [(line, ours) for line, ours in lines if line.kinds == "*" or spec.kind in line.kinds.split()]
    if asked := [_asked(text, spec) for text in texts]:
        fit = [(line, ours) for line, ours in fit if line.text == "plain"] + asked
    found = [
        Row(line.name + more, line.text, compiled, ours, line.note, mode in line.required)
        for mode, compiled, more in MODES
        for line, ours in fit
        if mode in line.modes and not (compiled and spec.kind in EAGER) and _divides(line.text, spec.batch)
    ]

    def promised(row: Row) -> bool:
        return (spec.name, row.method) in PROMISED

    wanted = [r for r in found if asked or r.is_plain or which == "all" or promised(r) or (which == "required" and r.required)]
    return sorted(wanted, key=lambda r: (not r.is_plain, not promised(r), not r.required, not r.ours))


def _divides(text: str, batch: int) -> bool:
    name, *value = text.split()
    return name != "accumulate" or batch % int(value[0]) == 0


def _asked(text: str, spec: Spec) -> tuple[Line, bool]:
    """A row for what a user wrote."""
    if is_peer(text):
        _check_peer(text, spec)
        known = [line for line in PEERS if line.text.split()[0] == text.split()[0]]
        return next((line for line in known if line.text == text), known[0]._replace(name=text, text=text, kinds="*")), False
    methods: tuple[Any, ...] = parse(text)
    return Line(text, text, "*", "ce", "", CHANGES if any(m.changes_forward for m in methods) else ""), True


def _check_peer(text: str, spec: Spec) -> None:
    name, *value = text.split()
    forms = [line.text for line in PEERS if line.text.split()[0] == name]
    takes = any(len(form.split()) > 1 for form in forms)
    number = r"[1-9]\d*" if name == "accumulate" else r"\d*\.?\d+"
    if len(value) != takes or not all(re.fullmatch(number, v) for v in value):
        raise ValueError(f"bench: --method {text!r}: write it as {' or '.join(map(repr, forms))}.")
    if not _divides(text, spec.batch):
        raise ValueError(f"bench: --method {text!r}: {spec.name} has a batch of {spec.batch}, which is not that many equal parts.")
