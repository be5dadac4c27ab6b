"""Recipes: trainings that belong together, and which of them are done.

    experiments/NAME/recipe.py      RECIPE: arms, seeds, and what a paper says
    experiments/NAME/runs/ID.json   what one run gave; a run is one arm with one seed

A run is done when ID.json is there with the settings that the recipe has now.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..methods import DropIT, Recompute
from .settings import Settings, methods_of

EXPERIMENTS = Path("experiments")
MEASURES = ("top1", "top5", "train_loss", "test_loss", "held", "peak", "step_ms")
JUDGED = {"top1": "top-1, %", "test_loss": "test loss"}  # what arms can be judged by, as it is called
EXACT = ("lean", "recompute", "chunkedloss")  # methods that leave gradients as they are
LOCAL = ("root", "tensorboard")  # settings of one machine, not kept with a result

Result = dict[str, Any]


# Recipes


@dataclass(frozen=True)
class Arm:
    """One way to train.

    changes   settings that differ from the recipe's base
    paper     the paper's figure: top-1 in percent
    group     arms of a group stand together
    against   another arm than the recipe's that differences are taken to
    seeds     of its own, instead of the recipe's; differences are taken over those that both arms have
    like      the arm whose gradients this one has too, as its method adds to that arm's what is exact alone: it is not trained, but timed
    """

    name: str
    method: str = "exact"
    changes: Mapping[str, Any] = field(default_factory=dict)
    paper: float | None = None
    group: str = ""
    against: str | None = None
    like: str | None = None
    seeds: tuple[int, ...] | None = None

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-.")


@dataclass(frozen=True)
class Run:
    id: str
    arm: Arm
    seed: int
    settings: Settings


@dataclass(frozen=True)
class Recipe:
    """Arms that are trained with the same seeds.

    against   the arm that differences are taken to
    differs   what is not as in the paper
    minutes   that it takes, on what is told in `on`
    order     its place on the page
    measure   what arms are judged by: top1, or test_loss, which is better the smaller it is
    claims    arms whose differences are what the recipe is for: the page begins with them
    curves    arms whose course is drawn: loss and measure by epochs
    beside    recipes in folders beside this one whose runs serve it too, where their settings are the same
    verdict   whether the paper's claim holds: a text, or a function that computes one from results.json
    """

    title: str
    about: str
    paper: str
    base: Settings
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    against: str = "exact"
    differs: tuple[str, ...] = ()
    minutes: float | None = None
    on: str = ""
    order: int = 0
    verdict: str | Callable[[Result], str] | None = None
    measure: str = "top1"
    claims: tuple[str, ...] = ()
    curves: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("arms", "seeds", "differs", "claims", "curves", "beside"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise ValueError(f"Recipe: {name} is the text {value!r}; give a tuple, as ({value!r},).")
            if not isinstance(value, Iterable):
                raise ValueError(f"Recipe: {name} is {value!r}; give a tuple, as ({value!r},).")
            object.__setattr__(self, name, tuple(value))
        if not isinstance(self.base, Settings):
            raise ValueError(f"Recipe: base is a {type(self.base).__name__}; give Settings(...).")
        if other := [a for a in self.arms if not isinstance(a, Arm)]:
            raise ValueError(f"Recipe: arms has {other[0]!r}, which is no Arm; give Arm(name, method).")
        if self.measure not in JUDGED:
            raise ValueError(f"Recipe: measure {self.measure!r} is none of {', '.join(JUDGED)}.")
        self._check_arms()
        self._check_seeds()
        self.runs()

    def _check_arms(self) -> None:
        names = [a.name for a in self.arms]
        for a in self.arms:
            alike = [b.name for b in self.arms if b.slug == a.slug]
            if len(alike) > 1:
                raise ValueError(f"Recipe: arms {alike[0]!r} and {alike[1]!r} would both be kept as {a.slug!r}; give one another name.")
            if not 0 < len(a.slug) <= 80:
                raise ValueError(f"Recipe: arm {a.name!r} would be kept as {a.slug!r}; its name needs 1 to 80 letters and digits.")
        for who, against in (("the recipe", self.against), *((f"arm {a.name!r}", a.against) for a in self.arms)):
            if against is not None and against not in names:
                raise ValueError(f"Recipe: {who} is against {against!r}, which is no arm. Arms: {', '.join(names) or 'none'}.")
        for what, named in (("claims", self.claims), ("curves", self.curves)):
            if unknown := [name for name in named if name not in {a.name for a in self.arms if a.like is None}]:
                raise ValueError(f"Recipe: {what} names {unknown[0]!r}, which is no arm that is trained. Arms: {', '.join(names)}.")
        if alone := [a.name for a in self.arms if a.name in self.claims and self.against_of(a) is None]:
            raise ValueError(f"Recipe: claims names {alone[0]!r}, which the others are compared with; name those.")
        self._check_likes()
        for what, given in (("method", self.base.method != "exact"), ("seed", self.base.seed != 0)):
            if given or any(what in a.changes for a in self.arms):
                raise ValueError(f"Recipe: {what} is neither a setting of the base nor a change; give arms a method, and the recipe seeds.")

    def _check_likes(self) -> None:
        """Whoever is not trained has the gradients of the arm whose accuracy it is given."""
        trained = {a.name: a for a in self.arms if a.like is None}
        for a in self.arms:
            if a.like is not None and a.like not in trained:
                raise ValueError(f"Recipe: arm {a.name!r} is like {a.like!r}, which is no arm that is trained: {', '.join(trained)}.")
            if a.like is not None and _gradients_of(a) != _gradients_of(trained[a.like]):
                raise ValueError(
                    f"Recipe: arm {a.name!r} is like {a.like!r}, and may differ from it by what is exact alone: {', '.join(EXACT)} "
                    "(beside DropIT recompute(sparing=True)), and accumulate where nothing approximates. All else changes gradients."
                )

    def _check_seeds(self) -> None:
        for who, seeds in (("", self.seeds), *((f" of arm {a.name!r}", a.seeds) for a in self.arms if a.seeds is not None)):
            if not seeds or len(set(seeds)) < len(seeds) or not all(isinstance(s, int) and s >= 0 for s in seeds):
                raise ValueError(f"Recipe: seeds {seeds}{who} must be different whole numbers from 0 on.")

    def runs(self) -> list[Run]:
        """What is trained."""
        trained = [(a, a.seeds or self.seeds) for a in self.arms if a.like is None]
        seeds = dict.fromkeys([*self.seeds, *(seed for _, own in trained for seed in own)])
        return [self._run(a, seed) for seed in seeds for a, own in trained if seed in own]

    def timed(self) -> list[Run]:
        """Every arm once, also those that are not trained."""
        return [self._run(a, self.seeds[0]) for a in self.arms]

    def _run(self, arm: Arm, seed: int) -> Run:
        return Run(f"{arm.slug}_s{seed}", arm, seed, self.settings(arm, seed))

    def settings(self, arm: Arm, seed: int) -> Settings:
        missing = [k for k in ("lr", "weight_decay") if "optimizer" in arm.changes and k not in arm.changes]
        if missing:
            raise ValueError(f"Recipe: arm {arm.name!r}: optimizer changes, so give {' and '.join(missing)} too; the base has the other's.")
        known = [f.name for f in dataclasses.fields(Settings)]
        if unknown := [name for name in arm.changes if name not in known]:
            raise ValueError(f"Recipe: arm {arm.name!r} changes {unknown[0]!r}, which is no setting. Settings: {', '.join(known)}.")
        try:
            return dataclasses.replace(self.base, method=arm.method, seed=seed, **arm.changes)
        except (TypeError, ValueError) as e:
            raise ValueError(f"Recipe: arm {arm.name!r}: {e}") from e

    def against_of(self, arm: Arm) -> str | None:
        """None for the arm that the others are taken to."""
        against = arm.against or self.against
        return None if against == arm.name else against


def _gradients_of(arm: Arm) -> tuple[list[Any], dict[str, Any]]:
    """All of an arm that its gradients depend on: what approximates draws and selects anew in each part of a batch, and DropIT leaves
    blocks alone that are recomputed as a whole. (Parts also change a batch norm's statistics, which no recipe can know.)"""
    methods = methods_of(arm.method)
    approximate = [m for m in methods if type(m).__name__.lower() not in EXACT]
    if any(isinstance(m, DropIT) for m in approximate):
        approximate += [m for m in methods if isinstance(m, Recompute) and not m.sparing]
    return approximate, {k: v for k, v in arm.changes.items() if approximate or k != "accumulate"}


def find(name: str | Path, experiments: Path | None = None) -> Path:
    """The recipe of a name, or of a path to recipe.py or its folder."""
    experiments = experiments or EXPERIMENTS
    for path in (Path(name), Path(name) / "recipe.py", experiments / name / "recipe.py"):
        if path.name == "recipe.py" and path.is_file():
            return path
    known = ", ".join(p.parent.name for p in recipes(experiments)) or "none"
    raise ValueError(f"There is no recipe {str(name)!r}. In {experiments}/: {known}. A path to a recipe.py is taken too.")


def recipes(experiments: Path | None = None) -> list[Path]:
    return sorted((experiments or EXPERIMENTS).glob("*/recipe.py"))


def load(path: Path) -> Recipe:
    """A recipe is a Python file, and is run."""
    spec = importlib.util.spec_from_file_location(f"recipe_{path.resolve().parent.name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        told = str(e) if isinstance(e, ValueError) else f"{type(e).__name__}: {e}"
        raise ValueError(f"{path}: {told}") from e
    found = getattr(module, "RECIPE", None)
    if not isinstance(found, Recipe):
        raise ValueError(f"{path} has no RECIPE = Recipe(...); found {type(found).__name__}.")
    return found


# What is done


def name_of(path: Path) -> str:
    return path.resolve().parent.name


def runs_folders(path: Path, into: Path | None) -> list[Path]:
    """Where results are looked for; they are written to the last."""
    return [path.parent / "runs", *([] if into is None else [into / name_of(path) / "runs"])]


def finished(recipe: Recipe, folders: Sequence[Path], *, again: Collection[str] = ()) -> dict[str, Result]:
    """Results by id. In the folder that is written to, one with other settings than the recipe's is an error, or is deleted if it is among
    those that are trained `again`. In the others it serves nobody, and stays."""
    runs = {r.id: r for r in recipe.runs()}
    found: dict[str, Result] = {}
    others: dict[Path, str] = {}
    for path in (p for folder in folders for p in sorted(folder.glob("*.json"))):
        run, own = runs.get(path.stem), path.parent == folders[-1]
        if run is None and own:
            raise ValueError(f"{path} is of no run of the recipe. Delete it, or give the recipe its arm and seed back.")
        if run is None:
            continue
        result = read_result(path)
        other = differing(run.settings, result["settings"], path)
        if not other:
            found.setdefault(run.id, result)
        elif own:
            others[path] = other
    if left := [path for path in others if path.stem not in again]:
        how = "It would be deleted, and --only does not have it: leave that out" if again else "--again deletes it and trains anew"
        raise ValueError(f"{left[0]} was trained with other settings: {others[left[0]]}. {how}; or change the recipe back.")
    for path in others:
        path.unlink()
    return {**_beside(recipe, folders), **found}


def _beside(recipe: Recipe, folders: Sequence[Path]) -> dict[str, Result]:
    """Runs of other recipes that are runs of this one."""
    homes = [folder.resolve().parents[1] for folder in folders]
    if missing := [name for name in recipe.beside if not (homes[0] / name / "recipe.py").is_file()]:
        raise ValueError(f"Recipe: beside names {missing[0]!r}, and there is no such recipe in {homes[0]}/.")
    there: list[tuple[Settings, Result]] = []
    for path in (p for name in recipe.beside for home in homes for p in sorted((home / name / "runs").glob("*.json"))):
        with contextlib.suppress(ValueError):  # what is wrong with it, its own recipe tells
            result = read_result(path)
            there.append((Settings.from_json(result["settings"]), result))
    found = {run.id: next((result for settings, result in there if not run.settings.differs(settings)), None) for run in recipe.runs()}
    return {id: result for id, result in found.items() if result is not None}


def read_result(path: Path) -> Result:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path} is no JSON: {e}.") from e
    missing = [
        k
        for k in ("settings", "done", "device_name", "versions", "commit", "date", *MEASURES)
        if not isinstance(result, dict) or k not in result
    ]
    if missing:
        raise ValueError(f"{path} is no result of a training: it lacks {', '.join(missing)}. Delete it, and train anew.")
    return result


def differing(settings: Settings, there: Any, where: Path) -> str:
    """How settings of a file differ; nothing if they do not."""
    different = settings.differs(Settings.from_json(there, str(where)))
    return ", ".join(f"{k} {theirs!r} there, {mine!r} in the recipe" for k, (mine, theirs) in different.items())
