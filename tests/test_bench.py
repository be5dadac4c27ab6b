"""The benchmark, on a CPU and on tiny models: every method trains what it says, rows are measured once, a mistake is one line."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import halfback as hb
from halfback.bench import command, fits, growth
from halfback.bench.measure import counted_peak, floor, shares
from halfback.bench.models import MODELS
from halfback.bench.peers import Coder, lora_
from halfback.bench.picture import picture
from halfback.bench.promises import PROMISES, ahead, kept
from halfback.bench.rows import Row, rows_of
from halfback.bench.work import Place, Step, Turn
from halfback.cli import main

PLACE = Place("cpu", small=True)
FAMILIES = ("vit-b", "convnext-t", "llama-1b", "gpt2-medium", "swin-t")


def stepped(name: str, text: str, **changes) -> tuple[float, Step]:
    step = Step(PLACE.spec(name), Row(text, text, False), PLACE, Turn(None))
    torch.manual_seed(0)
    loss = step.loss()
    (loss / step.applied.parts).backward()
    return loss.item(), step


@pytest.fixture(scope="module")
def plain():
    return {name: stepped(name, "plain")[0] for name in (*FAMILIES, "resnet-50")}


CASES = [(n, r.text, r.note) for n in FAMILIES for r in rows_of(PLACE.spec(n), "all") if not r.compiled and not r.is_plain]


@pytest.mark.parametrize(("name", "text", "note"), CASES)
def test_a_methods_first_loss_is_plains_and_its_gradients_are_finite(name, text, note, plain):
    loss, step = stepped(name, text)
    trained = [p for p in step.model.parameters() if p.requires_grad]
    grads = [p.grad for p in trained if p.grad is not None]
    assert len(grads) > 0.4 * len(trained) and all(g.isfinite().all() for g in grads) and any(g.abs().max() > 0 for g in grads)
    if "forward" not in note and not text.startswith("accumulate"):
        assert loss == pytest.approx(plain[name], abs=1e-4)


@pytest.mark.parametrize("text", ["recompute", "fewbits 8", "mink 0.2", "lean", "dropit(keep=0.2)"])
def test_a_convnet_with_batch_norm_trains_too(text, plain):
    assert stepped("resnet-50", text)[0] == pytest.approx(plain["resnet-50"], abs=1e-4)


@pytest.mark.parametrize("text", ["plain", "sbp(layers='paper')", "lean", "recompute"])
def test_a_detector_trains(text, monkeypatch):
    """With stand-ins for torchvision's own operators, which a CPU build of torch may lack."""
    from torchvision.models.detection import roi_heads
    from torchvision.ops import boxes, poolers

    def pooled(x, rois, output_size, *_, **__):
        rows = torch.cat([torch.full((len(r), 1), i) for i, r in enumerate(rois)]) if isinstance(rois, list) else rois
        return x.mean((2, 3))[rows[:, 0].long()][..., None, None].expand(-1, -1, *output_size)

    monkeypatch.setattr(boxes, "nms", lambda boxes, scores, threshold: scores.argsort(descending=True)[:8])
    for module in (poolers, roi_heads):
        monkeypatch.setattr(module, "roi_align", pooled)
    loss, step = stepped("mask-rcnn", text)
    assert loss == pytest.approx(stepped("mask-rcnn", "plain")[0], abs=1e-4)
    assert all(p.grad.isfinite().all() for p in step.model.backbone.parameters())


@pytest.mark.parametrize(("name", "kind"), [("timm:vit_tiny_patch16_224", "patches"), ("hf:llama", "text"), ("torchvision:vgg11", "bare")])
def test_your_own_model_is_offered_what_fits_it(name, kind):
    spec = Place("cpu").spec(name)
    texts = {r.text for r in rows_of(spec, "all")}
    assert spec.kind == kind and {"plain", "lean", "offload"} <= texts
    assert ("patchdropout 0.5" in texts) == (kind == "patches") and ("lean+chunkedloss" in texts) == (kind == "text")
    assert ("sbp(keep=0.5)" in texts) == ("recompute" in texts) == (kind != "bare")


@pytest.mark.parametrize("text", ["plain", "patchdropout 0.5", "lora 16", "skiptokens(keep=0.5)"])
def test_your_own_vit_trains(text):
    place = Place("cpu", batch=2, size=32)
    step = Step(place.spec("timm:vit_tiny_patch16_224"), Row("", text, False), place, Turn(None))
    step()
    assert len(step.batch[0]) == 2 and any(p.grad is not None and p.grad.isfinite().all() for p in step.model.parameters())


def test_accumulated_gradients_are_the_whole_batchs():
    whole = stepped("vit-b", "plain")[1]
    parts = Step(PLACE.spec("vit-b"), Row("", "accumulate 4", False), PLACE, Turn(None))
    for i in range(4):
        parts.batch = tuple(t[2 * i : 2 * i + 2] for t in whole.batch)
        (parts.loss() / parts.applied.parts).backward()
    for p, q in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-5, rtol=1e-3)


def test_coded_tensors_are_held_once_and_gradients_are_near():
    exact, coded = stepped("vit-b", "plain")[1], stepped("vit-b", "fewbits 8")[1]
    for p, q in zip(exact.model.parameters(), coded.model.parameters(), strict=True):
        assert (p.grad - q.grad).norm() <= 0.1 * p.grad.norm() + 1e-6
    coder, x = Coder(exact.model, 4, torch.float32), torch.randn(64, 64)
    with coder.hooks():
        y = x.requires_grad_() * 1
        known = (y * y, y.exp())  # y is saved twice, the result of exp once
    coded = [c() for _, found in coder.known.values() for c in found.values() if c() is not None]
    assert len(known) == 2 and len(coded) == 2


def test_adapters_are_pefts():
    from peft import LoraConfig, get_peft_model

    spec = PLACE.spec("llama-1b")
    ours, theirs = spec.build("cpu", torch.float32), spec.build("cpu", torch.float32)
    lora_(ours, 16, spec, "cpu")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    theirs = get_peft_model(theirs, LoraConfig(r=16, lora_alpha=16, target_modules=targets))
    batch = spec.samples(2, "cpu", torch.float32)
    held = [hb.held(m, lambda m=m: m(**batch).loss) for m in (ours, theirs)]
    counts = [sum(p.numel() for p in m.parameters() if p.requires_grad) for m in (ours, theirs)]
    assert counts[0] == counts[1] and held[0] == pytest.approx(held[1], rel=0.05)


def test_methods_take_less_memory_than_plain_and_the_floor_is_arithmetic():
    steps = {text: stepped("vit-b", text)[1] for text in ("plain", "recompute", "sbp(keep=0.5, layers='all')", "fewbits 4", "accumulate 2")}
    peaks = {text: counted_peak(s.model, s, s.batch) for text, s in steps.items()}
    assert all(peaks[text] < 0.9 * peaks["plain"] for text in peaks if text != "plain")
    model = PLACE.spec("vit-b").build("cpu", torch.float32)
    share = shares(model, lambda: steps["plain"].spec.run(model, steps["plain"].batch, "cpu"))
    blocks = sum(v for k, v in share.items() if k.count(".") == 2 and "encoder_layer" in k)
    assert share[""] == pytest.approx(1) and 0.5 < blocks < 1
    half = steps["sbp(keep=0.5, layers='all')"].report
    assert floor(half, share) == pytest.approx((1 + 2 * (1 - 0.5 * blocks)) / 3)
    assert floor(steps["recompute"].report, share) == pytest.approx((3 + blocks) / 3)


def test_required_rows_are_there_and_rows_fit_their_models():
    for name in ("vit-b", "convnext-t", "llama-1b"):
        rows = [r for r in rows_of(MODELS[name]) if r.compiled]
        texts = [r.text for r in rows]
        assert {"plain", "recompute", "accumulate 2", "accumulate 4", "accumulate 8", "budget 0.5", "algorithm1 0.5"} <= set(texts)
        assert sum(r.ours for r in rows) >= 4 and rows[0].is_plain
    every = {name: [r.text for r in rows_of(spec, "all")] for name, spec in MODELS.items()}
    assert "patchdropout 0.5" in every["vit-l"] and "patchdropout 0.5" not in every["swin-t"]
    assert "lean+chunkedloss" in every["gpt2-medium"] and "lean+chunkedloss" not in every["vit-b"]
    assert not any(r.compiled for r in rows_of(MODELS["mask-rcnn"], "all"))
    assert not any(t.startswith("accumulate 8") for t in every["mask-rcnn"])
    for texts in every.values():
        assert len(set(texts)) >= len(texts) / 2


# The command


def bench(*argv: str, out) -> int:
    return main(["bench", "--device", "cpu", "--tiny", "--model", "small-vit", "--batch", "4", "--out", str(out), *argv])


def test_rows_are_measured_once_and_drawn_and_one_that_fails_is_told_and_not_tried_again(tmp_path, capsys):
    out = tmp_path / "bench.jsonl"
    argv = ("--method", "sbp(keep=0.5)", "--method", "sbp(layers='nowhere')", "--only", "eager")
    assert bench(*argv, out=out) == 1
    assert "sbp(layers='nowhere'), eager failed: ValueError: apply_(): layers='nowhere'" in capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["method"] for r in rows if "failed" in r] == ["sbp(layers='nowhere'), eager"]
    rows = [r for r in rows if "failed" not in r]
    assert [r["method"] for r in rows] == ["plain, eager", "sbp(keep=0.5), eager", "plain, eager, again"]
    wanted = (
        "model method text compiled batch step_ms step_ms_p20 step_ms_p80 host_ms peak_gib time_ratio peak_ratio against gpu torch commit"
    )
    assert all(set(wanted.split()) <= r.keys() and r["seed"] == 0 and r["device"] == "cpu" for r in rows)
    assert rows[1]["peak_ratio"] < 0.95 and rows[1]["against"] == "plain, eager" and rows[1]["ours"] and "time_floor" in rows[1]
    assert (tmp_path / "bench_small-vit_eager.png").stat().st_size > 10_000
    assert bench(*argv, out=out) == 0
    assert len(out.read_text().splitlines()) == 4, "what is done is not measured again"
    capsys.readouterr()
    assert bench(*argv, "--list", out=out) == 0
    said = capsys.readouterr().out
    assert said.count("done 20") == 2 and said.count("failed: ValueError") == 1


def test_when_time_is_over_rows_are_left_for_the_next_call(tmp_path, capsys):
    assert bench("--minutes", "0.00001", "--method", "lean", out=tmp_path / "bench.jsonl") == 75
    assert "4 rows are left. The same command goes on" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_rows_that_are_not_ready_when_time_is_over_are_left_and_not_told_to_have_failed(tmp_path, capsys):
    assert bench("--minutes", "0.005", "--method", "lean", "--only", "eager", out=tmp_path / "bench.jsonl") == 75
    said = capsys.readouterr().out
    assert "lean, eager was not ready in time and is left" in said and "2 rows are left" in said and not list(tmp_path.iterdir())


def test_who_hangs_while_others_wait_for_their_turn_ends(tmp_path):
    code = "import sys, time, pathlib; from halfback.bench import work; work.TURN = 1\nturn = work.Turn(pathlib.Path(sys.argv[1]))"
    for more, ends in (("turn.take(); turn.give(); time.sleep(1.5)", 0), ("turn.take(); time.sleep(60)", -signal.SIGALRM)):
        assert subprocess.run([sys.executable, "-c", f"{code}; {more}", str(tmp_path / "turn")]).returncode == ends


def test_models_compile_side_by_side_and_each_has_its_own_plain(tmp_path, capsys):
    out = tmp_path / "bench.jsonl"
    assert bench("--model", "small-vit-mean", "--method", "lean", "--only", "eager", "--side-by-side", "3", out=out) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    order = [(r["model"], r["method"]) for r in rows]
    names = ("plain, eager", "lean, eager", "plain, eager, again")
    assert sorted(order) == sorted((m, n) for m in ("small-vit", "small-vit-mean") for n in names)
    assert order.index(("small-vit", names[2])) < order.index(("small-vit-mean", names[1]))
    assert all(r["time_ratio"] == r["peak_ratio"] == 1 for r in rows if r["method"] == names[0])
    assert "3 of 3 rows ready" in capsys.readouterr().out


def test_a_compiled_row_takes_its_turn_and_keeps_nothing():
    turns = []

    class Told(Turn):
        def take(self):
            turns.append("take")

        def give(self):
            turns.append("give")

    step = Step(Place("cpu", True, batch=4).spec("small-vit"), Row("lean", "lean", True, True), PLACE, Told(None), with_floor=True)
    told = step.warm_up()
    assert turns[:5] == ["take", "give", "take", "give", "take"] and turns[-1] == "give"  # it is built, counted, and compiled, and runs
    assert told["fullgraph"] and told["time_floor"] == 1 and all(p.grad is None for p in step.model.parameters())
    assert step.measured()["memory"] == "held"


def test_trainings_stand_still_while_something_has_the_gpu_to_itself(tmp_path):
    ticks = "import time\nfor _ in range(60): print(time.time(), flush=True); time.sleep(0.05)"
    busy = "import time; began = time.time(); time.sleep(1.5); print(began, time.time())"
    (tmp_path / "ticks.py").write_text(ticks)
    (tmp_path / "busy.py").write_text(busy)
    script = Path(__file__).parent.parent / "benchmarks/together.py"
    command = [sys.executable, str(script), "--out", str(tmp_path), "--device", "cpu"]
    given = ["--beside", f"{sys.executable} {tmp_path}/ticks.py", "--alone", f"{sys.executable} -c 'import time; time.sleep(1)'"]
    done = subprocess.run(
        [*command, *given, "--alone", f"{sys.executable} {tmp_path}/busy.py"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    began, ended = map(float, (tmp_path / "alone_1.log").read_text().split())
    times = [float(t) for t in (tmp_path / "beside_0.log").read_text().split()]
    assert len(times) == 60 and not [t for t in times if began + 0.2 < t < ended]
    assert max(times) > ended


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
def test_the_compiler_keeps_no_tensors_for_later_where_blocks_are_recomputed(monkeypatch):
    reuse, real = [], torch._dynamo.lookup_backend("aot_eager")

    def backend(graph, inputs):
        reuse.append(torch._inductor.config.allow_buffer_reuse)
        return real(graph, inputs)

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: backend)
    for text in ("plain", "recompute"):
        torch._dynamo.reset()
        Step(Place("cpu", True, batch=4).spec("small-vit"), Row(text, text, True), PLACE, Turn(None)).warm_up()
    assert reuse == [True, False] and torch._inductor.config.allow_buffer_reuse


@pytest.mark.parametrize(
    "what, told",
    [
        (["--model", "small-vit", "--batch", "4", "--tiny", "lean"], "(1) lean"),
        (["--recipe", "poolings", "exact-average-adamw_s0"], "(0) exact-average-adamw_s0"),
    ],
)
def test_the_time_of_a_step_is_told_by_kinds_of_kernels(what, told):
    script = Path(__file__).parent.parent / "benchmarks/where.py"
    command = [sys.executable, str(script), "--device", "cpu", "--kernels", "20", *what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=script.parent.parent)
    assert done.returncode == 0, done.stderr
    lines = {line[:16].strip(): line[16:].split() for line in done.stdout.splitlines()}
    kinds = [lines[k] for k in ("attention", "products", "norms and sums", "copies", "others", "convolutions", "elementwise") if k in lines]
    assert told in done.stdout and "aten::" in done.stdout and float(lines["products"][0]) > 0
    for i, total in enumerate(lines["all"]):
        assert abs(sum(float(k[i]) for k in kinds) - float(total)) < 0.05


def test_peaks_are_counted_without_a_gpu_or_it_is_said_what_that_needs():
    script = Path(__file__).parent.parent / "benchmarks/no_gpu/count.py"
    command = [sys.executable, str(script), "--model", "small-vit", "--batch", "256", "plain", "recompute"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(script.parent.parent.parent)})
    if not torch.version.cuda or torch.cuda.is_available():
        assert done.returncode == 1 and "It needs one built for CUDA, without a GPU." in done.stderr
        return
    assert done.returncode == 0, done.stderr
    plain, recomputed = (float(line.split()[-1]) for line in done.stdout.splitlines())
    assert plain == 1 and 0.1 < recomputed < 0.7


def test_the_largest_that_fits_is_found():
    for limit in (1, 7, 40, 1000):
        for start, factor in ((1, 2.0), (35, 1.1), (300, 2.0)):
            tried = []
            found = fits.largest(lambda n, limit=limit, tried=tried: tried.append(n) or n <= limit, start, 1, factor)
            assert found <= limit <= 1.04 * found + 1 and len(tried) < 60
    assert fits.largest(lambda n: False, 64, 32, 2.0) == 0


def test_less_memory_fits_more_and_growth_is_fitted():
    spec = PLACE.spec("vit-b")
    rooms = [{"largest": "batch", "room_gib": r} for r in (0.003, 0.005)]
    sized = [{"largest": "size", "room_gib": 0.002}]
    small, large, side = fits.work(spec, Row("", "plain", False), PLACE, {"asked": [*rooms, *sized]})
    (less,) = fits.work(spec, Row("", "recompute", False), PLACE, {"asked": rooms[:1]})
    assert less["at"] > small["at"] > 0 and large["at"] > small["at"] and side["at"] % spec.step == 0 < side["at"] and side["batch"] == 1
    assert less["images_per_s"] > 0 and less["step_ms"] > 0
    row = next(r for r in growth.rows_of(spec) if r.text == "plain")
    (swept,) = growth.work(spec, row, PLACE, {"asked": [{"swept": "batch"}]})
    assert swept["peak_exponent"] == pytest.approx(1, abs=0.2) and len(swept["points"]) == 4
    assert growth.exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2)


def test_methods_are_timed_at_the_sample_that_checkpointing_fits():
    spec, row = PLACE.spec("vit-b"), Row("", "lean", False)
    asked = [{"largest": "batch", "room_gib": 16.0}, {"largest": "size", "room_gib": 16.0}, {"largest": "size", "room_gib": 24.0}]
    done = {"method": "checkpointing", "largest": "size", "room_gib": 16.0, "at": 96}
    others = [{**done, "method": "plain", "at": 32}, {**done, "largest": "batch"}, {**done, "room_gib": 24.0, "at": 0}]
    assert fits.beside(asked, [done, *others]) == [asked[0], {**asked[1], "timed_at": 96}, asked[2]]
    (found,) = fits.work(spec, row, PLACE, {"asked": [{"largest": "size", "room_gib": 0.004, "timed_at": 32}]})
    assert found["at"] > 32 and found["step_ms_there"] > 0 and found["step_ms_there"] != found["step_ms"]
    line = {**found, "method": "lean", "ours": True, "largest": "size", "room_gib": 0.004, "timed_at": 32}
    assert "ms a step at 32" in fits.told(line) and fits.table([line])[1][-1] == f"{found['step_ms_there']:.1f}"
    same = {"largest": "size", "room_gib": 0.004, "timed_at": found["at"]}
    (found,) = fits.work(spec, row, PLACE, {"asked": [same]})
    assert found["step_ms_there"] == found["step_ms"]


def test_an_error_that_is_none_of_memory_is_no_answer(monkeypatch):
    def broken(*args):
        raise RuntimeError("operator does not exist")

    monkeypatch.setattr(fits, "Step", broken)
    with pytest.raises(RuntimeError, match="does not exist"):
        list(fits.work(PLACE.spec("vit-b"), Row("", "plain", False), PLACE, {"asked": [{"largest": "batch", "room_gib": 0.02}]}))


def measured(model="vit-b", method="plain", time=1.0, peak=1.0, ours=False, note=""):
    return {"model": model, "about": model, "method": method, "time_ratio": time, "peak_ratio": peak, "ours": ours, "note": note}


def test_promises_are_about_rows_that_are_there_and_are_held_against_what_was_measured():
    for p in PROMISES:
        assert p.method in [r.method for r in rows_of(MODELS[p.model], "promised")] and (p.time or p.peak)
    head, *lines = kept([measured(), measured(method="sbp", time=0.83, peak=0.7601), measured(method="lean", time=1.03, peak=0.64)])
    said = {line[0]: line[1:] for line in lines}
    assert len(lines) == sum(p.model == "vit-b" for p in PROMISES) and len(head) == len(lines[0])
    assert said["vit-b: sbp"] == ["0.83", "0.830", "0.76", "0.760", "no"] and said["vit-b: lean"][-1] == "yes"
    assert said["vit-b: sbp keep 1, eager"] == ["1.03", "", "", "", "not measured"]
    assert not kept([])[1:]


def test_ahead_is_who_is_faster_and_smaller_than_plain_and_beaten_by_no_peer():
    rows = [
        measured(),
        measured(method="accumulation", time=1.1, peak=0.2),
        measured(method="PatchDropout", time=0.5, peak=0.3, note="changes the forward"),
        measured(method="sbp", time=0.8, peak=0.7, ours=True),
        measured(method="sbp + recompute", time=1.01, peak=0.1, ours=True),
        measured(method="skiptokens", time=0.6, peak=0.6, ours=True, note="changes the forward"),
    ]
    assert ahead(rows) == ["sbp"]
    assert ahead([*rows, measured(method="another peer", time=0.79, peak=0.7)]) == []


def test_the_picture_has_peers_and_ours_and_floors(tmp_path):
    rows = [
        {"method": "plain", "ours": False, "note": "", "time_ratio": 1.0, "peak_ratio": 1.0},
        {"method": "sbp", "ours": True, "note": "", "time_ratio": 0.83, "peak_ratio": 0.75, "time_floor": 0.78},
        {"method": "skip", "ours": True, "note": "changes the forward", "time_ratio": 0.7, "peak_ratio": 0.7, "time_floor": 0.6},
        {"method": "PatchDropout", "ours": False, "note": "changes the forward", "time_ratio": 0.5, "peak_ratio": 0.5},
    ]
    for name, time in (("a.png", 1.0), ("wide.png", 4.0)):
        slow = {"method": "offload", "ours": False, "note": "", "time_ratio": time, "peak_ratio": 0.2}
        picture([*rows, slow], "ViT", tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--model", "vit-z", "--device", "cpu"], "model 'vit-z' is unknown. Models: vit-b, "),
        (["--method", "sbp(kep=1)", "--device", "cpu", "--tiny"], "sbp takes keep"),
        (["--method", "lora", "--part", "fits", "--device", "cpu"], "--method is for --part step"),
        (["--rooms", "16", "--device", "cpu"], "--rooms is for --part fits; this is --part step"),
        (["--largest", "sample", "--part", "growth", "--device", "cpu"], "--largest is for --part fits; this is --part growth"),
        (["--only", "nothing", "--device", "cpu"], "no row of vit-b, convnext-t, llama-1b, vit-l, resnet-50, mask-rcnn has 'nothing'"),
        (["--minutes", "0", "--device", "cpu"], "--minutes 0.0 must be above 0"),
        (["--model", "vit-b", "--seq", "8", "--device", "cpu"], "takes images, which have no --seq"),
        pytest.param(["--model", "vit-b"], "no GPU found", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")),
    ],
)
def test_a_mistake_is_one_line(given, message, tmp_path, capsys):
    assert main(["bench", "--out", str(tmp_path / "b.jsonl"), *given]) == 2
    caught = capsys.readouterr()
    assert caught.err.startswith("halfback: ") and message in caught.err and caught.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is no method"),
        ("accumulate", "write it as 'accumulate 2' or 'accumulate 4' or 'accumulate 8'"),
        ("accumulate two", "write it as 'accumulate 2'"),
        ("accumulate 0", "write it as 'accumulate 2'"),
        ("accumulate 3", "vit-b has a batch of 8, which is not that many equal parts"),
        ("plain 3", "write it as 'plain'"),
        ("budget", "write it as 'budget"),
    ],
)
def test_what_is_asked_for_wrongly_is_named(text, said, capsys):
    assert main(["bench", "--device", "cpu", "--tiny", "--model", "vit-b", "--method", text, "--list"])
    assert said in capsys.readouterr().err


def test_a_room_larger_than_the_gpu_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(total_memory=24 * 2**30))
    args = argparse.Namespace(part="fits", device="cuda", rooms=None, largest=None)
    spec = PLACE.spec("vit-b")
    assert {a["room_gib"] for a in command.asked_of(spec, Row("", "plain", False), args)} == {16.0, 24.0}
    args.rooms = [16.0, 40.0]
    with pytest.raises(ValueError, match=r"--rooms 40: this GPU has 24.0 GiB"):
        command.asked_of(spec, Row("", "plain", False), args)
