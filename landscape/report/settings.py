"""Settings of runs: which differ only in their seed, what they are called, their colours and lines."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from landscape.plots.style import OTHER, color_of, paper_name, shades
from landscape.plots.training import recipe_keys
from landscape.report.contents import Run

# For loops of others, which have no colour in that table.
_OTHERS = ("#56B4E9", "#CC79A7", "#E69F00", "#999999")
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in their seed.

    Attributes:
        name: the algorithm as papers write it, with the keys in which settings of one algorithm differ.
        color: of its lines.
        places: of its runs among all runs.
    """

    name: str
    color: str
    places: tuple[int, ...]


def settings_of(runs: Sequence[Run]) -> list[Setting]:
    """The settings of ``runs``, in the order of their first runs."""
    keys = [_keys(run) for run in runs]
    places: dict[tuple[Any, ...], list[int]] = {}
    for k, (run, key) in enumerate(zip(runs, keys, strict=True)):
        unknown = () if run.checkpoint.has_recipe else (run.name,)  # nothing says what two loops share
        places.setdefault((run.checkpoint.algorithm, *unknown, *sorted(key.items())), []).append(k)
    settings: list[Setting] = []
    tones = _tones([runs[members[0]].checkpoint.algorithm for members in places.values()])
    for members, color in zip(places.values(), tones, strict=True):
        run, key = runs[members[0]], keys[members[0]]
        algorithm = run.checkpoint.algorithm
        same = [other for r, other in zip(runs, keys, strict=True) if r.checkpoint.algorithm == algorithm]
        differing = [k for k, v in key.items() if any(other.get(k) != v for other in same)]
        name = paper_name(algorithm) if run.checkpoint.has_recipe else run.name
        words = [name, *(f"{k.rpartition('.')[2]} {key[k]}" for k in differing[:3])]
        settings.append(Setting(", ".join(words), color, tuple(members)))
    return settings


def _tones(algorithms: Sequence[str]) -> list[str]:
    """A colour for each setting: shades of its algorithm's colour; others in turn."""
    tones = {
        name: iter(shades(color_of(name), algorithms.count(name)))
        for name in algorithms
        if color_of(name) != OTHER
    }
    others = itertools.cycle(_OTHERS)
    return [next(tones[name]) if name in tones else next(others) for name in algorithms]


def lines_of(runs: Sequence[Run]) -> list[dict[str, str]]:
    """The colour of each run's setting, and a dash that tells its seeds apart."""
    lines: list[dict[str, str]] = [{} for _ in runs]
    for setting in settings_of(runs):
        for k, place in enumerate(setting.places):
            lines[place] = {"color": setting.color, "dash": _DASHES[k % len(_DASHES)]}
    return lines


def _keys(run: Run) -> dict[str, str]:
    """The keys of a run's recipe with their values as texts; none for a loop without a recipe."""
    checkpoint = run.checkpoint
    return {k: str(v) for k, v in recipe_keys(checkpoint).items()} if checkpoint.has_recipe else {}
