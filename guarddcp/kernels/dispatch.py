"""The one place that picks a kernel. Callers see NumPy arrays and never learn which loops ran.

``GUARDDCP_KERNELS=reference`` selects the NumPy reference (slow, same bytes); the default is numba.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from guarddcp.kernels import reference
from guarddcp.kernels.params import CoderParams

__all__ = ["Planes", "backend", "check", "decode", "encode", "fit"]


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


def backend() -> str:
    """Name of the kernels in use: ``numba`` or ``reference``."""
    name = os.environ.get("GUARDDCP_KERNELS", "numba")
    if name not in ("numba", "reference"):
        raise ValueError(f"GUARDDCP_KERNELS must be 'numba' or 'reference', not {name!r}")
    return name


def fit(v: np.ndarray, params: CoderParams, sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Row means (int64) of the levels of one block; adds the columns' remainders to ``sums`` and ``counts`` (int64)."""
    if backend() == "reference":
        r, block_sums, block_counts = reference.fit(v, params)
        sums += block_sums
        counts += block_counts
        return r
    from guarddcp.kernels import numba_cpu

    r = np.empty(v.shape[0], np.int64)
    numba_cpu.fit(v, v.view(np.int32), params.levels_per_octave, params.v_min, params.v_max, r, sums, counts)
    return r


def encode(m: np.ndarray, v: np.ndarray, r: np.ndarray, c: np.ndarray, params: CoderParams) -> Planes:
    """Symbol planes of one block (`reference.encode` says which symbols)."""
    planes = Planes.empty(*m.shape)
    if backend() == "reference":
        symbols_v, symbols_q = reference.encode(m, v, r, c, params)
        wide_v = reference.split_planes(symbols_v, planes.low_v, planes.high_v)
        wide_q = reference.split_planes(symbols_q, planes.low_q, planes.high_q)
    else:
        from guarddcp.kernels import numba_cpu

        wide_v, wide_q = numba_cpu.encode(
            m, v, v.view(np.int32), r, c,
            params.levels_per_octave, params.level_min, params.delta_reciprocal, params.code_max, params.v_min, params.v_max,
            planes.low_v, planes.high_v, planes.low_q, planes.high_q,
        )  # fmt: skip
    planes.two_v, planes.two_q = wide_v > 0, wide_q > 0
    return planes


def decode(planes: Planes, r: np.ndarray, c: np.ndarray, params: CoderParams, m: np.ndarray, v: np.ndarray) -> int:
    """Decode into m, v (float32, the planes' shape); reserved symbols give 0. Returns the number of codes out of range."""
    if backend() == "reference":
        symbols_v = reference.join_planes(planes.low_v, planes.high_v if planes.two_v else None, reserved=True)
        symbols_q = reference.join_planes(planes.low_q, planes.high_q if planes.two_q else None, reserved=False)
        return reference.decode(symbols_v, symbols_q, r, c, params, m, v)
    from guarddcp.kernels import numba_cpu

    return int(
        numba_cpu.decode(
            planes.low_v, planes.high_v, planes.two_v, planes.low_q, planes.high_q, planes.two_q, r, c,
            params.levels_per_octave, params.levels_reciprocal, params.level_min, params.level_max,
            params.delta, params.code_max, params.table_bits, m, v, v.view(np.int32),
        )
    )  # fmt: skip


def check(m: np.ndarray, v: np.ndarray, m_hat: np.ndarray, v_hat: np.ndarray, params: CoderParams) -> int:
    """Number of coordinates that are outside their certified cell and not exact (`reference.check`)."""
    flat = [np.ascontiguousarray(x).reshape(-1) for x in (m, v, m_hat, v_hat)]
    if backend() == "reference":
        return reference.check(*flat, params)
    from guarddcp.kernels import numba_cpu

    return int(
        numba_cpu.check(
            *flat, *(x.view(np.int32) for x in flat), params.ratio_min, params.ratio_max, params.deviation_max
        )
    )
