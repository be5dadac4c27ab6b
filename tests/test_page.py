"""The page, in a real browser: what it shows is what the content says."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from halfback.page import as_json, packed, page, write_page
from halfback.report import readable

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "compare_digits.json"


# Contents


def storage(module, operation, *shape, made=None, also=(), dtype="bfloat16"):
    saved = [{"module": module, "operation": operation}, *({"module": m, "operation": o} for m, o in also)]
    made_by = {"module": made or module, "operation": "add" if made is None else operation}
    return {
        "bytes": math.prod(shape) * (2 if dtype == "bfloat16" else 4),
        "shape": list(shape),
        "dtype": dtype,
        "made_by": made_by,
        "saved_by": saved,
    }


def block(at, shape, lean):
    """What one block of a ViT holds, as torchvision names its modules."""
    n, t, w = shape
    attention, last = f"{at}.self_attention", f"{at}.mlp.3"
    found = [storage(f"{at}.ln_1", "layer_norm", n, t, w), storage(f"{at}.ln_1", "layer_norm", n, t, dtype="float32")]
    found += [storage(attention, "scaled_dot_product_attention", n, 12, t, w // 12) for _ in "qkv"]
    found += [storage(attention, "scaled_dot_product_attention", n, t, w, also=[(f"{attention}.out_proj", "linear")])]
    found += [storage(f"{at}.ln_2", "layer_norm", n, t, w), storage(f"{at}.mlp.1", "gelu", n, t, 4 * w, made=f"{at}.mlp.0")]
    if lean:
        return found
    return [*found, storage(attention, "linear", n, t, w), storage(f"{at}.mlp.0", "linear", n, t, w), storage(last, "linear", n, t, 4 * w)]


def vit(name, blocks=12, shape=(256, 197, 768), lean=False, recompute=0):
    n, t, w = shape
    names = [f"encoder.layers.encoder_layer_{i}" for i in range(blocks)]
    held = [storage("conv_proj", "conv2d", n, 3, 224, 224)]
    for i, at in enumerate(names):
        held += [storage(at, "checkpoint", n, t, w)] if i < recompute else block(at, shape, lean)
    held += [storage("encoder.ln", "layer_norm", n, t, w), storage("heads.head", "linear", n, w), storage("", "cross_entropy", n, 1000)]
    return profile(name, held)


def profile(name, storages):
    weights, held = 2 * 86_567_656, sum(s["bytes"] for s in storages)
    peak = held + 600 * 2**20
    return {
        "name": name,
        "model": "VisionTransformer",
        "device": "cuda",
        "counted": "fake",
        "held": held,
        "peak": peak,
        "parameters": weights,
        "buffers": 0,
        "gradients": weights,
        "optimizer": 2 * weights,
        "optimizer_name": "AdamW",
        "inputs": 256 * 3 * 224 * 224 * 2,
        "total": peak + 4 * weights + 256 * 3 * 224 * 224 * 2,
        "measured_peak": None,
        "peak_at": {"phase": "backward", "module": "encoder.layers.encoder_layer_11.mlp.1", "operation": "gelu_backward"},
        "storages": storages,
    }


def pareto():
    gib = 2**30
    exact = [(9.4, 1.04, "lean"), (8.1, 1.08, "lean + recompute of 3 blocks"), (6.5, 1.13, "lean + recompute of 6 blocks")]
    exact += [(4.8, 1.19, "lean + recompute of 9 blocks"), (2.3, 1.28, "recompute of all blocks")]
    near = [(11.0, 0.83, "sbp"), (7.4, 0.95, "sbp + lean"), (7.34, 1.07, "dropit in 4 bits"), (1.8, 0.98, "sbp + recompute of all blocks")]
    points = [
        {"budget": math.ceil(p) * gib, "peak": int(p * gib), "time": time, "exact": kind, "methods": label.replace(" ", ""), "label": label}
        for kind, group in ((True, exact), (False, near))
        for p, time, label in group
    ]
    return {"unit": "bytes", "plain_peak": int(14.4 * gib), "chosen": 2, "points": points}


def audit(blocks=12):
    def row(name, i):
        wave = 0.5 + 0.5 * math.sin(i)
        found = {"layer": name, "parameters": 590_592, "norm": 0.3 + wave, "cosine": 0.98 - 0.3 * wave, "scale": 0.7 + 0.35 * wave}
        return {**found, "bias2": 0.02 + 0.2 * wave, "variance": 0.1 + 0.3 * (1 - wave), "noise": None if i % 9 == 8 else 0.8 * wave}

    parts = ("ln_1", "self_attention", "self_attention.out_proj", "ln_2", "mlp.0", "mlp.3")
    names = [f"encoder.layers.encoder_layer_{i}.{part}" for i in range(blocks) for part in parts]
    layers = [row(name, i) for i, name in enumerate(names)]
    return {"model": "ViT", "methods": "sbp(keep=0.5)", "steps": 8, "batches": 4, "layers": layers, "all": row("all", 3)}


def full(**others):
    made = {"date": "2026-11-15", "device": "NVIDIA H200", "versions": {"torch": "2.13.0", "halfback": "0.1.0"}}
    profiles = [vit("plain"), vit("lean", lean=True), vit("lean + recompute of 7 blocks", lean=True, recompute=7)]
    content = {"title": "ViT-B/16, batch 256", "subtitle": "224 pixels, bf16, one training step", "made": made, "profiles": profiles}
    compare = json.loads(RESULTS.read_text())["methods"]
    return {**content, "pareto": pareto(), "audit": audit(), "compare": compare, **others}


def total(profile, under=""):
    """What the modules under a path hold: a storage is the first saver's, else its maker's."""
    found = 0
    for s in profile["storages"]:
        at = (s["saved_by"] or [s["made_by"]])[0]["module"]
        found += s["bytes"] * (not under or at == under or at.startswith(under + "."))
    return found


# The page as text


def test_a_title_is_needed():
    with pytest.raises(ValueError, match=r"page\(\): content needs a title, a text; found None. Parts: title, subtitle"):
        page({"profiles": []})


def test_a_part_that_is_not_known_is_an_error():
    with pytest.raises(ValueError, match=r"content has 'profile', which the page does not know. Parts: title"):
        page({"title": "x", "profile": []})


def test_json_has_no_markup_and_no_numbers_that_json_lacks():
    text = as_json({"a": "</script><!-- & é", "b": [math.nan, math.inf, (-math.inf, 1.5)]})
    assert not re.search("[<>&]", text)
    assert json.loads(text) == {"a": "</script><!-- & é", "b": [None, None, [None, 1.5]]}


def test_a_title_is_escaped_and_no_placeholder():
    text = page({"title": "<b>{{content}} & \\1"})
    assert "<title>&lt;b&gt;{{content}} &amp; \\1</title>" in text


def test_equal_storages_become_one_row_and_bytes_stay():
    given = vit("plain")
    rows = packed({"title": "x", "profiles": [given]})["profiles"][0]["storages"]
    assert len(rows) < len(given["storages"]) and sum(n * size for n, size, *_ in rows) == given["held"]
    assert len(given["storages"][0]) == 5  # what was given is not changed


def test_three_profiles_of_a_large_vit_are_below_a_megabyte(tmp_path):
    shape = (64, 197, 1024)
    profiles = [vit("plain", 24, shape), vit("lean", 24, shape, lean=True), vit("some", 24, shape, recompute=12)]
    for p in profiles:  # as large as a profile gets in which no two storages are equal
        p["storages"] = [{**s, "bytes": s["bytes"] + 2 * i} for i, s in enumerate(2 * p["storages"])]
    assert len(profiles[0]["storages"]) > 500
    write_page(tmp_path / "page.html", full(profiles=profiles, audit=audit(24)))
    assert (tmp_path / "page.html").stat().st_size < 1_000_000


def test_the_template_names_no_other_address():
    text = page({"title": "x"})
    assert set(re.findall(r"\w+://[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}


# The page in a browser


@pytest.fixture
def show(browser, tmp_path):
    """A function of (content, options of the browser) that opens a page. Errors and requests at the end are failures."""
    contexts, wrong = [], []

    def opened(content, **options):
        write_page(tmp_path / "page.html", content)
        context = browser.new_context(
            **{"viewport": {"width": 1200, "height": 900}, "reduced_motion": "reduce", "offline": True, **options}
        )
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(5000)
        tab.on("console", lambda m: wrong.append(f"{m.type}: {m.text}"))
        tab.on("pageerror", lambda e: wrong.append(str(e)))
        tab.on("requestfailed", lambda r: wrong.append(f"failed: {r.url}"))
        tab.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else wrong.append(f"asked for {r.url}"))
        tab.goto((tmp_path / "page.html").as_uri())
        tab.wait_for_selector("h1")
        return tab

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


def cell(tab, path):
    return tab.locator(f'.cell[data-path="{path}"]')


def hover(tab, target):
    target.scroll_into_view_if_needed()
    tab.wait_for_timeout(50)  # a scroll of the page hides the tooltip
    target.hover()
    return tab.locator("#tip").inner_text()


def pick(tab, profile):
    tab.get_by_role("group", name="Which profile is drawn").get_by_role("button", name=profile["name"], exact=True).click()


def overflow(tab):
    return tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def column(tab, at, index):
    return [row.locator("th, td").nth(index).inner_text() for row in tab.locator(f"{at} tbody tr").all()]


def test_all_sections_are_drawn(show):
    content = full()
    tab = show(content)
    titles = ["What is held, by module", "Memory against time", "The gradient, layer by layer", "Trainings compared"]
    assert tab.locator("h2").all_inner_texts() == titles
    assert tab.locator(".cell").count() > 60
    assert tab.locator("#pareto .point").count() == len(content["pareto"]["points"]) + 1
    assert tab.locator("#audit .layer").count() == len(content["audit"]["layers"]) + 1
    assert tab.locator("#compare .point").count() == tab.locator("#compare tbody tr").count() == len(content["compare"])
    assert tab.locator("footer").inner_text() == "2026-11-15 · NVIDIA H200 · torch 2.13.0 · halfback 0.1.0"


def test_tiles_and_bars_tell_the_profiles_figures(show):
    content = full()
    content["profiles"][1]["measured_peak"] = 11 * 2**30
    tab = show(content)
    wanted = [readable(p[key]) for key in ("held", "peak", "total") for p in content["profiles"]]
    assert tab.locator(".tile .size").all_inner_texts() == wanted
    assert tab.locator(".bar .sum").all_inner_texts() == wanted[6:]
    said = hover(tab, tab.locator(".bar").nth(1))
    assert all(
        readable(content["profiles"][1][key]) in said for key in ("peak", "gradients", "optimizer", "inputs", "total", "measured_peak")
    )


def test_sizes_read_as_in_the_reports(show):
    tab, sizes = show({"title": "x"}), [0, 1023, 1024, 1280, 5 * 2**18, 2**20 - 1, 9 * 2**27, 11 * 2**27, 3 * 2**40]
    assert tab.evaluate("sizes => sizes.map(readable)", sizes) == [readable(size) for size in sizes]


def test_the_tooltip_has_bytes_share_and_who_holds_what(show):
    content = full()
    tab, path, plain = show(content), "encoder.layers.encoder_layer_3.self_attention", content["profiles"][0]
    said = hover(tab, cell(tab, path))
    held = total(plain, path)
    assert f"{path}\n{readable(held)}, {100 * held / plain['held']:.1f} % of what is held" in said
    one = 256 * 197 * 768 * 2
    assert f"256×12×197×64 bfloat16, 3 × {readable(one)} = {readable(3 * one)}" in said
    assert f"shared with linear in {path}.out_proj" in said


def test_another_profile_shows_its_own_figures_on_the_same_scale(show):
    content = full()
    tab = show(content)
    before = cell(tab, "").bounding_box()["height"]
    for p in content["profiles"]:
        pick(tab, p)
        assert tab.locator("#shown").inner_text().startswith(f"{p['name']}: {readable(p['held'])} held")
        for path in ("encoder.layers.encoder_layer_7", "encoder.layers.encoder_layer_11.mlp"):
            assert f"{path}, {readable(total(p, path))}, " in cell(tab, path).get_attribute("aria-label")
        height = cell(tab, "").bounding_box()["height"]
        assert height / before == pytest.approx(p["held"] / content["profiles"][0]["held"], abs=0.01)
    assert f"plain: {readable(total(content['profiles'][0], path))}, −56 %" in hover(tab, cell(tab, path))


def test_zoom_in_and_back_by_click_and_by_keyboard(show):
    content = full()
    tab, path, plain = show(content), "encoder.layers.encoder_layer_3", content["profiles"][0]
    cell(tab, path).click()
    assert f"{readable(total(plain, path))} held in {path}" in tab.locator("#shown").inner_text()
    assert cell(tab, "encoder.layers.encoder_layer_4").count() == 0
    assert tab.locator(".crumbs li").all_inner_texts() == ["VisionTransformer", "encoder", "layers", "encoder_layer_3"]
    tab.locator(".crumbs button").first.click()
    assert cell(tab, "encoder.layers.encoder_layer_4").count() == 1
    cell(tab, "").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown"):
        tab.keyboard.press(key)
    assert tab.evaluate("document.activeElement.dataset.path") == "encoder.layers.encoder_layer_2"
    assert readable(total(plain, "encoder.layers.encoder_layer_2")) in tab.locator("#tip").inner_text()
    tab.keyboard.press("Enter")
    assert "held in encoder.layers.encoder_layer_2," in tab.locator("#shown").inner_text()
    tab.keyboard.press("Escape")
    assert "held in encoder.layers," in tab.locator("#shown").inner_text()


def test_the_first_tap_tells_and_the_second_zooms(show):
    tab = show(full(), has_touch=True, viewport={"width": 360, "height": 740})
    target = cell(tab, "encoder.layers.encoder_layer_3")
    target.tap()
    assert "encoder.layers.encoder_layer_3" in tab.locator("#tip").inner_text() and "held in" not in tab.locator("#shown").inner_text()
    target.tap()
    assert "held in encoder.layers.encoder_layer_3" in tab.locator("#shown").inner_text()


def test_the_table_of_modules_compares_and_sorts(show):
    content = full()
    plain, lean, least = content["profiles"]
    tab = show(content)
    tab.locator("#depth").select_option("1")
    names = column(tab, "#modules", 0)
    assert names == ["encoder", "conv_proj", "VisionTransformer", "heads"]
    assert column(tab, "#modules", 1)[0] == readable(total(plain, "encoder"))
    assert column(tab, "#modules", 2)[0] == readable(total(lean, "encoder"))
    tab.get_by_role("button", name="Module", exact=True).click()
    assert column(tab, "#modules", 0) == sorted(names, key=str.lower)
    pick(tab, least)
    assert column(tab, "#modules", 0) == sorted(names, key=str.lower)  # the order stays
    gone = total(plain, "encoder") - total(least, "encoder")
    assert column(tab, "#modules", 3)[column(tab, "#modules", 0).index("encoder")].startswith("−" + readable(gone))
    tab.get_by_role("button", name="Difference").click()
    assert column(tab, "#modules", 0)[-1] == "encoder"  # the largest difference, which is the smallest drop, comes first
    assert tab.locator("#modules th[aria-sort=descending]").inner_text().startswith("Difference")


def test_repeated_blocks_are_one_row_or_many(show):
    content = full()
    tab, lean = show(content), content["profiles"][1]
    tab.locator("#depth").select_option("5")
    rows = dict(zip(column(tab, "#modules", 0), tab.locator("#modules tbody tr").all(), strict=True))
    row = rows["encoder.layers.encoder_layer_*.self_attention ×12"]
    held = sum(total(lean, f"encoder.layers.encoder_layer_{i}.self_attention") for i in range(12))
    assert row.locator("td").nth(1).inner_text() == readable(held)
    assert row.locator("td").nth(3).inner_text() == f"scaled_dot_product_attention {readable(held)}"
    assert rows["encoder.layers.encoder_layer_*.mlp.3 ×12"].locator("td").nth(3).inner_text() == "nobody"
    tab.locator("#merged").uncheck()
    assert "encoder.layers.encoder_layer_11.mlp.3" in column(tab, "#modules", 0)


def test_plans_tell_their_methods_and_the_chosen_one_is_marked(show):
    content = full()
    tab, plan = show(content), content["pareto"]["points"][2]
    chosen = tab.get_by_role("img", name=", chosen")
    assert chosen.count() == 1 and plan["label"] in chosen.get_attribute("aria-label")
    said = hover(tab, chosen)
    assert plan["methods"] in said and readable(plan["peak"]) in said and "1.13 × plain" in said
    shapes = {}
    for kind in ("exact", "approximate"):
        mark = tab.get_by_role("img", name=f", {kind}, ").first.locator(":scope > :last-child")
        shapes[kind] = mark.evaluate("e => e.outerHTML")
    assert "var(--exact)" in shapes["exact"] and "<circle" in shapes["exact"]
    assert "var(--near)" in shapes["approximate"] and "<path" in shapes["approximate"]


def test_layers_stand_in_order_with_their_figures(show):
    content = full(audit=audit(60))
    tab, layers = show(content), content["audit"]["layers"]
    assert tab.locator(".layer .name").all_inner_texts() == ["all layers", *(row["layer"] for row in layers)]
    row = tab.locator(".layer").nth(300)
    said = hover(tab, row)
    assert all(f"{layers[299][key]:.4f}" in said for key in ("cosine", "scale", "bias2", "variance", "noise"))
    track = row.locator(".track").first.bounding_box()
    dot = row.locator(".mark.round").bounding_box()
    assert (dot["x"] + dot["width"] / 2 - track["x"]) / track["width"] == pytest.approx(layers[299]["cosine"] / 1.2, abs=0.01)
    assert "not known" in hover(tab, tab.locator(".layer").nth(9))
    bars = tab.locator(".layer .beam").count()
    tab.get_by_role("button", name="points, logarithmic").click()
    assert bars == 3 * 361 and tab.locator(".layer .beam").count() == 0


def test_compared_trainings_sort_by_accuracy(show):
    content = full()
    tab = show(content)
    tab.locator("#compare").get_by_role("button", name="Accuracy").click()
    wanted = sorted(content["compare"], key=lambda e: -e["mean"]["accuracy"])
    assert column(tab, "#compare", 1) == [f"{100 * e['mean']['accuracy']:.1f} ± {100 * e['std']['accuracy']:.1f} %" for e in wanted]


@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 360), ("light", 768), ("dark", 1200)])
def test_nothing_is_wider_than_the_screen(show, scheme, width):
    long = "recompute(layers=['encoder.layers.encoder_layer_0','encoder.layers.encoder_layer_1'])"
    content = full()
    content["profiles"][2]["name"] = long
    tab = show(content, viewport={"width": width, "height": 740}, color_scheme=scheme)
    assert overflow(tab) == 0
    pick(tab, content["profiles"][2])
    for summary in tab.locator("summary").all():
        summary.click()
    assert overflow(tab) == 0
    ink, paper = tab.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, paper)]
    assert (light[0] < light[1]) == (scheme == "light")


def test_on_paper_everything_is_open(show):
    tab = show(full(audit=audit(40)))
    tab.emulate_media(media="print")
    box = tab.locator(".layers")
    assert box.evaluate("e => e.scrollHeight <= e.clientHeight + 1") and overflow(tab) == 0


HOSTILE = "</script><img src=x onerror=window.hacked=1>"


def test_names_are_text_and_never_markup(show):
    names = [HOSTILE, "__proto__", "constructor", "a</title>", "'\"`${1}", "{{content}}"]
    held = [storage(f"blocks.{name}", name, 4, 1024, also=[(name, name)]) for name in names]
    content = full(title=HOSTILE, subtitle=HOSTILE, profiles=[profile(HOSTILE, held), profile("__proto__", held[:2])])
    content["made"]["device"] = content["audit"]["layers"][1]["layer"] = content["pareto"]["points"][0]["methods"] = HOSTILE
    content["pareto"]["points"][0]["label"] = content["compare"][1]["method"] = HOSTILE
    tab = show(content)
    targets = [tab.locator("#pareto .point").nth(1), tab.locator(".layer").nth(2), tab.locator("#compare .point").nth(1)]
    assert HOSTILE in hover(tab, targets[0]) and HOSTILE in hover(tab, targets[1]) and HOSTILE in hover(tab, targets[2])
    assert HOSTILE in hover(tab, tab.get_by_role("treeitem", name=HOSTILE))
    assert tab.evaluate("window.hacked") is None and tab.locator("img:not([role])").count() == 0
    assert tab.locator("h1").inner_text() == HOSTILE == tab.title()
    assert f"{readable(8192)}" in tab.get_by_role("treeitem", name="blocks.__proto__").get_attribute("aria-label")


@pytest.mark.parametrize("missing", ["profiles", "pareto", "audit", "compare", "made", "subtitle"])
def test_a_section_that_is_missing_is_left_out(show, missing):
    content = full(**{missing: None})
    tab = show(content if missing in ("pareto", "made") else {name: part for name, part in content.items() if name != missing})
    assert tab.locator({"profiles": "#held, #summary", "made": "footer", "subtitle": "header p"}.get(missing, f"#{missing}")).count() == 0
    assert tab.locator("h2").count() == (3 if missing in ("profiles", "pareto", "audit", "compare") else 4)


def test_a_title_alone_is_a_page(show):
    tab = show({"title": "nothing else"})
    assert tab.locator("h1").inner_text() == "nothing else" and tab.locator("h2, nav, footer").count() == 0


def test_figures_that_are_not_known_are_dashes(show):
    bare = {"name": "plain", "held": 10, "storages": [{"bytes": 10, "shape": [], "dtype": None, "made_by": None, "saved_by": []}]}
    layers = [
        {"layer": "a", "parameters": 3, "norm": 0.0, "cosine": None, "scale": math.nan, "bias2": None, "variance": None, "noise": None}
    ]
    points = [{"budget": None, "peak": 5, "time": 1.0, "exact": True, "methods": "lean"}, {"peak": None, "time": math.inf, "exact": True}]
    tab = show({"title": "x", "profiles": [bare], "audit": {"layers": layers}, "pareto": {"points": points}})
    assert tab.locator(".tile .size").all_inner_texts() == ["10 B", "–", "–"]
    assert "saved by nobody known" in hover(tab, cell(tab, ""))
    assert tab.locator("#modules td").all_inner_texts() == ["10 B", "nobody known 10 B"]
    assert tab.locator("#pareto .point").count() == 1 and "scale –" in tab.locator(".layer").get_attribute("aria-label")
