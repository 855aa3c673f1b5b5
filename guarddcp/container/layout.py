"""Magic numbers, checksums and integer columns: the parts that data files and the manifest share (FORMAT.md 1, 5)."""

from __future__ import annotations

import struct

import numpy as np
import xxhash
import zstandard

from guarddcp.errors import FormatError, IntegrityError

__all__ = [
    "CHECKSUM_BYTES", "DATA_MAGIC", "DATA_SUFFIX", "FOOTER_MAGIC", "HEADER_BYTES", "MANIFEST_MAGIC", "MANIFEST_NAME",
    "NONCE_BYTES", "TRAILER", "VERSION",
    "block_seed", "checksum", "compress", "decompress", "footer_seed", "pack_columns", "unpack_columns",
]  # fmt: skip

VERSION = 1
MANIFEST_NAME = ".metadata"
DATA_SUFFIX = ".gdcp"
DATA_MAGIC = b"GDCPDATA"
FOOTER_MAGIC = b"GDCPFOOT"
MANIFEST_MAGIC = b"\x89GDCPMAN"
NONCE_BYTES = 16
HEADER_BYTES = 32
CHECKSUM_BYTES = 8
TRAILER = struct.Struct("<QQ8s")

_COLUMN_HEAD = struct.Struct("<BBQ")


def checksum(data: bytes | memoryview | np.ndarray, seed: int = 0) -> int:
    """XXH3-64 of a buffer."""
    return xxhash.xxh3_64_intdigest(data, seed=seed)


def block_seed(nonce: bytes, record: int, block: int) -> int:
    """Seed of a block's checksum: its file, record and number (FORMAT.md 1.1)."""
    return checksum(nonce + struct.pack("<II", record, block))


def footer_seed(nonce: bytes) -> int:
    return checksum(nonce)


def compress(data: bytes | memoryview, level: int = 1) -> bytes:
    """One zstd frame with content size and content checksum."""
    return zstandard.ZstdCompressor(level=level, write_checksum=True).compress(data)


def decompress(data: bytes | memoryview, raw_length: int, *, where: str) -> bytes:
    """The ``raw_length`` bytes of one zstd frame; the length is compared before anything is allocated."""
    try:
        content_size = zstandard.frame_content_size(data)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"not a zstd frame ({error})", where=where) from error
    if content_size != raw_length:
        raise IntegrityError("zstd frame of another size", where=where, expected=raw_length, got=content_size)
    try:
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=raw_length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"damaged zstd frame ({error})", where=where) from error


def pack_columns(columns: dict[str, np.ndarray]) -> bytes:
    """Integer columns as bytes that compress well (FORMAT.md 5); values are taken as int64."""
    parts = []
    for name, column in columns.items():
        values = np.ascontiguousarray(column, dtype=np.int64)
        plain, differences = _zigzag(values), _zigzag(np.diff(values, prepend=0))
        transform, stored = (1, differences) if _width(differences) < _width(plain) else (0, plain)
        width = _width(stored)
        planes = stored.view(np.uint8).reshape(-1, 8)[:, :width]
        encoded = name.encode("ascii")
        parts += [bytes([len(encoded)]), encoded, _COLUMN_HEAD.pack(transform, width, values.size)]
        parts.append(np.ascontiguousarray(planes.T).tobytes())
    return b"".join(parts)


def unpack_columns(data: bytes | memoryview, *, where: str) -> dict[str, np.ndarray]:
    """Inverse of `pack_columns`: int64 arrays by name. Raises FormatError on anything that does not parse exactly."""
    view, at, columns = memoryview(data), 0, {}
    while at < len(view):
        length = view[at]
        name = bytes(view[at + 1 : at + 1 + length])
        at += 1 + length
        if len(name) != length or at + _COLUMN_HEAD.size > len(view) or not name.isascii():
            raise FormatError("column header is cut off or not ASCII", where=where, got=repr(name))
        text = name.decode("ascii")
        transform, width, count = _COLUMN_HEAD.unpack_from(view, at)
        at += _COLUMN_HEAD.size
        if transform > 1 or not 1 <= width <= 8 or text in columns:
            raise FormatError(
                f"column {text!r}: bad transform or width, or a repeated name", where=where, got=(transform, width)
            )
        if count * width > len(view) - at:
            raise FormatError(f"column {text!r} is cut off", where=where, expected=count * width, got=len(view) - at)
        stored = np.zeros((count, 8), np.uint8)
        stored[:, :width] = np.frombuffer(view, np.uint8, count * width, at).reshape(width, count).T
        at += count * width
        number = stored.reshape(-1).view("<u8").astype(np.uint64)
        values = ((number >> np.uint64(1)) ^ (np.uint64(0) - (number & np.uint64(1)))).view(np.int64)
        columns[text] = np.cumsum(values, dtype=np.int64) if transform else values
    return columns


def _zigzag(values: np.ndarray) -> np.ndarray:
    return ((values << 1) ^ (values >> 63)).view(np.uint64)


def _width(values: np.ndarray) -> int:
    largest = int(values.max(initial=0))
    return max(1, (largest.bit_length() + 7) // 8)
