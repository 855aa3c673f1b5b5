"""The 2-D view of a shard, its frames, and where boxes of the shard meet frames (FORMAT.md 2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Box", "Frame", "Layout", "View", "boxes_of_run", "default_view", "intersect"]

Box = tuple[tuple[int, int], ...]
"""Half-open range per axis."""

_NARROW = 16
"""Fewer columns than this and a chunk is viewed as one row: a mean per row would cost more than it predicts."""


@dataclass(frozen=True)
class View:
    """``axes``: the chunk's axes in flat order; the first ``split`` of them are rows, the others columns."""

    axes: tuple[int, ...]
    split: int

    def permute(self, sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(sizes[axis] for axis in self.axes)


@dataclass(frozen=True)
class Frame:
    """A run of coordinates [begin, end) in flat order: rows [row, row + rows), columns [column, column + columns)."""

    number: int
    begin: int
    end: int
    row: int
    rows: int
    column: int
    columns: int


def default_view(sizes: Sequence[int]) -> View:
    """First axis against the others; one row where that leaves fewer than 16 columns."""
    axes = tuple(range(len(sizes)))
    return View(axes, 1 if len(sizes) > 1 and math.prod(sizes[1:]) >= _NARROW else 0)


@dataclass(frozen=True)
class Layout:
    """How a shard of ``sizes`` falls into frames of at most ``frame_coordinates``."""

    sizes: tuple[int, ...]
    view: View
    frame_coordinates: int

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The chunk's sizes in flat order."""
        return self.view.permute(self.sizes)

    @cached_property
    def rows(self) -> int:
        return math.prod(self.shape[: self.view.split])

    @cached_property
    def columns(self) -> int:
        return math.prod(self.shape[self.view.split :])

    @cached_property
    def coordinates(self) -> int:
        return math.prod(self.sizes)

    @cached_property
    def rows_per_frame(self) -> int:
        """Whole rows in a frame, or 0 where a row is longer than a frame."""
        return self.frame_coordinates // self.columns if self.columns else 0

    @cached_property
    def num_frames(self) -> int:
        if not self.coordinates:
            return 0
        if self.rows_per_frame:
            return -(-self.rows // self.rows_per_frame)
        return self.rows * -(-self.columns // self.frame_coordinates)

    def frame(self, number: int) -> Frame:
        if self.rows_per_frame:
            row = number * self.rows_per_frame
            rows = min(self.rows_per_frame, self.rows - row)
            return Frame(number, row * self.columns, (row + rows) * self.columns, row, rows, 0, self.columns)
        pieces = -(-self.columns // self.frame_coordinates)
        row, piece = divmod(number, pieces)
        column = piece * self.frame_coordinates
        columns = min(self.frame_coordinates, self.columns - column)
        begin = row * self.columns + column
        return Frame(number, begin, begin + columns, row, 1, column, columns)

    def frames(self) -> Iterator[Frame]:
        return (self.frame(number) for number in range(self.num_frames))

    def frame_of(self, flat: int) -> int:
        """Number of the frame that holds flat coordinate ``flat``."""
        if self.rows_per_frame:
            return flat // (self.rows_per_frame * self.columns)
        pieces = -(-self.columns // self.frame_coordinates)
        row, column = divmod(flat, self.columns)
        return row * pieces + column // self.frame_coordinates

    def frames_of_box(self, box: Box) -> list[int]:
        """Numbers of the frames that hold any coordinate of ``box`` (a box of the chunk, axes in its own order)."""
        permuted = tuple(box[axis] for axis in self.view.axes)
        if not self.coordinates or any(begin >= end for begin, end in permuted):
            return []
        first = _flat([begin for begin, _ in permuted], self.shape)
        last = _flat([end - 1 for _, end in permuted], self.shape)
        return [
            number
            for number in range(self.frame_of(first), self.frame_of(last) + 1)
            if any(intersect(piece, permuted) is not None for _, piece in self.pieces(number))
        ]

    def pieces(self, number: int) -> list[tuple[int, Box]]:
        """The frame as boxes of the permuted shape: (offset in the frame, box), in flat order."""
        frame = self.frame(number)
        return [(begin - frame.begin, box) for begin, box in boxes_of_run(self.shape, frame.begin, frame.end)]


def boxes_of_run(shape: Sequence[int], begin: int, end: int) -> list[tuple[int, Box]]:
    """Cut a run [begin, end) of a row-major array into boxes, each contiguous in flat order: at most 2 ndim - 1.

    >>> boxes_of_run((4, 3), 2, 9)
    [(2, ((0, 1), (2, 3))), (3, ((1, 3), (0, 3)))]
    """
    if not shape:
        return [(begin, ())] if begin < end else []
    if begin >= end:
        return []
    inner = math.prod(shape[1:])
    first, last = begin // inner, (end - 1) // inner
    if first == last and end - begin < inner:
        parts = boxes_of_run(shape[1:], begin - first * inner, end - first * inner)
        return [(first * inner + at, ((first, first + 1), *box)) for at, box in parts]
    whole_begin, whole_end = -(-begin // inner), end // inner
    boxes = boxes_of_run(shape, begin, whole_begin * inner) if begin < whole_begin * inner else []
    if whole_begin < whole_end:
        boxes.append((whole_begin * inner, ((whole_begin, whole_end), *((0, n) for n in shape[1:]))))
    return boxes + (boxes_of_run(shape, whole_end * inner, end) if whole_end * inner < end else [])


def intersect(a: Box, b: Box) -> Box | None:
    """Common part of two boxes, None where empty. The box of a 0-d array is ()."""
    common = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return None if any(begin >= end for begin, end in common) else common


def _flat(index: Sequence[int], shape: Sequence[int]) -> int:
    flat = 0
    for i, n in zip(index, shape, strict=True):
        flat = flat * n + i
    return flat
