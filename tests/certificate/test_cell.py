"""The chosen cell proves its tolerance and is the cheapest one (NOTES 11, 12)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guarddcp.certificate import Adam, Cell, cell_bits
from guarddcp.certificate.bound import bound, kap_of, w_for
from guarddcp.certificate.cell import choose_cell
from guarddcp.certificate.horizon import hull
from guarddcp.numerics.floats import U, f32, is_f32

BETAS = [(0.9, 0.999), (0.9, 0.95), (0.99, 0.9999), (0.0, 0.99)]
cases = st.tuples(
    st.sampled_from(BETAS),
    st.sampled_from([1, 141, 100_000]),
    st.sampled_from([1, 60, "all"]),
    st.floats(math.log(1e-4), math.log(0.2)).map(math.exp),
    st.floats(0.05, 7.0).map(f32),
)


def chosen(case):
    betas, step, horizon, tau, q_max = case
    a, b = hull(Adam(betas=betas, eps=0.0), step, horizon)
    return choose_cell(tau, q_max, a, b), a, b


@given(cases)
def test_a_chosen_cell_proves_its_tolerance_and_spends_it(case):
    cell, a, b = chosen(case)
    proved = bound(cell.w, cell.kap, cell.q_max, a, b).max()
    assert proved <= case[3]
    wider = Cell(cell.levels_per_octave, float(np.nextafter(np.float32(cell.delta), np.float32(9))), cell.q_max)
    # As wide as the tolerance or as Q allows.
    assert bound(wider.w, wider.kap, wider.q_max, a, b).max() > case[3] * (1 - 1e-6) or cell.w > 0.999 * cell.q_max


@given(cases)
def test_a_chosen_cell_is_within_a_hundredth_of_a_bit_of_the_cheapest(case):
    cell, a, b = chosen(case)
    levels = np.unique(np.geomspace(1, 40 * cell.levels_per_octave, 300).astype(int))
    w = np.minimum(w_for(case[3], kap_of(0.5 / levels + 2e-6), cell.q_max, a, b, 64), cell.q_max)
    costs = np.log2(levels[w > 0]) - np.log2(w[w > 0])
    assert cell_bits(cell) <= costs.min() + 0.01


@given(cases)
def test_constants_are_exact_float32(case):
    cell, _, _ = chosen(case)
    assert is_f32(cell.delta)
    assert cell.delta > 0
    assert cell.w <= cell.q_max * (1 + 1e-9)
    assert cell.levels_per_octave >= 1


def test_margins():
    cell = Cell(68, f32(0.0135), 3.0)
    assert cell.h == 0.5 / 68 + 2e-6
    assert cell.w == pytest.approx(0.5 * cell.delta + 12 * U * (3.0 + 0.5 * cell.delta), rel=1e-15)
    assert cell.q_prime == cell.q_max + cell.w
    assert cell.kap == pytest.approx(math.tanh(cell.h * math.log(2) / 4), rel=1e-14)
    assert cell_bits(cell) == pytest.approx(math.log2(68 / cell.w))


@pytest.mark.parametrize(
    ("betas", "step", "horizon", "w", "levels"),
    [
        ((0.9, 0.95), 100_000, 1, 0.00719, 18),
        ((0.9, 0.999), 141, 1, 0.01892, 25),
        ((0.9, 0.999), 141, "all", 0.02700, 49),
        ((0.9, 0.999), 100_000, 1, 0.00681, 68),
        ((0.9, 0.999), 100_000, "all", 0.00746, 79),
        ((0.99, 0.9999), 100_000, "all", 0.00758, 79),
    ],
)
def test_published_cells(betas, step, horizon, w, levels):
    q_max = f32(1.165 if betas == (0.9, 0.95) else 3.0)
    a, b = hull(Adam(betas=betas, eps=0.0), step, horizon)
    bits = math.log2(levels / w)
    assert cell_bits(choose_cell(0.01, q_max, a, b)) == pytest.approx(bits, abs=0.03)


@pytest.mark.parametrize("tau", [0.0, -1.0, 1e-9, 1e-6])
def test_no_cell_for_a_hopeless_tolerance(tau):
    a, b = hull(Adam(betas=(0.9, 0.999), eps=0.0), 1000, 1)
    assert choose_cell(tau, 3.0, a, b) is None


def test_without_state_terms_w_stops_at_q():
    cell = choose_cell(0.01, 2.0, np.zeros(1), np.array([7.0]))
    assert 1.99 < cell.w <= 2.0
