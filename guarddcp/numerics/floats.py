"""Float32 facts that proofs rest on: the unit roundoff, directed rounding, exactness."""

from __future__ import annotations

import math

import numpy as np

__all__ = ["F32_MIN_NORMAL", "U", "f32", "f32_down", "f32_up", "is_f32"]

U = 2.0**-24
"""Unit roundoff of float32: round-to-nearest errs by at most U relative (half a unit in the last place)."""

F32_MIN_NORMAL = 2.0**-126
"""Smallest positive normal float32. Below it the exponent field is 0 and relative accuracy is lost."""


def f32(x: float) -> float:
    """The float32 nearest to ``x`` (ties to even), as a Python float; overflows to infinity."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(x))


def f32_down(x: float) -> float:
    """The largest float32 that is <= ``x`` (finite, within float32 range), as a Python float."""
    near = np.float32(x)
    return float(near if float(near) <= x else np.nextafter(near, np.float32(-np.inf)))


def f32_up(x: float) -> float:
    """The smallest float32 that is >= ``x`` (finite, within float32 range), as a Python float."""
    near = np.float32(x)
    return float(near if float(near) >= x else np.nextafter(near, np.float32(np.inf)))


def is_f32(x: float) -> bool:
    """Whether ``x`` is finite and exactly a float32."""
    return math.isfinite(x) and f32(x) == x
