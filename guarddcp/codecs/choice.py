"""Which Q, and so which cell, a shard gets: bits of the cell against bits of the coordinates that escape."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from guarddcp.certificate import Adam, Certificate, Uncertifiable, cell_bits, certify, q_limit
from guarddcp.codecs.view import Frame, Layout
from guarddcp.config import Guard

__all__ = ["choose_certificate", "sample_frames", "sample_q"]

_ESCAPE_BITS = 64.0
"""What an escaped coordinate is taken to cost."""

_SAMPLE_FRAMES, _SAMPLE_PER_FRAME = 8, 1 << 12
_STEPS_PER_OCTAVE = 4
"""Candidates for Q lie on 2^(i/4), so that shards of one save share few cells (a cell takes milliseconds to choose)."""

_OUTSIDE = (1.0, 0.999, 0.99)
"""Quantiles of |q| above which a candidate for Q may lie."""


def sample_frames(layout: Layout) -> Iterator[Frame]:
    """At most eight frames, evenly spread: the same shard is always sampled at the same places."""
    count = layout.num_frames
    return (
        layout.frame(number) for number in sorted({i * count // _SAMPLE_FRAMES for i in range(_SAMPLE_FRAMES)}) if count
    )


def sample_q(m: np.ndarray, v: np.ndarray) -> np.ndarray:
    """|m| / sqrt(v) of evenly spread coordinates of one frame, those with normal v and finite m; float32."""
    stride = max(1, m.size // _SAMPLE_PER_FRAME) | 1
    m, v = m.reshape(-1)[::stride], v.reshape(-1)[::stride]
    usable = (v >= np.float32(2.0**-126)) & np.isfinite(v) & np.isfinite(m)
    with np.errstate(over="ignore"):
        return np.abs(m[usable]) / np.sqrt(v[usable])


def choose_certificate(q: np.ndarray, rule: Adam, step: int, guard: Guard) -> Certificate:
    """The certificate whose cell, with the escapes that the sample ``q`` predicts, costs least.

    Raises `guarddcp.certificate.Uncertifiable` if the guard can be kept with no candidate for Q at all.
    """
    limit = q_limit(rule)
    best: tuple[float, Certificate] | None = None
    refused: Uncertifiable | None = None
    for q_max in _candidates(q, limit):
        try:
            certificate = certify(
                rule,
                step,
                tolerance=guard.tolerance,
                horizon=guard.horizon,
                rounding_share=guard.rounding_share,
                q_max=q_max,
            )
        except Uncertifiable as error:
            refused = error  # a smaller Q leaves less to rounding, so it may still do
            continue
        outside = float(np.count_nonzero(q > certificate.cell.q_max)) / max(q.size, 1)
        bits = cell_bits(certificate.cell) + _ESCAPE_BITS * outside
        if best is None or bits < best[0]:
            best = bits, certificate
    if best is None:
        assert refused is not None
        raise refused
    return best[1]


def _candidates(q: np.ndarray, limit: float) -> list[float]:
    """Points of the grid that cover the sample's upper quantiles, capped by the largest |q| Adam can reach."""
    if not q.size:
        return [min(1.0, limit)]
    places = [int((q.size - 1) * quantile) for quantile in _OUTSIDE]
    ordered = np.partition(q, places)
    return sorted({_grid(float(ordered[place]) * 1.05, limit) for place in places}, reverse=True)


def _grid(q: float, limit: float) -> float:
    # A finite m over a small v can overflow to an infinite q.
    exponent = math.ceil(math.log2(min(max(q, 2.0**-6), limit)) * _STEPS_PER_OCTAVE) / _STEPS_PER_OCTAVE
    return min(2.0**exponent, limit)
