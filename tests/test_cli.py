"""The command line: help that teaches, one line for a mistake."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import halfback as hb
from halfback.cli import main
from halfback.methods import METHODS


def test_python_m_halfback_helps():
    done = subprocess.run([sys.executable, "-m", "halfback", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "examples:" in done.stdout
    assert all(f"halfback {command}" in done.stdout for command in ("profile", "plan", "fit", "audit", "compare"))


def test_compare_help_names_the_methods_and_the_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["compare", "--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0
    assert "sbp(keep=0.5)+recompute" in said and "out/compare" in said and "small-vit" in said
    assert all(f"\n  {name}" in said for name in METHODS)


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"halfback {hb.__version__}\n"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--methods", "sbp(kep=0.5)"], "sbp takes keep"),
        (["--model", "vit"], "model 'vit' is unknown"),
        (["--data", "none.npz"], "there is no such file"),
        (["--seeds", "0"], "seeds=0 must be at least 1"),
        (["--lr", "-1"], "lr=-1.0 must be above 0"),
        (["--device", "nowhere"], "device='nowhere' cannot be used"),
        (["--methods", "sbp(layers='blocks.9')"], "blocks.9"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(given, message, capsys, tmp_path):
    assert main(["compare", "--out", str(tmp_path), *given]) == 2
    caught = capsys.readouterr()
    assert caught.err.startswith("halfback: ") and message in caught.err and caught.err.count("\n") == 1
    assert "Traceback" not in caught.err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "--eposch", "3"], "unrecognized arguments: --eposch 3. Is --epochs meant? See halfback train --help."),
        (["train", "--wormup=2"], "unrecognized arguments: --wormup=2. Is --warmup meant? See halfback train --help."),
        (["train", "--", "x"], "unrecognized arguments: -- x. See halfback train --help."),
        (["plan", "small-vit", "--budget", "0.5", "more"], "unrecognized arguments: more. See halfback plan --help."),
        (["--nothing", "train"], "unrecognized arguments: --nothing. See halfback --help."),
    ],
)
def test_an_argument_that_a_command_does_not_know_is_told_with_what_is_near(argv, message, capsys):
    assert main(argv) == 2
    assert capsys.readouterr().err == f"halfback: {message}\n"


def test_out_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["compare", "--out", str(tmp_path / "file")]) == 2
    assert "halfback: " in capsys.readouterr().err


def test_compare_with_one_seed_says_that_it_is_one(tmp_path, capsys):
    page = tmp_path / "page.html"
    argv = ["compare", "--methods", "exact", "--seeds", "1", "--epochs", "1", "--batch", "512", "--out", str(tmp_path / "new")]
    assert main([*argv, "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert "One seed" in said and "±" not in said and said.endswith(f"{page}\n")
    result = json.loads((tmp_path / "new" / "compare.json").read_text())
    assert json.dumps(result["methods"][0]["mean"]["accuracy"]) in page.read_text()
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["compare.json", "compare.png"]
