"""The cell of codec ``ratio``: what one code pair stands for, and the choice of the cheapest one (NOTES 11, 12)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from guarddcp.certificate.bound import NODES, bound, kap_for, kap_of, octaves_of, w_for
from guarddcp.numerics.floats import U, f32_down

__all__ = ["H_MARGIN", "MAX_LEVELS", "W_MARGIN_U", "Cell", "cell_bits", "choose_cell"]

Array = NDArray[np.float64]

H_MARGIN = 2e-6
"""Octaves of v. Float32 log2, exp2 and their scaling stay within 1.2e-6 of the true half width (11.1); the writer's
self-check takes the rest."""

W_MARGIN_U = 12.0
"""Units of U * Q'. Float32 codec arithmetic of q takes 7 of them; the writer's self-check the rest (11.2)."""

MAX_LEVELS = 32768
"""Most levels per octave; 1/(2 S) is then close to H_MARGIN and more would gain nothing."""

COARSE_NODES, COARSE_POINTS, FINE_POINTS = 32, 24, 96
"""Nodes and hull points of the two scans. They only rank candidates; the winner is fitted with all of them."""


@dataclass(frozen=True)
class Cell:
    """All (m, v) with |log2(v/v^)| <= h and |q - q^| <= w, where |q^| <= Q and q = m / sqrt(v).

    ``levels_per_octave``: S, 1..MAX_LEVELS; levels of v are 2^(L/S). ``delta``: step of q, an exact float32.
    ``q_max``: Q, an exact float32; a coordinate whose |q^| is larger escapes.
    """

    levels_per_octave: int
    delta: float
    q_max: float

    @property
    def h(self) -> float:
        """Half width in octaves of v, codec margin included (11.1)."""
        return 0.5 / self.levels_per_octave + H_MARGIN

    @property
    def w(self) -> float:
        """Half width of q, codec margin included (11.2)."""
        return 0.5 * self.delta + W_MARGIN_U * U * (self.q_max + 0.5 * self.delta)

    @property
    def kap(self) -> float:
        """tanh(h ln2 / 4), the form in which the bound needs h."""
        return float(kap_of(self.h))

    @property
    def q_prime(self) -> float:
        """Q + w: no |q| of a state in the cell is larger."""
        return self.q_max + self.w


def cell_bits(cell: Cell) -> float:
    """-log2 w + log2 S: bits per coordinate up to a constant of the data; compares cells of different Q."""
    return math.log2(cell.levels_per_octave) - math.log2(cell.w)


def _delta_for(w: float, q_max: float) -> float:
    """The largest float32 step whose recorded w is at most ``w``; 0 or less if the margin alone is more."""
    room = 2.0 * (w - W_MARGIN_U * U * q_max) / (1.0 + W_MARGIN_U * U)
    return f32_down(room) if room > 0.0 else 0.0


def choose_cell(tau: float, q_max: float, a: Array, b: Array) -> Cell | None:
    """(12.1): the cell of least ``cell_bits`` whose bound at all hull points (a, b) is at most ``tau``.

    ``q_max``: exact float32, > 0. w is kept <= Q: a wider one would only code q as 0. None if no cell proves tau.
    """
    # Few points and nodes suffice to rank candidates; the winner is fitted to all points with NODES.
    some_a, some_b = _thinned(a, b, COARSE_POINTS)
    kap = kap_for(tau, 0.0, q_max, some_a, some_b, COARSE_NODES) if tau > 0.0 else 0.0
    h = float(octaves_of(kap)) if kap > 0.0 else 0.0
    if h <= H_MARGIN or 0.5 / (h - H_MARGIN) > MAX_LEVELS:
        return None
    fewest = max(1, math.ceil(0.5 / (h - H_MARGIN)))
    # w is about 0 at ``fewest`` levels and half of its largest at twice as many: none above 4 times wins (12.2).
    levels = np.unique(np.rint(np.geomspace(fewest, min(MAX_LEVELS, 4 * fewest + 1), 24)).astype(np.int64))
    best = int(np.argmin(_costs(tau, levels, q_max, some_a, some_b)))
    around = np.arange(levels[max(best - 1, 0)], levels[min(best + 1, len(levels) - 1)] + 1)
    around = around[:: max(1, len(around) // 16)]
    costs = _costs(tau, around, q_max, *_thinned(a, b, FINE_POINTS))
    return _fit(tau, int(around[int(np.argmin(costs))]), q_max, a, b) if math.isfinite(costs.min()) else None


def _thinned(a: Array, b: Array, points: int) -> tuple[Array, Array]:
    kept = np.unique(np.linspace(0, len(a) - 1, points).astype(np.int64))
    return a[kept], b[kept]


def _widths(tau: float, levels: NDArray[np.int64], q_max: float, a: Array, b: Array, nodes: int) -> Array:
    return np.minimum(w_for(tau, kap_of(0.5 / levels + H_MARGIN), q_max, a, b, nodes), q_max)


def _costs(tau: float, levels: NDArray[np.int64], q_max: float, a: Array, b: Array) -> Array:
    usable = _widths(tau, levels, q_max, a, b, COARSE_NODES) - W_MARGIN_U * U * q_max
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(usable > 0.0, np.log2(levels) - np.log2(usable), np.inf)


def _fit(tau: float, levels: int, q_max: float, a: Array, b: Array) -> Cell | None:
    """The widest cell of so many levels; proves itself through ``bound`` on the rounded constants."""
    w = float(_widths(tau, np.array([levels]), q_max, a, b, NODES)[0])
    cell = Cell(levels, _delta_for(w, q_max), q_max)
    for _ in range(8):
        if cell.delta <= 0.0:
            return None
        if float(bound(cell.w, cell.kap, q_max, a, b).max()) <= tau:
            return cell
        cell = Cell(levels, float(np.nextafter(np.float32(cell.delta), np.float32(0.0))), q_max)
    return None
