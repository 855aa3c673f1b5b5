"""Predictors name a cell's integers relative to what the structure of a shard suggests; a bad one only costs bits.

A predictor is one module here with a class that has

    id, version                            of its part of the side data (FORMAT.md 4)
    encode() -> list of buffers            its part
    decode(part, layout, where=...)        the inverse; refuses anything that does not fit the layout
    terms(frame) -> (r, c)                 float32 integers for a frame: pL = r[:, None] + c

and a line in `KNOWN`. Its arithmetic must be exact on every machine: integers, or float32 that stays below 2^24.
"""

from __future__ import annotations

from guarddcp.codecs.predictors.rowcol import RowCol

__all__ = ["KNOWN", "RowCol"]

KNOWN = {(RowCol.id, RowCol.version): RowCol}
"""By (id, version), as the codec-private part of a shard names them."""
