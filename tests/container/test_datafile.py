"""Data files: what is written comes back, and nothing that was changed, moved or swapped does."""

from __future__ import annotations

import io
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guarddcp.container.datafile import DataFileWriter, FileEntry, Footer, open_block
from guarddcp.container.layout import (
    FOOTER_MAGIC,
    HEADER_BYTES,
    TRAILER,
    checksum,
    compress,
    footer_seed,
    pack_columns,
)  # fmt: skip
from guarddcp.errors import FormatError, IntegrityError

NAME = "0" * 32 + ".gdcp"
records = st.lists(st.lists(st.binary(max_size=40), min_size=1, max_size=4), max_size=5)


def finished(content):
    """(bytes, entry) of a file with the given records, lists of blocks."""
    stream = io.BytesIO()
    writer = DataFileWriter(stream, NAME, 3)
    for number, blocks in enumerate(content):
        assert writer.begin_record() == number
        for block in blocks:
            half = len(block) // 2
            assert writer.write_block([block[:half], block[half:]]) == len(block) + 8
    entry = writer.finish()
    return stream.getvalue(), entry


def parse(data, entry):
    return Footer.parse(entry, data[:HEADER_BYTES], data[entry.footer_begin : entry.size])


def read(data, footer, record, block):
    begin, end = footer.block_range(record, block)
    return bytes(open_block(footer.entry, record, block, data[begin:end], where="w frame 1"))


def with_footer(data, entry, columns=None, payload=None, **changes):
    """The file with another footer, sealed with checksums that fit."""
    payload = compress(pack_columns(columns)) if payload is None else payload
    found = checksum(payload, footer_seed(entry.nonce))
    data = data[: entry.footer_begin] + payload + TRAILER.pack(len(payload), found, FOOTER_MAGIC)
    return data, replace(entry, size=len(data), footer_bytes=len(payload), footer_checksum=found, **changes)


SAMPLE = [[b"side", b"frame one", b"frame two"], [b""], [b"x" * 50, b"frame one"]]


@given(records)
def test_round_trip(content):
    data, entry = finished(content)
    assert (entry.name, entry.rank, entry.size) == (NAME, 3, len(data))
    footer = parse(data, entry)
    assert footer.records == len(content)
    assert [footer.num_blocks(i) for i in range(len(content))] == [len(blocks) for blocks in content]
    assert footer.record_bytes().tolist() == [sum(len(b) + 8 for b in blocks) for blocks in content]
    assert [[read(data, footer, i, j) for j in range(len(blocks))] for i, blocks in enumerate(content)] == content
    # Blocks tile the file: each begins where the one before it ends.
    ranges = [footer.block_range(i, j) for i, blocks in enumerate(content) for j in range(len(blocks))]
    assert [begin for begin, _ in ranges] + [entry.footer_begin] == [HEADER_BYTES] + [end for _, end in ranges]


def test_nonces_differ():
    assert len({finished([])[1].nonce for _ in range(20)}) == 20


def test_a_block_may_come_in_pieces_of_any_kind():
    pieces = [b"ab", memoryview(b"cd"), np.frombuffer(b"ef", np.uint8), b""]
    stream = io.BytesIO()
    writer = DataFileWriter(stream, NAME)
    writer.begin_record()
    assert [writer.write_block(pieces), writer.write_block([])] == [14, 8]
    entry = writer.finish()
    footer = parse(stream.getvalue(), entry)
    assert [read(stream.getvalue(), footer, 0, j) for j in (0, 1)] == [b"abcdef", b""]


def test_a_footer_that_compresses_extremely_well_can_be_read():
    """Hundreds of thousands of blocks of one size shrink by more than a fixed factor would allow."""
    data, entry = finished([[b"1234"] * 300_000])
    assert 4096 * entry.footer_bytes + 4096 < 300_000
    footer = parse(data, entry)
    assert (footer.records, footer.num_blocks(0)) == (1, 300_000)
    assert read(data, footer, 0, 299_999) == b"1234"


def test_flipped_bits_anywhere_are_refused():
    """In header and footer when the file is opened, in blocks when they are read; by file name always."""
    data, entry = finished(SAMPLE)
    footer = parse(data, entry)
    flipped = bytearray(data)
    for bit in range(8 * len(data)):
        flipped[bit // 8] ^= 1 << bit % 8
        broken = bytes(flipped)
        if HEADER_BYTES <= bit // 8 < entry.footer_begin:
            with pytest.raises(IntegrityError, match=rf"^{NAME}, w frame 1: checksum of record \d block \d; expected"):
                [read(broken, footer, i, j) for i, blocks in enumerate(SAMPLE) for j in range(len(blocks))]
        else:
            with pytest.raises(IntegrityError, match=f"^{NAME}: (file header|file trailer|footer checksum)"):
                parse(broken, entry)
        flipped[bit // 8] ^= 1 << bit % 8


def test_truncations_are_refused():
    data, entry = finished(SAMPLE)
    for end in range(len(data)):
        with pytest.raises(IntegrityError, match=f"^{NAME}: file (header|trailer) is not the one that was written"):
            parse(data[:end], entry)
    begin, end = parse(data, entry).block_range(0, 2)
    for cut in range(begin, end):
        with pytest.raises(IntegrityError, match="checksum of record 0 block 2"):
            open_block(entry, 0, 2, data[begin:cut], where="w")


@pytest.mark.parametrize("swapped", [(0, 1), (0, 2), (2, 1)])
def test_a_block_is_good_only_in_its_own_place(swapped):
    """The same bytes at another record or number, and equal payloads of two records, fail."""
    data, entry = finished(SAMPLE)
    footer = parse(data, entry)
    places = [(i, j) for i, blocks in enumerate(SAMPLE) for j in range(len(blocks))]
    for record, block in places:
        if (record, block) != swapped:
            begin, end = footer.block_range(record, block)
            with pytest.raises(IntegrityError, match=f"checksum of record {swapped[0]} block {swapped[1]}"):
                open_block(entry, *swapped, data[begin:end], where="w")


def test_two_files_of_the_same_content_cannot_be_exchanged():
    (data, entry), (other, _) = finished(SAMPLE), finished(SAMPLE)
    with pytest.raises(IntegrityError, match="file header is not the one that was written"):
        parse(other, entry)
    footer = parse(data, entry)
    spliced = data[:HEADER_BYTES] + other[HEADER_BYTES:]
    with pytest.raises(IntegrityError, match="checksum of record 0 block 1"):
        read(spliced, footer, 0, 1)


COLUMNS = {"blocks": np.array([3, 1, 2]), "lengths": np.array([12, 17, 17, 8, 58, 17])}


@pytest.mark.parametrize(("columns", "message"), [
    ({"blocks": [3, 1, 2]}, r"unknown or missing columns; got \['blocks'\]"),
    (COLUMNS | {"more": [1]}, r"unknown or missing columns; got \['blocks', 'lengths', 'more'\]"),
    (COLUMNS | {"blocks": [3, 1, 3]}, r"records do not hold all blocks; expected 6; got \[3, 1, 3\]"),
    (COLUMNS | {"blocks": [3, 3, 0]}, "records do not hold all blocks"),
    (COLUMNS | {"blocks": [7, -1]}, "records do not hold all blocks"),
    (COLUMNS | {"blocks": [2**62] * 3 + [2**62 + 6]}, "records do not hold all blocks"),
    (COLUMNS | {"lengths": [12, 17, 17, 8, 58, 18]}, "block lengths do not tile the file; expected 161; got 162"),
    (COLUMNS | {"lengths": [13, 17, 17, 7, 58, 17]}, "block lengths do not tile the file"),
    (COLUMNS | {"lengths": [12, 17, 17, 8, 83, -8]}, "block lengths do not tile the file"),
    (COLUMNS | {"lengths": [2**62 - 1] * 4 + [125, 8]}, "block lengths do not tile the file"),
])  # fmt: skip
def test_footers_that_do_not_fit_their_file(columns, message):
    data, entry = finished(SAMPLE)
    parse(*with_footer(data, entry, COLUMNS))
    with pytest.raises(FormatError, match=f"^{NAME} footer: {message}"):
        parse(*with_footer(data, entry, {k: np.array(v, np.int64) for k, v in columns.items()}))


def test_lengths_that_wrap_around_are_refused():
    """Also when the manifest claims a file large enough for each of them."""
    lengths = np.array([2**61] * 8 + [129], np.int64)  # 2^64 + 129 = 129
    entry = FileEntry(NAME, bytes(16), 2**62 - 1, 2**62 - 1 - 161 - TRAILER.size, 0, 0)
    payload = compress(pack_columns({"blocks": np.array([9]), "lengths": lengths}))
    with pytest.raises(FormatError, match=r"do not tile|implausible"):
        Footer._from_payload(entry, payload)


@pytest.mark.parametrize(("payload", "message"), [
    (b"", "not a zstd frame"), (b"no frame", "not a zstd frame"),
    (compress(bytes(1 << 20)), r"implausible footer size; expected at most \d+; got 1048576"),
    (compress(b"\x05abc"), "column header is cut off"),
    (compress(pack_columns(COLUMNS)) + b"?", "unused data"),
    (compress(pack_columns(COLUMNS))[:-1], "damaged zstd frame"),
])  # fmt: skip
def test_footers_that_are_none(payload, message):
    data, entry = finished(SAMPLE)
    with pytest.raises((FormatError, IntegrityError), match=f"^{NAME} footer: .*{message}"):
        parse(*with_footer(data, entry, payload=payload))


def test_a_footer_bomb_allocates_nothing():
    data, entry = finished(SAMPLE)
    bomb = compress(bytes(256 << 20))
    tracemalloc.start()
    with pytest.raises(FormatError, match="implausible footer size"):
        parse(*with_footer(data, entry, payload=bomb))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


_numbers = st.sampled_from([-(2**63), -1, 0, 1, 7, 8, 9, 17, 2**31, 2**61, 2**62, 2**63 - 1])
_edits = st.tuples(st.sampled_from(["blocks", "lengths"]), st.integers(0, 5), _numbers)


def outcome(call):
    """(result, None), or (None, text) of a refusal; any other exception is a bug and passes through."""
    try:
        return call(), None
    except (FormatError, IntegrityError) as error:
        return None, str(error)


@given(st.lists(_edits, min_size=1, max_size=3), st.integers(0, 2**40))
def test_fuzzed_footers(edits, more):
    data, entry = finished(SAMPLE)
    columns = {name: column.copy() for name, column in COLUMNS.items()}
    for name, at, value in edits:
        columns[name][at % len(columns[name])] = value
    data, entry = with_footer(data, entry, columns)
    for claimed in (entry, replace(entry, size=entry.size + more)):
        footer, refusal = outcome(lambda: Footer._from_payload(claimed, data[entry.footer_begin : -TRAILER.size]))  # noqa: B023
        if refusal is not None:
            assert refusal.startswith(f"{NAME} footer: ")
            continue
        ranges = [footer.block_range(i, j) for i in range(footer.records) for j in range(footer.num_blocks(i))]
        assert all(HEADER_BYTES <= begin < end <= claimed.footer_begin for begin, end in ranges)


@given(st.binary(max_size=80), st.binary(max_size=80))
def test_fuzzed_files(header, tail):
    _, entry = finished(SAMPLE)
    with pytest.raises(IntegrityError, match=f"^{NAME}: "):
        Footer.parse(entry, header, tail)
    with pytest.raises(IntegrityError, match="checksum of record 1 block 0"):
        open_block(entry, 1, 0, tail, where="w")


def test_the_stream_is_only_appended_to():
    """write() is all that a file asks of its stream: object stores offer no more."""

    class Stream:
        parts: list[bytes] = []  # noqa: RUF012

        def write(self, data):
            self.parts.append(bytes(data))

    writer = DataFileWriter(Stream(), NAME)
    writer.begin_record()
    writer.write_block([b"abc"])
    entry = writer.finish()
    assert read(b"".join(Stream.parts), parse(b"".join(Stream.parts), entry), 0, 0) == b"abc"
