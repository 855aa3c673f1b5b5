"""The logarithmic lattice on which second moments are coded: v^ = 2^(L/S).

A lattice is named by S, its levels per octave, alone. Level L = E*S + j (0 <= j < S) stands for the float32
``mantissas(S)[j] * 2^E``, so decoding is one table entry and one exponent field: the same bits on every machine.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np

__all__ = ["LEVELS_PER_OCTAVE_MAX", "OCTAVE_MAX", "OCTAVE_MIN", "level_range", "mantissas"]

LEVELS_PER_OCTAVE_MAX = 1 << 16
"""Largest S: levels stay below 2^23, so that float32 holds every level, residual and prediction exactly."""

OCTAVE_MIN, OCTAVE_MAX = -126, 121
"""Exponents E of decoded second moments, half open: normal float32, and below the 2^120 of the certificate plus one."""

_TIE_GUARD = 2.0**-18
"""Distance from a rounding tie, in float32 ulps, inside which float64 exp2 (good to 2^-24 of that) is not trusted."""


def level_range(levels_per_octave: int) -> tuple[int, int]:
    """Half-open range of the levels that decode to normal float32 values."""
    return OCTAVE_MIN * levels_per_octave, OCTAVE_MAX * levels_per_octave


@lru_cache(maxsize=64)
def mantissas(levels_per_octave: int) -> np.ndarray:
    """2^(j/S) for j = 0..S-1, correctly rounded to float32; shape (S,), read-only.

    Correct rounding makes the table a definition, not a file: entries that float64 cannot decide are settled with
    50 decimal digits. Raises ValueError unless 1 <= S <= 2^16.
    """
    if not 1 <= levels_per_octave <= LEVELS_PER_OCTAVE_MAX:
        raise ValueError(f"levels_per_octave must be in [1, {LEVELS_PER_OCTAVE_MAX}], not {levels_per_octave}")
    exact = np.exp2(np.arange(levels_per_octave, dtype=np.float64) / levels_per_octave)
    table = exact.astype(np.float32)
    ulps = exact * 2.0**23
    near_tie = np.abs(ulps - np.floor(ulps) - 0.5) < _TIE_GUARD
    for j in np.flatnonzero(near_tie):
        table[j] = _rounded_power(int(j), levels_per_octave)
    table.flags.writeable = False
    return table


def _rounded_power(j: int, levels_per_octave: int) -> np.float32:
    with localcontext() as context:
        context.prec = 50
        ulps = (Decimal(2) ** (Decimal(j) / levels_per_octave)) * (1 << 23)
        return np.float32(int(ulps.to_integral_value(rounding="ROUND_HALF_EVEN")) * 2.0**-23)
