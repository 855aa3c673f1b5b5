"""Row and column means of log v: the factored second moment, as integers (predictor 1).

In a convolution every tap has a row mean of its own: columns run over (input channel, tap), and r is kept per row and
column modulo the number of taps, the *period*. Elsewhere the period is 1.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from guarddcp.codecs.planes import decode_exact, encode_exact
from guarddcp.codecs.view import Frame, Layout
from guarddcp.errors import FormatError
from guarddcp.kernels import dispatch
from guarddcp.kernels.dispatch import RUN_MAX
from guarddcp.kernels.params import CoderParams
from guarddcp.kernels.reference import rounded_mean

__all__ = ["FrameFit", "RowCol"]

_HEAD = struct.Struct("<III")
_LEVEL_LIMIT = 1 << 23
_PERIOD_MAX = 64
_ROWS_FOR_COLUMNS = 16
"""Fewer rows than this and a mean per column would cost about what it predicts."""


_RUNS, _RUN_COLUMNS = 4, 32
"""A row mean is taken over so many evenly spread runs of so many columns (periods, where there are several taps): 128 levels
settle it to a tenth of their own spread, which costs less than 0.01 bit."""
_COLUMNS_FOR_TAPS = 16
"""Fewer input channels than this and a mean per row and tap would cost about what it predicts."""
_SAMPLED_ROWS = 128
"""Column means are taken over about as many evenly spread rows."""


@dataclass
class FrameFit:
    """What one frame adds to the fit: r int64 (rows, period), and per column the remainders' sums and counts."""

    r: np.ndarray
    sums: np.ndarray
    counts: np.ndarray


def _period(layout: Layout) -> int:
    """Number of taps of a convolution viewed as output channels x (input channels, taps); else 1."""
    if layout.view.split != 1 or len(layout.shape) < 3 or layout.rows_per_frame == 0:
        return 1
    taps = math.prod(layout.shape[2:])
    worth = taps <= _PERIOD_MAX and layout.shape[1] >= _COLUMNS_FOR_TAPS
    return taps if worth else 1


def _runs(columns: int, period: int) -> list[tuple[int, int]]:
    """Column runs that stand for a row; they begin and end at multiples of the period."""
    periods = columns // period
    count = min(_RUN_COLUMNS, max(1, RUN_MAX // (_RUNS * period)))
    if periods <= _RUNS * count:
        return [(0, periods * period)]
    begins = [k * (periods - count) // (_RUNS - 1) for k in range(_RUNS)]
    return [(begin * period, (begin + count) * period) for begin in begins]


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
        period = _period(layout)
        r = dispatch.row_means(v, _runs(v.shape[1], period), period, params)
        stride = max(1, layout.rows // _SAMPLED_ROWS)
        rows = np.arange(-frame.row % stride, frame.rows, stride, dtype=np.int64)
        if layout.rows < _ROWS_FOR_COLUMNS:
            rows = rows[:0]
        return FrameFit(r, *dispatch.column_sums(v, rows, r, params))

    @classmethod
    def combine(cls, layout: Layout, fits: list[FrameFit]) -> RowCol:
        """Second half: the predictor of the whole shard from the fits of its frames, in order."""
        if layout.rows_per_frame == 0:  # rows longer than a frame: one level per row would need all its frames at once
            means = np.array([fit.r[0, 0] for fit in fits], np.int64)
            return cls(np.array([[int(np.median(means))]], np.int32), np.empty(0, np.int32))
        r = np.concatenate([fit.r for fit in fits])
        if layout.rows < _ROWS_FOR_COLUMNS:
            return cls(r.astype(np.int32), np.empty(0, np.int32))
        sums, counts = sum(fit.sums for fit in fits), sum(fit.counts for fit in fits)
        return cls(r.astype(np.int32), rounded_mean(sums, counts).astype(np.int32))

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
        if self.r.shape[0] > 1:
            r = self.r[frame.row : frame.row + frame.rows]
        else:
            r = np.repeat(self.r, frame.rows, axis=0)
        if self.c.size:
            c = self.c[frame.column : frame.column + frame.columns]
        else:
            c = np.zeros(frame.columns, np.int32)
        return r.astype(np.float32), c.astype(np.float32)
