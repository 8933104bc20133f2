"""Rules that exchange a part of the weights: SPARTA, DiLoCo by fragments, and the largest coefficients.

A part is the numbers of its coordinates in θ, the same on all processes: ``comm.fresh_mean(w[:, part])``
averages it, and ``communication_cost`` counts its share of a vector. In DeMo and SparseLoCo learners send
the largest coefficients of each block of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import numpy as np
import torch
from scipy.fft import dct
from torch import Tensor

from landscape.core import registry
from landscape.core.errors import InputError
from landscape.core.hdf5 import Array
from landscape.core.options import BelowOne, Count, Natural, NonNegative, Positive, UpToOne
from landscape.limits import max_period_step, max_stable_step
from landscape.problem.layout import Layout, Slot
from landscape.training.algorithms import Rule


@registry.algorithms.add("sparta")
class Sparta(Rule):
    """w_j ← w_j − α u_j; then a random part of the weights, drawn anew in each step, becomes the mean of all.

    Sparse parameter averaging (SPARTA, Baioumy and Cheema 2025): the part has round(``share`` · P) numbers,
    at least one, at the same coordinates for all learners. Each learner's optimizer keeps its own state.

    Args:
        share: The share of the weights that a step averages. Source: Baioumy and Cheema 2025.
    """

    label, color = "SPARTA", "#8C6D31"
    purposes = ("part",)
    lr_is_factor = True

    needs: Mapping[str, str] = {"share": "learners > 1"}

    def __init__(self, learners: int, seed: int, share: UpToOne = 0.005) -> None:
        super().__init__(learners, seed)
        self.share = share
        self._sent = share  # that of the last step, rounded to whole numbers

    def part(self, step: int, size: int) -> Tensor:
        """Return the k coordinates among P = ``size`` that ``step`` averages, in increasing order."""
        k = max(1, round(self.share * size))
        rng = np.random.default_rng(self.generator("part", step).initial_seed())
        return torch.from_numpy(np.sort(rng.choice(size, k, replace=False, shuffle=False)))

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        new = torch.sub(weights, directions, alpha=lr, out=self._new_weights(weights))
        part = self.part(step, weights.shape[1]).to(weights.device)
        self._sent = len(part) / weights.shape[1]
        new[:, part] = self.comm.fresh_mean(new[:, part], "part")
        return new

    def communication_cost(self, step: int) -> tuple[float, int]:
        return self._sent * self.all_reduce, 1

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """Return the mean's limit without momentum, 2: averaging coordinates never increases disagreement."""
        return None if momentum else max_stable_step()


@registry.algorithms.add("streaming-diloco")
class StreamingDiLoCo(Rule):
    """DiLoCo whose outer steps are of one fragment of θ at a time (Douillard et al. 2025, arXiv 2501.18512).

    The layers are assigned to F fragments in turn. Fragment p is averaged after every ``period`` H steps; the
    offsets of the fragments are evenly spread. The outer step is Nesterov's: Δ_p = x_p − w̄_p,
    v_p ← μ v_p + Δ_p, x_p ← x_p − ν (Δ_p + μ v_p). ``delay`` τ steps later each learner receives x_p:
    w_jp ← a w_jp + (1 − a) x_p. One fragment with τ = 0 and a = 0 is DiLoCo. Messages are not quantized, and
    a step waits for their end, so that τ changes the numbers as in the paper, but not the time.

    Args:
        period: H. Unit: steps.
        fragments: F, at most H and the number of layers.
        delay: τ, below H. Unit: steps. Source: ours; with 0 learners receive a fragment at once.
        own_share: a, the share of a learner's own weights that it keeps. Source: ours; 0 is DiLoCo's.
        outer_lr: ν. Source: Douillard et al. 2023.
        outer_momentum: μ. Source: Douillard et al. 2023.
    """

    label, color = "streaming DiLoCo", "#994455"
    lr_is_factor = True

    def __init__(
        self, learners: int, seed: int, period: Count, fragments: Count, delay: Natural = 0,
        own_share: BelowOne = 0.0, outer_lr: Positive = 0.7, outer_momentum: BelowOne = 0.9,
    ) -> None:  # fmt: skip
        super().__init__(learners, seed)
        if fragments > period:
            raise InputError("algorithm.fragments", fragments, allowed=f"≤ {period}, the period")
        if delay >= period:
            raise InputError("algorithm.delay", delay, allowed=f"< {period}, the period")
        self.period, self.delay, self.own_share = period, delay, own_share
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.offsets = [(p + 1) * period // fragments % period for p in range(fragments)]
        #: For each fragment the parameter tensors, and the indices of the tensors' coordinates in θ.
        self.tensors: list[list[Slot]] = []
        self.fragments: list[Tensor] = []
        self.shares = [1 / fragments] * fragments

    def start(self, weights: Tensor) -> None:
        size, count = weights.shape[1], len(self.offsets)
        # Without a network there are no slots: each coordinate is then a layer.
        coordinates = tuple(Slot(str(i), (1,), i, 1, "weight") for i in range(size))
        layers = [*Layout(self.layout.slots or coordinates).groups("layer").values()]
        if count > len(layers):
            raise InputError("algorithm.fragments", count, allowed=f"≤ {len(layers)}, the number of layers")
        self.tensors = [[slot for layer in layers[p::count] for slot in layer] for p in range(count)]
        indices = torch.arange(size, device=weights.device)
        self.fragments = [torch.cat([indices[slot.place] for slot in slots]) for slots in self.tensors]
        self.shares = [len(part) / size for part in self.fragments]
        self.shared = {"anchor": weights[0].clone(), "slow_momentum": torch.zeros_like(weights[0])}

    def _due(self, step: int) -> Iterator[int]:
        """Return the numbers p of the fragments whose period ends with ``step``."""
        return (p for p, offset in enumerate(self.offsets) if step > 0 and step % self.period == offset)

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        new = torch.sub(weights, directions, alpha=lr, out=self._new_weights(weights))
        for p in self._due(step):
            part = self.fragments[p]
            displacement = self._merged(new[:, part], p, step)
            anchor, slow = (self.shared[name].clone() for name in ("anchor", "slow_momentum"))
            slow[part] = self.outer_momentum * slow[part] + displacement
            anchor[part] -= self.outer_lr * (displacement + self.outer_momentum * slow[part])
            self.shared = {"anchor": anchor, "slow_momentum": slow}
        for p in self._due(step - self.delay):
            part = self.fragments[p]
            new[:, part] = self._received(new[:, part], self.shared["anchor"][part], p, step)
        return new

    def _merged(self, weights: Tensor, p: int, step: int) -> Tensor:
        """Return Δ_p of the learners' ``weights`` of fragment p (n, P_p)."""
        return self.shared["anchor"][self.fragments[p]] - self.comm.fresh_mean(weights, "fragment")

    def _received(self, weights: Tensor, outer: Tensor, p: int, step: int) -> Tensor:
        """Return the learners' new weights (n, P_p) of fragment p, given x_p = ``outer`` (P_p,)."""
        return torch.lerp(outer.expand(len(weights), -1), weights, self.own_share)

    def follows_mean_direction(self, step: int) -> bool:
        return not any(True for _ in self._due(step - self.delay))

    def communication_cost(self, step: int) -> tuple[float, int]:
        due = [self.shares[p] for p in self._due(step)]
        return sum(due) * self.all_reduce, len(due)


@registry.algorithms.add("decoupled-diloco")
class DecoupledDiLoCo(StreamingDiLoCo):
    """Streaming DiLoCo with a server that waits for some of the learners (Douillard et al. 2026).

    When a period of fragment p ends, the server has Δ_j = x_p − w_jp of the set R of reached learners. The
    server's outer step is Nesterov's with the radial-directional average of each parameter tensor,
    ρ φ(Σ c_j φ(Δ_j)), φ(Δ) = Δ/‖Δ‖, φ(0) = 0, ρ = Σ c_j ‖Δ_j‖ / Σ c_j. For embeddings the step uses the mean
    Σ c_j Δ_j / Σ c_j; all sums are over R. ``delay`` τ steps later the learners in R receive x_p; the other
    learners keep their own weights. c_j is the squared number of samples, divided by the number of steps,
    since j last received p, and so proportional to these steps (arXiv 2604.21428).

    Time is simulated: all learners step at one pace, and a draw decides which learners the server reaches.
    The server's grace window concerns only time and is not simulated. Layers are assigned to fragments in
    turn; the paper balances the sizes of fragments. With all learners and ``merge`` "mean" the rule is
    streaming DiLoCo.

    Args:
        period: H. Unit: steps.
        fragments: F, at most H and the number of layers.
        delay: τ, below H. Unit: steps. Source: ours; with 0 learners receive a fragment at once.
        quorum: K, the number of learners that the server waits for. Source: Douillard et al. 2026.
        availability: The probability that a round reaches a learner. Source: ours; 1 reaches all learners.
        merge: "rda": the radial-directional average; "mean": the mean of all tensors. Source: Douillard et
            al. 2026.
        outer_lr: ν. Source: Douillard et al. 2023.
        outer_momentum: μ. Source: Douillard et al. 2023.
    """

    label, color = "decoupled DiLoCo", "#EE6677"
    needs: Mapping[str, str] = {
        "quorum": "availability < 1",
        "availability": "quorum < learners",
        "merge": "learners > 1",
    }
    purposes = ("reached",)

    def __init__(
        self, learners: int, seed: int, period: Count, fragments: Count, delay: Natural = 0,
        quorum: Count = 1, availability: UpToOne = 1.0, merge: Literal["rda", "mean"] = "rda",
        outer_lr: Positive = 0.7, outer_momentum: BelowOne = 0.9,
    ) -> None:  # fmt: skip
        super().__init__(learners, seed, period, fragments, delay, 0.0, outer_lr, outer_momentum)
        if quorum > learners:
            raise InputError("algorithm.quorum", quorum, allowed=f"≤ {learners}, the number of learners")
        self.quorum, self.availability, self.merge = quorum, availability, merge

    def start(self, weights: Tensor) -> None:
        super().start(weights)
        steps = torch.zeros(len(weights), len(self.offsets), dtype=torch.int64, device=weights.device)
        self.state = {"steps": steps}  # of each learner since it last took a fragment

    def _reached(self, step: int) -> Tensor:
        """Return which learners, (n,) bool, take part in the round that begins at the end of ``step``."""
        draw = torch.rand(self.learners, generator=self.generator("reached", step))
        return draw <= draw.kthvalue(self.quorum).values.clamp(min=self.availability)

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        self.state = {"steps": self.state["steps"] + 1}
        return super().finish(weights, directions, lr, step)

    def _merged(self, weights: Tensor, p: int, step: int) -> Tensor:
        sizes = [slot.size for slot in self.tensors[p]]
        is_radial = [self.merge == "rda" and slot.layer != "embedding" for slot in self.tensors[p]]
        reached = self._reached(step)[self.comm.local].to(weights.device)
        weight = (self.state["steps"][:, p] * reached).to(weights)[:, None]
        displacements = torch.split(self.shared["anchor"][self.fragments[p]] - weights, sizes, 1)
        ones = torch.ones_like(weight)
        norms = []
        for radial, delta in zip(is_radial, displacements, strict=True):
            norms.append(torch.linalg.vector_norm(delta, dim=1, keepdim=True) if radial else ones)
        units = [delta / (norm + (norm == 0)) for delta, norm in zip(displacements, norms, strict=True)]
        sent = weight * torch.cat([ones, *norms, *units], 1)
        mean = self.comm.fresh_mean(sent, "fragment")
        lengths, directions = torch.split(mean[1:] / mean[0], [len(sizes), sum(sizes)])
        rounding, merged = 16 * torch.finfo(weights.dtype).eps, []
        for radial, length, unit in zip(is_radial, lengths, torch.split(directions, sizes), strict=True):
            # If directions cancel, the norm of their mean is only rounding.
            norm = torch.linalg.vector_norm(unit) if radial else length
            merged.append(unit * torch.where(norm <= rounding, 0.0, length / norm))
        return torch.cat(merged)

    def _received(self, weights: Tensor, outer: Tensor, p: int, step: int) -> Tensor:
        reached = self._reached(step - self.delay)[self.comm.local].to(weights.device)
        self.state["steps"][:, p] *= ~reached
        return torch.where(reached[:, None], outer, weights)

    def communication_cost(self, step: int) -> tuple[float, int]:
        vectors = sum(self.shares[p] * float(self._reached(step).sum()) for p in self._due(step))
        return 2 * vectors / self.learners, 0  # to the server and back, while the learner continues


def _largest_divisor(number: int, limit: int) -> int:
    return max(d for d in range(1, min(number, limit) + 1) if number % d == 0)


class TopK(Rule):
    """A rule whose learners send a part of a vector by blocks, and keep the rest for later: error feedback.

    A block's sides are the largest divisors, up to ``chunk``, of the tensor's sides; a bias is a row.
    """

    def _cut(
        self, weights: Tensor, chunk: int, sent: Callable[[int], int], basis: Callable[[int], Array]
    ) -> None:
        """Choose the blocks; a block of s² coefficients in ``basis`` (s, s) sends ``sent`` of s² of them."""
        shapes: list[tuple[slice, tuple[int, ...]]] = [(slot.place, slot.shape) for slot in self.layout.slots]
        self._blocks: list[tuple[slice, tuple[int, int, int, int], int, Tensor, Tensor]] = []
        count = 0
        for place, shape in shapes or [(slice(None), (weights.shape[1],))]:
            if len(shape) > 2:
                words = f"{self.label} needs vectors or matrices, not {tuple(shape)}"
                raise InputError(f"algorithm.name: {words}")
            rows, columns = (1, 1, *shape)[-2:]  # a vector is one row
            h, w = (_largest_divisor(side, chunk) for side in (rows, columns))
            of_rows, of_columns = (torch.from_numpy(basis(s)).to(weights) for s in (h, w))
            k = min(sent(h * w), h * w)
            self._blocks.append((place, (rows // h, h, columns // w, w), k, of_rows, of_columns))
            count += rows // h * (columns // w) * k
        self._sent = 2 * count / weights.shape[1]  # values and their indices

    def _largest(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the coefficients that learners with ``rows`` (n, P) send, and 1 where sent, both (n, P)."""
        sent, chosen = torch.empty_like(rows), torch.empty_like(rows)
        for columns, shape, k, of_rows, of_columns in self._blocks:
            blocks = rows[:, columns].reshape(-1, *shape).transpose(2, 3)
            flat = (of_rows.T @ blocks @ of_columns).flatten(3)
            mask = torch.zeros_like(flat).scatter_(-1, flat.abs().topk(k).indices, 1.0)
            sent[:, columns], chosen[:, columns] = (flat * mask).flatten(1), mask.flatten(1)
        return sent, chosen

    def _restored(self, coefficients: Tensor) -> Tensor:
        """Return the rows (n, P) with these coefficients (n, P)."""
        rows = torch.empty_like(coefficients)
        for columns, (y, h, x, w), _, of_rows, of_columns in self._blocks:
            blocks = of_rows @ coefficients[:, columns].reshape(-1, y, x, h, w) @ of_columns.T
            rows[:, columns] = blocks.transpose(2, 3).flatten(1)
        return rows

    def _mean_of_senders(self, sent: Tensor, chosen: Tensor) -> Tensor:
        """Return the mean (1, P) of each coefficient over the learners that sent it; 0 if none did."""
        total, count = self.comm.fresh_mean(sent, "sent"), self.comm.fresh_mean(chosen, "chosen")
        return (total / count.clamp(min=1 / (2 * self.learners)))[None]


@registry.algorithms.add("demo")
class DeMo(TopK):
    """m_j ← βm_j + αu_j, q_j = top-k(DCT m_j), m_j ← m_j − DCT⁻¹q_j; w ← w − α sign(DCT⁻¹q̄) for all.

    q̄ is the mean over the learners that sent a coefficient. The orthonormal transform is that of blocks of
    each parameter tensor; a block's sides are the largest divisors, up to ``chunk``, of the tensor's sides.
    Each block sends its ``k`` largest coefficients (Peng, Quesnelle and Kingma 2024, decoupled momentum). A
    bias is a row. All learners have the same weights, and each has its own momentum; u_j is the optimizer's
    direction, the gradient for plain SGD. Even a weight whose part of q̄ is only rounding moves by α. The size
    of steps does not depend on the gradient, so that no limit of stability exists.

    Args:
        decay: β. Source: the authors' program.
        k: Coefficients that a block sends. Source: the authors' program.
        chunk: The largest side of a block. Source: the authors' program.
        weight_decay: λ: first w ← (1 − αλ) w. Source: the authors' program.
    """

    label, color = "DeMo", "#6699CC"
    needs: Mapping[str, str] = dict.fromkeys(("decay", "k"), "chunk > 1")

    def __init__(
        self, learners: int, seed: int, decay: BelowOne = 0.999, k: Count = 32, chunk: Count = 64,
        weight_decay: NonNegative = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(learners, seed)
        self.decay, self.k, self.chunk, self.weight_decay = decay, k, chunk, weight_decay

    def start(self, weights: Tensor) -> None:
        self.state = {"momentum": torch.zeros_like(weights)}
        self._cut(weights, self.chunk, lambda size: self.k, lambda side: dct(np.eye(side), norm="ortho"))

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        momentum = torch.add(self.decay * self.state["momentum"], directions, alpha=lr)
        sent, chosen = self._largest(momentum)
        self.state = {"momentum": momentum - self._restored(sent)}
        update = self._restored(self._mean_of_senders(sent, chosen)).sign_()
        decayed = torch.mul(weights, 1 - lr * self.weight_decay, out=self._new_weights(weights))
        return decayed.sub_(update, alpha=lr)

    def follows_mean_direction(self, step: int) -> bool:
        return False

    def communication_cost(self, step: int) -> tuple[float, int]:
        return (self.learners - 1) * self._sent, 1  # each learner's part goes round to all others


@registry.algorithms.add("sparseloco")
class SparseLoCo(TopK):
    """After ``period`` H steps e_j ← βe_j + x − w_j, q_j = top-k(e_j), e_j ← e_j − q_j, x ← x − νq̄, w_j ← x.

    x are the weights at which all learners began the period (Sarfi et al. 2025, arXiv 2508.15706). This is
    local SGD whose learners send the largest numbers of their displacements, in blocks of each parameter
    tensor; a block's sides are the largest divisors, up to ``chunk``, of the tensor's sides. The unsent rest,
    e_j, replaces DiLoCo's outer momentum; with ``share`` = 1 the rule is DiLoCo without outer momentum. The
    paper's inner optimizer is AdamW, whose state is kept; here it is the recipe's. Values are sent in full
    precision: the paper's quantization to 2 bits is not simulated.

    Args:
        period: H. Unit: steps.
        share: The share of a block's numbers that is sent, at least one of them. Source: the authors'
            program, 128 of 64·64.
        decay: β. Source: the authors' program.
        chunk: The largest side of a block. Source: the authors' program.
        outer_lr: ν. Source: the authors' program.
        average: "all": q̄ is the mean of q_j over all learners. "senders": that of each number over the
            learners that sent it, as in the authors' program. Source: the equations of the paper.
    """

    label, color = "SparseLoCo", "#0099AA"
    needs: Mapping[str, str] = {
        **dict.fromkeys(("decay", "chunk"), "share < 1"),
        "average": "share < 1 and learners > 1",
    }
    lr_is_factor = True

    def __init__(
        self, learners: int, seed: int, period: Count, share: UpToOne = 1 / 32, decay: BelowOne = 0.95,
        chunk: Count = 64, outer_lr: Positive = 1.0, average: Literal["all", "senders"] = "all",
    ) -> None:  # fmt: skip
        super().__init__(learners, seed)
        self.period, self.share, self.decay, self.chunk = period, share, decay, chunk
        self.outer_lr, self.average = outer_lr, average

    def start(self, weights: Tensor) -> None:
        self.state, self.shared = {"error": torch.zeros_like(weights)}, {"anchor": weights[0].clone()}
        self._cut(weights, self.chunk, lambda size: max(1, round(self.share * size)), np.eye)

    def finish(self, weights: Tensor, directions: Tensor, lr: float, step: int) -> Tensor:
        new = torch.sub(weights, directions, alpha=lr, out=self._new_weights(weights))
        if step % self.period:
            return new
        anchor = self.shared["anchor"]
        error = torch.add(anchor - new, self.state["error"], alpha=self.decay)
        sent, chosen = self._largest(error)
        if self.average == "all":
            mean = self.comm.fresh_mean(sent, "sent")[None]
        else:
            mean = self._mean_of_senders(sent, chosen)
        self.state = {"error": error - self._restored(sent)}
        self.shared = {"anchor": anchor - self.outer_lr * self._restored(mean)[0]}
        return new.copy_(self.shared["anchor"])

    def follows_mean_direction(self, step: int) -> bool:
        return step % self.period != 0

    def communication_cost(self, step: int) -> tuple[float, int]:
        return (0.0, 0) if step % self.period else ((self.learners - 1) * self._sent, 1)

    def stability_limit(self, momentum: float = 0.0, form: str = "ordinary") -> float | None:
        """Return the limit of DiLoCo without outer momentum if all coefficients are sent; otherwise None."""
        if self.share < 1:
            return None
        return max_period_step(self.period, momentum, form, outer="nesterov", outer_lr=self.outer_lr)
