"""numba against the NumPy reference, byte for byte, on edge values and on random blocks."""

from __future__ import annotations

import numpy as np
import pytest
from edge_values import EDGES, bits, edge_pairs, params
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from guarddcp.kernels import dispatch, reference
from guarddcp.kernels.dispatch import Planes
from guarddcp.kernels.params import CENTRE, ESCAPE, RESIDUAL_MAX, ZERO

CELLS = [
    params(1, 2.0, 1.0),  # every q is coded as 0
    params(7, 0.5, 7.27),
    params(97, 0.02, 3.0, v_min=2.0**-126),
    params(1000, 1e-3, 7.27),
    params(7919, 2e-5, 1.0),  # codes beyond two planes
    params(32767, 1e-5, 4.0, v_min=2.0**-126),
]
BACKENDS = ("reference", "numba")


def readonly(*arrays):
    """Contiguous float32 copies that cannot be written."""
    copies = [np.array(array, np.float32, order="C") for array in arrays]
    for array in copies:
        array.flags.writeable = False
    return copies


def on_both(work):
    """What ``work()`` gives under each backend."""
    found = []
    for backend in BACKENDS:
        with pytest.MonkeyPatch.context() as context:
            context.setenv("GUARDDCP_KERNELS", backend)
            found.append(work())
    return found


def assert_same(a, b):
    """Equal values and dtypes; arrays bit for bit."""
    for number, (x, y) in enumerate(zip(a, b, strict=True)):
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype
            if x.dtype == np.float32:
                x, y = bits(x), bits(y)
        np.testing.assert_array_equal(y, x, err_msg=f"result {number}")


def fitted(v, period, cell):
    """Row means of bits, and the two sums that a fit is made of."""
    sums, counts = dispatch.row_sums(v, period, cell)
    means = np.where(counts > 0, sums // np.maximum(counts, 1), 0)
    rows = np.arange(0, len(v), 2, dtype=np.int64)
    return (sums, counts, *dispatch.column_sums(v, rows, means, cell))


def coded(m, v, r, c, cell):
    """Planes, decoded moments, and what the self-check says of two parts of the block."""
    planes = dispatch.encode(m, v, r, c, cell)
    m_hat, v_hat = np.full((2, *m.shape), np.nan, np.float32)
    counts = dispatch.decode(planes, r, c, cell, m_hat, v_hat)
    used = [planes.low_v, planes.low_q] + [planes.high_v] * planes.two_v + [planes.high_q] * planes.two_q
    checked = []
    for part in (slice(0, m.size // 3), slice(m.size // 3, m.size)):
        flat = np.full((2, part.stop - part.start), np.nan, np.float32)
        own = (m.reshape(-1)[part], v.reshape(-1)[part])
        checked += [*flat, *dispatch.decode_and_check(planes, r, c, cell, part, *own, *flat)]
    return planes.two_v, planes.two_q, *used, m_hat, v_hat, *counts, *checked


def assert_parity(m, v, r, c, cell):
    m, v, r, c = readonly(m, v, r, c)
    assert_same(*on_both(lambda: fitted(v, r.shape[1], cell)))
    want, got = on_both(lambda: coded(m, v, r, c, cell))
    assert_same(want, got)
    return want


def centred(v, cell, period=1):
    """A predictor's terms for a block: a level from the middle of each row, and small columns."""
    level = np.where((v >= cell.v_min) & (v <= cell.v_max), reference.levels(v, cell), 0)
    r = np.median(level, axis=1)[:, None] if v.size else np.zeros((len(v), 1))
    return np.rint(r) + np.arange(period) % 2, np.arange(v.shape[1]) % 5 - 2


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"S={cell.levels_per_octave:g}")
@pytest.mark.parametrize("period", [1, 3])
def test_edge_values(cell, period):
    m, v = edge_pairs()
    for block in ((m, v), (m.T, v.T)):
        assert_parity(*block, *centred(block[1], cell, period), cell)
    assert_parity(m.T, v.T, np.zeros((len(m), period)), np.arange(len(m)) - 20, cell)


SHAPES = [(0, 0), (0, 5), (5, 0), (1, 1), (300, 1), (1, 2047), (1, 2048), (1, 2049), (2, 5000), (7, 700), (1, 70_001)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("period", [1, 9])
def test_shapes(shape, period):
    rng = np.random.default_rng(sum(shape))
    v = (2.0 ** rng.uniform(-130, 122, shape)).astype(np.float32)
    v.reshape(-1)[::7] = rng.choice(EDGES, len(v.reshape(-1)[::7]))
    with np.errstate(invalid="ignore"):
        m = rng.uniform(-4, 4, shape) * np.sqrt(np.abs(v))
    for cell in CELLS[2:4]:
        assert_parity(m, v, *centred(v, cell, period), cell)


floats = st.one_of(
    st.sampled_from([float(x) for x in EDGES if np.isfinite(x)]),
    st.floats(width=32),
    st.floats(0, 2.0**120, width=32),
)


@st.composite
def blocks(draw):
    """m, v, r, c: a predictor near the levels, or one of any integers that the format allows."""
    shape = draw(st.tuples(st.integers(0, 6), st.integers(0, 40)))
    v = draw(hnp.arrays(np.float32, shape, elements=floats, fill=st.just(1e-12)))
    q = draw(hnp.arrays(np.float32, shape, elements=st.floats(-8, 8, width=32), fill=st.just(0.25)))
    other = draw(hnp.arrays(np.float32, shape, elements=floats))
    with np.errstate(all="ignore"):
        m = np.where(draw(hnp.arrays(np.bool_, shape)), q * np.sqrt(np.abs(v)), other)
    period, levels = draw(st.integers(1, 4)), st.integers(1 - 2**23, 2**23 - 1).map(float)
    if draw(st.booleans()):
        return m, v, None, None, period
    r, c = (draw(hnp.arrays(np.float32, n, elements=levels)) for n in ((shape[0], period), shape[1:]))
    return m, v, r, c, period


@st.composite
def cells(draw):
    q_max = draw(st.sampled_from([0.01, 1.0, 3.0, 7.27, 64.0, 2.0**20]))
    return params(
        draw(st.integers(1, 32768) | st.sampled_from([1, 2, 50, 32768])),
        q_max * 2.0 ** draw(st.floats(-20, 1)),
        q_max,
        v_min=2.0 ** draw(st.sampled_from([-126, -97, -60])),
    )


@given(blocks(), cells())
def test_random_blocks(block, cell):
    m, v, r, c, period = block
    assert_parity(m, v, *((r, c) if r is not None else centred(v, cell, period)), cell)


@given(
    hnp.arrays(np.uint8, (4, 3, 50)), st.booleans(), st.booleans(), cells(), st.integers(-100, 200), st.integers(1, 3)
)
def test_decoders_agree_on_planes_that_no_encoder_wrote(raw, two_v, two_q, cell, shift, period):
    """Counts always; bytes where all codes are in range (nothing else is ever used)."""
    planes = Planes(*raw, two_v, two_q)
    far = cell.level_max + 200 if shift > 100 else cell.level_min + 130
    r, c = readonly(np.full((3, period), far), np.full(50, shift % 50))

    def decoded():
        m, v = np.empty((2, 3, 50), np.float32)
        bad, escapes = dispatch.decode(planes, r, c, cell, m, v)
        return (bad, escapes) if bad else (bad, escapes, m, v)

    assert_same(*on_both(decoded))


def test_what_is_out_of_range_is_wrong_for_the_self_check_too():
    """Readers count codes out of range; the writer's check must not pass what they refuse."""
    cell = CELLS[2]
    one, c = np.ones((1, 1), np.float32), np.zeros(1, np.float32)

    def counts(low_v, low_q, r, m, v):
        planes = Planes(*(np.full((1, 1), x, np.uint8) for x in (low_v, 0, low_q, 0)))
        moments = np.empty((2, 1), np.float32)
        given = (np.float32([m]), np.float32([v]))
        checked = dispatch.decode_and_check(planes, one * r, c, cell, slice(0, 1), *given, *moments)
        return *dispatch.decode(planes, one * r, c, cell, *moments[:, :, None]), *checked

    assert on_both(lambda: counts(128, 128, 0, 0, 1)) == [(0, 0, 0, 0)] * 2
    assert on_both(lambda: counts(1, 128, 0, 5, -1)) == [(0, 1, 0, 1)] * 2
    assert on_both(lambda: counts(0, 128, 0, 0, 0)) == [(0, 0, 0, 0)] * 2
    for level, v in ((cell.level_max + 1, 2.0**121), (cell.level_min - 1, 2.0**-126)):
        assert on_both(lambda level=level, v=v: counts(128, 128, level, 0, v)) == [(1, 0, 1, 0)] * 2
    # A code beyond Q is refused even where it decodes to the very moment.
    cell = params(97, 0.05, 3.0)
    for m in (9, np.float32(127) * cell.delta):
        assert on_both(lambda m=m: counts(128, 255, 0, m, 1)) == [(1, 0, 1, 0)] * 2
    for v in (-1.0, np.nan, np.inf, 0.0):
        assert on_both(lambda v=v: counts(128, 128, 1e7, 0, v)) == [(1, 0, 1, 0)] * 2


@given(hnp.arrays(np.float32, (2, 64), elements=floats), st.integers(-40, 40), cells())
def test_checks_agree_near_the_edges_of_a_cell(values, nudge, cell):
    """Originals a few units in the last place around the limits of what the planes stand for."""
    raw = np.full((4, 1, 64), 0x80, np.uint8)
    raw[0, 0, ::3], raw[2, 0, ::5] = 0x90, 0x81
    planes = Planes(*raw)
    r, c = readonly(np.zeros((1, 1)), np.zeros(64))
    m, v = np.empty((2, 1, 64), np.float32)
    dispatch.decode(planes, r, c, cell, m, v)
    limit = np.where(np.arange(64) % 2, cell.ratio_max, cell.ratio_min)
    with np.errstate(all="ignore"):
        edge = ((v[0] * limit).view(np.int32) + nudge).view(np.float32)
        edge_m = (m[0] / np.sqrt(v[0]) + cell.deviation_max * np.float32(1 + nudge * 2**-23)) * np.sqrt(edge)
    (m, v), (own_m, own_v) = (m[0], v[0]), values
    own_v[:40], own_m[:20], own_m[20:40] = edge[:40], edge_m[:20], m[20:40]

    def check():
        return [
            dispatch.decode_and_check(
                planes, r, c, cell, slice(i, z), own_m[i:z], own_v[i:z], *np.empty((2, z - i), np.float32)
            )
            for i, z in [(0, 64), *((i, i + 1) for i in range(64))]
        ]

    want, got = on_both(check)
    assert want == got
    assert want[0][0] == sum(wrong for wrong, _ in want[1:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_symbols_mean(backend, monkeypatch):
    """The reference is the definition, so it gets a test of its own, by hand."""
    monkeypatch.setenv("GUARDDCP_KERNELS", backend)
    cell = params(4, 0.5, 3.0, v_min=2.0**-126)
    v = np.array([[1.0, 2.0, 2.0 * 2**0.25, 0.0, -0.0, 1e-40, np.inf, np.nan, 0.0, 1.0, 1.0]], np.float32)
    m = np.array([[0.0, 2**0.5, -3.0, -0.0, 0.0, 0.0, 0.0, 0.0, 1e-45, 3.1, np.nan]], np.float32)
    r, c = np.array([[2.0]], np.float32), np.ones(11, np.float32)
    planes = dispatch.encode(m, v, r, c, cell)
    # levels 0, 4, 5 less the predicted 3; then zero, and escapes: -0, subnormal, Inf, NaN, m without v, |q| > Q, NaN
    escapes = [ESCAPE] * 7
    assert planes.low_v.tolist() == [[(CENTRE + x) & 0xFF for x in (-3, 1, 2)] + [ZERO, *escapes]]
    # -3 / sqrt(2^1.25) = -1.945 -> -4 steps of 0.5
    assert planes.low_q.tolist() == [[0x80, 0x82, 0x7C] + [0x80] * 8]
    assert (planes.two_v, planes.two_q) == (False, False)
    m_hat, v_hat = np.full((2, 1, 11), np.nan, np.float32)
    assert dispatch.decode(planes, r, c, cell, m_hat, v_hat) == (0, 7)
    np.testing.assert_allclose(v_hat[0, :3], np.exp2([0, 1, 1.25]), rtol=2e-7)
    np.testing.assert_array_equal(m_hat[0, :3], np.float32([0, 1, -2]) * np.sqrt(v_hat[0, :3]))
    assert not bits(m_hat[0, 3:]).any()
    assert not bits(v_hat[0, 3:]).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("residual", "two", "codes"), [
    (127, False, True), (128, True, True), (-126, False, True),
    (-127, True, True), (-128, True, True), (-129, True, True),
    (RESIDUAL_MAX, True, True), (RESIDUAL_MAX + 1, False, False),
    (-RESIDUAL_MAX, True, True), (-RESIDUAL_MAX - 1, False, False),
])  # fmt: skip
def test_one_plane_two_planes_escape(backend, residual, two, codes, monkeypatch):
    monkeypatch.setenv("GUARDDCP_KERNELS", backend)
    cell = params(1000, 1e-4, 7.0)
    ones, c = np.ones((1, 8), np.float32), np.zeros(8, np.float32)  # eight: a few may escape to save a plane
    r = np.full((1, 1), -residual, np.float32)
    planes = dispatch.encode(ones * 0, ones, r, c, cell)
    assert planes.two_v == two
    m, v = np.empty((2, 1, 8), np.float32)
    assert dispatch.decode(planes, r, c, cell, m, v) == (0, 0 if codes else 8)
    assert set(v[0].tolist()) == {1.0 if codes else 0.0}
    q_planes = dispatch.encode(ones * residual * cell.delta, ones, r * 0, c, cell)
    assert q_planes.two_q == two
    assert dispatch.decode(q_planes, r * 0, c, cell, m, v) == (0, 0 if codes else 8)
    assert set(m[0].tolist()) == {np.float32(residual) * cell.delta if codes else 0.0}


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_of_a_fit_by_hand(backend, monkeypatch):
    monkeypatch.setenv("GUARDDCP_KERNELS", backend)
    rng = np.random.default_rng(5)
    v = (2.0 ** rng.uniform(-130, 10, (12, 30))).astype(np.float32)
    v[3], v[:, 4], v[5, 6] = 0, np.nan, -1
    cell = CELLS[2]
    sums, counts = dispatch.row_sums(v, 3, cell)
    means, rows = np.arange(36).reshape(12, 3), np.array([0, 3, 7], np.int64)
    column_sums, column_counts = dispatch.column_sums(v, rows, means, cell)
    valid = (v >= cell.v_min) & (v <= cell.v_max)
    pattern = v.view(np.int32).astype(int)
    for i, k in ((0, 0), (5, 0), (3, 1), (11, 2)):
        assert counts[i, k] == np.count_nonzero(valid[i, k::3])
        assert sums[i, k] == pattern[i, k::3][valid[i, k::3]].sum()
    for j in (0, 4, 6, 29):
        assert column_counts[j] == np.count_nonzero(valid[rows, j])
        assert column_sums[j] == sum(pattern[i, j] - means[i, j % 3] for i in rows if valid[i, j])


def test_an_unknown_backend_is_refused(monkeypatch):
    monkeypatch.setenv("GUARDDCP_KERNELS", "cuda")
    with pytest.raises(ValueError, match="GUARDDCP_KERNELS must be 'numba' or 'reference', not 'cuda'"):
        dispatch.backend()
