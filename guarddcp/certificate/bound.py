"""The proved supremum of a cell over all gradients, and its three inverses (NOTES 4, 5).

Legend: w >= |q - q^|; kap = tanh(h ln2 / 4) where |log2(v/v^)| <= h; q_max >= |q^|; (a, b) the step constants,
arrays of shape (P,); mu on nodes + 1 points of [0, pi/2]. Everything is float64 and in units of the learning rate.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["NODES", "bound", "kap_for", "kap_of", "octaves_of", "q_for", "w_for"]

Array = NDArray[np.float64]

NODES = 128
"""Parts of [0, pi/2]. The slack against the true supremum is 0.013 % at 128, 0.05 % at 64."""

FLOAT64_SLACK = 1.0 + 1e-9
"""Covers float64 rounding of the bound (some 50 operations, 1e-14) and of its inputs."""


class _Grid(NamedTuple):
    cosine: Array  # CO: (nodes + 1,)
    even: Array  # TT = sin^2 cos
    odd: Array  # SS = sin cos^2
    gap: float  # d8: (width of a part)^2 / 8


@lru_cache(maxsize=8)
def _grid(nodes: int) -> _Grid:
    mu = np.linspace(0.0, math.pi / 2.0, nodes + 1)
    sine, cosine = np.sin(mu), np.cos(mu)
    return _Grid(cosine, sine * sine * cosine, sine * cosine * cosine, (math.pi / 2.0 / nodes) ** 2 / 8.0)


def kap_of(h_octaves: ArrayLike) -> Array:
    """kap of a half width of ``h_octaves`` octaves of v (D1)."""
    return np.tanh(np.asarray(h_octaves, dtype=np.float64) * (math.log(2.0) / 4.0))


def octaves_of(kap: ArrayLike) -> Array:
    """Half width in octaves of v of a kap in [0, 1) (D1)."""
    return np.arctanh(np.asarray(kap, dtype=np.float64)) * (4.0 / math.log(2.0))


def _cos_nu(kap: ArrayLike) -> Array:
    """Smallest cos(nu) in a cell (4.3)."""
    return np.sqrt(0.5 * (1.0 + np.sqrt(1.0 - np.square(kap))))


def bound(w: float, kap: float, q_max: float, a: ArrayLike, b: ArrayLike, nodes: int = NODES) -> Array:
    """(5.2): for each (a, b) a proved upper bound of |D| over all states of the cell, all gradients, all eps.

    ``w``, ``q_max`` >= 0, 0 <= ``kap`` < 1; ``a``, ``b`` >= 0 of one shape (P,). Returns shape (P,).
    """
    grid = _grid(nodes)
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    state = w * grid.cosine + kap * (w + 2.0 * q_max) * grid.even
    values = a[..., None] * state + b[..., None] * (2.0 * kap * grid.odd)
    curvature = a * w + kap * (2.5 * a * (w + 2.0 * q_max) + 5.0 * b)
    return (values.max(axis=-1) + grid.gap * curvature) / _cos_nu(kap) * FLOAT64_SLACK


def kap_for(tau: float, w: float, q_max: float, a: Array, b: Array, nodes: int = NODES) -> float:
    """(5.3): the largest kap with max bound <= ``tau``; negative or 0 if w alone spends it."""
    grid = _grid(nodes)
    tau /= FLOAT64_SLACK
    fixed = (a * w)[:, None] * (grid.cosine + grid.gap)
    slope = a[:, None] * ((w + 2.0 * q_max) * (grid.even + 2.5 * grid.gap))
    slope = slope + b[:, None] * (2.0 * grid.odd + 5.0 * grid.gap)
    # Two passes: cos(nu*) depends on kap. It falls as kap rises, so with cos(nu*) of the first, larger kap
    # the second is sound. 0.999 is 22 octaves of v: wider cells are of no use.
    first = min(float(((tau - fixed) / slope).min()), 0.999)
    if first <= 0.0:
        return first
    return min(first, float(((tau * _cos_nu(first) - fixed) / slope).min()))


def w_for(tau: float, kap: ArrayLike, q_max: float, a: Array, b: Array, nodes: int = NODES) -> Array:
    """(5.4): for each kap the largest w with max bound <= ``tau``; shape of ``kap``; infinite if all a are 0."""
    grid = _grid(nodes)
    kap = np.asarray(kap, dtype=np.float64)
    k = kap[..., None, None]
    budget = (tau / FLOAT64_SLACK) * _cos_nu(kap)[..., None, None]
    fixed = a[:, None] * (2.0 * q_max * (grid.even + 2.5 * grid.gap)) + b[:, None] * (2.0 * grid.odd + 5.0 * grid.gap)
    slope = a[:, None] * (grid.cosine + grid.gap + k * (grid.even + 2.5 * grid.gap))
    room = budget - k * fixed
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(slope > 0.0, room / slope, np.where(room >= 0.0, np.inf, -np.inf))
    return ratio.min(axis=(-2, -1))


def q_for(tau: float, w: float, kap: float, a: Array, b: Array, nodes: int = NODES) -> float:
    """(5.5): the largest q_max with max bound <= ``tau``; infinite if all a are 0 or kap is 0."""
    grid = _grid(nodes)
    room = (tau / FLOAT64_SLACK) * float(_cos_nu(kap)) - kap * b[:, None] * (2.0 * grid.odd + 5.0 * grid.gap)
    room = room - (a * w)[:, None] * (grid.cosine + grid.gap + kap * (grid.even + 2.5 * grid.gap))
    slope = kap * a[:, None] * (2.0 * grid.even + 5.0 * grid.gap)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(slope > 0.0, room / slope, np.where(room >= 0.0, np.inf, -np.inf))
    return float(ratio.min())
