"""Row and column means: what they predict, and that nothing but a fitting part is read."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from moments import blocks_of, certificate, fitted

from guarddcp.codecs import ratio
from guarddcp.codecs.planes import encode_exact
from guarddcp.codecs.predictors import KNOWN, RowCol
from guarddcp.codecs.view import Layout, View, default_view
from guarddcp.errors import FormatError, IntegrityError
from guarddcp.kernels import reference

CERT = certificate()  # 64 levels per octave
PARAMS = ratio.params_of(CERT)
LEVELS = st.integers(1 - 2**23, 2**23 - 1)


def part_of(predictor):
    return memoryview(b"".join(map(bytes, predictor.encode())))


def decode(part, layout):
    return RowCol.decode(memoryview(part), layout, where="w side")


def prediction(v, layout):
    """pL of the whole shard, frame by frame, in flat order as (rows, columns)."""
    predictor = decode(part_of(fitted(v, layout, CERT)), layout)
    parts = [reference.predict(*predictor.terms(frame)).reshape(-1) for frame in layout.frames()]
    return np.concatenate(parts).reshape(layout.rows, layout.columns)


def errors(v, layout):
    level = np.concatenate([reference.levels(block, PARAMS).reshape(-1) for block in blocks_of(v, layout)])
    return level.reshape(layout.rows, layout.columns) - prediction(v, layout)


def layout_of(shape, frame_coordinates=1 << 20):
    return Layout(shape, default_view(shape), frame_coordinates)


# -- what they predict -------------------------------------------------------------------------------------------------


def scales(shape, seed=0):
    """log2 v = row + column, and nothing else; float32."""
    rng = np.random.default_rng(seed)
    rows, columns = rng.uniform(-80, 10, (shape[0], 1)), rng.normal(0, 2, (1, int(np.prod(shape[1:]))))
    return 2.0 ** (rows + columns).reshape(shape)


@pytest.mark.parametrize("frame_coordinates", [1 << 20, 1000])
def test_a_product_of_rows_and_columns_is_predicted_to_a_few_levels(frame_coordinates):
    v = scales((400, 50)).astype(np.float32)
    error = errors(v, layout_of(v.shape, frame_coordinates))
    assert np.abs(error).max() <= 12
    assert abs(error.mean()) <= 2


def test_every_tap_of_a_convolution_has_a_mean_of_its_own():
    rng = np.random.default_rng(1)
    v = scales((64, 32, 3, 3)) * 2.0 ** rng.normal(0, 4, (64, 1, 3, 3))
    layout = layout_of(v.shape)
    predictor = fitted(v.astype(np.float32), layout, CERT)
    assert predictor.r.shape == (64, 9)
    assert np.abs(errors(v.astype(np.float32), layout)).max() <= 40


def test_few_rows_get_no_column_means():
    v = scales((15, 200)).astype(np.float32)
    predictor = fitted(v, layout_of(v.shape), CERT)
    assert (predictor.r.shape, predictor.c.shape) == ((15, 1), (0,))


def test_rows_longer_than_a_frame_share_one_level_of_what_is_alive():
    """Most frames are zeros: they must not pull the level to that of v = 1."""
    v = np.zeros(50_000, np.float32)
    v[:9000] = 2.0 ** (np.random.default_rng(0).normal(0, 0.1, 9000) - 40)
    layout = layout_of(v.shape, 1000)
    predictor = fitted(v, layout, CERT)
    assert (predictor.r.shape, predictor.c.shape) == ((1, 1), (0,))
    assert abs(predictor.r[0, 0] + 40 * 64) <= 8


@pytest.mark.parametrize("dead", ["row", "column", "all", "most columns"])
def test_coordinates_that_are_no_moments_do_not_count(dead):
    v = scales((100, 300)).astype(np.float32)
    alive = np.ones(v.shape, bool)
    {
        "row": lambda: alive[::3],
        "column": lambda: alive[:, ::3],
        "all": lambda: alive,
        "most columns": lambda: alive[:, 5:],
    }[dead]()[...] = False
    odd = np.random.default_rng(0).choice([0, -0.0, -1, np.nan, np.inf, 1e-44, 3e38], v.shape).astype(np.float32)
    layout = layout_of(v.shape)
    expected = errors(v, layout)
    spoilt = np.where(alive, v, odd)
    error = errors(spoilt, layout)[alive]
    assert np.abs(error).max(initial=0) <= np.abs(expected).max() + 40


@pytest.mark.parametrize("value", [2.0**-126, 2.0**120, 1.0])
def test_the_ends_of_the_range_are_predicted(value):
    v = np.full((20, 30), value, np.float32)
    assert np.abs(errors(v, layout_of(v.shape))).max() <= 5


def test_the_fit_depends_on_no_order_of_frames():
    v = scales((400, 50)).astype(np.float32)
    layout = layout_of(v.shape, 1000)
    pairs = list(zip(layout.frames(), blocks_of(v, layout), strict=True))
    fits = {frame.number: RowCol.fit_frame(block, frame, layout, PARAMS) for frame, block in pairs[::-1]}
    made = RowCol.combine(layout, [fits[frame.number] for frame, _ in pairs], PARAMS)
    want = fitted(v, layout, CERT)
    np.testing.assert_array_equal(made.r, want.r)
    np.testing.assert_array_equal(made.c, want.c)


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 20), st.integers(1, 40)), elements=st.floats(width=32)),
    st.integers(1, 99),
)
def test_whatever_was_fitted_can_be_read(v, frame_coordinates):
    layout = layout_of(v.shape, frame_coordinates)
    predictor = fitted(v, layout, CERT)
    found = decode(part_of(predictor), layout)
    np.testing.assert_array_equal(found.r, predictor.r)
    np.testing.assert_array_equal(found.c, predictor.c)


# -- bytes -------------------------------------------------------------------------------------------------------------


@given(st.data(), st.integers(1, 12), st.integers(1, 12), st.integers(1, 5))
def test_any_integers_come_back(data, rows, columns, period):
    """Terms of every frame are those of the whole, as exact float32 integers."""
    one = data.draw(st.booleans())
    r = data.draw(hnp.arrays(np.int32, (1, 1) if one else (rows, period), elements=LEVELS))
    c = data.draw(hnp.arrays(np.int32, data.draw(st.sampled_from([0, columns])), elements=LEVELS))
    layout = Layout((rows, columns), View((0, 1), 1), columns * data.draw(st.integers(1, 5)))
    found = decode(part_of(RowCol(r, c)), layout)
    np.testing.assert_array_equal(found.r, r)
    np.testing.assert_array_equal(found.c, c)
    whole_r = np.repeat(r, rows, axis=0) if len(r) == 1 else r
    whole_c = c if c.size else np.zeros(columns)
    for frame in layout.frames():
        own_r, own_c = found.terms(frame)
        assert own_r.dtype == own_c.dtype == np.float32
        assert own_r.flags.c_contiguous
        np.testing.assert_array_equal(own_r, whole_r[frame.row : frame.row + frame.rows])
        np.testing.assert_array_equal(own_c, whole_c)


def side(rows, period, columns, levels, item_bytes=4):
    raw = np.array(levels, "<i4").view(np.uint8)
    return struct.pack("<III", rows, period, columns) + b"".join(
        map(bytes, encode_exact(raw, item_bytes, rotate=False))
    )


@pytest.mark.parametrize(("part", "message"), [
    (b"", "row and column means are cut off; got 0"),
    (b"\1\0\0\0\1\0\0\0\0\0\0", "row and column means are cut off; got 11"),
    (side(2, 1, 0, [1, 2]), "numbers of row and column means; expected 3 or 1 rows, 4 or 0 columns.*got .2, 0, 1"),
    (side(0, 1, 4, [1] * 4), "numbers of row and column means"),
    (side(3, 1, 5, [1] * 8), "numbers of row and column means"),
    (side(3, 0, 4, [1] * 4), "numbers of row and column means"),
    (side(3, 65, 0, [1] * 195), "numbers of row and column means; expected .*period up to 64"),
    (side(2**32 - 1, 1, 0, [1]), "numbers of row and column means"),
    (side(1, 2, 0, [1] * 2), "one row mean for all rows has period 1; got 2"),
    (side(3, 1, 4, [1] * 6), "exact frame of another length; expected 28; got 24"),
    (side(3, 1, 0, [1] * 3)[:-1], "planes do not fill their frame"),
    (side(3, 1, 0, [1, 2**23, 1]), r"a mean level is out of range; expected .level. < 8388608"),
    (side(3, 1, 0, [1, -(2**31), 1]), "a mean level is out of range"),
])  # fmt: skip
def test_parts_that_do_not_fit(part, message):
    layout = Layout((3, 4), View((0, 1), 1), 100)
    with pytest.raises(FormatError, match=f"^w side: {message}"):
        decode(part, layout)


GOOD = side(3, 1, 4, range(7))


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4), st.integers(0, len(GOOD)))
def test_fuzzed_parts(edits, cut):
    data = bytearray(GOOD)
    for at, value in edits:
        data[at] = value
    layout = Layout((3, 4), View((0, 1), 1), 100)
    for candidate in (bytes(data), bytes(data[:cut])):
        try:
            found = decode(candidate, layout)
        except (FormatError, IntegrityError):
            continue
        assert [*found.r.reshape(-1), *found.c] == list(range(7))


def test_the_registry_names_it():
    assert list(KNOWN.items()) == [((1, 1), RowCol)]
