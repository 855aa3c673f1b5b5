"""Sources for the search of lookup.py: a save planner, and a stored checkpoint.

`OptimizerGroups` reads from a save planner, on every rank and independent of the plan (which plan caching
empties and deduplication scatters). `groups_from_values` reads from a checkpoint, so that verification holds
each certificate against the param groups and steps that are stored beside it, by the same search.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from guarddcp.certificate.rules import Adam
from guarddcp.dcp.lookup import Exact, GroupLookup, Guarded, Path, joined, state_head
from guarddcp.dcp.pairing import partner_fqn

__all__ = ["Exact", "GroupLookup", "Guarded", "OptimizerGroups", "groups_from_values", "moments_hidden"]

MOMENT_NAMES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""Beside ``step``, the names that are asked for where keys cannot be listed."""


@dataclass(frozen=True)
class Moment:
    """What is known of a moment tensor without its values. ``plain``: no tensor subclass inside."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    plain: bool


class OptimizerGroups(GroupLookup):
    """Rules and steps as the save planner of this rank holds them.

    ``planner`` needs only the public interface of SavePlanner; ``state_dict`` and ``mappings`` of the default
    planner are used where they are there. ``optimizer``: the live optimizer or its class, which must be torch's
    Adam or AdamW itself; nothing else of it counts. ``rule``: replaces both; state, dtypes and step are still checked.
    """

    def __init__(self, planner: SavePlanner, optimizer: object | None = None, rule: Adam | None = None) -> None:
        held = getattr(planner, "state_dict", None)
        self._held: Mapping[str, object] = held if isinstance(held, Mapping) else {}
        self._planner = planner
        mappings = getattr(planner, "mappings", None)
        paths = mappings if isinstance(mappings, Mapping) else {}
        self._names = _names_by_head(self._held, paths)
        self._refused = None if rule is not None else _optimizer_problem(optimizer)
        super().__init__(self._value, self._names_of, paths, rule)

    def rule_for(self, m_index: MetadataIndex) -> Guarded | Exact:
        """As in GroupLookup; also checks that both moments are plain float32 tensors of one shape."""
        found = super().rule_for(m_index)
        if isinstance(found, Exact):
            return found
        if self._refused is not None:
            return self._refused
        v_fqn = partner_fqn(m_index.fqn)
        assert v_fqn is not None
        moments = self._moment(m_index), self._moment(MetadataIndex(v_fqn, m_index.offset))
        return _moments_problem(*moments) or found

    def _value(self, key: str) -> object:
        value = self._held.get(key)
        return _resolve_value(self._planner, key) if value is None else value

    def _names_of(self, m_index: MetadataIndex) -> frozenset[str]:
        head = state_head(m_index.fqn)
        names = self._names.get(head)
        if names is not None:
            return frozenset(names)
        # Moments are never asked for as bytes: the planner would pickle a whole tensor.
        found = {name for name in MOMENT_NAMES if self._moment(MetadataIndex(f"{head}.{name}", m_index.offset))}
        return frozenset(found if self._value(f"{head}.step") is None else {*found, "step"})

    def _moment(self, index: MetadataIndex) -> Moment | None:
        value = self._held.get(index.fqn)
        if value is None:
            value = _resolve_tensor(self._planner, index)
        return _describe(value)


def groups_from_values(
    get: Callable[[str], object],
    keys: Iterable[str],
    planner_data: Mapping[str, Path] | None = None,
    rule: Adam | None = None,
) -> GroupLookup:
    """Rules and steps as a checkpoint holds them, by the same search as at save time.

    ``get(key)``: the stored value (a Python value or a small tensor), None if there is none; it is never called
    for a moment. ``keys``: all keys of the checkpoint. ``planner_data``: the path of each key, if stored. ``rule``: as
    in GroupLookup.
    """
    paths = planner_data if isinstance(planner_data, Mapping) else {}
    names = _names_by_head(keys, paths)
    return GroupLookup(get, lambda m_index: frozenset(names.get(state_head(m_index.fqn), ())), paths, rule)


def moments_hidden(planner: SavePlanner) -> list[str]:
    """Keys under which whole optimizers hide in one byte item (``flatten_state_dict=False``).

    Their moments never reach the writer as tensors: they are stored exactly, inside the value of that key.
    """
    held = getattr(planner, "state_dict", None)
    if not isinstance(held, Mapping):
        return []
    return [str(key) for key, value in held.items() if _has_moments(value)]


def _has_moments(value: object) -> bool:
    if isinstance(value, Mapping):
        names = (str(key).rpartition(".")[2] for key, entry in value.items() if isinstance(entry, torch.Tensor))
        return "exp_avg" in names or any(_has_moments(entry) for entry in value.values())
    return isinstance(value, list | tuple) and any(_has_moments(entry) for entry in value)


def _names_by_head(keys: Iterable[str], paths: Mapping[str, Path]) -> dict[str, set[str]]:
    """State names below each ``<prefix>state.P``. A dict inside the state counts as one name."""
    names: dict[str, set[str]] = {}
    for key in keys:
        path = paths.get(key, (key,))
        head, _, name = key.rpartition(".")
        names.setdefault(head, set()).add(name)
        for i in range(len(path) - 3):
            if path[i] == "state":
                names.setdefault(joined(path[: i + 2])[:-1], set()).add(str(path[i + 2]))
    return names


def _optimizer_problem(optimizer: object | None) -> Exact | None:
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if optimizer is None or kind in (torch.optim.Adam, torch.optim.AdamW):
        return None
    message = f"{kind.__module__}.{kind.__qualname__} is neither torch.optim.Adam nor AdamW itself; give rule= if it is"
    return Exact("optimizer-type", message)


def _moments_problem(m: Moment | None, v: Moment | None) -> Exact | None:
    if m is None or v is None or not (m.plain and v.plain):
        return Exact("tensor-type", "a moment is not a plain tensor")
    if not m.dtype == v.dtype == torch.float32:
        return Exact("dtype", f"moments should be float32, not {m.dtype} and {v.dtype}")
    if m.shape != v.shape:
        return Exact("shape", f"moments differ in shape: {m.shape} and {v.shape}")
    return None


def _describe(value: object) -> Moment | None:
    if not isinstance(value, torch.Tensor):
        return None
    inner = [value]
    if isinstance(value, DTensor):
        inner = [value.to_local()]
    elif isinstance(value, ShardedTensor):
        inner = [shard.tensor for shard in value.local_shards()]
    plain = all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in inner)
    return Moment(value.dtype, tuple(value.size()), plain)


def _resolve_value(planner: SavePlanner, key: str) -> object:
    """A Python value or a small tensor through the planner's public interface, None if it has none.

    Planners answer an unknown key, or one of the other kind, with errors of many types. None only ever makes
    a pair exact, so that a save is not lost for want of a hyperparameter.
    """
    try:
        data: Any = planner.resolve_data(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
        if isinstance(data, io.BytesIO):
            data.seek(0)  # the planner leaves it at its end
            # Pickled by this process a moment ago, so nothing foreign is run. numpy scalars need the full unpickler.
            return torch.load(data, weights_only=False)
    except Exception:
        data = None
    return data if isinstance(data, torch.Tensor) else _resolve_tensor(planner, MetadataIndex(key, ()))


def _resolve_tensor(planner: SavePlanner, index: MetadataIndex) -> object:
    try:
        data = planner.resolve_data(WriteItem(index, WriteItemType.TENSOR))
    except Exception:  # as above
        return None
    return data if isinstance(data, torch.Tensor) else None
