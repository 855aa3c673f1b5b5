"""Frames of codec ratio under attack: kernels that miscode, bytes that were changed, headers that lie."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from moments import certificate, decode, encode, round_trip, same_bits, trained

from guarddcp.codecs import planes as planes_module
from guarddcp.codecs import ratio
from guarddcp.codecs.planes import encode_exact
from guarddcp.codecs.ratio import Private
from guarddcp.container.layout import compress
from guarddcp.errors import FormatError, IntegrityError
from guarddcp.kernels import dispatch

SHAPE = (16, 100)


def sample(name="0.01", escapes=True, spread=0.5):
    """A shard of one frame with zeros and escapes in it."""
    cert = certificate(name)
    m, v = trained(SHAPE, cert, spread=spread)
    v[3], m[3] = 0, 0
    if escapes:
        m[5, ::9], v[6, 4] = np.nan, -1
    return m, v, encode(m, v, cert)


# -- the self-check ----------------------------------------------------------------------------------------------------


def one_level_off(p):
    p.low_v[8, 50] += 1


def one_code_off(p):
    p.low_q[8, 50] += 2


def zeroed_v(p):
    p.low_v[...] = 0


def one_zero(p):
    p.low_v[8, 50] = 0


def zeroed_q(p):
    p.low_q[...] = 0


def swapped(p):
    p.low_v[...], p.low_q[...] = p.low_q.copy(), p.low_v.copy()


def negated(p):
    p.low_q[...] = -p.low_q


def all_one_level_off(p):
    p.low_v[p.low_v > 2] -= 1


def rows_shifted(p):
    p.low_v[...] = np.roll(p.low_v, 1, axis=0)


def noise(p):
    p.low_q[...] = np.random.default_rng(7).integers(0, 256, p.low_q.shape)


def wrong_width(p):
    p.two_q = True
    p.high_q[...] = 0x81


ADVERSARIES = [
    one_level_off, one_code_off, zeroed_v, one_zero, zeroed_q, swapped, negated, all_one_level_off, rows_shifted, noise,
    wrong_width,
]  # fmt: skip


def miscoding(monkeypatch, spoil):
    honest = dispatch.encode

    def encode_and_spoil(*args, **kwargs):
        planes = honest(*args, **kwargs)
        assert (planes.two_v, planes.two_q) == (False, False)  # the sample fits single planes
        spoil(planes)
        return planes

    monkeypatch.setattr(dispatch, "encode", encode_and_spoil)


@pytest.mark.parametrize("backend", ["numba", "reference"])
@pytest.mark.parametrize("spoil", ADVERSARIES, ids=lambda spoil: spoil.__name__)
def test_a_kernel_that_miscodes_is_caught_and_the_frame_stored_exactly(monkeypatch, spoil, backend):
    monkeypatch.setenv("GUARDDCP_KERNELS", backend)
    m, v, honest = sample(escapes=False)
    assert (honest.failed, honest.frames[0][0]) == (0, 0)
    miscoding(monkeypatch, spoil)
    coded = encode(m, v, certificate())
    assert (coded.failed, coded.frames[0][:4], coded.escapes.sum()) == (1, b"\1\0\0\0", 0)
    m_hat, v_hat = decode(coded)
    assert same_bits(m_hat, m).all()
    assert same_bits(v_hat, v).all()


def test_needless_escapes_only_cost_bytes(monkeypatch):
    def all_escape(p):
        p.low_v[...] = 1

    m, v, honest = sample(escapes=False)
    miscoding(monkeypatch, all_escape)
    m_hat, v_hat, coded = round_trip(m, v, certificate())
    assert coded.failed == 0
    assert coded.stored > 2 * honest.stored
    assert same_bits(m_hat, m).all()
    assert same_bits(v_hat, v).all()


def test_a_moment_without_v_may_not_become_a_zero(monkeypatch):
    m, v = trained(SHAPE, certificate(), spread=0.5)
    v[8, 50], m[8, 50] = 0, 1e-30
    miscoding(monkeypatch, one_zero)
    assert encode(m, v, certificate()).failed == 1


def test_only_the_frame_that_fails_is_stored_exactly(monkeypatch):
    m, v = trained((64, 100), certificate(), spread=0.5)
    calls = []

    def third(p):
        calls.append(p)
        if len(calls) == 3:
            one_level_off(p)

    miscoding(monkeypatch, third)
    _, _, coded = round_trip_failing(m, v, 1600)
    assert [frame[0] for frame in coded.frames] == [0, 0, 1, 0]


def round_trip_failing(m, v, frame_coordinates):
    coded = encode(m, v, certificate(), frame_coordinates)
    assert coded.failed == 1
    return *decode(coded), coded


def test_planes_that_change_behind_the_check_are_caught_by_every_reader(monkeypatch):
    """The digest is of what was checked, so damage between check and storage shows on the way back."""
    m, v, _ = sample()
    honest = planes_module._compressor().compress

    def damaged(plane, **_):
        broken = np.array(plane).reshape(-1)
        if broken.size == m.size:
            broken[100] ^= 1
        return 1, honest(broken)

    monkeypatch.setattr(ratio, "pack_plane", damaged)
    coded = encode(m, v, certificate())
    with pytest.raises(IntegrityError, match=r"^w: digest of the decoded moments; expected [0-9a-f]{16} [0-9a-f]{16}"):
        decode(coded)


# -- bytes that were changed -------------------------------------------------------------------------------------------


def check_damage(coded, frame, m_hat, v_hat):
    """Refused as damaged, or decoded to the very same moments (a few bits of a zstd frame mean nothing)."""
    try:
        found = decode(replace(coded, frames=[frame]))
    except (FormatError, IntegrityError) as error:
        return str(error)
    assert same_bits(found[0], m_hat).all()
    assert same_bits(found[1], v_hat).all()
    return None


@pytest.mark.parametrize("name", ["0.01", "1e-4", "exact"])
def test_flipped_bits_never_change_a_moment(name):
    m, v, coded = sample("0.01" if name == "exact" else name)
    if name == "exact":
        coded = replace(coded, frames=[b"".join(ratio._exact_frame(m, v))])
    m_hat, v_hat = decode(coded)
    frame, meaningless = bytearray(coded.frames[0]), 0
    for bit in [*range(64 * 8), *range(64 * 8, 8 * len(frame), 7)]:
        frame[bit // 8] ^= 1 << bit % 8
        refusal = check_damage(coded, bytes(frame), m_hat, v_hat)
        meaningless += refusal is None
        assert refusal is None or refusal.startswith("w")
        frame[bit // 8] ^= 1 << bit % 8
    assert meaningless <= 24


def test_truncations_and_extensions_are_refused():
    _, _, coded = sample()
    frame = coded.frames[0]
    for end in [*range(100), *range(100, len(frame), 13)]:
        with pytest.raises((FormatError, IntegrityError), match=r"^w"):
            decode(replace(coded, frames=[frame[:end]]))
    with pytest.raises(FormatError, match="planes do not fill their frame"):
        decode(replace(coded, frames=[frame + b"\0"]))


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=6), st.integers(0, 5000))
@example([(4, 0)], 5000)
def test_fuzzed_frames(edits, cut):
    m_hat, v_hat = decode(CODED)
    frame = bytearray(CODED.frames[0])
    for at, value in edits:
        frame[at % len(frame)] = value
    check_damage(CODED, bytes(frame), m_hat, v_hat)
    check_damage(CODED, bytes(frame[:cut]), m_hat, v_hat)


CODED = sample()[2]


def test_swapped_frames_and_foreign_side_data_are_refused():
    m, v = trained((64, 100), certificate(), spread=0.5)
    coded = encode(m, v, certificate(), 1600)
    frames = [coded.frames[i] for i in (1, 0, 2, 3)]
    with pytest.raises(IntegrityError, match=r"digest of the decoded moments|codes out of the certified range"):
        decode(replace(coded, frames=frames))
    other = encode(v, v[::-1].copy(), certificate(), 1600)
    with pytest.raises((IntegrityError, FormatError)):
        decode(replace(coded, side=other.side))
    with pytest.raises((IntegrityError, FormatError)):
        decode(replace(coded, cert=certificate("0.1")))


# -- headers that lie --------------------------------------------------------------------------------------------------

HEAD = struct.Struct("<BBBBIIQQ")
FIELDS = ("kind", "planes_v", "planes_q", "reserved", "n", "escapes", "digest_m", "digest_v")


def rebuilt(frame, planes=None, table=None, **changes):
    """The frame with header fields, plane contents or table entries replaced, lengths made to fit."""
    head = dict(zip(FIELDS, HEAD.unpack_from(frame), strict=True))
    count = head["planes_v"] + head["planes_q"] + 1
    entries = [struct.unpack_from("<BQ", frame, HEAD.size + 9 * i) for i in range(count)]
    begin, parts = HEAD.size + 9 * count, []
    for _, length in entries:
        parts.append(frame[begin : begin + length])
        begin += length
    for number, (coder, content) in (planes or {}).items():
        entries[number], parts[number] = (coder, len(content)), content
    for number, entry in (table or {}).items():
        entries[number] = entry
    head = HEAD.pack(*(changes.get(name, value) for name, value in head.items()))
    return head + b"".join(struct.pack("<BQ", *entry) for entry in entries) + b"".join(parts)


N = SHAPE[0] * SHAPE[1]
LIES = {
    "coordinates": (dict(n=N + 1), FormatError, rf"frame header; expected {N} coordinates; got \({N + 1}, "),
    "coordinates huge": (dict(n=2**32 - 1), FormatError, "frame header"),
    "reserved": (dict(reserved=1), FormatError, r"frame header; .*, 1\)"),
    "more escapes than coordinates": (dict(escapes=N + 1), FormatError, "frame header"),
    "kind": (dict(kind=2), FormatError, r"unknown frame kind; got \(2, 1, 1\)"),
    "no plane": (dict(planes_v=0), FormatError, r"unknown frame kind; got \(0, 0, 1\)"),
    "three planes": (dict(planes_q=3), FormatError, r"unknown frame kind; got \(0, 1, 3\)"),
    "kind exact": (dict(kind=1), FormatError, "w: .*frame"),
    "fewer escapes": (
        dict(escapes=12, planes={2: (0, bytes(96))}), IntegrityError, "number of escape symbols; expected 12; got 13"
    ),
    "escape bytes": (dict(planes={2: (0, bytes(8))}), FormatError, "w plane 2: raw plane of another length"),
    "digest of m": (dict(digest_m=0), IntegrityError, "digest of the decoded moments; expected 0{16} "),
    "digest of v": (dict(digest_v=5), IntegrityError, "digest of the decoded moments; expected .* 0{15}5; got"),
    "coder": (dict(table={0: (2, 0)}, planes={0: (0, b"")}), FormatError, "w plane 0: unknown entropy coder; .* got 2"),
    "raw length": (dict(planes={0: (0, bytes(N - 1))}), FormatError, f"w plane 0: raw plane .* got {N - 1}"),
    "zstd length": (dict(planes={1: (1, compress(bytes(N + 1)))}), FormatError, "w plane 1: zstd plane of another"),
    "zstd bomb": (dict(planes={1: (1, compress(bytes(9 << 20)))}), FormatError, "w plane 1: zstd plane of another"),
    "no zstd": (dict(planes={1: (1, b"nothing at all")}), IntegrityError, "w plane 1: damaged zstd plane"),
    "zstd and more": (dict(planes={1: (1, compress(bytes(N)) + b"!")}), IntegrityError, "w plane 1: damaged .*unused"),
    "empty zstd": (dict(planes={1: (1, b"")}), IntegrityError, "w plane 1: damaged zstd plane"),
    "stored length": (dict(table={1: (1, 2**32 - 1)}), FormatError, "planes do not fill their frame"),
    "q out of range": (dict(planes={1: (0, b"\xff" * N)}), IntegrityError, r"\d+ codes out of the certified range"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_headers_that_lie(lie):
    changes, error, message = LIES[lie]
    frame = CODED.frames[0]
    assert rebuilt(frame) == frame
    tracemalloc.start()
    with pytest.raises(error, match=f"^w.*{message}" if not message.startswith("w") else f"^{message}"):
        decode(replace(CODED, frames=[rebuilt(frame, **changes)]))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_levels_out_of_range_are_refused():
    """Two planes of v that name levels far above 2^120, under a header that asks for them."""
    frame = CODED.frames[0]
    head = HEAD.pack(0, 2, 1, 0, N, 0, 0, 0)
    parts = [b"\xff" * N, b"\xff" * N, b"\x80" * N, b""]
    lying = head + b"".join(struct.pack("<BQ", 0, len(part)) for part in parts) + b"".join(parts)
    assert frame[0] == 0
    with pytest.raises(IntegrityError, match=r"^w: \d+ codes out of the certified range"):
        decode(replace(CODED, frames=[lying]))


def test_without_digests_only_digests_go_unnoticed():
    m_hat, v_hat = decode(CODED)
    spoilt = replace(CODED, frames=[rebuilt(CODED.frames[0], digest_m=1, digest_v=2)])
    with pytest.raises(IntegrityError, match="digest"):
        decode(spoilt)
    found = decode(spoilt, digest=False)
    assert same_bits(found[0], m_hat).all()
    assert same_bits(found[1], v_hat).all()
    with pytest.raises(IntegrityError, match="out of the certified range"):
        decode(replace(CODED, frames=[rebuilt(CODED.frames[0], **LIES["q out of range"][0])]), digest=False)


EXACT_LIES = {
    "length": (lambda f: f[:28] + b"\xff\xff\xff\xff" + f[32:], "w: .*"),
    "no length": (lambda f: f[:30], "exact frame is cut off; got 2"),
    "planes": (lambda f: b"\1\1\0\0" + f[4:], r"frame header; got \(1, 1, 0, 0\)"),
    "escapes": (lambda f: f[:8] + b"\1\0\0\0" + f[12:], r"frame header; got \(1, 0, 0, 1\)"),
    "second frame": (lambda f: f[:-1], "planes do not fill their frame"),
    "other item size": (
        lambda f: f[:28] + struct.pack("<I", 5) + f[32:], "exact frame is cut off; expected >= 20 bytes; got 5"
    ),
}  # fmt: skip


@pytest.mark.parametrize("lie", EXACT_LIES)
def test_exact_frames_that_lie(lie):
    m, v, coded = sample()
    frame = b"".join(ratio._exact_frame(m, v))
    assert same_bits(decode(replace(coded, frames=[frame]))[0], m).all()
    edit, message = EXACT_LIES[lie]
    with pytest.raises((FormatError, IntegrityError), match=message):
        decode(replace(coded, frames=[edit(frame)]))


# -- the private part and the side data --------------------------------------------------------------------------------


@given(st.integers(1, 1 << 20), st.integers(0, 2**32 - 1))
def test_private_parts_round_trip(frame_coordinates, length):
    private = Private(frame_coordinates, ((1, 1, length),))
    assert Private.from_bytes(private.to_bytes(), where="w") == private
    assert private.to_bytes() == struct.pack("<IBBBI", frame_coordinates, 1, 1, 1, length)


@pytest.mark.parametrize(("data", "message"), [
    (b"\0\0\0", "codec-private part is cut off; got 3"),
    (struct.pack("<IB", 1000, 1), "codec-private part does not parse; got e803000001"),
    (struct.pack("<IBBBI", 1000, 1, 1, 1, 5) + b"\0", "codec-private part does not parse"),
    (struct.pack("<IBBBI", 0, 1, 1, 1, 5), "codec-private part does not parse"),
    (struct.pack("<IBBBI", (1 << 20) + 1, 1, 1, 1, 5), "codec-private part does not parse"),
    (struct.pack("<IBBBI", 1000, 1, 2, 1, 5), r"unknown predictor 2 version 1; expected one of .* A newer guarddcp"),
    (struct.pack("<IBBBI", 1000, 1, 1, 9, 5), "unknown predictor 1 version 9"),
    (struct.pack("<IB", 1000, 0), "exactly one predictor per shard; got 0"),
    (struct.pack("<IBBBIBBI", 1000, 2, 1, 1, 5, 1, 1, 5), "exactly one predictor per shard; got 2"),
])  # fmt: skip
def test_private_parts_that_do_not_parse(data, message):
    with pytest.raises(FormatError, match=f"^w: {message}|^w: .*{message}"):
        Private.from_bytes(data, where="w")


@given(st.binary(max_size=30))
def test_fuzzed_private_parts(data):
    try:
        private = Private.from_bytes(data, where="w")
    except FormatError:
        return
    assert private.to_bytes() == data


def test_side_data_of_another_length_are_refused():
    with pytest.raises(FormatError, match=r"^w: side data of another length; expected \d+; got \d+"):
        decode(replace(CODED, side=CODED.side + b"\0"))
    with pytest.raises(FormatError, match="side data of another length"):
        decode(replace(CODED, side=encode_exact(np.empty(0, np.uint8), 4, rotate=False)[0]))
