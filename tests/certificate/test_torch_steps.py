"""Certified bounds against real torch.optim steps in float32 on states at cell corners (NOTES 9, 10, 13)."""

from __future__ import annotations

import adam_oracle
import numpy as np
import pytest
import torch
import torch_steps
from torch_steps import KINDS

from guarddcp.certificate import Adam, c_inf, certify
from guarddcp.certificate.bound import bound
from guarddcp.certificate.horizon import hull
from guarddcp.certificate.rounding import rounding, underflow
from guarddcp.certificate.rules import envelope, step_constants

N = 2051  # odd: the fused kernel treats the tail of a vector differently
# Far from overflow and underflow of float32; the extremes have a test of their own.
V_LOW, V_HIGH = 2.0**-80, 2.0**80


def certificate(rule, step, horizon, q_max=3.0):
    q_max = min(q_max, c_inf(rule))
    return certify(rule, step, tolerance=0.01, horizon=horizon, rounding_share=0.05, q_max=q_max)


def attack(rule, step, k, v_low=V_LOW, v_high=V_HIGH, horizon=None):
    """(certificate, (m, v), (m^, v^), gradients) for k steps."""
    rng = np.random.default_rng([step, k, int(1000 * rule.betas[1]), int(rule.eps * 1e9)])
    cert = certificate(rule, step, horizon or k)
    m, v, m_restored, v_restored = torch_steps.corners(cert.cell, max(cert.v_min, v_low), v_high, rng, N)
    return cert, (m, v), (m_restored, v_restored), torch_steps.gradients(rule, m, v, rng, k)


@pytest.mark.parametrize("k", [1, 50])
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-3])
@pytest.mark.parametrize("step", [1, 141, 100_000])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.1, 0.5), (0.0, 0.99)])
def test_torch_updates_differ_by_at_most_the_bound(betas, step, eps, k):
    rule = Adam(betas=betas, eps=eps, weight_decay=0.1, decoupled_weight_decay=True)
    cert, native, restored, g = attack(rule, step, k)
    largest = 0.0
    for kind in KINDS:
        runs = [torch_steps.run(rule, kind, step, *state, g) for state in (native, restored)]
        largest = max(largest, float(np.abs(runs[0] - runs[1]).max()))
    # The lower limit shows that the attack is one: 0.87 to 0.9998 of the bound is reached.
    assert 0.8 * cert.bound <= largest <= cert.bound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("betas", "step"), [((0.9, 0.999), 141), ((0.95, 0.98), 1000), ((0.99, 0.9999), 141)])
def test_rounding_of_one_run_stays_below_its_allowance(betas, step, kind):
    rule = Adam(betas=betas, eps=1e-8)
    cert, native, _, g = attack(rule, step, 50)
    r = rounding(rule, step, np.arange(1, 51), cert.cell.q_prime)
    spent = underflow(rule, step, cert.cell.q_prime, *hull(rule, step, 50), r.max()) / 2
    error = np.abs(torch_steps.run(rule, kind, step, *native, g) - torch_steps.actual(rule, step, *native, g))
    ratio = (error.max(axis=1) / (r + spent)).max()
    assert 0.05 <= ratio <= 0.5  # 0.12 to 0.30 measured: proved, with room, and not by orders of magnitude


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95)])
def test_float32_moves_the_difference_by_no_more_than_is_charged(betas, kind):
    rule, j = Adam(betas=betas, eps=1e-8), np.arange(1, 51)
    cert, native, restored, g = attack(rule, 141, 50)
    cell, runs, exact = cert.cell, [], []
    for m, v in (native, restored):
        runs.append(torch_steps.run(rule, kind, 141, m, v, g))
        exact.append(adam_oracle.run(betas, rule.eps, 141, m.astype(float), v.astype(float), g.astype(float)))
    (a, b), (a_hi, b_hi, _) = step_constants(rule, 141, j), envelope(rule, 141, j)
    charged = 2 * rounding(rule, 141, j, cell.q_prime) + bound(cell.w, cell.kap, cell.q_max, a_hi - a, b_hi - b)
    moved = np.abs((runs[0] - runs[1]) - (exact[0] - exact[1])).max(axis=1)
    assert (moved / charged).max() <= 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_coupled_weight_decay_is_covered_for_one_step(kind):
    rule = Adam(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, decoupled_weight_decay=False)
    cert, native, restored, g = attack(rule, 141, 1, 2.0**-60, 2.0**-40, horizon="all")
    assert cert.horizon == 1
    # Parameters of the size of the gradients over the decay: the decay matters, the sum with an update does not.
    p = (np.abs(g[0]) * np.random.default_rng(3).normal(size=N) * 1e-3).clip(-1e-9, 1e-9).astype(np.float32)
    runs = [torch_steps.run(rule, kind, 141, *state, g, p) for state in (native, restored)]
    assert 0.9 * cert.bound <= np.abs(runs[0] - runs[1]).max() <= cert.bound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decoupled", [True, False])
def test_maximize_changes_nothing(kind, decoupled):
    rule = Adam(betas=(0.9, 0.98), eps=1e-8, maximize=True, decoupled_weight_decay=decoupled)
    cert, native, restored, g = attack(rule, 141, 50)
    runs = [torch_steps.run(rule, kind, 141, *state, -g) for state in (native, restored)]
    assert 0.9 * cert.bound <= np.abs(runs[0] - runs[1]).max() <= cert.bound


@pytest.fixture
def flush_to_zero():
    supported = torch.set_flush_denormal(True)
    yield supported
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("eps", [0.0, 2.0**-40, 1e-8])
def test_the_whole_range_of_v_with_flush_to_zero(eps, flush_to_zero):
    rule = Adam(betas=(0.9, 0.999), eps=eps)
    cert, native, restored, g = attack(rule, 141, 20, 0.0, 2.0**120)
    for kind in KINDS:
        runs = [torch_steps.run(rule, kind, 141, *state, g) for state in (native, restored)]
        assert np.abs(runs[0] - runs[1]).max() <= cert.bound


def test_below_v_min_the_bound_would_be_false(flush_to_zero):
    """Why v_min exists: without eps, flushed products turn a cell near 2^-126 into an infinite difference."""
    if not flush_to_zero:
        return  # this processor keeps subnormals
    rule = Adam(betas=(0.9, 0.999), eps=0.0)
    cell = certificate(rule, 141, 20).cell
    rng = np.random.default_rng(0)
    m, v, m_restored, v_restored = torch_steps.corners(cell, 2.0**-126, 2.0**-125, rng, N)
    g = np.zeros((20, N), dtype=np.float32)
    runs = [
        torch_steps.run(rule, "fused", 141, *state, g).clip(-1e30, 1e30) for state in ((m, v), (m_restored, v_restored))
    ]
    assert np.abs(runs[0] - runs[1]).max() >= 1e30
