"""numba loops of the ratio coder; bytes equal those of `reference`, which explains the formulas.

One formula per loop and few arrays in each: LLVM vectorises a loop only while it can tell its arrays apart with a
handful of run-time checks. A block is worked through flat, in segments that run over row ends and whose scratch stays
in the first-level cache; only the prediction r + c is laid out row by row. No ``fastmath``, so nothing is contracted or
reordered. NOTES.md has the timings that led here.
"""

from __future__ import annotations

import os

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from guarddcp.kernels.params import ONE_PLANE
from guarddcp.numerics.lattice import EXP2_POLYNOMIAL, LOG2_POLYNOMIAL

__all__ = ["column_sums", "decode", "decode_and_check", "encode", "row_sums"]

_F, _I = np.float32, np.int32
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = LOG2_POLYNOMIAL
_D0, _D1, _D2, _D3, _D4 = EXP2_POLYNOMIAL
_ONE_BITS = _I(0x3F800000)
_SEGMENT = 2048
_CENTRE, _RESIDUAL_MAX = _F(0x8080), _F(32639)
_LEAST_ONE, _MOST_ONE = _F(ONE_PLANE[0]), _F(ONE_PLANE[1])
_ESCAPE_ONE, _ESCAPE_TWO = _F(1 - 128), _F(1 - 0x8080)  # residual of symbol 1 with one plane, with two
_SIGN = _I(-(2**31))
_ZERO_MARK, _TOO_LARGE = _F(65536), _F(65537)  # beyond every code; NaN becomes _TOO_LARGE as well
_own_cache_dir = numba.config.CACHE_DIR  # type: ignore[attr-defined]
# Compiled code goes to the user's cache (unless NUMBA_CACHE_DIR says where): files beside the package would be left
# behind when it is uninstalled, and shadow the next installation. Undone at the end of this module.
numba.config.CACHE_DIR = _own_cache_dir or os.path.join(  # type: ignore[attr-defined]
    os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "guarddcp", "kernels"
)
_jit = numba.njit(nogil=True, cache=True, error_model="numpy")


def _entry(returns, *arguments):  # type: ignore[no-untyped-def]
    """Compile at import for one signature: inputs may be read-only buffers, and no second version can appear."""
    return numba.njit(returns(*arguments), nogil=True, cache=True, error_model="numpy")


_f32, _i64, _bool = types.float32, types.int64, types.boolean
_in_f32 = types.Array(types.float32, 1, "C", readonly=True)
_in_i32 = types.Array(types.int32, 1, "C", readonly=True)
_in_i64 = types.Array(types.int64, 1, "C", readonly=True)
_in_u8 = types.Array(types.uint8, 1, "C", readonly=True)
_in_i32_2d = types.Array(types.int32, 2, "C", readonly=True)
_out_f32 = types.Array(types.float32, 1, "C")
_out_i32 = types.Array(types.int32, 1, "C")
_out_i64 = types.Array(types.int64, 1, "C")
_out_u8 = types.Array(types.uint8, 1, "C")


@intrinsic
def _as_float(typing_context, bits):  # type: ignore[no-untyped-def]
    """float32 with the bits of an int32."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), codegen


@intrinsic
def _as_int(typing_context, number):  # type: ignore[no-untyped-def]
    """int32 with the bits of a float32."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], context.get_value_type(types.int32))

    return types.int32(types.float32), codegen


@_jit
def _predict(r, c, period, begin, out):
    """r[row, column mod period] + c[column] for the flat coordinates from ``begin`` on; r is flat."""
    columns = c.size
    done = 0
    row = begin // columns
    column = begin - row * columns
    while done < out.size:
        n = min(columns - column, out.size - done)
        part = out[done : done + n]
        own = c[column : column + n]
        if period == 1:
            shift = r[row]
            for j in range(n):
                part[j] = shift + own[j]
        else:
            for k in range(period):
                shift = r[row * period + (column + k) % period]
                for j in range(k, n, period):
                    part[j] = shift + own[j]
        done += n
        row += 1
        column = 0


@_jit
def _levels(bits, octave, out):
    for j in range(bits.size):
        f = _as_float(_I((bits[j] & _I(0x7FFFFF)) | _I(0x3F800000))) - _F(1)
        p = f * ((((((_C6 * f + _C5) * f + _C4) * f + _C3) * f + _C2) * f + _C1) * f + _C0)
        out[j] = _F((bits[j] >> _I(23)) - _I(127)) * octave + np.rint(p * octave)


@_jit
def _count_negative(bits):
    total = 0
    for j in range(bits.size):
        total += -(bits[j] >> _I(31))
    return total


@_jit
def _codes(m_bits, v_bits, delta_reciprocal, out):
    for j in range(m_bits.size):
        code = np.rint(_as_float(m_bits[j]) / np.sqrt(_as_float(v_bits[j])) * delta_reciprocal)
        code = code if abs(code) <= _RESIDUAL_MAX else _TOO_LARGE
        # By bits: where subnormals are flushed to zero, a subnormal m would compare equal to 0 and be lost.
        out[j] = _ZERO_MARK if (v_bits[j] == 0) & (_I(m_bits[j] & _I(0x7FFFFFFF)) == 0) else code


@_jit
def _symbols_v(level, code, prediction, v, v_min, v_max, code_max, level_min, low_v, high_v, low_q, high_q, out):
    """Symbol 0 or 1 where reserved, -1 where the coordinate would need a second plane that is not there."""
    for j in range(level.size):
        residual = level[j] - prediction[j]
        coded = (
            (v[j] >= v_min)
            & (v[j] <= v_max)
            & (abs(code[j]) <= code_max)
            & (abs(residual) <= _RESIDUAL_MAX)
            & (level[j] >= level_min)
        )
        fits = (residual >= low_v) & (residual <= high_v) & (code[j] >= low_q) & (code[j] <= high_q)
        reserved = _F(0) if code[j] == _ZERO_MARK else _F(1)
        symbol = residual + _CENTRE if fits else _F(-1)
        out[j] = _I(symbol if coded else reserved)


@_jit
def _write_v(symbol, low):
    for j in range(symbol.size):
        low[j] = np.uint8(symbol[j] if symbol[j] >= 0 else _I(1))


@_jit
def _write_q(symbol_v, code, low):
    for j in range(symbol_v.size):
        low[j] = np.uint8(_I(code[j] + _CENTRE if symbol_v[j] > 1 else _CENTRE))


@_jit
def _write_high_v(symbol, high):
    for j in range(symbol.size):
        high[j] = np.uint8((symbol[j] if symbol[j] >= 0 else _I(1)) >> _I(8))


@_jit
def _write_high_q(symbol_v, code, high):
    for j in range(symbol_v.size):
        high[j] = np.uint8(_I(code[j] + _CENTRE if symbol_v[j] > 1 else _CENTRE) >> _I(8))


@_entry(
    _i64,
    _in_i32, _in_i32, _in_f32, _in_f32, _in_f32, _i64, *(_f32,) * 6,
    _out_u8, _out_u8, _bool, _out_u8, _out_u8, _bool,
)  # fmt: skip
def encode(
    m_bits, v_bits, v, r, c, period, octave, level_min, delta_reciprocal, code_max, v_min, v_max,
    low_v, high_v, two_v, low_q, high_q, two_q,
):  # fmt: skip
    """Write the planes asked for; return how many coordinates escaped for want of a second plane."""
    code_max = min(code_max, _RESIDUAL_MAX)
    least_v = -_RESIDUAL_MAX if two_v else _LEAST_ONE
    most_v = _RESIDUAL_MAX if two_v else _MOST_ONE
    least_q = -_RESIDUAL_MAX if two_q else _LEAST_ONE
    most_q = _RESIDUAL_MAX if two_q else _MOST_ONE
    prediction = np.empty(_SEGMENT, np.float32)
    level = np.empty(_SEGMENT, np.float32)
    code = np.empty(_SEGMENT, np.float32)
    symbol = np.empty(_SEGMENT, np.int32)
    wide = 0
    for a in range(0, v.size, _SEGMENT):
        z = min(a + _SEGMENT, v.size)
        n = z - a
        _predict(r, c, period, a, prediction[:n])
        _levels(v_bits[a:z], octave, level[:n])
        _codes(m_bits[a:z], v_bits[a:z], delta_reciprocal, code[:n])
        _symbols_v(
            level[:n], code[:n], prediction[:n], v[a:z], v_min, v_max, code_max, level_min,
            least_v, most_v, least_q, most_q, symbol[:n],
        )  # fmt: skip
        wide += _count_negative(symbol[:n])
        _write_v(symbol[:n], low_v[a:z])
        _write_q(symbol[:n], code[:n], low_q[a:z])
        if two_v:
            _write_high_v(symbol[:n], high_v[a:z])
        if two_q:
            _write_high_q(symbol[:n], code[:n], high_q[a:z])
    return wide


@_jit
def _residual_one(low, out):
    for j in range(low.size):
        out[j] = _F(low[j]) - _F(128)


@_jit
def _residual_two(low, high, out):
    for j in range(low.size):
        out[j] = _F(low[j]) + _F(256) * _F(high[j]) - _CENTRE


@_jit
def _place(
    residual, code, prediction, escape, octave, octave_reciprocal, level_min, level_max, code_max, fraction, exponent
):
    """Fraction j/S and exponent field of each level. Together they give +0 for reserved symbols (residual <= escape),
    and a sign bit for codes out of range."""
    for j in range(residual.size):
        x = prediction[j] + residual[j]
        good = (x >= level_min) & (x <= level_max) & (abs(code[j]) <= code_max)
        reserved = residual[j] <= escape
        x = x if good & (residual[j] > escape) else _F(0)
        e = np.floor((x + _F(0.5)) * octave_reciprocal)
        fraction[j] = (x - e * octave) * octave_reciprocal
        field = _I(_I(e) << _I(23)) if good else _SIGN
        exponent[j] = -_ONE_BITS if reserved else field


@_jit
def _second_moments(fraction, exponent, out):
    for j in range(fraction.size):
        t = fraction[j]
        x = ((((_D4 * t + _D3) * t + _D2) * t + _D1) * t + _D0) * t + _F(1)
        out[j] = _I(_as_int(x) + exponent[j])


@_jit
def _first_moments(code, v, delta, root, out):
    for j in range(code.size):
        root[j] = np.sqrt(v[j])
        out[j] = (code[j] * delta) * root[j]


@_jit
def _count_equal(residual, escape):
    total = 0
    for j in range(residual.size):
        total += 1 if residual[j] == escape else 0
    return total


@_jit
def _decode_segment(
    low_v, high_v, two_v, low_q, high_q, two_q, prediction,
    octave, octave_reciprocal, level_min, level_max, delta, code_max, residual, code, root, fraction, exponent,
    m, v, bits,
):  # fmt: skip
    """Returns (codes out of range, escapes); leaves sqrt(v^) in ``root`` and the v residuals in ``residual``."""
    if two_v:
        _residual_two(low_v, high_v, residual)
    else:
        _residual_one(low_v, residual)
    if two_q:
        _residual_two(low_q, high_q, code)
    else:
        _residual_one(low_q, code)
    escape = _ESCAPE_TWO if two_v else _ESCAPE_ONE
    _place(
        residual,
        code,
        prediction,
        escape,
        octave,
        octave_reciprocal,
        level_min,
        level_max,
        code_max,
        fraction,
        exponent,
    )
    _second_moments(fraction, exponent, bits)
    _first_moments(code, v, delta, root, m)
    return _count_negative(bits), _count_equal(residual, escape)


_DECODER = (_in_u8, _in_u8, _bool, _in_u8, _in_u8, _bool, _in_f32, _in_f32, _i64, *(_f32,) * 6)


@_entry(types.UniTuple(_i64, 2), *_DECODER, _out_f32, _out_f32, _out_i32)
def decode(
    low_v, high_v, two_v, low_q, high_q, two_q, r, c, period,
    octave, octave_reciprocal, level_min, level_max, delta, code_max, m, v, bits,
):  # fmt: skip
    """Write m^ and v^ (``bits`` is the int32 view of v); return (codes out of range, escapes)."""
    prediction = np.empty(_SEGMENT, np.float32)
    residual = np.empty(_SEGMENT, np.float32)
    code = np.empty(_SEGMENT, np.float32)
    root = np.empty(_SEGMENT, np.float32)
    fraction = np.empty(_SEGMENT, np.float32)
    exponent = np.empty(_SEGMENT, np.int32)
    bad = 0
    escapes = 0
    for a in range(0, m.size, _SEGMENT):
        z = min(a + _SEGMENT, m.size)
        n = z - a
        _predict(r, c, period, a, prediction[:n])
        found = _decode_segment(
            low_v[a:z], high_v[a:z], two_v, low_q[a:z], high_q[a:z], two_q, prediction[:n],
            octave, octave_reciprocal, level_min, level_max, delta, code_max,
            residual[:n], code[:n], root[:n], fraction[:n], exponent[:n], m[a:z], v[a:z], bits[a:z],
        )  # fmt: skip
        bad += found[0]
        escapes += found[1]
    return bad, escapes


@_jit
def _total(flag):
    total = 0
    for j in range(flag.size):
        total += flag[j]
    return total


@_jit
def _outside(m, v, m_hat, v_hat, root, v_min, v_max, ratio_min, ratio_max, deviation_max, flag):
    for j in range(m.size):
        deviation = abs(m[j] / np.sqrt(v[j]) - m_hat[j] / root[j])
        near = (v[j] >= v_hat[j] * ratio_min) & (v[j] <= v_hat[j] * ratio_max) & (deviation <= deviation_max)
        flag[j] = _I(0) if near & (v[j] >= v_min) & (v[j] <= v_max) else _I(1)


@_jit
def _pardon_exact(m, v, m_hat, v_hat, flag):
    for j in range(m.size):
        same = (m[j] == m_hat[j]) & (v[j] == v_hat[j])
        zero = (v[j] == 0) & (v_hat[j] == 0) & ((m[j] & _I(0x7FFFFFFF)) == 0) & (m_hat[j] == 0)
        flag[j] = _I(0) if same | zero else flag[j]


@_jit
def _put_back(residual, escape, original, decoded):
    for j in range(residual.size):
        decoded[j] = original[j] if residual[j] == escape else decoded[j]


@_jit
def _put_back_root(residual, escape, v, root):
    # So that a segment whose escapes are ordinary numbers passes the check at once.
    for j in range(residual.size):
        root[j] = np.sqrt(v[j]) if residual[j] == escape else root[j]


@_entry(
    types.UniTuple(_i64, 2), *_DECODER, _i64,
    _in_f32, _in_f32, _in_i32, _in_i32, *(_f32,) * 5, _out_f32, _out_f32, _out_i32, _out_i32,
)  # fmt: skip
def decode_and_check(
    low_v, high_v, two_v, low_q, high_q, two_q, r, c, period,
    octave, octave_reciprocal, level_min, level_max, delta, code_max, begin,
    m, v, m_bits, v_bits, v_min, v_max, ratio_min, ratio_max, deviation_max, m_hat, v_hat, m_hat_bits, v_hat_bits,
):  # fmt: skip
    """Decode the coordinates from ``begin`` on (all arrays but r, c are of that part), escapes put back from m, v.

    Returns (coordinates that are wrong, escapes). Wrong: outside the cell and not exact. One pass, so that a segment is
    checked while it is in the cache; the decoder is the readers' own.
    """
    prediction = np.empty(_SEGMENT, np.float32)
    residual = np.empty(_SEGMENT, np.float32)
    code = np.empty(_SEGMENT, np.float32)
    root = np.empty(_SEGMENT, np.float32)
    fraction = np.empty(_SEGMENT, np.float32)
    flag = np.empty(_SEGMENT, np.int32)
    wrong = 0
    escapes = 0
    for a in range(0, m.size, _SEGMENT):
        z = min(a + _SEGMENT, m.size)
        n = z - a
        _predict(r, c, period, begin + a, prediction[:n])
        found = _decode_segment(
            low_v[a:z], high_v[a:z], two_v, low_q[a:z], high_q[a:z], two_q, prediction[:n],
            octave, octave_reciprocal, level_min, level_max, delta, code_max,
            residual[:n], code[:n], root[:n], fraction[:n], flag[:n], m_hat[a:z], v_hat[a:z], v_hat_bits[a:z],
        )  # fmt: skip
        escapes += found[1]
        if found[1] > 0:
            escape = _ESCAPE_TWO if two_v else _ESCAPE_ONE
            _put_back(residual[:n], escape, m[a:z], m_hat[a:z])
            _put_back(residual[:n], escape, v[a:z], v_hat[a:z])
            _put_back_root(residual[:n], escape, v[a:z], root[:n])
        _outside(
            m[a:z],
            v[a:z],
            m_hat[a:z],
            v_hat[a:z],
            root[:n],
            v_min,
            v_max,
            ratio_min,
            ratio_max,
            deviation_max,
            flag[:n],
        )
        if _total(flag[:n]) > 0:
            _pardon_exact(m_bits[a:z], v_bits[a:z], m_hat_bits[a:z], v_hat_bits[a:z], flag[:n])
            wrong += _total(flag[:n])
    return wrong, escapes


@_jit
def _valid_bits(bits, least, most, out, valid):
    # Bits of positive floats are ordered like the floats; those of NaN lie above, of negative ones below.
    for j in range(bits.size):
        good = (bits[j] >= least) & (bits[j] <= most)
        out[j] = bits[j] if good else _I(0)
        valid[j] = _I(1) if good else _I(0)


@_jit
def _add_row(own, valid, means, sums, counts):
    for j in range(own.size):
        sums[j] += own[j] - valid[j] * means[j]
    for j in range(own.size):
        counts[j] += valid[j]


@_entry(types.void, _in_i32_2d, _i64, types.int32, types.int32, _out_i64, _out_i64)
def row_sums(bits, period, least, most, sums, counts):
    """Add to sums, counts int64 (rows * period,): bits of the valid coordinates of each row and column residue."""
    rows, columns = bits.shape
    own = np.empty(_SEGMENT, np.int32)
    valid = np.empty(_SEGMENT, np.int32)
    for i in range(rows):
        for a in range(0, columns, _SEGMENT):
            z = min(a + _SEGMENT, columns)
            n = z - a
            _valid_bits(bits[i, a:z], least, most, own[:n], valid[:n])
            if period == 1:
                sums[i] += _total(own[:n])
                counts[i] += _total(valid[:n])
            else:
                for k in range(period):
                    total = 0
                    count = 0
                    for j in range(k, n, period):
                        total += own[j]
                        count += valid[j]
                    sums[i * period + (a + k) % period] += total
                    counts[i * period + (a + k) % period] += count


@_entry(types.void, _in_i32_2d, _in_i64, _in_i64, _i64, types.int32, types.int32, _out_i64, _out_i64)
def column_sums(bits, rows, row_means, period, least, most, sums, counts):
    """Add bits minus their row's mean, of the given rows, to sums, counts int64 (columns,)."""
    columns = bits.shape[1]
    own = np.empty(_SEGMENT, np.int32)
    valid = np.empty(_SEGMENT, np.int32)
    means = np.empty(_SEGMENT, np.int32)
    for index in range(rows.size):
        i = rows[index]
        for a in range(0, columns, _SEGMENT):
            z = min(a + _SEGMENT, columns)
            n = z - a
            if period == 1:
                means[:n] = _I(row_means[i])
            else:
                for j in range(n):
                    means[j] = _I(row_means[i * period + (a + j) % period])
            _valid_bits(bits[i, a:z], least, most, own[:n], valid[:n])
            _add_row(own[:n], valid[:n], means[:n], sums[a:z], counts[a:z])


numba.config.CACHE_DIR = _own_cache_dir  # type: ignore[attr-defined]
