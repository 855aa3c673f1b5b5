"""Tensor subclasses (quantised optimizer states and the like) by their inner tensors, never by pickle.

A traceable wrapper subclass (``__tensor_flatten__``) is stored as a plain tree: its class's name, for the error message, and
its inner tensors. It is restored into a target of the same class, inner tensor by inner tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from guarddcp.container.values import decode_value, encode_value
from guarddcp.errors import GuardError

__all__ = ["restore_tree", "tree_of"]


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
    return None if any(node is None for node in inner.values()) else {"class": _class_name(tensor), "inner": inner}


def restore_tree(data: bytes, target: torch.Tensor, *, where: str) -> None:
    """Copy the stored inner tensors into those of ``target``. Raises GuardError unless class and all shapes agree."""
    _restore(decode_value(data), target, where)


def _restore(node: Any, target: torch.Tensor, where: str) -> None:
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
        target.detach().copy_(node)
        return
    if not (isinstance(node, dict) and set(node) == {"class", "inner"} and isinstance(node["inner"], dict)):
        raise GuardError("not the tree of a tensor subclass", where=where)
    names = target.__tensor_flatten__()[0] if hasattr(target, "__tensor_flatten__") else []
    if _class_name(target) != node["class"] or sorted(names) != sorted(node["inner"]):
        raise GuardError(
            "tensor subclasses are restored into a target of their own class",
            where=where,
            expected=f"{node['class']} with {sorted(node['inner'])}",
            got=f"{_class_name(target)} with {sorted(names)}",
            hint="Build the model and optimizer as they were when the checkpoint was saved",
        )
    for name in names:
        _restore(node["inner"][name], getattr(target, name), f"{where}.{name}")
