"""Tensor subclasses (quantised optimizer states and the like) by their inner tensors, never by pickle.

A traceable wrapper subclass (``__tensor_flatten__``) is stored as a plain tree: its class's name, its inner tensors,
and what else it says about itself (block size, sign, ...), where that has a plain form. It is restored into a target of
the same class that says the same of itself, inner tensor by inner tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from guarddcp.container.values import decode_value, encode_value
from guarddcp.errors import FormatError, GuardError

__all__ = ["check_tree", "restore_tree", "tree_of"]


_HINT = "Build the model and optimizer as they were when the checkpoint was saved"


def _class_name(tensor: torch.Tensor) -> str:
    return f"{type(tensor).__module__}.{type(tensor).__qualname__}"


def tree_of(tensor: torch.Tensor) -> bytes | None:
    """The tree's bytes, or None if the tensor is no such subclass or an inner tensor has no plain form."""
    node = _node(tensor.detach())
    return None if node is None else encode_value(node)


def _node(tensor: torch.Tensor) -> Any:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.detach().cpu()
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    names, _ = tensor.__tensor_flatten__()
    inner = {name: _node(getattr(tensor, name)) for name in names}
    if any(node is None for node in inner.values()):
        return None
    return {"class": _class_name(tensor), "inner": inner, "context": _context(tensor)}


def _context(tensor: Any) -> bytes | None:
    return encode_value(tensor.detach().__tensor_flatten__()[1])


def check_tree(data: bytes, target: torch.Tensor, *, where: str) -> None:
    """Raise GuardError unless class and all inner tensors of ``target`` are those of the stored tree."""
    _pairs(decode_value(data), target, where)


def restore_tree(data: bytes, target: torch.Tensor, *, where: str) -> None:
    """Copy the stored inner tensors into those of ``target``, all or, with `check_tree`'s error, none."""
    for stored, inner in _pairs(decode_value(data), target, where):
        inner.detach().copy_(stored)


def _pairs(node: Any, target: torch.Tensor, where: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(stored, target) of every inner tensor."""
    if isinstance(node, torch.Tensor):
        if type(target) not in (torch.Tensor, torch.nn.Parameter):
            raise GuardError("stored as a plain tensor", where=where, got=f"a target of type {_class_name(target)}")
        if (node.dtype, node.shape) != (target.dtype, target.shape):
            raise GuardError(
                "inner tensor differs",
                where=where,
                expected=f"{node.dtype} {tuple(node.shape)}",
                got=f"{target.dtype} {tuple(target.shape)}",
            )
        return [(node, target)]
    if not (isinstance(node, dict) and set(node) == {"class", "inner", "context"} and isinstance(node["inner"], dict)):
        raise FormatError("not the tree of a tensor subclass", where=where)
    names = target.__tensor_flatten__()[0] if hasattr(target, "__tensor_flatten__") else []
    if _class_name(target) != node["class"] or sorted(names) != sorted(node["inner"]):
        raise GuardError(
            "tensor subclasses are restored into a target of their own class",
            where=where,
            expected=f"{node['class']} with {sorted(node['inner'])}",
            got=f"{_class_name(target)} with {sorted(names)}",
            hint=_HINT,
        )
    context = _context(target)
    if node["context"] != context:
        raise GuardError(
            f"a {node['class']} that describes itself differently",
            where=where,
            expected=_text(node["context"]),
            got=_text(context),
            hint=_HINT,
        )
    return [pair for name in names for pair in _pairs(node["inner"][name], getattr(target, name), f"{where}.{name}")]


def _text(context: object) -> str:
    return context.decode("utf-8", "replace")[:200] if isinstance(context, bytes) else repr(context)[:200]
