"""The lattice of v over all 2^23 mantissas and all levels, against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from edge_values import bits, params
from flint import arb, ctx
from hypothesis import given
from hypothesis import strategies as st

from guarddcp.certificate.cell import H_MARGIN, MAX_LEVELS, Cell
from guarddcp.kernels import dispatch, reference
from guarddcp.kernels.dispatch import Planes
from guarddcp.numerics.lattice import (
    EXP2_POLYNOMIAL,
    LEVELS_PER_OCTAVE_MAX,
    LOG2_POLYNOMIAL,
    OCTAVE_MAX,
    OCTAVE_MIN,
    level_range,
)  # fmt: skip

U = 2.0**-24
LEVELS = (1, 2, 7, 50, 65, 1000, 7919, 32749, 32767, 32768)
BEYOND = 1.2e-6
"""Octaves by which v may lie beyond half a level from v^ (NOTES of the certificate, 11.1): H_MARGIN less what the
writer's self-check needs for roundings of its own."""


@pytest.fixture(scope="module")
def octave():
    """Every float32 in [1, 2), and its logarithm in float64."""
    v = (np.arange(1 << 23, dtype=np.int32) | 0x3F800000).view(np.float32)
    return v, np.log2(v, dtype=np.float64)


def horner(coefficients, x):
    """c0 + c1 x + ... in float32, every product and sum rounded by itself."""
    value = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * x + coefficient
    return value


def test_the_logarithm_is_as_good_as_it_says(octave):
    v, truth = octave
    f = v - np.float32(1)
    p = horner(LOG2_POLYNOMIAL, f) * f
    assert np.abs(p - truth).max() <= 4.5e-7
    assert p.min() == 0.0
    assert p.max() <= 1.0 + 2.0**-22  # so that rint(p S) <= S, the first level of the next octave


@pytest.mark.parametrize("levels_per_octave", LEVELS)
def test_the_power_is_as_good_as_it_says(levels_per_octave):
    """1 + p(j/S): above the level before it, below 2, and within 2.5 units of 2^(j/S)."""
    step = np.arange(levels_per_octave, dtype=np.float32)
    t = step * (np.float32(1) / np.float32(levels_per_octave))
    power = horner(EXP2_POLYNOMIAL, t) * t + np.float32(1)
    exact = np.exp2(np.arange(levels_per_octave) / levels_per_octave)
    assert np.abs(power / exact - 1).max() <= 2.2e-7
    assert power[0] == 1.0
    assert power[-1] < 2.0
    assert (np.diff(power) > 0).all()


@pytest.mark.parametrize("levels_per_octave", LEVELS)
def test_every_mantissa_lies_in_the_cell_of_its_level(octave, levels_per_octave):
    """By the reference's own encoder and decoder. Other octaves differ by exact integers and powers of two."""
    v, truth = octave
    cell = params(levels_per_octave, 0.1, 1.0)
    level = reference.levels(v, cell)
    assert level.min() == 0.0
    assert level.max() <= levels_per_octave
    v_hat = np.empty((1, levels_per_octave + 1), np.float32)
    all_levels = np.arange(levels_per_octave + 1, dtype=np.float32)[None]
    symbols = np.full(v_hat.shape, 0x8080)
    assert reference.decode(symbols, symbols, all_levels, cell, v_hat.copy(), v_hat) == (0, 0)
    log_v_hat = np.log2(v_hat[0], dtype=np.float64)
    distance = np.abs(truth - log_v_hat[level.astype(np.int32)]).max()
    assert distance <= 0.5 / levels_per_octave + BEYOND
    # The writer's check has to pass all of it, so its limits lie further out, and inside the certified h.
    room = min(math.log2(cell.ratio_max), -math.log2(cell.ratio_min))
    assert distance + 2 * U / math.log(2) <= room < 0.5 / levels_per_octave + H_MARGIN


@pytest.mark.parametrize("levels_per_octave", LEVELS)
def test_octave_and_step_are_exact_for_every_level(levels_per_octave):
    cell = params(levels_per_octave, 0.1, 1.0)
    level = np.arange(*level_range(levels_per_octave), dtype=np.float32)
    exponent, step = reference.octave_and_step(level, cell)
    want = np.divmod(np.arange(*level_range(levels_per_octave)), levels_per_octave)
    np.testing.assert_array_equal(exponent, want[0])
    np.testing.assert_array_equal(step, want[1])


def test_octaves_end_where_they_should_for_every_number_of_levels():
    """All S, all octaves: the first level of each and the one before it. floor() settles the rest."""
    octaves = np.arange(OCTAVE_MIN, OCTAVE_MAX, dtype=np.float32)[:, None]
    for begin in range(1, LEVELS_PER_OCTAVE_MAX + 1, 4096):
        s = np.arange(begin, min(begin + 4096, LEVELS_PER_OCTAVE_MAX + 1)).astype(np.float32)
        first, reciprocal = octaves * s, np.float32(1) / s
        for level, want in ((first, octaves), (first - 1, octaves - 1)):
            np.testing.assert_array_equal(np.floor((level + np.float32(0.5)) * reciprocal) - want, 0)


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("levels_per_octave", [1, 7, 1000, 32767])
def test_all_levels_decode_to_normal_floats_and_none_beyond(levels_per_octave, backend, monkeypatch):
    monkeypatch.setenv("GUARDDCP_KERNELS", backend)
    cell = params(levels_per_octave, 0.1, 1.0)
    first, end = level_range(levels_per_octave)
    around = np.arange(OCTAVE_MIN, OCTAVE_MAX)[:, None] * levels_per_octave + np.arange(-2, 3)
    level = np.unique(np.concatenate([np.linspace(first, end - 1, 20_000).astype(int), around.reshape(-1)]))
    level = level[(level >= first) & (level < end)]
    planes, c = Planes(*np.full((4, len(level), 1), 0x80, np.uint8)), np.zeros(1, np.float32)
    m, v = np.empty((2, len(level), 1), np.float32)
    assert dispatch.decode(planes, level[:, None].astype(np.float32), c, cell, m, v) == (0, 0)
    assert np.abs(np.log2(v[:, 0], dtype=np.float64) - level / levels_per_octave).max() <= 4e-7
    assert bits(v).min() >= 0x00800000
    assert v.max() < 2.0**OCTAVE_MAX
    for outside in (first - 1, end, first - 40_000, end + 40_000):
        r = np.full((len(level), 1), outside, np.float32)
        assert dispatch.decode(planes, r, c, cell, m, v) == (len(level), 0)


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("levels_per_octave", [7, 1000, 32767])
def test_encoding_in_every_octave(levels_per_octave, backend, monkeypatch):
    """From the smallest normal float on, for the mantissas at and half way between levels."""
    monkeypatch.setenv("GUARDDCP_KERNELS", backend)
    cell = params(levels_per_octave, 0.1, 1.0, v_min=2.0**-126)
    exponents = np.arange(OCTAVE_MIN, OCTAVE_MAX - 1)
    at = np.unique(np.linspace(0, 2 * levels_per_octave - 1, 60).astype(int)) / (2 * levels_per_octave)
    mantissa = np.exp2(at).astype(np.float32)
    mantissa = np.concatenate([mantissa, np.nextafter(mantissa[1:], np.float32(0)), np.float32([2 - 2.0**-23])])
    v = np.ldexp(mantissa[None, :], exponents[:, None])
    r = (exponents * levels_per_octave).astype(np.float32)[:, None]
    c = np.rint(np.log2(mantissa) * levels_per_octave)
    planes = dispatch.encode(v * 0, v, r, c, cell)
    m_hat, v_hat = np.empty((2, *v.shape), np.float32)
    assert dispatch.decode(planes, r, c, cell, m_hat, v_hat) == (0, 0)
    distance = np.abs(np.log2(v, dtype=np.float64) - np.log2(v_hat, dtype=np.float64))
    assert distance.max() <= 0.5 / levels_per_octave + BEYOND


def test_float64_logarithms_are_good_enough_to_judge_by():
    """The oracle above against interval arithmetic."""
    ctx.prec = 100
    for x in np.random.default_rng(0).uniform(1, 2, 200).astype(np.float32).tolist():
        exact = arb(x).log() / arb(2).log()
        assert abs(exact - arb(math.log2(x))) < 1e-15
        assert abs(arb(float(np.exp2(x - 1))) / arb(2) ** arb(x - 1) - 1) < 1e-15


@pytest.mark.parametrize("levels_per_octave", [0, -1, LEVELS_PER_OCTAVE_MAX + 1])
def test_levels_out_of_range_are_refused(levels_per_octave):
    message = rf"levels_per_octave must be in \[1, {LEVELS_PER_OCTAVE_MAX}\], not {levels_per_octave}"
    with pytest.raises(ValueError, match=message):
        level_range(levels_per_octave)
    assert MAX_LEVELS <= LEVELS_PER_OCTAVE_MAX


@given(st.integers(1, MAX_LEVELS), st.floats(1e-6, 2.0), st.sampled_from([0.01, 1.0, 3.0, 7.27, 64.0]))
def test_limits_of_the_self_check_lie_inside_the_cell(levels_per_octave, relative_delta, q_max):
    """With its own float32 errors added back they never exceed h and w; no code decodes beyond Q."""
    cell = Cell(levels_per_octave, float(np.float32(relative_delta * q_max)), float(np.float32(q_max)))
    made = params(levels_per_octave, cell.delta, cell.q_max)
    assert math.log2(float(made.ratio_max) * (1 + U)) < cell.h
    assert math.log2(float(made.ratio_min) * (1 - U)) > -cell.h
    assert float(made.deviation_max) + 5 * U * (cell.q_max + cell.w) <= cell.w
    assert float(made.code_max) * cell.delta * (1 + 3.01 * U) <= cell.q_max
    assert (float(made.code_max) + 1) * cell.delta * (1 + 8 * U) > cell.q_max or made.code_max == 2**22
    # Room for what the encoder does: half a code, and 2u each of q, of its product, 3u of the decoder.
    assert float(made.deviation_max) >= cell.delta / 2 + 6.5 * U * cell.q_max


@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_the_encoder_of_q_stays_within_what_the_self_check_allows(backend, monkeypatch):
    """q half way between codes, at all sizes up to Q, in narrow cells where roundings weigh most."""
    monkeypatch.setenv("GUARDDCP_KERNELS", backend)
    rng = np.random.default_rng(2)
    for delta, q_max in ((1e-5, 0.3), (2e-4, 6.0), (1e-3, 7.27), (1.0, 2.0)):
        cell = params(100, delta, q_max)
        most = min(int(cell.code_max), 32639)
        v = (2.0 ** rng.uniform(-100, 100, (40, 2000))).astype(np.float32)
        code = rng.integers(-most, most, v.shape) + 0.5 * rng.choice([-1, 1], v.shape)
        q = code * float(cell.delta) * (1 + rng.integers(-4, 5, v.shape) * U)
        m = (q * np.sqrt(v.astype(np.float64))).astype(np.float32)
        r, c = np.median(reference.levels(v, cell), axis=1)[:, None], np.zeros(2000, np.float32)
        planes = dispatch.encode(m, v, np.rint(r), c, cell)
        m_hat, v_hat = np.empty((2, m.size), np.float32)
        args = (np.rint(r), c, cell, slice(0, m.size), m.reshape(-1), v.reshape(-1), m_hat, v_hat)
        wrong, escapes = dispatch.decode_and_check(planes, *args)
        assert wrong == 0
        assert escapes <= m.size // 4  # half a code above the largest one
