"""Bytes and names: where objects of one checkpoint live (`store`) and how its manifest appears (`commit`).

Nothing here knows what the bytes mean. Objects are created once, read by ranges, and become a checkpoint when
`commit.commit` publishes the manifest that names them.
"""

from guarddcp.storage.store import ObjectWriter, ReadStats, Store

__all__ = ["ObjectWriter", "ReadStats", "Store"]
