"""DCP's Metadata to and from the manifest's entries."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)  # fmt: skip

from guarddcp.container.manifest import Manifest
from guarddcp.container.records import TensorEntry, ValueEntry, ValueRecord
from guarddcp.container.value_types import DTYPES
from guarddcp.container.values import decode_value, encode_value
from guarddcp.dcp.tensors import dtype_name
from guarddcp.errors import FormatError, GuardError

__all__ = ["entries_of", "metadata_of", "planner_data_text", "storage_meta_text"]


def entries_of(metadata: Metadata, values: dict[str, ValueRecord]) -> list[TensorEntry | ValueEntry]:
    """The manifest's entries, in state-dict order, from unfolded metadata."""
    return [_entry(key, stored, values) for key, stored in metadata.state_dict_metadata.items()]


def _entry(key: str, stored: object, values: dict[str, ValueRecord]) -> TensorEntry | ValueEntry:
    if isinstance(stored, TensorStorageMetadata):
        properties = stored.properties
        return TensorEntry(key, dtype_name(properties.dtype), tuple(stored.size), bool(properties.requires_grad))
    return ValueEntry(key, values[key].kind)


def planner_data_text(planner_data: Any) -> str:
    """Planner data as a plain tree. Raises GuardError, by name, for what has no plain form."""
    tree = encode_value(planner_data)
    if tree is None:
        culprits = (
            [str(k) for k, v in planner_data.items() if encode_value(v) is None]
            if isinstance(planner_data, dict)
            else []
        )
        raise GuardError(
            "the planner's data have no plain form",
            where="planner_data",
            got=f"{type(planner_data).__name__}, keys {culprits[:5]}",
            hint="A custom planner may put only plain Python values into SavePlan.planner_data",
        )
    return tree.decode("ascii")


def storage_meta_text(meta: StorageMeta | None) -> str:
    plain = None if meta is None else (str(meta.checkpoint_id), meta.save_id, meta.load_id, list(meta.modules))
    tree = encode_value(plain)
    assert tree is not None
    return tree.decode("ascii")


def _storage_meta(text: str) -> StorageMeta | None:
    plain = decode_value(text.encode("ascii"))
    if plain is None:
        return None
    if not (isinstance(plain, tuple) and len(plain) == 4 and isinstance(plain[3], list)):
        raise FormatError("storage_meta", where="manifest", got=repr(plain)[:200])
    checkpoint_id, save_id, load_id, modules = plain
    return StorageMeta(checkpoint_id, save_id, load_id, modules)


def metadata_of(manifest: Manifest) -> Metadata:
    """The Metadata that planners plan a load from."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for entry in manifest.entries:
        if isinstance(entry, ValueEntry):
            described[entry.key] = BytesStorageMetadata()
            continue
        properties = TensorProperties(dtype=DTYPES[entry.dtype], requires_grad=entry.requires_grad)
        chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in sorted(manifest.chunks(entry.key))
        ]
        described[entry.key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    return Metadata(
        state_dict_metadata=described,
        planner_data=decode_value(manifest.planner_data.encode("ascii")),
        storage_data={},
        storage_meta=_storage_meta(manifest.storage_meta),
    )
