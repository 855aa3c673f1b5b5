"""Views, frames and boxes against brute force on index arrays."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guarddcp.codecs.view import Layout, View, boxes_of_run, default_view, intersect


@st.composite
def layouts(draw, max_axes=4, max_size=6):
    sizes = tuple(draw(st.lists(st.integers(0, max_size) | st.integers(1, 3), max_size=max_axes)))
    axes = tuple(draw(st.permutations(range(len(sizes)))))
    return Layout(sizes, View(axes, draw(st.integers(0, len(sizes)))), draw(st.integers(1, 40)))


@st.composite
def boxes(draw, sizes):
    edges = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in sizes]
    return tuple((begin, end) for begin, end in edges)


def flat_indexes(layout):
    """Per flat coordinate of the layout: its number in the chunk's own row-major order."""
    return np.arange(layout.coordinates).reshape(layout.sizes).transpose(layout.view.axes).reshape(-1)


# -- frames ------------------------------------------------------------------------------------------------------------


@given(layouts())
def test_frames_tile_the_shard(layout):
    frames = list(layout.frames())
    assert [frame.number for frame in frames] == list(range(layout.num_frames))
    assert [frame.begin for frame in frames] == [0, *(frame.end for frame in frames)][: len(frames)]
    assert (frames[-1].end if frames else 0) == layout.coordinates == layout.rows * layout.columns
    for frame in frames:
        assert 1 <= frame.rows * frame.columns == frame.end - frame.begin <= layout.frame_coordinates
        assert frame.begin == frame.row * layout.columns + frame.column
        assert frame.columns == layout.columns or frame.rows == 1
        assert frame.row + frame.rows <= layout.rows
        assert frame.column + frame.columns <= layout.columns
        assert {layout.frame_of(flat) for flat in (frame.begin, frame.end - 1)} == {frame.number}


@given(layouts())
def test_frames_are_as_long_as_the_format_says(layout):
    """FORMAT.md 2: N // columns whole rows, or runs of N inside a row; only the last one shorter."""
    if layout.coordinates == 0:
        assert layout.num_frames == 0
        return
    n, lengths = layout.frame_coordinates, [frame.end - frame.begin for frame in layout.frames()]
    if layout.columns <= n:
        whole = n // layout.columns * layout.columns
        want = [min(whole, layout.coordinates - at) for at in range(0, layout.coordinates, whole)]
    else:
        want = [min(n, layout.columns - at) for at in range(0, layout.columns, n)] * layout.rows
    assert lengths == want


@pytest.mark.parametrize(("sizes", "view", "rows", "columns", "frames"), [
    ((), View((), 0), 1, 1, 1),
    ((5,), View((0,), 0), 1, 5, 1), ((5,), View((0,), 1), 5, 1, 1),
    ((0,), View((0,), 0), 1, 0, 0), ((0, 3), View((0, 1), 1), 0, 3, 0), ((3, 0), View((0, 1), 1), 3, 0, 0),
    ((2, 3, 4), View((2, 0, 1), 1), 4, 6, 4), ((2, 3, 4), View((2, 0, 1), 2), 8, 3, 3),
    ((2, 25), View((0, 1), 1), 2, 25, 6),
])  # fmt: skip
def test_layouts_by_hand(sizes, view, rows, columns, frames):
    layout = Layout(sizes, view, 10)
    assert (layout.rows, layout.columns, layout.num_frames) == (rows, columns, frames)


def test_a_large_layout_needs_no_large_lists():
    layout = Layout((1 << 20, 1 << 21), View((0, 1), 1), 1 << 20)
    assert layout.num_frames == 1 << 21
    frame = layout.frame(layout.num_frames - 1)
    assert (frame.end, frame.row, frame.column, frame.columns) == (1 << 41, (1 << 20) - 1, 1 << 20, 1 << 20)
    assert layout.frame_of((1 << 41) - 1) == frame.number


# -- boxes -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_run_is_cut_into_few_contiguous_boxes(shape, data):
    flat = np.arange(math.prod(shape)).reshape(shape)
    begin, end = sorted(data.draw(st.tuples(st.integers(0, flat.size), st.integers(0, flat.size))))
    found = boxes_of_run(shape, begin, end)
    pieces = [flat[tuple(slice(*edges) for edges in box)].reshape(-1) for _, box in found]
    np.testing.assert_array_equal(np.concatenate([np.empty(0, int), *pieces]), np.arange(begin, end))
    assert [at for at, _ in found] == [piece[0] for piece in pieces]
    assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), ()])
def test_empty_runs(shape):
    assert boxes_of_run(shape, 0, 0) == []
    assert boxes_of_run((), 0, 1) == [(0, ())]


@given(layouts())
def test_pieces_of_a_frame_are_its_coordinates(layout):
    permuted = np.arange(layout.coordinates).reshape(layout.shape)
    for frame in layout.frames():
        at = 0
        for offset, box in layout.pieces(frame.number):
            values = permuted[tuple(slice(*edges) for edges in box)].reshape(-1)
            assert offset == at
            np.testing.assert_array_equal(values, np.arange(frame.begin + at, frame.begin + at + values.size))
            at += values.size
        assert at == frame.end - frame.begin


@given(layouts(), st.data())
def test_frames_of_a_box_are_those_that_hold_any_of_it(layout, data):
    box = data.draw(boxes(layout.sizes))
    inside = np.zeros(layout.sizes, bool)
    inside[tuple(slice(*edges) for edges in box)] = True
    flat = inside.transpose(layout.view.axes).reshape(-1)
    want = [frame.number for frame in layout.frames() if flat[frame.begin : frame.end].any()]
    assert layout.frames_of_box(box) == want


@given(layouts(), st.data())
def test_a_box_is_put_together_from_its_frames(layout, data):
    """What a reader does: frames decoded in flat order, the common part of their pieces and a box copied out."""
    source = np.random.default_rng(0).normal(size=layout.sizes)
    flat = source.reshape(-1)[flat_indexes(layout)]
    box = data.draw(boxes(layout.sizes))
    target = np.full(layout.sizes, np.nan)
    turned = target.transpose(layout.view.axes)
    permuted = tuple(box[axis] for axis in layout.view.axes)
    for number in layout.frames_of_box(box):
        frame = layout.frame(number)
        for offset, piece in layout.pieces(number):
            shape = [end - begin for begin, end in piece]
            values = flat[frame.begin + offset :][: math.prod(shape)].reshape(shape)
            common = intersect(piece, permuted)
            if common is not None:
                inner = tuple(slice(b - p, e - p) for (b, e), (p, _) in zip(common, piece, strict=True))
                turned[tuple(slice(*edges) for edges in common)] = values[inner]
    cut = tuple(slice(*edges) for edges in box)
    np.testing.assert_array_equal(target[cut], source[cut])
    assert np.count_nonzero(~np.isnan(target)) == source[cut].size


@given(st.data())
def test_intersection_is_that_of_index_sets(data):
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=3))
    a, b = data.draw(boxes(sizes)), data.draw(boxes(sizes))
    masks = np.zeros((2, *sizes), bool)
    for number, box in enumerate((a, b)):
        masks[number, *(slice(*edges) for edges in box)] = True
    common = intersect(a, b)
    both = np.zeros(sizes, bool)
    if common is not None:
        both[tuple(slice(*edges) for edges in common)] = True
        assert both.any()
    np.testing.assert_array_equal(both, masks[0] & masks[1])


@pytest.mark.parametrize(("sizes", "view"), [
    ((), View((), 0)), ((100,), View((0,), 0)), ((100, 15), View((0, 1), 0)), ((100, 16), View((0, 1), 1)),
    ((64, 3, 3, 3), View((0, 1, 2, 3), 1)), ((64, 1, 3, 3), View((0, 1, 2, 3), 0)), ((4, 0), View((0, 1), 0)),
])  # fmt: skip
def test_the_default_view_has_rows_where_columns_are_not_few(sizes, view):
    assert default_view(sizes) == view
