"""Row and column means of log v: the factored second moment, as integers (predictor 1)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from guarddcp.codecs.planes import decode_exact, encode_exact
from guarddcp.codecs.view import Frame, Layout
from guarddcp.errors import FormatError
from guarddcp.kernels import dispatch
from guarddcp.kernels.params import CoderParams
from guarddcp.kernels.reference import rounded_mean

__all__ = ["FrameFit", "RowCol"]

_HEAD = struct.Struct("<II")
_LEVEL_LIMIT = 1 << 23
_ROWS_FOR_COLUMNS = 16
"""Fewer rows than this and a mean per column would cost about what it predicts."""


_RUNS, _RUN_COLUMNS = 4, 32
"""Row means are taken over so many evenly spread runs of so many columns: 128 levels settle a mean to a tenth of their
own spread, which costs less than 0.01 bit."""
_SAMPLED_ROWS = 128
"""Column means are taken over about as many evenly spread rows."""


@dataclass
class FrameFit:
    """What one frame adds to the fit: r int64 (rows,), and per column the remainders' sums and counts."""

    r: np.ndarray
    sums: np.ndarray
    counts: np.ndarray


def _runs(columns: int) -> list[tuple[int, int]]:
    """Column runs that stand for a row."""
    if columns <= _RUNS * _RUN_COLUMNS:
        return [(0, columns)]
    begins = [k * (columns - _RUN_COLUMNS) // (_RUNS - 1) for k in range(_RUNS)]
    return [(begin, begin + _RUN_COLUMNS) for begin in begins]


@dataclass(frozen=True)
class RowCol:
    """pL = r[row] + c[column]. ``r``: int32, one per row of the view, or a single one; ``c``: int32 per column, or empty."""

    id: ClassVar[int] = 1
    version: ClassVar[int] = 1

    r: np.ndarray
    c: np.ndarray

    @staticmethod
    def fit_frame(v: np.ndarray, frame: Frame, layout: Layout, params: CoderParams) -> FrameFit:
        """First half of a fit, per frame and in any order. ``v``: float32 (rows, columns) of the frame."""
        r = dispatch.row_means(v, _runs(v.shape[1]), params)
        stride = max(1, layout.rows // _SAMPLED_ROWS)
        rows = np.arange(-frame.row % stride, frame.rows, stride, dtype=np.int64)
        if layout.rows < _ROWS_FOR_COLUMNS:
            rows = rows[:0]
        return FrameFit(r, *dispatch.column_sums(v, rows, r, params))

    @classmethod
    def combine(cls, layout: Layout, fits: list[FrameFit]) -> RowCol:
        """Second half: the predictor of the whole shard from the fits of its frames, in order."""
        if layout.rows_per_frame == 0:  # rows longer than a frame: one level per row would need all its frames at once
            means = np.array([fit.r[0] for fit in fits], np.int64)
            return cls(np.array([int(np.median(means))], np.int32), np.empty(0, np.int32))
        r = np.concatenate([fit.r for fit in fits])
        if layout.rows < _ROWS_FOR_COLUMNS:
            return cls(r.astype(np.int32), np.empty(0, np.int32))
        sums, counts = sum(fit.sums for fit in fits), sum(fit.counts for fit in fits)
        return cls(r.astype(np.int32), rounded_mean(sums, counts).astype(np.int32))

    def encode(self) -> list[bytes | np.ndarray]:
        raw = np.concatenate([self.r, self.c]).astype("<i4").view(np.uint8)
        return [_HEAD.pack(self.r.size, self.c.size), *encode_exact(raw, 4, rotate=False)]

    @classmethod
    def decode(cls, part: memoryview, layout: Layout, *, where: str) -> RowCol:
        if len(part) < _HEAD.size:
            raise FormatError("row and column means are cut off", where=where, got=len(part))
        rows, columns = _HEAD.unpack_from(part)
        if rows not in (1, layout.rows) or columns not in (0, layout.columns):
            raise FormatError(
                "numbers of row and column means",
                where=where,
                expected=(layout.rows, layout.columns),
                got=(rows, columns),
            )
        raw = decode_exact(part[_HEAD.size :], 4 * (rows + columns), where=where)
        levels = raw.view("<i4").astype(np.int32)
        if levels.size and int(np.abs(levels.astype(np.int64)).max()) >= _LEVEL_LIMIT:
            raise FormatError("a mean level is out of range", where=where, expected=f"|level| < {_LEVEL_LIMIT}")
        return cls(levels[:rows], levels[rows:])

    def terms(self, frame: Frame) -> tuple[np.ndarray, np.ndarray]:
        """r (frame.rows,) and c (frame.columns,), float32 integers."""
        r = self.r[frame.row : frame.row + frame.rows] if self.r.size > 1 else np.repeat(self.r, frame.rows)
        if self.c.size:
            c = self.c[frame.column : frame.column + frame.columns]
        else:
            c = np.zeros(frame.columns, np.int32)
        return r.astype(np.float32), c.astype(np.float32)
