"""One HTML page of what was counted, planned and measured. It opens from a file, needs no network, and no library.

    profiles   what is held for the backward, by module, before and after
    pareto     memory against time
    audit      how near each layer's gradient is to the exact one
    compare    trainings, as compare.py writes them

page.html draws; here the content is made fit for it: as JSON in which no `<` is left, without numbers that JSON does not have, and
with equal storages of a module as one row. Who made and who saved a storage is a number in the list of places.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .files import write_text

PARTS = ("title", "subtitle", "made", "profiles", "pareto", "audit", "compare")
TEMPLATE = Path(__file__).with_name("page.html")


def write_page(path: str | Path, content: dict[str, Any]) -> None:
    write_text(Path(path), page(content))


def page(content: dict[str, Any]) -> str:
    """The page as text. Every part but the title may be missing; the page shows what is there."""
    _check(content)
    filled = {"title": html.escape(content["title"]), "content": as_json(packed(content))}
    # One pass, so that a title that reads {{content}} stays a title.
    return re.sub(r"\{\{(title|content)\}\}", lambda m: filled[m[1]], TEMPLATE.read_text(encoding="utf-8"))


def _check(content: dict[str, Any]) -> None:
    if not isinstance(content.get("title"), str) or not content["title"].strip():
        raise ValueError(f"page(): content needs a title, a text; found {content.get('title')!r}. Parts: {', '.join(PARTS)}.")
    unknown = [name for name in content if name not in PARTS]
    if unknown:
        raise ValueError(f"page(): content has {', '.join(map(repr, unknown))}, which the page does not know. Parts: {', '.join(PARTS)}.")


def as_json(value: Any) -> str:
    """JSON that can stand inside a script element, whatever its texts are."""
    text = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def finite(value: Any) -> Any:
    """The same with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Storages


def packed(content: dict[str, Any]) -> dict[str, Any]:
    """The content with its storages as rows: how many, bytes of each, shape, dtype, made by, saved by. The last two are places."""
    places: dict[tuple[str, str], int] = {}
    profiles = [{**p, "storages": _rows(p.get("storages") or (), places)} for p in content.get("profiles") or ()]
    return {**content, "profiles": profiles, "places": list(places)}


def _rows(storages: Iterable[dict[str, Any]], places: dict[tuple[str, str], int]) -> list[list[Any]]:
    counts: Counter[tuple[Any, ...]] = Counter()
    for s in storages:
        made, saved = s.get("made_by"), s.get("saved_by") or ()
        made_by = None if made is None else _place(made, places)
        counts[s["bytes"], tuple(s.get("shape") or ()), s.get("dtype"), made_by, tuple(_place(who, places) for who in saved)] += 1
    return [[n, *row] for row, n in counts.items()]


def _place(who: dict[str, Any], places: dict[tuple[str, str], int]) -> int:
    return places.setdefault((who.get("module") or "", who.get("operation") or ""), len(places))
