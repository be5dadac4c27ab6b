"""Recipes: what is trained, what is not trained again, and what is said about it.

Most trainings here are a script that takes no time and has torch's manners: it saves, stops when it is told, and goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import matplotlib.image
import pytest
import scipy.stats

from halfback.train.loop import train
from halfback.train.recipes import Arm, Recipe, find, load
from halfback.train.reproduce import reproduce
from halfback.train.results import collect, listing, paired, spread, student, table, times_of, told
from halfback.train.results_page import page, page_text
from halfback.train.settings import Settings

ROOT = Path(__file__).parents[1]
module = importlib.import_module("halfback.train.reproduce")

TRAINING = r"""
import json, os, pathlib, signal, sys, time
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
settings = json.loads(pathlib.Path(given["--settings"]).read_text())
folder = pathlib.Path(given["--out"])
stopped = []
signal.signal(signal.SIGTERM, lambda *_: None if os.environ.get("FAKE_DEAF") else stopped.append(1))
saved = folder / "checkpoints" / "last"
saved.parent.mkdir(exist_ok=True)
begin = int(saved.read_text()) if saved.exists() else 0
print("begins at", begin, "threads", os.environ.get("OMP_NUM_THREADS"), "root", settings["root"], settings["device"], flush=True)
if os.environ.get("FAKE_FAIL") == folder.name:
    print("first line\nMemoryError: no room for", folder.name)
    sys.exit(3)
if os.environ.get("FAKE_EMPTY") == folder.name:
    sys.exit(0)
for epoch in range(begin, settings["epochs"]):
    with (folder / "metrics.jsonl").open("a") as f:
        f.write(json.dumps({"epoch": epoch + 1, "step": epoch + 1}) + "\n")
    saved.write_text(str(epoch + 1))
    until = time.monotonic() + float(os.environ.get("FAKE_SECONDS", "0"))
    while time.monotonic() < until and not stopped:
        time.sleep(0.01)
    if stopped and epoch + 1 < settings["epochs"]:
        sys.exit(75)
rate, seed = settings["lr"], settings["seed"]
result = {"settings": settings, "seed": seed, "done": True, "top1": 90 + 10 * rate + seed, "top5": None, "train_loss": 1.0 - rate,
  "test_loss": 1.0, "held": 1000 * rate, "peak": None, "step_ms": 5.0 * rate, "seconds": 1.0, "report": "long " * 100,
  "device": "cpu", "device_name": "a device", "versions": {"torch": "2", "python": "3"}, "commit": "c0ffee0123456789-dirty",
  "date": "2026-01-02T03:04:05",
  "curves": {"epoch": [1], "top1": [1.0]}}
(folder / "best.safetensors").write_text("weights")
(folder / "result.json").write_text(json.dumps(result))
"""

RECIPE = """
from halfback.train import Arm, Recipe, Settings
RECIPE = Recipe(
    title="A claim, table 1", about="What is tried.\\n  And why.", paper="more is more",
    base=Settings(epochs={epochs}, lr=0.1, optimizer='sgd'),
    arms=(
        Arm("exact"),
        Arm("rate 0.2", "lean", {{"lr": 0.2}}, paper=92.5, group="rates"),
        Arm("rate 0.3", "lean", {{"lr": 0.3}}, group="rates"),
    ),
    seeds={seeds}, differs=("it is small",), minutes=2, order={order},
    verdict=lambda r: f"Yes, by {{r['arms'][1]['against']['top1']['mean']:.1f}}.",
)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a recipe, whose trainings are the script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINING)
    train = str(tmp_path / "train.py")
    monkeypatch.setattr(module, "command", lambda asked, folder: [sys.executable, train, "--settings", str(asked), "--out", str(folder)])
    monkeypatch.setattr(module, "POLL", 0.02)
    monkeypatch.setattr(module, "check_needs", lambda runs: None)  # the script needs no data and no GPU
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    write_recipe(tmp_path)
    return tmp_path


def write_recipe(here, name="claim", epochs=1, seeds=(0, 1), order=1, **change):
    path = here / "experiments" / name / "recipe.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = RECIPE.format(epochs=epochs, seeds=seeds, order=order)
    for old, new in change.items():
        text = text.replace(old, new)
    path.write_text(text)
    return path


def change_recipe(here, old, new):
    path = here / "experiments" / "claim" / "recipe.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    os.utime(path, (time.time() + 2, time.time() + 2))  # a compiled recipe is known by its second


def ran(name="claim", **given):
    said = []
    code = reproduce(name, say=said.append, **given)
    return code, "\n".join(said)


def names(folder):
    return sorted(p.stem for p in folder.glob("*.json"))


def log(here, run, name="claim"):
    return (here / "out" / "runs" / name / run / "log.txt").read_text()


ALL = ["exact_s0", "exact_s1", "rate-0.2_s0", "rate-0.2_s1", "rate-0.3_s0", "rate-0.3_s1"]


# Recipes


TWO = (Arm("exact"), Arm("b", "lean"))


def recipe(arms=TWO, **given):
    return Recipe(**{"title": "t", "about": "a", "paper": "p", "base": Settings(), "arms": arms, **given})


def test_data_and_devices_that_are_not_there_are_told_before_anything_begins(tmp_path, monkeypatch):
    """Once, and not by every run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HALFBACK_DATA", raising=False)
    write_recipe(tmp_path, **{"optimizer='sgd'": "optimizer='sgd', data='cifar100'"})
    for given in ({}, {"timed": True}):
        with pytest.raises(ValueError, match=r"data 'cifar100': where it lies is not known. Give root, or set HALFBACK_DATA"):
            reproduce("claim", **given)
        with pytest.raises(FileNotFoundError, match=r"train.bin': there is no such file. Download"):
            reproduce("claim", root=str(tmp_path), **given)
    write_recipe(tmp_path)
    with pytest.raises(ValueError, match=r"device 'nowhere' cannot be used: .* Devices: cpu, cuda"):
        reproduce("claim", device="nowhere")
    assert not (tmp_path / "out").exists()


def test_seeds_are_the_outer_loop():
    runs = recipe(seeds=(3, 1)).runs()
    assert [(r.id, r.seed, r.settings.seed, r.settings.method) for r in runs] == [
        ("exact_s3", 3, 3, "exact"),
        ("b_s3", 3, 3, "lean"),
        ("exact_s1", 1, 1, "exact"),
        ("b_s1", 1, 1, "lean"),
    ]


def test_an_arm_may_have_more_seeds_than_the_others():
    arms = (Arm("exact", seeds=(0, 1, 2)), Arm("other", "sbp"), Arm("more", "sbp", seeds=(0, 1, 2)))
    runs = [r.id for r in recipe(arms, seeds=(0, 1)).runs()]
    assert runs == ["exact_s0", "other_s0", "more_s0", "exact_s1", "other_s1", "more_s1", "exact_s2", "more_s2"]
    with pytest.raises(ValueError, match=r"seeds \(1, 1\) of arm 'b' must be different whole numbers"):
        recipe((Arm("exact"), Arm("b", seeds=(1, 1))))


def test_an_id_is_safe_as_a_file_name():
    arms = (Arm("exact"), Arm("../Elements, largest: keep 0.2 / ±", "lean"))
    assert [r.id for r in recipe(arms, seeds=(0,)).runs()] == ["exact_s0", "elements-largest-keep-0.2_s0"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"arms": (Arm("exact"), Arm("a b"), Arm("A, B"))}, "arms 'a b' and 'A, B' would both be kept as 'a-b'"),
        ({"arms": (Arm("exact"), Arm("±"))}, "arm '±' would be kept as ''"),
        ({"against": "none"}, "the recipe is against 'none', which is no arm. Arms: exact, b"),
        ({"arms": (Arm("exact"), Arm("b", against="c"))}, "arm 'b' is against 'c', which is no arm"),
        ({"arms": (Arm("exact"), Arm("b", "lean", like="c"))}, "arm 'b' is like 'c', which is no arm that is trained: exact"),
        ({"arms": (Arm("exact"), Arm("b", "sbp(keep=0.5)+lean", like="exact"))}, "'b' is like 'exact', and may differ from it by what"),
        ({"arms": (Arm("exact"), Arm("b", "lean", {"lr": 0.1}, like="exact"))}, "'b' is like 'exact', and may differ from it by what"),
        ({"arms": (*TWO, Arm("c", "sbp"), Arm("d", "sbp+lean", {"accumulate": 2}, like="c"))}, "'d' is like 'c', and may differ"),
        ({"arms": (*TWO, Arm("c", "dropit"), Arm("d", "dropit+recompute", like="c"))}, "'d' is like 'c', and may differ"),
        ({"arms": ()}, "which is no arm. Arms: none"),
        ({"seeds": ()}, "must be different whole numbers"),
        ({"seeds": (1, 1)}, r"seeds \(1, 1\) must be different"),
        ({"arms": (Arm("exact"), Arm("b", "lean", {"lr": -1.0}))}, "arm 'b': lr -1.0 must be above 0"),
        ({"arms": (Arm("exact"), Arm("b", "lean", {"rate": 1.0}))}, "arm 'b' changes 'rate', which is no setting. Settings: model, "),
        ({"arms": ("exact",)}, r"arms has 'exact', which is no Arm; give Arm\(name, method\)"),
        ({"seeds": 3}, r"seeds is 3; give a tuple, as \(3,\)"),
        ({"base": {"epochs": 2}}, r"base is a dict; give Settings\(...\)"),
        ({"arms": (Arm("exact"), Arm("b", "lena"))}, "arm 'b': 'lena' in 'lena' is none of the methods"),
        ({"arms": (Arm("exact"), Arm("b", "lean", {"seed": 3}))}, "seed is neither a setting of the base nor a change"),
        ({"arms": (Arm("exact"), Arm("b", "lean", {"optimizer": "sgd"}))}, "arm 'b': optimizer changes, so give lr and weight_decay too"),
        ({"base": Settings(method="lean")}, "method is neither"),
        ({"measure": "speed"}, "measure 'speed' is none of top1, test_loss"),
        ({"curves": ("c",)}, "curves names 'c', which is no arm that is trained. Arms: exact, b"),
        ({"claims": ("c",)}, "claims names 'c', which is no arm that is trained. Arms: exact, b"),
        ({"claims": ("b", "exact")}, "claims names 'exact', which the others are compared with; name those"),
        ({"differs": "small"}, r"differs is the text 'small'; give a tuple, as \('small',\)"),
    ],
)
def test_a_wrong_recipe_is_told_why(given, message):
    with pytest.raises(ValueError, match=message):
        recipe(**given)


def test_recipes_are_found_by_name_and_by_path(here):
    path = here / "experiments" / "claim" / "recipe.py"
    assert find("claim").resolve() == find(path) == find(path.parent) == path
    with pytest.raises(ValueError, match=r"There is no recipe 'clam'. In experiments/: claim."):
        find("clam")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "recipe.py has no RECIPE = "),
        ("import nothing_there", "recipe.py: ModuleNotFoundError"),
        ("x = (", "recipe.py: SyntaxError"),
    ],
)
def test_a_file_that_is_no_recipe_is_told(here, text, message):
    path = here / "recipe.py"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(path)


# Runs


def test_all_runs_are_trained_and_kept_small(here):
    code, said = ran()
    assert code == 0 and names(here / "experiments/claim/runs") == ALL
    kept = json.loads((here / "experiments/claim/runs/rate-0.2_s1.json").read_text())
    assert (kept["arm"], kept["seed"], kept["side_by_side"], kept["top1"]) == ("rate 0.2", 1, 1, 93.0)
    assert "report" not in kept and kept["curves"]["epoch"] == [1] and "root" not in kept["settings"]
    left = sorted(p.name for p in (here / "out/runs/claim/exact_s0").iterdir())
    assert left == ["asked.json", "lock", "log.txt", "metrics.jsonl", "result.json", "side_by_side"]  # no checkpoint, no weights
    assert "6 of 6 done, 0 running, 0 failed" in said and "rate 0.2" in said and "Yes, by 1.0." in said


def test_keep_leaves_the_checkpoints(here):
    ran(keep=True, only="exact_s0")
    assert (here / "out/runs/claim/exact_s0/checkpoints/last").exists() and (here / "out/runs/claim/exact_s0/best.safetensors").exists()


def test_what_is_done_is_not_trained_again(here):
    ran(only="*_s0")
    assert names(here / "experiments/claim/runs") == ["exact_s0", "rate-0.2_s0", "rate-0.3_s0"]
    before = log(here, "exact_s0")
    code, said = ran(device="cpu", root="/data")  # how, not what
    assert code == 0 and "6 runs, 3 done" in said and log(here, "exact_s0") == before
    assert "root /data cpu" in log(here, "exact_s1") and names(here / "experiments/claim/runs") == ALL


def test_graphs_are_for_what_is_compiled_and_make_no_other_run_of_it(here):
    write_recipe(here, **{'{"lr": 0.3}': '{"lr": 0.3, "compile": True, "device": "cuda"}'})
    with pytest.raises(ValueError, match=r"--graphs is for runs that are compiled, and none of .*recipe.py is"):
        reproduce("claim", only="exact_s*", graphs=True)
    assert reproduce("claim", graphs=True) == 0
    runs = {p.stem: json.loads(p.read_text())["settings"]["graphs"] for p in (here / "experiments/claim/runs").glob("*.json")}
    assert {id for id, graphs in runs.items() if graphs} == {"rate-0.3_s0", "rate-0.3_s1"} and len(runs) == 6
    said = []
    assert reproduce("claim", say=said.append) == 0 and "6 runs, 6 done" in said[0]


def test_several_recipes_share_one_queue(here):
    """In their order, and a run that serves two of them is trained once, whichever comes first."""
    write_recipe(here, name="other", order=2, **{"minutes=2": 'minutes=2, beside=("claim",)', '{"lr": 0.3}': '{"lr": 0.4}'})
    for seed, queue in enumerate((["other", "claim", "experiments/other"], ["claim", "other"])):
        said = []
        assert reproduce(queue, only=f"*_s{seed}", side_by_side=1, say=said.append) == 0
        runs = {p.parent.parent.name + "/" + p.stem for p in (here / "experiments").glob(f"*/runs/*_s{seed}.json")}
        assert runs == {f"claim/{arm}_s{seed}" for arm in ("exact", "rate-0.2", "rate-0.3")} | {f"other/rate-0.3_s{seed}"}
        trained = re.findall(r"^(\S+): top-1", "\n".join(said), re.MULTILINE)
        assert len(trained) == 4 and trained[0].startswith(queue[0])
        shared = next(text for text in said if "2 trained for another recipe" in text)
        assert "3 runs, 0 done, 2 trained for another recipe of this queue" in shared
    both = [json.loads((here / f"experiments/{name}/results.json").read_text()) for name in ("claim", "other")]
    assert all(r["runs"] == {"done": 6, "of": 6} for r in both)
    with pytest.raises(ValueError, match=r"only='rate-9\*' matches none of the 12 runs"):
        reproduce(["claim", "other"], only="rate-0.2*,rate-9*")


def test_a_recipe_that_another_one_trains_as_a_whole_is_collected(here):
    write_recipe(here, name="other", order=2, **{"minutes=2": 'minutes=2, beside=("claim",)'})
    assert reproduce(["claim", "other"]) == 0
    assert not (here / "experiments/other/runs").exists()
    assert json.loads((here / "experiments/other/results.json").read_text())["runs"] == {"done": 6, "of": 6}


def test_a_refusal_leaves_no_folder_of_any_recipe(here):
    write_recipe(here, name="other", order=2)
    (here / "elsewhere/other").mkdir(parents=True)
    (here / "elsewhere/other/recipe.py").write_text("another one")
    (here / "out/other").mkdir(parents=True)
    (here / "out/other/recipe.txt").write_text(str(here / "elsewhere/other/recipe.py"))
    with pytest.raises(ValueError, match=r"other has the trainings of .*another recipe of this name"):
        reproduce(["claim", "other"], out=here / "out")
    assert [p.name for p in (here / "out").iterdir()] == ["other"]


def test_only_takes_globs_of_ids(here):
    ran(only="rate-0.3_s*, exact_s1")
    assert names(here / "experiments/claim/runs") == ["exact_s1", "rate-0.3_s0", "rate-0.3_s1"]
    for only in ("nothing", "*_s0,nothing", "nothing,*_s0"):
        with pytest.raises(ValueError, match=r"only='nothing' matches none of the 6 runs. Runs: exact_s0, rate-0.2_s0"):
            ran(only=only)


def test_other_settings_are_an_error_and_again_trains_those_alone(here):
    ran()
    change_recipe(here, '{"lr": 0.2}', '{"lr": 0.25}')
    before = log(here, "exact_s0")
    with pytest.raises(
        ValueError, match=r"runs/rate-0.2_s0.json was trained with other settings: lr 0.2 there, 0.25 in the recipe.*--again"
    ):
        ran()
    code, said = ran(again=True)
    assert code == 0 and "6 runs, 4 done" in said and log(here, "exact_s0") == before
    assert json.loads((here / "experiments/claim/runs/rate-0.2_s0.json").read_text())["settings"]["lr"] == 0.25


def test_again_deletes_nothing_that_is_not_trained_anew(here):
    """Neither what --only does not choose, nor with --into what lies beside the recipe."""
    ran()
    change_recipe(here, '{"lr": 0.2}', '{"lr": 0.25}')
    runs = here / "experiments/claim/runs"
    before = {p: p.read_bytes() for p in runs.iterdir()}
    with pytest.raises(ValueError, match=r"rate-0.2_s1.json was trained with other settings: .*--only does not have it: leave that out"):
        ran(only="rate-0.2_s0", again=True)
    assert {p: p.read_bytes() for p in runs.iterdir()} == before
    code, said = ran(into=here / "into", out=here / "elsewhere")
    assert code == 0 and "6 runs, 4 done" in said and {p: p.read_bytes() for p in runs.iterdir()} == before
    assert names(here / "into/claim/runs") == ["rate-0.2_s0", "rate-0.2_s1"]


def test_what_another_process_has_trained_meanwhile_is_not_left(here, monkeypatch):
    monkeypatch.setenv("FAKE_SECONDS", "1.5")
    codes = []
    first = threading.Thread(target=lambda: codes.append(ran(only="exact_s0")[0]))
    first.start()
    while not Path("out/runs/claim/exact_s0/metrics.jsonl").exists():
        time.sleep(0.02)
    code, said = ran(only="exact_s0,exact_s1")
    first.join()
    assert codes == [0] and code == 0 and "exact_s0: another process trains it; left alone." in said and "are left" not in said


def test_an_unfinished_training_with_other_settings_is_an_error_too(here, monkeypatch):
    monkeypatch.setenv("FAKE_FAIL", "exact_s0")
    assert ran(only="exact_s0")[0] == 1
    change_recipe(here, "lr=0.1", "lr=0.15")
    monkeypatch.delenv("FAKE_FAIL")
    with pytest.raises(ValueError, match=r"exact_s0 has a training with other settings: lr 0.1 there, 0.15"):
        ran(only="exact_s0")
    assert ran(only="exact_s0", again=True)[0] == 0


@pytest.mark.parametrize("again", [False, True])
def test_a_recipe_elsewhere_of_the_same_name_leaves_half_done_trainings_alone(here, monkeypatch, again):  # once: it went on with them
    monkeypatch.setenv("FAKE_FAIL", "exact_s0")
    assert ran(only="exact_s0")[0] == 1
    monkeypatch.delenv("FAKE_FAIL")
    before, own = log(here, "exact_s0"), find("claim").resolve()
    other = write_recipe(here / "elsewhere")
    with pytest.raises(ValueError, match=f"out/runs/claim has the trainings of {own}, another recipe of this name. Give --out another"):
        ran(other, only="exact_s0", again=again)
    assert log(here, "exact_s0") == before and ran(other, only="exact_s0", out=here / "out/others")[0] == 0
    assert ran(only="exact_s0")[0] == 0


def test_a_recipe_that_was_moved_goes_on_where_it_was(here, monkeypatch):
    monkeypatch.setenv("FAKE_FAIL", "exact_s0")
    assert ran(only="exact_s0")[0] == 1
    monkeypatch.delenv("FAKE_FAIL")
    (here / "experiments").rename(here / "papers")
    before = log(here, "exact_s0")
    assert ran(here / "papers/claim", only="exact_s0")[0] == 0 and log(here, "exact_s0").startswith(before)


def test_a_result_of_no_run_is_an_error(here):
    ran()
    change_recipe(here, "seeds=(0, 1)", "seeds=(0,)")
    with pytest.raises(ValueError, match=r"exact_s1.json is of no run of the recipe. Delete it"):
        ran()


def test_a_failure_is_told_with_the_end_of_its_log_and_the_others_go_on(here, monkeypatch):
    monkeypatch.setenv("FAKE_FAIL", "exact_s0")
    code, said = ran()
    assert code == 1 and names(here / "experiments/claim/runs") == [i for i in ALL if i != "exact_s0"]
    assert "exact_s0 failed, exit code 3" in said and "  MemoryError: no room for exact_s0" in said
    assert "5 of 6 done, 0 running, 1 failed" in said and "1 runs failed: exact_s0" in said
    monkeypatch.delenv("FAKE_FAIL")
    assert ran()[0] == 0 and names(here / "experiments/claim/runs") == ALL


def test_a_training_without_a_result_has_failed(here, monkeypatch):
    monkeypatch.setenv("FAKE_EMPTY", "exact_s0")
    code, said = ran(only="exact_s0")
    assert code == 1 and "exact_s0 failed, no result.json to take" in said and not (here / "experiments/claim/results.json").exists()


def test_a_result_that_nobody_took_is_taken_without_training(here):
    ran(only="exact_s0")
    (here / "experiments/claim/runs/exact_s0.json").unlink()
    before = log(here, "exact_s0")
    assert ran(only="exact_s0")[0] == 0 and log(here, "exact_s0") == before and names(here / "experiments/claim/runs") == ["exact_s0"]


def test_minutes_cut_and_the_next_call_goes_on(here, monkeypatch):
    write_recipe(here, epochs=3)
    monkeypatch.setenv("FAKE_SECONDS", "60")
    begin = time.monotonic()
    code, said = ran(minutes=0.04, side_by_side=2)
    assert code == 75 and time.monotonic() - begin < 15 and "0.04 minutes are over; 2 running" in said
    assert "6 runs are left. The same command goes on" in said and "failed:" not in said
    started = sorted(p.parent.name for p in (here / "out/runs/claim").glob("*/log.txt"))
    assert started == ["exact_s0", "rate-0.2_s0"]  # one seed of two arms: a pair
    monkeypatch.setenv("FAKE_SECONDS", "0")
    assert ran()[0] == 0 and names(here / "experiments/claim/runs") == ALL
    assert all([line.split()[2] for line in log(here, i).splitlines()] == ["0", "1"] for i in started)


def test_one_that_does_not_stop_is_killed(here, monkeypatch):
    write_recipe(here, epochs=3)
    monkeypatch.setenv("FAKE_SECONDS", "60")
    monkeypatch.setenv("FAKE_DEAF", "1")
    monkeypatch.setattr(module, "GRACE", 0.5)
    begin = time.monotonic()
    code, said = ran(minutes=0.03)
    assert code == 75 and 1.8 + 0.5 <= time.monotonic() - begin < 15 and "failed:" not in said


def test_ctrl_c_saves_and_stops(here, monkeypatch):
    write_recipe(here, epochs=3)
    monkeypatch.setenv("FAKE_SECONDS", "60")
    threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    said = []
    with pytest.raises(KeyboardInterrupt):
        reproduce("claim", say=said.append)
    assert any(s.startswith("Stopping; 1 running") for s in said) and any("6 runs are left" in s for s in said)
    monkeypatch.setenv("FAKE_SECONDS", "0")
    assert (
        ran(only="exact_s0")[0] == 0 and log(here, "exact_s0").count("begins at") == 2 and log(here, "exact_s0").count("begins at 0") == 1
    )


def test_a_run_that_another_process_trains_is_left_alone(here):
    folder = here / "out/runs/claim/exact_s0"
    folder.mkdir(parents=True)
    holds = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-c", holds, str(folder / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with other:
        assert other.stdout.readline() == b"held\n"
        code, said = ran(only="*_s0")
        assert code == 75 and "exact_s0: another process trains it; left alone" in said
        other.stdin.close()
    assert ran(only="*_s0")[0] == 0 and names(here / "experiments/claim/runs") == ["exact_s0", "rate-0.2_s0", "rate-0.3_s0"]


def test_a_training_keeps_its_lock_when_who_started_it_is_gone(here, monkeypatch):
    monkeypatch.setenv("FAKE_SECONDS", "60")
    run, said = load(find("claim")).runs()[0], []
    first, second = (module.Pool([module.Task(run.id, run, here / "run", here / "result.json")], 1, said.append) for _ in range(2))
    first._fill()  # nothing of the lock is left in this process
    second._fill()
    assert said == ["exact_s0: another process trains it; left alone."] and len(first.running) == len(second.left) == 1
    first._stop()
    third = module.Pool(second.tasks, 1, said.append)
    third._fill()
    assert len(third.running) == 1
    third._stop()


def test_runs_side_by_side_overlap_share_cores_and_hide_times(here, monkeypatch):
    monkeypatch.setenv("FAKE_SECONDS", "1")
    begin = time.monotonic()
    assert ran(side_by_side=6)[0] == 0
    assert time.monotonic() - begin < 5.9  # one after the other sleeps 6 s
    assert f"threads {max(1, os.cpu_count() // 6)} " in log(here, "exact_s0")
    results = json.loads((here / "experiments/claim/results.json").read_text())
    assert [a["alone"] for a in results["arms"]] == [False] * 3 and results["arms"][1]["against"]["ratio"]["step_ms"] is None
    assert "step" not in table(results)[0] and "held" in table(results)[0]


def test_a_run_that_was_not_always_alone_says_so(here, monkeypatch):
    write_recipe(here, epochs=3)
    monkeypatch.setenv("FAKE_SECONDS", "60")
    assert ran(minutes=0.02, side_by_side=2)[0] == 75
    monkeypatch.setenv("FAKE_SECONDS", "0")
    ran()
    kept = {i: json.loads((here / f"experiments/claim/runs/{i}.json").read_text())["side_by_side"] for i in ALL}
    assert kept["exact_s0"] == kept["rate-0.2_s0"] == 2 and kept["rate-0.3_s1"] == 1


def test_into_writes_elsewhere_and_skips_what_is_here(here):
    ran(only="*_s0")
    code, said = ran(into=here / "away")
    assert code == 0 and "6 runs, 3 done" in said
    assert names(here / "away/claim/runs") == ["exact_s1", "rate-0.2_s1", "rate-0.3_s1"]
    assert json.loads((here / "away/claim/results.json").read_text())["runs"] == {"done": 6, "of": 6}
    assert json.loads((here / "experiments/claim/results.json").read_text())["runs"] == {"done": 3, "of": 6}
    assert "6 runs, 6 done" in ran(into=here / "away")[1]


def test_into_a_new_folder_where_all_is_done_here(here):
    ran()
    assert ran(into=here / "away")[0] == 0
    assert json.loads((here / "away/claim/results.json").read_text())["runs"] == {"done": 6, "of": 6}


def test_progress_tells_epochs_and_the_time_to_go(here, monkeypatch):
    write_recipe(here, epochs=4)
    monkeypatch.setenv("FAKE_SECONDS", "0.2")
    monkeypatch.setattr(module, "TELL", 0.3)
    said = ran(only="exact_s0")[1]
    assert re.search(r"exact_s0 epoch [123] of 4\n  \[0 of 1 done, 1 running, 0 failed, about \d+ s to go\]", said)


# Statistics


@pytest.mark.parametrize("freedom", [*range(1, 41), 99, 100, 1000])
def test_students_quantile_is_scipys(freedom):
    assert student(freedom) == pytest.approx(scipy.stats.t.ppf(0.975, freedom), rel=1e-9)


def test_a_paired_interval_is_scipys():
    ours, theirs = {0: 91.2, 1: 90.1, 2: 92.7, 3: 91.9}, {3: 91.0, 2: 92.9, 1: 89.1, 0: 90.6}
    found = paired(ours, theirs)
    test = scipy.stats.ttest_rel([ours[s] for s in range(4)], [theirs[s] for s in range(4)])
    low, high = test.confidence_interval(0.95)
    assert found["interval"] == pytest.approx([low, high]) and found["mean"] == pytest.approx(0.575)
    assert found["difference"] == (abs(test.statistic) > 2) and found["clear"] == (test.pvalue < 0.05)


def test_two_standard_errors_of_three_seeds_are_not_clear():
    found = paired({0: 1.0, 1: 0.5, 2: 0.2}, dict.fromkeys(range(3), 0.0))
    assert found["difference"] and not found["clear"] and found["interval"][0] < 0 < found["interval"][1]


def test_pairs_are_common_seeds_alone():
    found = paired({0: 1.0, 1: 2.0, 2: 3.0, 5: None}, {4: 9.0, 2: 2.5, 1: 1.0, 5: 1.0})
    assert found["seeds"] == [1, 2] and found["differences"] == [1.0, 0.5] and found["mean"] == 0.75


@pytest.mark.parametrize(
    ("values", "beyond"),
    [([1.0, 1.0], True), ([0.0, 0.0], False), ([1.0], None), ([], None), ([1.0, -0.9, 0.1], False), ([1, 1.1, 0.9], True)],
)
def test_a_difference_is_beyond_two_standard_errors(values, beyond):
    found = paired(dict(enumerate(values)), dict.fromkeys(range(9), 0.0))
    assert found["difference"] is beyond and (found["interval"] is None) == (len(values) < 2)


def test_a_spread_with_an_unknown_value_is_unknown():
    assert spread([1.0, None]) == spread([]) == {"mean": None, "deviation": None, "interval": None}
    assert spread([1.0, 3.0])["deviation"] == pytest.approx(math.sqrt(2))


# Results


def test_results_pair_arms_by_seed(here):
    write_recipe(here, seeds=(0, 1, 2))
    ran()
    (here / "experiments/claim/runs/exact_s1.json").unlink()
    results = collect("claim")
    exact, second, _ = results["arms"]
    assert exact["seeds"] == [0, 2] and exact["against"] is None and second["seeds"] == [0, 1, 2]
    assert second["against"]["arm"] == "exact" and second["against"]["seeds"] == second["against"]["top1"]["seeds"] == [0, 2]
    assert second["mean"]["top1"] == pytest.approx(93.0) and second["deviation"]["top1"] == pytest.approx(1.0)
    assert second["against"]["top1"]["mean"] == pytest.approx(1.0)
    assert second["against"]["ratio"] == {"held": pytest.approx(2), "peak": None, "step_ms": pytest.approx(2)}
    assert results["runs"] == {"done": 8, "of": 9} and results["verdict"] is None
    assert (results["commits"], results["devices"], results["dates"]) == (["c0ffee0123456789-dirty"], ["a device"], ["2026-01-02"])
    assert results == json.loads((here / "experiments/claim/results.json").read_text())


def test_an_arms_peak_is_the_least_of_its_seeds(here):
    """A first run may have measured what cuDNN tried."""
    ran()
    for run, peak in {"exact_s0": 300, "exact_s1": 200, "rate-0.2_s0": 100, "rate-0.2_s1": 150, "rate-0.3_s0": None}.items():
        path = here / f"experiments/claim/runs/{run}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "peak": peak}))
    exact, arm, _ = collect("claim")["arms"]
    assert exact["typical"]["peak"] == 200 and arm["typical"]["peak"] == 100 and arm["against"]["ratio"]["peak"] == 0.5
    assert exact["mean"]["peak"] == 250 and arm["typical"]["held"] == arm["mean"]["held"]


def test_a_peak_that_runs_do_not_tell_is_of_what_was_timed(here):
    """Trainings by CUDA graphs have none; those of --time have."""
    ran()
    recipe = load(find("claim"))
    settings = {a.name: {k: v for k, v in recipe.settings(a, 0).to_json().items() if k != "root"} for a in recipe.arms}
    timed = {name: {"step_ms": 1.0, "peak": peak} for name, peak in (("exact", 80), ("rate 0.2", 60), ("rate 0.3", 20))}
    times = {"arms": {name: {**t, "settings": settings[name]} for name, t in timed.items()}}
    (here / "experiments/claim/times.json").write_text(json.dumps(times))
    for run, peak in {"exact_s0": 100, "exact_s1": 100, "rate-0.2_s0": 50, "rate-0.2_s1": 50}.items():
        path = here / f"experiments/claim/runs/{run}.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "peak": peak}))
    _, told, untold = collect("claim")["arms"]
    assert told["against"]["ratio"]["peak"] == 0.5 and untold["against"]["ratio"]["peak"] == 0.25


def test_no_ratio_between_devices(here):
    ran()
    for path in (here / "experiments/claim/runs").glob("exact_*.json"):
        path.write_text(path.read_text().replace("a device", "another"))
    assert collect("claim")["arms"][1]["against"]["ratio"] == {"held": None, "peak": None, "step_ms": None}


def test_no_ratio_of_times_between_a_training_by_graphs_and_one_without(here):
    write_recipe(here, **{'{"lr": 0.3}': '{"lr": 0.3, "compile": True, "device": "cuda"}'})
    assert reproduce("claim", graphs=True) == 0
    _, without, graphs = (a["against"] and a["against"]["ratio"] for a in collect("claim")["arms"])
    assert graphs["step_ms"] is None and graphs["held"] and without["step_ms"]


def test_an_arm_can_be_against_another(here):
    change_recipe(here, '{"lr": 0.3}, group="rates"', '{"lr": 0.3}, group="rates", against="rate 0.2"')
    ran()
    results = collect("claim")
    assert results["arms"][2]["against"]["arm"] == "rate 0.2" and results["arms"][2]["against"]["top1"]["mean"] == pytest.approx(1.0)
    assert table(results)[3][2].endswith(" to rate 0.2") and table(results)[3][-2:] == ["1.50 †", "1.50 †"] and "†" in told(results)


def test_arms_can_be_judged_by_their_loss(here):
    path = here / "experiments/claim/recipe.py"
    path.write_text(path.read_text().replace("differs=", 'measure="test_loss", differs='))
    ran()
    results = json.loads((here / "experiments/claim/results.json").read_text())
    head, _, row, *_ = table(results)
    assert head[:3] == ["arm", "test loss", "difference"] and "top-1, %" in head[3:]
    pair = results["arms"][1]["against"]["test_loss"]
    assert f"{pair['mean']:+.3f}".replace("-", "−") in row[2] and "claim: test loss of every arm" not in page_text()
    assert ": test loss of every arm]" in page_text()


def test_a_verdict_that_fails_names_the_recipe(here):
    change_recipe(here, "r['arms'][1]", "r['arm'][1]")
    with pytest.raises(ValueError, match=r"recipe.py: verdict failed with KeyError: 'arm'"):
        ran()
    assert names(here / "experiments/claim/runs") == ALL


def test_the_table_has_what_is_known(here):
    ran()
    cells = table(collect("claim"))
    assert cells[0] == ["arm", "top-1, %", "difference", "paper", "training loss", "held", "step"]
    assert cells[1] == ["exact", "91.50 ± 0.71", "", "", "0.900 ± 0.000", "100 B", "0.5 ms"]
    assert cells[2] == ["rate 0.2", "92.50 ± 0.71", "+1.00 (+1.00 to +1.00) *", "92.5", "0.800 ± 0.000", "2.00", "2.00"]


def coloured(path):
    """Pixels that are blue, and orange: arms of no group, and of the first."""
    pixels = matplotlib.image.imread(path)[..., :3]
    red, green, blue = pixels[..., 0], pixels[..., 1], pixels[..., 2]
    return int((blue > red + 0.3).sum()), int(((red > blue + 0.5) & (green > 0.3)).sum())


def test_the_figure_has_every_arm(here):
    ran()
    exact, others = coloured(here / "experiments/claim/figure.png")
    assert 100 < exact < others
    (here / "experiments/claim/runs/exact_s0.json").unlink()
    (here / "experiments/claim/runs/exact_s1.json").unlink()
    collect("claim")  # what the others are compared with is not there
    first, others = coloured(here / "experiments/claim/figure.png")
    assert first > 100 and others == 0  # one group is left, and has the first colour


def test_curves_are_of_the_arms_that_a_recipe_names(here):
    """Of one that is tested after every second epoch, the measure is drawn where it is known."""
    place = here / "experiments/claim"
    ran()
    assert not (place / "curves.png").exists() and "by epochs" not in page_text()
    for path in (place / "runs").glob("*.json"):
        result = json.loads(path.read_text())
        result["curves"] = {"epoch": [1, 2, 3, 4], "train_loss": [3.0, 2.0, 1.0, 0.5], "top1": [None, 10.0 + result["seed"], None, 40.0]}
        path.write_text(json.dumps(result))
    change_recipe(here, "minutes=2", "curves=('exact',), minutes=2")
    collect("claim")
    exact, others = coloured(place / "curves.png")
    assert exact > 100 and others == 0 and "training loss and top-1 by epochs](../experiments/claim/curves.png)" in page_text()
    change_recipe(here, "curves=('exact',)", "curves=('exact', 'rate 0.2')")
    collect("claim")
    assert coloured(place / "curves.png")[1] > 100
    for path in (place / "runs").glob("rate-0.2*"):  # of an older one, or of one that lost its rows
        result = json.loads(path.read_text())
        del result["curves"]
        path.write_text(json.dumps(result))
    collect("claim")
    assert coloured(place / "curves.png")[1] == 0
    for path in (place / "runs").glob("exact*"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "curves": {"epoch": [], "train_loss": [], "top1": []}}))
    collect("claim")
    assert coloured(place / "curves.png") == (0, 0)
    change_recipe(here, "'rate 0.2')", "'rate 0.4')")
    with pytest.raises(ValueError, match=r"curves names 'rate 0.4', which is no arm that is trained. Arms: exact, rate 0.2, rate 0.3"):
        collect("claim")


def test_runs_of_another_recipe_serve_where_their_settings_are_the_same(here):
    write_recipe(here, "other", **{"minutes=2": "beside=('claim',), minutes=2", '"rate 0.3"': '"rate 0.4"', '"lr": 0.3': '"lr": 0.4'})
    ran(only="*_s0,exact_s1")
    code, said = ran("other")
    own = ["rate-0.2_s1.json", "rate-0.4_s0.json", "rate-0.4_s1.json"]
    assert code == 0 and "6 runs, 3 done" in said and sorted(p.name for p in Path("experiments/other/runs").iterdir()) == own
    assert [a["seeds"] for a in collect("other")["arms"]] == [[0, 1]] * 3
    assert "What `claim` has trained with the same settings is not trained again." in page_text()
    write_recipe(here, "third", **{"minutes=2": "beside=('gone',), minutes=2"})
    with pytest.raises(ValueError, match=r"beside names 'gone', and there is no such recipe in .*/experiments/"):
        ran("third")
    Path("experiments/claim/runs/rate-0.2_s0.json").write_text("cut")  # that is for its own recipe to tell
    assert [a["seeds"] for a in collect("other")["arms"]] == [[0, 1], [1], [0, 1]]


def test_a_recipe_is_found_from_its_own_folder(here, monkeypatch):
    monkeypatch.chdir(here / "experiments/claim")
    assert ran("recipe.py")[0] == 0 and names(here / "experiments/claim/runs") == ALL
    assert collect(".")["runs"]["done"] == 6


def test_the_page_is_a_function_of_the_results(here):
    write_recipe(here, "zebra", order=0)
    ran()
    ran("zebra")
    path = page()
    text = path.read_text()
    assert path == Path("docs/results.md") and text == page_text()
    collect("claim")
    assert page_text() == text and str(here) not in text
    assert text.index("`halfback reproduce zebra`") < text.index("`halfback reproduce claim`")  # by order, not by name
    assert "is written by `halfback reproduce --page`" in text and "**Does it hold?** Yes, by 1.0." in text
    assert "| rate 0.2<br>`lean`, `lr=0.2` | 92.50 ± 0.71 | +1.00 (+1.00 to +1.00) \\* | 92.5 |" in text and "| **rates** |" in text
    assert "- it is small" in text and "](../experiments/claim/figure.png)" in text and "Seeds 0, 1. a device; python 3, torch 2;" in text
    assert "2026-01-02. Commit c0ffee0123-dirty." in text and "| exact | 91.50" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1  # whole rows


def test_a_page_begins_with_what_is_claimed_and_with_the_headline(here):
    change_recipe(here, "minutes=2", "claims=('rate 0.2', 'rate 0.3'), minutes=2")
    ran(only="exact_*,*0.2_*,*0.3_s0")
    (here / "experiments/headline.json").write_text(json.dumps({"text": "one setting"}))
    short, _, rest = page_text().partition("## A claim, table 1")
    assert "| **A claim, table 1** |" in short and "\n\none setting\n" in short and "one setting" not in rest
    assert "| rate 0.2<br>`lean` | 91.50 % | +1.00 (+1.00 to +1.00) \\* | 2 | " in short
    assert "| rate 0.3<br>`lean` |  | not measured yet | 1 of 2 |  |" in short


def test_a_page_without_claims_has_no_beginning(here):
    ran()
    assert "In short" not in page_text()


def test_a_page_makes_means_and_figures_anew(here):
    """From runs alone, those of a recipe that is not ended too."""
    ran(only="exact_*,*0.2_*")
    place = here / "experiments/claim"
    before = {name: (place / name).read_bytes() for name in ("results.json", "figure.png")}
    for name in before:
        (place / name).write_text("{}")
    page()
    assert {name: (place / name).read_bytes() for name in before} == before


def test_a_page_of_unfinished_runs_says_so(here):
    ran(only="exact_*,*0.2_*")
    assert "**Not complete:** 2 of 6 runs are missing." in page_text() and "**Does it hold?**" not in page_text()


def test_one_seed_is_no_figure_of_a_page(here):
    ran(only="exact_*,*0.2_*,*0.3_s0")
    text = page_text()
    assert "Not shown before they have two seeds: rate 0.3." in text and "| exact" in text and "| rate 0.2" in text
    assert "| rate 0.3" not in text and Path("experiments/claim/figure.png").exists()


def test_a_page_says_how_many_seeds_of_how_many_an_arm_has(here):
    write_recipe(here, **{'{"lr": 0.3}': '{"lr": 0.3}, seeds=(0, 1, 2, 3)'})
    ran(only="*_s[0-2]")
    head, _, exact, *_, more = [line for line in page_text().splitlines() if line.startswith("|")]
    assert [c.strip() for c in head.split("|")][2] == "seeds" and exact.split("|")[2].strip() == ""
    assert "rate 0.3" in more and more.split("|")[2].strip() == "3 of 4"
    assert "Seeds 0, 1, 2. " in page_text()
    ran()
    assert [line for line in page_text().splitlines() if line.startswith("|")][-1].split("|")[2].strip() == "4"


def test_settings_that_every_arm_changes_are_not_called_theirs(here):
    write_recipe(here, **{'Arm("exact")': 'Arm("exact", "exact", {"lr": 0.4})'})
    ran()
    said = next(line for line in page_text().splitlines() if "Settings, but for those that an arm names" in line)
    assert "`optimizer=sgd`" in said and "lr=" not in said


def test_a_page_without_any_pair_of_seeds_shows_nothing(here):
    ran(only="*_s0")
    text = page_text()
    assert "## Not told yet" in text and "**Here:**" not in text and "## A claim" not in text
    assert text.splitlines()[-1] == "| `claim` | A claim, table 1 | 3 of 6 | 2 |"
    assert not Path("experiments/claim/figure.png").exists()


def test_a_page_of_nothing_is_an_error(here):
    with pytest.raises(ValueError, match=r"There is no results.json in experiments/"):
        page()
    with pytest.raises(ValueError, match=r"runs has no runs yet: halfback reproduce claim"):
        collect("claim")


def test_the_list_tells_what_is_done(here):
    broken = here / "experiments/broken/recipe.py"
    broken.parent.mkdir()
    broken.write_text("RECIPE = 1")
    ran(only="*_s0")
    assert "3/6" in listing() and "one seed so far, which tells nothing" in listing()
    ran(only="exact_*,*0.2_*")
    head, _, first, second = listing().splitlines()
    assert head.split() == "name runs minutes measured what paper".split()
    assert first.startswith("broken") and "has no RECIPE" in first
    assert second.split()[:3] == ["claim", "5/6", "2"] and "exact 91.50 %, others +1.00 " in second and "more is more" in second


def test_the_committed_page_is_what_the_results_give(monkeypatch):
    assert list((ROOT / "experiments").glob("*/results.json"))
    monkeypatch.chdir(ROOT)
    assert (ROOT / "docs/results.md").read_text() == page_text()


# The command


def arguments(*given):
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(given)


def test_the_command(here):
    said = []
    assert module.main(arguments("claim", "--only", "*_s0", "--side-by-side", "3", "--list", "--page"), said.append) == 0
    assert "3/6" in said[-2] and said[-1] == "Written: docs/results.md"
    with pytest.raises(ValueError, match="give the NAME of a recipe, --list or --page"):
        module.main(arguments())
    with pytest.raises(ValueError, match="side_by_side=0"):
        module.main(arguments("claim", "--side-by-side", "0"))


# The real thing


REAL = """
from halfback.train import Arm, Recipe, Settings
ARMS = (Arm("exact"), Arm("lean", "lean"), Arm("in parts", "lean+recompute", {"accumulate": 2}, like="exact"))
RECIPE = Recipe(title="Digits", about="A", paper="P", base=Settings(epochs=1, batch=64), arms=ARMS, seeds=(0, 1))
"""


def test_digits_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "experiments/digits/recipe.py"
    path.parent.mkdir(parents=True)
    path.write_text(REAL)
    code, said = ran("digits", side_by_side=2)
    assert code == 0, said
    exact, lean, parts = json.loads((path.parent / "results.json").read_text())["arms"]
    assert parts["mean"]["top1"] == exact["mean"]["top1"] and parts["mean"]["held"] is parts["against"]["ratio"]["held"] is None
    assert exact["seeds"] == lean["seeds"] == [0, 1] and exact["values"]["top1"][0] > 10
    assert lean["against"]["ratio"]["held"] < 1 and max(map(abs, lean["against"]["train_loss"]["differences"])) < 0.05  # lean is exact
    assert (tmp_path / "out/runs/digits/lean_s1/report.html").exists()
    assert "another process" not in (tmp_path / "out/runs/digits/lean_s1/log.txt").read_text()  # the lock is its own, and it locks
    assert dataclasses.asdict(load(path).runs()[0].settings)["epochs"] == 1 and "4 runs, 4 done" in ran("digits")[1]
    assert exact["time"] is None and lean["against"]["ratio"]["step_ms"] is None  # they ran side by side
    _steps_are_timed_apart(path)


def _steps_are_timed_apart(path):
    code, said = ran("digits", side_by_side=2, timed=True)
    assert code == 0, said
    times = json.loads((path.parent / "times.json").read_text())
    assert list(times["arms"]) == ["exact", "lean", "in parts"] and {"date", "device_name", "versions", "commit"} < set(times)
    turns = sorted(arm["alone"] for arm in times["arms"].values())
    assert all(first < ended <= began for (first, ended), (began, _) in pairwise(turns))  # one at a time
    for arm in times["arms"].values():
        assert arm["least_ms"] <= arm["step_ms"] <= arm["most_ms"] and arm["unit"] == "samples"
        assert arm["per_s"] == pytest.approx(1000 * 64 / arm["step_ms"])
    results = json.loads((path.parent / "results.json").read_text())
    its, own = (times["arms"][a]["step_ms"] for a in ("exact", "lean"))
    assert results["arms"][1]["against"]["ratio"]["step_ms"] == own / its and results["arms"][0]["time"]["step_ms"] == its
    head, _, second, third = table(results)
    row, last = (dict(zip(head, cells, strict=True)) for cells in (second, third))
    parts, held = results["arms"][2], {a: times["arms"][a]["held"] for a in ("exact", "in parts")}
    assert parts["against"]["ratio"]["held"] == held["in parts"] / held["exact"] < 0.5  # it was not trained, and this is of what was timed
    assert last["difference"] == "as exact" and not last["top-1, %"] and last["held"] == f"{parts['against']['ratio']['held']:.2f}"
    assert row["step"] == f"{own / its:.2f}" and row["samples/s"] == f"{times['arms']['lean']['per_s']:,.0f}"
    path.write_text(REAL.replace("batch=64", "batch=32"))
    assert times_of(load(path), [path.parent / "runs"])["arms"] == {}  # they were timed with other settings


def study_of(name):
    spec = importlib.util.spec_from_file_location(f"study_of_{name}", ROOT / "experiments" / name / "study.py")
    study = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    return study


def test_the_study_of_gradients_ends_on_the_page(tmp_path, monkeypatch, capsys):
    study = study_of("sbp_gradients")
    monkeypatch.setattr(study, "BATCHES", 1)
    monkeypatch.setattr(study, "MASKS", 1)
    others = ("SBP", "all layers", "increasing", "decreasing", "random positions", "independent masks")
    monkeypatch.setattr(study, "VARIANTS", {name: study.VARIANTS[name] for name in others})
    out = tmp_path / "experiments/gradients"
    study.main(["--epochs", "2", "--batch", "512", "--seeds", "2", "--out", str(out)])
    found = json.loads((out / "results.json").read_text())["models"]["small-vit"]
    own, told = found["training"]["summary"], page_text(tmp_path / "experiments", tmp_path / "docs/results.md")
    assert own["exact"]["consistency"]["mean"] == 100 and own["exact"]["similarity"]["mean"] == pytest.approx(1)
    assert f"| {own['SBP']['consistency']['mean']:.2f} ± " in told and "../experiments/gradients/figure.png" in told
    assert f"{found['gradients']['middle']['all layers']['all']['cosine']:.3f}" in told and (out / "figure.png").exists()


def test_the_study_of_histograms_ends_on_the_page(tmp_path, monkeypatch, capsys):
    study = study_of("dropit_histograms")
    runs, out = tmp_path / "runs", tmp_path / "experiments/histograms"
    with pytest.raises(SystemExit, match=r"has 0 seeds with the checkpoints of both exact and parallel-min-k-keep-0.2, and two are wanted"):
        study.main(["--runs", str(runs), "--out", str(out)])
    base = Settings(model="resnet18", data="digits", epochs=1, batch=512, optimizer="sgd", best=False)
    for name, method in (("exact", "exact"), ("parallel-min-k-keep-0.2", "dropit(keep=0.2, exact_first=False)")):
        for seed in (0, 1):
            train(dataclasses.replace(base, method=method, seed=seed), runs / f"{name}_s{seed}", say=lambda text: None)
    study.main(["--runs", str(runs), "--out", str(out)])
    found, told = json.loads((out / "results.json").read_text())["found"], page_text(tmp_path / "experiments", tmp_path / "docs/results.md")
    first = found["gradients"]["start"]["layers.0.conv1.weight"]["0"]
    assert list(found["gradients"]["end"]) == ["layers.0.conv1.weight", "layers.4.conv1.weight", "layers.7.conv2.weight"]
    assert all(sum(shares) == pytest.approx(1) for shares in first["shares"].values())
    assert 1 > first["cosine"]["DropIT, keep 0.2"] > first["cosine"]["DropIT, keep 0.1"] > first["cosine"]["DropIT, keep 0.01"]
    assert first["cosine"]["DropIT, keep 0.2"] > 0.8 > abs(first["cosine"]["exact, another batch"])
    assert found["parameters"]["layers.0.bn1.weight"]["1"]["overlap"].keys() == {"DropIT, keep 0.2", "exact, another seed"}
    assert "../experiments/histograms/figure.png" in told and "Seeds 0, 1." in told and (out / "figure.png").exists()


def test_an_arm_that_cannot_be_timed_is_told_in_a_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "experiments/digits/recipe.py"
    path.parent.mkdir(parents=True)
    path.write_text(REAL.replace("ARMS = (", 'ARMS = (Arm("exact", changes={"model": "gone.py:make"}),)  # ('))
    code, said = ran("digits", timed=True)
    assert code == 1 and not (path.parent / "times.json").exists()
    assert said.splitlines()[1:] == ["exact was not timed, exit code 2:", "  halfback: model 'gone.py:make': there is no file gone.py."]
    with pytest.raises(ValueError, match="Leave --only out"):
        ran("digits", timed=True, only="exact*")
