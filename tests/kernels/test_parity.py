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
    params(65536, 1e-6, 4.0, v_min=2.0**-126),
]
BACKENDS = ("reference", "numba")


def readonly(*arrays):
    for array in arrays:
        array.flags.writeable = False
    return arrays


def everything(backend, m, v, r, c, cell, monkeypatch_context):
    """All that a kernel computes of one block, as plain values."""
    monkeypatch_context.setenv("GUARDDCP_KERNELS", backend)
    sums, counts = np.full((2, m.shape[1]), 3, np.int64)
    row_means = dispatch.fit(v, cell, sums, counts)
    planes = dispatch.encode(m, v, r, c, cell)
    m_hat, v_hat = np.full((2, *m.shape), np.nan, np.float32)
    bad = dispatch.decode(planes, r, c, cell, m_hat, v_hat)
    wrong = dispatch.check(m, v, m_hat, v_hat, cell)
    arrays = (
        row_means,
        sums,
        counts,
        planes.low_v,
        planes.high_v,
        planes.low_q,
        planes.high_q,
        bits(m_hat),
        bits(v_hat),
    )
    return arrays, (planes.two_v, planes.two_q, bad, wrong)


def assert_parity(m, v, r, c, cell):
    m, v, r, c = readonly(*(np.ascontiguousarray(x, np.float32) for x in (m, v, r, c)))
    with pytest.MonkeyPatch.context() as context:
        (want, said), (got, also) = (everything(backend, m, v, r, c, cell, context) for backend in BACKENDS)
    for number, (a, b) in enumerate(zip(want, got, strict=True)):
        np.testing.assert_array_equal(b, a, err_msg=f"array {number}")
        assert a.dtype == b.dtype
    assert also == said
    return want, said


def centred(v, cell):
    """A predictor's terms for a block: row means, no columns."""
    r, _, _ = reference.fit(v, cell)
    return r.astype(np.float32), np.zeros(v.shape[1], np.float32)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"S={cell.levels_per_octave:g}")
def test_edge_values(cell):
    m, v = edge_pairs()
    for terms in (centred(v, cell), (np.zeros(len(m), np.float32), np.arange(len(m), dtype=np.float32) - 20)):
        assert_parity(m, v, *terms, cell)
        assert_parity(m.T, v.T, *terms, cell)


@pytest.mark.parametrize(
    "shape", [(0, 0), (0, 5), (5, 0), (1, 1), (300, 1), (1, 2047), (1, 2048), (1, 2049), (2, 5000), (1, 70_001)]
)
def test_shapes(shape):
    rng = np.random.default_rng(sum(shape))
    v = (2.0 ** rng.uniform(-130, 122, shape)).astype(np.float32)
    v.reshape(-1)[::7] = rng.choice(EDGES, len(v.reshape(-1)[::7]))
    m = (rng.uniform(-4, 4, shape) * np.sqrt(np.abs(v))).astype(np.float32)
    for cell in CELLS[2:4]:
        assert_parity(m, v, *centred(v, cell), cell)


floats = st.one_of(
    st.sampled_from([float(x) for x in EDGES if np.isfinite(x)]),
    st.floats(width=32),
    st.floats(0, 2.0**120, width=32),
)


@st.composite
def blocks(draw):
    shape = draw(st.tuples(st.integers(0, 6), st.integers(0, 40)))
    v = draw(hnp.arrays(np.float32, shape, elements=floats, fill=st.just(1e-12)))
    q = draw(hnp.arrays(np.float32, shape, elements=st.floats(-8, 8, width=32), fill=st.just(0.25)))
    with np.errstate(all="ignore"):
        m = np.where(
            draw(hnp.arrays(np.bool_, shape)),
            q * np.sqrt(np.abs(v)),
            draw(hnp.arrays(np.float32, shape, elements=floats)),
        )
    levels = st.integers(-9_000_000, 9_000_000).map(float)
    near = draw(st.booleans())
    r = draw(hnp.arrays(np.float32, shape[0], elements=st.just(0.0) if near else levels))
    c = draw(hnp.arrays(np.float32, shape[1], elements=st.integers(-50, 50).map(float) if near else levels))
    return m.astype(np.float32), v, r, c, near


@st.composite
def cells(draw):
    q_max = draw(st.sampled_from([0.01, 1.0, 3.0, 7.27, 64.0, 2.0**20]))
    return params(
        draw(st.integers(1, 65536) | st.sampled_from([1, 2, 50, 65536])),
        q_max * 2.0 ** draw(st.floats(-20, 1)),
        q_max,
        v_min=2.0 ** draw(st.sampled_from([-126, -97, -60])),
    )


@given(blocks(), cells())
def test_random_blocks(block, cell):
    m, v, r, c, near = block
    if near and len(r):
        r = reference.fit(v, cell)[0].astype(np.float32)
    assert_parity(m, v, r, c, cell)


@given(
    hnp.arrays(np.uint8, (4, 3, 50)), st.booleans(), st.booleans(), cells(),
    st.integers(-(2**23) + 1, 2**23 - 1), st.integers(-(2**23) + 1, 2**23 - 1),
)  # fmt: skip
def test_decoders_agree_on_planes_that_no_encoder_wrote(planes, two_v, two_q, cell, r, c):
    planes = Planes(*readonly(*(p.copy() for p in planes)), two_v, two_q)
    # In range for a good part of the symbols, or anything.
    r, c = np.full(3, r, np.float32), np.full(50, c, np.float32)
    r[0], c[:25] = cell.level_min + 100, 0
    found = []
    for backend in BACKENDS:
        with pytest.MonkeyPatch.context() as context:
            context.setenv("GUARDDCP_KERNELS", backend)
            m, v = np.empty((2, 3, 50), np.float32)
            found.append((dispatch.decode(planes, r, c, cell, m, v), bits(m).tolist(), bits(v).tolist()))
    assert found[0] == found[1]


@given(
    hnp.arrays(np.float32, (4, 64), elements=floats), st.integers(-40, 40), cells(),
)  # fmt: skip
def test_checks_agree_near_the_edges_of_a_cell(values, nudge, cell):
    m, v, m_hat, v_hat = values
    with np.errstate(all="ignore"):
        v_hat[::2] = (v[::2] * cell.ratio_max).view(np.int32).__add__(nudge).view(np.float32)
        m_hat[::2] = (m[::2] / np.sqrt(v[::2]) + cell.deviation_max) * np.sqrt(v_hat[::2])
    m_hat[::5], v_hat[::5] = m[::5], v[::5]
    found = []
    for backend in BACKENDS:
        with pytest.MonkeyPatch.context() as context:
            context.setenv("GUARDDCP_KERNELS", backend)
            found.append([dispatch.check(*values, cell)])
            found[-1] += [dispatch.check(*(x[i : i + 1].copy() for x in values), cell) for i in range(64)]
    assert found[0] == found[1]
    assert found[0][0] == sum(found[0][1:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_symbols_mean(backend, monkeypatch):
    """The reference is the definition, so it gets a test of its own, by hand."""
    monkeypatch.setenv("GUARDDCP_KERNELS", backend)
    cell = params(4, 0.5, 3.0, v_min=2.0**-126)
    v = np.array([[1.0, 2.0, 2.0 * 2**0.25, 0.0, -0.0, 1e-40, np.inf, np.nan, 0.0, 1.0, 1.0]], np.float32)
    m = np.array([[0.0, 2**0.5, -3.0, -0.0, 0.0, 0.0, 0.0, 0.0, 1e-45, 3.1, np.nan]], np.float32)
    planes = dispatch.encode(m, v, np.array([2.0], np.float32), np.ones(11, np.float32), cell)
    symbols_v = planes.low_v.astype(int) | planes.high_v.astype(int) << 8
    symbols_q = planes.low_q.astype(int) | planes.high_q.astype(int) << 8
    # levels 0, 4, 5 less the predicted 3; then zero, and escapes: -0, subnormal, Inf, NaN, m without v, |q| > Q, NaN
    assert symbols_v.tolist() == [[CENTRE - 3, CENTRE + 1, CENTRE + 2, ZERO] + [ESCAPE] * 7]
    # -3 / sqrt(2^1.25) = -1.945 -> -4 steps of 0.5
    assert symbols_q.tolist() == [[CENTRE, CENTRE + 2, CENTRE - 4] + [CENTRE] * 8]
    assert (planes.two_v, planes.two_q) == (False, False)
    m_hat, v_hat = np.full((2, 1, 11), np.nan, np.float32)
    assert dispatch.decode(planes, np.array([2.0], np.float32), np.ones(11, np.float32), cell, m_hat, v_hat) == 0
    np.testing.assert_array_equal(v_hat[0, :3], np.exp2(np.array([0, 1, 1.25])).astype(np.float32))
    np.testing.assert_array_equal(m_hat[0, :3], np.float32([0, 1, -2]) * np.sqrt(v_hat[0, :3]))
    assert not bits(m_hat[0, 3:]).any()
    assert not bits(v_hat[0, 3:]).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("residual", "two", "coded"), [
    (127, False, True), (128, True, True),
    (-126, False, True), (-127, True, True), (-128, True, True), (-129, True, True),
    (RESIDUAL_MAX, True, True), (RESIDUAL_MAX + 1, False, False),
    (-RESIDUAL_MAX, True, True), (-RESIDUAL_MAX - 1, False, False),
])  # fmt: skip
def test_one_plane_two_planes_escape(backend, residual, two, coded, monkeypatch):
    monkeypatch.setenv("GUARDDCP_KERNELS", backend)
    cell = params(1000, 1e-4, 7.0)
    one, c = np.ones((1, 1), np.float32), np.zeros(1, np.float32)
    planes = dispatch.encode(one * 0, one, np.float32([-residual]), c, cell)
    assert planes.two_v == two
    assert ((planes.low_v[0, 0], planes.high_v[0, 0]) == (ESCAPE, 0)) != coded
    m, v = np.empty((2, 1, 1), np.float32)
    dispatch.decode(planes, np.float32([-residual]), c, cell, m, v)
    assert v[0, 0] == (1.0 if coded else 0.0)
    m_planes = dispatch.encode(one * residual * cell.delta, one, c, c, cell)
    assert m_planes.two_q == two
    assert (m_planes.low_v[0, 0] == ESCAPE) != coded


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_of_a_fit_may_be_added_in_any_order(backend, monkeypatch):
    monkeypatch.setenv("GUARDDCP_KERNELS", backend)
    rng = np.random.default_rng(5)
    v = (2.0 ** rng.uniform(-130, 10, (12, 30))).astype(np.float32)
    v[3], v[:, 4] = 0, np.nan
    cell = CELLS[2]
    sums, counts = np.zeros((2, 30), np.int64)
    r = dispatch.fit(v, cell, sums, counts)
    apart = np.zeros((2, 30), np.int64)
    pieces = [dispatch.fit(v[i : i + 5], cell, *apart) for i in (10, 5, 0)][::-1]
    np.testing.assert_array_equal(np.concatenate(pieces), r)
    np.testing.assert_array_equal(apart, [sums, counts])
    assert (r[3], counts[4], sums[4]) == (0, 0, 0)
    valid = v[0] >= cell.v_min
    assert r[0] == np.floor(reference.levels(v[:1], cell)[0, valid].astype(np.int64).mean() + 0.5)


def test_an_unknown_backend_is_refused(monkeypatch):
    monkeypatch.setenv("GUARDDCP_KERNELS", "cuda")
    with pytest.raises(ValueError, match="GUARDDCP_KERNELS must be 'numba' or 'reference', not 'cuda'"):
        dispatch.backend()
