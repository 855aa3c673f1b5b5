"""Codec `ratio`: v on a logarithmic lattice, q = m/sqrt(v) on a uniform one, both inside a certified cell (FORMAT.md 4).

Save, per shard:   choose_certificate -> RowCol.fit_frame per frame -> RowCol.combine -> side data
                   encode_frame per frame: kernel -> planes -> decode -> check against the original -> zstd
Load, per shard:   read_private, side data -> decode_frame per frame: planes -> decode -> range -> digest

The check in encode_frame runs the reader's own decoder on the planes that are about to be compressed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
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
_STRIP = 1 << 15
"""Coordinates that are decoded, checked and digested at a time: their arrays stay in the second-level cache."""


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
    """One frame: ``buffers`` to be written back to back, ``escapes`` int64 per cause, and whether its check failed."""

    buffers: list[bytes | np.ndarray]
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
    planes = dispatch.encode(m, v, *terms, params)
    is_escape = _escape_mask(planes)
    num_escapes = int(np.count_nonzero(is_escape))
    escaped = (m[is_escape], v[is_escape]) if num_escapes else None
    digest_m, digest_v, wrong = _decode_and_check(planes, terms, params, m, v, is_escape if num_escapes else None)
    if wrong:
        return EncodedFrame(_exact_frame(m, v), failed=True)
    packed = [pack_plane(plane) for plane in _stored_planes(planes)]
    packed.append(pack_plane(_escape_bytes(*escaped)) if escaped else pack_plane(np.empty(0, np.uint8)))
    head = _HEAD.pack(_CODED, 1 + planes.two_v, 1 + planes.two_q, 0, m.size, num_escapes, digest_m, digest_v)
    table = b"".join(PLANE_ENTRY.pack(coder, len(stored)) for coder, stored in packed)
    buffers = [head + table, *(stored for _, stored in packed)]
    if sum(len(buffer) for buffer in buffers) >= m.nbytes + v.nbytes:
        return EncodedFrame(_exact_frame(m, v))
    return EncodedFrame(buffers, _causes(*escaped, params) if escaped else np.zeros(len(CAUSES), np.int64))


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

    Raises FormatError for a frame that does not parse, IntegrityError for codes out of range, a wrong number of escapes, or (unless
    ``digest`` is False) decoded moments that are not those the writer checked.
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
        bad = dispatch.decode(planes, *terms, params, m, v)
        if bad:
            raise IntegrityError(f"{bad} codes out of the certified range", where=where)
        _put_escapes(planes, escapes, m, v, where)
    else:
        raise FormatError("unknown frame kind", where=where, got=(kind, planes_v, planes_q))
    if digest and (found := (xxhash.xxh3_64_intdigest(m), xxhash.xxh3_64_intdigest(v))) != (digest_m, digest_v):
        raise IntegrityError(
            "digest of the decoded moments",
            where=where,
            expected=f"{digest_m:016x} {digest_v:016x}",
            got="{:016x} {:016x}".format(*found),
        )


def _escape_mask(planes: Planes) -> np.ndarray:
    return (planes.low_v == ESCAPE) & (planes.high_v == 0)


def _stored_planes(planes: Planes) -> list[np.ndarray]:
    v = [planes.low_v, planes.high_v] if planes.two_v else [planes.low_v]
    return v + ([planes.low_q, planes.high_q] if planes.two_q else [planes.low_q])


def _strips(rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Cut a frame into pieces of about `_STRIP` coordinates, each contiguous."""
    if rows == 1:
        for begin in range(0, columns, _STRIP):
            yield slice(0, 1), slice(begin, min(begin + _STRIP, columns))
        return
    step = max(1, _STRIP // max(columns, 1))
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows)), slice(0, columns)


def _decode_and_check(
    planes: Planes,
    terms: tuple[np.ndarray, np.ndarray],
    params: CoderParams,
    m: np.ndarray,
    v: np.ndarray,
    is_escape: np.ndarray | None,
) -> tuple[int, int, int]:
    """Decode as a reader will; returns both digests and the number of coordinates that are wrong."""
    hash_m, hash_v, wrong = xxhash.xxh3_64(), xxhash.xxh3_64(), 0
    r, c = terms
    for rows, columns in _strips(*m.shape):
        strip = Planes(
            *(plane[rows, columns] for plane in (planes.low_v, planes.high_v, planes.low_q, planes.high_q)),
            planes.two_v,
            planes.two_q,
        )
        original_m, original_v = m[rows, columns], v[rows, columns]
        m_hat, v_hat = np.empty((2, *original_m.shape), np.float32)
        wrong += dispatch.decode(strip, r[rows], c[columns], params, m_hat, v_hat)
        if is_escape is not None:
            at = is_escape[rows, columns]
            m_hat[at], v_hat[at] = original_m[at], original_v[at]
        wrong += dispatch.check(original_m, original_v, m_hat, v_hat, params)
        hash_m.update(m_hat)
        hash_v.update(v_hat)
    return hash_m.intdigest(), hash_v.intdigest(), wrong


def _escape_bytes(m: np.ndarray, v: np.ndarray) -> np.ndarray:
    """8 planes back to back: byte i of every m, then of every v."""
    return np.concatenate([x.view(np.uint8).reshape(-1, 4).T.reshape(-1) for x in (m, v)])


def _put_escapes(planes: Planes, escapes: np.ndarray, m: np.ndarray, v: np.ndarray, where: str) -> None:
    at = (planes.low_v == ESCAPE) & (planes.high_v == 0) if planes.two_v else planes.low_v == ESCAPE
    found, expected = int(np.count_nonzero(at)), escapes.size // 8
    if found != expected:
        raise IntegrityError("number of escape symbols", where=where, expected=expected, got=found)
    if expected:
        moments = escapes.reshape(2, 4, expected).transpose(0, 2, 1).copy().view("<f4").reshape(2, expected)
        m[at], v[at] = moments


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


def _exact_frame(m: np.ndarray, v: np.ndarray) -> list[bytes | np.ndarray]:
    frames = [encode_exact(x.reshape(-1).view(np.uint8), 4, rotate=True) for x in (m, v)]
    digests = (xxhash.xxh3_64_intdigest(x) for x in (m, v))
    head = _HEAD.pack(_EXACT, 0, 0, 0, m.size, 0, *digests)
    return [head + _LENGTH.pack(sum(len(buffer) for buffer in frames[0])), *frames[0], *frames[1]]


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
