"""The supremum of a cell against brute force and interval arithmetic; its inverses (NOTES 2 to 5)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from adam_oracle import one_line
from flint import arb, ctx
from hypothesis import given
from hypothesis import strategies as st

from guarddcp.certificate.bound import bound, kap_for, kap_of, octaves_of, q_for, w_for

w_ = st.floats(0.0, 1.0)
h_ = st.floats(1e-5, 1.0)
q_ = st.floats(0.0, 20.0)
a_ = st.floats(0.0, 3.0)


def value(w, h, q_max, a, b, nodes=128):
    return float(bound(w, float(kap_of(h)), q_max, np.array([a]), np.array([b]), nodes)[0])


@given(w_, h_, q_, a_, a_, st.integers(0, 2**32 - 1))
def test_no_state_gradient_or_eps_exceeds_the_bound(w, h, q_max, a, b, seed):
    rng = np.random.default_rng(seed)
    x = np.concatenate(([0.0], 10.0 ** rng.uniform(-4, 4, 400)))
    log2_r2 = np.where(rng.random(401) < 0.3, -h, rng.uniform(-h, h, 401))
    e = np.where(rng.random(401) < 0.3, 0.0, 10.0 ** rng.uniform(-4, 4, 401))
    assert one_line(w, h, q_max, a, b, x, log2_r2, e).max() <= value(w, h, q_max, a, b)


@given(w_, h_, q_, a_, a_)
def test_the_worst_case_has_eps_0_and_v_too_small(w, h, q_max, a, b):
    x = np.tan(np.linspace(0, math.pi / 2, 2001)[:-1])
    worst = one_line(w, h, q_max, a, b, x, -h, 0.0).max()
    for log2_r2 in (h, 0.5 * h, -0.5 * h):
        for e in (0.0, 1e-3, 0.3, 3.0):
            # 1e-6: the grid in x of the worst case may miss its own maximum by that much.
            assert one_line(w, h, q_max, a, b, x, log2_r2, e).max() <= worst * (1 + 1e-6) + 1e-15


@given(w_, st.floats(1e-4, 0.1), q_, a_, a_)
def test_the_bound_is_tight(w, h, q_max, a, b):
    x = np.tan(np.linspace(0, math.pi / 2, 4001)[:-1])
    assert value(w, h, q_max, a, b) <= 1.0005 * one_line(w, h, q_max, a, b, x, -h, 0.0).max() + 1e-300


@pytest.mark.parametrize(("nodes", "slack"), [(8, 0.035), (16, 0.01), (64, 0.001)])
def test_fewer_nodes_are_sound_and_looser(nodes, slack):
    fine, coarse = value(0.007, 0.007, 3.0, 1.0, 7.0), value(0.007, 0.007, 3.0, 1.0, 7.0, nodes)
    assert fine <= coarse <= fine * (1 + slack)


def supremum_by_intervals(w, h, q_max, a, b, parts=1500):
    """(lower, upper) of sup over al of a w cos al + a Q (cos al - cos be) + b (sin be - sin al), tan be = R tan al."""
    ctx.prec = 80
    ratio2 = arb(2) ** arb(h) - 1
    ratio = (ratio2 + 1).sqrt()
    width = arb.pi() / 2 / parts
    low = high = 0.0
    for i in range(parts):
        al = width * arb(i + 0.5, 0.5)
        cosine, sine = al.cos(), al.sin()
        s = (1 + ratio2 * sine * sine).sqrt()
        state = a * w * cosine + a * q_max * cosine * ratio2 * sine * sine / (s * (s + 1))
        total = state + b * sine * ratio2 * cosine * cosine / (s * (ratio + s))
        high = max(high, float(total.upper()))
        low = max(low, float(total.lower()))
    return low, high


@pytest.mark.parametrize(
    ("w", "h", "q_max", "a", "b"),
    [(0.0068, 0.00736, 3.0, 1.0, 3.2), (0.18, 0.16, 3.0, 0.9, 0.5), (0.0, 0.01, 1.0, 0.0, 7.3), (0.3, 0.5, 7.3, 1, 1)],
)
def test_interval_arithmetic_proves_the_same_supremum(w, h, q_max, a, b):
    low, high = supremum_by_intervals(w, h, q_max, a, b)
    found = value(w, h, q_max, a, b)
    assert low <= found
    assert high <= found * 1.003  # intervals of this width are that loose
    assert found <= low * (1.003 + 0.4 * float(kap_of(h)) ** 2)


points = st.lists(st.tuples(st.floats(1e-3, 3.0), st.floats(0.0, 8.0)), min_size=1, max_size=6)


@given(points, st.floats(1e-4, 0.3), st.floats(0.0, 0.95), st.floats(0.01, 8.0))
def test_inverses_land_on_the_tolerance(pairs, tau, share, q_max):
    a, b = (np.array(side) for side in zip(*pairs, strict=True))
    w = share * tau / a.max()
    kap = kap_for(tau, w, q_max, a, b)
    assert kap <= 0.999
    if kap <= 0:
        return
    assert bound(w, kap, q_max, a, b).max() <= tau * (1 + 1e-12)
    widest = float(w_for(tau, kap, q_max, a, b))
    assert bound(widest, kap, q_max, a, b).max() == pytest.approx(tau, rel=1e-11)
    largest = q_for(tau, w, kap, a, b)
    assert bound(w, kap, largest, a, b).max() == pytest.approx(tau, rel=1e-11)


@given(points, st.floats(1e-4, 0.3), st.floats(0.0, 0.9))
def test_kap_spends_the_tolerance(pairs, tau, share):
    a, b = (np.array(side) for side in zip(*pairs, strict=True))
    w = share * tau / a.max()
    kap = kap_for(tau, w, 1.0, a, b)
    if 0 < kap < 0.3:
        assert bound(w, kap, 1.0, a, b).max() >= tau * (1 - 0.5 * kap**2 - 1e-9)


@given(points, st.floats(0, 1), st.floats(0, 0.4), st.floats(0, 5), st.floats(0, 1))
def test_shrinking_a_cell_shrinks_its_bound_at_least_as_much(pairs, w, kap, q_max, s):
    a, b = (np.array(side) for side in zip(*pairs, strict=True))
    assert np.all(bound(s * w, s * kap, q_max, a, b) <= s * bound(w, kap, q_max, a, b) * (1 + 1e-12) + 1e-300)


def test_w_for_has_no_limit_without_state_terms():
    a, b = np.zeros(2), np.array([1.0, 2.0])
    assert w_for(0.1, np.array([0.01, 0.5]), 1.0, a, b).tolist() == [math.inf, -math.inf]


@given(st.floats(1e-7, 4.0))
def test_kap_and_octaves_are_inverse(h):
    assert float(octaves_of(kap_of(h))) == pytest.approx(h, rel=1e-12)
    ratio = 2.0 ** (h / 2)
    assert float(kap_of(h)) == pytest.approx((ratio - 1) / (ratio + 1), rel=1e-7)
