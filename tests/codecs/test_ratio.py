"""Codec ratio through its frames: every coordinate inside its certified cell or bit for bit, whatever goes in."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from edge_values import EDGES, edge_pairs
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from moments import SETTINGS, certificate, decode, encode, fitted, round_trip, same_bits, trained

from guarddcp.codecs import ratio
from guarddcp.codecs.ratio import CAUSES
from guarddcp.codecs.view import Layout, View
from guarddcp.kernels import dispatch

U = 2.0**-24
NAMES = list(SETTINGS)


def header(frame):
    """(kind, planes of v, planes of q, coordinates, escapes) of a frame."""
    kind, planes_v, planes_q, _, n, escapes = struct.unpack_from("<BBBBII", frame)
    return kind, planes_v, planes_q, n, escapes


def rare(coded):
    """Wide symbols that may escape instead of asking for a second plane."""
    return coded.layout.coordinates // dispatch.RARE + 8 * len(coded.frames)


def causes(coded):
    return {cause: count for cause, count in zip(CAUSES, coded.escapes.tolist(), strict=True) if count}


# -- inside the cell ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_coordinate_is_inside_its_cell(name):
    cert = certificate(name)
    m, v = trained((300, 301), cert)
    _, _, coded = round_trip(m, v, cert, frame_coordinates=1 << 14)
    # What may escape: q beyond the last code, and rare residuals that would cost a plane.
    allowed = (
        m.size // dispatch.RARE + len(coded.frames) + np.count_nonzero(np.abs(m) > 0.98 * cert.cell.q_max * np.sqrt(v))
    )
    assert coded.escapes.sum() <= allowed
    assert coded.stored < (0.45 if cert.tolerance >= 0.01 else 0.62) * 2 * m.nbytes


@pytest.mark.parametrize("name", NAMES)
def test_halfway_between_codes_and_levels_and_at_the_largest_q(name):
    """A few units in the last place around every decision of the encoder."""
    cert, rng = certificate(name), np.random.default_rng(3)
    cell, shape = cert.cell, (64, 500)
    nudge = 1 + rng.integers(-6, 7, shape) * 2 * U
    edge = rng.integers(-40, 40, shape) + rng.choice([0.0, 0.5], shape)
    base = rng.integers(-90, 40, (64, 1)) * cell.levels_per_octave
    v = (2.0 ** ((base + edge) / cell.levels_per_octave) * nudge).astype(np.float32)
    v[v < cert.v_min] = cert.v_min
    most = np.floor(cell.q_max * (1 - 4 * U) / cell.delta)
    k = rng.integers(-most, most + 1, shape) + rng.choice([-0.5, 0.0, 0.5], shape)
    q = np.where(rng.random(shape) < 0.1, np.sign(k) * cell.q_max, k * cell.delta) * nudge[::-1]
    m = (q * np.sqrt(v.astype(np.float64))).astype(np.float32)
    m_hat, v_hat, coded = round_trip(m, v, cert)
    beyond = np.abs(q) > (most + 0.5) * cell.delta * (1 + 30 * U)
    assert set(causes(coded)) <= {"q_range", "residual_range", "small_v"}
    assert causes(coded).get("q_range", 0) >= np.count_nonzero(beyond)
    # It is an attack: cells are used nearly to their ends.
    with np.errstate(all="ignore"):
        h = np.abs(np.log2(v.astype(float)) - np.log2(v_hat.astype(float)))
        w = np.abs(m / np.sqrt(v.astype(float)) - m_hat / np.sqrt(v_hat.astype(float)))
    assert np.nanmax(h) >= 0.5 / cell.levels_per_octave
    assert np.nanmax(w) >= 0.5 * cell.delta * (1 - 1e-6) or most == 0


floats = st.sampled_from(EDGES.tolist()) | st.floats(width=32) | st.floats(0, 2.0**120, width=32)


@given(st.data(), st.sampled_from(NAMES))
def test_anything_comes_back_inside_its_cell_or_bit_for_bit(data, name):
    cert, shape = certificate(name), data.draw(st.tuples(st.integers(1, 20), st.integers(1, 40)))
    m, v = (data.draw(hnp.arrays(np.float32, shape, elements=floats, fill=st.just(x))) for x in (2e-7, 1e-12))
    round_trip(m, v, cert, frame_coordinates=data.draw(st.sampled_from([7, 64, 1 << 20])))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("turned", [False, True])
def test_every_edge_value_beside_every_other(name, turned):
    m, v = edge_pairs()
    m_hat, _, coded = round_trip(*((m.T, v.T) if turned else (m, v)), certificate(name))
    assert sum(header(frame)[4] for frame in coded.frames) == coded.escapes.sum()
    assert not np.isnan(m_hat[np.isfinite(m.T if turned else m)]).any()


@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 1), (1, 5), (2, 15), (2, 16), (3, 2049), (1, 40_000), (40_000,), (33, 7, 11), ()]
)
def test_shapes_and_frames(shape):
    cert = certificate()
    m, v = (x.reshape(shape) for x in trained((1, int(np.prod(shape))), cert))
    for frame_coordinates in (1 << 20, 1000):
        m_hat, v_hat, coded = round_trip(m, v, cert, frame_coordinates=frame_coordinates)
        assert m_hat.shape == v_hat.shape == shape
        assert sum(header(frame)[3] for frame in coded.frames) == m.size


def test_both_kernels_write_the_same_bytes_and_read_each_others(monkeypatch):
    cert = certificate()
    m, v = trained((40, 900), cert)
    m.flat[::50], v.flat[::77] = np.nan, 0
    coded = {}
    for backend in ("reference", "numba"):
        monkeypatch.setenv("GUARDDCP_KERNELS", backend)
        coded[backend] = encode(m, v, cert, 9000)
    assert coded["reference"].frames == coded["numba"].frames
    assert coded["reference"].side == coded["numba"].side
    monkeypatch.setenv("GUARDDCP_KERNELS", "reference")
    found = decode(coded["numba"])
    monkeypatch.setenv("GUARDDCP_KERNELS", "numba")
    assert all(same_bits(a, b).all() for a, b in zip(found, decode(coded["reference"]), strict=True))


def test_read_only_moments_are_encoded_and_left_alone():
    cert = certificate()
    m, v = trained((20, 50), cert)
    before = m.tobytes(), v.tobytes()
    m.flags.writeable = v.flags.writeable = False
    round_trip(m, v, cert)
    assert (m.tobytes(), v.tobytes()) == before


def test_frames_do_not_share_memory_with_the_encoder():
    """Scratch is kept from frame to frame; what was returned must not change with the next one."""
    cert = certificate()
    layout, params = Layout((64, 500), View((0, 1), 1), 1 << 20), ratio.params_of(cert)
    terms = fitted(trained((64, 500), cert)[1], layout, cert).terms(layout.frame(0))
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 2**32, (2, 64, 500), np.uint32).view(np.float32)
    frames = [ratio.encode_frame(*x, terms, params) for x in (trained((64, 500), cert), raw, raw[::-1])]
    before = [b"".join(map(bytes, frame.buffers)) for frame in frames]
    ratio.encode_frame(*trained((64, 500), cert, seed=9), terms, params)
    assert [b"".join(map(bytes, frame.buffers)) for frame in frames] == before


# -- planes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spread", "q", "planes"), [(0.3, 0.3, (1, 1)), (3.0, 0.3, (2, 1)), (0.3, 1.0, (1, 2)), (3.0, 1.0, (2, 2))]
)
def test_one_plane_or_two(spread, q, planes):
    """About 600 levels per octave, 560 codes per unit of q: 0.2 octaves either way and |q| up to 0.22 fill a byte."""
    cert, rng = certificate("1e-3"), np.random.default_rng(1)
    log_v = np.clip(rng.normal(-40, spread, (100, 400)), -40 - 0.19 * spread / 0.3, -40 + 0.19 * spread / 0.3)
    v = 2.0 ** (log_v if spread > 1 else -40 + (log_v + 40) * 0.5)
    m = np.clip(rng.normal(0, q, v.shape), -0.21 * q / 0.3, 0.21 * q / 0.3) * np.sqrt(v)
    _, _, coded = round_trip(m, v, cert)
    ((planes_v, planes_q),) = [header(frame)[1:3] for frame in coded.frames]
    assert planes_q == planes[1]
    assert planes_v == planes[0] or planes == (1, 2)  # a constant high plane costs nothing
    assert coded.escapes.sum() <= rare(coded)


def test_a_few_wide_symbols_escape_instead_of_costing_a_plane():
    cert = certificate()
    v = np.full((64, 1024), 1e-10, np.float32)
    few = v.size // dispatch.RARE
    for number, planes in ((few, (1, 1)), (20 * few, (2, 1))):
        spoilt = v.copy()
        spoilt.flat[: 37 * number : 37] *= 1e6
        _, _, coded = round_trip(np.zeros_like(v), spoilt, cert)
        assert [header(frame)[1:3] for frame in coded.frames] == [planes]
        assert causes(coded) == ({"residual_range": number} if planes == (1, 1) else {})


# -- escapes -----------------------------------------------------------------------------------------------------------

QUIET, PAYLOAD = np.array([0x7FC00000, 0xFFABCDEF], np.uint32).view(np.float32)
ESCAPES = {
    "m NaN": (QUIET, 1e-8, "not_finite"),
    "m NaN with payload": (PAYLOAD, 1e-8, "not_finite"),
    "m Inf": (np.inf, 1e-8, "not_finite"),
    "v Inf": (1e-4, np.inf, "not_finite"),
    "v NaN": (1e-4, PAYLOAD, "not_finite"),
    "both": (-np.inf, QUIET, "not_finite"),
    "v < 0": (1e-4, -1e-8, "negative_v"),
    "v = -0": (0.0, -0.0, "negative_v"),
    "v = 0": (1e-30, 0.0, "zero_v"),
    "v = 0, tiny m": (1e-45, 0.0, "zero_v"),
    "subnormal v": (0.0, 1e-40, "small_v"),
    "stuck": (5.6e-45, 1.3e-44, "small_v"),
    "large v": (1e15, 2.0**121, "large_v"),
    "q > Q": (2.1e-4, 1e-8, "q_range"),
    "q = inf": (3e38, 1e-30, "q_range"),
    "q < -Q": (-2.1e-4, 1e-8, "q_range"),
    "residual": (0.0, 1e-37, "residual_range"),
}


@pytest.mark.parametrize("case", ESCAPES)
def test_escapes_are_exact_and_counted_under_their_cause(case):
    cert = certificate("0.01" if case != "residual" else "1e-3")
    m, v = np.zeros((16, 300), np.float32), np.full((16, 300), 1e-8, np.float32)
    if case == "residual":
        v[:] = 1e20  # 33000 levels of 1/600 octave away
    m[3, 7], v[3, 7], cause = ESCAPES[case]
    m_hat, v_hat, coded = round_trip(m, v, cert)
    assert causes(coded) == {cause: 1}
    assert same_bits(m_hat, m)[3, 7]
    assert same_bits(v_hat, v)[3, 7]
    assert header(coded.frames[0])[0] == 0


def test_minus_zero_m_is_no_escape():
    """v = +0 with m = -0 is the zero cell, a normal v with m = -0 has q = 0: m comes back as +0."""
    cert = certificate()
    m, v = np.full((16, 300), -0.0, np.float32), np.full((16, 300), 1e-8, np.float32)
    v[4] = 0.0
    m_hat, _, coded = round_trip(m, v, cert)
    assert causes(coded) == {}
    assert not m_hat.view(np.uint32).any()


@pytest.fixture
def flush_to_zero():
    """What torch.set_flush_denormal does to the whole thread: subnormals compare equal to zero."""
    yield torch.set_flush_denormal(True)
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_subnormals_survive_where_arithmetic_flushes_them(flush_to_zero, backend, monkeypatch):
    monkeypatch.setenv("GUARDDCP_KERNELS", backend)
    m, v = trained((16, 300), certificate(), spread=0.5)
    m.view(np.uint32)[:6], v.view(np.uint32)[:6] = 4, np.array([0, 0, 9, 9, 0x01000000, 0x01000000])[:, None]
    coded = encode(m, v, certificate())
    m_hat, v_hat = decode(coded)
    assert (coded.failed, coded.escapes.sum()) == (0, 4 * 300)
    assert same_bits(m_hat, m)[:4].all()
    assert same_bits(v_hat, v)[:4].all()


def test_all_escapes_at_once():
    cert = certificate()
    m, v = np.zeros((32, 256), np.float32), np.full((32, 256), 1e-8, np.float32)
    for row, (bad_m, bad_v, _) in enumerate(list(ESCAPES.values())[:-1]):
        m[row, row : row + 5], v[row, row : row + 5] = bad_m, bad_v
    m_hat, _, coded = round_trip(m, v, cert)
    wrong = {cause: 5 * sum(c == cause for _, _, c in list(ESCAPES.values())[:-1]) for cause in CAUSES[:-1]}
    assert causes(coded) == wrong
    assert same_bits(m_hat, m).all()


# -- what costs next to nothing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("v_stuck", [1.3e-44, 0.0])
def test_stuck_subnormals_and_zeros_cost_next_to_nothing(v_stuck):
    cert = certificate("0.01 for b2 = 0.95")
    m, v = trained((256, 512), cert, spread=0.5)
    _, _, dense = round_trip(m, v, cert)
    stuck = np.arange(256) % 4 > 0
    m[stuck], v[stuck] = 5.6e-45 * (v_stuck > 0), v_stuck
    _, _, coded = round_trip(m, v, cert)
    raw = 2 * m.nbytes * np.mean(stuck)
    assert coded.stored - 0.25 * dense.stored < 0.02 * raw
    assert causes(coded) == ({"small_v": np.count_nonzero(stuck) * 512} if v_stuck else {})


def test_all_zero_moments_cost_next_to_nothing():
    _, _, coded = round_trip(np.zeros((512, 512)), np.zeros((512, 512)), certificate())
    assert coded.stored < 600


@pytest.mark.parametrize(
    "pattern", ["first rows", "last rows", "scattered rows", "columns", "middle columns", "one row"]
)
def test_mixed_zeros_cost_next_to_nothing(pattern):
    """Wherever the zeros lie: the live part costs what it costs alone, the dead part under 2 % of its raw bytes."""
    cert = certificate()
    m, v = trained((512, 1024), cert, spread=0.5)
    rows, columns = np.arange(512)[:, None], np.arange(1024)[None, :]
    live = {
        "first rows": rows < 64, "last rows": rows >= 448, "scattered rows": rows % 8 == 3, "one row": rows == 77,
        "columns": columns < 128, "middle columns": (columns >= 400) & (columns < 528),
    }[pattern]  # fmt: skip
    live = np.broadcast_to(live, m.shape)
    m, v = np.where(live, m, 0).astype(np.float32), np.where(live, v, 0).astype(np.float32)
    kept = [x[np.ix_(live.any(axis=1), live.any(axis=0))] for x in (m, v)]
    _, _, alone = round_trip(*kept, cert)
    _, _, coded = round_trip(m, v, cert)
    assert causes(coded).get("residual_range", 0) <= rare(coded)
    assert coded.stored <= 1.1 * alone.stored + 0.02 * 8 * np.count_nonzero(~live)


@pytest.mark.parametrize("negative", [False, True])
def test_random_bits_cost_no_more_than_raw(negative):
    """Half of all floats are no second moment; where none is, codes would only add to the raw bytes."""
    raw = np.random.default_rng(0).integers(0, 2**32, (2, 300, 1000), np.uint32) | (negative << 31)
    raw = raw.view(np.float32)
    m_hat, v_hat, coded = round_trip(*raw, certificate())
    assert coded.stored <= raw.nbytes + 100 * len(coded.frames) + len(coded.side)
    if negative:
        assert same_bits(m_hat, raw[0]).all()
        assert same_bits(v_hat, raw[1]).all()
        assert [header(frame) for frame in coded.frames] == [(1, 0, 0, 300_000, 0)]
        assert coded.escapes.sum() == 0


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1, 129)])
def test_tiny_shards_have_small_headers(shape):
    m, v = trained(shape, certificate())
    _, _, coded = round_trip(m, v, certificate())
    assert coded.stored <= 8 * m.size + 230 + 4 * sum(shape)
