"""Rules, bounds, the proof and its record. The mathematics is in NOTES.md beside this file."""

from guarddcp.certificate.cell import Cell, cell_bits
from guarddcp.certificate.record import Certificate, bound_at, certify, from_plain, prove, to_plain
from guarddcp.certificate.rules import Adam, Uncertifiable, c_inf, q_limit

__all__ = [
    "Adam",
    "Cell",
    "Certificate",
    "Uncertifiable",
    "bound_at",
    "c_inf",
    "cell_bits",
    "certify",
    "from_plain",
    "prove",
    "q_limit",
    "to_plain",
]
