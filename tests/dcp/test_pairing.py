"""m and v of a chunk stay together, nothing is lost, and Metadata comes out as if there were no pairs."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import LAYOUTS, MESHES, BarePlanner, MemoryReader, MemoryWriter, local, make_job, optimizer_dict
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _compare_save_plans
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as ShardDim
from torch.distributed.tensor import distribute_tensor

from guarddcp.dcp.pairing import PAIR_SUFFIX, PairItem, check_coverage, fold_pairs, unfold_metadata
from guarddcp.errors import FormatError, GuardError

M, V = "optim.state.w.exp_avg", "optim.state.w.exp_avg_sq"
F32, BF16 = torch.float32, torch.bfloat16


def shard(fqn, offset=(0, 0), sizes=(2, 3), size=(4, 3), dtype=F32):
    chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(size))
    return WriteItem(MetadataIndex(fqn, offset), WriteItemType.SHARD, None, data)


def byte(fqn):
    return WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)


def keys_of(plan):
    return [item.index.fqn for item in plan.items]


def coverage_of(metadata):
    """One result per chunk and byte key, as a faithful writer returns them."""
    results = []
    for key, entry in metadata.state_dict_metadata.items():
        offsets = [chunk.offsets for chunk in entry.chunks] if isinstance(entry, TensorStorageMetadata) else [None]
        results += [WriteResult(MetadataIndex(key, offset), 1, None) for offset in offsets]
    return results


# ---- folding a plan


def test_pair_takes_the_place_of_m_and_v_disappears():
    plan = SavePlan([byte("lr"), shard(V), shard(M), shard("w")], storage_data="kept", planner_data={"a": 1})
    folded = fold_pairs(plan)
    assert keys_of(folded) == ["lr", M + PAIR_SUFFIX, "w"]
    assert (folded.storage_data, folded.planner_data) == ("kept", {"a": 1})
    pair = folded.items[1]
    assert isinstance(pair, PairItem)
    assert (pair.m, pair.v) == (shard(M).index, shard(V).index)
    assert pair.members == (shard(M), shard(V))
    assert pair.tensor_storage_size() == 2 * shard(M).tensor_storage_size() == 96


@pytest.mark.parametrize(
    "other",
    [
        shard(V, dtype=BF16),
        shard(V, offset=(2, 0)),
        shard(V, sizes=(1, 3)),
        shard(V, size=(2, 3)),
        dataclasses.replace(shard(V), type=WriteItemType.TENSOR),
        dataclasses.replace(byte(V), index=shard(V).index),
        shard("optim.state.u.exp_avg_sq"),
        shard("optim.state.w.exp_avg_sq_row"),
    ],
    ids=["dtype", "offset", "sizes", "size", "type", "bytes", "parameter", "name"],
)
def test_what_differs_in_more_than_the_suffix_stays_apart(other):
    plan = SavePlan([shard(M), other])
    assert fold_pairs(plan) == plan


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float64, torch.int8])
def test_moments_of_other_types_stay_apart(dtype):
    plan = SavePlan([shard(M, dtype=dtype), shard(V, dtype=dtype)])
    assert fold_pairs(plan) == plan


def test_pinning_does_not_part_a_pair():
    pinned = dataclasses.replace(shard(V).tensor_data, properties=TensorProperties(dtype=F32, pin_memory=True))
    assert len(fold_pairs(SavePlan([shard(M), dataclasses.replace(shard(V), tensor_data=pinned)])).items) == 1


def test_stand_in_of_plan_caching_passes_through():
    stand_in = SavePlan([], usable=False)
    assert fold_pairs(stand_in) is stand_in


def test_folding_twice_changes_nothing():
    once = fold_pairs(SavePlan([shard(M), shard(V), byte("lr")]))
    assert fold_pairs(once) == once


def test_key_that_looks_like_a_pair_is_refused():
    with pytest.raises(FormatError, match=r"bad \+ exp_avg_sq \[moment pair\].*Rename it"):
        fold_pairs(SavePlan([shard("bad" + PAIR_SUFFIX)]))


def test_empty_shards_of_one_rank_fold_each():
    twice = [shard(M, (4, 0), (0, 3)), shard(M, (4, 0), (0, 3)), shard(V, (4, 0), (0, 3)), shard(V, (4, 0), (0, 3))]
    assert [type(item) for item in fold_pairs(SavePlan(twice)).items] == [PairItem, PairItem]


def test_pair_survives_pickle_and_new_hints():
    pair = fold_pairs(SavePlan([shard(M), shard(V)])).items[0]
    hinted = dataclasses.replace(pickle.loads(pickle.dumps(pair)), index=dataclasses.replace(pair.index, index=7))
    assert hinted == pair
    assert hinted.members == pair.members


def test_deduplication_weighs_both_moments():
    replicas = [SavePlan([shard(M), shard(V), shard("a"), shard("b"), shard("c")])] * 2
    first, second = dedup_save_plans([fold_pairs(plan) for plan in replicas])
    assert keys_of(first) == [M + PAIR_SUFFIX, "c"]
    assert keys_of(second) == ["a", "b"]


def test_plan_cache_tells_a_pair_from_a_lone_moment():
    pair = fold_pairs(SavePlan([shard(M), shard(V)]))
    assert not _compare_save_plans(SavePlan([shard(M)]), pair)
    assert _compare_save_plans(pair, copy.deepcopy(pair))


# ---- Metadata


def test_metadata_lists_v_behind_m():
    _, metadata = create_default_global_save_plan([fold_pairs(SavePlan([byte("lr"), shard(V), shard(M), byte("x")]))])
    unfold_metadata(metadata)
    entries = metadata.state_dict_metadata
    assert list(entries) == ["lr", M, V, "x"]
    assert (
        entries[M] == entries[V] == TensorStorageMetadata(TensorProperties(F32), torch.Size((4, 3)), entries[M].chunks)
    )
    assert entries[M].chunks is not entries[V].chunks


@st.composite
def plans(draw):
    """Local plans of 1 to 3 ranks; each tensor of 5 rows is cut by rows (empty shards last), or replicated."""
    num_ranks = draw(st.integers(1, 3))
    items = [[] for _ in range(num_ranks)]
    for number in range(draw(st.integers(1, 4))):
        cuts = sorted(draw(st.sets(st.integers(1, 4), max_size=num_ranks - 1)))
        cuts += [5] * (num_ranks - 1 - len(cuts))
        bounds = list(zip([0, *cuts], [*cuts, 5], strict=True))
        names = draw(st.sampled_from([("exp_avg", "exp_avg_sq"), ("exp_avg_sq", "exp_avg"), ("exp_avg",), ("w",)]))
        v_type, replicated = draw(st.sampled_from([F32, BF16])), draw(st.booleans())
        for rank in range(num_ranks):
            begin, end = (0, 5) if replicated else bounds[rank]
            for name in names:
                dtype = v_type if name == "exp_avg_sq" else F32
                items[rank].append(shard(f"state.{number}.{name}", (begin, 0), (end - begin, 2), (5, 2), dtype))
    return [SavePlan(of_rank, planner_data=None) for of_rank in items]


@given(plans())
def test_metadata_is_that_of_a_save_without_pairs(local_plans):
    _, stock = create_default_global_save_plan(dedup_save_plans(local_plans))
    final, metadata = create_default_global_save_plan(dedup_save_plans([fold_pairs(plan) for plan in local_plans]))
    unfold_metadata(metadata)
    chunks = {key: {(c.offsets, c.sizes) for c in md.chunks} for key, md in metadata.state_dict_metadata.items()}
    assert chunks == {key: {(c.offsets, c.sizes) for c in md.chunks} for key, md in stock.state_dict_metadata.items()}
    members = [m for plan in final for i in plan.items for m in (i.members if isinstance(i, PairItem) else [i])]
    check_coverage(metadata, [[WriteResult(member.index, 1, None) for member in members]])


def test_unfolding_twice_changes_nothing():
    _, metadata = create_default_global_save_plan([fold_pairs(SavePlan([shard(M), shard(V), byte("lr")]))])
    entries = metadata.state_dict_metadata
    unfold_metadata(metadata)
    once = copy.deepcopy(metadata)
    unfold_metadata(metadata)
    assert metadata == once
    assert metadata.state_dict_metadata is entries


@pytest.mark.parametrize("pair_first", [True, False])
def test_chunks_planned_alone_join_those_of_pairs(pair_first):
    pair, alone = [shard(M), shard(V)], [shard(M, (2, 0)), shard(V, (2, 0), dtype=BF16)]
    items = [fold_pairs(SavePlan(part)).items for part in ((pair, alone) if pair_first else (alone, pair))]
    _, metadata = create_default_global_save_plan([SavePlan(items[0] + items[1])])
    unfold_metadata(metadata)
    for key in (M, V):
        assert {chunk.offsets for chunk in metadata.state_dict_metadata[key].chunks} == {(0, 0), (2, 0)}
    check_coverage(metadata, [coverage_of(metadata)])


def test_moment_that_is_no_tensor_elsewhere_is_refused():
    _, metadata = create_default_global_save_plan([fold_pairs(SavePlan([shard(M), shard(V)])), SavePlan([byte(V)])])
    with pytest.raises(GuardError, match=rf"{V}: ranks disagree .*expected a tensor.*BytesStorageMetadata"):
        unfold_metadata(metadata)


# ---- coverage


def two_halves():
    chunks = [ChunkStorageMetadata(torch.Size((begin, 0)), torch.Size((2, 3))) for begin in (0, 2)]
    tensor = TensorStorageMetadata(TensorProperties(), torch.Size((4, 3)), chunks)
    return Metadata({"w": tensor, "lr": BytesStorageMetadata()})


def test_exact_coverage_is_accepted_whoever_wrote_it():
    metadata = two_halves()
    first, *others = coverage_of(metadata)
    check_coverage(metadata, [[first, {"report": 1}, "text", (1, 2)], [], others])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda results: results[1:], r"w: chunk at \(0, 0\) not written"),
        (lambda results: results[:-1], r"lr: not written"),
        (lambda results: [*results, results[1]], r"w: chunk at \(2, 0\) written 2 times"),
        (lambda results: [*results, results[2]], r"lr: written 2 times"),
        (lambda results: [*results, WriteResult(MetadataIndex("u"), 1, None)], r"u: written, but not part of the plan"),
        (lambda results: [*results, WriteResult(MetadataIndex("w", (1, 0)), 1, None)], r"w: chunk at \(1, 0\) written"),
    ],
)
def test_anything_else_is_refused_by_key(change, text):
    metadata = two_halves()
    with pytest.raises(GuardError, match=rf"1 key\(s\) at fault: {text}.*All replicas must save the same"):
        check_coverage(metadata, [change(coverage_of(metadata))])


@pytest.mark.parametrize(("sizes", "got"), [((1, 3), 9), ((3, 3), 15)])
def test_gap_and_overlap_show_in_the_volume(sizes, got):
    metadata = two_halves()
    metadata.state_dict_metadata["w"].chunks[1].sizes = torch.Size(sizes)
    with pytest.raises(GuardError, match=rf"w: chunks hold {got} elements, the tensor has 12"):
        check_coverage(metadata, [coverage_of(metadata)])


def test_long_lists_of_keys_are_cut():
    metadata = Metadata({f"k{number}": BytesStorageMetadata() for number in range(8)})
    with pytest.raises(GuardError, match=r"8 key\(s\) at fault: k0: .*k4: not written; and 3 more") as caught:
        check_coverage(metadata, [])
    assert "k5" not in str(caught.value)


def test_empty_shards_may_share_an_index():
    size, empty = torch.Size((2, 1)), ChunkStorageMetadata(torch.Size((2, 0)), torch.Size((0, 1)))
    whole = ChunkStorageMetadata(torch.Size((0, 0)), size)
    deduplicated = Metadata({"w": TensorStorageMetadata(TensorProperties(), size, [whole, empty])})
    check_coverage(deduplicated, [coverage_of(deduplicated)])
    repeated = Metadata({"w": TensorStorageMetadata(TensorProperties(), size, [whole, empty, empty])})
    check_coverage(repeated, [coverage_of(repeated)])
    with pytest.raises(GuardError, match=r"w: chunk at \(2, 0\) not written"):
        check_coverage(repeated, [coverage_of(repeated)[:1]])


def test_scalars_and_empty_tensors_are_covered_by_their_chunk():
    chunk = ChunkStorageMetadata(torch.Size(()), torch.Size(()))
    metadata = Metadata({"step": TensorStorageMetadata(TensorProperties(), torch.Size(()), [chunk])})
    check_coverage(metadata, [coverage_of(metadata)])
    with pytest.raises(GuardError, match=r"step: not written"):
        check_coverage(metadata, [[]])


# ---- whole saves on gloo ranks


def zeros_like_tree(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: zeros_like_tree(entry) for key, entry in value.items()}
    return [zeros_like_tree(entry) for entry in value] if isinstance(value, list) else value


def leaves(value, prefix=()):
    if isinstance(value, dict):
        return [leaf for key, entry in value.items() for leaf in leaves(entry, (*prefix, key))]
    if isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        return [leaf for i, entry in enumerate(value) for leaf in leaves(entry, (*prefix, i))]
    return [(prefix, value)]


def assert_equal_trees(got, expected):
    for (path, a), (other, b) in zip(leaves(got), leaves(expected), strict=True):
        assert path == other
        if isinstance(b, torch.Tensor):
            assert all(torch.equal(x, y) for x, y in zip(local(a), local(b), strict=True)), path
        else:
            assert a == b, path


def save_and_check(state, planner=None, writer=None):
    """Save, load into zeros, compare bit for bit; returns the Metadata."""
    metadata = dcp.save(state, storage_writer=writer or MemoryWriter(), planner=planner)
    target = zeros_like_tree(state)
    dcp.load(target, storage_reader=MemoryReader(metadata))
    assert_equal_trees(target, state)
    return metadata


def assert_all_paired(metadata, num_pairs=None):
    found = 0
    for index, (rank, together, _) in metadata.storage_data.items():
        if index.fqn.endswith(".exp_avg"):
            v_rank, v_together, _ = metadata.storage_data[MetadataIndex(index.fqn + "_sq", index.offset)]
            assert together
            assert v_together
            assert rank == v_rank
            found += 1
    assert found > 0
    assert num_pairs in (None, found)


def _save_every_layout(rank, num_ranks, mesh):
    model, optimizer = make_job(mesh)
    for layout in LAYOUTS:
        assert_all_paired(save_and_check({"optim": optimizer_dict(model, optimizer, layout), "epoch": 3}))


@pytest.mark.parametrize("mesh", MESHES)
def test_every_pair_stays_together_and_comes_back(mesh):
    run_ranks(4, _save_every_layout, mesh)


def _save_with_caching(rank, num_ranks, mesh):
    model, optimizer = make_job(mesh)
    state = {"optim": optimizer_dict(model, optimizer, "nested")}
    if rank == 1:
        state["extra"] = torch.arange(3.0)
    writer = MemoryWriter()
    for save in range(5):
        if rank == 1 and save == 3:  # one rank's plan changes; the others go on with cached ones
            del state["extra"]
        for leaf in leaves(state):
            if isinstance(leaf[1], torch.Tensor):
                leaf[1].add_(1)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        metadata = save_and_check(state, planner, writer if save % 2 else MemoryWriter())
        assert_all_paired(metadata)
        assert ("extra" in metadata.state_dict_metadata) == (save < 3)
        assert not any(key.endswith(PAIR_SUFFIX) for key in metadata.state_dict_metadata)


@pytest.mark.parametrize("mesh", ["ddp", "hsdp"])
def test_plan_caching_keeps_pairs_through_unchanged_and_changed_plans(mesh):
    run_ranks(4, _save_with_caching, mesh)


def moments(**dtypes):
    names = {"m": "exp_avg", "v": "exp_avg_sq"}
    return {"state": {"w": {names[key]: torch.arange(6.0).to(dtype) for key, dtype in dtypes.items()}}}


def _save_as_moments_come_and_go(rank, num_ranks):
    for state, num_pairs in [
        (moments(m=F32), 0),
        (moments(m=F32, v=F32), 1),
        (moments(m=F32), 0),
        (moments(v=F32), 0),
        (moments(m=F32, v=F32), 1),
        (moments(m=BF16, v=BF16) | {"x": 1}, 0),
    ]:
        metadata = save_and_check(state, DefaultSavePlanner(enable_plan_caching=True))
        assert sum(together for _, together, _ in metadata.storage_data.values()) == 2 * num_pairs


def test_moment_that_appears_behind_a_cached_plan_is_saved():
    run_ranks(2, _save_as_moments_come_and_go)


def failures_of(state, planner=None):
    try:
        dcp.save(state, storage_writer=MemoryWriter(), planner=planner)
    except CheckpointException as error:
        return [failure[0] for failure in error.failures.values()]
    raise AssertionError("the save went through")


def _save_unlike_replicas(rank, num_ranks, caching):
    def planner():
        return DefaultSavePlanner(enable_plan_caching=caching)

    for odd in range(num_ranks):  # whichever rank deduplication prefers
        for partial in (moments(m=F32), moments(v=F32)):
            (error,) = failures_of(partial if rank == odd else moments(m=F32, v=F32), planner())
            assert isinstance(error, GuardError)
            name = "exp_avg" if "exp_avg" in partial["state"]["w"] else "exp_avg_sq"
            assert f"state.w.{name}: chunk at (0,) written 2 times" in str(error)
            assert "All replicas must save the same keys" in str(error)
        assert_all_paired(save_and_check(moments(m=F32, v=F32), planner()), 1)  # a refusal leaves no stale cache


@pytest.mark.parametrize("caching", [False, True])
def test_unlike_replicas_are_refused_and_the_next_save_works(caching):
    run_ranks(3, _save_unlike_replicas, caching)


def _gain_v_on_one_rank(rank, num_ranks):
    save_and_check(moments(m=F32), DefaultSavePlanner(enable_plan_caching=True))
    state = moments(m=F32, v=F32) if rank == num_ranks - 1 else moments(m=F32)
    (error,) = failures_of(state, DefaultSavePlanner(enable_plan_caching=True))
    assert "state.w.exp_avg: chunk at (0,) written 2 times" in str(error)


def test_replica_that_becomes_unlike_behind_cached_plans_is_refused():
    run_ranks(3, _gain_v_on_one_rank)


def _unlike_shards(rank, num_ranks):
    model, optimizer = make_job("hsdp")
    state = optimizer_dict(model, optimizer, "nested")
    if rank == 0:
        del state["state"]["up.weight"]["exp_avg_sq"]
    (error,) = failures_of(state)
    assert "state.up.weight.exp_avg" in str(error)


def test_unlike_shards_are_refused():
    run_ranks(4, _unlike_shards)


class Stranger(MemoryWriter):
    """A writer that knows no pairs."""

    def prepare_local_plan(self, plan):
        return plan

    def write_data(self, plan, planner):
        future = torch.futures.Future()
        future.set_result([WriteResult(i.index, 0, (0, False, planner.resolve_data(i))) for i in plan.items])
        return future


def _share_the_cache(rank, num_ranks, ours_first):
    def save(writer):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        return dcp.save(moments(m=F32, v=F32), storage_writer=writer, planner=planner)

    if ours_first:
        save(MemoryWriter())
        with pytest.raises(CheckpointException, match=r"Could not find FQN: 'state.w.exp_avg \+ exp_avg_sq"):
            save(Stranger())
    else:
        save(Stranger())
        metadata = save(MemoryWriter())
        keys = {"state.w.exp_avg", "state.w.exp_avg_sq"}
        assert keys == set(metadata.state_dict_metadata) == {index.fqn for index in metadata.storage_data}


@pytest.mark.parametrize("ours_first", [True, False])
def test_plan_cache_shared_with_a_stranger_loses_nothing(ours_first):
    run_ranks(2, _share_the_cache, ours_first)


def _save_sharded_tensors(rank, num_ranks):
    rows = [3, 1][rank]
    offset = [0, 3][rank]

    def sharded(value):
        piece = torch.full((rows, 2), value + rank)
        return init_from_local_shards([Shard.from_tensor_and_offsets(piece, [offset, 0], rank)], 4, 2)

    state = {"state": {"w": {"exp_avg": sharded(1.0), "exp_avg_sq": sharded(5.0), "step": torch.tensor(2.0)}}}
    metadata = dcp.save(state, storage_writer=MemoryWriter())
    assert_all_paired(metadata, num_pairs=2)
    target = {"state": {"w": {"exp_avg": sharded(-1.0), "exp_avg_sq": sharded(-1.0), "step": torch.tensor(0.0)}}}
    dcp.load(target, storage_reader=MemoryReader(metadata))
    assert_equal_trees(target, state)


def test_sharded_tensors_of_uneven_rows():
    run_ranks(2, _save_sharded_tensors)


def _save_empty_shards(rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,))
    m, v = (distribute_tensor(torch.arange(5.0).reshape(5, 1) + add, mesh, [ShardDim(0)]) for add in (0, 10))
    metadata = save_and_check({"state": {"w": {"exp_avg": m, "exp_avg_sq": v}}})
    for key in ("state.w.exp_avg", "state.w.exp_avg_sq"):
        assert math.prod(metadata.state_dict_metadata[key].chunks[-1].sizes) == 0
    assert_all_paired(metadata)
    return m.to_local().shape[0]


@pytest.mark.parametrize(("num_ranks", "rows"), [(4, [2, 2, 1, 0]), (6, [1, 1, 1, 1, 1, 0])])
def test_empty_shards(num_ranks, rows):
    assert run_ranks(num_ranks, _save_empty_shards) == rows


def _save_with_bare_planner(rank, num_ranks):
    model, optimizer = make_job("hsdp")
    assert_all_paired(save_and_check({"optim": optimizer_dict(model, optimizer, "flat")}, BarePlanner()))


def test_planner_with_nothing_but_its_interface():
    run_ranks(4, _save_with_bare_planner)


def _save_alone_in_a_group(rank, num_ranks):
    model, optimizer = make_job("fsdp")
    with pytest.raises(CheckpointException, match=r"chunks hold \d+ elements, the tensor has 24.*no_dist=False"):
        dcp.save({"optim": optimizer_dict(model, optimizer, "nested")}, storage_writer=MemoryWriter(), no_dist=True)
    dist.barrier()


def test_shards_of_one_rank_alone_are_refused():
    run_ranks(2, _save_alone_in_a_group)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_without_a_group():
    state = moments(m=F32, v=F32)
    metadata = dcp.save(state, storage_writer=_Quiet(), no_dist=True)
    assert list(metadata.state_dict_metadata) == ["state.w.exp_avg", "state.w.exp_avg_sq"]


class _Quiet(MemoryWriter):
    def write_data(self, plan, planner):
        future = torch.futures.Future()
        members = [member for item in plan.items for member in item.members]
        future.set_result([WriteResult(m.index, planner.resolve_data(m).nbytes, None) for m in members])
        return future
