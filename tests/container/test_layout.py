"""Checksums, zstd frames and integer columns."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from guarddcp.container.layout import block_seed, checksum, compress, decompress, pack_columns, unpack_columns
from guarddcp.errors import FormatError, IntegrityError

INT64 = st.integers(-(2**63), 2**63 - 1)
VALUES = hnp.arrays(np.int64, st.integers(0, 60), elements=st.integers(-300, 300) | INT64)
NAMES = st.text(st.characters(max_codepoint=127), max_size=20)


def column(name=b"a", transform=0, width=1, count=1, planes=b"\x02"):
    return bytes([len(name)]) + name + struct.pack("<BBQ", transform, width, count) + planes


def unpack(data):
    return unpack_columns(data, where="manifest")


# -- columns -----------------------------------------------------------------------------------------------------------


@given(st.dictionaries(NAMES, VALUES, max_size=4))
@example({"": np.array([-(2**63), 2**63 - 1, 0, -(2**63)])})
@example({"down": np.arange(1000, 0, -1)})
def test_columns_round_trip(columns):
    data = pack_columns(columns)
    found = unpack(data)
    assert list(found) == list(columns)
    for name, values in columns.items():
        assert found[name].dtype == np.int64
        np.testing.assert_array_equal(found[name], values)
    assert pack_columns(found) == data


def test_the_bytes_of_a_column():
    """FORMAT.md 5 by hand: zigzag, planes, and differences where they are narrower."""
    assert pack_columns({"ab": np.array([0, -1, 1, -2])}) == b"\x02ab\x00\x01\x04" + bytes(7) + b"\x00\x01\x02\x03"
    assert pack_columns({"c": np.array([256, -1])}) == b"\x01c\x00\x02\x02" + bytes(7) + b"\x00\x01" + b"\x02\x00"
    far = pack_columns({"d": np.array([60, 100, 150])})
    assert far == b"\x01d\x01\x01\x03" + bytes(7) + bytes([120, 80, 100])
    assert pack_columns({}) == b""


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_, np.int64])
def test_other_integers_and_strides_are_packed_as_int64(dtype):
    values = np.arange(20).astype(dtype)[::-3]
    np.testing.assert_array_equal(unpack(pack_columns({"x": values}))["x"], values.astype(np.int64))


@pytest.mark.parametrize(("data", "message"), [
    (b"\x05abc", "column header is cut off or not ASCII; got b'abc'"),
    (b"\x03abc\x00\x01", "column header is cut off or not ASCII; got b'abc'"),
    (column(b"\xc3\xa4"), "column header is cut off or not ASCII"),
    (column(transform=2), r"column 'a': bad transform or width, or a repeated name; got \(2, 1\)"),
    (column(width=0), r"column 'a': bad transform or width, or a repeated name; got \(0, 0\)"),
    (column(width=9), r"column 'a': bad transform or width, or a repeated name; got \(0, 9\)"),
    (column() + column(), "column 'a': bad transform or width, or a repeated name"),
    (column(count=2), "column 'a' is cut off; expected 2; got 1"),
    (column(count=2**64 - 1, width=8), "column 'a' is cut off; expected 147573952589676412920; got 1"),
    (column() + b"\x01", "column header is cut off"),
])  # fmt: skip
def test_columns_that_do_not_parse(data, message):
    with pytest.raises(FormatError, match=f"^manifest: {message}"):
        unpack(data)


@given(st.dictionaries(NAMES, VALUES, min_size=1, max_size=3), st.data())
def test_fuzzed_columns(columns, data):
    packed = bytearray(pack_columns(columns))
    for _ in range(data.draw(st.integers(0, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(packed[: data.draw(st.integers(0, len(packed)))])
    for candidate in (bytes(packed), cut):
        try:
            found = unpack(candidate)
        except FormatError:
            continue
        assert sum(values.size for values in found.values()) <= len(candidate)


# -- zstd --------------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=300))
def test_zstd_round_trip(raw):
    assert decompress(compress(raw), len(raw), where="x") == raw
    assert decompress(memoryview(compress(raw, level=3)), len(raw), where="x") == raw


def test_frames_carry_size_and_checksum():
    parameters = zstandard.get_frame_parameters(compress(b"abc" * 100))
    assert (parameters.content_size, parameters.has_checksum) == (300, True)


def test_damaged_frames_are_refused():
    raw = np.random.default_rng(0).integers(0, 4, 3000, np.uint8).tobytes()
    frame, meaningless = bytearray(compress(raw)), 0
    for bit in range(8 * len(frame)):
        frame[bit // 8] ^= 1 << bit % 8
        # A few bits mean nothing, such as the reserved ones of a header: then the content is the same.
        with contextlib.suppress(IntegrityError):
            assert decompress(bytes(frame), len(raw), where="footer") == raw
            meaningless += 1
        frame[bit // 8] ^= 1 << bit % 8
    assert meaningless <= 32
    for end in range(len(frame)):
        with pytest.raises(IntegrityError, match=r"^footer: "):
            decompress(bytes(frame[:end]), len(raw), where="footer")


@pytest.mark.parametrize(("data", "raw_length", "message"), [
    (b"not a frame at all", 10, "not a zstd frame"),
    (compress(b"abc"), 4, "zstd frame of another size; expected 4; got 3"),
    (zstandard.ZstdCompressor(write_content_size=False).compress(b"abc"), 3, "zstd frame of another size"),
    (compress(b"abc") + b"x", 3, "damaged zstd frame .*unused data"),
    (compress(b"abc") + compress(b"abc"), 3, "damaged zstd frame .*unused data"),
])  # fmt: skip
def test_frames_of_another_kind_are_refused(data, raw_length, message):
    with pytest.raises(IntegrityError, match=message):
        decompress(data, raw_length, where="x")


def test_a_bomb_allocates_nothing():
    bomb = compress(bytes(256 << 20))
    tracemalloc.start()
    with pytest.raises(IntegrityError, match="another size; expected 1000; got 268435456"):
        decompress(bomb, 1000, where="x")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


# -- checksums ---------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=100), st.integers(0, 2**64 - 1))
def test_checksums_are_xxh3(data, seed):
    assert checksum(data, seed) == xxhash.xxh3_64(data, seed=seed).intdigest()
    assert checksum(memoryview(data)) == checksum(np.frombuffer(data, np.uint8)) == checksum(data, 0)


def test_the_seed_of_a_block_depends_on_file_record_and_number():
    nonce = bytes(range(16))
    assert block_seed(nonce, 258, 3) == xxhash.xxh3_64_intdigest(nonce + bytes([2, 1, 0, 0, 3, 0, 0, 0]))
    seeds = {block_seed(n, r, b) for n in (nonce, nonce[::-1]) for r in range(5) for b in range(5)}
    assert len(seeds) == 50
