"""What `apply_` touched, what it skipped and why: the report, which hooks complete in the first forward."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from .methods import ChunkedLoss, DropIT, Lean, Method
from .watch import Row

SIZES = 64  # of what a model was called with, the last ones
TOLD = {  # what a report says of a kind of note: of what, and in which blocks
    "merged": "merged, exactly, at {} in {}",
    "dense": "dense, output split again, at {} in {}",
    "unseen": "not seen: {} in {}",
    "caution": "CAUTION, behind {1}: {0}",
    "warned": "CAUTION, in {1}: {0}",
}


@dataclass
class Report:
    """What `apply_` touched, what it skipped and why; completed by the first forward."""

    model: str
    methods: tuple[Method, ...]
    blocks: list[str]
    recomputed: list[str]
    apart: list[str] = field(default_factory=list)  # modules that run for kept positions, then for dropped ones
    experts: list[str] = field(default_factory=list)  # modules that are called so, and do not
    approximated: list[str] = field(default_factory=list)  # layers whose weight gradient comes from a store
    positions: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)  # of Lean and DropIT: what each layer and function saves, and how it is held
    before: int | None = None  # bytes that plain training would hold, and that are held: known after the first training step
    after: int | None = None
    notes: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    plan: Any = None  # the plan that the methods come from
    sizes: list[tuple[int, int]] = field(default_factory=list)  # of what the model was called with: samples, and what comes next
    turned: set[str] = field(default_factory=set)  # blocks whose inputs have positions first, and then samples

    def hear(self, block: str, kind: str, what: str) -> None:
        where = self.notes.setdefault((kind, what), [])
        if block not in where:
            where.append(block)

    def called(self, sizes: list[tuple[int, int]]) -> None:
        self.sizes = [*(size for size in self.sizes if size not in sizes), *dict.fromkeys(sizes)][-SIZES:]

    def account(self, rows: list[Row]) -> None:
        self.rows = rows
        self.before, self.after = sum(r.before for r in rows), sum(r.after for r in rows)

    def table(self) -> str:
        """Lean and DropIT: a line for all that each layer and function saves."""
        if self.before is None:
            return "what each layer holds is known after the first training step"
        width = max([len(r.layer) for r in self.rows], default=5)
        lines = [f"{'layer':{width}}  {'function':28}  {'before':>10}  {'after':>10}"]
        lines += [f"{r.layer:{width}}  {r.function:28}  {_mib(r.before):>10}  {_mib(r.after):>10}  {'; '.join(r.how)}" for r in self.rows]
        return "\n".join([*lines, f"{'all':{width}}  {'':28}  {_mib(self.before):>10}  {_mib(self.after or 0):>10}"])

    def drew(self, grid: tuple[int, ...], factors: list[tuple[int, ...]], always: int, counts: list[int]) -> None:
        finest = [math.prod(f) for f in zip(grid, *factors, strict=True)]
        text = f"{'x'.join(map(str, finest))} positions" + (f" after {always} that are always kept" if always else "")
        text += f", drawn on {'x'.join(map(str, grid))}" if factors else ""
        share = sum(counts) / len(counts) / math.prod(grid)
        told = f"{text}; {share:.1%} of them kept" + (" on average" if len(set(counts)) > 1 else "")
        if told not in self.positions:  # a schedule keeps more or less of the same positions later
            self.positions = [*(p for p in self.positions if not p.startswith(f"{text};")), told]

    @property
    def merged(self) -> dict[str, list[str]]:
        """Operations that were not understood and so merged, with the blocks that ran them."""
        return {what: where for (kind, what), where in self.notes.items() if kind == "merged"}

    @property
    def fallbacks(self) -> dict[str, list[str]]:
        return {what: where for (kind, what), where in self.notes.items() if kind == "fell back"}

    def __str__(self) -> str:
        if not self.methods:
            return f"halfback: nothing on {self.model}: plain training fits"
        lines = [f"halfback: {' + '.join(str(m) for m in self.methods)} on {self.model}"]
        if self.blocks:
            lines.append(f"  approximate backward in {len(self.blocks)} blocks: {_range(self.blocks)}")
        elif not self.recomputed and not any(isinstance(m, (Lean, DropIT, ChunkedLoss)) for m in self.methods):
            lines.append("  nothing: keep=1 keeps everything, so training is exact")
        if self.experts:
            lines.append(f"  if each position goes through {_range(self.experts)} by itself, SBP(apart=['*.experts']) saves there, too")
        if self.apart:
            lines.append(f"  run for kept positions, then for dropped ones: {_range(self.apart)}")
        if self.recomputed:
            lines.append(f"  recomputed in the backward: {len(self.recomputed)} blocks: {_range(self.recomputed)}")
        if any(m.changes_forward for m in self.methods):
            lines.append("  this CHANGES THE FORWARD in training: dropped tokens do not take part in the chosen blocks")
        if any(isinstance(m, (Lean, DropIT)) for m in self.methods):
            lines += self._held()
        lines += [f"  {text}" for text in self.positions]
        lines += [
            f"  {TOLD.get(kind, kind + ': {} in {}').format(what, _range(where))}"
            for (kind, what), where in self.notes.items()
            if kind != "cut"
        ]
        uncut = [name for name in self.blocks if name not in self.notes.get(("cut", ""), [])]
        later = any(m.schedule and max(m.keeps) == 1 > min(m.keeps) for m in self.methods)  # its schedule keeps all, now
        if self.positions and uncut and not later and not any(m.changes_forward for m in self.methods):
            lines.append(
                f"  nothing was cut, so gradients are exact and no less is held, maybe more, in {_range(uncut)}; leave them out of layers="
            )
        if self.blocks and not self.positions:
            lines.append("  positions, merges and fallbacks: known after the first training step")
        return "\n".join(lines)

    __repr__ = __str__  # what notebooks show

    def _held(self) -> list[str]:
        lines = []
        if self.before is None or self.after is None:
            if self.approximated:
                lines.append(f"  weight gradients from stores in up to {len(self.approximated)} layers: {_range(self.approximated)}")
            return [*lines, "  what is held, layer by layer: known after the first training step"]
        if self.approximated:
            stored = list(dict.fromkeys(r.layer for r in self.rows if r.stored))
            where = _range(stored) or "others hold all inputs"
            lines.append(f"  weight gradients from stores in {len(stored)} of {len(self.approximated)} layers: {where}")
        share = self.after / max(1, self.before)
        beside = " beside what is compiled" if any(kind == "compiled" for kind, _ in self.notes) else ""
        lines.append(f"  held for backward{beside}: {_mib(self.before)} -> {_mib(self.after)} ({share:.2f}); report.table() says by whom")
        ways: dict[str, list[Row]] = {}
        for row in self.rows:
            ways.setdefault(row.function, []).append(row)
        for function, rows in ways.items():
            before, after = sum(r.before for r in rows), sum(r.after for r in rows)
            how = list(dict.fromkeys(re.sub(r" for .*", "", h) for r in rows for h in r.how))
            lines.append(f"    {function}: {_mib(before)} -> {_mib(after)}, {len(rows)} x: {'; '.join(how)}")
        return lines


def _mib(n: int) -> str:
    return f"{n / 2**20:.2f} MiB" if n < 2**30 else f"{n / 2**30:.2f} GiB"


def _range(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} ... {names[-1]}"
