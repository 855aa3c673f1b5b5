"""Writes the frozen bytes of format version 1 beside this file: run it only when the format changes on purpose.

    python tests/golden/make_golden.py

Inputs come from integer arithmetic and single IEEE operations alone, so that they are the same everywhere.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from unittest import mock

import numpy as np

from guarddcp.certificate import Adam, Certificate, certify, from_plain, to_plain
from guarddcp.codecs import ratio
from guarddcp.codecs.planes import encode_exact
from guarddcp.codecs.predictors import RowCol
from guarddcp.codecs.view import Layout, View
from guarddcp.container import datafile, manifest
from guarddcp.container.datafile import DataFileWriter, FileEntry
from guarddcp.container.records import (
    EXACT,
    PACKED,
    RATIO,
    PackRecord,
    RankPart,
    ShardRecord,
    TensorEntry,
    ValueEntry,
    ValueRecord,
)  # fmt: skip

HERE = Path(__file__).parent
SHAPE = (24, 64)
FRAMES = {"one_plane": "coarse", "two_planes": "fine", "escapes": "coarse", "exact_pair": "coarse"}
"""Name of a frame: which certificate it is coded under."""
EXACT_KINDS = [(1, False), (2, True), (4, True), (4, False), (8, False), (16, False)]
NONCE = bytes(range(16))
DATA_NAME = "0123456789abcdef" * 2 + ".gdcp"
BLOCKS = [[b"side data", b"frame 0", bytes(range(256)) * 3], [b""], [b"a pack"]]


def noise(n: int, salt: int) -> np.ndarray:
    """uint32 (n,): a fixed hash of 0..n-1."""
    x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(salt * 40503)
    for shift in (15, 13, 16):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(2246822519) % np.uint64(2**32)
    return x.astype(np.uint32)


def uniform(n: int, salt: int) -> np.ndarray:
    """float64 (n,) in [0, 1): exact multiples of 2^-32."""
    return noise(n, salt) * 2.0**-32


def moments(name: str) -> tuple[np.ndarray, np.ndarray]:
    """m, v float32 SHAPE of one frame."""
    rows, columns = SHAPE
    n, octaves = rows * columns, {"two_planes": 6}.get(name, 1)
    exponent = (
        np.repeat(-60 + 2 * np.arange(rows), columns)
        + (noise(n, 1) % octaves).astype(int)
        + np.tile(np.arange(columns) % 3, rows)
    )
    v = np.ldexp(1 + uniform(n, 2), exponent).astype(np.float32)
    q = (uniform(n, 3) + uniform(n, 4) - 1) * 1.5
    m = (q * np.sqrt(v.astype(np.float64))).astype(np.float32)
    if name == "escapes":
        odd = np.array([0x7FC00001, 0xFF800000, 0x80000000, 0x00000009, 0x7F7FFFFF, 0xC0000000], np.uint32).view(
            np.float32
        )
        v[::97][: len(odd)], m[5::101][: len(odd)], m[7] = odd, odd, 1e6
        v[n // 2 :][:200], m[n // 2 :][:200] = 0, 0
    if name == "exact_pair":
        m, v = (
            (np.uint32(0x80000000) | noise(n, 5)).view(np.float32),
            (np.uint32(0x80000000) | noise(n, 6)).view(np.float32),
        )
    return m.reshape(SHAPE), v.reshape(SHAPE)


def layout() -> Layout:
    return Layout(SHAPE, View((0, 1), 1), 1 << 20)


def predictor(cert: Certificate) -> RowCol:
    """One for all frames: fitted to the first, so that it fits some badly."""
    whole, params = layout(), ratio.params_of(cert)
    fit = RowCol.fit_frame(moments("one_plane")[1], whole.frame(0), whole, params)
    return RowCol.combine(whole, [fit], params)


def encode_frames(certificates: dict[str, Certificate]) -> dict[str, bytes]:
    found = {}
    for name, which in FRAMES.items():
        terms = predictor(certificates[which]).terms(layout().frame(0))
        frame = ratio.encode_frame(*moments(name), terms, ratio.params_of(certificates[which]))
        assert not frame.failed
        found[name] = b"".join(map(bytes, frame.buffers))
    return found


def decode(frame: bytes, side: bytes, cert: Certificate) -> bytes:
    """m^ and v^ of a frame, as bytes, from side data and certificate alone."""
    whole = layout()
    terms = RowCol.decode(memoryview(side), whole, where="golden").terms(whole.frame(0))
    m, v = np.empty((2, *SHAPE), np.float32)
    ratio.decode_frame(memoryview(frame), whole.frame(0), terms, ratio.params_of(cert), m, v, where="golden")
    return m.astype("<f4").tobytes() + v.astype("<f4").tobytes()


def exact_raw(item_bytes: int) -> np.ndarray:
    """uint8: items whose planes are partly noise, partly constant."""
    values = noise(300 * item_bytes, item_bytes).astype(np.uint8)
    values.reshape(-1, item_bytes)[:, item_bytes // 2 :] &= 3
    return values


def exact_frames() -> dict[str, bytes]:
    frames = {}
    for item_bytes, rotate in EXACT_KINDS:
        pieces = encode_exact(exact_raw(item_bytes), item_bytes, rotate=rotate)
        frames[f"exact_{item_bytes}{'_rotated' * rotate}"] = b"".join(map(bytes, pieces))
    return frames


def data_file() -> tuple[bytes, FileEntry]:
    stream = io.BytesIO()
    with mock.patch.object(datafile.secrets, "token_bytes", lambda n: NONCE[:n]):
        writer = DataFileWriter(stream, DATA_NAME, 1)
    for blocks in BLOCKS:
        writer.begin_record()
        for block in blocks:
            writer.write_block([block])
    entry = writer.finish()
    return stream.getvalue(), entry


def build_manifest(certificates: dict[str, Certificate]) -> manifest.Manifest:
    """Two ranks, a pair in two chunks, an exact tensor, a packed scalar, two values."""
    entries = [
        TensorEntry("model.w", "bfloat16", (6, 4), True),
        TensorEntry("optim.state.w.exp_avg", "float32", (6, 4)),
        TensorEntry("optim.state.w.exp_avg_sq", "float32", (6, 4)),
        TensorEntry("optim.state.w.step", "float32", ()),
        ValueEntry("optim.lr", "plain"),
        ValueEntry("odd", "pickle"),
    ]
    pair = (("m", entries[1].key), ("v", entries[2].key))
    private = ratio.Private(1 << 20, ((1, 1, 60),)).to_bytes()
    view, flat = View((0, 1), 1), View((0, 1), 0)
    moment = ShardRecord(
        pair, (0, 0), (4, 4), RATIO, view, certificates["coarse"], private, bytes=200, escapes=(0, 1, 0, 0, 2, 0, 0)
    )
    second = ShardRecord(
        pair,
        (4, 0),
        (2, 4),
        RATIO,
        View((1, 0), 1),
        certificates["fine"],
        private,
        bytes=150,
        failed=1,
        escapes=(0,) * 7,
    )
    shards = [
        [
            ShardRecord((("x", "model.w"),), (0, 0), (6, 4), EXACT, flat, None, b"\0\0\1\0", "codec: exact", 0, 1, 90),
            moment,
            ShardRecord((("x", entries[3].key),), (), (), PACKED, bytes=4, pack=0),
        ],
        [second],
    ]  # fmt: skip
    values = [[ValueRecord("optim.lr", "plain", 0, 4, 30), ValueRecord("odd", "pickle", 0, 34, 12)], []]
    sizes = (200 + 90 + 70, 150)
    files = [
        FileEntry(f"{rank:032x}.gdcp", bytes([rank]) * 16, 32 + size + 40 + 24, 40, 7 << 60 | rank, rank)
        for rank, size in enumerate(sizes)
    ]
    packs = [(PackRecord(0, 2, 70, 46),), ()]
    parts = [(RankPart(rank, (files[rank],), packs[rank]), shards[rank], values[rank]) for rank in (0, 1)]
    fields = dict(guard={"tolerance": 0.05}, writer="guarddcp golden", planner_data="null", storage_meta="[]")
    made = manifest.build(entries, parts, **fields)
    made.created = "2025-01-01T00:00:00+00:00"
    return made


def read_certificates() -> dict[str, Certificate]:
    plain = json.loads((HERE / "certificates.json").read_text())
    return {name: from_plain(record) for name, record in plain.items()}


def main() -> None:
    rule = Adam(betas=(0.9, 0.999), eps=1e-8)
    made = {
        "coarse": certify(rule, 1000, tolerance=0.05, horizon="all", rounding_share=0.05, q_max=2.0),
        "fine": certify(rule, 1000, tolerance=0.001, horizon=1, rounding_share=0.05, q_max=2.0),
    }
    text = json.dumps({name: to_plain(cert) for name, cert in made.items()}, indent=1)
    (HERE / "certificates.json").write_text(text + "\n")
    frames = encode_frames(made)
    files = {f"ratio_{name}.bin": frame for name, frame in frames.items()} | {
        f"side_{name}.bin": b"".join(map(bytes, predictor(cert).encode())) for name, cert in made.items()
    }
    for name, frame in frames.items():
        files[f"decoded_{name}.bin"] = decode(frame, files[f"side_{FRAMES[name]}.bin"], made[FRAMES[name]])
    files |= {f"{name}.bin": frame for name, frame in exact_frames().items()}
    files |= {"data_file.bin": data_file()[0], "manifest.bin": manifest.to_bytes(build_manifest(made))}
    for name, content in files.items():
        (HERE / name).write_bytes(content)
    sys.stdout.write(f"{len(files) + 1} files, {sum(map(len, files.values()))} bytes\n")


if __name__ == "__main__":
    main()
