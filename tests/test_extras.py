"""Without any extra the core works, and what is missing is named in one line, with the command that installs it."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

import halfback as hb
from halfback.cli import main
from halfback.extras import OF
from halfback.models import small_vit

ROOT = Path(__file__).parent.parent
MODULES = {"scikit-learn": "sklearn", "pillow": "PIL"}  # imported by another name
OTHERS = ("timm", "torchvision", "tensorboard", "pytorch_lightning")


def block(monkeypatch, *names: str) -> None:
    for name in names:
        for loaded in [m for m in sys.modules if m.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def bare(monkeypatch):
    block(monkeypatch, *(MODULES.get(p, p) for p in OF), *OTHERS)


def test_extras_are_those_of_the_package():
    text = (ROOT / "pyproject.toml").read_text()
    for package, extra in OF.items():
        listed = re.search(rf"^{extra} = \[(.*)\]$", text, re.MULTILINE)
        assert listed and f'"{package}"' in listed[1]


def batch():
    return torch.zeros(2, 1, 8, 8), torch.tensor([1, 2])


@pytest.mark.parametrize("method", ["sbp", "dropit(keep=0.2, activation_bits=4)", "lean", "recompute", "skiptokens"])
def test_the_core_works_without_any(bare, method):
    model = small_vit()
    report = hb.apply_(model, *hb.parse(method))
    hb.profile(model, batch())
    hb.audit(model, batch(), steps=1)
    model(batch()[0]).sum().backward()
    assert str(report) and report.table()
    hb.remove_(model)


HINTS = [
    ("train", "tqdm", 'pip install "halfback[train]"'),
    ("train", "safetensors", 'pip install "halfback[train]"'),
    ("train", "matplotlib", 'pip install "halfback[train]"'),
    ("train", "sklearn", 'pip install "halfback[train]"'),
    ("train --data folder --root .", "PIL", 'pip install "halfback[train]"'),
    ("train --budget 0.5", "scipy", 'pip install "halfback[plan]"'),
    ("train --tensorboard", "tensorboard", "pip install tensorboard"),
    ("train --model timm:vit_tiny_patch16_224", "timm", "pip install timm"),
    ("train --model hf:vit", "transformers", 'pip install "halfback[hf]"'),
    ("reproduce NAME", "matplotlib", 'pip install "halfback[train]"'),
    ("compare", "tqdm", 'pip install "halfback[train]"'),
    ("compare", "matplotlib", 'pip install "halfback[train]"'),
    ("compare", "sklearn", 'pip install "halfback[train]"'),
    ("plan small-vit --budget 0.5", "scipy", 'pip install "halfback[plan]"'),
    ("fit small-vit --gpu 1GiB", "scipy", 'pip install "halfback[plan]"'),
    ("profile hf:gpt2", "transformers", 'pip install "halfback[hf]"'),
    ("profile timm:resnet18", "timm", "pip install timm"),
    ("profile torchvision:resnet18", "torchvision", "pip install torchvision"),
    ("audit small-vit --method sbp --data digits", "sklearn", 'pip install "halfback[train]"'),
]


@pytest.mark.parametrize(("command", "module", "hint"), HINTS, ids=[f"{c.split()[0]}-{m}" for c, m, _ in HINTS])
def test_a_command_names_what_is_missing(monkeypatch, tmp_path, capsys, command, module, hint):
    monkeypatch.chdir(tmp_path)
    block(monkeypatch, module)
    assert main(command.split()) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("halfback: ") and hint in said


def test_pages_need_nothing(bare, tmp_path):
    assert main(["profile", "small-vit", "--html", str(tmp_path / "page.html"), "--json", str(tmp_path / "figures.json")]) == 0
    assert (tmp_path / "page.html").stat().st_size and (tmp_path / "figures.json").stat().st_size


@pytest.mark.parametrize("of", ["huggingface", "lightning"])
def test_an_integration_names_what_it_is_for(bare, monkeypatch, of):
    monkeypatch.delitem(sys.modules, f"halfback.integrations.{of}", raising=False)
    with pytest.raises(ImportError, match=r'pip install "halfback\[(hf|lightning)\]"'):
        importlib.import_module(f"halfback.integrations.{of}")
