"""What is no moment comes back bit for bit: tensors of every dtype and layout, and plain values with their types."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from jobs import adam, assert_same, failure, round_trip, said
from torch import nn

from guarddcp import GuardedReader, GuardedWriter, inspect_checkpoint, verify
from guarddcp.container.value_types import TENSOR_DTYPES
from guarddcp.dcp.saving import SMALL_BYTES
from guarddcp.errors import GuardError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SHAPES = ((), (0,), (1,), (5, 3), (0, 4), (160, 130))


def of_bytes(dtype: torch.dtype, shape: tuple[int, ...], *, fill: int | None = None) -> torch.Tensor:
    """Any bit patterns (NaN payloads, -0.0, subnormals), or one byte everywhere."""
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    if fill is not None:
        raw.fill_(fill)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


# ---- tensors


@pytest.mark.parametrize("dtype", TENSOR_DTYPES.values(), ids=str)
def test_every_dtype_and_size(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {str(shape): of_bytes(dtype, shape) for shape in SHAPES}
    target = {str(shape): of_bytes(dtype, shape, fill=0) for shape in SHAPES}
    before = dict(target)
    loaded, report = round_trip(state, tmp_path / "ck", target=target)
    assert_same(loaded, state)
    assert all(loaded[key] is before[key] for key in before)  # filled in place
    assert report.exact.raw_bytes == sum(t.numel() * dtype.itemsize for t in state.values())
    assert verify(tmp_path / "ck").ok


def layouts(n: int, *, fill: float | None = None) -> dict[str, torch.Tensor]:
    """Tensors of n x n and the like whose memory is not in row-major order, all with the same shapes."""

    def base(*shape: int) -> torch.Tensor:
        if fill is not None:
            return torch.full(shape, fill)
        return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))

    return {
        "transposed": base(n, n + 1).T,
        "column slice": base(n, 2 * n)[:, 3 : n + 3],
        "row slice": base(2 * n, n)[5 : n + 5],
        "every other": base(2 * n, 2 * n)[::2, ::2],
        "channels last": base(2, 3, n, n).to(memory_format=torch.channels_last),
        "permuted": base(n, 4, n // 2).permute(2, 0, 1),
        "one column": base(n, 7)[:, 3],
        "0-d of a vector": base(n)[3],
    }


@pytest.mark.parametrize("n", [12, 200])
def test_memory_layout_of_source_and_target_does_not_matter(tmp_path: Path, n: int) -> None:
    state, target = layouts(n), layouts(n, fill=-1.0)
    loaded, _ = round_trip(state, tmp_path / "to the same layout", target=dict(target))
    assert_same(loaded, state)
    assert all(loaded[key].stride() == state[key].stride() for key in state)
    contiguous = {key: tensor.contiguous() for key, tensor in state.items()}
    loaded, _ = round_trip(contiguous, tmp_path / "from row-major", target=layouts(n, fill=-1.0))
    assert_same(loaded, contiguous)


def test_a_view_is_stored_alone_and_its_surroundings_stay(tmp_path: Path) -> None:
    whole, target = torch.arange(10_000.0).reshape(100, 100), torch.zeros(100, 100)
    loaded, report = round_trip({"x": whole[:, 7:9]}, tmp_path / "ck", target={"x": target[:, 7:9]})
    assert report.exact.raw_bytes == 800
    assert_same(loaded["x"], whole[:, 7:9])
    assert torch.count_nonzero(target) == torch.count_nonzero(whole[:, 7:9])


def test_expanded_conjugated_and_negated_views(tmp_path: Path) -> None:
    z = torch.randn(90, 80, dtype=torch.complex64)
    state = {"expanded": torch.arange(5.0).expand(3000, 5), "conj": z.conj(), "neg": z.conj().imag, "h": z[:2].mH}
    target = {key: torch.zeros(t.shape, dtype=t.dtype) for key, t in state.items()}
    loaded, _ = round_trip(state, tmp_path / "ck", target=target)
    assert_same(loaded, state)


def test_tied_weights_come_back_under_both_keys(tmp_path: Path) -> None:
    weight = torch.randn(70, 70)
    loaded, _ = round_trip({"a": weight, "b": weight, "c": nn.Parameter(weight)}, tmp_path / "ck")
    for key in "abc":
        assert_same(loaded[key].detach(), weight)


def test_parameters_that_require_grad_are_filled_in_place(tmp_path: Path) -> None:
    state, target = nn.Linear(70, 70), nn.Linear(70, 70)
    weight = target.weight
    loaded, _ = round_trip(dict(state.named_parameters()), tmp_path / "ck", target=dict(target.named_parameters()))
    assert loaded["weight"] is weight
    assert weight.requires_grad
    assert_same(target.state_dict(), state.state_dict())


@pytest.mark.parametrize("elements", [50, 2 * SMALL_BYTES])
def test_default_device_of_the_caller_diverts_nothing(tmp_path: Path, elements: int) -> None:
    state = {"x": torch.randn(elements), "t": torch.randn(elements, 2).T, "value": (torch.ones(2), 1)}
    target = {"x": torch.zeros(elements), "t": torch.zeros(elements, 2).T, "value": None}
    optim = adam(shapes=((elements // 10, 10),)).state_dict()
    for name in ("exp_avg", "exp_avg_sq"):
        optim["state"][0][name] = optim["state"][0][name].T.contiguous().T
    dcp.save({"optim": optim}, storage_writer=GuardedWriter(tmp_path / "without"))
    with torch.device("meta"):
        loaded, _ = round_trip(state, tmp_path / "ck", target=target)
        metadata = dcp.save({"optim": optim}, storage_writer=GuardedWriter(tmp_path / "with"))
    assert_same(loaded, state)
    assert metadata.guard_report.moments == inspect_checkpoint(tmp_path / "without").moments


def test_sparse_tensors_are_restored_from_their_pickle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state, target = {"x": torch.eye(30).to_sparse()}, {"x": torch.zeros(30, 30).to_sparse()}
    loaded, _ = round_trip(state, tmp_path / "ck", target=target)
    assert torch.equal(loaded["x"].to_dense(), torch.eye(30))
    assert len(said(caplog)) == 1
    assert "stored as pickle" in said(caplog)[0]
    assert "[x]" in said(caplog)[0]


def test_quantised_tensors_are_restored_from_their_pickle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantised = torch.quantize_per_tensor(torch.arange(16.0).reshape(4, 4), 0.1, 3, torch.qint8)
    target = {"x": torch.quantize_per_tensor(torch.zeros(4, 4), 0.5, 0, torch.qint8)}
    loaded, _ = round_trip({"x": quantised}, tmp_path / "ck", target=target)
    assert torch.equal(loaded["x"].int_repr(), quantised.int_repr())
    assert loaded["x"].q_scale() == quantised.q_scale()
    assert "stored as pickle" in said(caplog)[0]


# ---- values

RNG = np.random.PCG64(1).state["state"]["state"]
PLAIN: list[Any] = [
    None, True, 3, -(2**70), 1.5, float("inf"), -0.0, "text", "\ud800", b"\x00\xff", 1j, (1, (2.5, None)), [1, 2], [],
    torch.Size([1, 2]), torch.bfloat16, torch.device("cpu"), (torch.ones(3), 2), np.float32(2), np.arange(5), RNG,
    random.Random(0).getstate(), np.random.RandomState(0).get_state(), (0.9, 0.999), ({"a": [1, {"b": ()}]},),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{value!r:.30}")
def test_plain_values_keep_type_and_value(tmp_path: Path, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    loaded, _ = round_trip({"x": value, "y": 1}, tmp_path / "ck", writer={"allow_pickle": False})
    assert type(loaded["x"]) is type(value)
    assert repr(loaded["x"]) == repr(value)
    assert not said(caplog)


def test_nested_containers(tmp_path: Path) -> None:
    state = {
        "rng": {"torch": torch.get_rng_state(), "numpy": np.random.PCG64(3).state},
        "list": [{"lr": 0.1, "betas": (0.9, 0.95)}, {"lr": 0.2, "betas": (0.8, 0.9)}],
        "deep": {"a": {"b": {"c": {"d": torch.arange(4)}}}},
        "ordered": OrderedDict(x=1, y=torch.ones(2)),
    }
    target = {
        "rng": {"torch": torch.zeros_like(torch.get_rng_state()), "numpy": np.random.PCG64(4).state},
        "list": [{"lr": 0.0, "betas": None}, {"lr": 0.0, "betas": None}],
        "deep": {"a": {"b": {"c": {"d": torch.zeros(4, dtype=torch.int64)}}}},
        "ordered": OrderedDict(x=0, y=torch.zeros(2)),
    }
    loaded, _ = round_trip(state, tmp_path / "ck", target=target)
    assert_same(loaded, state)


@pytest.mark.parametrize("value", [{1, 2}, bytearray(b"ab"), torch.strided, (Counter("aab"),)], ids=repr)
def test_values_that_the_safe_unpickler_takes_need_no_permission(
    tmp_path: Path, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loaded, report = round_trip({"odd one": value}, tmp_path / "ck")
    assert loaded["odd one"] == value
    assert said(caplog) == [f"{tmp_path / 'ck'}: {report.warnings[0]}"]
    assert "stored as pickle" in report.warnings[0]
    assert "[odd one]" in report.warnings[0]


ODD: list[Any] = [datetime(2020, 1, 1), Path("/x"), range(3), frozenset([1]), slice(1, 2), (defaultdict(int, a=1),)]


@pytest.mark.parametrize("value", ODD, ids=repr)
def test_other_pickles_are_refused_by_name_unless_allowed(tmp_path: Path, value: Any) -> None:
    state, path = {"run": {"epoch": 1, "odd one": value}, "w": torch.ones(3)}, tmp_path / "ck"
    loaded, _ = round_trip(state, path, reader={"allow_pickle": True})
    assert loaded["run"]["odd one"] == value
    target = {"run": {"epoch": 0, "odd one": None}, "w": torch.zeros(3)}
    error = failure(dcp.load, target, storage_reader=GuardedReader(path))
    assert type(error) is GuardError
    assert str(error).startswith("run.odd one: stored as pickle, and torch's safe unpickler refuses it (Unsupported ")
    assert "Pass allow_pickle=True to GuardedReader" in str(error)
    assert "\x1b" not in str(error)
    # refused before anything was restored
    assert_same(target, {"run": {"epoch": 0, "odd one": None}, "w": torch.zeros(3)})


def test_writer_may_refuse_pickles(tmp_path: Path) -> None:
    writer = GuardedWriter(tmp_path / "ck", allow_pickle=False)
    error = failure(dcp.save, {"fine": 1, "odd": range(3)}, storage_writer=writer)
    assert "rank 0, odd: a value without a plain form can only be stored as pickle" in str(error)
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "ck"])
    assert not list(tmp_path.glob("ck/*"))


def test_empty_state_dict(tmp_path: Path) -> None:
    loaded, report = round_trip({}, tmp_path / "ck")
    assert loaded == {}
    assert report.exact.coordinates == report.moments.coordinates == 0
    assert verify(tmp_path / "ck").ok
