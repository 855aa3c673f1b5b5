"""Parameter names from the keys of moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from guarddcp.dcp.lookup import Path
from guarddcp.dcp.pairing import M_SUFFIX

__all__ = ["parameter_namer"]


def parameter_namer(paths: Mapping[str, Path]) -> Callable[[str], str]:
    """A function from a first moment's key to its parameter's name, from the planner's paths where they are known.

    Nested (.., "state", P, "exp_avg") and flat (.., "state.P.exp_avg") paths give P; without a path P is what follows
    the first "state.". Two optimizers may hold the same P: then the whole key without its suffix names the second.
    """
    owners: dict[str, str] = {}

    def name(m_key: str) -> str:
        head = m_key.removesuffix(M_SUFFIX)
        path = paths.get(m_key, (m_key,))
        if len(path) >= 3 and path[-3] == "state":
            short = str(path[-2])
        else:
            last = str(path[-1]).removesuffix(M_SUFFIX)
            short = last[6:] if last.startswith("state.") else last.partition(".state.")[2] or last
        return short if owners.setdefault(short, m_key) == m_key else head

    return name
