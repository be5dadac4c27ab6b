"""Every example runs, and asserts what it claims."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples():
    assert len(EXAMPLES) >= 6
    assert all(len(path.read_text().splitlines()) < 80 for path in EXAMPLES)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_it_runs(path, tmp_path):
    # zoo first: it makes torchvision importable where it was built for another torch
    paths = [str(ROOT / "tests"), str(ROOT)]
    code = f"import sys, runpy; sys.path[:0] = {paths}; import zoo; runpy.run_path({str(path)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
