"""Data files: records of checksummed blocks, written as a stream and read by ranges (FORMAT.md 1)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import xxhash
import zstandard

from guarddcp.container.layout import (
    CHECKSUM_BYTES,
    DATA_MAGIC,
    FOOTER_MAGIC,
    HEADER_BYTES,
    NONCE_BYTES,
    TRAILER,
    VERSION,
    block_seed,
    checksum,
    compress,
    decompress,
    footer_seed,
    pack_columns,
    unpack_columns,
)  # fmt: skip
from guarddcp.errors import FormatError, IntegrityError

__all__ = ["DataFileWriter", "FileEntry", "Footer", "open_block"]

_COLUMN_BYTES_MAX = 8
"""A column takes at most so many bytes per entry; the least that a block takes in the file is `CHECKSUM_BYTES`."""
_COLUMN_HEADS = 64
"""More than the names and heads of the footer's two columns."""


class Stream(Protocol):
    def write(self, data: bytes | memoryview | np.ndarray) -> object: ...


@dataclass(frozen=True)
class FileEntry:
    """What the manifest knows of a data file. ``footer_bytes`` is the length of the footer payload."""

    name: str
    nonce: bytes
    size: int
    footer_bytes: int
    footer_checksum: int
    rank: int

    @property
    def footer_begin(self) -> int:
        return self.size - TRAILER.size - self.footer_bytes


class DataFileWriter:
    """Appends records to an open stream; nothing is ever revisited, so any object store will do.

    Call ``begin_record``, then ``write_block`` for each of its blocks, and so on; ``finish`` writes the footer.
    """

    def __init__(self, stream: Stream, name: str, rank: int = 0) -> None:
        self._stream, self._name, self._rank = stream, name, rank
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._blocks: list[int] = []
        self._lengths: list[int] = []
        self._size = 0
        self._put(DATA_MAGIC + VERSION.to_bytes(4, "little") + bytes(4) + self._nonce)

    def begin_record(self) -> int:
        """Start the next record; returns its number."""
        self._blocks.append(0)
        return len(self._blocks) - 1

    def write_block(self, pieces: Sequence[bytes | memoryview | np.ndarray]) -> int:
        """Append one block, given in pieces, to the current record; returns its stored length in bytes."""
        running = xxhash.xxh3_64(seed=block_seed(self._nonce, len(self._blocks) - 1, self._blocks[-1]))
        begin = self._size
        for piece in pieces:
            running.update(piece)
            self._put(piece)
        self._put(running.intdigest().to_bytes(CHECKSUM_BYTES, "little"))
        self._blocks[-1] += 1
        self._lengths.append(self._size - begin)
        return self._lengths[-1]

    def finish(self) -> FileEntry:
        columns = {"blocks": np.array(self._blocks, np.int64), "lengths": np.array(self._lengths, np.int64)}
        footer = compress(pack_columns(columns))
        footer_checksum = checksum(footer, footer_seed(self._nonce))
        self._put(footer)
        self._put(TRAILER.pack(len(footer), footer_checksum, FOOTER_MAGIC))
        return FileEntry(self._name, self._nonce, self._size, len(footer), footer_checksum, self._rank)

    def _put(self, data: bytes | memoryview | np.ndarray) -> None:
        self._stream.write(data)
        self._size += len(data)


@dataclass(frozen=True)
class Footer:
    """Where every block of a file lies: ``begins`` int64 (blocks + 1,), ``first_block`` int64 (records + 1,)."""

    entry: FileEntry
    begins: np.ndarray
    first_block: np.ndarray

    @classmethod
    def parse(cls, entry: FileEntry, header: bytes, tail: bytes) -> Footer:
        """Check a file's first 32 bytes and its footer with trailer, as ``entry`` recorded them."""
        where = entry.name
        expected = DATA_MAGIC + VERSION.to_bytes(4, "little") + bytes(4) + entry.nonce
        if header != expected:
            raise IntegrityError(
                "file header is not the one that was written", where=where, expected=expected.hex(), got=header.hex()
            )
        payload, trailer = tail[: entry.footer_bytes], tail[entry.footer_bytes :]
        if trailer != TRAILER.pack(entry.footer_bytes, entry.footer_checksum, FOOTER_MAGIC):
            raise IntegrityError("file trailer is not the one that was written", where=where, got=trailer.hex())
        found = checksum(payload, footer_seed(entry.nonce))
        if found != entry.footer_checksum:
            raise IntegrityError(
                "footer checksum", where=where, expected=f"{entry.footer_checksum:016x}", got=f"{found:016x}"
            )
        return cls._from_payload(entry, payload)

    @classmethod
    def _from_payload(cls, entry: FileEntry, payload: bytes) -> Footer:
        where = f"{entry.name} footer"
        raw_length = _frame_size(entry, payload, where)
        columns = unpack_columns(decompress(payload, raw_length, where=where), where=where)
        if set(columns) != {"blocks", "lengths"}:
            raise FormatError("unknown or missing columns", where=where, got=sorted(columns))
        blocks, lengths = columns["blocks"], columns["lengths"]
        # Counts first, so that no sum of huge numbers can wrap around to the right one.
        if (blocks < 1).any() or (blocks > lengths.size).any() or int(blocks.sum()) != lengths.size:
            raise FormatError(
                "records do not hold all blocks", where=where, expected=lengths.size, got=blocks.tolist()[:8]
            )
        begins = np.concatenate([[HEADER_BYTES], HEADER_BYTES + np.cumsum(lengths)])
        bad = (lengths < CHECKSUM_BYTES).any() or (lengths > entry.size).any() or (begins < HEADER_BYTES).any()
        if bad or int(begins[-1]) != entry.footer_begin:
            raise FormatError(
                "block lengths do not tile the file", where=where, expected=entry.footer_begin, got=int(begins[-1])
            )
        return cls(entry, begins, np.concatenate([[0], np.cumsum(blocks)]))

    @property
    def records(self) -> int:
        return len(self.first_block) - 1

    def num_blocks(self, record: int) -> int:
        return int(self.first_block[record + 1] - self.first_block[record])

    def block_range(self, record: int, block: int) -> tuple[int, int]:
        """Byte range (begin inclusive, end exclusive) of a block with its checksum."""
        index = int(self.first_block[record]) + block
        return int(self.begins[index]), int(self.begins[index + 1])

    def record_bytes(self) -> np.ndarray:
        """Stored bytes of each record, int64 (records,)."""
        edges = self.begins[self.first_block]
        return np.diff(edges)


def open_block(entry: FileEntry, record: int, block: int, data: bytes | memoryview, *, where: str) -> memoryview:
    """Payload of a block, after its checksum; ``where`` names tensor, shard and frame for the error."""
    payload, stored = memoryview(data)[:-CHECKSUM_BYTES], bytes(data[-CHECKSUM_BYTES:])
    found = checksum(payload, block_seed(entry.nonce, record, block)).to_bytes(CHECKSUM_BYTES, "little")
    if found != stored:
        raise IntegrityError(
            f"checksum of record {record} block {block}",
            where=f"{entry.name}, {where}",
            expected=stored[::-1].hex(),
            got=found[::-1].hex(),
            hint="The stored bytes changed after the save: restore from another checkpoint or copy",
        )
    return payload


def _frame_size(entry: FileEntry, payload: bytes, where: str) -> int:
    """Raw length that the footer's zstd frame announces, if a file of this size can have such a footer."""
    try:
        size = zstandard.frame_content_size(payload)
    except zstandard.ZstdError as error:
        raise FormatError(f"not a zstd frame ({error})", where=where) from error
    blocks_max = (entry.footer_begin - HEADER_BYTES) // CHECKSUM_BYTES
    limit = _COLUMN_HEADS + 2 * blocks_max * _COLUMN_BYTES_MAX
    if not 0 <= size <= limit:
        raise FormatError("implausible footer size", where=where, expected=f"at most {limit}", got=size)
    return size
