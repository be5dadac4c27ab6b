"""No figure in the README is typed by hand, and its Python runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import zoo

import halfback as hb

ROOT = Path(__file__).parent.parent


def test_the_tables_are_what_the_result_files_say():
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"run python benchmarks/tables.py {done.stderr}"


def test_results_say_where_they_come_from():
    rows = [json.loads(line) for line in (ROOT / "benchmarks/results/sbp.jsonl").read_text().splitlines()]
    for row in rows:
        assert {"gpu", "torch", "commit", "date", "seed", "step_ms", "peak_gib"} <= row.keys()
        assert row["commit"] not in ("", "unknown", "working")
    digits = json.loads((ROOT / "benchmarks/results/compare_digits.json").read_text())
    assert {"date", "device", "versions", "commit", "settings"} <= digits.keys() and digits["settings"]["seeds"] >= 3


def test_the_readmes_first_lines_run():
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    model, batch = zoo.make("vit", layers=3)
    held = hb.held(model, lambda: zoo.loss(model, batch))
    exec(
        block.replace(
            "hb.remove_(model)", "zoo.loss(model, batch); less = hb.held(model, lambda: zoo.loss(model, batch)); hb.remove_(model)"
        ),
        scope := {"model": model, "zoo": zoo, "batch": batch},
    )
    assert scope["less"] < held == hb.held(model, lambda: zoo.loss(model, batch))
