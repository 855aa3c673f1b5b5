"""What a kernel needs to know of a cell, as float32 scalars that both kernels share.

All integers of the coder (levels, codes, predictions, residuals) are carried as float32: they stay below 2^23, where
float32 arithmetic is exact, and a loop of one element type vectorises.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from guarddcp.numerics.lattice import level_range

__all__ = [
    "CENTRE", "ESCAPE", "ONE_PLANE", "RESIDUAL_MAX", "ZERO",
    "CoderParams", "coder_params",
]  # fmt: skip

ZERO, ESCAPE = 0, 1
"""Reserved symbols of the v planes: the cell v = m = 0, and a coordinate stored exactly."""

CENTRE = 0x8080
"""Symbol of residual 0. The low plane alone says everything while the high plane is 0x80."""

RESIDUAL_MAX = 32639
"""Largest |residual| that a two-plane symbol holds without meeting the reserved ones: 0x8080 +- 32639."""

ONE_PLANE = (-126, 127)
"""Residuals that one plane holds: bytes 2 to 255, 0 and 1 being reserved."""


@dataclass(frozen=True)
class CoderParams:
    """Scalars of one cell (all float32 unless said): see `coder_params`."""

    levels_per_octave: np.float32
    levels_reciprocal: np.float32
    level_min: np.float32
    level_max: np.float32
    delta: np.float32
    delta_reciprocal: np.float32
    code_max: np.float32
    v_min: np.float32
    v_max: np.float32
    v_min_bits: np.int32
    v_max_bits: np.int32
    ratio_min: np.float32
    ratio_max: np.float32
    deviation_max: np.float32


@lru_cache(maxsize=256)
def coder_params(
    levels_per_octave: int, delta: float, q_max: float, h: float, w: float, v_min: float, v_max: float
) -> CoderParams:
    """Constants of encode, decode and check for one cell.

    ``level_max`` is inclusive. ``code_max`` keeps |q^| <= Q after the three roundings of a decode (4u). ``ratio_*`` and
    ``deviation_max`` are the bounds h and w of the certificate, drawn in by the float32 errors of the check itself:
    2u of v^ 2^-h, and 5u (Q + w) of the two quotients and their difference.
    """
    u = 2.0**-24
    lowest, end = level_range(levels_per_octave)
    f32 = np.float32
    return CoderParams(
        levels_per_octave=f32(levels_per_octave),
        levels_reciprocal=f32(1.0) / f32(levels_per_octave),
        level_min=f32(lowest),
        level_max=f32(end - 1),
        delta=f32(delta),
        delta_reciprocal=f32(1.0) / f32(delta),
        code_max=f32(min(np.floor(q_max * (1 - 4 * u) / delta), 2.0**22)),
        v_min=f32(v_min),
        v_max=f32(v_max),
        v_min_bits=f32(v_min).view(np.int32),
        v_max_bits=f32(v_max).view(np.int32),
        ratio_min=np.nextafter(f32(2.0**-h * (1 + 2 * u)), f32(2.0)),
        ratio_max=np.nextafter(f32(2.0**h * (1 - 2 * u)), f32(0.0)),
        deviation_max=np.nextafter(f32(w - 5 * u * (q_max + w)), f32(0.0)),
    )
