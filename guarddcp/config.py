"""What a user asks for: the guard, as a frozen dataclass that loads from TOML."""

from __future__ import annotations

import dataclasses
import os
import tomllib
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["CODECS", "EFFORTS", "Guard"]

CODECS = ("ratio", "exact")
EFFORTS = ("fast",)


@dataclass(frozen=True, kw_only=True)
class Guard:
    """The promise a save is held to.

    Every value is checked at construction (ValueError, TypeError for a wrong kind).
    """

    tolerance: float = 0.01
    """Largest difference of one Adam update of one coordinate, in units of the learning rate; in (0, 1)."""

    horizon: Literal["all"] | int = "all"
    """Updates after the restore that the tolerance covers: "all", or a number of steps >= 1."""

    codec: str = "ratio"
    """``ratio``: certified codes for Adam's moments. ``exact``: everything bit for bit."""

    rounding_share: float = 0.05
    """Part of the tolerance that float32 rounding of later steps may take, for horizon "all"; in [0, 0.9]."""

    effort: str = "fast"
    """Time spent on smaller files: "fast" (row and column prediction)."""

    max_grad_norm: float | None = None
    """Only for codecs whose certificate needs a gradient bound; "ratio" covers every gradient and refuses it."""

    strict_parameter: bool = False
    """Only for codecs that are certified per coordinate; "ratio" bounds the update and refuses it."""

    def __post_init__(self) -> None:
        _number("tolerance", self.tolerance, 0.0, 1.0)
        _number("rounding_share", self.rounding_share, -1e-300, 0.9 + 1e-12)
        if self.horizon != "all" and (isinstance(self.horizon, bool) or not isinstance(self.horizon, int)):
            raise TypeError(f"horizon must be 'all' or an integer, not {self.horizon!r}")
        if self.horizon != "all" and self.horizon < 1:
            raise ValueError(f"horizon must be at least 1, not {self.horizon}")
        if self.codec not in CODECS:
            raise ValueError(f"codec must be one of {', '.join(CODECS)}, not {self.codec!r}")
        if self.effort not in EFFORTS:
            raise ValueError(f"effort must be one of {', '.join(EFFORTS)}, not {self.effort!r}")
        if self.max_grad_norm is not None:
            raise ValueError(
                f"max_grad_norm has no meaning with codec {self.codec!r}: its certificate holds for every gradient. "
                "Leave it out."
            )
        if self.strict_parameter:
            raise ValueError(
                f"strict_parameter has no meaning with codec {self.codec!r}: it bounds the update, before it is "
                "rounded into the parameter. Leave it out."
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Guard:
        """Read a TOML file whose keys are the fields above; unknown keys are refused by name."""
        with open(path, "rb") as file:
            try:
                return cls.from_dict(tomllib.load(file), where=os.fspath(path))
            except (TypeError, ValueError) as error:
                raise type(error)(
                    str(error) if os.fspath(path) in str(error) else f"{os.fspath(path)}: {error}"
                ) from error

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, where: str = "guard") -> Guard:
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(f"{where}: unknown keys {unknown}; known are {sorted(known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; ``Guard.from_dict`` inverts it."""
        return dataclasses.asdict(self)


def _number(name: str, value: object, above: float, below: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not above < value < below:
        edges = "[]" if above < 0 else "()"
        raise ValueError(f"{name} must be in {edges[0]}{max(above, 0.0):g}, {below:g}{edges[1]}, not {value!r}")
