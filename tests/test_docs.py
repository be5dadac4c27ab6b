"""The documentation: what is made is what is committed, its code runs, and the site builds, whole, and works without network."""

from __future__ import annotations

import contextlib
import functools
import http.server
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from halfback import cli

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"(?:<!-- not run: ([^\n]+) -->\n)?```(python|sh)\n(.*?)```", re.DOTALL)
WHERE = {"light": {}, "dark": {"color_scheme": "dark"}, "phone": {"viewport": {"width": 390, "height": 844}}}
spec = importlib.util.spec_from_file_location("make", ROOT / "docs" / "make.py")
make = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make)


def test_what_is_made_is_what_is_committed():
    assert not [p.name for p, text in make.made().items() if p.read_text() != text], "run python docs/make.py"


def test_a_part_that_nobody_makes_is_an_error():
    place = "so <!-- time: bench; vit-b; plain -->{}<!-- /time --> it is"
    assert make.page(place.format("5")) == place.format("1.00")
    for text in ("<!-- nothing -->\n<!-- /nothing -->", "<!-- models -->", "<!-- /models -->"):
        with pytest.raises(ValueError, match=r"Parts that nobody makes, or that do not begin or end: (nothing|models)"):
            make.page(text)


def test_figures_of_a_benchmark_are_ratios_to_plain_training_of_the_same_kind_and_run(tmp_path, monkeypatch):
    monkeypatch.setattr(make.tables, "RESULTS", tmp_path)
    plain, lean = ({"model": "a", "method": f"{m}, eager", "step_ms": t, "peak_gib": p} for m, t, p in (("plain", 10, 4), ("lean", 12, 1)))
    rows = [plain, {**plain, "method": "plain", "step_ms": 5}, {**lean, "host_ms": 6, "compile_s": 3.4}]
    (tmp_path / "old.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = "a", "lean, eager"
    assert (make.time("old", *asked), make.memory("old", *asked), make.host("old", *asked)) == ("1.20", "0.25", "0.50")
    assert make.compiling("old", *asked) == "3 s"
    rows = [plain, {**lean, "time_ratio": 1.5, "peak_ratio": 0.75}]  # of another run than plain's last
    (tmp_path / "bench.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert (make.time("bench", *asked), make.memory("bench", *asked)) == ("1.50", "0.75")


def test_what_came_of_a_method_on_other_peoples_models_is_counted():
    fine, wrong = {"forward": 1e-7, "lost": [], "held": 0.5}, {"forward": 0.0, "lost": ["head.weight"], "held": 0.9}
    told = [
        (fine, "fine"),
        (wrong, "wrong"),
        ({**fine, "forward": 0.01}, "wrong"),
        ({**fine, "forward": float("nan")}, "wrong"),
        ({**fine, "gradients": 0.01}, "wrong"),
        ({**fine, "uncut": True}, "uncut"),
        ({"error": "ValueError: apply_(): no blocks found in A: ..."}, "none"),
        ({"error": "RuntimeError: 1.0 calls a scripted function"}, "error"),
    ]
    assert [make.tables.verdict(r) for r, _ in told] == [v for _, v in told]
    where = {"timm": "1.0", "torch": "2.13", "date": "2026-11-19"}
    rows = [{"model": f"timm:{i}", "methods": {"lean": r}, **where} for i, (r, _) in enumerate(told)]
    text = make.tables.third_party_table([*rows, {"model": "timm:x", "not_run": "no", **where}])
    assert "| `lean`, timm | 8 | 4 | 1 | 1 | 1 | 1 | 0.50 |" in text and "transformers" not in text.partition("On a CPU")[0]
    assert text.endswith("On a CPU, 2026-11-19; timm 1.0, torch 2.13; 1 more did not run by themselves, as they were asked.")


def test_what_a_benchmark_has_not_measured_is_said_to_be_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(make.tables, "RESULTS", tmp_path)
    assert make.measured("vit-b", "offload") == "We have not measured it yet."
    row = {"part": "step", "device": "cuda", "model": "vit-b", "about": "ViT-B/16", "method": "offload"}
    rows = [{**row, "time_ratio": 2.0, "peak_ratio": 0.5}, {**row, "time_ratio": 1.5, "peak_ratio": 0.25}, {**row, "failed": "no room"}]
    (tmp_path / "bench.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert make.measured("vit-b", "offload") == "On ViT-B/16 it took 0.25 of the memory and 1.50 of the time here."
    assert make.measured("vit-b", "lora 16") == "We have not measured it yet."


@pytest.mark.parametrize("name", ["which", "caveats"])
def test_what_is_said_not_to_be_measured_is_not(name):
    """Where it has a result, say on the page what came out."""
    said = "is not measured on ImageNet" in (ROOT / "docs" / f"{name}.md").read_text()
    assert said == ("`imagenet`" in make.not_run())


def test_every_table_of_the_results_has_a_place():
    pages = "".join(p.read_text() for p in [ROOT / "README.md", *PAGES])
    assert not [name for name in make.tables.TABLES if f"<!-- {name} -->" not in pages]


def test_the_reference_has_every_name_and_option():
    text = (ROOT / "docs" / "reference.md").read_text()
    assert not [name for name in make.hb.__all__ if f"\n### {name}\n" not in text]
    methods = (ROOT / "docs" / "methods.md").read_text()
    assert not re.findall(r"^\| `\w+` \| `.*` \|  \|$", methods, re.MULTILINE), "an option without a word in its method's docstring"


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / "README.md").read_text())
    assert links and not [link for link in links if not (ROOT / link).exists()]


# Code


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """(why it is not run, language, code) of what is written by hand; examples are run by their own tests."""
    return BLOCK.findall(re.sub(r"<!-- examples -->.*<!-- /examples -->", "", page.read_text(), flags=re.DOTALL))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.stem)
def test_code_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    space: dict = {}
    for why, language, code in blocks(page):
        if why:
            continue
        if language == "python":
            exec(compile(code, page.name, "exec"), space)
            continue
        for words in [shlex.split(line, comments=True) for line in code.splitlines()]:
            assert words[0] == "halfback" and cli.main(words[1:]) == 0, f"{words}: {capsys.readouterr().err}"


def test_few_blocks_are_not_run():
    assert len([why for page in PAGES for why, *_ in blocks(page) if why]) <= 2


# The site


def build(folder: Path, to: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "mkdocs", "build", "-d", str(to)], cwd=folder, capture_output=True, text=True)


@pytest.fixture(scope="module")
def mkdocs():
    if importlib.util.find_spec("mkdocs") is None:
        reason = "no mkdocs: the site was not built; pip install -e .[docs]"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


@pytest.fixture(scope="module")
def site(mkdocs, tmp_path_factory):
    to = tmp_path_factory.mktemp("site")
    began = time.monotonic()
    done = build(ROOT, to)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 20
    return to


@pytest.mark.parametrize("wrong", ["[x](nowhere.md)", "[x](which.md#nowhere)", "![x](nowhere.svg)"])
def test_a_broken_link_is_an_error(mkdocs, tmp_path, wrong):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "experiments", tmp_path / "experiments", ignore=shutil.ignore_patterns("runs", "*.json"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with open(tmp_path / "docs" / "index.md", "a") as page:
        page.write(wrong)
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0 and "nowhere" in done.stderr


@pytest.mark.parametrize("where", WHERE)
def test_pages_work_as_files(site, browser, where):
    wrong = []
    context = browser.new_context(offline=True, **WHERE[where])
    tab = context.new_page()
    tab.on("console", lambda m: wrong.append(f"{m.type}: {m.text}"))
    tab.on("pageerror", lambda e: wrong.append(str(e)))
    # an icon that is still being read when the next page is opened is given up, which is no failure
    tab.on("requestfailed", lambda r: None if r.failure == "net::ERR_ABORTED" else wrong.append(f"failed: {r.url}, {r.failure}"))
    tab.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else wrong.append(f"asked for {r.url}"))
    for page in PAGES:
        tab.goto((site / f"{page.stem}.html").as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{page.stem} is too wide"
        assert tab.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)"), f"{page.stem} lacks a picture"
        assert tab.evaluate("!document.body.innerHTML.includes('<!--')") and "](" not in tab.inner_text("main")
    context.close()
    assert wrong == []


def test_the_search_finds(site, browser):
    from playwright.sync_api import TimeoutError

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tab = browser.new_page()
        wrong = []
        tab.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
        tab.on("pageerror", lambda e: wrong.append(str(e)))
        with tab.expect_console_message(lambda m: "ready" in m.text):
            tab.goto(f"http://127.0.0.1:{server.server_port}/index.html")
        query, found = tab.locator("#mkdocs-search-query"), tab.locator("#mkdocs-search-results a[href*=caveats]").first
        for _ in range(20):  # the index is ready before the field listens, and what is typed in between is lost
            query.fill("")
            query.press_sequentially("BatchNorm")
            with contextlib.suppress(TimeoutError):
                found.wait_for(timeout=1500)
                break
        assert found.is_visible(), (wrong, tab.inner_html("#mkdocs-search-results"))
        tab.close()
        server.shutdown()
    assert wrong == []


def test_the_headline_is_of_one_setting_and_says_what_is_not_reached():
    spec = importlib.util.spec_from_file_location("headline", ROOT / "experiments" / "headline.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    top1 = {"mean": -0.2, "interval": [-0.6, 0.2], "seeds": [0, 1], "clear": False}
    arm = {"name": "a", "method": "sbp(keep=0.5)", "group": module.GROUP, "mean": {"top1": 66.0}, "against": {"top1": top1}}
    row = {"part": "step", "model": module.MODEL, "compiled": True, "device": "cuda", "time_ratio": 0.9, "peak_ratio": 0.4}
    row |= dict.fromkeys(("batch", "size", "step_ms", "peak_gib"), 0) | dict.fromkeys(("gpu", "torch", "commit", "date"), "-")
    row |= {"ours": True, "method": "a row", "note": "", "host_ms": 1}
    others = [{**row, "text": "sbp(keep=0.25)"}, {**row, "text": "sbp(keep=0.5)", "compiled": False}]
    with pytest.raises(ValueError, match="no row of compiled arms"):
        module.headline({"base": {"batch": 16}, "arms": [arm]}, others)
    found = module.headline({"base": {"batch": 16}, "arms": [arm]}, [{**row, "text": "sbp(keep=0.5)"}, *others])
    assert found["reached"] == {"top1_difference": True, "peak_ratio": False, "time_ratio": True}
    slower = [{**row, "text": "lean", "time_ratio": 1.5, "peak_ratio": 0.3}, {**row, "text": "sbp", "time_ratio": 1.0, "peak_ratio": 0.35}]
    arms = [arm, {**arm, "group": "eager", "method": "sbp"}, {**arm, "method": "lean"}]
    best = module.headline({"base": {"batch": 16}, "arms": arms}, [{**row, "text": "sbp(keep=0.5)"}, *slower])
    assert best["method"] == "sbp(keep=0.5)", "of those that reach two figures it is the fastest; an eager arm is none"
    arms[1]["group"] = module.GROUP
    assert module.headline({"base": {"batch": 16}, "arms": arms}, [{**row, "text": "sbp(keep=0.5)"}, *slower])["method"] == "sbp"
    peer = {**row, "text": "checkpoint", "method": "checkpointing", "ours": False, "time_ratio": 1.2, "peak_ratio": 0.2}
    said = module.headline({"base": {"batch": 16}, "arms": arms}, [{**row, "text": "sbp(keep=0.5)"}, *slower, peer])["text"]
    shown = [line.split(" | ")[0] for line in said.splitlines() if line.startswith("| ")][2:]
    assert "`sbp` reaches all three" in said and shown == ["| checkpointing", "| `sbp(keep=0.5)`", "| **`sbp`**", "| `lean`"]
    beaten = [{**row, "text": "sbp(keep=0.5)", "time_ratio": 1.1}, *slower]
    assert "`sbp(keep=0.5)`" not in module.headline({"base": {"batch": 16}, "arms": arms}, beaten)["text"]
    with pytest.raises(ValueError, match="two seeds"):
        module.headline({"base": {"batch": 16}, "arms": [{**arm, "against": {"top1": {**top1, "seeds": [0]}}}]}, [row])
