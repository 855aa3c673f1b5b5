"""The certificate: made by the writer, recomputed by every reader from its stored constants alone.

certify   writer: chooses the cell, records what it proves
prove     reader: recomputes the whole bound, trusts no stored sum
to_plain / from_plain   the record as JSON-able values, floats exact
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from guarddcp.certificate.bound import bound
from guarddcp.certificate.cell import MAX_LEVELS, W_MARGIN_U, Cell, cell_bits, choose_cell
from guarddcp.certificate.horizon import MAX_FINITE, Horizon, hull
from guarddcp.certificate.rounding import V_MAX, ecov, largest_rounding, rounding_horizon, underflow, v_range
from guarddcp.certificate.rules import MAX_STEP, Adam, Uncertifiable, rule_problem
from guarddcp.errors import FormatError, GuardBug, ToleranceError
from guarddcp.numerics.floats import U, f32_up, is_f32

__all__ = ["Certificate", "bound_at", "certify", "from_plain", "prove", "to_plain"]

AIM = 1.0 - 1e-6
"""The writer aims at this part of the tolerance, so that a reader's float64 cannot land above it."""

RECORDED = 1.0 + 2.0**-40
"""The recorded bound is the computed one times this: another machine's exp and log differ by far less."""

SAME = 1.0 + 1e-9
"""A recorded bound further above the recomputed one than this was not computed from these constants."""

MAX_Q = 2.0**20
"""Largest legal Q: keeps every intermediate of a float32 update finite (10.1)."""


@dataclass(frozen=True)
class Certificate:
    """Which rule, constants and bound a shard was accepted under.

    ``step``: of the save, >= 1. ``horizon``: the steps it speaks of. ``v_min``, ``v_max``: exact float32; v outside
    escapes. ``bound``: of every update up to ``rounding_horizon`` steps after the save, in units of lr, float32
    rounding included. ``rounding_horizon``: equals a finite horizon.
    """

    rule: Adam
    step: int
    tolerance: float
    horizon: Horizon
    rounding_share: float
    cell: Cell
    v_min: float
    v_max: float
    bound: float
    rounding_horizon: int


def _total(rule: Adam, step: int, horizon: Horizon, cell: Cell, rounding_steps: int) -> float:
    """(13.1): the whole bound. The one function behind certify, prove and bound_at."""
    a, b = hull(rule, step, horizon)
    largest = largest_rounding(rule, step, rounding_steps, cell.q_prime)
    exact = float(bound(cell.w, cell.kap, cell.q_max, a, b).max())
    return exact + 2.0 * largest + underflow(rule, step, cell.q_prime, a, b, largest)


def _allowance(first: float, rounding_share: float, tolerance: float) -> float:
    """(9.5): what both runs' rounding may cost for "all"; the first step's is always charged whole."""
    return max(2.0 * first, rounding_share * tolerance)


def _try(rule: Adam, step: int, tolerance: float, horizon: Horizon, share: float, q_max: float) -> Cell | None:
    a, b = hull(rule, step, horizon)
    # w is not known yet; it is at most Q, and a_max w is at most the tolerance.
    a_max = float(a.max())
    q_prime = q_max + (min(q_max, tolerance / a_max) if a_max > 0.0 else q_max) + W_MARGIN_U * U * 2.0 * q_max
    if horizon == "all":
        first = largest_rounding(rule, step, 1, q_prime)
        charge, largest = _allowance(first, share, tolerance), first
    else:
        largest = largest_rounding(rule, step, horizon, q_prime)
        charge = 2.0 * largest
    tau = tolerance * AIM - charge - underflow(rule, step, q_prime, a, b, largest)
    # 1e-12: the recorded bound is rounded up by RECORDED.
    return choose_cell(tau * (1.0 - 1e-11), q_max, a, b) if 0.0 < tau < math.inf else None


def _smallest_tolerance(rule: Adam, step: int, above: float, horizon: Horizon, share: float, q_max: float) -> float:
    """The smallest tolerance (2 digits, rounded up) that can be certified; infinite if none below 1 can."""
    low, high = above, above
    while _try(rule, step, high, horizon, share, q_max) is None:
        low, high = high, high * 4.0
        if high >= 1.0:
            high = 1.0 - 1e-9
            if low >= high or _try(rule, step, high, horizon, share, q_max) is None:
                return math.inf
            break
    while high > low * 1.005:
        middle = math.sqrt(low * high)
        if _try(rule, step, middle, horizon, share, q_max) is None:
            low = middle
        else:
            high = middle
    digit = 10.0 ** (math.floor(math.log10(high)) - 1)
    rounded = float(f"{math.ceil(high / digit) * digit:.1e}")
    return rounded if rounded < 1.0 else high


def _no_tolerance(rule: Adam, step: int, tolerance: float, horizon: Horizon, share: float, q: float) -> Uncertifiable:
    smallest = _smallest_tolerance(rule, step, tolerance, horizon, share, q)
    if math.isfinite(smallest):
        return Uncertifiable(
            f"tolerance {tolerance:g} cannot be certified for horizon {horizon}: float32 rounding and the narrowest "
            f"cell exceed it; the smallest tolerance that would do is {smallest:g}",
            reason="tolerance",
            smallest_tolerance=smallest,
        )
    usable = _usable_horizon(rule, step, tolerance, share, q)
    remedy = f"horizon={usable} would do" if usable else "no horizon would do either"
    return Uncertifiable(
        f"no tolerance below 1 can be certified for betas {rule.betas} at step {step} with horizon {horizon}; {remedy}",
        reason="horizon" if usable else "tolerance",
        horizon=usable,
    )


def _usable_horizon(
    rule: Adam, step: int, tolerance: float, share: float, q_max: float, longest: int = MAX_FINITE
) -> int | None:
    """A finite horizon <= ``longest`` whose cell costs at most 2 bits more than that of step 1; None without one."""
    first = _try(rule, step, tolerance, 1, share, q_max)
    if first is None:
        return None
    usable = 1
    for k in (2, 5, 10, 20, 50, 100, 200, 500, 1000):
        cell = _try(rule, step, tolerance, k, share, q_max) if k <= longest else None
        if cell is None or cell_bits(cell) > cell_bits(first) + 2.0:
            break
        usable = k
    return usable


def _check_request(rule: Adam, step: int, tolerance: float, horizon: Horizon, share: float, q_max: float) -> None:
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"tolerance must be in (0, 1), not {tolerance!r}")
    if not 0.0 <= share <= 0.9:
        raise ValueError(f"rounding_share must be in [0, 0.9], not {share!r}")
    if horizon != "all" and (isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < 1):
        raise ValueError(f"horizon must be 'all' or an integer >= 1, not {horizon!r}")
    if not 0.0 < q_max <= MAX_Q or f32_up(q_max) <= 0.0:
        raise ValueError(f"q_max must be in (0, 2^20], not {q_max!r}")
    if rule.amsgrad:
        raise Uncertifiable("amsgrad keeps a third moment; there is no rule for it yet", reason="amsgrad")
    problem = rule_problem(rule)
    if problem is not None:
        raise Uncertifiable(f"no rule for these hyperparameters: {problem}", reason="hyperparameters")
    if isinstance(step, bool) or not isinstance(step, int) or not 1 <= step <= MAX_STEP:
        raise Uncertifiable(f"step must be in 1..2^24 (an update has been made), not {step!r}", reason="step")


def certify(
    rule: Adam, step: int, *, tolerance: float, horizon: Horizon, rounding_share: float, q_max: float
) -> Certificate:
    """The certificate of least ``cell_bits`` for one (rule, step) and Q = ``q_max`` (rounded up to float32).

    Coupled weight decay, or one that the group does not declare decoupled, degrades the horizon to 1: the record
    says so. Raises Uncertifiable with what would do instead, ValueError for illegal tolerance, rounding_share,
    horizon or q_max, GuardBug if the result does not prove itself. Results and refusals are cached.
    """
    _check_request(rule, step, tolerance, horizon, rounding_share, q_max)
    found = _certify(rule, step, tolerance, horizon, rounding_share, f32_up(q_max))
    if isinstance(found, Uncertifiable):
        # A fresh one: a cached exception would gather the tracebacks of all its raisings.
        raise Uncertifiable(
            str(found), reason=found.reason, smallest_tolerance=found.smallest_tolerance, horizon=found.horizon
        )
    return found


@lru_cache(maxsize=4096)
def _certify(
    rule: Adam, step: int, tolerance: float, horizon: Horizon, share: float, q_max: float
) -> Certificate | Uncertifiable:
    try:
        return _make(rule, step, tolerance, 1 if rule.first_step_only else horizon, share, q_max)
    except Uncertifiable as error:
        return error.with_traceback(None)


def _make(rule: Adam, step: int, tolerance: float, horizon: Horizon, share: float, q_max: float) -> Certificate:
    ecov(rule, step)
    if horizon != "all" and horizon > MAX_FINITE:
        raise Uncertifiable(
            f"horizon {horizon} is longer than the {MAX_FINITE} steps that rounding is derived for; "
            f"use 'all' or at most {MAX_FINITE}",
            reason="horizon",
        )
    try:
        v_min, v_max = v_range(rule, horizon)
        hull(rule, step, horizon)
    except Uncertifiable as error:
        if error.reason not in ("horizon", "eps"):
            raise
        usable = _usable_horizon(rule, step, tolerance, share, q_max, error.horizon or MAX_FINITE)
        remedy = f"horizon={usable} would do" if usable else "not even horizon=1 can be certified at this tolerance"
        raise Uncertifiable(f"{error}; {remedy}", reason=error.reason, horizon=usable) from None
    cell = _try(rule, step, tolerance, horizon, share, q_max)
    if cell is None:
        raise _no_tolerance(rule, step, tolerance, horizon, share, q_max)
    steps = horizon
    if steps == "all":
        first = largest_rounding(rule, step, 1, cell.q_prime)
        steps = rounding_horizon(rule, step, cell.q_prime, _allowance(first, share, tolerance))
    total = _total(rule, step, horizon, cell, steps) * RECORDED
    made = Certificate(rule, step, tolerance, horizon, share, cell, v_min, v_max, total, steps)
    if not total <= tolerance * AIM:
        raise GuardBug("a chosen cell does not prove its tolerance", expected=f"<= {tolerance * AIM}", got=total)
    prove(made)
    return made


def _check_constants(cert: Certificate) -> None:
    """FormatError for every stored constant that no writer could have recorded."""

    def require(legal: bool, field: str, expected: str, got: object) -> None:
        if not legal:
            raise FormatError(f"illegal {field} in a certificate", where=field, expected=expected, got=repr(got))

    cell, rule = cert.cell, cert.rule
    problem = rule_problem(rule)
    require(problem is None, "rule", problem or "", rule.betas)
    require(not rule.amsgrad, "amsgrad", "False (no rule for amsgrad)", rule.amsgrad)
    require(_is_int(cert.step, 1, MAX_STEP), "step", "an integer in 1..2^24", cert.step)
    require(0.0 < cert.tolerance < 1.0, "tolerance", "a number in (0, 1)", cert.tolerance)
    require(0.0 <= cert.rounding_share <= 0.9, "rounding_share", "a number in [0, 0.9]", cert.rounding_share)
    horizon = cert.horizon
    require(horizon == "all" or _is_int(horizon, 1, MAX_FINITE), "horizon", "'all' or 1..2^17", horizon)
    require(_is_int(cert.rounding_horizon, 1, MAX_FINITE), "rounding_horizon", "1..2^17", cert.rounding_horizon)
    require(horizon in ("all", cert.rounding_horizon), "rounding_horizon", f"{horizon}", cert.rounding_horizon)
    require(
        _is_int(cell.levels_per_octave, 1, MAX_LEVELS), "levels_per_octave", f"1..{MAX_LEVELS}", cell.levels_per_octave
    )
    require(is_f32(cell.delta) and 0.0 < cell.delta <= 2.0 * MAX_Q, "delta", "a positive float32", cell.delta)
    require(is_f32(cell.q_max) and 0.0 < cell.q_max <= MAX_Q, "q_max", "a positive float32", cell.q_max)
    require(is_f32(cert.v_min) and 0.0 < cert.v_min < cert.v_max, "v_min", "a positive float32", cert.v_min)
    require(is_f32(cert.v_max) and cert.v_max <= V_MAX, "v_max", "a float32 up to 2^120", cert.v_max)
    require(math.isfinite(cert.bound) and cert.bound > 0.0, "bound", "a positive number", cert.bound)


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def prove(cert: Certificate) -> float:
    """Recompute the bound from the stored constants; returns it (at most ``cert.bound``).

    Raises FormatError for illegal constants; ToleranceError if the constants do not prove the recorded bound and
    tolerance, claim a horizon or a range of v that the rule does not allow, or could not have given the record.
    """
    _check_constants(cert)
    if cert.rule.first_step_only and cert.horizon != 1:
        raise ToleranceError(
            "coupled weight decay is proved for the first step only",
            expected="horizon 1",
            got=f"horizon {cert.horizon}",
        )
    try:
        ecov(cert.rule, cert.step)
        v_min, _ = v_range(cert.rule, cert.horizon)
        total = _total(cert.rule, cert.step, cert.horizon, cert.cell, cert.rounding_horizon)
    except Uncertifiable as error:
        raise ToleranceError(f"the stored constants admit no proof: {error}") from error
    if cert.v_min < v_min:
        raise ToleranceError("v_min is too small for the rule and horizon", expected=f">= {v_min}", got=cert.v_min)
    if not total <= cert.tolerance:
        raise ToleranceError("the bound exceeds the tolerance", expected=f"<= {cert.tolerance}", got=total)
    if not total <= cert.bound <= total * SAME:
        raise ToleranceError("the recorded bound is not that of its constants", expected=total, got=cert.bound)
    return total


def bound_at(cert: Certificate, k: int) -> float:
    """Proved bound of every update up to step k >= 1 after the save, rounding up to step k included.

    Beyond a finite horizon, and beyond 2^17 steps, nothing is proved: infinity.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    if k > MAX_FINITE or (cert.horizon != "all" and k > cert.horizon):
        return math.inf
    return _total(cert.rule, cert.step, cert.horizon, cert.cell, k)


_FLOATS = ("eps", "weight_decay", "tolerance", "rounding_share", "delta", "q_max", "v_min", "v_max", "bound")
_INTS = ("step", "rounding_horizon", "levels_per_octave")
_OTHERS = ("rule", "betas", "decoupled_weight_decay", "amsgrad", "maximize", "horizon")


def to_plain(cert: Certificate) -> dict[str, object]:
    """The record as str, int, bool, None and lists; floats as ``float.hex`` text, hence exact."""
    rule, cell = cert.rule, cert.cell
    return {
        "rule": "adam",
        "betas": [b.hex() for b in rule.betas],
        "eps": rule.eps.hex(),
        "weight_decay": rule.weight_decay.hex(),
        "decoupled_weight_decay": rule.decoupled_weight_decay,
        "amsgrad": rule.amsgrad,
        "maximize": rule.maximize,
        "step": cert.step,
        "tolerance": float(cert.tolerance).hex(),
        "horizon": cert.horizon,
        "rounding_share": float(cert.rounding_share).hex(),
        "levels_per_octave": cell.levels_per_octave,
        "delta": cell.delta.hex(),
        "q_max": cell.q_max.hex(),
        "v_min": cert.v_min.hex(),
        "v_max": cert.v_max.hex(),
        "bound": cert.bound.hex(),
        "rounding_horizon": cert.rounding_horizon,
    }


def _float_of(field: str, value: object) -> float:
    if isinstance(value, str) and len(value) <= 32:
        try:
            number = float.fromhex(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number) and number.hex() == value:
            return number
    raise FormatError(
        f"bad {field} in a certificate", where=field, expected="a finite number as float.hex text", got=repr(value)[:80]
    )


def _typed(fields: dict[str, object], name: str, legal: Callable[[object], bool], expected: str) -> object:
    value = fields[name]
    if not legal(value):
        raise FormatError(f"bad {name} in a certificate", where=name, expected=expected, got=repr(value)[:80])
    return value


def from_plain(plain: dict[str, object]) -> Certificate:
    """Inverse of ``to_plain``. Raises FormatError for unknown, missing, ill-typed or illegal fields; proves nothing."""
    if not isinstance(plain, dict):
        raise FormatError("a certificate must be a mapping", expected="a mapping", got=type(plain).__name__)
    names = {*_FLOATS, *_INTS, *_OTHERS}
    if set(plain) != names:
        unknown, missing = sorted(map(str, set(plain) - names)), sorted(names - set(plain))
        raise FormatError(f"fields of a certificate: unknown {unknown[:8]}, missing {missing}")
    numbers = {name: _float_of(name, plain[name]) for name in _FLOATS}
    _typed(plain, "rule", lambda v: v == "adam", "'adam'")
    betas = plain["betas"]
    _typed(plain, "betas", lambda v: isinstance(v, list) and len(v) == 2, "two numbers")
    assert isinstance(betas, list)
    for name in ("amsgrad", "maximize"):
        _typed(plain, name, lambda v: isinstance(v, bool), "true or false")
    _typed(plain, "decoupled_weight_decay", lambda v: v is None or isinstance(v, bool), "true, false or null")
    for name in _INTS:
        _typed(plain, name, lambda v: _is_int(v, 1, MAX_STEP), "an integer in 1..2^24")
    _typed(plain, "horizon", lambda v: v == "all" or _is_int(v, 1, MAX_FINITE), "'all' or 1..2^17")
    rule = Adam(
        betas=(_float_of("betas", betas[0]), _float_of("betas", betas[1])),
        eps=numbers["eps"],
        weight_decay=numbers["weight_decay"],
        decoupled_weight_decay=plain["decoupled_weight_decay"],  # type: ignore[arg-type]
        amsgrad=plain["amsgrad"],  # type: ignore[arg-type]
        maximize=plain["maximize"],  # type: ignore[arg-type]
    )
    cert = Certificate(
        rule=rule,
        step=plain["step"],  # type: ignore[arg-type]
        tolerance=numbers["tolerance"],
        horizon=plain["horizon"],  # type: ignore[arg-type]
        rounding_share=numbers["rounding_share"],
        cell=Cell(plain["levels_per_octave"], numbers["delta"], numbers["q_max"]),  # type: ignore[arg-type]
        v_min=numbers["v_min"],
        v_max=numbers["v_max"],
        bound=numbers["bound"],
        rounding_horizon=plain["rounding_horizon"],  # type: ignore[arg-type]
    )
    _check_constants(cert)
    return cert
