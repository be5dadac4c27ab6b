"""What accuracy methods cost, for the planner: trains with each of them and writes halfback/presets.json.

    python benchmarks/presets.py                 a ViT and a small ConvNet on scanned digits, five seeds, about ten minutes on two cores
    python benchmarks/presets.py --family convnet

A preset is the mean difference in test accuracy to exact training from the same weights on the same batches, in points. The trainings
are written to benchmarks/results/presets_FAMILY.json. They are small: they tell methods that cost much from those that cost little,
and no more.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from halfback.compare import Settings, compare
from halfback.planner import APPROXIMATE

HERE = Path(__file__).parent
PRESETS = HERE.parent / "halfback" / "presets.json"
MODELS = {"transformer": "small-vit", "convnet": f"{__file__}:small_convnet"}


class Block(nn.Module):
    """ConvNeXt's: a depthwise convolution, a norm, and an MLP of every position."""

    def __init__(self, width: int):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.mlp(y).permute(0, 3, 1, 2)


class ConvNet(nn.Module):
    """Four stages, as ConvNeXt has, for images of 8 x 8."""

    def __init__(self, widths: tuple[int, ...] = (24, 32, 48, 48), depths: tuple[int, ...] = (2, 2, 3, 2), classes: int = 10):
        super().__init__()
        self.stem = nn.Conv2d(1, widths[0], 1)
        stages: list[nn.Module] = []
        for i, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            if i in (1, 2):
                stages.append(nn.Conv2d(widths[i - 1], width, 2, 2))
            stages.append(nn.Sequential(*[Block(width) for _ in range(depth)]))
        self.stages = nn.Sequential(*stages)
        self.norm = nn.LayerNorm(widths[-1])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stages(self.stem(x)).mean((2, 3))))


def small_convnet() -> ConvNet:
    return ConvNet()


def methods_of(family: str) -> list[str]:
    """What the planner may choose, once each."""
    return list(dict.fromkeys(replace(kind, sparing=False).preset(family) for kind in APPROXIMATE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=list(MODELS), action="append")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    known = json.loads(PRESETS.read_text())["presets"]
    for family in args.family or MODELS:
        methods = ", ".join(["exact", *methods_of(family)])
        result = compare(Settings(model=MODELS[family], methods=methods, seeds=args.seeds), HERE.parent / "out" / f"presets_{family}")
        if family == "convnet":
            result["settings"]["model"] = "benchmarks/presets.py:small_convnet"
        path = HERE / "results" / f"presets_{family}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        known = [p for p in known if p["family"] != family]
        for entry in result["methods"][1:]:
            lost = [-100 * d for d in entry["accuracy_differences"]]
            source = f"digits, {len(lost)} seeds, {path.name}"
            error = statistics.stdev(lost) / len(lost) ** 0.5
            mean = round(statistics.fmean(lost), 2)
            known.append({"methods": entry["method"], "family": family, "points": mean, "error": round(error, 2), "source": source})
    PRESETS.write_text(json.dumps({"presets": known}, indent=1) + "\n")
    print(PRESETS.read_text())


if __name__ == "__main__":
    main()
