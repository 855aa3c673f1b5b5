"""NumPy reference of the ratio coder: the definition that every other kernel must match byte for byte.

Arrays of a block are 2-D (rows, columns), float32, C-contiguous; r (rows, period) and c (columns,) are the predictor's
integer levels as float32. Every operation is one correctly rounded float32 operation or an exact integer one: no fused
multiply-add and no library logarithm decides anything. (Codes of the m side are float32 integers
in units of delta, levels of the v side float32 integers in units of 1/S octave; see NOTES.md.)
"""

from __future__ import annotations

import numpy as np

from guarddcp.kernels.params import CENTRE, ESCAPE, ONE_PLANE, RESIDUAL_MAX, ZERO, CoderParams
from guarddcp.numerics.lattice import EXP2_POLYNOMIAL, LOG2_POLYNOMIAL

__all__ = ["column_sums", "count_wrong", "decode", "encode", "join_planes", "predict", "row_sums"]

_F = np.float32


def levels(v: np.ndarray, params: CoderParams) -> np.ndarray:
    """L = E*S + rint(p*S), p the polynomial log2 of the mantissa; float32 integers (v must be normal)."""
    bits = v.view(np.int32)
    f = ((bits & 0x7FFFFF) | 0x3F800000).view(_F) - _F(1)
    p = np.full_like(f, LOG2_POLYNOMIAL[-1])
    for coefficient in LOG2_POLYNOMIAL[-2::-1]:
        p = p * f + coefficient
    p = f * p
    exponent = ((bits >> 23) - 127).astype(_F)
    return exponent * params.levels_per_octave + np.rint(p * params.levels_per_octave)


def row_sums(v: np.ndarray, period: int, params: CoderParams) -> tuple[np.ndarray, np.ndarray]:
    """Sums and counts, int64 (rows, period), of the bits of valid v (in [v_min, v_max]) by row and column mod period.

    The bits of a float are its log2, linear between powers of two: good enough for a mean, and nearly free.
    """
    bits, valid = _valid_bits(v, params)
    rows, columns = v.shape
    sums, counts = np.zeros((2, rows, period), np.int64)
    for k in range(min(period, columns)):
        sums[:, k] = bits[:, k::period].sum(axis=1)
        counts[:, k] = valid[:, k::period].sum(axis=1)
    return sums, counts


def column_sums(
    v: np.ndarray, rows: np.ndarray, row_means: np.ndarray, params: CoderParams
) -> tuple[np.ndarray, np.ndarray]:
    """Sums and counts, int64 (columns,), of bits minus their row's mean (int64 (rows, period)), over the given rows.

    Integer sums: blocks may be added in any order.
    """
    bits, valid = _valid_bits(v[rows], params)
    means = row_means[rows][:, np.arange(v.shape[1]) % row_means.shape[1]]
    return np.where(valid, bits - means, 0).sum(axis=0), valid.sum(axis=0, dtype=np.int64)


def _valid_bits(v: np.ndarray, params: CoderParams) -> tuple[np.ndarray, np.ndarray]:
    bits = v.view(np.int32).astype(np.int64)
    valid = (bits >= params.v_min_bits) & (bits <= params.v_max_bits)
    return np.where(valid, bits, 0), valid


def predict(r: np.ndarray, c: np.ndarray) -> np.ndarray:
    """r[row, column mod period] + c[column]: float32 integers (rows, columns); r (rows, period), c (columns,)."""
    return r[:, np.arange(c.size) % r.shape[1]] + c


def encode(
    m: np.ndarray, v: np.ndarray, prediction: np.ndarray, params: CoderParams, two_v: bool, two_q: bool
) -> tuple[np.ndarray, np.ndarray, int]:
    """Symbols uint16 (rows, columns) of v and of q = m/sqrt(v), and how many escaped for want of a second plane.

    A coordinate is coded if v is in range, |k| <= code_max, and both residuals fit their planes; v = +0 with m = 0 is
    ZERO, all else ESCAPE; both carry CENTRE on the q side.
    """
    with np.errstate(all="ignore"):
        level = levels(v, params)
        residual = level - prediction
        code = np.rint(m / np.sqrt(v) * params.delta_reciprocal)
        codable = (
            (v >= params.v_min)
            & (v <= params.v_max)
            & (np.abs(code) <= params.code_max)
            & (np.abs(code) <= _F(RESIDUAL_MAX))
            & (np.abs(residual) <= _F(RESIDUAL_MAX))
            & (level >= params.level_min)
        )
        coded = codable & _fits(residual, two_v) & _fits(code, two_q)
        # By bits: where subnormals are flushed to zero, a subnormal m would compare equal to 0 and be lost.
        zero = (v.view(np.int32) == 0) & (m.view(np.int32) & 0x7FFFFFFF == 0)
        reserved = np.where(zero, ZERO, ESCAPE)
        symbols_v = np.where(coded, residual + _F(CENTRE), reserved).astype(np.int32).astype(np.uint16)
        symbols_q = np.where(coded, code + _F(CENTRE), _F(CENTRE)).astype(np.int32).astype(np.uint16)
    return symbols_v, symbols_q, int(np.count_nonzero(codable & ~coded))


def _fits(residual: np.ndarray, two_planes: bool) -> np.ndarray:
    least, most = (-RESIDUAL_MAX, RESIDUAL_MAX) if two_planes else ONE_PLANE
    return (residual >= _F(least)) & (residual <= _F(most))


def join_planes(low: np.ndarray, high: np.ndarray | None, reserved: bool) -> np.ndarray:
    """Symbols int32 from one or two planes; ``reserved``: low bytes 0 and 1 of a single plane mean ZERO and ESCAPE."""
    symbols = low.astype(np.int32)
    if high is not None:
        return symbols | (high.astype(np.int32) << 8)
    if reserved:
        return np.where(symbols <= ESCAPE, symbols, symbols | 0x8000)
    return symbols | 0x8000


def decode(
    symbols_v: np.ndarray,
    symbols_q: np.ndarray,
    prediction: np.ndarray,
    params: CoderParams,
    m: np.ndarray,
    v: np.ndarray,
) -> tuple[int, int]:
    """Write m^ = (k delta) sqrt(v^) and v^ = 2^(L/S), 0 for reserved symbols.

    Returns the number of codes out of range (what is written for them means nothing), and of escapes.
    """
    level = prediction + (symbols_v.astype(_F) - _F(CENTRE))
    code = symbols_q.astype(_F) - _F(CENTRE)
    reserved = symbols_v <= ESCAPE
    in_range = (level >= params.level_min) & (level <= params.level_max) & (np.abs(code) <= params.code_max)
    level = np.where(in_range & ~reserved, level, _F(0))
    exponent, step = octave_and_step(level, params)
    t = step * params.levels_reciprocal
    fraction = np.full_like(t, EXP2_POLYNOMIAL[-1])
    for coefficient in EXP2_POLYNOMIAL[-2::-1]:
        fraction = fraction * t + coefficient
    fraction = fraction * t + _F(1)
    bits = fraction.view(np.int32) + (exponent.astype(np.int32) << 23)
    v.view(np.int32)[...] = np.where(reserved, 0, bits)
    m[...] = (code * params.delta) * np.sqrt(v)
    return int(np.count_nonzero(~in_range & ~reserved)), int(np.count_nonzero(symbols_v == ESCAPE))


def octave_and_step(level: np.ndarray, params: CoderParams) -> tuple[np.ndarray, np.ndarray]:
    """E and j with L = E*S + j, 0 <= j < S.

    (L + 1/2)/S is no nearer than 1/(2S) to an integer, and its float32 error is below 126 * 2u: exact for S <= 2^15.
    """
    exponent = np.floor((level + _F(0.5)) * params.levels_reciprocal)
    return exponent, level - exponent * params.levels_per_octave


def count_wrong(m: np.ndarray, v: np.ndarray, m_hat: np.ndarray, v_hat: np.ndarray, params: CoderParams) -> int:
    """Number of coordinates that are neither inside their certified cell, nor both zero, nor restored bit for bit.

    Inside: v in [v_min, v_max] and in v^ [2^-h, 2^h], |m/sqrt(v) - m^/sqrt(v^)| <= w, with the float32 errors of
    this very test taken off h and w beforehand (`params.coder_params`).
    """
    with np.errstate(all="ignore"):
        deviation = np.abs(m / np.sqrt(v) - m_hat / np.sqrt(v_hat))
        near = (v >= v_hat * params.ratio_min) & (v <= v_hat * params.ratio_max) & (deviation <= params.deviation_max)
        inside = near & (v >= params.v_min) & (v <= params.v_max)
    m_bits, v_bits, m_hat_bits, v_hat_bits = (x.view(np.int32) for x in (m, v, m_hat, v_hat))
    same = (m_bits == m_hat_bits) & (v_bits == v_hat_bits)
    zero = (v_bits == 0) & (v_hat_bits == 0) & (m_bits & 0x7FFFFFFF == 0) & (m_hat_bits == 0)
    return int(np.count_nonzero(~(inside | same | zero)))
