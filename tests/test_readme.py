"""No figure in the README is typed by hand, and its Python runs."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zoo

import halfback as hb
from halfback.compare import Settings

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)


def test_the_tables_are_what_the_result_files_say():
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"run python benchmarks/tables.py {done.stderr}"


def test_results_say_where_they_come_from():
    for row in [json.loads(line) for line in (RESULTS / "budget.jsonl").read_text().splitlines()]:
        assert {"gpu", "torch", "commit", "date", "seed", "part", "model"} <= row.keys()
        assert len(row["commit"]) == 40
    for row in [json.loads(line) for f in ("sbp.jsonl", "dropit.jsonl", "bench.jsonl") for line in (RESULTS / f).read_text().splitlines()]:
        if row.get("part", "step") != "step" or "failed" in row:
            continue
        assert {"gpu", "torch", "commit", "date", "seed", "step_ms", "peak_gib"} <= row.keys()
        assert row["commit"] not in ("", "unknown", "working")
    for name in ("compare_digits.json", "depth.json"):
        result = json.loads((RESULTS / name).read_text())
        assert {"date", "device", "versions", "settings"} <= result.keys()
        assert result["commit"] and not result["commit"].endswith("-dirty")
        assert result["settings"].get("seeds", len(result.get("seeds", []))) >= 3


def test_the_demo_trains_the_methods_that_the_table_shows():
    shown = json.loads((RESULTS / "compare_digits.json").read_text())["settings"]
    assert (shown["methods"], shown["seeds"], shown["epochs"]) == (Settings().methods, Settings().seeds, Settings().epochs)


def test_the_readmes_first_lines_run():
    model, batch = zoo.make("vit", layers=3)
    held = hb.held(model, lambda: zoo.loss(model, batch))
    less = []

    def remove_(model):
        less.append(hb.held(model, lambda: zoo.loss(model, batch)))
        hb.remove_(model)

    exec(BLOCKS[0].replace("hb.remove_", "remove_"), {"model": model, "remove_": remove_})
    assert len(less) == 3 and max(less) < held == hb.held(model, lambda: zoo.loss(model, batch))


def test_the_lines_on_budget_profile_plan_and_audit_run(capsys):
    model, batch = zoo.make("vit", layers=3)
    exec(BLOCKS[1].replace("16GiB", "1GiB"), {"hb": hb, "model": model, "batch": batch})
    hb.remove_(model)
    exec(BLOCKS[2], {"hb": hb, "model": model, "batch": batch})
    said = capsys.readouterr().out
    assert "held for backward" in said and "of plain training's" in said and "cosine" in said
    assert not any("_halfback" in vars(m) for m in model.modules())


def test_tables_of_lean_and_dropit_are_made_of_the_rows_that_are_there(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    common = {"model": "ViT-B/16", "batch": 8, "gpu": "a GPU", "torch": "2", "date": "2000-01-01 00:00"}
    given = {
        "plain, eager": {"step_ms": 10, "peak_gib": 4},
        "lean, eager": {"step_ms": 11, "peak_gib": 2, "peak_error": -0.034},
    }
    lines = [json.dumps({**common, "method": method, **figures}) for method, figures in given.items()]
    (tmp_path / "dropit.jsonl").write_text("\n".join(lines))
    made = tables.dropit_table()
    assert "ViT-B/16, 224 px, batch 8, eager:" in made
    assert "| **`lean`**, exact | 11.0 ms | 2.00 GiB | 1.10 | 0.50 |" in made
    assert "at most 3.4%" in made and "ResNet" not in made


@pytest.fixture
def benched(tmp_path, monkeypatch):
    """Results of `halfback bench`: two models, of one of them rows that were measured twice, of another batch, a second plain, and one
    that failed."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    model = {"model": "vit-b", "about": "ViT-B/16", "size": 224, "unit": "images", "batch": 256}
    where = {"part": "step", "device": "cuda", "gpu": "a GPU", "torch": "2", "date": "2000-01-01 00:00"}
    plain = {**model, **where, "note": "", "compiled": True, "ours": False, "text": "plain", "host_ms": 7.5, "peak_gib": 4, "peak_ratio": 1}
    sbp = {**plain, "method": "sbp", "text": "sbp(keep=0.5)", "ours": True, "peak_gib": 3, "peak_ratio": 0.75}
    lean = {**sbp, "method": "lean", "text": "lean", "step_ms": 9, "time_ratio": 0.9}
    other = {**plain, "model": "llama", "about": "Llama", "size": 64, "unit": "tokens", "compiled": False, "step_ms": 10, "time_ratio": 1}
    rows = [
        lean,
        {**sbp, "step_ms": 9, "time_ratio": 0.9},
        {**sbp, "step_ms": 8, "time_ratio": 0.8, "date": "2000-01-02 00:00"},
        {**plain, "method": "accumulation", "text": "accumulate 2", "step_ms": 12, "time_ratio": 1.2},
        {**plain, "method": "budget", "text": "budget 0.5", "step_ms": 9.5, "time_ratio": 0.95},
        {**plain, "method": "plain", "step_ms": 10, "time_ratio": 1.0},
        {**plain, "method": "offload", "failed": "OutOfMemoryError"},
        {**plain, "method": "sbp", "part": "fits"},
        {**plain, "method": "budget 0.4", "text": "budget 0.4", "step_ms": 1, "time_ratio": 0.5, "batch": 16},
        {**plain, "method": "plain, again", "step_ms": 11, "time_ratio": 1.1},
        {**other, "method": "plain, eager"},
        {**other, "method": "lean, eager", "text": "lean", "ours": True},
    ]
    (tmp_path / "bench.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_the_benchmarks_table_has_the_newest_row_of_each_kind(benched):
    made = tables.bench_table()
    assert "ViT-B/16, 224 px, batch 256, compiled:\n\n| | step |" in made and "Llama, 64 tokens, batch 256, eager:" in made
    assert "| **`sbp(keep=0.5)`** | 8.0 ms | 3.00 GiB | 0.80 | 0.75 | the GPU waits for the CPU |" in made
    assert (
        not any(text in made for text in ("again", "offload", "budget 0.4"))
        and made.count("**`sbp(keep=0.5)`**") == made.count("the GPU waits") == 1
    )
    assert made.startswith(tables.promises_table()) and "one a GPU, torch 2, 2000-01-01 to 2000-01-02;" in made


def test_rows_stand_by_time_plain_first_and_ours_last(benched):
    made = tables.bench_table("vit-b")
    shown = re.findall(r"^\| (\S+) \| .* ms", made, re.MULTILINE)
    assert shown == ["plain", "budget", "accumulation", "**`sbp(keep=0.5)`**", "**`lean`**"]
    assert "promise" not in made and "Llama" not in made and "eager:" not in made


def test_promises_stand_beside_what_was_measured(benched):
    made = tables.promises_table().splitlines()
    assert "| ViT-B/16: sbp | 0.83 | 0.800 | 0.76 | 0.750 | yes |" in made
    assert "| ViT-B/16: lean | 1.03 | 0.900 | 0.64 | 0.750 | no |" in made
    assert "| ViT-B/16: skiptokens | 0.69 |  | 0.68 |  | not measured |" in made
