"""Allowances for rounding and underflow (NOTES 9, 10). Real torch runs are in test_torch_steps.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guarddcp.certificate import Adam, Uncertifiable
from guarddcp.certificate.horizon import hull
from guarddcp.certificate.rounding import largest_rounding, rounding, rounding_horizon, underflow, v_range
from guarddcp.certificate.rules import envelope
from guarddcp.numerics.floats import U, is_f32

BETAS = [(0.9, 0.95), (0.9, 0.999), (0.99, 0.9999), (0.0, 0.99), (0.2, 0.9), (0.99, 0.95)]
rules = st.sampled_from([Adam(betas=betas, eps=1e-8) for betas in BETAS])


def term_by_term(rule, step, j, q_prime):
    """(9.3) as it is written, every sum a sum."""
    b1 = rule.betas[0]
    lam = max(1.0, 2.01 * min(1.0, (1 - b1) / b1)) if b1 else 2.01
    a, b, unit = (float(x) for x in envelope(rule, step, j))
    first = envelope(rule, step, [1, 2])
    ratio = float(first[1][1] / first[1][0] / (first[2][1] / first[2][0]))  # sqrt(1 + rho^2)
    rho2 = ratio**2 - 1
    moment = math.sqrt(math.fsum(rho2**i * ((1 + lam) * i + 3.01) ** 2 for i in range(j)))
    second = math.sqrt(math.fsum(rho2**i / (1 - i / (j + 1)) for i in range(j)))
    total = math.hypot((1 + lam) * j * a * q_prime, unit * moment) + 10.6 * math.hypot(a * q_prime, b)
    return 1.02 * U * (total + 0.385 * (j + 1) * math.hypot(math.sqrt(j + 1) * a * q_prime, unit * second))


@given(rules, st.integers(1, 10**5), st.integers(2, 300), st.floats(0.1, 10))
def test_the_table_is_the_formula(rule, step, j, q_prime):
    assert float(rounding(rule, step, j, q_prime)) == pytest.approx(term_by_term(rule, step, j, q_prime), rel=1e-6)


@given(rules, st.integers(1, 10**5), st.floats(0.1, 10))
def test_the_first_step_has_one_constant_that_covers_the_formula(rule, step, q_prime):
    a, b, _ = envelope(rule, step, 1)
    first = float(rounding(rule, step, 1, q_prime))
    assert first == pytest.approx(15 * U * math.hypot(a * q_prime, b), rel=1e-12)
    assert first >= term_by_term(rule, step, 1, q_prime)


@pytest.mark.parametrize(
    ("betas", "twice_r1", "twice_r60", "horizons"),
    [
        ((0.9, 0.95), 2.0e-6, 7.8e-6, (815, 8900, 89000)),
        ((0.9, 0.999), 7.2e-6, 4.4e-5, (76, 1380, 14300)),
        ((0.99, 0.9999), 5.3e-6, 1.0e-4, (28, 1060, 14300)),
    ],
)
def test_published_figures(betas, twice_r1, twice_r60, horizons):
    rule = Adam(betas=betas, eps=1e-8)
    q = min(3.0, 1.165 if betas[1] == 0.95 else 3.0)
    assert twice_r1 * 0.99 <= 2 * largest_rounding(rule, 10**6, 1, q) <= twice_r1 * 1.07
    assert 2 * float(rounding(rule, 10**6, 60, q)) == pytest.approx(twice_r60, rel=0.05)
    found = [rounding_horizon(rule, 10**6, q, 0.05 * tolerance) for tolerance in (0.001, 0.01, 0.1)]
    assert found == pytest.approx(horizons, rel=0.05)


@given(rules, st.integers(1, 10**5), st.floats(0.1, 10), st.floats(1e-7, 1e-3))
def test_the_rounding_horizon_is_the_last_step_inside(rule, step, q_prime, allowance):
    k = rounding_horizon(rule, step, q_prime, allowance)
    limit = max(2 * largest_rounding(rule, step, 1, q_prime), allowance)
    assert 2 * largest_rounding(rule, step, k, q_prime) <= limit
    assert k == 2**17 or 2 * largest_rounding(rule, step, k + 1, q_prime) > limit


def test_late_steps_grow_linearly_for_ever():
    rule = Adam(betas=(0.9, 0.999), eps=1e-8)
    slope = 2 * (rounding(rule, 10**6, 120_000, 3.0) - rounding(rule, 10**6, 110_000, 3.0)) / 10_000
    assert float(slope) == pytest.approx(3.3e-7, rel=0.04)


@pytest.mark.parametrize("j", [0, 2**17 + 1])
def test_rounding_is_derived_for_2_17_steps(j):
    with pytest.raises(ValueError, match=r"j must be in 1\.\.131072"):
        rounding(Adam(betas=(0.9, 0.999), eps=1e-8), 1, j, 1.0)


def test_an_exploding_rule_has_infinite_rounding_and_no_warning():
    assert largest_rounding(Adam(betas=(0.99, 0.01), eps=0.0), 1, 2000, 1.0) == math.inf


def test_range_of_v():
    assert v_range(Adam(betas=(0.9, 0.999), eps=2.0**-40), "all") == (2.0**-126, 2.0**120)
    v_min, v_max = v_range(Adam(betas=(0.9, 0.999), eps=0.0), 100)
    assert v_max == 2.0**120
    assert is_f32(v_min)
    assert 1 < v_min / (2.0**-97 * 0.999**-100) < 1 + 2.0**-22


def test_without_eps_all_later_steps_are_refused_with_a_remedy():
    rule = Adam(betas=(0.9, 0.999), eps=1e-13)
    with pytest.raises(Uncertifiable, match=r"2\^-40 .* or a finite horizon") as caught:
        v_range(rule, "all")
    assert v_range(rule, caught.value.horizon)[0] < 2.0**-79
    with pytest.raises(Uncertifiable, match=r"would need v >= 2\^-10; .* or a shorter horizon"):
        v_range(rule, 60_000)


def test_underflow_costs_next_to_nothing_at_usual_eps():
    rule = Adam(betas=(0.9, 0.999), eps=1e-8)
    a, b = hull(rule, 141, "all")
    spent = underflow(rule, 141, 3.0, a, b, 1.0)
    assert 1e-9 < spent < 5e-9
    least = underflow(Adam(betas=(0.9, 0.999), eps=2.0**-40), 141, 3.0, a, b, 1.0)
    assert 1e-5 < least < 5e-5
    assert underflow(Adam(betas=(0.9, 0.999), eps=0.0), 141, 3.0, a, b, 1e-5) == pytest.approx(1.4e-6, rel=1e-3)


def test_underflow_of_v_is_within_its_allowance():
    """The lost part of v, put where it hurts most, against (10.2): y / (y + eps) with y and y - lost."""
    eps, lost = 1e-8, math.sqrt(2.0**-124 / 1e-3)
    y = np.geomspace(lost, 1, 100_000)
    change = y / (y - lost + eps) - y / (y + eps)
    assert change.max() <= 1.01 * lost / (4 * eps)
    assert change.max() >= 0.99 * lost / (4 * eps)
