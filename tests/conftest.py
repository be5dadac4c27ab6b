from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
import trainings
import zoo  # noqa: F401  declares what a CPU torch lacks, before anything imports torchvision

from halfback.train.loop import Training

FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --disable-sync --no-first-run".split()


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium")
    if chromium is None:
        reason = "no chromium on the path: the page was not tested in a browser"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=chromium, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A folder with few pictures, and networks for them."""
    folder = tmp_path_factory.mktemp("few")
    (x, y), (u, v) = trainings.pictures(96, 0), trainings.pictures(40, 1)
    np.savez(folder / "few.npz", x_train=x, y_train=y, x_test=u, y_test=v)
    (folder / "nets.py").write_text(trainings.NOISY)
    return folder


@pytest.fixture
def quick(monkeypatch):
    """Curves are drawn by other tests, and what is held is counted in those that ask for it."""
    monkeypatch.setattr("halfback.train.record.draw", lambda *a: None)
    monkeypatch.setattr(Training, "_count_held", lambda self: (1, ""))
