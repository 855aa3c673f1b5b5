"""numba loops of the ratio coder; bytes equal those of `reference`, which explains the formulas.

One formula per loop and few arrays in each: LLVM vectorises a loop only while it can tell its arrays apart with a
handful of run-time checks. A row is worked through in segments whose scratch stays in the first-level cache. No
``fastmath``, so nothing is contracted or reordered.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from guarddcp.kernels.params import LOG2_POLYNOMIAL

__all__ = ["check", "decode", "encode", "fit"]

_F, _I = np.float32, np.int32
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = LOG2_POLYNOMIAL
_SEGMENT = 2048
_CENTRE, _RESIDUAL_MAX = _F(0x8080), _F(32639)
_ZERO_MARK, _TOO_LARGE = _F(65536), _F(65537)  # beyond every code; NaN becomes _TOO_LARGE as well
_jit = numba.njit(nogil=True, cache=True, error_model="numpy")


def _entry(returns, *arguments):  # type: ignore[no-untyped-def]
    """Compile at import for one signature: inputs may be read-only buffers, and no second version can appear."""
    return numba.njit(returns(*arguments), nogil=True, cache=True, error_model="numpy")


_f32, _i64, _bool = types.float32, types.int64, types.boolean
_in_f32 = types.Array(types.float32, 1, "C", readonly=True)
_in_i32 = types.Array(types.int32, 1, "C", readonly=True)
_in_f32_2d = types.Array(types.float32, 2, "C", readonly=True)
_in_i32_2d = types.Array(types.int32, 2, "C", readonly=True)
_in_u8_2d = types.Array(types.uint8, 2, "C", readonly=True)
_out_i64 = types.Array(types.int64, 1, "C")
_out_f32_2d = types.Array(types.float32, 2, "C")
_out_i32_2d = types.Array(types.int32, 2, "C")
_out_u8_2d = types.Array(types.uint8, 2, "C")


@intrinsic
def _as_float(typing_context, bits):  # type: ignore[no-untyped-def]
    """float32 with the bits of an int32."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), codegen


@_jit
def _levels(bits, octave, out):
    for j in range(bits.size):
        f = _as_float(_I((bits[j] & _I(0x7FFFFF)) | _I(0x3F800000))) - _F(1)
        p = f * ((((((_C6 * f + _C5) * f + _C4) * f + _C3) * f + _C2) * f + _C1) * f + _C0)
        out[j] = _F((bits[j] >> _I(23)) - _I(127)) * octave + np.rint(p * octave)


@_jit
def _codes(m, v, bits, delta_reciprocal, out):
    for j in range(m.size):
        code = np.rint(m[j] / np.sqrt(v[j]) * delta_reciprocal)
        code = code if abs(code) <= _RESIDUAL_MAX else _TOO_LARGE
        out[j] = _ZERO_MARK if (bits[j] == 0) & (m[j] == _F(0)) else code


@_jit
def _symbols_v(level, code, c, v, r, v_min, v_max, code_max, level_min, out):
    for j in range(level.size):
        residual = level[j] - (r + c[j])
        coded = (
            (v[j] >= v_min)
            & (v[j] <= v_max)
            & (abs(code[j]) <= code_max)
            & (abs(residual) <= _RESIDUAL_MAX)
            & (level[j] >= level_min)
        )
        reserved = _F(0) if code[j] == _ZERO_MARK else _F(1)
        out[j] = _I(residual + _CENTRE if coded else reserved)


@_jit
def _symbols_q(code, symbol_v, out):
    for j in range(code.size):
        out[j] = _I(code[j] + _CENTRE if symbol_v[j] > 1 else _CENTRE)


@_jit
def _split(symbol, low, high):
    for j in range(symbol.size):
        low[j] = np.uint8(symbol[j])
        high[j] = np.uint8(symbol[j] >> _I(8))
    wide = 0
    for j in range(symbol.size):
        wide += 0 if ((symbol[j] >= 0x8002) & (symbol[j] <= 0x80FF)) | (symbol[j] <= 1) else 1
    return wide


@_entry(
    types.UniTuple(_i64, 2),
    _in_f32_2d, _in_f32_2d, _in_i32_2d, _in_f32, _in_f32, *(_f32,) * 6, *(_out_u8_2d,) * 4,
)  # fmt: skip
def encode(m, v, bits, r, c, octave, level_min, delta_reciprocal, code_max, v_min, v_max, low_v, high_v, low_q, high_q):
    """Write the four planes (uint8, 2-D); return (wide v symbols, wide q symbols)."""
    rows, columns = m.shape
    code_max = min(code_max, _RESIDUAL_MAX)
    level = np.empty(_SEGMENT, np.float32)
    code = np.empty(_SEGMENT, np.float32)
    sv = np.empty(_SEGMENT, np.int32)
    sq = np.empty(_SEGMENT, np.int32)
    wide_v = 0
    wide_q = 0
    for i in range(rows):
        for a in range(0, columns, _SEGMENT):
            z = min(a + _SEGMENT, columns)
            n = z - a
            _levels(bits[i, a:z], octave, level[:n])
            _codes(m[i, a:z], v[i, a:z], bits[i, a:z], delta_reciprocal, code[:n])
            _symbols_v(level[:n], code[:n], c[a:z], v[i, a:z], r[i], v_min, v_max, code_max, level_min, sv[:n])
            _symbols_q(code[:n], sv[:n], sq[:n])
            wide_v += _split(sv[:n], low_v[i, a:z], high_v[i, a:z])
            wide_q += _split(sq[:n], low_q[i, a:z], high_q[i, a:z])
    return wide_v, wide_q


@_jit
def _join(low, high, two_planes, reserved_max, out):
    if two_planes:
        for j in range(low.size):
            out[j] = _I(low[j]) | (_I(high[j]) << _I(8))
    else:
        for j in range(low.size):
            out[j] = _I(low[j]) if _I(low[j]) <= reserved_max else _I(low[j]) | _I(0x8000)


@_jit
def _in_range(sv, sq, c, r, level_min, level_max, code_max, level, flag):
    for j in range(sv.size):
        x = (r + c[j]) + (_F(sv[j]) - _CENTRE)
        good = (x >= level_min) & (x <= level_max) & (abs(_F(sq[j]) - _CENTRE) <= code_max)
        flag[j] = _I(0) if (good | (sv[j] <= 1)) else _I(1)
        level[j] = x if (good & (sv[j] > 1)) else _F(0)


@_jit
def _total(flag):
    total = 0
    for j in range(flag.size):
        total += flag[j]
    return total


@_jit
def _octave_and_step(level, octave, octave_reciprocal, exponent_bits, step):
    for j in range(level.size):
        e = np.floor(level[j] * octave_reciprocal)
        x = level[j] - e * octave
        under = _F(1) if x < _F(0) else _F(0)
        e = e - under
        x = x + under * octave
        over = _F(1) if x >= octave else _F(0)
        e = e + over
        x = x - over * octave
        step[j] = _I(x)
        exponent_bits[j] = _I((_I(e) + _I(127)) << _I(23))


@_jit
def _second_moments(exponent_bits, step, table, out):
    for j in range(step.size):
        out[j] = exponent_bits[j] | table[step[j]]


@_jit
def _clear_reserved(sv, out):
    for j in range(sv.size):
        out[j] = out[j] if sv[j] > 1 else _I(0)


@_jit
def _first_moments(sq, v, delta, out):
    for j in range(sq.size):
        out[j] = ((_F(sq[j]) - _CENTRE) * delta) * np.sqrt(v[j])


@_entry(
    _i64,
    _in_u8_2d, _in_u8_2d, _bool, _in_u8_2d, _in_u8_2d, _bool, _in_f32, _in_f32,
    *(_f32,) * 6, _in_i32, _out_f32_2d, _out_f32_2d, _out_i32_2d,
)  # fmt: skip
def decode(
    low_v, high_v, two_v, low_q, high_q, two_q, r, c,
    octave, octave_reciprocal, level_min, level_max, delta, code_max, table, m, v, bits,
):  # fmt: skip
    """Write m^ and v^ (``bits`` is the int32 view of v); return the number of codes out of range."""
    rows, columns = m.shape
    level = np.empty(_SEGMENT, np.float32)
    exponent_bits = np.empty(_SEGMENT, np.int32)
    step = np.empty(_SEGMENT, np.int32)
    sv = np.empty(_SEGMENT, np.int32)
    sq = np.empty(_SEGMENT, np.int32)
    bad = 0
    for i in range(rows):
        for a in range(0, columns, _SEGMENT):
            z = min(a + _SEGMENT, columns)
            n = z - a
            _join(low_v[i, a:z], high_v[i, a:z], two_v, _I(1), sv[:n])
            _join(low_q[i, a:z], high_q[i, a:z], two_q, _I(-1), sq[:n])
            _in_range(sv[:n], sq[:n], c[a:z], r[i], level_min, level_max, code_max, level[:n], step[:n])
            bad += _total(step[:n])
            _octave_and_step(level[:n], octave, octave_reciprocal, exponent_bits[:n], step[:n])
            _second_moments(exponent_bits[:n], step[:n], table, bits[i, a:z])
            _clear_reserved(sv[:n], bits[i, a:z])
            _first_moments(sq[:n], v[i, a:z], delta, m[i, a:z])
    return bad


@_jit
def _outside(m, v, m_hat, v_hat, ratio_min, ratio_max, deviation_max, flag):
    for j in range(m.size):
        ratio = v[j] / v_hat[j]
        deviation = abs(m[j] / np.sqrt(v[j]) - m_hat[j] / np.sqrt(v_hat[j]))
        inside = (ratio >= ratio_min) & (ratio <= ratio_max) & (deviation <= deviation_max)
        flag[j] = _I(0) if inside else _I(1)


@_jit
def _pardon_exact(m, v, m_hat, v_hat, flag):
    for j in range(m.size):
        same = (m[j] == m_hat[j]) & (v[j] == v_hat[j])
        zero = (v[j] == 0) & (v_hat[j] == 0) & ((m[j] & _I(0x7FFFFFFF)) == 0) & (m_hat[j] == 0)
        flag[j] = _I(0) if same | zero else flag[j]


@_entry(_i64, *(_in_f32,) * 4, *(_in_i32,) * 4, _f32, _f32, _f32)
def check(m, v, m_hat, v_hat, m_bits, v_bits, m_hat_bits, v_hat_bits, ratio_min, ratio_max, deviation_max):
    """1-D arrays and their int32 views; return the number of coordinates outside their cell and not exact."""
    flag = np.empty(_SEGMENT, np.int32)
    bad = 0
    for a in range(0, m.size, _SEGMENT):
        z = min(a + _SEGMENT, m.size)
        f = flag[: z - a]
        _outside(m[a:z], v[a:z], m_hat[a:z], v_hat[a:z], ratio_min, ratio_max, deviation_max, f)
        if _total(f) > 0:
            _pardon_exact(m_bits[a:z], v_bits[a:z], m_hat_bits[a:z], v_hat_bits[a:z], f)
            bad += _total(f)
    return bad


@_jit
def _valid_levels(level, v, v_min, v_max, out, valid):
    for j in range(level.size):
        good = (v[j] >= v_min) & (v[j] <= v_max)
        out[j] = _I(level[j] if good else _F(0))
        valid[j] = _I(1) if good else _I(0)


@_jit
def _accumulate(level, valid, mean, sums, counts):
    for j in range(level.size):
        sums[j] += level[j] - valid[j] * mean
    for j in range(level.size):
        counts[j] += valid[j]


@_entry(types.void, _in_f32_2d, _in_i32_2d, _f32, _f32, _f32, _out_i64, _out_i64, _out_i64)
def fit(v, bits, octave, v_min, v_max, r, sums, counts):
    """Write r int64 (rows,) and add to sums, counts int64 (columns,)."""
    rows, columns = v.shape
    level = np.empty(_SEGMENT, np.float32)
    row = np.empty(columns, np.int32)
    valid = np.empty(columns, np.int32)
    for i in range(rows):
        for a in range(0, columns, _SEGMENT):
            z = min(a + _SEGMENT, columns)
            _levels(bits[i, a:z], octave, level[: z - a])
            _valid_levels(level[: z - a], v[i, a:z], v_min, v_max, row[a:z], valid[a:z])
        count = _total(valid)
        r[i] = (2 * _total(row) + count) // (2 * count) if count > 0 else 0
        _accumulate(row, valid, r[i], sums, counts)
