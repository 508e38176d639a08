"""Typed random keys, of which NumPy and the buffers of a device know the words alone."""

from __future__ import annotations

import jax


def is_key(array: object) -> bool:
    """Tell whether an array, or what stands for one (an aval, a structure), holds random keys."""
    return jax.dtypes.issubdtype(getattr(array, "dtype", None), jax.dtypes.prng_key)


def words(array: jax.Array) -> jax.Array:
    """Return an array as it is, or the buffer behind random keys, which is no copy."""
    return jax.random.key_data(array) if is_key(array) else array
