"""Moment pairs to encode, a whole shard there and back, and the float64 oracle of a cell."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from guarddcp.certificate import Adam, Certificate, certify
from guarddcp.codecs import ratio
from guarddcp.codecs.predictors import RowCol
from guarddcp.codecs.view import Layout, default_view

RULE = Adam(betas=(0.9, 0.999), eps=1e-8)
SETTINGS = {  # name: (rule, step, tolerance, horizon, Q)
    "0.2": (RULE, 1000, 0.2, "all", 4.0),
    "0.1": (RULE, 141, 0.1, "all", 7.27),
    "0.01": (RULE, 1000, 0.01, "all", 2.0),
    "0.01 at step 1": (RULE, 1, 0.01, "all", 3.0),
    "0.01 for b2 = 0.95": (Adam(betas=(0.9, 0.95), eps=1e-8), 300, 0.01, "all", 1.16),
    "0.01 for b1 = 0": (Adam(betas=(0.0, 0.99), eps=1e-8), 7, 0.01, "all", 1.0),
    "0.01 without eps": (Adam(betas=(0.9, 0.999), eps=0.0), 141, 0.01, 10, 2.0),
    "1e-3": (RULE, 1000, 1e-3, "all", 3.0),
    "1e-4": (RULE, 1000, 1e-4, 1, 1.0),
}


def certificate(name: str = "0.01") -> Certificate:
    rule, step, tolerance, horizon, q_max = SETTINGS[name]
    return certify(rule, step, tolerance=tolerance, horizon=horizon, rounding_share=0.05, q_max=q_max)


@dataclass
class Coded:
    """A shard as stored: its private part, side data and frames, and what the encoder said of them."""

    layout: Layout
    cert: Certificate
    private: bytes
    side: bytes
    frames: list[bytes]
    escapes: np.ndarray
    failed: int

    @property
    def stored(self) -> int:
        return len(self.private) + len(self.side) + sum(map(len, self.frames))


def blocks_of(x: np.ndarray, layout: Layout) -> list[np.ndarray]:
    """The frames of a C-contiguous array, (rows, columns) each."""
    flat = np.ascontiguousarray(x).reshape(-1)
    return [flat[f.begin : f.end].reshape(f.rows, f.columns) for f in layout.frames()]


def fitted(v: np.ndarray, layout: Layout, cert: Certificate) -> RowCol:
    """The predictor that a save would find."""
    params, pairs = ratio.params_of(cert), zip(layout.frames(), blocks_of(v, layout), strict=True)
    return RowCol.combine(layout, [RowCol.fit_frame(block, frame, layout, params) for frame, block in pairs], params)


def encode(m: np.ndarray, v: np.ndarray, cert: Certificate, frame_coordinates: int = 1 << 20) -> Coded:
    """Fit and encode a shard as a save does; m, v float32 of any shape."""
    layout, params = Layout(m.shape, default_view(m.shape), frame_coordinates), ratio.params_of(cert)
    predictor = fitted(v, layout, cert)
    private, side = ratio.encode_side(predictor, frame_coordinates)
    blocks = zip(layout.frames(), blocks_of(m, layout), blocks_of(v, layout), strict=True)
    coded = [ratio.encode_frame(m_block, v_block, predictor.terms(f), params) for f, m_block, v_block in blocks]
    return Coded(
        layout, cert, private.to_bytes(), b"".join(map(bytes, side)), [b"".join(map(bytes, f.buffers)) for f in coded],
        np.sum([f.escapes for f in coded], axis=0), sum(f.failed for f in coded),
    )  # fmt: skip


def decode(coded: Coded, **options) -> tuple[np.ndarray, np.ndarray]:
    """m^, v^ of the whole shard from its stored bytes and its certificate alone."""
    private = ratio.Private.from_bytes(coded.private, where="w")
    layout = Layout(coded.layout.sizes, coded.layout.view, private.frame_coordinates)
    predictor = ratio.decode_side(private, memoryview(coded.side), layout, where="w")
    m, v = np.full((2, layout.coordinates), np.nan, np.float32)
    for frame, payload in zip(layout.frames(), coded.frames, strict=True):
        parts = [x[frame.begin : frame.end].reshape(frame.rows, frame.columns) for x in (m, v)]
        ratio.decode_frame(
            memoryview(payload),
            frame,
            predictor.terms(frame),
            ratio.params_of(coded.cert),
            *parts,
            where="w",
            **options,
        )
    return m.reshape(layout.sizes), v.reshape(layout.sizes)


def same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.view(np.uint32) == b.view(np.uint32)


def outside(m, v, m_hat, v_hat, cert: Certificate) -> np.ndarray:
    """Coordinates that are not what the certificate speaks of, by float64 arithmetic; bool."""
    cell = cert.cell
    exact = same_bits(m, m_hat) & same_bits(v, v_hat)
    zero = (v.view(np.uint32) == 0) & (m == 0) & (v_hat.view(np.uint32) == 0) & (m_hat.view(np.uint32) == 0)
    with np.errstate(all="ignore"):
        m, v, m_hat, v_hat = (x.astype(np.float64) for x in (m, v, m_hat, v_hat))
        q, q_hat = m / np.sqrt(v), m_hat / np.sqrt(v_hat)
        inside = (np.abs(np.log2(v) - np.log2(v_hat)) <= cell.h) & (np.abs(q - q_hat) <= cell.w)
        inside &= (np.abs(q_hat) <= cell.q_max) & (v >= cert.v_min) & (v <= cert.v_max)
    return ~(exact | zero | inside)


def round_trip(
    m: np.ndarray, v: np.ndarray, cert: Certificate, frame_coordinates: int = 1 << 20
) -> tuple[np.ndarray, np.ndarray, Coded]:
    """Encode, decode, and hold every coordinate against the oracle."""
    m, v = np.asarray(m, np.float32), np.asarray(v, np.float32)
    coded = encode(m, v, cert, frame_coordinates)
    assert coded.failed == 0
    m_hat, v_hat = decode(coded)
    assert not outside(m, v, m_hat, v_hat, cert).any()
    return m_hat, v_hat, coded


def trained(
    shape: tuple[int, int], cert: Certificate, seed: int = 0, spread: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Moments like those of training: v over 32 decades by row, over some by column, log-normal beside; q within Q."""
    rng = np.random.default_rng(seed)
    rows, columns = shape
    log_v = rng.uniform(-90, 16, (rows, 1)) + rng.normal(0, 3, (1, columns)) + rng.normal(0, spread, shape)
    v = np.maximum(2.0**log_v, cert.v_min)
    q = np.clip(rng.normal(0, 0.3, shape), -cert.cell.q_max, cert.cell.q_max)
    return (q * np.sqrt(v)).astype(np.float32), v.astype(np.float32)
