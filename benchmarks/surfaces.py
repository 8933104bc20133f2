"""300 surfaces, from smooth to hopeless, on which interpolated contours are calibrated, 100 with a part.

Analytic ones are drawn from families with random rotations, scales and shifts; networks are small ones on
digits, at spans from 3e-5 to 3. ``python -m benchmarks.surfaces`` prints the table of docs/explanation/checks.md
in half an hour; with a number, that of other surfaces of the same families and of the same networks on other
planes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

import landscape
from landscape import Problem
from landscape.core.hdf5 import Array
from landscape.evaluation.adaptive import Evaluations, Outcome, interpolate
from landscape.evaluation.interpolant import Tolerance
from landscape.evaluation.part import FEWEST, SHARE
from landscape.results.shown import logarithmic

SMOOTH = 289  # points of 51 × 51 that a smooth surface takes at most without a part: one failed check
SHAPES = ((51, 51), (51, 51), (51, 51), (40, 60))
Draw = np.random.Generator


@dataclass(frozen=True)
class Case:
    """An analytic surface: its values on a grid, and those of a part of the samples, if it has any."""

    kind: str
    name: str
    values: Array
    part: Array | None = None


@dataclass(frozen=True)
class Measured:
    """The errors of one interpolated surface, in units of its tolerance.

    Attributes:
        kind, name: of the surface.
        stated, true: the error that is stated, and the largest at any point.
        exact: the share of exact points.
        worth: the number of exact points, and of those of a part times its share of the samples.
        before: the number of exact points without a part.
    """

    kind: str
    name: str
    stated: float
    true: float
    exact: float
    worth: float
    before: float


def _evaluations(truth: Array) -> Evaluations:
    """The columns of a surface that is known, of which no point is computed yet."""
    columns, done = {"loss": np.full(truth.size, np.nan)}, np.zeros(truth.size, bool)

    def compute(places: Array) -> None:
        done[places] = True
        columns["loss"][places] = truth.flat[places]

    return Evaluations(columns, done, compute)


def interpolated(
    truth: Array, tolerance: Tolerance, seed: int, part: Evaluations | None = None
) -> tuple[Array, Array, Outcome]:
    """The values found for a surface that is known, which of them are exact, and the errors stated."""
    whole = _evaluations(truth)
    outcome = interpolate(truth.shape, whole, tolerance, ("loss",), seed, part)
    return whole.columns["loss"].reshape(truth.shape), whole.done, outcome


def measured(case: Case, seed: int = 0) -> Measured:
    """Interpolate the values of ``case`` from some of them."""
    tolerance, part = Tolerance.parse("1%"), None if case.part is None else _evaluations(case.part)
    found, done, outcome = interpolated(case.values, tolerance, seed, part)
    true = true_error(found, case.values, tolerance)
    worth = before = float(done.sum())
    if part is not None:
        worth += SHARE * float(part.done.sum())
        before = float(interpolated(case.values, tolerance, seed)[1].sum())
    stated = outcome.stated["loss"]
    return Measured(case.kind, case.name, stated, true, float(done.mean()), worth, before)


def true_error(found: Array, truth: Array, tolerance: Tolerance) -> float:
    """The largest error in units of ``tolerance`` of the range shown; infinite where only one is finite."""
    finite = np.isfinite(truth)
    if not np.array_equal(finite, np.isfinite(found)):
        return np.inf
    found, truth = found[finite], truth[finite]
    if np.array_equal(found, truth):
        return 0.0
    if logarithmic(found):
        found, truth = np.log(found), np.log(truth)
    return float(np.nan_to_num(np.abs(found - truth), nan=np.inf).max() / np.ptp(found) / tolerance.size)


# ---- analytic surfaces: functions of (u, v), which run over about [−1, 1]² -------------------------------


def _placed(draw: Draw, x: Array, y: Array, least: float = 0.6, most: float = 1.4) -> tuple[Array, Array]:
    """(x, y) rotated, scaled and shifted at random."""
    angle, scale = draw.uniform(0, 2 * np.pi), draw.uniform(least, most, 2)
    shift = draw.uniform(-0.3, 0.3, 2)
    u = scale[0] * (np.cos(angle) * x - np.sin(angle) * y) + shift[0]
    v = scale[1] * (np.sin(angle) * x + np.cos(angle) * y) + shift[1]
    return u, v


def _bowl(draw: Draw, x: Array, y: Array) -> Array:
    u, v = _placed(draw, x, y)
    return np.asarray(0.3 + u * u + 0.4 * v * v + 0.2 * np.sin(2 * u + v))


def _floor(draw: Draw) -> float:
    return float(10 ** draw.uniform(-6, -1)) if draw.uniform() < 0.8 else 0.0


def rosenbrock(draw: Draw, x: Array, y: Array) -> Array:
    """Its curved valley, with a floor from 0 to 0.1."""
    u, v = _placed(draw, 1.5 * x, 1.5 * y)
    return _floor(draw) + (1 - u) ** 2 + 10 ** draw.uniform(1, 3) * (v - u * u) ** 2


def beale(draw: Draw, x: Array, y: Array) -> Array:
    """Beale's function."""
    u, v = _placed(draw, 3 * x, 3 * y)
    terms = [(c - u + u * v**k) ** 2 for k, c in ((1, 1.5), (2, 2.25), (3, 2.625))]
    return np.asarray(_floor(draw) + sum(terms))


def himmelblau(draw: Draw, x: Array, y: Array) -> Array:
    """Himmelblau's function: four minima."""
    u, v = _placed(draw, 5 * x, 5 * y)
    return _floor(draw) + (u * u + v - 11) ** 2 + (u + v * v - 7) ** 2


def goldstein_price(draw: Draw, x: Array, y: Array) -> Array:
    """The function of Goldstein and Price: six orders of magnitude."""
    u, v = _placed(draw, 1.6 * x, 1.6 * y - 0.8)
    a = 1 + (u + v + 1) ** 2 * (19 - 14 * u + 3 * u * u - 14 * v + 6 * u * v + 3 * v * v)
    b = 30 + (2 * u - 3 * v) ** 2 * (18 - 32 * u + 12 * u * u + 48 * v - 36 * u * v + 27 * v * v)
    return a * b


def camel(draw: Draw, x: Array, y: Array) -> Array:
    """The six-hump camel, negative in its minima."""
    u, v = _placed(draw, 1.8 * x, y)
    return (4 - 2.1 * u * u + u**4 / 3) * u * u + u * v + 4 * (v * v - 1) * v * v


def trough(draw: Draw, x: Array, y: Array) -> Array:
    """A quadratic valley with a condition number from 1e2 to 1e6."""
    u, v = _placed(draw, x, y)
    return max(_floor(draw), 1e-9) + u * u + 10 ** draw.uniform(2, 6) * v * v


def facets(draw: Draw, x: Array, y: Array) -> Array:
    """The largest of some planes."""
    slopes = draw.normal(size=(draw.integers(2, 6), 3))
    return np.asarray(np.max([a * x + b * y + 0.5 * c for a, b, c in slopes], axis=0))


def crest(draw: Draw, x: Array, y: Array) -> Array:
    """|u|^p beside a bowl, p from 0.5 to 1.5."""
    bowl = _bowl(draw, x, y)
    return bowl + draw.uniform(-2, 2) * np.abs(_placed(draw, x, y)[0]) ** draw.choice([0.5, 1.0, 1.5])


def rectified(draw: Draw, x: Array, y: Array) -> Array:
    """A random ReLU function of the plane, squared or not."""
    weights = draw.normal(size=(12, 4))
    total = sum(d * np.maximum(a * x + b * y + 0.7 * c, 0) for a, b, c, d in weights)
    return np.asarray(total) ** draw.integers(1, 3)


def cliff(draw: Draw, x: Array, y: Array) -> Array:
    """A step along a line, of any steepness."""
    bowl = _bowl(draw, x, y)
    height, steep = draw.uniform(0.5, 5), 10 ** draw.uniform(1, 3)
    return bowl + height / 2 * (1 + np.tanh(steep / 2 * _placed(draw, x, y, 1, 1)[0]))


def tableland(draw: Draw, x: Array, y: Array) -> Array:
    """A plateau with a steep edge around it."""
    u, v = _placed(draw, x, y)
    return 0.2 * _bowl(draw, x, y) + np.tanh(10 ** draw.uniform(0.7, 2) * (np.hypot(u, v) - 0.6))


def wall(draw: Draw, x: Array, y: Array) -> Array:
    """A loss that rises by orders of magnitude beyond a line."""
    return _bowl(draw, x, y) * np.exp(
        draw.uniform(2, 20) * np.maximum(_placed(draw, x, y)[0], 0) ** draw.integers(1, 3)
    )


def white(draw: Draw, x: Array, y: Array) -> Array:
    """A bowl with a white noise of 1e-5 to 1."""
    return _bowl(draw, x, y) + 10 ** draw.uniform(-5, 0) * draw.normal(size=x.shape)


def heavy(draw: Draw, x: Array, y: Array) -> Array:
    """A bowl with a noise of heavy tails, which is small at most points."""
    return _bowl(draw, x, y) + 10 ** draw.uniform(-4, -2) * draw.standard_t(2.5, size=x.shape)


def waves(draw: Draw, x: Array, y: Array) -> Array:
    """A bowl with waves of any length, from 1e-3 to 1 high."""
    bowl, (u, v) = _bowl(draw, x, y), _placed(draw, x, y, 1, 1)
    f, g = 10 ** draw.uniform(0.5, 2, 2)
    return bowl + 10 ** draw.uniform(-3, 0) * np.sin(f * u) * np.cos(g * v)


def packet(draw: Draw, x: Array, y: Array) -> Array:
    """Waves in a part of the picture."""
    u, v = _placed(draw, x, y)
    inside = np.exp(-(u * u + v * v) / draw.uniform(0.05, 0.3))
    return _bowl(draw, x, y) + draw.uniform(0.03, 0.5) * inside * np.sin(10 ** draw.uniform(1, 1.8) * u)


def bump(draw: Draw, x: Array, y: Array) -> Array:
    """A Gaussian bump or dent; it is half as high on 1.5% to 6% of the picture."""
    width2 = draw.uniform(0.03, 0.12) / np.log(2) * 2 / np.pi
    at = draw.uniform(-0.85, 0.85, 2)
    inside = np.exp(-((x - at[0]) ** 2 + (y - at[1]) ** 2) / width2)
    return _bowl(draw, x, y) + draw.uniform(-1, 1) * inside


def _nothing(draw: Draw, values: Array, where: Array) -> Array:
    return np.where(where, draw.choice([np.nan, np.inf]), values)


def half_plane(draw: Draw, x: Array, y: Array) -> Array:
    """No finite values beyond a line."""
    return _nothing(draw, _bowl(draw, x, y), _placed(draw, x, y)[0] > draw.uniform(-0.2, 0.5))


def island(draw: Draw, x: Array, y: Array) -> Array:
    """No finite values in an ellipse that covers 1.5% to 15% of the picture, or more than one."""
    values = _bowl(draw, x, y)
    for _ in range(draw.integers(1, 3)):
        area, stretch, at = (
            4 * 10 ** draw.uniform(-1.8, -0.8),
            draw.uniform(1, 1.5),
            draw.uniform(-0.8, 0.8, 2),
        )
        across = stretch * (x - at[0]) ** 2 + (y - at[1]) ** 2 / stretch
        values = _nothing(draw, values, across < area / np.pi)
    return values


def lake(draw: Draw, x: Array, y: Array) -> Array:
    """Finite values in an ellipse only, up to the sky at its shore or not."""
    u, v = _placed(draw, x, y)
    inside, shore = u * u + v * v, draw.uniform(0.3, 0.9)
    with np.errstate(divide="ignore", invalid="ignore"):
        rise = draw.integers(0, 2) * 0.01 / np.abs(shore - inside)
    return _nothing(draw, 1 + inside + rise, inside >= shore)


def overflow(draw: Draw, x: Array, y: Array) -> Array:
    """Losses that grow beyond float32."""
    with np.errstate(over="ignore"):
        return np.exp(draw.uniform(90, 300) * _bowl(draw, x, y)).astype(np.float32).astype(float)


def flat(draw: Draw, x: Array, y: Array) -> Array:
    """One plus a ten-millionth of waves, in float64 or rounded to float32."""
    f, g = draw.uniform(20, 60, 2)
    values = 1 + 10 ** draw.uniform(-9, -6) * np.sin(f * x) * np.cos(g * y)
    return values.astype(draw.choice([np.float32, np.float64])).astype(float)


def shallow(draw: Draw, x: Array, y: Array) -> Array:
    """A bowl so shallow that float32 has few numbers for it; it may be constant."""
    depth = 10 ** draw.uniform(-8, -4) * draw.integers(0, 4)
    return (2.3 + depth * _bowl(draw, x, y)).astype(np.float32).astype(float)


# kind -> families and how many surfaces there are of each.
FAMILIES: dict[str, dict[Callable[[Draw, Array, Array], Array], int]] = {
    "valleys": {rosenbrock: 20, beale: 6, himmelblau: 6, goldstein_price: 4, camel: 2, trough: 6},
    "ridges": {facets: 8, crest: 8, rectified: 4},
    "cliffs": {cliff: 10, tableland: 5, wall: 5},
    "noise": {white: 8, heavy: 4, waves: 10, packet: 4},
    "bumps": {bump: 10},
    "not finite": {half_plane: 5, island: 11, lake: 5, overflow: 3},
    "flat": {flat: 6, shallow: 6},
}


def analytic(part: int = 0, only: str = "") -> Iterator[Case]:
    """The 156 analytic surfaces, or others of the same families, or the one that is called ``only``."""
    for number, (kind, family) in enumerate((k, f) for k, families in FAMILIES.items() for f in families):
        for i in range(FAMILIES[kind][family]):
            name = f"{family.__name__} {part}.{i}"
            if only in ("", name):
                draw = np.random.default_rng([part, number, i])
                ny, nx = draw.choice(SHAPES)
                x, y = np.meshgrid(np.linspace(-1, 1, nx), np.linspace(-1, 1, ny))
                yield Case(kind, name, np.asarray(family(draw, x, y), float))


# ---- analytic surfaces of many samples, of which a part is known everywhere ------------------------------

SAMPLES, OF_PART = round(FEWEST / SHARE), FEWEST  # the smallest part in use: a smaller one is rougher


def of_samples(draw: Draw, family: Callable[[Draw, Array, Array], Array], x: Array, y: Array) -> Array:
    """The losses (SAMPLES, ny, nx): one surface of the family, which each sample has elsewhere."""
    seed, spread = int(draw.integers(2**32)), 10 ** draw.uniform(-2.5, -1)
    moved = spread * draw.normal(size=(SAMPLES, 2, 1, 1))
    return np.stack([family(np.random.default_rng(seed), x + dx, y + dy) for dx, dy in moved])


def rare_bump(draw: Draw, x: Array, y: Array) -> Array:
    """Bumps that a tenth to a half of the samples have, over bowls."""
    losses, seed = of_samples(draw, _bowl, x, y), int(draw.integers(2**32))
    every = int(draw.integers(2, 11))
    losses[::every] += every * (
        bump(np.random.default_rng(seed), x, y) - _bowl(np.random.default_rng(seed), x, y)
    )
    return losses


def rare_island(draw: Draw, x: Array, y: Array) -> Array:
    """No finite values in an island that 6% to 15% of the picture is, for some samples outside the part."""
    losses = of_samples(draw, _bowl, x, y)
    area, at = draw.uniform(0.06, 0.15), draw.uniform(-0.7, 0.7, 2)
    losses[SAMPLES // 2 :: 7, np.hypot(x - at[0], y - at[1]) < np.sqrt(4 * area / np.pi)] = np.nan
    return losses


def unlike(draw: Draw, x: Array, y: Array) -> Array:
    """Bowls of as many shapes as samples, as of wrong labels."""
    return np.stack([_bowl(draw, x, y) * draw.uniform(0.3, 3) for _ in range(SAMPLES)])


# Family -> the number of surfaces: 84.
PARTED: dict[str, dict[Callable[[Draw, Array, Array], Array], int]] = {
    "valleys": {rosenbrock: 8, beale: 4, himmelblau: 4, goldstein_price: 4, trough: 4},
    "ridges": {facets: 6, crest: 4, rectified: 4},
    "cliffs": {cliff: 8, tableland: 4, wall: 4},
    "waves": {waves: 4},
    "bumps": {bump: 6},
    "not finite": {half_plane: 3, island: 5, lake: 2},
}
OWN: dict[str, dict[Callable[[Draw, Array, Array], Array], int]] = {
    "some samples": {rare_bump: 5, rare_island: 3},
    "unlike": {unlike: 2},
}


def parted(part: int = 0, only: str = "") -> Iterator[Case]:
    """The 84 analytic surfaces with a part of the samples, or others of the same families."""
    families = [
        (k, f, n, f in OWN.get(k, {}))
        for each in (PARTED, OWN)
        for k, fs in each.items()
        for f, n in fs.items()
    ]
    for number, (kind, family, count, own) in enumerate(families):
        for i in range(count):
            name = f"part, {family.__name__} {part}.{i}"
            if only in ("", name):
                draw = np.random.default_rng([part, 1000 + number, i])
                x, y = np.meshgrid(np.linspace(-1, 1, 51), np.linspace(-1, 1, 51))
                losses = family(draw, x, y) if own else of_samples(draw, family, x, y)
                yield Case(f"part: {kind}", name, losses.mean(0), losses[:OF_PART].mean(0))


# ---- networks on digits ----------------------------------------------------------------------------------

SPANS = (3e-5, 1e-3, 0.03, 0.3, 1.0, 3.0)
# name, the normalization of directions, and spans: 44 surfaces.
NETWORKS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("tanh", "none", SPANS),
    ("relu", "none", SPANS),
    ("untrained", "none", SPANS),
    ("double", "none", SPANS),
    ("lenet", "none", SPANS),
    ("attention", "none", SPANS[:5]),
    ("residual", "filter", SPANS[1:5]),
    ("relu", "filter", SPANS[3:]),
    ("lenet", "filter", SPANS[4:]),
)


class Attention(nn.Module):
    """The rows of an image as a sequence of eight."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.layer(self.into(x.reshape(-1, 8, 8))).mean(1))
        return out


def _built(name: str) -> nn.Module:
    if name == "attention":
        return Attention()
    if name == "residual":
        return landscape.models.build("resnet-20", width=0.25)
    if name == "lenet":
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 30), nn.ReLU(),
            nn.Linear(30, 10),
        )  # fmt: skip
    return landscape.models.build(
        "mlp", widths=[64, 50, 50, 10], activation="tanh" if name == "tanh" else "relu"
    )


@cache
def problem(name: str, count: int = 200) -> Problem:
    """A network on so many digits after 300 steps, or before the first; "noisy": a fifth of the labels are wrong."""
    torch.manual_seed(0)
    data = landscape.data.load("digits")
    x, y = data.train
    if name == "noisy":
        y = y.clone()
        y[::5] = torch.randint(10, y[::5].shape)
    if name in ("lenet", "residual"):
        x = x.reshape(-1, 1, 8, 8).expand(-1, 3 if name == "residual" else 1, 8, 8)
    model = _built(name)
    if name != "untrained":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(60 if name == "residual" else 300):
            rows = torch.randint(len(y), (128,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    dtype = torch.float64 if name == "double" else torch.float32
    count = 50 if name == "residual" else count
    return Problem(model.eval(), data.loss, (x[:count].to(dtype), y[:count]), dtype=dtype)


def network(name: str, norm: str, span: float, seed: int = 0, count: int = 200) -> Measured:
    """The contour of a network on a random plane, against all of its points."""
    of = problem(name, count)
    plane = landscape.random_plane(of, norm=norm, seed=seed)
    some = landscape.contour(of, plane, 51, span=span, interpolation_tol="1%")
    whole = landscape.contour(of, plane, 51, span=span, execution=landscape.Execution(previous=some))
    tolerance = Tolerance.parse("1%", of.dtype)
    stated = float(some.stated_error[0]) / tolerance.size if some.columns else 0.0
    true, exact = true_error(some.loss, whole.loss, tolerance), float(some.done.mean())
    worth = before = float(some.done.sum())
    if some.part_samples:
        worth += some.part_evaluations * some.part_samples / of.samples
        before = float(interpolated(whole.loss, tolerance, plane.seed)[1].sum())
    kind = f"{'part: ' * bool(some.part_samples)}networks"
    return Measured(kind, f"{name} {norm} {span:g}", stated, true, exact, worth, before)


def everything(part: int = 0) -> Iterator[Measured]:
    """All 300 surfaces: 200 without a part of the samples, and 100 with one."""
    for case in (*analytic(part), *parted(part)):
        yield measured(case, part)
    for name, norm, spans in NETWORKS:
        for span in spans:
            yield network(name, norm, span, part)
    for name, norm in (("tanh", "none"), ("relu", "filter"), ("noisy", "none"), ("untrained", "none")):
        for span in SPANS[2:]:
            yield network(name, norm, span, part, 1280)


def table(found: list[Measured]) -> str:
    """A row for each kind of surface."""
    rows = [
        "| surfaces | number | within the stated error | within 1% | true / stated, most | work, median | 90% "
        "| without a part, median | most above that |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    smooth = [m for m in found if m.kind.startswith("part") and m.before <= SMOOTH]
    groups = {kind: [m for m in found if m.kind == kind] for kind in dict.fromkeys(m.kind for m in found)}
    for kind, some in {**groups, "part: all smooth ones": smooth, "all": found}.items():
        stated, asked = sum(m.true <= m.stated for m in some), sum(m.true <= 1 for m in some)
        ratio = max((m.true / m.stated for m in some if m.true > 0), default=0.0)
        median, most = np.quantile([m.worth for m in some], (0.5, 0.9))
        before, above = np.median([m.before for m in some]), max(m.worth - m.before for m in some)
        rows.append(
            f"| {kind} | {len(some)} | {stated} | {asked} | {ratio:.2f} | {median:.0f} | {most:.0f} | {before:.0f} "
            f"| {above:.0f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    results = list(everything(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
    for missed in (m for m in results if m.true > min(m.stated, 1)):
        print(missed)
    print(table(results))
