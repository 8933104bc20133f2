"""Predicted run times: costs in closed form, the recurrence against a plain loop, and the command."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import landscape
from landscape import InputError, LandscapeError, OperationError
from landscape.cli.plan import BANDWIDTHS, TIMES
from landscape.core import registry
from landscape.core.options import quantity
from landscape.results.training import RunTimes
from landscape.training.planning.calibration import calibrate, calibrate_at_once, measure_link, measure_steps
from landscape.training.planning.plan import (
    Costs,
    Exchange,
    Machines,
    Order,
    messages,
    planned_topologies,
    predict,
    step_time,
)
from landscape.training.processes.comm import Plan
from landscape.training.recipes import recipe
from landscape.training.topology.mixing import Mixing
from tests.conftest import Command
from tests.test_cli import one_line


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(calibrate.__kwdefaults__, "seconds", 0.0)


ORDERS: tuple[Order, ...] = ("before", "during", "after")
seconds = st.floats(1e-6, 10.0)


def neighbors(spec: str, workers: int, size: float, link: Machines, step: int = 1) -> Exchange:
    waits, sent, received = messages(Mixing(spec, workers, 0).matrix(step), 1)
    return Exchange.between(waits, np.maximum(sent, received) * link.message(size))


# Costs.


def test_all_reduces_cost_what_the_textbook_says() -> None:
    def seconds(kind: str, workers: int) -> float:
        return Machines(1e-3, 100.0, all_reduce=kind).all_reduce_s(workers, 1000.0)

    assert seconds("ring", 4) == pytest.approx(6e-3 + 1.5 * 10.0)
    assert seconds("recursive-doubling", 8) == pytest.approx(3 * (1e-3 + 10.0))
    assert seconds("recursive-halving", 8) == pytest.approx(6e-3 + 1.75 * 10.0)
    assert seconds("recursive-halving", 9) == pytest.approx(8e-3 + 3.75 * 10.0)
    with pytest.raises(InputError, match="all_reduce: 'tree' is not known"):
        seconds("tree", 4)


@given(st.integers(2, 12), st.integers(1, 3), st.sampled_from(planned_topologies()), st.integers(1, 4))
def test_messages_are_those_that_the_processes_plan(workers: int, held: int, spec: str, step: int) -> None:
    n = workers * held
    try:
        matrix = Mixing(spec, n, 3).matrix(step)
    except LandscapeError:
        return
    waits, sent, received = messages(matrix, held)
    for rank in range(workers):
        own = Plan.of(matrix, list(range(0, n + 1, held)), rank)
        assert received[rank] == len(own.receive)
        assert sent[rank] == len(own.transfers) - len(own.receive)
        assert set(np.flatnonzero(waits[rank])) == {learner // held for learner in own.receive}


def test_every_form_of_mixing_is_planned() -> None:
    # Alone, nodes(k) never mixes the nodes: it is one level of hierarchical averaging. lazy(a, FORM) has the
    # exchanges of FORM. Of those that need a number, rings are planned.
    planned = {t.partition("(")[0] for t in planned_topologies()}
    ours = {
        name for name in registry.topologies if registry.topologies[name].__module__.startswith("landscape.")
    }
    numbered = {"k-peer-exponential", "hyper-hypercube", "d-equistatic", "u-equistatic"}
    assert ours - {"nodes", "lazy"} - numbered == planned


# The recurrence.


@pytest.mark.parametrize("workers", [1, 4, 64])
def test_all_wait_for_the_slowest_whose_mean_is_a_harmonic_number(workers: int) -> None:
    late = Machines(0.0, 1.0, straggler=0.7)
    mean, error = step_time("before", [Exchange(0.1)], 1.0, 0.5, workers, late)
    expected = 0.1 + 1.5 * (1 + 0.7 * sum(1 / i for i in range(1, workers + 1)))
    assert 0 < error < 0.02 * expected
    assert abs(mean - expected) < 4 * error


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("spec", ["ring(1)", "star", "exponential", "one-peer-exponential"])
def test_the_recurrence_is_that_of_a_plain_loop(order: Order, spec: str) -> None:
    workers, steps, g, u, late = 8, 40, 1.0, 0.25, Machines(0.3, 50.0, straggler=0.5, slow=1.5)
    turns = [neighbors(spec, workers, 5.0, late, step) for step in (1, 2, 3)]
    found, _ = step_time(order, turns, g, u, workers, late, loss_exchange_s=1.4, seed=5, steps=steps)

    rng = np.random.default_rng(5)
    draws = [rng.standard_exponential((8, workers)) for _ in range(steps)]
    means = []
    for run in range(8):
        now, half = [0.0] * workers, 0.0
        for t in range(steps):
            m = Mixing(spec, workers, 0).matrix(t % 3 + 1)
            f = [(1.5 if j == 0 else 1.0) * (1 + 0.5 * draws[t][run, j]) for j in range(workers)]
            news = max(now) + 1.4
            ready = [max(now[j] + f[j] * g, news) for j in range(workers)]
            begun = ready if order == "after" else now
            cost = [
                max(np.count_nonzero(m[j]) - 1, np.count_nonzero(m[:, j]) - 1) * (0.3 + 5.0 / 50.0)
                for j in range(workers)
            ]
            done = [
                max(begun[i] + cost[i] for i in range(workers) if i == j or m[i, j] or m[j, i])
                for j in range(workers)
            ]
            if order == "before":
                now = [max(done[j] + f[j] * g, news) + f[j] * u for j in range(workers)]
            elif order == "during":
                now = [max(ready[j], done[j]) + f[j] * u for j in range(workers)]
            else:
                now = [done[j] + f[j] * u for j in range(workers)]
            if t + 1 == steps // 2:
                half = max(now)
        means.append((max(now) - half) / (steps - steps // 2))
    assert found == pytest.approx(np.mean(means), rel=1e-12)


def test_neighbors_hide_stragglers_but_not_one_slow_worker() -> None:
    late = Machines(1e-3, 1.0, straggler=0.5)
    ring = [neighbors("ring(1)", 64, 0.0, late)]
    alone, error = step_time("during", ring, 1.0, 0.0, 64, late)
    told, _ = step_time("during", ring, 1.0, 0.0, 64, late, loss_exchange_s=0.0)
    # The news of the loss hold everyone back to within a gradient of the slowest, but not to its pace.
    assert 1.5 < alone < told - 10 * error
    assert told < 1 + 0.5 * sum(1 / i for i in range(1, 65)) - 10 * error
    slow, _ = step_time("during", ring, 1.0, 0.0, 64, Machines(1e-3, 1.0, slow=3.0))
    assert slow == pytest.approx(3.0)


# Plans.


def fake(local_batch: int) -> Costs:
    return Costs(1e-3 * local_batch, 5e-3, 1e-4, 1e-3, 0.0, 1000, 4000, True)


def test_rows_add_up(tiny: Path) -> None:
    told: list[str] = []
    found = predict(
        recipe.read(str(tiny)), [1, 6, 16], fake, Machines(1e-4, 1e6, straggler=0.1),
        message=told.append,
    )  # fmt: skip
    assert [line.partition(",")[0] for line in told if "hypercube" in line] == ["6 workers: left out"]
    first = found.workers == 16
    assert set(np.array(found.mixing)[first]) == {"", *planned_topologies()}
    np.testing.assert_allclose(found.run_s, found.steps * found.step_s)
    np.testing.assert_allclose(found.samples_per_s * found.step_s, found.workers * 10)
    ssgd = np.array(found.algorithm) == "ssgd"
    np.testing.assert_array_equal(found.speedup[ssgd], 1)
    assert found.steps[ssgd].tolist() == [120, 20, 8]  # the recipe's 30 · 40 samples
    assert ((found.waiting > -0.05) & (found.waiting < 1)).all()
    assert (found.efficiency[first] < 1 - found.waiting[first]).all()
    # One worker has nothing to exchange.
    alone = (found.workers == 1) & ssgd
    assert found.step_s[alone] == pytest.approx(15e-3 * 1.1, rel=0.05)


def test_learners_a_worker_and_scaling(tiny: Path) -> None:
    chosen, seen = recipe.read(str(tiny)), list[int]()
    cluster = Machines(0.0, 1e6, learners_per_worker=2)

    def costs(local_batch: int) -> Costs:
        seen.append(local_batch)
        return fake(local_batch)

    found = predict(chosen, [2, 5], costs, cluster, scaling="total", mixings=["full"])
    assert seen == [10, 4]
    np.testing.assert_array_equal(found.steps, 30)
    with pytest.raises(InputError, match="3 learners do not divide the batch of 40"):
        predict(chosen, [3], fake, Machines(0.0, 1e6), scaling="total")


def test_what_is_not_linear_needs_the_mean_gradient_too(tiny: Path) -> None:
    machines, chosen = Machines(1e-4, 1e6), recipe.read(str(tiny))
    costs = Costs(1e-3, 0.0, 0.0, 0.0, 0.0, 1000, 4000, True)
    twice, once = (
        predict(chosen, [8], lambda b, each=each: each, machines, mixings=["ring(1)"])  # type: ignore[misc]
        for each in (dataclasses.replace(costs, linear=False), costs)
    )
    more = (twice.step_s - once.step_s)[:2]  # of DPSGD's, the time to know neighbors is measured
    np.testing.assert_allclose(more, machines.all_reduce_s(8, 4000))


def test_a_worker_is_measured(tiny: Path) -> None:
    costs = calibrate(recipe.read(str(tiny)), 2, 10)
    assert costs.parameters == 6 * 8 + 8 + 8 * 3 + 3
    assert costs.size == 4 * costs.parameters
    assert costs.linear
    assert 0 < costs.gradient < 1
    assert 0 < costs.mix < costs.gradient


@pytest.mark.slow
def test_processes_are_measured_at_once(tiny: Path) -> None:
    link = measure_link(10**6)
    assert 0 < link["latency"] < 1
    assert 1e5 < link["bandwidth"] < 1e12
    costs = calibrate_at_once(recipe.read(str(tiny)), 1, 10, 2)
    assert costs.parameters == 6 * 8 + 8 + 8 * 3 + 3
    two = {order: recipe.read("digits-dpsgd", ["learners=2", "batch=20", f"algorithm.order='{order}'"])
           for order in ("awc", "atc")}  # fmt: skip
    rounds = measure_steps(two, 2, 2, 3)
    assert len(rounds) == 2
    for of_round, between, seconds in rounds:
        assert of_round.parameters == 6310
        assert between["bandwidth"] > 1e5
        assert list(seconds) == ["awc", "atc"]
        assert all(0 < value < 10 for value in seconds.values())
    missing = recipe.read("mnist-fig2a-dpsgd")
    with pytest.raises(OperationError, match="mnist") as caught:
        calibrate_at_once(missing, 1, 10, 2, data_dir=tiny.parent)
    assert "\n" not in str(caught.value)


# The command.


@given(st.sampled_from(sorted(BANDWIDTHS)), st.floats(1e-6, 1e6), st.sampled_from(["", " "]))
def test_a_quantity_is_its_number_times_its_unit(unit: str, number: float, space: str) -> None:
    found = quantity("--bandwidth", f"{number!r}{space}{unit}", BANDWIDTHS)
    assert found == pytest.approx(number * BANDWIDTHS[unit])
    assert quantity("--latency", f"0{space}s", TIMES, zero=True) == 0.0


@given(st.text("0123456789.eE+-musGbit/ µé", max_size=12))
def test_any_other_text_is_refused_in_one_line(text: str) -> None:
    if re.fullmatch(r"[\d.eE+-]+ *(ns|us|µs|ms|s)", text.strip()):
        return
    with pytest.raises(InputError, match="^--latency: "):
        quantity("--latency", text, TIMES, zero=True)


LINK = ("--bandwidth", "1Gbit/s", "--latency", "50us")


def test_the_command_prints_keeps_and_draws(tiny: Path, tmp_path: Path, command: Command) -> None:
    kept, picture = tmp_path / "new" / "p.h5", tmp_path / "p.png"
    argv = ("plan", tiny, *LINK, "--workers", "4,8", "--straggler", "0.3", "--mixing", "ring(1)")
    code, out, err = command(*argv, "-o", kept, "--plot", picture)
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["4"] * 4
    assert lines[-2:] == [str(kept), str(picture)]
    assert picture.stat().st_size > 10_000
    assert "measured here (cpu, 1 at once on" in err
    assert "bandwidth 1 Gbit/s (given); latency 50 µs (given)" in err
    assert "before each update" in err
    found = landscape.load(kept)
    assert isinstance(found, RunTimes)
    assert found.algorithm == ("ssgd", "ssgd*", "dpsgd awc", "dpsgd atc") * 2
    assert found.bandwidth == 1.25e8
    assert command("plot", kept, "-o", tmp_path / "q.svg")[0] == 0
    code, out, _ = command("info", kept)
    assert code == 0
    assert "schema: landscape.plan" in out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--bandwidth", "0Gbit/s"), 2, "--bandwidth: '0Gbit/s' is not allowed"),
        (("--straggler", "-1"), 2, "--straggler: -1.0 is not allowed"),
        (("--slow", "0.5"), 2, "a finite number ≥ 1"),
        (("--scaling", "strong"), 2, "--scaling: 'strong' is not known"),
        (("--mixing", "hypercube", "--workers", "6,12"), 2, "not allowed with 12 learners"),
        (("--data-dir", "nowhere", "--set", "data={name='mnist'}"), 1, "nowhere"),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, ...], code: int, words: str, tiny: Path, tmp_path: Path, command: Command
) -> None:
    kept = tmp_path / "kept.h5"
    one_line(command("plan", tiny, *LINK, "-q", "-o", kept, *arguments), code, words)
    assert not kept.exists()
