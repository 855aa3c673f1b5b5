"""The logarithmic lattice on which second moments are coded: v^ = 2^(L/S).

A lattice is named by S, its levels per octave, alone. Level L = E*S + j (0 <= j < S) stands for the float32
``(1 + p(j/S)) * 2^E``, where p is EXP2_POLYNOMIAL in float32 Horner form, each product and sum rounded by itself:
single IEEE operations, hence the same bits on every machine.
"""

from __future__ import annotations

import numpy as np

__all__ = ["EXP2_POLYNOMIAL", "LEVELS_PER_OCTAVE_MAX", "LOG2_POLYNOMIAL", "OCTAVE_MAX", "OCTAVE_MIN", "level_range"]

LEVELS_PER_OCTAVE_MAX = 1 << 15
"""Largest S: levels stay below 2^22, so that float32 holds them and their sums exactly, and a product with 1/S tells
the octave."""

OCTAVE_MIN, OCTAVE_MAX = -126, 121
"""Exponents E of decoded second moments, half open: normal float32, and just above the 2^120 of the certificate."""

EXP2_POLYNOMIAL = tuple(
    np.float32(c)
    for c in (
        0.6931512951850891,
        0.24016450345516205,
        0.055799711495637894,
        0.009017315693199635,
        0.0018669938435778022,
    )
)
"""2^t = 1 + t (c0 + c1 t + ... + c4 t^4) on [0, 1): minimax of the relative error, within 1.7e-7 in float32."""

LOG2_POLYNOMIAL = tuple(
    np.float32(c)
    for c in (
        1.442667841911316, -0.7205854654312134, 0.4735534191131592, -0.32590198516845703,
        0.19429431855678558, -0.07955773174762726, 0.015529917553067207,
    )
)  # fmt: skip
"""log2(1 + f) = f (c0 + c1 f + ... + c6 f^6) on [0, 1): minimax, within 4.4e-7 in float32. Only the encoder uses it: an
error moves a decision between two levels, and `certificate.cell.H_MARGIN` allows for it."""


def level_range(levels_per_octave: int) -> tuple[int, int]:
    """Half-open range of the levels that decode to normal float32 values.

    Raises ValueError unless 1 <= S <= 2^15.
    """
    if not 1 <= levels_per_octave <= LEVELS_PER_OCTAVE_MAX:
        raise ValueError(f"levels_per_octave must be in [1, {LEVELS_PER_OCTAVE_MAX}], not {levels_per_octave}")
    return OCTAVE_MIN * levels_per_octave, OCTAVE_MAX * levels_per_octave
