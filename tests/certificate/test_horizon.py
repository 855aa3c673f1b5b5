"""The hull against all steps one by one, and against real extremal gradient sequences (NOTES 6, 7)."""

from __future__ import annotations

import numpy as np
import pytest
from adam_oracle import attained, constants, worst_x
from hypothesis import given
from hypothesis import strategies as st

from guarddcp.certificate import Adam, Uncertifiable, certify
from guarddcp.certificate.bound import bound
from guarddcp.certificate.horizon import _chain, _upper_right, hull
from guarddcp.certificate.rules import envelope, step_constants

BETAS = [(0.9, 0.95), (0.9, 0.999), (0.95, 0.98), (0.9, 0.9999), (0.99, 0.9999), (0.0, 0.999), (0.5, 0.3)]
betas_ = st.sampled_from(BETAS)
step_ = st.integers(1, 100_000)


def rule_of(betas):
    return Adam(betas=betas, eps=1e-8)


@given(betas_, step_, st.integers(1, 80))
def test_step_constants_are_the_sums_they_stand_for(betas, step, j):
    a, b = step_constants(rule_of(betas), step, j)
    assert (float(a), float(b)) == pytest.approx(constants(betas, step, j), rel=1e-8)


@given(betas_, step_, st.floats(0, 0.1), st.floats(1e-5, 0.3), st.floats(0, 8))
def test_the_hull_covers_every_later_step(betas, step, w, kap, q_max):
    rule = rule_of(betas)
    j = np.unique(np.concatenate((np.arange(1, 3000), np.geomspace(3000, 10**7, 500).astype(int))))
    brute = bound(w, kap, q_max, *step_constants(rule, step, j), nodes=32).max()
    found = bound(w, kap, q_max, *hull(rule, step, "all"), nodes=32).max()
    # 0.2 %: coefficients of float32 implementations, largest at step 1 with beta2 = 0.9999.
    assert brute * (1 - 1e-9) <= found <= brute * 1.002


@given(betas_, step_, st.integers(1, 20_000), st.floats(0, 0.1), st.floats(1e-5, 0.3))
def test_a_finite_hull_covers_exactly_its_steps(betas, step, horizon, w, kap):
    rule = rule_of(betas)
    a, b, _ = envelope(rule, step, np.arange(1, horizon + 1))
    brute = bound(w, kap, 2.0, a, b, nodes=32).max()
    found = bound(w, kap, 2.0, *hull(rule, step, horizon), nodes=32).max()
    assert brute * (1 - 1e-12) <= found <= brute * 1.0005


def test_unstable_betas_have_finite_horizons_only():
    rule = rule_of((0.99, 0.95))
    with pytest.raises(Uncertifiable, match=r"b1\^2 >= b2"):
        hull(rule, 10, "all")
    a, b = hull(rule, 10, 40)
    every = [constants((0.99, 0.95), 10, j) for j in range(1, 41)]
    assert (a.max(), b.max()) == pytest.approx(np.max(every, axis=0), rel=1e-4)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=40))
def test_both_hull_walks_keep_all_support_points(points):
    a, b = (np.array(side) for side in zip(*points, strict=True))
    found = _upper_right(a, b)
    order = np.argsort(-found[0])
    chained = _chain(found[0][order].tolist(), found[1][order].tolist())
    for angle in np.linspace(0, np.pi / 2, 31):
        support = (np.cos(angle) * a + np.sin(angle) * b).max()
        for some_a, some_b in (found, chained):
            assert (np.cos(angle) * some_a + np.sin(angle) * some_b).max() >= support - 1e-12


@pytest.mark.parametrize("horizon", [1, 60, "all"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.95, 0.98)])
@pytest.mark.parametrize("step", [141, 100_000])
def test_extremal_sequences_reach_the_certified_bound(betas, step, horizon):
    rule = rule_of(betas)
    cell = certify(rule, step, tolerance=0.01, horizon=horizon, rounding_share=0.05, q_max=1.0).cell
    certified = bound(cell.w, cell.kap, cell.q_max, *hull(rule, step, horizon)).max()
    a, b = step_constants(rule, step, np.arange(1, 2001 if horizon == "all" else horizon + 1))
    j = 1 + int(np.argmax(bound(cell.w, cell.kap, cell.q_max, a, b)))
    x = worst_x(cell.w, cell.h, cell.q_max, a[j - 1], b[j - 1])
    reached = attained(betas, step, j, cell.w, cell.h, cell.q_max, x)
    assert 1 <= certified / reached <= 1.002
