"""The polynomial logarithm and the lattice, over all 2^23 mantissas, against float64 and exact arithmetic."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
from edge_values import bits, params
from flint import arb, ctx
from hypothesis import given
from hypothesis import strategies as st

from guarddcp.certificate.cell import H_MARGIN
from guarddcp.kernels import dispatch, reference
from guarddcp.kernels.dispatch import Planes
from guarddcp.kernels.params import CENTRE, LOG2_POLYNOMIAL
from guarddcp.numerics import lattice
from guarddcp.numerics.lattice import LEVELS_PER_OCTAVE_MAX, OCTAVE_MAX, OCTAVE_MIN, level_range, mantissas

LEVELS = (1, 2, 7, 50, 65, 1000, 7919, 65536)
LEVEL_ERROR = 4.8e-6
"""Octaves by which a level may lie beyond the half width of its cell (NOTES of the certificate, 11.1)."""


@pytest.fixture(scope="module")
def octave():
    """Every float32 in [1, 2), and its logarithm in float64."""
    v = (np.arange(1 << 23, dtype=np.int32) | 0x3F800000).view(np.float32)
    return v, np.log2(v, dtype=np.float64)


def test_the_polynomial_is_as_good_as_it_says(octave):
    v, truth = octave
    f = v - np.float32(1)
    p = np.full_like(f, LOG2_POLYNOMIAL[-1])
    for coefficient in LOG2_POLYNOMIAL[-2::-1]:
        p *= f
        p += coefficient
    p *= f
    assert np.abs(p - truth).max() <= 4.5e-7
    assert p.min() == 0.0
    assert p.max() <= 1.0 + 2.0**-22  # so that rint(p S) <= S, the first level of the next octave


@pytest.mark.parametrize("levels_per_octave", LEVELS)
def test_every_mantissa_lies_in_the_cell_of_its_level(octave, levels_per_octave):
    v, truth = octave
    cell = params(levels_per_octave, 0.1, 1.0)
    table = np.log2(mantissas(levels_per_octave), dtype=np.float64)
    level = reference.levels(v, cell)
    index = level.astype(np.int32)
    assert level.min() == 0.0
    assert level.max() <= levels_per_octave
    octaves, step = np.divmod(index, levels_per_octave)
    distance = np.abs(truth - (octaves + table[step]))
    assert distance.max() <= 0.5 / levels_per_octave + LEVEL_ERROR < 0.5 / levels_per_octave + H_MARGIN


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("levels_per_octave", [7, 1000, 65536])
def test_every_exponent_decodes_to_its_own_octave(levels_per_octave, backend, monkeypatch):
    """Encode and decode in all octaves, from the first to the last normal level, for mantissas that are hard."""
    monkeypatch.setenv("GUARDDCP_KERNELS", backend)
    cell = params(levels_per_octave, 0.1, 1.0, v_min=2.0**-126)
    exponents = np.arange(OCTAVE_MIN, OCTAVE_MAX - 1)
    hard = np.concatenate([mantissas(levels_per_octave)[:50], np.nextafter(np.float32([1, 2]), np.float32([2, 1]))])
    middle = np.exp2((np.arange(50) + 0.5) / levels_per_octave % 1).astype(np.float32)
    mantissa = np.concatenate([hard, middle])
    v = np.ldexp(mantissa[None, :], exponents[:, None])
    r, c = (exponents * levels_per_octave).astype(np.float32), np.rint(np.log2(mantissa) * levels_per_octave)
    planes = dispatch.encode(v * 0, v, r, c, cell)
    m_hat, v_hat = np.empty((2, *v.shape), np.float32)
    assert dispatch.decode(planes, r, c, cell, m_hat, v_hat) == 0
    distance = np.abs(np.log2(v, dtype=np.float64) - np.log2(v_hat, dtype=np.float64))
    assert distance.max() <= 0.5 / levels_per_octave + LEVEL_ERROR


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("levels_per_octave", [1, 7, 1000, 65521, 65536])
def test_all_levels_decode_to_the_table(levels_per_octave, backend, monkeypatch):
    monkeypatch.setenv("GUARDDCP_KERNELS", backend)
    cell = params(levels_per_octave, 0.1, 1.0)
    first, end = level_range(levels_per_octave)
    stride = max(1, (end - first) // 50_000)
    level = np.unique(
        np.concatenate(
            [
                np.arange(first, end, stride),
                np.arange(end - 5, end),
                np.arange(OCTAVE_MIN, OCTAVE_MAX) * levels_per_octave,
            ]
        )
    )
    level = np.concatenate([level, level[level > first] - 1]).astype(np.float32)
    planes = np.full((4, len(level), 1), 0x80, np.uint8)
    m, v = np.empty((2, len(level), 1), np.float32)
    assert dispatch.decode(Planes(*planes), level, np.zeros(1, np.float32), cell, m, v) == 0
    octaves, step = np.divmod(level.astype(np.int64), levels_per_octave)
    np.testing.assert_array_equal(
        bits(v[:, 0]), bits(np.ldexp(mantissas(levels_per_octave)[step], octaves.astype(np.int32)))
    )
    for outside in (first - 1, end, first - 40_000, end + 40_000):
        r = np.full(len(level), outside, np.float32)
        assert dispatch.decode(Planes(*planes), r, np.zeros(1, np.float32), cell, m, v) == len(level)
    assert CENTRE == 0x8080


def rounded_by_arb(j, levels_per_octave):
    """2^(j/S) in units of 2^-23, rounded by interval arithmetic; the interval must decide."""
    ctx.prec = 160
    ulps = arb(2) ** (arb(j) / arb(levels_per_octave)) * arb(2) ** 23
    return int(((ulps + arb(0.5)).floor()).unique_fmpz())


@pytest.mark.parametrize("levels_per_octave", [1, 2, 3, 7, 50, 65, 1000])
def test_mantissas_are_correctly_rounded(levels_per_octave):
    table = mantissas(levels_per_octave)
    want = [rounded_by_arb(j, levels_per_octave) for j in range(levels_per_octave)]
    assert (table * 2.0**23).tolist() == want
    assert table.dtype == np.float32


@given(st.integers(1, LEVELS_PER_OCTAVE_MAX), st.data())
def test_any_mantissa_is_correctly_rounded(levels_per_octave, data):
    j = data.draw(st.integers(0, levels_per_octave - 1))
    assert mantissas(levels_per_octave)[j] * 2.0**23 == rounded_by_arb(j, levels_per_octave)


@pytest.mark.parametrize("levels_per_octave", [7919, 65536])
def test_the_mantissas_nearest_to_ties_are_correctly_rounded(levels_per_octave):
    ulps = np.exp2(np.arange(levels_per_octave) / levels_per_octave) * 2.0**23
    nearest = np.argsort(np.abs(ulps - np.floor(ulps) - 0.5))[:40]
    for j in nearest.tolist():
        assert mantissas(levels_per_octave)[j] * 2.0**23 == rounded_by_arb(j, levels_per_octave)


def test_decimal_settles_what_float64_cannot(monkeypatch):
    """The slow path is met by no S up to 65536; force all entries through it."""
    monkeypatch.setattr(lattice, "_TIE_GUARD", 1.0)
    forced = mantissas.__wrapped__(97)
    np.testing.assert_array_equal(forced, mantissas(97))
    with localcontext() as context:
        context.prec = 60
        exact = Decimal(2) ** (Decimal(1) / 97)
    assert abs(Decimal(float(forced[1])) - exact) <= Decimal(2) ** -24


@pytest.mark.parametrize("levels_per_octave", [0, -1, LEVELS_PER_OCTAVE_MAX + 1])
def test_levels_out_of_range_are_refused(levels_per_octave):
    with pytest.raises(ValueError, match=rf"levels_per_octave must be in \[1, 65536\], not {levels_per_octave}"):
        mantissas(levels_per_octave)


def test_tables_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        mantissas(50)[0] = 3
    with pytest.raises(ValueError, match="read-only"):
        params(50, 0.1, 1.0).table[0] = 3


@given(
    st.integers(1, 65536), st.floats(1e-6, 2.0), st.sampled_from([0.01, 1.0, 3.0, 7.27, 64.0]),
)  # fmt: skip
def test_constants_of_a_cell_stay_inside_it(levels_per_octave, relative_delta, q_max):
    """The self-check's limits, with its own float32 errors added back, never exceed h and w; no code exceeds Q."""
    from guarddcp.certificate import Cell

    u = 2.0**-24
    cell = Cell(levels_per_octave, float(np.float32(relative_delta * q_max)), float(np.float32(q_max)))
    made = params(levels_per_octave, cell.delta, cell.q_max)
    assert math.log2(float(made.ratio_max) * (1 + u)) < cell.h
    assert math.log2(float(made.ratio_min) * (1 - u)) > -cell.h
    assert float(made.deviation_max) + 5 * u * (cell.q_max + cell.w) <= cell.w
    assert float(made.deviation_max) >= cell.delta / 2 + 6 * u * cell.q_max
    assert float(made.code_max) * cell.delta * (1 + 3.01 * u) <= cell.q_max
    assert (float(made.code_max) + 1) * cell.delta * (1 + 8 * u) > cell.q_max or made.code_max == 2**22
