"""Reading plain values: the hostile-safe half of `values`, whose docstring says what the bytes are."""

from __future__ import annotations

import binascii
import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

from guarddcp.container.value_types import (
    DTYPES,
    MAX_BYTES,
    MAX_DEPTH,
    MAX_DIMS,
    MAX_ITEM,
    MAX_NODES,
    NUMPY_DTYPE,
    TENSOR_DTYPES,
)
from guarddcp.errors import FormatError

__all__ = ["decode_value"]


def decode_value(data: bytes) -> object:
    """The value that `encode_value` made ``data`` of.

    Safe on hostile bytes: imports and executes nothing, allocates at most about 25 times their length. Raises
    FormatError, saying where in the JSON text, for anything that is not of the form that `values` describes.
    """
    if len(data) > MAX_BYTES:
        raise FormatError("too large", where="plain value", expected=f"at most {MAX_BYTES} bytes", got=len(data))
    try:
        tree = _JSON.decode(bytes(data).decode("utf-8"))
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON ({error})", where="plain value") from error
    return _Decoder().node(tree)


def _refuse_json(text: object) -> NoReturn:
    raise FormatError("this JSON is not used in plain values", where="plain value", got=repr(text)[:60])


def _json_int(text: str) -> int:
    return int(text) if len(text) <= 20 else _refuse_json(text[:60])


_JSON = json.JSONDecoder(
    object_pairs_hook=_refuse_json, parse_float=_refuse_json, parse_constant=_refuse_json, parse_int=_json_int
)


class _Decoder:
    def __init__(self) -> None:
        self.path: list[int] = []  # indices into the JSON arrays down to the current node
        self.nodes = 0

    def refuse(self, message: str, expected: object = None, got: object = None) -> NoReturn:
        where = "plain value at $" + "".join(f"[{i}]" for i in self.path)
        raise FormatError(message, where=where, expected=expected, got=got)

    def node(self, node: Any) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            self.refuse("too many values", expected=f"at most {MAX_NODES}")
        if not isinstance(node, list):
            if type(node) is int and not -(2**63) <= node < 2**64:
                self.refuse("integer out of range", expected='["int", hex]')
            return node
        tag = node[0] if node else None
        if not isinstance(tag, str) or tag not in _DECODERS:
            self.refuse("unknown tag", expected="one of " + " ".join(_DECODERS), got=_brief(tag))
        decode, arity = _DECODERS[tag]
        if arity is not None and len(node) != 1 + arity:
            self.refuse(f"{tag} of a wrong length", expected=f"{arity} after the tag", got=len(node) - 1)
        try:
            return decode(self, node) if arity is None else decode(self, *node[1:])
        except FormatError:
            raise
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            self.refuse(f"bad {tag} ({error})")

    def children(self, node: list[Any]) -> list[Any]:
        if len(self.path) >= MAX_DEPTH:
            self.refuse("nested too deep", expected=f"at most {MAX_DEPTH} levels")
        values = []
        for i in range(1, len(node)):
            self.path.append(i)
            values.append(self.node(node[i]))
            self.path.pop()
        return values

    def mapping(self, node: list[Any], kind: Callable[[], Any]) -> Any:
        values = self.children(node)
        if len(values) % 2:
            self.refuse(f"{node[0]} with a key without value", expected="an even count", got=len(values))
        out = kind()
        for i in range(0, len(values), 2):
            out[values[i]] = values[i + 1]
        if len(out) != len(values) // 2:
            self.refuse(f"{node[0]} with equal keys", expected=f"{len(values) // 2} keys", got=len(out))
        return out

    def text(self, value: Any, what: str) -> str:
        if not isinstance(value, str):
            self.refuse(f"{what} is not text", got=_brief(value))
        return value

    def b64(self, value: Any) -> bytes:
        return binascii.a2b_base64(self.text(value, "base64").encode("ascii"), strict_mode=True)

    def floating(self, text: Any) -> float:
        if len(self.text(text, "float")) > 32 or (value := float.fromhex(text)).hex() != text:
            self.refuse("not a float in hex form", got=_brief(text))
        return value

    def complexes(self, real: Any, imag: Any) -> complex:
        return complex(self.floating(real), self.floating(imag))

    def integer(self, text: Any) -> int:
        value = int(self.text(text, "int"), 16)
        if hex(value) != text:
            self.refuse("not an integer in hex form", got=_brief(text))
        return value

    def surrogates(self, b64: Any) -> str:
        return self.b64(b64).decode("utf-8", "surrogatepass")

    def shape(self, dims: Any) -> tuple[int, ...]:
        if not isinstance(dims, list) or any(type(n) is not int or not 0 <= n < 2**63 for n in dims):
            self.refuse("not a shape", expected="a list of sizes", got=_brief(dims))
        if len(dims) > MAX_DIMS:
            self.refuse("too many dimensions", expected=f"at most {MAX_DIMS}", got=len(dims))
        return tuple(dims)

    def size(self, node: list[Any]) -> torch.Size:
        dims = node[1:]
        if any(type(n) is not int or not -(2**63) <= n < 2**63 for n in dims):
            self.refuse("not a torch.Size", expected="64-bit integers")
        return torch.Size(dims)

    def dtype(self, name: Any) -> torch.dtype:
        if self.text(name, "dtype") not in DTYPES:
            self.refuse("unknown dtype", got=_brief(name))
        return DTYPES[name]

    def device(self, kind: Any, index: Any) -> torch.device:
        if index is not None and (type(index) is not int or not 0 <= index < 128):
            self.refuse("device index out of range", expected="null or 0 to 127", got=_brief(index))
        if re.fullmatch(r"[a-z]{1,32}", self.text(kind, "device")) is None:
            self.refuse("unknown device type", got=_brief(kind))
        return torch.device(kind) if index is None else torch.device(kind, index)

    def elements(self, shape: tuple[int, ...], itemsize: int, b64: Any) -> bytes:
        data, count = self.b64(b64), math.prod(shape)
        if len(data) != count * itemsize:
            self.refuse("shape and data differ", expected=f"{count} * {itemsize} bytes", got=f"{len(data)} bytes")
        return data

    def tensor(self, name: Any, dims: Any, b64: Any, requires_grad: Any) -> torch.Tensor:
        if self.text(name, "dtype") not in TENSOR_DTYPES:
            self.refuse("unknown tensor dtype", got=_brief(name))
        dtype, shape = TENSOR_DTYPES[name], self.shape(dims)
        data = self.elements(shape, dtype.itemsize, b64)
        self.only_bools(dtype == torch.bool, data)
        if type(requires_grad) is not bool:
            self.refuse("requires_grad is not a boolean", got=_brief(requires_grad))
        if data:
            # from_numpy, not frombuffer: a default device set by the caller does not divert it.
            tensor = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)).view(dtype).reshape(shape).clone()
        else:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
        return tensor.requires_grad_() if requires_grad else tensor

    def only_bools(self, is_bool: bool, data: bytes) -> None:
        if is_bool and data.translate(None, b"\0\1"):
            self.refuse("boolean elements that are neither 0 nor 1")

    def numpy_dtype(self, text: Any) -> np.dtype[Any]:
        if NUMPY_DTYPE.fullmatch(self.text(text, "dtype")) is None or (dtype := np.dtype(text)).str != text:
            self.refuse("unknown numpy dtype", got=_brief(text))
        return dtype

    def array(self, text: Any, dims: Any, b64: Any) -> np.ndarray[Any, Any]:
        dtype, shape = self.numpy_dtype(text), self.shape(dims)
        data = self.elements(shape, dtype.itemsize, b64)
        self.only_bools(dtype.kind == "b", data)
        if not data:
            if dtype.itemsize > MAX_ITEM:
                self.refuse("empty array of very wide elements", expected=f"at most {MAX_ITEM} bytes", got=text)
            return np.empty(shape, dtype)
        if dtype.kind == "U" and np.frombuffer(data, dtype.str[0] + "u4").max() > 0x10FFFF:
            self.refuse("array text beyond Unicode")
        return np.frombuffer(data, dtype).reshape(shape).copy()

    def scalar(self, text: Any, b64: Any) -> Any:
        array = self.array(text, [], b64)
        if array.dtype.kind in "SU" or not array.dtype.isnative:
            self.refuse("not a scalar dtype", got=text)
        return array[()]

    def numpy_str(self, text: Any) -> Any:
        value = self.node(text)
        if type(value) is not str:
            self.refuse("np.str without a string")
        return np.str_(value)


def _brief(value: object) -> str:
    """A short repr of a hostile value."""
    return repr(value[:40]) if isinstance(value, str) else repr(value)[:40] if not isinstance(value, list) else "a list"


# Tag: its decoder and how many elements follow the tag; None: any number, the decoder gets the whole node.
_DECODERS: dict[str, tuple[Callable[..., Any], int | None]] = {
    "int": (_Decoder.integer, 1),
    "float": (_Decoder.floating, 1),
    "complex": (_Decoder.complexes, 2),
    "str": (_Decoder.surrogates, 1),
    "bytes": (_Decoder.b64, 1),
    "tuple": (lambda d, node: tuple(d.children(node)), None),
    "list": (_Decoder.children, None),
    "dict": (lambda d, node: d.mapping(node, dict), None),
    "odict": (lambda d, node: d.mapping(node, OrderedDict), None),
    "size": (_Decoder.size, None),
    "dtype": (_Decoder.dtype, 1),
    "device": (_Decoder.device, 2),
    "tensor": (_Decoder.tensor, 4),
    "array": (_Decoder.array, 3),
    "scalar": (_Decoder.scalar, 2),
    "np.str": (_Decoder.numpy_str, 1),
    "np.bytes": (lambda d, b64: np.bytes_(d.b64(b64)), 1),
}
