"""What a training leaves behind: whole files, and a page that can be read."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sys
import types

import matplotlib.image
import pytest

from halfback.train import record
from halfback.train.record import COLUMNS, NEEDED, Recorder, chart, draw, nice, read_rows, write_json
from halfback.train.settings import Settings

HOSTILE = "</pre><script>window.hacked=1</script><img src=x onerror=window.hacked=1>"


def row(epoch, **other):
    loss = 2.0 / epoch
    figures = {"lr": 0.1, "train_loss": loss, "test_loss": loss + 0.1, "top1": 100 - 50 / epoch, "top5": 100 - 10 / epoch, "seconds": 1.5}
    return {"epoch": epoch, "step": 10 * epoch, **figures, "images_per_s": 100.0, "peak": None, "held": 2048, **other}


def result(**other):
    figures = dict.fromkeys(NEEDED, 1.0) | {"top1": 87.5, "held": 2048, "peak": None, "methods": "exact", "report": "nothing was done"}
    return {**figures, **other}


def recorded(folder, epochs=3, settings=None, **other):
    recorder = Recorder(folder, settings or Settings())
    for epoch in range(1, epochs + 1):
        recorder.epoch(**row(epoch))
    return recorder.finish(result(**other))


# Files


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})

    def broken(*args):
        raise OSError("no room")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match=r"a.json cannot be written \(no room\). What was there stays. Free some room, or "):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1} and list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match=r"b.json cannot be written \(no room\). Free some room, or "):
        write_json(tmp_path / "b.json", {"a": 2})


def test_json_is_whole_whatever_is_in_it(tmp_path):
    data = {"a": [1.5, math.nan, None, 2], "b": "[\n 1,\n 2\n]", "c": [[1, 2], ["x, [ 1 ]"], []], "d": math.inf, "e": "é", "f": (1, 2)}
    write_json(tmp_path / "a.json", data)
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == {**data, "a": [1.5, None, None, 2], "d": None, "f": [1, 2]}
    assert '"a": [1.5, null, null, 2]' in text and "é" in text


# Rows


def test_a_row_is_on_the_disk_when_the_epoch_ends(tmp_path, monkeypatch):
    synced = []
    recorder = Recorder(tmp_path, Settings())
    monkeypatch.setattr(os, "fsync", lambda number: synced.append((tmp_path / "metrics.jsonl").read_text()))
    recorder.epoch(**row(1, test_loss=math.nan))
    assert len(synced) == 1 and json.loads(synced[0]) == row(1, test_loss=None) == recorder.rows[0]


def test_a_row_that_cannot_be_written_names_its_file(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path, Settings())

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"metrics.jsonl cannot be written \(No space left on device\). What was there stays. Free some"):
        recorder.epoch(**row(1))
    assert recorder.rows == []


def test_epochs_without_a_row_are_named(tmp_path):
    recorder = Recorder(tmp_path, Settings())
    for epoch in (2, 6):
        recorder.epoch(**row(epoch))
    told = {n: recorder.lacks(n) for n in (0, 1, 2, 5, 7)}
    assert told == {0: "", 1: "epoch 1", 2: "epoch 1", 5: "epochs 1, 3 to 5", 7: "epochs 1, 3 to 5, 7"}


def test_going_on_drops_what_is_beyond_the_checkpoint(tmp_path):
    first = Recorder(tmp_path, Settings())
    for epoch in (1, 2, 3):
        first.epoch(**row(epoch))
    again = Recorder(tmp_path, Settings(), resume_at=20)
    assert [r["epoch"] for r in again.rows] == [1, 2]
    again.epoch(**row(3, top1=1.0))
    assert read_rows(tmp_path / "metrics.jsonl") == [row(1), row(2), row(3, top1=1.0)]


@pytest.mark.parametrize("torn", ['{"epoch": 3, "st', "\0\0\0\0\n", '{"epoch": 3}', "\xff", "17\n"])
def test_a_torn_last_line_is_dropped_and_the_next_row_stands_alone(tmp_path, torn):
    first = Recorder(tmp_path, Settings())
    first.epoch(**row(1))
    first.epoch(**row(2))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn.encode("latin1"))
    again = Recorder(tmp_path, Settings(), resume_at=1000)
    assert again.rows == [row(1), row(2)]
    again.epoch(**row(3))
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [row(1), row(2), row(3)]


def test_a_whole_row_without_its_line_end_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(1)))
    again = Recorder(tmp_path, Settings(), resume_at=10)
    again.epoch(**row(2))
    assert read_rows(tmp_path / "metrics.jsonl") == [row(1), row(2)]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1, "s\n' + json.dumps(row(2)) + "\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 1 is no row of a training: .*Remove that file, and --resume goes on"):
        Recorder(tmp_path, Settings(), resume_at=100)


def test_a_new_training_has_no_old_rows(tmp_path):
    Recorder(tmp_path, Settings()).epoch(**row(1))
    assert Recorder(tmp_path, Settings()).rows == [] and (tmp_path / "metrics.jsonl").read_text() == ""


# The end


def test_result_has_figures_curves_and_surroundings(tmp_path, monkeypatch):
    monkeypatch.setenv("HALFBACK_COMMIT", "abc123")
    given = recorded(tmp_path, settings=Settings(seed=4, method="lean"))
    assert given == json.loads((tmp_path / "result.json").read_text()) | {"settings": given["settings"]}
    assert Settings.from_json(json.loads((tmp_path / "result.json").read_text())["settings"]) == Settings(seed=4, method="lean")
    assert given["curves"]["epoch"] == [1, 2, 3] and given["curves"]["top1"] == [row(e)["top1"] for e in (1, 2, 3)]
    assert (given["commit"], given["device"], given["seed"], given["done"]) == ("abc123", "cpu", 4, True)
    assert {"halfback", "torch", "python"} <= set(given["versions"]) and given["date"] and given["device_name"]


def test_commit_is_the_repositorys_unless_told(tmp_path, monkeypatch):
    monkeypatch.delenv("HALFBACK_COMMIT", raising=False)
    monkeypatch.setattr(record, "surroundings", lambda device: {"commit": "own", "device_name": "x", "versions": {}, "date": "d"})
    assert recorded(tmp_path)["commit"] == "own"


def test_a_result_that_lacks_figures_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"the result lacks top5, peak. Needed: top1"):
        Recorder(tmp_path, Settings()).finish({k: v for k, v in result().items() if k not in ("top5", "peak")})
    assert not (tmp_path / "result.json").exists()


def test_summary_is_one_line(tmp_path):
    folder = tmp_path / "exact, one"
    recorded(folder, settings=Settings(method="sbp(keep=0.5, attention='qkv')", seed=2), top1=91.25)
    with (folder / "summary.csv").open(newline="") as file:
        lines = list(csv.reader(file))
    assert len(lines) == 2 and tuple(lines[0]) == COLUMNS
    found = dict(zip(*lines, strict=True))
    assert (found["name"], found["method"], found["seed"]) == ("exact, one", "sbp(keep=0.5, attention='qkv')", "2")
    assert (found["top1"], found["held"], found["peak"]) == ("91.25", "2048", "")


def coloured(path):
    """Shares of pixels that are blue, and orange: the first and the second curve."""
    pixels = matplotlib.image.imread(path)[..., :3]
    red, green, blue = pixels[..., 0], pixels[..., 1], pixels[..., 2]
    return ((blue > red + 0.3).mean(), ((red > blue + 0.5) & (green > 0.3)).mean())


def test_curves_are_drawn(tmp_path):
    recorded(tmp_path, epochs=8)
    assert matplotlib.image.imread(tmp_path / "curves.png").shape[:2] == (630, 1500)
    first, second = coloured(tmp_path / "curves.png")
    draw([], tmp_path / "none.png", "nothing")
    assert first > 0.001 and second > 0.001 and coloured(tmp_path / "none.png") == (0, 0)


@pytest.mark.parametrize(
    "rows", [[], [row(1)], [row(1, top1=None, top5=None)], [{"epoch": 1, "step": 1}], [row(1), row(2, test_loss=None)]]
)
def test_what_is_not_known_is_no_crash(tmp_path, rows):
    draw(rows, tmp_path / "curves.png", "a title")
    recorder = Recorder(tmp_path, Settings())
    for r in rows:
        recorder.epoch(**r)
    recorder.finish(result(**dict.fromkeys(record.FIGURES)))
    assert "<h1>" in (tmp_path / "report.html").read_text()


def test_a_gap_is_no_line_and_one_value_is_a_dot():
    rows = [row(e, test_loss=None if e == 3 else 1.0, train_loss=5.0 if e == 3 else None) for e in range(1, 6)]
    drawn = chart(rows, "loss", (("train_loss", "training"), ("test_loss", "test")))
    assert drawn.count("<circle") == 1 and len(re.findall('<polyline class="curve c1"', drawn)) == 2
    assert "nan" not in drawn and "not known" in chart([], "loss", (("train_loss", "training"),))


def test_a_line_goes_on_over_epochs_that_were_not_tested():
    tested = {e: row(e) if e % 2 else {k: v for k, v in row(e).items() if k not in ("test_loss", "top1", "top5")} for e in range(1, 6)}
    drawn = chart(list(tested.values()), "accuracy, %", (("top1", "top-1"),))
    assert drawn.count("<polyline") == 1 and "<circle" not in drawn
    assert len(re.search(r'points="([^"]*)"', drawn)[1].split()) == 3


@pytest.mark.parametrize(("low", "high"), [(0.1, 2.3), (90, 90), (0, 0), (1e-15, 3e-15), (-3, 1e9), (99.91, 99.93)])
def test_ticks_are_few_and_enclose(low, high):
    ticks = nice(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 2 <= len(ticks) <= 8 and sorted(set(ticks)) == ticks


def test_a_missing_drawing_library_is_told_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install \"halfback\[train\]\""):
        Recorder(tmp_path, Settings())


# TensorBoard


def test_tensorboard_that_is_missing_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard, or leave it out"):
        Recorder(tmp_path, Settings(), tensorboard=True)


def test_tensorboard_gets_every_number(tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, value, step))

        def flush(self): ...

        close = flush

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    recorder = Recorder(tmp_path, Settings(), resume_at=10, tensorboard=True)
    recorder.epoch(epoch=2, step=20, top1=3.5, peak=None, monitor={"cosine": 0.9, "layer": "a"})
    assert written == [(str(tmp_path / "tensorboard"), 11), ("top1", 3.5, 20), ("monitor/cosine", 0.9, 20)]


# The page in a browser


@pytest.fixture
def show(browser):
    """Opens a page. Messages, errors and requests are failures at the end."""
    contexts, wrong = [], []

    def opened(path, **options):
        context = browser.new_context(offline=True, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda m: wrong.append(f"{m.type}: {m.text}"))
        tab.on("pageerror", lambda e: wrong.append(str(e)))
        tab.on("requestfailed", lambda r: wrong.append(f"failed: {r.url}"))
        tab.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else wrong.append(f"asked for {r.url}"))
        tab.goto(path.as_uri())
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 360), ("light", 1200), ("dark", 1200)])
def test_the_page_can_be_read_in_both_colours_and_on_a_phone(tmp_path, show, scheme, width):
    settings = Settings(method="sbp(keep=0.5, layers='blocks.1 blocks.2 blocks.3 blocks.4', attention='qkv')+lean", lr=0.05, epochs=12)
    recorded(tmp_path, epochs=12, settings=settings, report="a long line of the report " * 12)
    tab = show(tmp_path / "report.html", viewport={"width": width, "height": 740}, color_scheme=scheme)
    for summary in tab.locator("summary").all():
        summary.click()
    assert tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    ink, paper = tab.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, paper)]
    assert (light[0] < light[1]) == (scheme == "light")
    assert tab.locator("polyline.curve").count() == 4 and tab.locator("table.numbers tr").count() == 13
    box = tab.locator("svg text").first.bounding_box()
    assert box["height"] >= 9  # legible where it is scaled down
    assert tab.get_by_role("row", name="lr 0.05", exact=True).count() == 1
    assert tab.locator("dl").inner_text().split("\n")[1] == "87.5 %"


def test_texts_are_never_markup(tmp_path, show):
    recorded(tmp_path, settings=Settings(model=HOSTILE), report=HOSTILE, methods=HOSTILE)
    tab = show(tmp_path / "report.html")
    assert tab.evaluate("window.hacked") is None and tab.locator("img, script").count() == 0
    assert tab.locator("pre").all_inner_texts() == [HOSTILE, HOSTILE] and HOSTILE in tab.title()


def test_the_page_names_no_address(tmp_path):
    recorded(tmp_path)
    assert not re.findall(r"\w+://", (tmp_path / "report.html").read_text())
