"""Float32 values at which coders break, and parameters of cells to try them on."""

from __future__ import annotations

import math

import numpy as np

from guarddcp.certificate import Cell
from guarddcp.kernels.params import CoderParams, coder_params

V_MIN, V_MAX = 2.0**-120, 2.0**120
"""Range of v in most certificates here; narrower than the floats, so that both ends have values outside."""

_BITS = (
    0x00000000, 0x80000000,  # zeros of both signs
    0x00000001, 0x80000001, 0x00000009, 0x00000004, 0x007FFFFF, 0x807FFFFF,  # subnormals; 1.3e-44 and 5.6e-45
    0x00800000, 0x80800000, 0x00800001,  # 2^-126
    0x7F800000, 0xFF800000,  # infinities
    0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFFABCDEF, 0x7FA5A5A5,  # NaN, quiet and signalling, with payloads
    0x7F7FFFFF, 0xFF7FFFFF,  # largest floats
    0x3F800000, 0xBF800000, 0x3F7FFFFF, 0x3F800001, 0x3FFFFFFF, 0x40000000,  # around one octave
)  # fmt: skip


def _with_neighbours(x: float) -> list[np.float32]:
    value = np.float32(x)
    return [np.nextafter(value, np.float32(0)), value, np.nextafter(value, np.float32(np.inf))]


EDGES = np.concatenate(
    [
        np.array(_BITS, np.uint32).view(np.float32),
        np.array(_with_neighbours(V_MIN) + _with_neighbours(V_MAX), np.float32),
        np.array(_with_neighbours(2.0**-126)[1:] + _with_neighbours(2.0**121), np.float32),
        np.array([1e-30, -1e-30, 1e-20, 1e20, 3e38, 1e-3, -1e-3, 0.7, math.pi, -math.e], np.float32),
    ]
)


def edge_pairs() -> tuple[np.ndarray, np.ndarray]:
    """Every edge value as m with every edge value as v: two float32 arrays (len(EDGES), len(EDGES))."""
    m, v = np.meshgrid(EDGES, EDGES, indexing="ij")
    return np.ascontiguousarray(m), np.ascontiguousarray(v)


def params(
    levels_per_octave: int, delta: float, q_max: float, v_min: float = V_MIN, v_max: float = V_MAX
) -> CoderParams:
    """Parameters of a cell as a certificate would give them."""
    cell = Cell(levels_per_octave, float(np.float32(delta)), float(np.float32(q_max)))
    return coder_params(cell.levels_per_octave, cell.delta, cell.q_max, cell.h, cell.w, v_min, v_max)


def bits(x: np.ndarray) -> np.ndarray:
    """Bit patterns, for comparisons that tell zeros and NaNs apart."""
    return np.ascontiguousarray(x).view(np.uint32)
