import base64
import collections
import contextlib
import datetime
import enum
import importlib
import inspect
import json
import math
import random
import struct
import sys
import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from guarddcp.container import values
from guarddcp.container.value_types import DTYPES, TENSOR_DTYPES
from guarddcp.container.values import MAX_DEPTH, decode_value, encode_value
from guarddcp.errors import FormatError


def same(a, b):
    """Equal in type and value, NaN included, to the last bit of arrays and tensors."""
    if type(a) is not type(b):
        return False
    if type(a) is torch.Tensor:
        bits = [
            x.detach().resolve_conj().resolve_neg().reshape(-1).clone().as_strided((x.numel(),), (1,)).view(torch.uint8)
            for x in (a, b)
        ]
        head = [(x.dtype, x.shape, x.device, x.requires_grad) for x in (a, b)]
        return head[0] == head[1] and torch.equal(*bits)
    if isinstance(a, (np.ndarray, np.generic)):
        return (a.dtype, a.dtype.char, a.shape) == (b.dtype, b.dtype.char, b.shape) and a.tobytes() == b.tobytes()
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.keys()), list(b.keys())) and same(list(a.values()), list(b.values()))
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return a == b


def round_trip(value):
    data = encode_value(value)
    assert isinstance(data, bytes)
    return decode_value(data)


def text(node):
    return json.dumps(node).encode()


def b64(data):
    return base64.b64encode(data).decode()


# -- values that come back -----------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
PLAIN = [
    *[None, True, False, 0, 1, -1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64 - 1, 2**64, -(2**64), 10**5000],
    *[0.0, -0.0, NAN, INF, -INF, 0.1, 5e-324, -2.2250738585072014e-308, 1.7976931348623157e308, 1.0],
    *[complex(-0.0, NAN), complex(INF, -0.0), 1j, "", "plain", '\0\n"\\', "caf\xe9 \u20ac \U0001f600", "\ud83d\ude00"],
    *["\ud800", "a\udfffb", "\u2028", b"", b"\0\xff" * 50, (), [], {}, OrderedDict(), (1, (2, [3, {4: 5}]))],
    *[[True, 1, 1.0, "1", b"1"], {1: "a", "1": 2, 2.5: 3, b"1": 4, None: 5, (1, "x"): 6, NAN: 7}],
    *[OrderedDict([("z", 1), ("a", 2)]), {"z": 1, "a": 2}, {torch.float32: 1, torch.device("cpu"): 2}],
    *[torch.Size([]), torch.Size([2, 0, 3]), torch.device("cpu"), torch.device("cuda", 3), torch.device("meta")],
    *[
        random.Random(5).getstate(),
        np.random.RandomState(5).get_state(),
        np.random.RandomState(5).get_state(legacy=False),
    ],
    *[np.random.PCG64(7).state, np.random.Philox(7).state, np.random.SFC64(7).state, np.random.MT19937(7).state],
    *[np.float32(-0.0), np.float64("nan"), np.float16(1.5), np.bool_(True), np.int8(-3), np.uint64(2**64 - 1)],
    *[np.complex64(1 - 2j), np.str_("x\0"), np.str_("\ud800"), np.bytes_(b"x\0"), np.datetime64("2020-01-02", "25s")],
    *[np.datetime64("NaT"), np.timedelta64(-5, "ns")],
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda v: type(v).__name__)
def test_plain_values_come_back(value):
    assert same(round_trip(value), value)
    assert same(round_trip(({"k": [value]},)), ({"k": [value]},))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_torch_dtype_comes_back(dtype):
    assert round_trip(dtype) is dtype


@pytest.mark.parametrize("name", TENSOR_DTYPES)
def test_tensors_of_every_dtype_come_back(name):
    dtype = TENSOR_DTYPES[name]
    count = 12 * dtype.itemsize
    data = bytes([1, 0] * count)[:count] if dtype == torch.bool else random.Random(1).randbytes(count)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(3, 4)
    for value in (tensor, tensor[1, 2], tensor[:0], tensor[1:, ::2]):
        assert same(round_trip(value), value)
    strided = round_trip(tensor.T)
    assert strided.is_contiguous()
    assert same(strided, tensor.T)


def test_the_list_of_tensor_dtypes_is_complete():
    left_out = {name for name in DTYPES if name not in TENSOR_DTYPES}
    assert all(name.startswith(("q", "bits", "int", "uint")) for name in left_out)  # quantised, opaque, below a byte


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.ones(2, requires_grad=True),
        torch.ones(2, requires_grad=True) * 2,
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.ones(1).expand(3, 4),
        torch.arange(10)[7:],
        torch.arange(10)[::20],
        torch.empty(0, 2**40),
        torch.tensor([NAN, -0.0, INF]),
    ],
    ids=str,
)
def test_tensors_of_odd_kinds_come_back(tensor):
    back = round_trip(tensor)
    assert same(back, tensor)
    assert back.is_leaf
    assert torch.equal(back.detach().clone().fill_(1), torch.ones_like(tensor))


def test_tensors_own_their_memory_and_ignore_the_default_device():
    torch.set_default_device("meta")
    try:
        back = decode_value(text(["tensor", "int64", [2], b64(bytes(16)), False]))
        empty = decode_value(text(["tensor", "int64", [0], "", False]))
    finally:
        torch.set_default_device(None)
    assert back.device.type == empty.device.type == "cpu"
    back.resize_(5)
    assert back[:2].tolist() == [0, 0]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype="<i2").reshape(2, 3)),
        np.arange(10)[::-3],
        np.array(2.5),
        np.empty((0, 3), "<c16"),
        np.array(["a", "bcd", "\U0001f600", ""]),
        np.array(["a"], dtype=">U3"),
        np.array([b"a", b"b\0c"]),
        np.array(["2020-01-01", "NaT"], dtype="<M8[D]"),
        np.array([1, 2], dtype="m8"),
        np.array([True, False]),
        np.empty((2, 0), "U7"),
    ],
    ids=str,
)
def test_arrays_come_back(array):
    back = round_trip(array)
    assert same(back, np.array(array, order="C"))
    assert back.flags.writeable
    assert back.flags.owndata


ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.text(st.characters(categories=["Cs", "Lu"])),
    st.binary(),
    st.sampled_from(list(DTYPES.values())),
    st.lists(st.integers(0, 9)).map(torch.Size),
)
SCALARS = st.one_of(
    hnp.integer_dtypes(endianness="<"), hnp.floating_dtypes(endianness="<", sizes=(16, 32, 64)), hnp.boolean_dtypes()
).flatmap(hnp.from_dtype)
ARRAYS = hnp.arrays(
    st.one_of(
        hnp.scalar_dtypes().filter(lambda d: encode_value(np.empty(1, d)) is not None),
        hnp.unicode_string_dtypes(max_len=3),
        hnp.byte_string_dtypes(max_len=3),
    ),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
KEYS = st.recursive(ATOMS, lambda k: st.lists(k, max_size=3).map(tuple), max_leaves=4)
VALUES = st.recursive(
    ATOMS | SCALARS | ARRAYS,
    lambda v: st.one_of(
        st.lists(v, max_size=4),
        st.lists(v, max_size=4).map(tuple),
        st.dictionaries(KEYS, v, max_size=4),
        st.dictionaries(KEYS, v, max_size=4).map(OrderedDict),
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=250)
@given(VALUES)
def test_any_value_comes_back(value):
    assert same(round_trip(value), value)


def test_the_text_is_readable_ascii():
    value = {"lr": 0.5, "betas": (0.5, 1.0), "step": 7, "name": "\u20ac", "foreach": None}
    assert encode_value(value) == (
        b'["dict","lr",["float","0x1.0000000000000p-1"],"betas",["tuple",["float","0x1.0000000000000p-1"],'
        b'["float","0x1.0000000000000p+0"]],"step",7,"name","\\u20ac","foreach",null]'
    )


# -- values without a plain form -------------------------------------------------------------------------------------


class Level(enum.IntEnum):
    LOW = 1


class Name(str):
    pass


Point = collections.namedtuple("Point", "x y")


class Sub(torch.Tensor):
    pass


def with_attribute(value):
    value.note = 1
    return value


def containing_itself(value):
    value.append((1, {"x": value}))
    return value


def shared(depth):
    value = ()
    for _ in range(depth):
        value = (value, value)
    return value


NOT_PLAIN = [
    *[datetime.date(2020, 1, 1), np.dtype("f4"), shared(60)],
    *[
        {1, 2},
        frozenset(),
        bytearray(b"x"),
        range(3),
        slice(1),
        Ellipsis,
        object(),
        int,
        len,
        datetime.date(2020, 1, 1),
    ],
    *[collections.defaultdict(int), collections.Counter("a"), collections.deque(), Point(1, 2), Level.LOW, Name("x")],
    *[torch.nn.Parameter(torch.ones(1)), torch.ones(1).as_subclass(Sub), torch.ones(1).to_sparse(), torch.strided],
    *[torch.ones(1, device="meta"), with_attribute(torch.ones(1)), with_attribute(OrderedDict()), torch.Generator()],
    *[torch.empty(1, dtype=torch.bits8), torch.ones(1).expand(2**40), torch.ones(1, 1).to_mkldnn()],
    *[np.array([None]), np.array([(1, 2)], dtype="i4,i4"), np.ma.array([1]), np.longdouble(1)],
    *[np.array([1], np.longlong), np.longlong(1), np.void(b"x"), np.empty(0, "U100000")],
    *[np.zeros(1, np.dtype("f4", metadata={"a": 1})), np.memmap],
    *[containing_itself([]), np.broadcast_to(np.float32(1), (2**30,)), b"x" * (values.MAX_BYTES + 1)],
    *["x" * values.MAX_BYTES, b"x" * (values.MAX_BYTES * 3 // 4 + 1)],
]


@pytest.mark.parametrize("value", NOT_PLAIN, ids=lambda v: type(v).__name__)
def test_other_values_have_no_plain_form(value, monkeypatch):
    monkeypatch.setattr(values, "MAX_NODES", 10**5)  # shared parts: two to the 60 otherwise
    assert encode_value(value) is None
    if type(value) not in (str, bytes):
        assert encode_value([1, (value,)]) is None
        if isinstance(value, (int, str, frozenset, torch.Tensor)):
            assert encode_value({value: 1}) is None


def nested(depth, kind):
    value = 5
    for _ in range(depth):
        value = kind(value)
    return value


@pytest.mark.parametrize(
    "kind", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: {v: 1} if v == 5 else (v,)]
)
def test_depth(kind):
    deepest = nested(MAX_DEPTH, kind)
    assert same(round_trip(deepest), deepest)
    assert encode_value(nested(MAX_DEPTH + 1, kind)) is None
    assert encode_value(nested(3000, kind)) is None


def test_deepest_leaves_of_all_kinds():
    leaf = [np.str_("x"), np.float32(1), torch.Size([1]), 1.5, torch.ones(2)]
    deepest = nested(MAX_DEPTH - 1, lambda v: [v] if v != 5 else leaf)
    assert same(round_trip([deepest]), [deepest])


def test_a_part_that_occurs_twice_is_written_twice():
    part = [1]
    back = round_trip([part, part])
    assert back == [[1], [1]]


# -- hostile bytes ---------------------------------------------------------------------------------------------------

HUGE = 2**62
REFUSED = {
    "empty": (b"", "not JSON"),
    "not json": (b"[", "not JSON"),
    "pickle": (b"\x80\x04K\x05.", "not JSON .*utf-8"),
    "invalid utf-8": (b'"\xff"', "not JSON .*utf-8"),
    "two values": (b"1 2", "not JSON .*Extra data"),
    "object": (b'{"a": 1, "a": 2}', "this JSON is not used"),
    "json float": (b"1.5", "this JSON is not used.*got '1.5'"),
    "json nan": (b"NaN", "this JSON is not used"),
    "long integer": (b"9" * 21, "this JSON is not used"),
    "longer integer": (b"9" * 10**6, "this JSON is not used"),
    "integer out of range": (b"18446744073709551616", "integer out of range"),
    "deep json": (b"[" * 10**6, r"not JSON \(.*recursion"),
    "deep value": (b'["list",' * 101 + b"1" + b"]" * 101, r"\$(\[1\]){100}: nested too deep; expected at most 100"),
    "no tag": (b"[]", r"\$: unknown tag"),
    "tag no text": (b"[1]", r"\$: unknown tag"),
    "tag a list": (b'[["list"]]', r"unknown tag.*got a list"),
    "unknown tag": (
        text(["tuple", 1, ["set", 2]]),
        r"value at \$\[2\]: unknown tag; expected one of int .*'set'",
    ),
    "long tag": (text(["x" * 10**6]), "unknown tag.*'x{40}'$"),
    "arity": (text(["list", ["float"]]), r"\$\[1\]: float of a wrong length; expected 1 after the tag; got 0"),
    "arity 2": (text(["complex", "0x0.0p+0"]), "complex of a wrong length; expected 2 after the tag; got 1"),
    "bad int": (text(["int", "12"]), "not an integer in hex form"),
    "bad int 2": (text(["int", "0xg"]), "bad int"),
    "int no text": (text(["int", 12]), "int is not text; got 12"),
    "bad float": (text(["float", "1.5"]), "not a float in hex form"),
    "float overflow": (text(["float", "0x1p+99999"]), "bad float"),
    "float long": (text(["float", "0" * 10**6]), "not a float in hex form"),
    "bad base64": (text(["bytes", "a"]), "bad bytes"),
    "base64 with spaces": (text(["bytes", "YQ==\n"]), "bad bytes"),
    "base64 not ascii": (text(["bytes", "\xe9"]), "bad bytes"),
    "bad surrogate bytes": (text(["str", b64(b"\xff")]), "bad str"),
    "odd dict": (text(["dict", 1]), "dict with a key without value; expected an even count; got 1"),
    "equal keys": (text(["dict", 1, 2, True, 3]), "dict with equal keys; expected 2 keys; got 1"),
    "equal ordered keys": (text(["odict", "a", 2, "a", 3]), "odict with equal keys"),
    "unhashable key": (text(["dict", ["list"], 2]), r"bad dict \(.*unhashable"),
    "dtype": (text(["dtype", "load"]), "unknown dtype; got 'load'"),
    "device": (text(["device", "gibberish", None]), "bad device"),
    "device text": (text(["device", "cpu:0", None]), "unknown device type"),
    "device index": (text(["device", "cuda", 300]), "device index out of range; expected null or 0 to 127; got 300"),
    "size": (text(["size", True]), "not a torch.Size; expected 64-bit"),
    "size range": (text(["size", 2**63]), "not a torch.Size"),
    "tensor dtype": (text(["tensor", "qint8", [1], "AA==", False]), "unknown tensor dtype; got 'qint8'"),
    "tensor length": (text(["tensor", "int16", [2], b64(b"abc"), False]), r"expected 2 \* 2 bytes; got 3 bytes"),
    "tensor huge": (text(["tensor", "uint8", [HUGE, HUGE], "", False]), "shape and data differ"),
    "tensor overflow": (text(["tensor", "uint8", [0, HUGE, HUGE], "", False]), "bad tensor"),
    "tensor shape": (text(["tensor", "uint8", [-1], "AA==", False]), "not a shape"),
    "tensor shape 2": (text(["tensor", "uint8", [True], "AA==", False]), "not a shape"),
    "tensor shape 3": (text(["tensor", "uint8", 1, "AA==", False]), "not a shape; expected a list of sizes; got 1"),
    "tensor dims": (text(["tensor", "uint8", [HUGE] * 10**5, "", False]), "too many dimensions; expected at most 64"),
    "tensor bool": (text(["tensor", "bool", [1], b64(b"\2"), False]), "neither 0 nor 1"),
    "tensor grad": (text(["tensor", "uint8", [1], "AA==", True]), r"bad tensor \(.*gradients"),
    "tensor grad 2": (text(["tensor", "uint8", [1], "AA==", 1]), "requires_grad is not a boolean; got 1"),
    "array objects": (text(["array", "|O", [1], b64(bytes(8))]), r"unknown numpy dtype; got '\|O'"),
    "array record": (text(["array", "<f4,<f4", [1], b64(bytes(8))]), "unknown numpy dtype"),
    "array alias": (text(["array", "f4", [1], b64(bytes(4))]), "unknown numpy dtype"),
    "array no width": (text(["array", "<U0", [HUGE], ""]), "unknown numpy dtype"),
    "array wide": (text(["array", "<U99999999", [0], ""]), "empty array of very wide elements"),
    "array huge": (text(["array", "<f4", [HUGE, HUGE], ""]), "shape and data differ"),
    "array overflow": (text(["array", "<f4", [0, HUGE, HUGE], ""]), "bad array"),
    "array length": (text(["array", "<f4", [1, 1], b64(bytes(5))]), r"expected 1 \* 4 bytes; got 5 bytes"),
    "array bool": (text(["array", "|b1", [1], b64(b"\7")]), "neither 0 nor 1"),
    "array text": (text(["array", "<U1", [1], b64(b"\xff\xff\xff\x7f")]), "beyond Unicode"),
    "scalar text": (text(["scalar", "<U1", b64(b"a\0\0\0")]), "not a scalar dtype"),
    "scalar swapped": (text(["scalar", ">f4", b64(bytes(4))]), "not a scalar dtype"),
    "np.str": (text(["np.str", 1]), "np.str without a string"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_bytes_are_refused(name):
    data, message = REFUSED[name]
    with pytest.raises(FormatError, match=message) as caught:
        decode_value(data)
    assert "plain value" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_size_and_count_are_limited(monkeypatch):
    reader = sys.modules["guarddcp.container.value_reader"]
    monkeypatch.setattr(reader, "MAX_NODES", 10)
    with pytest.raises(FormatError, match=r"\$\[10\]: too many values; expected at most 10"):
        decode_value(text(["list", *range(20)]))
    monkeypatch.setattr(reader, "MAX_BYTES", 10)
    with pytest.raises(FormatError, match="too large; expected at most 10 bytes; got 11"):
        decode_value(b" " * 11)


@pytest.mark.parametrize(
    "item", [b"[]", b'"ab"', b"1234", b'["list"]', b'["float","0x1.0p+0"]', b'["array","|u1",[1],"AA=="]']
)
def test_memory_is_a_small_multiple_of_the_bytes(item):
    data = b'["list",' + b",".join([item] * (200_000 // len(item))) + b"]"
    tracemalloc.start()
    with contextlib.suppress(FormatError):
        decode_value(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 * len(data)


SEEDS = [d for d in map(encode_value, PLAIN) if d is not None and len(d) < 2000] + [
    encode_value(
        [torch.ones(2, 3), np.arange(3), np.array(["ab"]), torch.Size([2]), torch.float8_e5m2, {"a": (1, 2.5)}]
    )
]


@st.composite
def mutated(draw):
    data = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        piece = draw(
            st.one_of(st.binary(max_size=3), st.sampled_from([b"[", b"]", b",", b"9" * 9, b'"list"', b"null"]))
        )
        data[at : at + draw(st.integers(0, 3))] = piece
    return bytes(data)


TAGS = st.sampled_from(["tuple", "dict", "odict", "tensor", "array", "scalar", "size", "np.str", "int"])
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**65) | st.text(max_size=4) | st.sampled_from(["|O", "AA=="]),
    lambda j: st.tuples(TAGS, st.lists(j, max_size=4)).map(lambda parts: [parts[0], *parts[1]]),
    max_leaves=10,
).map(text)


@settings(deadline=None, max_examples=600)
@given(st.one_of(mutated(), JUNK, st.binary(max_size=40)))
@example(b"\xef\xbb\xbf1")
def test_any_bytes_give_a_value_or_a_format_error(data):
    try:
        value = decode_value(data)
    except FormatError:
        return
    # What is accepted is a value like any other: it can be written, and comes back.
    again = encode_value(value)
    assert again is not None
    assert same(decode_value(again), value)


def test_torch_distributed_is_not_imported():
    for module in ("values", "value_reader", "value_types"):
        source = inspect.getsource(importlib.import_module(f"guarddcp.container.{module}"))
        assert "distributed" not in source
        assert "pickle" not in source.replace("without pickle", "")
