"""Who is right? Hessian products and λ_max of four packages and PyTorch for 30 models, against differences of gradients.

``make truth`` sets the packages up and writes the tables of docs/comparison.md. ``python -m benchmarks.truth MODEL…`` prints
some rows alone. Every package gets the model in its own precision, as its user would give it.
The reference is the Jacobian of the gradient of the same weights in float64, by central differences.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import landscape
from benchmarks import certified
from tests.battery import cases_layers, cases_models, cases_sequences
from tests.battery.case import module
from tests.battery.reference import Reference

PAGE = Path(__file__).parents[1] / "docs" / "comparison.md"
BEGIN, END = "<!-- truth: make truth -->\n", "<!-- end of truth -->"
# Larger relative errors count as wrong: the tolerance of this package's eigenvalues.
RIGHT = 1e-2
# Steps of the reference; the two agree to 1e-7, or the script ends.
STEP = 1e-6
# PyTorch's fused attention has no second derivative; what only works without it is marked so.
MATH = "†"


@dataclass(frozen=True)
class Model:
    """A model with loss and data (x, y); ``plain`` is the model of the reference."""

    build: Callable[[], tuple[nn.Module, Any, tuple[Tensor, Tensor]]]
    plain: Callable[[nn.Module], nn.Module] = lambda model: model
    plain_loss: Any = None


def padded() -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    """A transformer whose places with word 0 are padding."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)
    body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    @module(words=nn.Embedding(7, 4, padding_idx=0), body=body, head=nn.Linear(4, 3))
    def model(m: Any, x: Tensor) -> Tensor:
        kept = (x > 0).unsqueeze(2)
        h = m.body(m.words(x), src_key_padding_mask=x == 0)
        out: Tensor = m.head((h * kept).sum(1) / kept.sum(1))
        return out

    x = torch.randint(1, 7, (20, 5))
    x[:, 1:] *= torch.arange(1, 5) < torch.randint(1, 6, (20, 1))
    return (
        model,
        F.cross_entropy,
        (x, torch.randint(3, (20,))),
    )


def _models() -> dict[str, Model]:
    """Networks of benchmarks/certified.py, cases of the battery, and padding."""
    named: dict[str, Model] = {}
    for name, net in certified.NETWORKS.items():
        if net.options or net.bn != "center":  # options that only this package has
            continue

        def build(net: certified.Network = net) -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
            model, *data = certified.parts(net, 0)
            return model, net.loss, (data[0], data[1])

        def plain(model: nn.Module, net: certified.Network = net) -> nn.Module:
            other = (net.plain or net.model)()
            other.load_state_dict(model.state_dict())
            return other

        named[name] = Model(build, plain, net.plain_loss)
    every = {c.name: c for part in (cases_layers, cases_models, cases_sequences) for c in part.CASES}
    of_battery = {
        "tanh, LayerNorm": "LayerNorm",
        "tanh, BatchNorm of the batch": "BatchNorm1d track_running_stats=False",
        "convolution, GroupNorm": "GroupNorm",
        "orthogonal parametrization": "orthogonal",
        "GRU": "GRU",
        "embedding with padding_idx": "embedding with padding_idx",
        "weights tied": "weights tied",
    }
    named |= {name: Model(every[case].parts) for name, case in of_battery.items()}
    return {**named, "transformer, padded sequences": Model(padded)}


MODELS = _models()


class Truth:
    """The dense Hessian (P, P) of ``model`` in float64, a unit vector, its product and the extreme eigenvalues.

    Coordinates whose gradient is zero everywhere (rows of padding) are left out.
    """

    def __init__(self, model: Model) -> None:
        own, loss, (x, y) = model.build()
        reference = Reference(model.plain(own), model.plain_loss or loss, x, y)
        h, again = (self._jacobian(reference, step) for step in (STEP, STEP / 4))
        if not (h - again).norm() <= 1e-7 * h.norm():
            raise SystemExit(f"the reference itself is wrong by {(h - again).norm() / h.norm():.0e}")
        fixed = h.abs().sum(1) == 0
        h[:, fixed] = 0
        values = torch.linalg.eigvalsh((h + h.T) / 2)
        self.low, self.high = float(values[0]), float(values[-1])
        v = torch.randn(len(h), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        v[fixed] = 0
        self.vector = v / v.norm()
        self.image = h @ self.vector

    @staticmethod
    def _jacobian(reference: Reference, step: float) -> Tensor:
        eye, at = step * torch.eye(reference.size, dtype=torch.float64), reference.center
        columns = [reference.gradient(at + e) - reference.gradient(at - e) for e in eye]
        return torch.stack(columns, 1) / (2 * step)


Product, Top = Callable[[Tensor], Tensor], Callable[[], float]


def ours(derivatives: str, verified: bool = False) -> Callable[..., tuple[Product, Top]]:
    """This package; ``verified``: products by several steps, as returned eigenvectors are verified."""

    def tool(model: nn.Module, loss: Any, data: tuple[Tensor, Tensor]) -> tuple[Product, Top]:
        problem = landscape.Problem(model, loss, data)
        h = landscape.HessianOperator(problem, derivatives=derivatives)

        def top() -> float:
            ends = landscape.extreme_eigenvalues(problem, 1e-4, derivatives=derivatives)
            return ends.max if ends.converged else float("nan")

        return lambda v: h.verified(v.to(h.dtype)[None])[0][0] if verified else h @ v.to(h.dtype), top

    return tool


class Loss(nn.Module):
    """A function as the module with a reduction that curvlinops takes."""

    reduction = "mean"

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, z: Tensor, y: Tensor) -> Any:
        return self.function(z, y)


def parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def curvlinops(model: nn.Module, loss: Any, data: tuple[Tensor, Tensor]) -> tuple[Product, Top]:
    from curvlinops import HessianLinearOperator

    module = nn.CrossEntropyLoss() if loss is F.cross_entropy else Loss(loss)
    h = HessianLinearOperator(model.eval(), module, parameters(model), [data])
    return (
        lambda v: h @ v.to(parameters(model)[0].dtype),
        lambda: float(eigsh(h.to_scipy(), 1, which="LA")[0][0]),
    )


def eigenthings(method: str) -> Callable[..., tuple[Product, Top]]:
    def tool(model: nn.Module, loss: Any, data: tuple[Tensor, Tensor]) -> tuple[Product, Top]:
        from hessian_eigenthings.algorithms.lanczos import lanczos
        from hessian_eigenthings.loss_fns.standard import supervised_loss
        from hessian_eigenthings.operators.hessian import HessianOperator

        h = HessianOperator(model.eval(), [data], supervised_loss(loss), method=method)  # type: ignore[arg-type]

        def top() -> float:
            steps = min(h.size, 100)
            found = lanczos(h, k=1, max_iter=steps, which="LA", seed=0, reorthogonalize=True)
            return float(found.eigenvalues[0])

        return lambda v: h.matvec(v.to(h.dtype)), top

    return tool


def pyhessian(model: nn.Module, loss: Any, data: tuple[Tensor, Tensor]) -> tuple[Product, Top]:
    from pyhessian import hessian
    from pyhessian.utils import hessian_vector_product

    h = hessian(model, loss, data=data, cuda=False)

    def product(v: Tensor) -> Tensor:
        pieces = torch.split(v.to(h.params[0].dtype), [p.numel() for p in h.params])
        rows = [piece.view_as(p) for piece, p in zip(pieces, h.params, strict=True)]
        return torch.cat([part.flatten() for part in hessian_vector_product(h.gradsH, h.params, rows)])

    return product, lambda: float(h.eigenvalues(maxIter=1000, tol=1e-6)[0][0])


def functional(model: nn.Module, loss: Any, data: tuple[Tensor, Tensor]) -> tuple[Product, Top]:
    own = {n: p.detach() for n, p in model.eval().named_parameters() if p.requires_grad}
    x, y = data

    def value(flat: Tensor) -> Any:
        pieces = torch.split(flat, [p.numel() for p in own.values()])
        views = {n: piece.view_as(p) for piece, (n, p) in zip(pieces, own.items(), strict=True)}
        return loss(torch.func.functional_call(model, views, (x,)), y)

    h = torch.func.hessian(value)(torch.cat([p.flatten() for p in own.values()]))
    return lambda v: h @ v.to(h.dtype), lambda: float(torch.linalg.eigvalsh(h.double())[-1])


TOOLS: dict[str, Callable[..., tuple[Product, Top]]] = {
    "landscape, exact": ours("exact"),
    "landscape, differences": ours("differences"),
    "landscape, differences, verified": ours("differences", verified=True),
    "curvlinops": curvlinops,
    "hessian-eigenthings": eigenthings("autograd"),
    "hessian-eigenthings, differences": eigenthings("finite_difference"),
    "PyHessian": pyhessian,
    "torch.func.hessian": functional,
}


@dataclass(frozen=True)
class Outcome:
    """What a tool gives for a model.

    Attributes:
        kind: of the product: "right", "wrong" (without error or warning), "refused" or "fails".
        top: whether λ_max is right.
        cell: the relative errors of both.
        reason: why there is no number, or "".
    """

    kind: str
    top: bool
    cell: str
    reason: str = ""


def shown(off: float) -> str:
    return f"{off:.0e}" if off <= RIGHT else f"**{off:.0e}**"


def outcome(tool: str, model: Model, truth: Truth) -> Outcome:
    """What a tool gives, the first time."""
    torch.manual_seed(0)
    try:
        product, top = TOOLS[tool](*model.build())
        image = product(truth.vector).detach().double()
    except Exception as error:  # other packages raise any kind of error
        kind = "refused" if isinstance(error, landscape.InputError) else "fails"
        return Outcome(kind, False, kind, _words(error))
    off = float((image - truth.image).norm() / truth.image.norm())
    kind = "right" if off <= RIGHT else "wrong"
    try:
        value = top()
    except Exception as error:
        return Outcome(kind, False, f"{shown(off)}; fails", _words(error))
    high, low = (abs(value - at) / abs(at) for at in (truth.high, truth.low))
    is_lowest = low <= RIGHT < high
    return Outcome(kind, high <= RIGHT, f"{shown(off)}; " + ("λ_min" if is_lowest else shown(high)))


def _words(error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= 80 else words[:80].rsplit(" ", 1)[0] + " …"


def row(model: Model) -> list[Outcome]:
    """What each tool gives; with PyTorch's plain attention, and MATH, where it fails otherwise."""
    truth, found = Truth(model), []
    for tool in TOOLS:
        one = outcome(tool, model, truth)
        if one.kind == "fails":
            with sdpa_kernel(SDPBackend.MATH):
                again = outcome(tool, model, truth)
            one = one if again.kind == "fails" else replace(again, cell=again.cell + MATH)
        found.append(one)
    return found


def page(rows: dict[str, list[Outcome]]) -> str:
    """The tables, and the reasons by number."""
    packages = ("torch", "curvlinops-for-pytorch", "hessian-eigenthings", "PyHessian")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    counts = [
        "| package | right | wrong, without error or warning | refused | fails | λ_max right |",
        "|" + " --- |" * 6,
    ]
    for tool, own in zip(TOOLS, zip(*rows.values(), strict=True), strict=True):
        kinds = [sum(one.kind == kind for one in own) for kind in ("right", "wrong", "refused", "fails")]
        counts.append(f"| {tool} | {' | '.join(map(str, kinds))} | {sum(one.top for one in own)} |")
    numbers: dict[str, int] = {}
    table = ["| model | " + " | ".join(TOOLS) + " |", "|" + " --- |" * (len(TOOLS) + 1)]
    for name, own in rows.items():
        cells = [
            f"{one.cell} ({numbers.setdefault(one.reason, len(numbers) + 1)})" if one.reason else one.cell
            for one in own
        ]
        table.append(f"| {name} | {' | '.join(cells)} |")
    reasons = [f"{number}. {reason}" for reason, number in numbers.items()]
    parts = (
        [f"{len(rows)} models, {versions}. Products:"],
        counts,
        ["Each cell: the relative error of the product; the relative error of λ_max."],
        table,
        ["The reasons, as the packages and PyTorch give them:"],
        reasons,
    )
    return "\n\n".join("\n".join(lines) for lines in parts)


def main() -> None:
    warnings.simplefilter("ignore")
    names = sys.argv[1:] or list(MODELS)
    rows = {}
    for name in names:
        rows[name] = row(MODELS[name])
        print(f"{name}: " + " | ".join(one.cell for one in rows[name]), flush=True)
    if len(names) < len(MODELS):
        return
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{page(rows)}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
