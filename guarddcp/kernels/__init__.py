"""CPU kernels of the codecs: a NumPy reference, which is the definition, and numba loops that give the same bytes."""
