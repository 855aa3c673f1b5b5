"""Plain Python values as bytes, without pickle: `encode_value` and `decode_value`.

The bytes are one JSON text. null, true, false, integers of -2^63 to 2^64-1 and strings stand for themselves; all
other values are an array whose first element is a tag:

    ["int", hex]                 an integer outside that range
    ["float", hex]               float.hex; "nan", "inf", "-inf"
    ["complex", hex, hex]        real, imaginary
    ["str", b64]                 a string with lone surrogates (JSON would join a pair), UTF-8 with surrogatepass
    ["bytes", b64]
    ["tuple", value...]  ["list", value...]
    ["dict", key, value, ...]  ["odict", key, value, ...]    in order
    ["size", integer...]         torch.Size
    ["dtype", name]              torch.dtype, without "torch."
    ["device", type, index]      torch.device; index may be null
    ["tensor", dtype name, [shape...], b64, requires_grad]    elements in row-major order, little-endian
    ["array", dtype.str, [shape...], b64]    numpy array, row-major; booleans, numbers, dates, fixed-width text
    ["scalar", dtype.str, b64]   numpy scalar of such a dtype
    ["np.str", value]  ["np.bytes", b64]     numpy text scalars

A value comes back with equal type and value. Not kept: sharing between parts, memory layout, NaN payloads of floats
(arrays and tensors keep them). The type must match exactly: an IntEnum is not an int.
"""

from __future__ import annotations

import binascii
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from guarddcp.container.value_reader import decode_value
from guarddcp.container.value_types import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_DIMS,
    MAX_ITEM,
    MAX_NODES,
    TENSOR_DTYPES,
    is_plain_dtype,
)

__all__ = ["MAX_BYTES", "MAX_DEPTH", "MAX_NODES", "decode_value", "encode_value"]

_TENSOR_NAMES = {dtype: name for name, dtype in TENSOR_DTYPES.items()}


class _NoPlainFormError(Exception):
    pass


def encode_value(obj: object) -> bytes | None:
    """The value as bytes, or None if it has no plain form.

    None for: other types than those above and their subclasses, object and structured arrays, platform-dependent
    dtypes (longdouble), tensors that are not plain dense CPU tensors or carry attributes or names, values that
    contain themselves or are nested more than `MAX_DEPTH` deep, and trees beyond `MAX_NODES` or `MAX_BYTES`.
    """
    try:
        node = _Encoder().node(obj)
    except _NoPlainFormError:
        return None
    data = json.dumps(node, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
    return data if len(data) <= MAX_BYTES else None


class _Encoder:
    def __init__(self) -> None:
        self.inside: set[int] = set()  # ids of the containers that enclose the current value
        self.nodes = 0
        self.bytes = 0

    def node(self, obj: Any) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES or self.bytes > MAX_BYTES:
            raise _NoPlainFormError
        kind = type(obj)
        encode = _ENCODERS.get(kind)
        if encode is not None:
            return encode(self, obj)
        if isinstance(obj, np.generic):
            return self.numpy_scalar(obj)
        raise _NoPlainFormError

    def itself(self, obj: Any) -> Any:
        return obj

    def integer(self, obj: int) -> Any:
        return obj if -(2**63) <= obj < 2**64 else ["int", hex(obj)]

    def text(self, obj: str) -> Any:
        self.bytes += len(obj)
        try:
            obj.encode("utf-8")
        except UnicodeEncodeError:
            return ["str", self.b64(obj.encode("utf-8", "surrogatepass"))]
        return obj

    def b64(self, data: bytes) -> str:
        self.bytes += len(data)
        if self.bytes > MAX_BYTES:
            raise _NoPlainFormError
        return binascii.b2a_base64(data, newline=False).decode("ascii")

    def children(self, tag: str, owner: object, values: Iterable[Any]) -> list[Any]:
        # Tuples and sizes count too: a list can contain itself through them.
        if id(owner) in self.inside or len(self.inside) == MAX_DEPTH:
            raise _NoPlainFormError
        self.inside.add(id(owner))
        node: list[Any] = [tag]
        for value in values:
            node.append(self.node(value))
        self.inside.remove(id(owner))
        return node

    def size(self, obj: torch.Size) -> Any:
        if any(type(n) is not int for n in obj):
            raise _NoPlainFormError
        return ["size", *obj]

    def odict(self, obj: OrderedDict[Any, Any]) -> Any:
        if vars(obj):  # as module.state_dict() has
            raise _NoPlainFormError
        return self.children("odict", obj, (part for item in obj.items() for part in item))

    def tensor(self, t: torch.Tensor) -> Any:
        plain = t.layout == torch.strided and t.device.type == "cpu" and t.dtype in _TENSOR_NAMES
        if not plain or vars(t) or any(name is not None for name in getattr(t, "names", ())):
            raise _NoPlainFormError
        # An expanded tensor may hold far more than its storage.
        if t.dim() > MAX_DIMS or t.numel() * t.dtype.itemsize > MAX_BYTES:
            raise _NoPlainFormError
        # clone, not contiguous(): one element counts as contiguous at any stride, and then cannot be viewed as bytes.
        flat = t.detach().resolve_conj().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)
        data = flat.view(torch.uint8).numpy().tobytes()
        return ["tensor", _TENSOR_NAMES[t.dtype], list(t.shape), self.b64(data), t.requires_grad]

    def array(self, a: np.ndarray[Any, Any]) -> Any:
        if not is_plain_dtype(a.dtype) or a.nbytes > MAX_BYTES or (a.size == 0 and a.dtype.itemsize > MAX_ITEM):
            raise _NoPlainFormError
        return ["array", a.dtype.str, list(a.shape), self.b64(a.tobytes())]

    def numpy_scalar(self, obj: Any) -> Any:
        if obj.dtype.type is not type(obj) or not is_plain_dtype(obj.dtype):
            raise _NoPlainFormError
        return ["scalar", obj.dtype.str, self.b64(obj.tobytes())]


_ENCODERS: dict[type, Callable[[_Encoder, Any], Any]] = {
    type(None): _Encoder.itself,
    bool: _Encoder.itself,
    int: _Encoder.integer,
    str: _Encoder.text,
    float: lambda e, x: ["float", x.hex()],
    complex: lambda e, x: ["complex", x.real.hex(), x.imag.hex()],
    bytes: lambda e, x: ["bytes", e.b64(x)],
    tuple: lambda e, x: e.children("tuple", x, x),
    list: lambda e, x: e.children("list", x, x),
    dict: lambda e, x: e.children("dict", x, (part for item in x.items() for part in item)),
    OrderedDict: _Encoder.odict,
    torch.Size: _Encoder.size,
    torch.dtype: lambda e, x: ["dtype", str(x).removeprefix("torch.")],
    torch.device: lambda e, x: ["device", x.type, x.index],
    torch.Tensor: _Encoder.tensor,
    np.ndarray: _Encoder.array,
    # numpy's own str() drops NULs at the end.
    np.str_: lambda e, x: ["np.str", e.text(str.__str__(x))],
    np.bytes_: lambda e, x: ["np.bytes", e.b64(bytes(x))],
}
