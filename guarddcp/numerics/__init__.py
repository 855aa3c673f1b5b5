"""Float32 bit-level facts: unit roundoff, directed rounding, exactness."""
