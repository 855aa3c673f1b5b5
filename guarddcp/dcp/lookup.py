"""Which optimizer rule made a moment pair, and at which step: looked up, never guessed.

A state dict holds an optimizer in one of three layouts, below a prefix of any depth or none (P: the parameter):

    nested    <prefix>state.P.exp_avg    <prefix>param_groups.0.betas    <prefix>param_groups.0.params = [P, ...]
    integer   <prefix>state.4.exp_avg    the same, with numbers for P
    flat      <prefix>state.P.exp_avg    <prefix>param_groups.P.betas    (no list of groups)

P may hold ".state." itself, so a key alone does not say where the prefix ends; the planner's mapping from
keys to paths does. Without one every split is tried, and more than one that fits is ambiguous.

This module knows only a function from key to value. groups.py supplies it, from a planner or a checkpoint.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from guarddcp.certificate.rules import Adam
from guarddcp.dcp.pairing import partner_fqn
from guarddcp.errors import GuardBug

__all__ = ["Exact", "GroupLookup", "Guarded", "Path", "joined", "state_head"]

Path = tuple[str | int, ...]

STATE_NAMES = frozenset({"step", "exp_avg", "exp_avg_sq"})
"""The state of Adam and AdamW without amsgrad. Anything more or less is another optimizer's."""

REQUIRED_NAMES = ("betas", "eps", "weight_decay", "amsgrad", "maximize")
"""What the param group must say. decoupled_weight_decay is asked for too: older torch does not write it."""

SCHEDULE_NAMES = ("base_momentum", "max_momentum")
"""What OneCycleLR and CyclicLR leave in a group whose beta1 they move between the two."""

GROUP_MARKS = ("betas", "betas.0", "eps", "lr")
"""Any of these shows that a flat param group is there."""

MAX_GROUPS = 65_536
"""Group numbers are tried until one is missing; this ends the search in a planner that knows every key."""


@dataclass(frozen=True)
class Guarded:
    """The pair may be coded under ``rule``; ``step`` (>= 1) is the number of updates already made."""

    rule: Adam
    step: int


@dataclass(frozen=True)
class Exact:
    """The pair must be stored exactly. ``reason`` is a short slug, ``message`` a sentence that names the value.

    Slugs: ``optimizer-type``, ``state-keys``, ``amsgrad``, ``tensor-type``, ``dtype``, ``shape``, ``no-group``,
    ``ambiguous-group``, ``group-keys``, ``group-values``, ``scheduled-betas``, ``step``.
    """

    reason: str
    message: str


class GroupLookup:
    """Finds rule and step for the key of a first moment.

    ``get(key)`` returns a value, or None for a key that is not there. ``state_names(m_index)`` returns the names
    of the parameter's state. ``paths`` maps keys to paths, where known. ``rule`` stands for every group.
    """

    def __init__(
        self,
        get: Callable[[str], object],
        state_names: Callable[[MetadataIndex], frozenset[str]],
        paths: Mapping[str, Path] | None = None,
        rule: Adam | None = None,
    ) -> None:
        self._get = get
        self._state_names = state_names
        self._paths = {} if paths is None else paths
        self._rule = rule
        self._members: dict[str, dict[str, list[str]]] = {}
        self._rules: dict[str, Adam | Exact] = {}

    @property
    def rule_is_given(self) -> bool:
        """Whether ``rule`` stands for every group, whatever the groups say."""
        return self._rule is not None

    def rule_for(self, m_index: MetadataIndex) -> Guarded | Exact:
        """Rule and step of the pair whose first moment is ``m_index``, or why there are none.

        Raises GuardBug if the index is not that of a first moment.
        """
        key = m_index.fqn
        if partner_fqn(key) is None:
            raise GuardBug("asked for the rule of something that is no first moment", where=key)
        rule = self._rule or self._group_rule(key)
        problem = _state_problem(self._state_names(m_index), rule)
        if problem is not None:
            return problem
        if isinstance(rule, Exact):
            return rule
        if rule.amsgrad:
            return Exact("amsgrad", "the group uses amsgrad, for which there is no certificate")
        step = _step(self._get(f"{state_head(key)}.step"))
        return step if isinstance(step, Exact) else Guarded(rule, step)

    def _group_rule(self, key: str) -> Adam | Exact:
        groups = {group for prefix, name, kinds in self._splits(key) for group in self._groups(prefix, name, kinds)}
        if not groups:
            return Exact("no-group", "no param group in the state dict lists the parameter")
        if len(groups) > 1:
            return Exact("ambiguous-group", f"the parameter fits more than one param group: {sorted(groups)}")
        group = groups.pop()
        if group not in self._rules:
            self._rules[group] = self._read_rule(group)
        return self._rules[group]

    def _splits(self, key: str) -> Iterator[tuple[str, str, str]]:
        """Yield (prefix, parameter, layouts) that the key allows; one if the path says where the state is."""
        path = self._paths.get(key, (key,))
        if len(path) >= 3 and path[-3] == "state" and path[-1] == "exp_avg":
            yield joined(path[:-3]), str(path[-2]), "nested"
            return
        above, last = joined(path[:-1]), str(path[-1]).removesuffix(".exp_avg")
        begin = 0 if last.startswith("state.") else last.find(".state.") + 1
        while begin > 0 or last.startswith("state.", begin):
            yield above + last[:begin], last[begin + len("state.") :], "nested flat"
            begin = last.find(".state.", begin) + 1
            if begin == 0:
                return

    def _groups(self, prefix: str, name: str, layouts: str) -> Iterator[str]:
        """Yield the heads (``<prefix>param_groups.X.``) of all groups that hold the parameter."""
        if prefix not in self._members:
            self._members[prefix] = self._list_members(prefix)
        yield from self._members[prefix].get(name, ())
        head = f"{prefix}param_groups.{name}."
        # With integer keys, "param_groups.0." is group 0, not parameter 0; only groups of many have `params`.
        if "flat" in layouts and self._get(f"{head}params") is None and self._has_any(head, GROUP_MARKS):
            yield head

    def _has_any(self, head: str, names: Iterable[str]) -> bool:
        return any(self._get(head + name) is not None for name in names)

    def _list_members(self, prefix: str) -> dict[str, list[str]]:
        members: dict[str, list[str]] = {}
        for number in range(MAX_GROUPS):
            head = f"{prefix}param_groups.{number}."
            names = self._get(f"{head}params")
            if not isinstance(names, list | tuple):
                break
            for name in names:
                members.setdefault(str(name), []).append(head)
        return members

    def _read_rule(self, group: str) -> Adam | Exact:
        fields = {name: self._get(group + name) for name in (*REQUIRED_NAMES, "decoupled_weight_decay")}
        if fields["betas"] is None:  # a list of tensors is flattened, a tuple is one value
            fields["betas"] = self._flattened_betas(group)
        missing = [name for name in REQUIRED_NAMES if fields[name] is None]
        if missing:
            return Exact("group-keys", f"the param group does not say {', '.join(missing)}")
        least, most = (self._get(group + name) for name in SCHEDULE_NAMES)
        if least is not None and most is not None and not _same(least, most):
            return Exact("scheduled-betas", "a scheduler cycles beta1, and the bound is for constant betas")
        return _parse_rule(fields)

    def _flattened_betas(self, group: str) -> tuple[object, object] | None:
        b1, b2, more = (self._get(f"{group}betas.{i}") for i in range(3))
        return None if b1 is None or b2 is None or more is not None else (b1, b2)


def _same(a: object, b: object) -> bool:
    try:
        return float(a) == float(b)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def joined(path: Iterable[str | int]) -> str:
    """The path as the beginning of a key: each part with a dot behind it."""
    return "".join(f"{part}." for part in path)


def state_head(m_fqn: str) -> str:
    """``<prefix>state.P``, the part that all state keys of a parameter share."""
    return m_fqn.removesuffix(".exp_avg")


def _state_problem(names: frozenset[str], rule: Adam | Exact) -> Exact | None:
    if names == STATE_NAMES:
        return None
    if names == STATE_NAMES | {"max_exp_avg_sq"} and isinstance(rule, Adam) and rule.amsgrad:
        return Exact("amsgrad", "the state holds max_exp_avg_sq (amsgrad), for which there is no certificate")
    return Exact("state-keys", f"the state of Adam is {sorted(STATE_NAMES)}, this one holds {sorted(names)}")


def _parse_rule(fields: Mapping[str, object]) -> Adam | Exact:
    betas = fields["betas"]
    pair = [_number(beta) for beta in betas] if isinstance(betas, list | tuple) else []
    eps, weight_decay = _number(fields["eps"]), _number(fields["weight_decay"])
    amsgrad, maximize = _flag(fields["amsgrad"]), _flag(fields["maximize"])
    decoupled = _flag(fields["decoupled_weight_decay"])
    if len(pair) != 2 or pair[0] is None or pair[1] is None:
        return _illegal("betas", betas, "two numbers")
    if eps is None:
        return _illegal("eps", fields["eps"], "a number")
    if weight_decay is None:
        return _illegal("weight_decay", fields["weight_decay"], "a number")
    if amsgrad is None or maximize is None or (decoupled is None and fields["decoupled_weight_decay"] is not None):
        flags = {name: fields[name] for name in ("amsgrad", "maximize", "decoupled_weight_decay")}
        return _illegal("flags", flags, "True or False each")
    return Adam(
        betas=(pair[0], pair[1]),
        eps=eps,
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled,
        amsgrad=amsgrad,
        maximize=maximize,
    )


def _illegal(name: str, got: object, expected: str) -> Exact:
    return Exact("group-values", f"the param group's {name} should be {expected}, not {got!r:.200}")


def _number(value: object) -> float | None:
    """A finite Python float of a number or one-element tensor, exactly; None for anything else."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_meta or value.is_complex() or value.dtype == torch.bool:
            return None
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an int beyond every float
        return None
    return number if math.isfinite(number) else None


def _flag(value: object) -> bool | None:
    return bool(value) if isinstance(value, bool | np.bool_) else None


def _step(value: object) -> int | Exact:
    number = _number(value)
    if number is None or number < 1 or not number.is_integer():
        return Exact("step", f"step should be a whole number of at least 1, not {value!r:.200}")
    return int(number)
