"""Codec `ratio`: v on a logarithmic lattice, q = m/sqrt(v) on a uniform one, in a certified cell (FORMAT.md 4).

Save, per shard:   choose_certificate -> RowCol.fit_frame per frame -> RowCol.combine -> side data
                   encode_frame per frame: kernel -> planes -> decode -> check against the original -> zstd
Load, per shard:   read_private, side data -> decode_frame per frame: planes -> decode -> range -> digest

The check in encode_frame runs the reader's own decoder on the planes that are about to be compressed.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass, field

import numpy as np
import xxhash

from guarddcp.certificate import Certificate
from guarddcp.codecs.planes import (
    PLANE_ENTRY,
    decode_exact,
    encode_exact,
    pack_plane,
    unpack_planes,
)  # fmt: skip
from guarddcp.codecs.predictors import KNOWN, RowCol
from guarddcp.codecs.view import Frame, Layout
from guarddcp.errors import FormatError, IntegrityError
from guarddcp.kernels import dispatch
from guarddcp.kernels.dispatch import Planes
from guarddcp.kernels.params import ESCAPE, CoderParams, coder_params

__all__ = [
    "CAUSES", "FRAME_COORDINATES", "EncodedFrame", "Private",
    "decode_frame", "decode_side", "encode_frame", "encode_side", "params_of",
]  # fmt: skip

FRAME_COORDINATES = 1 << 20

CAUSES = ("not_finite", "negative_v", "zero_v", "small_v", "large_v", "q_range", "residual_range")
"""Why a coordinate escaped, in the order in which causes are told apart (`_causes`)."""

_HEAD = struct.Struct("<BBBBIIQQ")
_LENGTH = struct.Struct("<I")
_PRIVATE = struct.Struct("<IB")
_PREDICTOR = struct.Struct("<BBI")
_CODED, _EXACT = 0, 1
_STRIP = 1 << 17
"""Coordinates that are decoded, checked and digested at a time: their arrays stay in the cache."""


class _Scratch(threading.local):
    """One thread's planes and decoded strips, kept from frame to frame: fresh pages would cost more than the codes."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)
        self._floats = np.empty(0, np.float32)

    def planes(self, rows: int, columns: int) -> Planes:
        if self._bytes.size < 4 * rows * columns:
            self._bytes = np.empty(4 * max(rows * columns, _STRIP), np.uint8)
        return Planes(*self._bytes[: 4 * rows * columns].reshape(4, rows, columns))

    def moments(self, coordinates: int) -> tuple[np.ndarray, np.ndarray]:
        if self._floats.size < 2 * coordinates:
            self._floats = np.empty(2 * max(coordinates, _STRIP), np.float32)
        return self._floats[:coordinates], self._floats[coordinates : 2 * coordinates]


_thread = _Scratch()


@dataclass(frozen=True)
class Private:
    """Codec-private part of a shard: frame size, and (id, version, length of its part) per predictor."""

    frame_coordinates: int
    predictors: tuple[tuple[int, int, int], ...]

    def to_bytes(self) -> bytes:
        parts = b"".join(_PREDICTOR.pack(*predictor) for predictor in self.predictors)
        return _PRIVATE.pack(self.frame_coordinates, len(self.predictors)) + parts

    @classmethod
    def from_bytes(cls, data: bytes, *, where: str) -> Private:
        if len(data) < _PRIVATE.size:
            raise FormatError("codec-private part is cut off", where=where, got=len(data))
        frame_coordinates, count = _PRIVATE.unpack_from(data)
        if len(data) != _PRIVATE.size + count * _PREDICTOR.size or not 1 <= frame_coordinates <= FRAME_COORDINATES:
            raise FormatError("codec-private part does not parse", where=where, got=data.hex())
        predictors = tuple(_PREDICTOR.unpack_from(data, _PRIVATE.size + i * _PREDICTOR.size) for i in range(count))
        for number, version, _ in predictors:
            if (number, version) not in KNOWN:
                raise FormatError(
                    f"unknown predictor {number} version {version}",
                    where=where,
                    expected=f"one of {sorted(KNOWN)}",
                    hint="A newer guarddcp wrote this checkpoint: upgrade",
                )
        if len(predictors) != 1:
            raise FormatError("this version reads exactly one predictor per shard", where=where, got=len(predictors))
        return cls(frame_coordinates, predictors)


@dataclass
class EncodedFrame:
    """One frame: its bytes in pieces, ``escapes`` int64 per cause, and whether its check failed."""

    buffers: list[bytes]
    escapes: np.ndarray = field(default_factory=lambda: np.zeros(len(CAUSES), np.int64))
    failed: bool = False


def params_of(certificate: Certificate) -> CoderParams:
    """Kernel constants of a certificate's cell."""
    cell = certificate.cell
    return coder_params(
        cell.levels_per_octave, cell.delta, cell.q_max, cell.h, cell.w, certificate.v_min, certificate.v_max
    )


def encode_side(
    predictor: RowCol, frame_coordinates: int = FRAME_COORDINATES
) -> tuple[Private, list[bytes | np.ndarray]]:
    """The codec-private part and the buffers of the side data."""
    buffers = predictor.encode()
    length = sum(len(buffer) for buffer in buffers)
    return Private(frame_coordinates, ((predictor.id, predictor.version, length),)), buffers


def decode_side(private: Private, side: memoryview, layout: Layout, *, where: str) -> RowCol:
    ((number, version, length),) = private.predictors
    if length != len(side):
        raise FormatError("side data of another length", where=where, expected=length, got=len(side))
    return KNOWN[number, version].decode(side, layout, where=where)


def encode_frame(
    m: np.ndarray, v: np.ndarray, terms: tuple[np.ndarray, np.ndarray], params: CoderParams
) -> EncodedFrame:
    """Encode one frame of float32 moments, C-contiguous (rows, columns), and check every coordinate of it.

    ``terms``: the predictor's (r, c) for this frame. A frame that fails the check, or that codes do not make smaller,
    comes back exact; only the former sets ``failed``.
    """
    planes = dispatch.encode(m, v, *terms, params, _thread.planes(*m.shape))
    digest_m, digest_v, wrong, num_escapes = _decode_and_check(planes, terms, params, m, v)
    if wrong:
        return EncodedFrame(_exact_frame(m, v), failed=True)
    packed = [pack_plane(plane, probe=False) for plane in _stored_planes(planes)]
    escapes, causes = np.empty(0, np.uint8), np.zeros(len(CAUSES), np.int64)
    if num_escapes:
        at = _escaped(planes)
        escaped = m.reshape(-1)[at], v.reshape(-1)[at]
        escapes, causes = _escape_bytes(*escaped), _causes(*escaped, params)
    packed.append(pack_plane(escapes))
    head = _HEAD.pack(_CODED, 1 + planes.two_v, 1 + planes.two_q, 0, m.size, num_escapes, digest_m, digest_v)
    table = b"".join(PLANE_ENTRY.pack(coder, len(stored)) for coder, stored in packed)
    # Raw planes are views of scratch that the next frame overwrites.
    buffers = [head + table, *(s if isinstance(s, bytes) else s.tobytes() for _, s in packed)]
    if sum(map(len, buffers)) >= m.nbytes + v.nbytes:
        return EncodedFrame(_exact_frame(m, v))
    return EncodedFrame(buffers, causes)


def decode_frame(
    payload: memoryview,
    frame: Frame,
    terms: tuple[np.ndarray, np.ndarray],
    params: CoderParams,
    m: np.ndarray,
    v: np.ndarray,
    *,
    where: str,
    digest: bool = True,
) -> None:
    """Decode one frame into m, v: float32, C-contiguous (frame.rows, frame.columns).

    Raises FormatError for a frame that does not parse, IntegrityError for codes out of range, a wrong number of
    escapes, or (unless ``digest`` is False) decoded moments that are not those the writer checked.
    """
    if len(payload) < _HEAD.size:
        raise FormatError("frame is cut off", where=where, expected=f">= {_HEAD.size} bytes", got=len(payload))
    kind, planes_v, planes_q, reserved, n, num_escapes, digest_m, digest_v = _HEAD.unpack_from(payload)
    if n != m.size or num_escapes > n or reserved:
        raise FormatError("frame header", where=where, expected=f"{m.size} coordinates", got=(n, num_escapes, reserved))
    body = payload[_HEAD.size :]
    if kind == _EXACT:
        _decode_exact_frame(body, m, v, where)
        if (planes_v, planes_q, num_escapes) != (0, 0, 0):
            raise FormatError("frame header", where=where, got=(kind, planes_v, planes_q, num_escapes))
    elif kind == _CODED and planes_v in (1, 2) and planes_q in (1, 2):
        planes, escapes = _read_planes(body, planes_v, planes_q, num_escapes, m.shape, where)
        bad, found_escapes = dispatch.decode(planes, *terms, params, m, v)
        if bad:
            raise IntegrityError(f"{bad} codes out of the certified range", where=where)
        if found_escapes != num_escapes:
            raise IntegrityError("number of escape symbols", where=where, expected=num_escapes, got=found_escapes)
        if num_escapes:
            _put_escapes(planes, escapes, m, v)
    else:
        raise FormatError("unknown frame kind", where=where, got=(kind, planes_v, planes_q))
    if digest and (found := (xxhash.xxh3_64_intdigest(m), xxhash.xxh3_64_intdigest(v))) != (digest_m, digest_v):
        raise IntegrityError(
            "digest of the decoded moments",
            where=where,
            expected=f"{digest_m:016x} {digest_v:016x}",
            got="{:016x} {:016x}".format(*found),
        )


def _escaped(planes: Planes) -> np.ndarray:
    """Flat places of the escapes, int64."""
    at = planes.low_v == ESCAPE
    return np.flatnonzero(at & (planes.high_v == 0) if planes.two_v else at)


def _stored_planes(planes: Planes) -> list[np.ndarray]:
    v = [planes.low_v, planes.high_v] if planes.two_v else [planes.low_v]
    return v + ([planes.low_q, planes.high_q] if planes.two_q else [planes.low_q])


def _decode_and_check(
    planes: Planes, terms: tuple[np.ndarray, np.ndarray], params: CoderParams, m: np.ndarray, v: np.ndarray
) -> tuple[int, int, int, int]:
    """Decode as a reader will; returns both digests, the number of wrong coordinates and that of escapes."""
    hash_m, hash_v, wrong, num_escapes = xxhash.xxh3_64(), xxhash.xxh3_64(), 0, 0
    flat_m, flat_v = m.reshape(-1), v.reshape(-1)
    for begin in range(0, m.size, _STRIP):
        part = slice(begin, min(begin + _STRIP, m.size))
        m_hat, v_hat = _thread.moments(part.stop - begin)
        found = dispatch.decode_and_check(planes, *terms, params, part, flat_m[part], flat_v[part], m_hat, v_hat)
        wrong, num_escapes = wrong + found[0], num_escapes + found[1]
        hash_m.update(m_hat)
        hash_v.update(v_hat)
    return hash_m.intdigest(), hash_v.intdigest(), wrong, num_escapes


def _escape_bytes(m: np.ndarray, v: np.ndarray) -> np.ndarray:
    """8 planes back to back: byte i of every m, then of every v."""
    return np.concatenate([x.view(np.uint8).reshape(-1, 4).T.reshape(-1) for x in (m, v)])


def _put_escapes(planes: Planes, escapes: np.ndarray, m: np.ndarray, v: np.ndarray) -> None:
    at = _escaped(planes)
    m.reshape(-1)[at], v.reshape(-1)[at] = escapes.reshape(2, 4, -1).transpose(0, 2, 1).copy().view("<f4")[..., 0]


def _read_planes(
    body: memoryview, planes_v: int, planes_q: int, num_escapes: int, shape: tuple[int, ...], where: str
) -> tuple[Planes, np.ndarray]:
    count = planes_v + planes_q + 1
    begin = count * PLANE_ENTRY.size
    if len(body) < begin:
        raise FormatError("plane table is cut off", where=where, expected=begin, got=len(body))
    table = [PLANE_ENTRY.unpack_from(body, i * PLANE_ENTRY.size) for i in range(count)]
    n = shape[0] * shape[1]
    *symbols, escapes = unpack_planes(body[begin:], table, [n] * (count - 1) + [8 * num_escapes], where=where)
    low_v, high_v, low_q, high_q = (
        plane.reshape(shape)
        for plane in (symbols[0], symbols[planes_v - 1], symbols[planes_v], symbols[planes_v + planes_q - 1])
    )
    return Planes(low_v, high_v, low_q, high_q, planes_v == 2, planes_q == 2), escapes


def _exact_frame(m: np.ndarray, v: np.ndarray) -> list[bytes]:
    frames = [encode_exact(x.reshape(-1).view(np.uint8), 4, rotate=True) for x in (m, v)]
    digests = (xxhash.xxh3_64_intdigest(x) for x in (m, v))
    head = _HEAD.pack(_EXACT, 0, 0, 0, m.size, 0, *digests)
    length = _LENGTH.pack(sum(len(buffer) for buffer in frames[0]))
    return [head + length, *(bytes(buffer) for frame in frames for buffer in frame)]


def _decode_exact_frame(body: memoryview, m: np.ndarray, v: np.ndarray, where: str) -> None:
    if len(body) < _LENGTH.size:
        raise FormatError("exact frame is cut off", where=where, got=len(body))
    (length,) = _LENGTH.unpack_from(body)
    first, second = body[_LENGTH.size : _LENGTH.size + length], body[_LENGTH.size + length :]
    for target, part in ((m, first), (v, second)):
        target.reshape(-1).view(np.uint8)[...] = decode_exact(part, target.nbytes, where=where)


def _causes(m: np.ndarray, v: np.ndarray, params: CoderParams) -> np.ndarray:
    """Escapes by cause: the first of `CAUSES` that holds."""
    with np.errstate(all="ignore"):
        tests = (
            ~(np.isfinite(m) & np.isfinite(v)),
            np.signbit(v),
            v == 0,
            v < params.v_min,
            v > params.v_max,
            np.abs(np.rint(m / np.sqrt(v) * params.delta_reciprocal)) > params.code_max,
        )
    first = np.full(m.size, len(tests))
    for number in reversed(range(len(tests))):
        first[tests[number]] = number
    return np.bincount(first, minlength=len(CAUSES)).astype(np.int64)
