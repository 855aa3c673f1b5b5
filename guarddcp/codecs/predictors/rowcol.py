"""Row and column means of log v: the factored second moment, as integers (predictor 1).

In a convolution every tap has a row mean of its own: columns run over (input channel, tap), and r is kept per row and
column modulo the number of taps, the *period*. Elsewhere the period is 1.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from guarddcp.codecs.planes import decode_exact, encode_exact
from guarddcp.codecs.view import Frame, Layout
from guarddcp.errors import FormatError
from guarddcp.kernels import dispatch
from guarddcp.kernels.params import CoderParams

__all__ = ["FrameFit", "RowCol"]

_HEAD = struct.Struct("<III")
_LEVEL_LIMIT = 1 << 23
_PERIOD_MAX = 64
_ROWS_FOR_COLUMNS = 16
"""Fewer rows than this and a mean per column would cost about what it predicts."""


_COLUMNS_FOR_TAPS = 16
"""Fewer input channels than this and a mean per row and tap would cost about what it predicts."""
_SAMPLED_ROWS = 256
"""Column means are taken over about as many evenly spread rows."""


@dataclass
class FrameFit:
    """What one frame adds to the fit: mean bits of v int64 (rows, period), whether there were any, and per column the
    remainders' sums and counts."""

    means: np.ndarray
    known: np.ndarray
    sums: np.ndarray
    counts: np.ndarray


def _period(layout: Layout) -> int:
    """Number of taps of a convolution viewed as output channels x (input channels, taps); else 1."""
    if layout.view.split != 1 or len(layout.shape) < 3 or layout.rows_per_frame == 0:
        return 1
    taps = math.prod(layout.shape[2:])
    worth = taps <= _PERIOD_MAX and layout.shape[1] >= _COLUMNS_FOR_TAPS
    return taps if worth else 1


def _mean_bits(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Floor of the mean, 0 where nothing was counted; int64."""
    return np.where(counts > 0, sums // np.maximum(counts, 1), 0)


def _levels_of_bits(bits: np.ndarray, params: CoderParams) -> np.ndarray:
    """float32 bits (or a difference of bits) in levels, rounded; int32."""
    levels_per_octave = int(params.levels_per_octave)
    return ((bits * levels_per_octave + (1 << 22)) >> 23).astype(np.int32)


@dataclass(frozen=True)
class RowCol:
    """pL = r[row, column mod period] + c[column].

    ``r``: int32 (rows, period), or (1, 1) for all; ``c``: int32 per column, or empty.
    """

    id: ClassVar[int] = 1
    version: ClassVar[int] = 1

    r: np.ndarray
    c: np.ndarray

    @staticmethod
    def fit_frame(v: np.ndarray, frame: Frame, layout: Layout, params: CoderParams) -> FrameFit:
        """First half of a fit, per frame and in any order. ``v``: float32 (rows, columns) of the frame."""
        sums, counts = dispatch.row_sums(v, _period(layout), params)
        means = _mean_bits(sums, counts)
        rows = np.flatnonzero(counts.any(axis=1))  # rows that were never touched say nothing about columns
        wanted = max(1, _SAMPLED_ROWS * frame.rows // layout.rows) if layout.rows >= _ROWS_FOR_COLUMNS else 0
        rows = np.ascontiguousarray(rows[:: max(1, rows.size // wanted)] if wanted else rows[:0])
        if layout.rows_per_frame == 0 or not wanted:
            empty = np.empty(0, np.int64)
            return FrameFit(means, counts > 0, empty, empty)
        return FrameFit(means, counts > 0, *dispatch.column_sums(v, rows, means, params))

    @classmethod
    def combine(cls, layout: Layout, fits: Iterable[FrameFit], params: CoderParams) -> RowCol:
        """Second half: the predictor of the whole shard from the fits of its frames, in order."""
        means, knowns = [], []
        sums, counts = np.zeros((2, layout.columns if layout.rows_per_frame else 0), np.int64)
        for fit in fits:  # one at a time: a column takes 16 bytes in each
            means.append(fit.means)
            knowns.append(fit.known)
            if fit.sums.size:
                sums += fit.sums
                counts += fit.counts
        bits, known = np.concatenate(means), np.concatenate(knowns)
        # The bits' straight line between powers of two lies below log2 by 0.0573 on average.
        shift = int(params.levels_per_octave) * 3755 >> 16
        levels = _levels_of_bits(bits - (127 << 23), params) + np.int32(shift)
        r = np.where(known, levels, 0).astype(np.int32)
        if layout.rows_per_frame == 0:  # rows longer than a frame: one level for all
            middle = np.median(r[known]) if known.any() else 0
            return cls(np.array([[int(middle)]], np.int32), np.empty(0, np.int32))
        if layout.rows < _ROWS_FOR_COLUMNS:
            return cls(r, np.empty(0, np.int32))
        return cls(r, _levels_of_bits(_mean_bits(sums, counts), params))

    def encode(self) -> list[bytes | np.ndarray]:
        raw = np.concatenate([self.r.reshape(-1), self.c]).astype("<i4").view(np.uint8)
        head = _HEAD.pack(self.r.shape[0], self.r.shape[1], self.c.size)
        return [head, *encode_exact(raw, 4, rotate=False)]

    @classmethod
    def decode(cls, part: memoryview, layout: Layout, *, where: str) -> RowCol:
        if len(part) < _HEAD.size:
            raise FormatError("row and column means are cut off", where=where, got=len(part))
        rows, period, columns = _HEAD.unpack_from(part)
        if rows not in (1, layout.rows) or columns not in (0, layout.columns) or not 1 <= period <= _PERIOD_MAX:
            raise FormatError(
                "numbers of row and column means",
                where=where,
                expected=f"{layout.rows} or 1 rows, {layout.columns} or 0 columns, period up to {_PERIOD_MAX}",
                got=(rows, columns, period),
            )
        if rows != layout.rows and period != 1:
            raise FormatError("one row mean for all rows has period 1", where=where, got=period)
        raw = decode_exact(part[_HEAD.size :], 4 * (rows * period + columns), where=where)
        levels = raw.view("<i4").astype(np.int32)
        if levels.size and int(np.abs(levels.astype(np.int64)).max()) >= _LEVEL_LIMIT:
            raise FormatError("a mean level is out of range", where=where, expected=f"|level| < {_LEVEL_LIMIT}")
        return cls(levels[: rows * period].reshape(rows, period), levels[rows * period :])

    def terms(self, frame: Frame) -> tuple[np.ndarray, np.ndarray]:
        """r (frame.rows, period) and c (frame.columns,), float32 integers; C-contiguous."""
        rows, columns = slice(frame.row, frame.row + frame.rows), slice(frame.column, frame.column + frame.columns)
        r = self.r[rows] if self.r.shape[0] > 1 else np.repeat(self.r, frame.rows, axis=0)
        c = self.c[columns] if self.c.size else np.zeros(frame.columns, np.int32)
        return r.astype(np.float32), c.astype(np.float32)
