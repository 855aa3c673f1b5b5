"""Byte planes and exact frames: any bytes come back, and nothing else does."""

from __future__ import annotations

import struct
import threading
import tracemalloc

import numpy as np
import pytest
import xxhash
import zstandard
from edge_values import EDGES
from hypothesis import given, settings
from hypothesis import strategies as st

from guarddcp.codecs.planes import (
    RAW,
    ZSTD,
    decode_exact,
    encode_exact,
    exact_raw_bytes,
    join_items,
    pack_plane,
    split_items,
    unpack_planes,
)  # fmt: skip
from guarddcp.container.layout import compress
from guarddcp.errors import FormatError, IntegrityError

KINDS = [(1, False), (2, False), (4, False), (8, False), (16, False), (2, True), (4, True)]
HEAD = struct.Struct("<BBHQQ")


def encode(raw, item_bytes=4, rotate=False):
    return b"".join(map(bytes, encode_exact(np.frombuffer(raw, np.uint8), item_bytes, rotate=rotate)))


def decode(frame, raw_length):
    return decode_exact(memoryview(frame), raw_length, where="w frame 0")


def compressible(n, seed=0):
    return np.random.default_rng(seed).integers(0, 3, n, np.uint8)


# -- round trips -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("item_bytes", "rotate"), KINDS)
@given(st.data())
def test_any_bytes_come_back(item_bytes, rotate, data):
    raw = data.draw(st.binary(max_size=30)) * data.draw(st.sampled_from([1, 16, 300]))
    raw = raw[: len(raw) // item_bytes * item_bytes]
    frame = encode(raw, item_bytes, rotate)
    found = decode(frame, len(raw))
    assert found.tobytes() == raw
    assert found.flags.writeable
    assert exact_raw_bytes(memoryview(frame), where="w") == len(raw)
    assert encode(raw, item_bytes, rotate) == frame


@pytest.mark.parametrize("rotate", [False, True])
def test_every_float_comes_back_bit_for_bit(rotate):
    raw = np.tile(EDGES, 40).tobytes()
    assert decode(encode(raw, 4, rotate), len(raw)).tobytes() == raw
    halves = np.arange(1 << 16, dtype=np.uint16).tobytes()
    assert decode(encode(halves, 2, rotate), len(halves)).tobytes() == halves


def test_rotation_puts_the_exponent_into_the_highest_plane():
    x = np.array([1.0, -1.0, 2.5, -1e-30], np.float32)
    planes = split_items(x.view(np.uint8), 4, True)
    assert planes[3].tolist() == (x.view(np.uint32) >> 23 & 0xFF).tolist()
    assert (planes[0] & 1).tolist() == [0, 1, 0, 1]
    for item_bytes, rotate in KINDS:
        raw = compressible(48 * item_bytes)
        np.testing.assert_array_equal(join_items(split_items(raw, item_bytes, rotate), rotate), raw)


def test_rotation_pays_where_exponents_share_a_byte_with_mantissas():
    """Positive floats of a few octaves: without it the last bit of the exponent spoils a second plane."""
    x = (2.0 ** np.random.default_rng(0).integers(-9, -5, 50_000)).astype(np.float32).tobytes()
    plain, rotated = len(encode(x)), len(encode(x, 4, True))
    assert rotated < 0.85 * plain < 0.1 * len(x)


def test_read_only_and_unaligned_input():
    raw = bytes(range(101))
    part = np.frombuffer(raw, np.uint8)[1:]
    assert decode(b"".join(map(bytes, encode_exact(part, 4, rotate=True))), 100).tobytes() == raw[1:]


# -- what a plane costs ------------------------------------------------------------------------------------------------


def test_a_plane_is_compressed_only_where_that_pays():
    noise = np.random.default_rng(1).integers(0, 256, 500_000, np.uint8)
    for plane in (noise, noise[:1000], noise[:0], noise[:1]):
        coder, stored = pack_plane(plane)
        assert (coder, len(stored)) == (RAW, plane.size)
    for plane in (np.zeros(500_000, np.uint8), compressible(1000), compressible(1_000_000)):
        coder, stored = pack_plane(plane)
        assert coder == ZSTD
        assert len(stored) < 0.4 * plane.size


@pytest.mark.parametrize("noisy", [slice(0, 200_000), slice(400_000, 600_000), slice(800_000, None)])
def test_a_noisy_stretch_does_not_hide_that_the_rest_compresses(noisy):
    plane = np.zeros(1_000_000, np.uint8)
    plane[noisy] = np.random.default_rng(1).integers(0, 256, 200_000, np.uint8)
    coder, stored = pack_plane(plane)
    assert coder == ZSTD
    assert len(stored) < 205_000


def test_headers_are_small():
    assert len(encode(b"", 4)) == HEAD.size + 4 * 9
    assert len(encode(np.random.default_rng(0).bytes(4000), 4)) == HEAD.size + 4 * 9 + 4000
    assert len(encode(bytes(1 << 20), 16)) < HEAD.size + 16 * (5 + 40)


def test_threads_get_contexts_of_their_own():
    planes = [compressible(200_000, seed) for seed in range(8)]
    want = [bytes(pack_plane(plane)[1]) for plane in planes]
    found = [None] * 8

    def work(i):
        for _ in range(5):
            found[i] = bytes(pack_plane(planes[i])[1])
            unpack_planes(memoryview(found[i]), [(ZSTD, len(found[i]))], [200_000], where="w")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == want


# -- frames that lie ---------------------------------------------------------------------------------------------------

RAW_BYTES = compressible(400).tobytes()
FRAME = encode(RAW_BYTES)


def frame(transform=0, item=4, reserved=0, length=400, digest=None, planes=None, table=None, cut=None):
    digest = xxhash.xxh3_64_intdigest(RAW_BYTES) if digest is None else digest
    planes = [(RAW, bytes(RAW_BYTES[i::4])) for i in range(4)] if planes is None else planes
    entries = [(coder, len(stored)) for coder, stored in planes] if table is None else table
    table_bytes = b"".join(struct.pack("<BQ", *entry) for entry in entries)
    return (HEAD.pack(transform, item, reserved, length, digest) + table_bytes + b"".join(s for _, s in planes))[:cut]


GOOD = [(RAW, RAW_BYTES[i::4]) for i in range(4)]


def last(plane):
    return {"planes": [*GOOD[:3], plane]}


LIES = {
    "empty": (dict(cut=0), "exact frame is cut off; expected >= 20 bytes; got 0"),
    "cut head": (dict(cut=19), "exact frame is cut off; expected >= 20 bytes; got 19"),
    "cut table": (dict(cut=39), "exact frame is cut off; expected >= 56 bytes; got 39"),
    "cut planes": (dict(cut=-1), "planes do not fill their frame; expected 399; got 400"),
    "more": (dict(planes=[*GOOD, (RAW, b"x")]), "planes do not fill their frame"),
    "transform": (dict(transform=2), r"unknown exact frame header; got \(2, 4, 0\)"),
    "reserved": (dict(reserved=256), r"unknown exact frame header; got \(0, 4, 256\)"),
    "item size 0": (dict(item=0), r"unknown exact frame header; got \(0, 0, 0\)"),
    "item size 3": (dict(item=3), r"unknown exact frame header; got \(0, 3, 0\)"),
    "rotated bytes": (dict(transform=1, item=1), r"unknown exact frame header; got \(1, 1, 0\)"),
    "rotated doubles": (dict(transform=1, item=8), r"unknown exact frame header; got \(1, 8, 0\)"),
    "length": (dict(length=404), "exact frame of another length; expected 400; got 404"),
    "huge": (dict(length=2**64 - 4), "exact frame of another length; expected 400; got 18446744073709551612"),
    "digest": (dict(digest=0), "digest of decoded bytes; expected 0{16}; got"),
    "no multiple": (dict(length=402, digest=None), "exact frame of another length; expected 402; got 402"),
    "wrong transform": (dict(transform=1), "digest of decoded bytes"),
    "coder": (dict(planes=[(9, GOOD[0][1]), *GOOD[1:]]), "plane 0: unknown entropy coder; .* got 9"),
    "raw length": (
        dict(planes=[(RAW, b"1" * 99), (RAW, b"2" * 101), *GOOD[2:]]), "plane 0: raw plane of another length; .* got 99"
    ),
    "zstd size": (last((ZSTD, compress(bytes(101)))), "plane 3: zstd plane of another size; expected 100"),
    "zstd bomb": (last((ZSTD, compress(bytes(64 << 20)))), "plane 3: zstd plane of another size"),
    "zstd tail": (last((ZSTD, compress(GOOD[3][1]) + b"\0")), "plane 3: damaged zstd plane .*unused"),
    "zstd cut": (last((ZSTD, compress(GOOD[3][1])[:-1])), "plane 3: damaged zstd plane"),
    "no zstd": (last((ZSTD, b"zstd?")), "plane 3: damaged zstd plane"),
    "huge table": (dict(table=[(ZSTD, 2**32 - 1)] * 4), "planes do not fill their frame; expected 400; got 1717986918"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_frames_that_lie(lie):
    changes, message = LIES[lie]
    assert decode(frame(), 400).tobytes() == RAW_BYTES
    lying = frame(**changes)
    tracemalloc.start()
    with pytest.raises((FormatError, IntegrityError), match=f"^w frame 0.*{message}"):
        decode(lying, 402 if lie == "no multiple" else 400)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_caller_that_believes_the_header_is_not_led_into_a_large_allocation():
    """Packs: the length comes from the manifest. No zstd frame can hold as much as this one claims."""
    lying = bytearray(compress(bytes(1 << 20)))
    assert lying[4] & 0xE0 == 0x80, "expected a window byte, then a content size of 4 bytes"
    lying[6:10] = (1 << 31).to_bytes(4, "little")
    assert zstandard.frame_content_size(bytes(lying)) == 1 << 31
    data = frame(item=1, length=1 << 31, planes=[(ZSTD, bytes(lying))])
    assert exact_raw_bytes(memoryview(data), where="w") == 1 << 31
    tracemalloc.start()
    with pytest.raises(FormatError, match="plane 0: zstd plane of another size"):
        decode(data, 1 << 31)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_zeros_compress_no_further_than_a_reader_believes():
    zeros = bytes(32 << 20)
    assert decode(encode(zeros, 1), len(zeros)).size == len(zeros)


def refused(data):
    """None if the frame gives RAW_BYTES (a few bits of zstd frames mean nothing), else the refusal."""
    try:
        found = decode(data, 400).tobytes()
    except (FormatError, IntegrityError) as error:
        return str(error)
    assert found == RAW_BYTES
    return None


def test_flipped_bits_never_change_a_byte():
    data, meaningless = bytearray(FRAME), 0
    for bit in range(8 * len(FRAME)):
        data[bit // 8] ^= 1 << bit % 8
        refusal = refused(bytes(data))
        meaningless += refusal is None
        assert refusal is None or refusal.startswith("w frame 0")
        data[bit // 8] ^= 1 << bit % 8
    assert meaningless <= 100  # four frames of zstd


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, len(FRAME) - 1), st.integers(0, 255)), max_size=5), st.integers(0, len(FRAME)))
def test_fuzzed_frames(edits, cut):
    data = bytearray(FRAME)
    for at, value in edits:
        data[at] = value
    refused(bytes(data))
    if cut < len(FRAME):
        assert refused(bytes(data[:cut])) is not None
