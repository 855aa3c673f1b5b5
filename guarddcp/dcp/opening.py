"""Finding and opening a checkpoint's manifest."""

from __future__ import annotations

from guarddcp.container import manifest as manifests
from guarddcp.container.layout import MANIFEST_NAME
from guarddcp.container.manifest import Manifest
from guarddcp.errors import CheckpointNotFoundError, GuardError
from guarddcp.storage.store import Store

__all__ = ["MANIFEST_BYTES_MAX", "read_manifest"]

MANIFEST_BYTES_MAX = 1 << 30
"""Largest manifest that is read; tens of millions of shards would be needed to fill it."""


def read_manifest(store: Store) -> Manifest:
    """The manifest at the store. Raises CheckpointNotFoundError, FormatError, IntegrityError, or GuardError."""
    where = store.where(MANIFEST_NAME)
    try:
        data = store.read_all(MANIFEST_NAME, MANIFEST_BYTES_MAX)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(
            "no complete checkpoint: there is no manifest",
            where=where,
            hint="Check the path; a save that did not finish leaves data files but no manifest",
        ) from error
    except OSError as error:
        raise GuardError(f"the manifest cannot be read: {type(error).__name__}: {error}", where=where) from error
    return manifests.from_bytes(data, where=where)
