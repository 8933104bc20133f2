"""The times of steps on many workers: costs in closed form, the recurrence against a plain loop, measurements."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from landscape import LandscapeError
from landscape.paper import run_times
from landscape.training.processes.comm import Plan
from landscape.training.recipes import recipe
from landscape.training.topology import Mixing, default_mixings


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(run_times.calibrate.__kwdefaults__, "seconds", 0.0)


ORDERS: tuple[run_times.Order, ...] = ("before", "during", "after")


def neighbors(
    spec: str, workers: int, size: float, link: run_times.Machines, step: int = 1
) -> run_times.Exchange:
    waits, sent, received = run_times.messages(Mixing(spec, workers, 0).matrix(step))
    return run_times.Exchange.between(waits, np.maximum(sent, received) * link.message(size))


# Costs.


def test_an_all_reduce_costs_what_the_textbook_says() -> None:
    assert run_times.Machines(1e-3, 100.0).all_reduce_s(4, 1000.0) == pytest.approx(6e-3 + 1.5 * 10.0)


@given(st.integers(2, 12), st.sampled_from(default_mixings()), st.integers(1, 4))
def test_messages_are_those_that_the_processes_plan(workers: int, spec: str, step: int) -> None:
    try:
        matrix = Mixing(spec, workers, 3).matrix(step)
    except LandscapeError:
        return
    waits, sent, received = run_times.messages(matrix)
    for rank in range(workers):
        own = Plan.of(matrix, list(range(workers + 1)), rank)
        assert received[rank] == len(own.receive)
        assert sent[rank] == len(own.transfers) - len(own.receive)
        assert set(np.flatnonzero(waits[rank])) == set(own.receive)


# The recurrence.


@pytest.mark.parametrize("workers", [1, 4, 64])
def test_all_wait_for_the_slowest_whose_mean_is_a_harmonic_number(workers: int) -> None:
    mean, error = run_times.step_time(
        "before", [run_times.Exchange(0.1)], 1.0, 0.5, workers, 0.7, loss_exchange_s=0.0
    )
    expected = 0.1 + 1.5 * (1 + 0.7 * sum(1 / i for i in range(1, workers + 1)))
    assert 0 < error < 0.02 * expected
    assert abs(mean - expected) < 4 * error


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("spec", ["ring(1)", "star", "exponential", "one-peer-exponential"])
def test_the_recurrence_is_that_of_a_plain_loop(order: run_times.Order, spec: str) -> None:
    workers, steps, g, u, late = 8, 40, 1.0, 0.25, run_times.Machines(0.3, 50.0)
    turns = [neighbors(spec, workers, 5.0, late, step) for step in (1, 2, 3)]
    found, _ = run_times.step_time(order, turns, g, u, workers, 0.5, loss_exchange_s=1.4, seed=5, steps=steps)

    rng = np.random.default_rng(5)
    draws = [rng.standard_exponential((8, workers)) for _ in range(steps)]
    means = []
    for run in range(8):
        now, half = [0.0] * workers, 0.0
        for t in range(steps):
            m = Mixing(spec, workers, 0).matrix(t % 3 + 1)
            f = [1 + 0.5 * draws[t][run, j] for j in range(workers)]
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


def test_neighbors_hide_a_part_of_the_waiting_for_stragglers() -> None:
    ring = [neighbors("ring(1)", 64, 0.0, run_times.Machines(1e-3, 1.0))]
    mean, error = run_times.step_time("during", ring, 1.0, 0.0, 64, 0.5, loss_exchange_s=0.0)
    # The news of the loss hold everyone back to within a gradient of the slowest, but not to its pace.
    assert 1.5 < mean < 1 + 0.5 * sum(1 / i for i in range(1, 65)) - 10 * error


# Predictions and measurements.


def test_predicted_rows_are_all_cases_that_the_workers_allow(tiny: Path) -> None:
    chosen, costs = recipe.read(str(tiny)), run_times.Costs(0.01, 5e-3, 1e-4, 1e-3, 0.0, 1000)
    times = run_times.predict(chosen, [2, 6], costs, run_times.Machines(1e-4, 1e6), ["full", "ring(1)"])
    cases = list(zip(times.workers, times.algorithm, times.mixing, strict=True))
    rules = ("ssgd", ""), ("ssgd*", ""), ("dpsgd awc", "full"), ("dpsgd atc", "full")
    assert cases[:8] == [(workers, *rule) for workers in (2, 6) for rule in rules]
    assert cases[8:] == [(6, "dpsgd awc", "ring(1)"), (6, "dpsgd atc", "ring(1)")]
    # Without stragglers: the all-reduce, the gradient or the loss, the update.
    reduced = run_times.Machines(1e-4, 1e6).all_reduce_s(6, 4000)
    assert times.step_s[4] == pytest.approx(reduced + 0.01 + 5e-3)
    assert times.step_s[5] == pytest.approx(reduced + 0.01 + 6e-3)
    assert not times.step_error.any()


def test_a_worker_is_measured(tiny: Path) -> None:
    costs = run_times.calibrate(recipe.read(str(tiny)), 10)
    assert costs.parameters == 6 * 8 + 8 + 8 * 3 + 3
    assert costs.size == 4 * costs.parameters
    assert 0 < costs.gradient < 1
    assert 0 < costs.mix < costs.gradient


@pytest.mark.slow
def test_processes_are_measured_at_once() -> None:
    two = {order: recipe.read("digits-dpsgd", ["learners=2", "batch=20", f"algorithm.order='{order}'"])
           for order in ("awc", "atc")}  # fmt: skip
    rounds = run_times.measure_steps(two, 2, 2, 3)
    assert len(rounds) == 2
    for of_round, between, seconds in rounds:
        assert of_round.parameters == 6310
        assert 0 < between["latency"] < 1
        assert 1e5 < between["bandwidth"] < 1e12
        assert list(seconds) == ["awc", "atc"]
        assert all(0 < value < 10 for value in seconds.values())
