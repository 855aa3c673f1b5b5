"""The one place that picks a kernel. Callers see NumPy arrays and never learn which loops ran.

``GUARDDCP_KERNELS=reference`` selects the NumPy reference (slow, same bytes); the default is numba.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from guarddcp.kernels import reference
from guarddcp.kernels.params import ESCAPE, CoderParams

__all__ = ["RARE", "Planes", "backend", "column_sums", "decode", "decode_and_check", "encode", "row_sums"]

RARE, FEW = 4096, 4
"""One coordinate in RARE, and FEW more, that need a second plane are cheaper as escapes than with one."""


@dataclass
class Planes:
    """Symbol planes of one block: uint8 (rows, columns); ``two_v``/``two_q`` say whether the high plane counts."""

    low_v: np.ndarray
    high_v: np.ndarray
    low_q: np.ndarray
    high_q: np.ndarray
    two_v: bool = False
    two_q: bool = False

    @classmethod
    def empty(cls, rows: int, columns: int) -> Planes:
        low_v, high_v, low_q, high_q = np.empty((4, rows, columns), np.uint8)
        return cls(low_v, high_v, low_q, high_q)

    def flat(self, part: slice) -> Planes:
        """The planes of some flat coordinates, as one row."""
        planes = (self.low_v, self.high_v, self.low_q, self.high_q)
        low_v, high_v, low_q, high_q = (plane.reshape(1, -1)[:, part] for plane in planes)
        return Planes(low_v, high_v, low_q, high_q, self.two_v, self.two_q)


def backend() -> str:
    """Name of the kernels in use: ``numba`` or ``reference``."""
    name = os.environ.get("GUARDDCP_KERNELS", "numba")
    if name not in ("numba", "reference"):
        raise ValueError(f"GUARDDCP_KERNELS must be 'numba' or 'reference', not {name!r}")
    return name


def row_sums(v: np.ndarray, period: int, params: CoderParams) -> tuple[np.ndarray, np.ndarray]:
    """Sums and counts (int64, (rows, period)) of the bits of valid v (`reference.row_sums`)."""
    if backend() == "reference":
        return reference.row_sums(v, period, params)
    from guarddcp.kernels import numba_cpu

    sums, counts = np.zeros((2, v.shape[0] * period), np.int64)
    numba_cpu.row_sums(v.view(np.int32), period, params.v_min_bits, params.v_max_bits, sums, counts)
    return sums.reshape(-1, period), counts.reshape(-1, period)


def column_sums(
    v: np.ndarray, rows: np.ndarray, row_means: np.ndarray, params: CoderParams
) -> tuple[np.ndarray, np.ndarray]:
    """Sums and counts (int64, per column) of bits minus ``row_means`` over the given rows of one block."""
    if backend() == "reference":
        return reference.column_sums(v, rows, row_means, params)
    from guarddcp.kernels import numba_cpu

    sums, counts = np.zeros((2, v.shape[1]), np.int64)
    limits = (params.v_min_bits, params.v_max_bits)
    means = row_means.reshape(-1)
    numba_cpu.column_sums(v.view(np.int32), rows, means, row_means.shape[1], *limits, sums, counts)
    return sums, counts


def encode(
    m: np.ndarray, v: np.ndarray, r: np.ndarray, c: np.ndarray, params: CoderParams, planes: Planes | None = None
) -> Planes:
    """Symbol planes of one block (`reference.encode` says which symbols), in ``planes`` if given.

    One plane each, unless more coordinates would escape for that than `RARE` and `FEW` allow: then two.
    """
    planes = Planes.empty(*m.shape) if planes is None else planes
    planes.two_v = planes.two_q = False
    if _encode(m, v, r, c, params, planes) > m.size // RARE + FEW:
        planes.two_v = True
        if _encode(m, v, r, c, params, planes) > m.size // RARE + FEW:
            planes.two_q = True
            _encode(m, v, r, c, params, planes)
    return planes


def _encode(m: np.ndarray, v: np.ndarray, r: np.ndarray, c: np.ndarray, params: CoderParams, planes: Planes) -> int:
    if backend() == "reference":
        symbols_v, symbols_q, wide = reference.encode(m, v, reference.predict(r, c), params, planes.two_v, planes.two_q)
        planes.low_v[...], planes.low_q[...] = symbols_v & 0xFF, symbols_q & 0xFF
        if planes.two_v:
            planes.high_v[...] = symbols_v >> 8
        if planes.two_q:
            planes.high_q[...] = symbols_q >> 8
        return wide
    from guarddcp.kernels import numba_cpu

    return int(
        numba_cpu.encode(
            _flat(m).view(np.int32), _flat(v).view(np.int32), _flat(v), r.reshape(-1), c, r.shape[1],
            params.levels_per_octave, params.level_min, params.delta_reciprocal, params.code_max,
            params.v_min, params.v_max,
            _flat(planes.low_v), _flat(planes.high_v), planes.two_v,
            _flat(planes.low_q), _flat(planes.high_q), planes.two_q,
        )
    )  # fmt: skip


def decode(
    planes: Planes, r: np.ndarray, c: np.ndarray, params: CoderParams, m: np.ndarray, v: np.ndarray
) -> tuple[int, int]:
    """Decode into m, v (float32, the planes' shape); reserved symbols give 0. Returns (codes out of range, escapes)."""
    if backend() == "reference":
        return reference.decode(*_joined(planes), reference.predict(r, c), params, m, v)
    from guarddcp.kernels import numba_cpu

    arguments = _decoder_arguments(planes, r, c, params)
    bad, escapes = numba_cpu.decode(*arguments, _flat(m), _flat(v), _flat(v).view(np.int32))
    return int(bad), int(escapes)


def decode_and_check(
    planes: Planes,
    r: np.ndarray,
    c: np.ndarray,
    params: CoderParams,
    part: slice,
    m: np.ndarray,
    v: np.ndarray,
    m_hat: np.ndarray,
    v_hat: np.ndarray,
) -> tuple[int, int]:
    """Decode the flat coordinates ``part`` of a block, put escapes back from m, v, and check every coordinate.

    ``planes``, r, c: of the whole block. m, v, m_hat, v_hat: flat, of the part alone. Returns the number of coordinates
    that are out of range, or outside their cell and not exact (`reference.count_wrong`), and the number of escapes.
    """
    flat = planes.flat(part)
    if backend() == "reference":
        prediction = reference.predict(r, c).reshape(1, -1)[:, part]
        symbols_v, symbols_q = _joined(flat)
        bad, escapes = reference.decode(symbols_v, symbols_q, prediction, params, m_hat[None], v_hat[None])
        at = symbols_v[0] == ESCAPE
        m_hat[at], v_hat[at] = m[at], v[at]
        return max(bad, reference.count_wrong(m, v, m_hat, v_hat, params)), escapes
    from guarddcp.kernels import numba_cpu

    wrong, escapes = numba_cpu.decode_and_check(
        *_decoder_arguments(flat, r, c, params), part.start,
        m, v, m.view(np.int32), v.view(np.int32),
        params.v_min, params.v_max, params.ratio_min, params.ratio_max, params.deviation_max,
        m_hat, v_hat, m_hat.view(np.int32), v_hat.view(np.int32),
    )  # fmt: skip
    return int(wrong), int(escapes)


def _flat(array: np.ndarray) -> np.ndarray:
    flat = array.reshape(-1)
    assert array.flags.c_contiguous, "kernel arrays are C-contiguous: a copy would be written in their place"
    return flat


def _joined(planes: Planes) -> tuple[np.ndarray, np.ndarray]:
    symbols_v = reference.join_planes(planes.low_v, planes.high_v if planes.two_v else None, reserved=True)
    return symbols_v, reference.join_planes(planes.low_q, planes.high_q if planes.two_q else None, reserved=False)


def _decoder_arguments(planes: Planes, r: np.ndarray, c: np.ndarray, params: CoderParams) -> tuple[object, ...]:
    return (
        _flat(planes.low_v), _flat(planes.high_v), planes.two_v,
        _flat(planes.low_q), _flat(planes.high_q), planes.two_q, r.reshape(-1), c, r.shape[1],
        params.levels_per_octave, params.levels_reciprocal, params.level_min, params.level_max,
        params.delta, params.code_max,
    )  # fmt: skip
