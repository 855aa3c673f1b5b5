"""Rule and step are found wherever a state dict holds them, and nothing is guessed where it does not."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from harness import LAYOUTS, MESHES, BarePlanner, Net, make_job, optimizer_dict, take_steps
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from guarddcp.certificate.rules import Adam
from guarddcp.dcp.groups import Exact, Guarded, OptimizerGroups, groups_from_values, moments_hidden
from guarddcp.dcp.lookup import GroupLookup
from guarddcp.errors import GuardBug

RULE = Adam(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, decoupled_weight_decay=True)


def set_up(planner, state):
    planner.set_up_planner(copy.copy(state), None, True)
    return planner


def found(planner, **options):
    """What is found for every first moment among this rank's items, by key."""
    groups = OptimizerGroups(planner, **options)
    items = planner.create_local_plan().items
    return {item.index.fqn: groups.rule_for(item.index) for item in items if item.index.fqn.endswith(".exp_avg")}


def adam_dict(**changes):
    """A nested optimizer dict of one parameter "w"; ``changes`` replace entries of its group, None removes one."""
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, "maximize": False}
    group |= {"decoupled_weight_decay": True, "params": ["w"]} | changes
    group = {name: value for name, value in group.items() if value is not None}
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3), "exp_avg_sq": torch.ones(2, 3)}
    return {"state": {"w": state}, "param_groups": [group]}


def look_up(state, planner=None, **options):
    """What is found for the only first moment."""
    (result,) = found(set_up(planner or DefaultSavePlanner(), state), **options).values()
    return result


def assert_exact(result, reason, *texts):
    assert isinstance(result, Exact), result
    assert result.reason == reason
    assert all(text in result.message for text in texts), result.message


# ---- layouts, prefixes, planners


@pytest.mark.parametrize("planner", [DefaultSavePlanner, BarePlanner])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("prefix", [(), ("optim",), ("app", "state", "1", "optim.x")], ids=["none", "one", "deep"])
def test_layouts_at_any_depth(layout, prefix, planner):
    model, optimizer = make_job("ddp")
    state = optimizer_dict(model, optimizer, layout)
    for name in reversed(prefix):
        state = {name: state}
    rules = found(set_up(planner(), state))
    assert list(rules.values()) == [Guarded(RULE, 2)] * 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_joined_by_the_user(layout):
    model, optimizer = make_job("ddp")
    flattened = set_up(DefaultSavePlanner(), {"optim": optimizer_dict(model, optimizer, layout)}).state_dict
    for planner in (DefaultSavePlanner(), DefaultSavePlanner(flatten_state_dict=False), BarePlanner()):
        rules = found(set_up(planner, flattened))
        assert list(rules.values()) == [Guarded(RULE, 2)] * 4


def test_optimizers_in_a_list_and_side_by_side():
    two = {"optims": [adam_dict(), adam_dict(betas=(0.8, 0.9))], "other": adam_dict(eps=0.0)}
    rules = found(set_up(DefaultSavePlanner(), two))
    assert rules["optims.0.state.w.exp_avg"].rule == RULE
    assert rules["optims.1.state.w.exp_avg"].rule.betas == (0.8, 0.9)
    assert rules["other.state.w.exp_avg"].rule.eps == 0.0


@pytest.mark.parametrize("planner", [DefaultSavePlanner, BarePlanner])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_group_has_its_own_values(layout, planner):
    torch.manual_seed(0)
    model = Net()
    groups = [
        {"params": list(model.up.parameters()), "betas": (0.0, 0.99), "eps": 0.0, "weight_decay": 0.0, "lr": 0.0},
        {"params": list(model.state.parameters()), "maximize": True},
    ]
    optimizer = torch.optim.Adam(groups)
    take_steps(optimizer, 5)
    rules = found(set_up(planner(), {"optim": optimizer_dict(model, optimizer, layout)}), optimizer=optimizer)
    first = Adam(betas=(0.0, 0.99), eps=0.0, decoupled_weight_decay=False)
    second = Adam(betas=(0.9, 0.999), eps=1e-8, decoupled_weight_decay=False, maximize=True)
    assert list(rules.values()) == [Guarded(first, 5)] * 2 + [Guarded(second, 5)] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_frozen_parameters_have_no_moments_and_disturb_nothing(layout):
    model = Net()
    model.up.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    take_steps(optimizer, 1)
    state = optimizer.state_dict() if layout == "int" else optimizer_dict(model, optimizer, layout)
    assert list(found(set_up(DefaultSavePlanner(), state)).values()) == [Guarded(RULE, 1)] * 3


@pytest.mark.parametrize("planner", [DefaultSavePlanner, BarePlanner])
def test_parameter_named_like_a_group_number(planner):
    flat = {
        f"param_groups.0.{name}": value for name, value in adam_dict()["param_groups"][0].items() if name != "params"
    }
    flat |= {f"state.0.{name}": value for name, value in adam_dict()["state"]["w"].items()}
    assert look_up(flat, planner()) == Guarded(RULE, 3)
    numbered = adam_dict(params=[0])
    numbered["state"] = {0: numbered["state"]["w"]}
    assert look_up(numbered, planner()) == Guarded(RULE, 3)


# ---- hyperparameters


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("betas", (torch.tensor(0.75), torch.tensor(0.5, dtype=torch.float64)), (0.75, 0.5)),
        ("betas", [torch.tensor(0.75), torch.tensor([0.5])], (0.75, 0.5)),
        ("betas", [0.75, 0.5], (0.75, 0.5)),
        ("betas", (0, np.float32(0.5)), (0.0, 0.5)),
        ("betas", (torch.tensor(0.9), 0.5), (float(np.float32(0.9)), 0.5)),
        ("eps", torch.tensor(0.25), 0.25),
        ("eps", 0, 0.0),
        ("weight_decay", torch.tensor(0.5), 0.5),
        ("maximize", True, True),
        ("decoupled_weight_decay", False, False),
    ],
)
@pytest.mark.parametrize("planner", [DefaultSavePlanner, BarePlanner])
def test_numbers_may_be_tensors_and_come_out_exact(name, value, plain, planner):
    result = look_up({"optim": adam_dict(**{name: value})}, planner())
    assert getattr(result.rule, name) == plain
    assert type(getattr(result.rule, name)) is type(plain)


@pytest.mark.parametrize("lr", [0, 1e-3, torch.tensor(1e-3), None])
def test_learning_rate_does_not_matter(lr):
    assert look_up(adam_dict(lr=lr)) == Guarded(RULE, 3)


@pytest.mark.parametrize("name", ["betas", "eps", "weight_decay", "amsgrad", "maximize"])
def test_missing_entry_is_named(name):
    assert_exact(look_up(adam_dict(**{name: None})), "group-keys", f"does not say {name}")


def test_older_groups_do_not_say_how_weight_decays():
    assert look_up(adam_dict(decoupled_weight_decay=None)).rule.decoupled_weight_decay is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("betas", (0.9,)),
        ("betas", (0.9, 0.99, 0.999)),
        ("betas", 0.9),
        ("betas", (0.9, float("nan"))),
        ("betas", (0.9, torch.ones(2))),
        ("betas", [torch.tensor(0.9)] * 3),
        ("eps", "1e-8"),
        ("eps", torch.ones(3)),
        ("weight_decay", float("inf")),
        ("weight_decay", 1j),
        ("amsgrad", 0),
        ("maximize", "no"),
        ("decoupled_weight_decay", 1.0),
    ],
)
def test_odd_values_are_not_interpreted(name, value):
    result = look_up(adam_dict(**{name: value}))
    flattened = isinstance(value, list)
    assert_exact(result, "group-keys" if flattened else "group-values", name)


def test_unlisted_parameter():
    assert_exact(look_up(adam_dict(params=["u"])), "no-group", "no param group")
    assert_exact(look_up({"state": adam_dict()["state"]}), "no-group")


def test_parameter_in_two_groups():
    state = adam_dict()
    state["param_groups"] *= 2
    assert_exact(look_up(state), "ambiguous-group", "param_groups.0.", "param_groups.1.")


def test_key_that_splits_in_two_ways_is_ambiguous_without_paths():
    state = adam_dict(params=["a.state.w"])
    state["state"] = {"a.state.w": state["state"]["w"]}
    inner = {"state.a": {"param_groups": [adam_dict(betas=(0.5, 0.6))["param_groups"][0]]}}
    assert look_up(state | inner) == Guarded(RULE, 3)
    assert_exact(look_up(state | inner, BarePlanner()), "ambiguous-group", "state.a.param_groups.0.")


# ---- state of the parameter


@pytest.mark.parametrize(
    "step",
    [
        3,
        3.0,
        np.int64(3),
        torch.tensor(3.0),
        torch.tensor([3]),
        torch.tensor([[3.0]]),
        torch.tensor(3.0, dtype=torch.bfloat16),
    ],
    ids=repr,
)
@pytest.mark.parametrize("planner", [DefaultSavePlanner, BarePlanner])
def test_step_may_be_any_whole_number(step, planner):
    state = adam_dict()
    state["state"]["w"]["step"] = step
    result = look_up(state, planner())
    assert result == Guarded(RULE, 3)
    assert type(result.step) is int


@pytest.mark.parametrize(
    "step",
    [
        0,
        -1,
        2.5,
        float("nan"),
        float("inf"),
        True,
        "3",
        10**400,
        torch.tensor(0.0),
        torch.tensor([1.0, 2.0]),
        torch.tensor(True),
    ],
    ids=repr,
)
def test_step_that_counts_no_updates(step):
    state = adam_dict()
    state["state"]["w"]["step"] = step
    assert_exact(look_up(state), "step", "at least 1", str(step)[:20])


@given(st.integers(1, 2**24))
def test_step_comes_out_of_float32_exactly(step):
    state = adam_dict()
    state["state"]["w"]["step"] = torch.tensor(float(step))
    assert look_up(state).step == step


def test_amsgrad_is_named_as_such():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    take_steps(optimizer, 1)
    for planner in (DefaultSavePlanner(), BarePlanner()):
        rules = found(set_up(planner, optimizer_dict(model, optimizer, "nested")))
        assert {result.reason for result in rules.values()} == {"amsgrad"}
    assert_exact(look_up(adam_dict(amsgrad=True)), "amsgrad")  # the state has no maximum yet


@pytest.mark.parametrize(
    "extra", [{"max_exp_avg_sq": torch.ones(2, 3)}, {"exp_avg_res": torch.ones(1)}, {"sub": {"x": 1}}]
)
def test_more_state_than_adam_has(extra):
    state = adam_dict()
    state["state"]["w"] |= extra
    assert_exact(look_up(state), "state-keys", next(iter(extra)))


@pytest.mark.parametrize("name", ["step", "exp_avg_sq"])
@pytest.mark.parametrize("planner", [DefaultSavePlanner, BarePlanner])
def test_less_state_than_adam_has(name, planner):
    state = adam_dict()
    del state["state"]["w"][name]
    assert_exact(look_up(state, planner()), "state-keys", "this one holds")


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_optimizers_of_torch(kind, layout):
    model = Net()
    optimizer = kind(model.parameters())
    take_steps(optimizer, 1)
    rules = found(set_up(DefaultSavePlanner(), optimizer_dict(model, optimizer, layout)))
    assert {result.reason for result in rules.values()} <= {"group-keys", "state-keys"}
    assert len(rules) == 4


class Wrapped(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("v", "reason"),
    [
        (torch.ones(2, 3, dtype=torch.bfloat16), "dtype"),
        (torch.ones(3, 2), "shape"),
        (torch.ones(2, 3).as_subclass(Wrapped), "tensor-type"),
        ([1.0], "tensor-type"),
    ],
)
@pytest.mark.parametrize("planner", [DefaultSavePlanner, BarePlanner])
def test_moments_must_be_two_float32_tensors_of_one_shape(v, reason, planner):
    state = adam_dict()
    state["state"]["w"]["exp_avg_sq"] = v
    lists = isinstance(v, list) and planner is BarePlanner  # not found when asked for as a tensor
    assert_exact(look_up(state, planner()), "state-keys" if lists else reason)


def test_parameters_and_views_are_plain():
    state = adam_dict()
    state["state"]["w"] |= {"exp_avg": torch.nn.Parameter(torch.ones(2, 3)), "exp_avg_sq": torch.ones(3, 2).T}
    assert look_up(state) == Guarded(RULE, 3)


# ---- what the caller adds


class OwnAdam(torch.optim.AdamW):
    pass


def test_live_optimizer_must_be_torchs_own():
    params = [torch.nn.Parameter(torch.ones(2, 3))]
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        assert look_up(adam_dict(), optimizer=kind(params)) == look_up(adam_dict(), optimizer=kind) == Guarded(RULE, 3)
    for kind in (OwnAdam, torch.optim.NAdam):
        for optimizer in (kind(params), kind):
            assert_exact(look_up(adam_dict(), optimizer=optimizer), "optimizer-type", kind.__qualname__, "give rule=")
    assert look_up(adam_dict(), optimizer=OwnAdam(params), rule=RULE) == Guarded(RULE, 3)


def test_given_rule_replaces_the_group_but_not_the_state():
    rule = Adam(betas=(0.5, 0.6), eps=0.0)
    assert look_up({"state": adam_dict()["state"]}, rule=rule) == Guarded(rule, 3)
    assert look_up(adam_dict(amsgrad=True), rule=rule) == Guarded(rule, 3)
    state = adam_dict()
    state["state"]["w"]["step"] = torch.tensor(0.0)
    assert_exact(look_up(state, rule=rule), "step")
    state["state"]["w"]["more"] = 1
    assert_exact(look_up(state, rule=rule), "state-keys")
    assert_exact(look_up(adam_dict(), rule=Adam(betas=(0.5, 0.6), eps=0.0, amsgrad=True)), "amsgrad")


def test_only_first_moments_have_rules():
    groups = OptimizerGroups(set_up(DefaultSavePlanner(), adam_dict()))
    with pytest.raises(
        GuardBug, match=r"state\.w\.exp_avg_sq: asked for the rule of something that is no first moment"
    ):
        groups.rule_for(MetadataIndex("state.w.exp_avg_sq", (0, 0)))


def test_groups_are_read_once():
    names = [f"p{number}" for number in range(50)]
    values = {f"param_groups.0.{name}": value for name, value in adam_dict(params=names)["param_groups"][0].items()}
    asked = []

    def get(key):
        asked.append(key)
        return 1 if key.endswith(".step") else values.get(key)

    lookup = GroupLookup(get, lambda m_index: frozenset(("step", "exp_avg", "exp_avg_sq")))
    assert all(lookup.rule_for(MetadataIndex(f"state.{name}.exp_avg")) == Guarded(RULE, 1) for name in names)
    assert asked.count("param_groups.0.betas") == 1
    assert asked.count("param_groups.0.params") == 1


# ---- hidden moments, checkpoints


def test_optimizer_in_one_byte_item_is_noticed():
    state = {"model": {"w": torch.ones(2)}, "optim": adam_dict(), "list": [adam_dict()], "lr": 1.0}
    assert moments_hidden(set_up(DefaultSavePlanner(flatten_state_dict=False), state)) == ["optim", "list"]
    flat = {"optim": {"state.w.exp_avg": torch.ones(1)}}
    assert moments_hidden(set_up(DefaultSavePlanner(flatten_state_dict=False), flat)) == ["optim"]
    assert moments_hidden(set_up(DefaultSavePlanner(), state)) == []
    assert moments_hidden(set_up(BarePlanner(), state)) == []


@pytest.mark.parametrize("with_paths", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoint_tells_the_same(layout, with_paths):
    model, optimizer = make_job("ddp", betas=(0.8, 0.95))
    planner = set_up(DefaultSavePlanner(), {"optim": optimizer_dict(model, optimizer, layout)})
    stored = planner.state_dict

    def get(key):
        assert "exp_avg" not in key
        return stored.get(key)

    lookup = groups_from_values(get, stored, planner.mappings if with_paths else None)
    rules = found(planner)
    assert len(rules) == 4
    assert {key: lookup.rule_for(MetadataIndex(key, (0, 0))) for key in rules} == rules


def test_checkpoint_without_the_step():
    stored = set_up(DefaultSavePlanner(), adam_dict()).state_dict
    lookup = groups_from_values(lambda key: None if key.endswith("step") else stored.get(key), stored)
    assert_exact(lookup.rule_for(MetadataIndex("state.w.exp_avg", (0, 0))), "step", "not None")


# ---- on ranks


def _look_up_on_a_mesh(rank, num_ranks, mesh):
    model, optimizer = make_job(mesh, weight_decay=0.1)
    expected = Guarded(Adam(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1), 2)
    for layout in LAYOUTS:
        state = {"model": model.state_dict(), "optim": optimizer_dict(model, optimizer, layout)}
        for planner in (DefaultSavePlanner(), BarePlanner(), DefaultSavePlanner(enable_plan_caching=True)):
            assert list(found(set_up(planner, state)).values()) == [expected] * 4, (layout, planner)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_rank_finds_every_rule(mesh):
    run_ranks(4, _look_up_on_a_mesh, mesh)


def _look_up_sharded_tensors(rank, num_ranks):
    state = adam_dict()
    for name in ("exp_avg", "exp_avg_sq"):
        shard = Shard.from_tensor_and_offsets(torch.ones(2, 3), [2 * rank, 0], rank)
        state["state"]["w"][name] = init_from_local_shards([shard], 4, 3)
    for planner in (DefaultSavePlanner(), BarePlanner()):
        assert look_up(state, planner) == Guarded(RULE, 3)


def test_sharded_tensors():
    run_ranks(2, _look_up_sharded_tensors)
