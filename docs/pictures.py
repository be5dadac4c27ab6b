"""The pictures of docs/how.md, as SVG that is legible on light and on dark ground."""

from __future__ import annotations

from html import escape

STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 12px; fill: #57606a } .strong { font-weight: 600 } .middle { text-anchor: middle } .on { fill: #ffffff }
.kept { fill: #1f6feb } .dropped { fill: #d0d7de } .held { fill: #1f6feb } .again { fill: none; stroke: #1f6feb; stroke-dasharray: 5 4 }
.stored { fill: #bf8700 } .gone { fill: none; stroke: #8c959f; stroke-dasharray: 2 4 } .frame { fill: none; stroke: #8c959f }
.line { stroke: #57606a; fill: none; stroke-width: 1.5 } .back { stroke: #cf222e; fill: none; stroke-width: 2 }
.tip { fill: #57606a } .backtip { fill: #cf222e }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .on { fill: #ffffff } .dropped { fill: #3d444d } .gone, .frame { stroke: #656c76 }
  .line { stroke: #9198a1 } .tip { fill: #9198a1 } .back { stroke: #ff7b72 } .backtip { fill: #ff7b72 }
  .again { stroke: #58a6ff } .stored { fill: #9e6a03 }
}
"""


def drawing(width: int, height: int, title: str, *parts: str) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">'
    tips = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8Z" class="{kind}"/></marker>'
        for name, kind in (("tip", "tip"), ("backtip", "backtip"))
    )
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", f"<defs>{tips}</defs>", *parts, "</svg>", ""])


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, words: str = "", on: str = "") -> str:
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" class="{kind}"/>'
    return shape + (text(x + width / 2, y + height / 2 + 5, words, f"middle {on}") if words else "")


def arrow(*points: tuple[float, float], back: bool = False) -> str:
    kind, tip = ("back", "backtip") if back else ("line", "tip")
    path = " L".join(f"{x} {y}" for x, y in points)
    return f'<path d="M{path}" class="{kind}" marker-end="url(#{tip})"/>'


def tokens(x: float, y: float, kept: str, size: int = 16) -> str:
    """A row of tokens; `kept` has an x for each that is kept."""
    return "".join(box(x + i * (size + 4), y, size, size, "kept" if k == "x" else "dropped") for i, k in enumerate(kept))


def streams() -> str:
    """A block under SBP: two streams forward, one backward."""
    return drawing(
        760,
        330,
        "SBP: the forward runs at all positions, the backward at the kept ones",
        text(20, 28, "forward: every position, exact", "strong"),
        tokens(20, 62, "x.x.x.x."),
        text(20, 104, "x, split in two", "small"),
        box(240, 44, 230, 40, "kept", "f on kept: saved for backward", "on"),
        box(240, 100, 230, 40, "dropped", "f on dropped: nothing saved"),
        arrow((182, 70), (236, 64)),
        arrow((182, 74), (236, 118)),
        box(560, 62, 60, 60, "frame", "+"),
        arrow((470, 64), (556, 84)),
        arrow((470, 120), (556, 100)),
        arrow((100, 56), (100, 36), (590, 36), (590, 58)),
        text(330, 30, "the trunk: every position", "small"),
        arrow((620, 92), (730, 92)),
        text(640, 84, "y = x + f(x)", "small"),
        '<path d="M20 172 H740" class="gone"/>',
        text(20, 206, "backward: the branch at kept positions, the trunk at all", "strong"),
        tokens(20, 240, "x.x.x.x."),
        text(20, 282, "dx", "small"),
        box(240, 222, 230, 40, "kept", "f' and dW: kept alone", "on"),
        box(240, 276, 230, 40, "gone", "left out"),
        arrow((730, 252), (474, 244), back=True),
        arrow((236, 244), (186, 248), back=True),
        arrow((730, 262), (500, 270), (210, 270), (186, 256), back=True),
        text(620, 240, "dy", "small"),
    )


def layer() -> str:
    """norm -> linear -> gelu -> linear: what stays for the backward."""
    columns = (("norm input", 150), ("norm output", 290), ("gelu input", 430), ("gelu output", 570))
    rows = (
        ("plain", "held held held held", "all four"),
        ("Lean", "held again held again", "two; the others are computed again, exactly"),
        ("DropIT, 4-bit activations", "held again stored stored", "one, a 4-bit code, and a sparse copy"),
    )
    words = {"held": ("held", "on"), "again": ("computed again", ""), "stored": ("", "on")}
    parts = [
        text(20, 32, "norm → linear → GELU → linear: what is held for the backward", "strong"),
        *(text(x + 60, 66, name, "small middle") for name, x in columns),
    ]
    for i, (name, kinds, note) in enumerate(rows):
        y = 84 + 72 * i
        parts += [text(20, y + 20 - 6 * (" " in name), name.split(",")[0], "strong")]
        parts += [text(20, y + 32, "activation_bits=4", "small")] if "," in name else []
        for j, kind in enumerate(kinds.split()):
            said, on = words[kind]
            said = said or ("4-bit code" if j == 2 else "largest 10 %")
            parts.append(box(columns[j][1], y, 120, 36, kind, said, on))
        parts.append(text(150, y + 54, note, "small"))
    return drawing(720, 304, "What four neighbours hold in plain training, with Lean and with DropIT", *parts)


def ledger() -> str:
    """How a saved tensor is held: the ledger's three ways."""
    return drawing(
        760,
        300,
        "The ledger: three ways to hold what autograd saves",
        box(20, 110, 150, 60, "frame"),
        text(95, 136, "autograd saves", "middle"),
        text(95, 156, "a tensor", "middle"),
        box(230, 96, 170, 88, "frame"),
        text(315, 122, "the ledger", "middle strong"),
        text(315, 144, "who made it, of what?", "small middle"),
        text(315, 164, "who else holds it?", "small middle"),
        arrow((170, 140), (226, 140)),
        box(470, 20, 130, 56, "held", "Exact", "on"),
        text(612, 44, "itself, once for all"),
        text(612, 62, "who save it", "small"),
        box(470, 112, 130, 56, "again", "Computed"),
        text(612, 136, "nothing: made again"),
        text(612, 154, "from what is held", "small"),
        box(470, 204, 130, 56, "stored", "Stored", "on"),
        text(612, 228, "a sparse or few-bit"),
        text(612, 246, "copy (DropIT alone)", "small"),
        arrow((400, 120), (466, 52)),
        arrow((400, 140), (466, 140)),
        arrow((400, 160), (466, 230)),
        text(20, 288, "Exact and Computed give plain training's gradient, bit for bit in eager mode; Stored approximates.", "small"),
    )


def all_of_them() -> dict[str, str]:
    return {"streams.svg": streams(), "layer.svg": layer(), "ledger.svg": ledger()}
