"""Bytes of format version 1, frozen: what was written once is read for ever, and is still written so.

zstd versions differ in their output, so its frames are compared by content; everything else byte for byte.
"""

from __future__ import annotations

import struct

import make_golden
import numpy as np
import pytest
from make_golden import BLOCKS, EXACT_KINDS, FRAMES, HERE, NONCE

from guarddcp.certificate import prove, to_plain
from guarddcp.codecs.planes import decode_exact, unpack_planes
from guarddcp.codecs.predictors import RowCol
from guarddcp.container import manifest
from guarddcp.container.datafile import Footer, open_block
from guarddcp.container.layout import TRAILER, decompress, unpack_columns

CERTIFICATES = make_golden.read_certificates()


def golden(name):
    return (HERE / name).read_bytes()


def planes_of(data, begin, lengths):
    """Contents of the planes whose table starts at ``begin``."""
    table = [struct.unpack_from("<BQ", data, begin + 9 * i) for i in range(len(lengths))]
    body = memoryview(data)[begin + 9 * len(lengths) :]
    return [plane.tobytes() for plane in unpack_planes(body, table, lengths, where="golden")]


def exact_content(data):
    """Header and planes of an exact frame, and what follows it is none."""
    head, (_, item_bytes, _, length, _) = data[:20], struct.unpack_from("<BBHQQ", data)
    return head, planes_of(data, 20, [length // item_bytes] * item_bytes)


def frame_content(data):
    """Everything in a ratio frame that does not depend on zstd's version."""
    kind, planes_v, planes_q, _, n, escapes = struct.unpack_from("<BBBBII", data)
    if kind == 1:
        (length,) = struct.unpack_from("<I", data, 28)
        return data[:28], exact_content(data[32 : 32 + length]), exact_content(data[32 + length :])
    return data[:28], planes_of(data, 28, [n] * (planes_v + planes_q) + [8 * escapes])


@pytest.mark.parametrize("name", FRAMES)
def test_ratio_frames_are_read(name):
    side, cert = golden(f"side_{FRAMES[name]}.bin"), CERTIFICATES[FRAMES[name]]
    assert make_golden.decode(golden(f"ratio_{name}.bin"), side, cert) == golden(f"decoded_{name}.bin")


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_ratio_frames_are_still_written_so(monkeypatch, backend):
    monkeypatch.setenv("GUARDDCP_KERNELS", backend)
    frames = make_golden.encode_frames(CERTIFICATES)
    for name, frame in frames.items():
        assert frame_content(frame) == frame_content(golden(f"ratio_{name}.bin")), name


def test_the_frames_are_of_the_kinds_they_are_named_after():
    heads = {name: struct.unpack_from("<BBBBII", golden(f"ratio_{name}.bin")) for name in FRAMES}
    n = 24 * 64
    assert heads["one_plane"][:5] == (0, 1, 1, 0, n)
    assert heads["two_planes"] == (0, 2, 2, 0, n, 0)
    assert heads["escapes"][:2] == (0, 1)
    assert heads["escapes"][5] >= 10
    assert heads["exact_pair"] == (1, 0, 0, 0, n, 0)


@pytest.mark.parametrize("name", ["coarse", "fine"])
def test_side_data_are_read_and_still_written_so(name):
    stored, want = golden(f"side_{name}.bin"), make_golden.predictor(CERTIFICATES[name])
    found = RowCol.decode(memoryview(stored), make_golden.layout(), where="golden")
    np.testing.assert_array_equal(found.r, want.r)
    np.testing.assert_array_equal(found.c, want.c)
    written = b"".join(map(bytes, want.encode()))
    assert (written[:12], exact_content(written[12:])) == (stored[:12], exact_content(stored[12:]))


@pytest.mark.parametrize("name", ["coarse", "fine"])
def test_certificates_are_still_proved(name):
    cert = CERTIFICATES[name]
    assert prove(cert) <= cert.bound <= cert.tolerance
    assert make_golden.from_plain(to_plain(cert)) == cert


@pytest.mark.parametrize(("item_bytes", "rotate"), EXACT_KINDS)
def test_exact_frames_are_read_and_still_written_so(item_bytes, rotate):
    name = f"exact_{item_bytes}{'_rotated' * rotate}"
    raw, stored = make_golden.exact_raw(item_bytes), golden(f"{name}.bin")
    assert decode_exact(memoryview(stored), raw.size, where="golden").tobytes() == raw.tobytes()
    assert exact_content(make_golden.exact_frames()[name]) == exact_content(stored)


def test_the_data_file_is_read_and_still_written_so():
    stored, (written, entry) = golden("data_file.bin"), make_golden.data_file()
    assert entry.nonce == NONCE
    assert written[: entry.footer_begin] == stored[: entry.footer_begin]
    # The footer is zstd: its own length and checksum stand in the trailer.
    footer_bytes, checksum, magic = TRAILER.unpack(stored[-TRAILER.size :])
    recorded = make_golden.FileEntry(entry.name, NONCE, len(stored), footer_bytes, checksum, 1)
    footer = Footer.parse(recorded, stored[:32], stored[recorded.footer_begin :])
    assert magic == b"GDCPFOOT"
    for record, blocks in enumerate(BLOCKS):
        for number, block in enumerate(blocks):
            begin, end = footer.block_range(record, number)
            assert bytes(open_block(recorded, record, number, stored[begin:end], where="golden")) == block
    assert [footer.num_blocks(record) for record in range(footer.records)] == [len(blocks) for blocks in BLOCKS]


def manifest_content(data):
    """Version, raw length, and the raw bytes of a manifest."""
    magic, version, coder, stored, raw_length, _ = struct.unpack_from("<8sIIQQQ", data)
    assert (magic, coder, stored) == (b"\x89GDCPMAN", 1, len(data) - 40)
    return version, raw_length, decompress(data[40:], raw_length, where="golden")


def test_the_manifest_is_read_and_still_written_so():
    stored, made = golden("manifest.bin"), make_golden.build_manifest(CERTIFICATES)
    found = manifest.from_bytes(stored, where="golden")
    assert list(found.shards()) == list(made.shards())
    assert (found.values, found.packs, found.files, found.entries) == (
        made.values,
        made.packs,
        made.files,
        made.entries,
    )
    version, raw_length, raw = manifest_content(stored)
    assert (version, raw_length, raw) == manifest_content(manifest.to_bytes(made))
    (head,) = struct.unpack_from("<Q", raw)
    assert sorted(unpack_columns(raw[8 + head :], where="golden")) == sorted(made.columns)
