"""Byte planes with an entropy coder each, and the exact frame built on them (FORMAT.md 3).

Byte i of every item goes into plane i; a plane is stored through zstd where that pays and raw where it does not.
"""

from __future__ import annotations

import struct
import threading

import numpy as np
import xxhash
import zstandard

from guarddcp.errors import FormatError, IntegrityError

__all__ = [
    "PLANE_ENTRY",
    "RAW",
    "ZSTD",
    "decode_exact",
    "encode_exact",
    "exact_raw_bytes",
    "pack_plane",
    "unpack_planes",
]

RAW, ZSTD = 0, 1
PLANE_ENTRY = struct.Struct("<BQ")
"""Per plane: coder, stored length."""

_HEAD = struct.Struct("<BBHQQ")
_ITEM_SIZES = (1, 2, 4, 8, 16)
_PROBE_BYTES, _PROBES = 1 << 16, 8
"""A plane longer than four times the bytes is judged by so many, in evenly spread pieces, before it is compressed."""
_EXPANSION_MAX = 1 << 15
"""No zstd frame holds more bytes than this times its own: a block takes at least 4 bytes and gives at most 128 KiB."""
_PAYS = 0.97
"""Stored over raw bytes up to which zstd is worth its time on the way back."""


def pack_plane(plane: np.ndarray, *, probe: bool = True) -> tuple[int, bytes | np.ndarray]:
    """(coder, stored bytes) of one uint8 plane, contiguous; the same plane always gives the same bytes.

    ``probe=False`` for planes that are known to compress: a long plane is not judged by a sample first.
    """
    flat = plane.reshape(-1)
    compressor = _compressor()
    if probe and flat.size > 4 * _PROBE_BYTES:
        pieces = flat[: flat.size // _PROBES * _PROBES].reshape(_PROBES, -1)
        sample = pieces[:, : _PROBE_BYTES // _PROBES].copy()
        if len(compressor.compress(sample.data)) > _PAYS * sample.size:
            return RAW, flat
    packed = compressor.compress(flat.data)
    return (ZSTD, packed) if len(packed) <= _PAYS * flat.size else (RAW, flat)


_contexts = threading.local()


def _compressor() -> zstandard.ZstdCompressor:
    """This thread's compressor: a context may serve one thread at a time, and a new one costs its page faults."""
    if not hasattr(_contexts, "compressor"):
        _contexts.compressor = zstandard.ZstdCompressor(level=1, write_checksum=True)
    return _contexts.compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_contexts, "decompressor"):
        _contexts.decompressor = zstandard.ZstdDecompressor()
    return _contexts.decompressor


def unpack_planes(
    payload: memoryview, table: list[tuple[int, int]], raw_lengths: list[int], *, where: str
) -> list[np.ndarray]:
    """The planes (uint8) that lie back to back in ``payload`` and must fill it exactly."""
    if sum(stored for _, stored in table) != len(payload):
        raise FormatError(
            "planes do not fill their frame", where=where, expected=len(payload), got=sum(s for _, s in table)
        )
    planes, at = [], 0
    for number, ((coder, stored), raw_length) in enumerate(zip(table, raw_lengths, strict=True)):
        planes.append(_unpack(coder, payload[at : at + stored], raw_length, f"{where} plane {number}"))
        at += stored
    return planes


def _unpack(coder: int, stored: memoryview, raw_length: int, where: str) -> np.ndarray:
    if coder == RAW:
        if len(stored) != raw_length:
            raise FormatError("raw plane of another length", where=where, expected=raw_length, got=len(stored))
        return np.frombuffer(stored, np.uint8)
    if coder != ZSTD:
        raise FormatError("unknown entropy coder", where=where, expected="0 (raw) or 1 (zstd)", got=coder)
    try:
        if zstandard.frame_content_size(stored) != raw_length or raw_length > _EXPANSION_MAX * len(stored):
            raise FormatError("zstd plane of another size", where=where, expected=raw_length)
        data = _decompressor().decompress(stored, max_output_size=raw_length, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"damaged zstd plane ({error})", where=where) from error
    if len(data) != raw_length:
        raise IntegrityError("zstd plane of another size", where=where, expected=raw_length, got=len(data))
    return np.frombuffer(data, np.uint8)


def encode_exact(raw: np.ndarray, item_bytes: int, *, rotate: bool) -> list[bytes | np.ndarray]:
    """Buffers of one exact frame from the bytes (uint8) of items of ``item_bytes``; ``rotate``: floats of 2 or 4."""
    planes = split_items(raw, item_bytes, rotate)
    packed = [pack_plane(plane) for plane in planes]
    head = _HEAD.pack(int(rotate), item_bytes, 0, raw.size, xxhash.xxh3_64_intdigest(raw))
    table = b"".join(PLANE_ENTRY.pack(coder, len(stored)) for coder, stored in packed)
    return [head + table, *(stored for _, stored in packed)]


def exact_raw_bytes(payload: memoryview, *, where: str) -> int:
    """Raw length that an exact frame's header announces."""
    if len(payload) < _HEAD.size:
        raise FormatError("exact frame is cut off", where=where, expected=f">= {_HEAD.size} bytes", got=len(payload))
    return int(_HEAD.unpack_from(payload)[3])


def decode_exact(payload: memoryview, raw_length: int, *, where: str) -> np.ndarray:
    """The raw bytes (uint8, fresh, writable) of one exact frame whose length the caller already knows."""
    exact_raw_bytes(payload, where=where)
    transform, item_bytes, reserved, length, digest = _HEAD.unpack_from(payload)
    if transform > 1 or item_bytes not in _ITEM_SIZES or reserved or (transform and item_bytes not in (2, 4)):
        raise FormatError("unknown exact frame header", where=where, got=(transform, item_bytes, reserved))
    if length != raw_length or length % item_bytes:
        raise FormatError("exact frame of another length", where=where, expected=raw_length, got=length)
    begin = _HEAD.size + item_bytes * PLANE_ENTRY.size
    if len(payload) < begin:
        raise FormatError("exact frame is cut off", where=where, expected=f">= {begin} bytes", got=len(payload))
    table = [PLANE_ENTRY.unpack_from(payload, _HEAD.size + i * PLANE_ENTRY.size) for i in range(item_bytes)]
    planes = unpack_planes(payload[begin:], table, [length // item_bytes] * item_bytes, where=where)
    raw = join_items(planes, bool(transform))
    if (found := xxhash.xxh3_64_intdigest(raw)) != digest:
        raise IntegrityError("digest of decoded bytes", where=where, expected=f"{digest:016x}", got=f"{found:016x}")
    return raw


def split_items(raw: np.ndarray, item_bytes: int, rotate: bool) -> list[np.ndarray]:
    """Byte planes, lowest byte first."""
    if item_bytes == 1:
        return [raw]
    if rotate:
        items = raw.view(f"<u{item_bytes}")
        one = items.dtype.type(1)
        raw = ((items << one) | (items >> items.dtype.type(8 * item_bytes - 1))).view(np.uint8)
    return [np.ascontiguousarray(raw.reshape(-1, item_bytes)[:, i]) for i in range(item_bytes)]


def join_items(planes: list[np.ndarray], rotate: bool) -> np.ndarray:
    """Inverse of `split_items`."""
    item_bytes = len(planes)
    raw = np.empty((planes[0].size, item_bytes), np.uint8)
    for i, plane in enumerate(planes):
        raw[:, i] = plane
    flat = raw.reshape(-1)
    if rotate:
        items = flat.view(f"<u{item_bytes}")
        one = items.dtype.type(1)
        items[...] = (items >> one) | (items << items.dtype.type(8 * item_bytes - 1))
    return flat
