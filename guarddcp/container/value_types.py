"""What `values` and `value_reader` share: the limits, and the dtypes that have a plain form."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

__all__ = [
    "DTYPES",
    "MAX_BYTES",
    "MAX_DEPTH",
    "MAX_ITEM",
    "MAX_NODES",
    "NUMPY_DTYPE",
    "TENSOR_DTYPES",
    "is_plain_dtype",
]

MAX_BYTES = 64 * 2**20  # bytes of JSON text; what is larger belongs into tensors. Parsing can take 25 times as much
MAX_DEPTH = 100  # containers inside each other; stays clear of Python's recursion limit in any caller
MAX_NODES = 2**22  # values in one tree: a few seconds. Shared parts are written out each time, which can explode
MAX_DIMS = 64  # numpy's and torch's own limit; a product of millions of sizes would take hours
MAX_ITEM = 2**16  # bytes; an empty numpy array still allocates one element, so its width is limited

DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
# Whole bytes per element and no scale on the side; names that this torch does not have yet are left out.
_TENSOR_NAMES = """bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32
    complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"""
TENSOR_DTYPES = {name: DTYPES[name] for name in _TENSOR_NAMES.split() if name in DTYPES}

# numpy's dtype.str for booleans, integers, floats, complex, fixed-width bytes and text, dates. No objects, no
# records, nothing that depends on the platform; np.dtype() is only called on text of this form.
NUMPY_DTYPE = re.compile(
    r"\|b1|[<>|][iu][1248]|[<>]f[248]|[<>]c(8|16)|[<>|][SU][1-9]\d{0,7}"
    r"|[<>][mM]8(\[[1-9]?\d{0,8}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)


def is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    """Whether ``np.dtype(dtype.str)`` is the same dtype, and of a kind that has a plain form."""
    # char: "q" and "l" are both int64 on Linux, with scalar types of their own. metadata: user data on the dtype.
    plain = NUMPY_DTYPE.fullmatch(dtype.str) is not None and dtype.metadata is None
    return plain and np.dtype(dtype.str).char == dtype.char
