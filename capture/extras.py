"""The extras of this package: which modules they bring, and the command that installs one."""

from __future__ import annotations

import shlex
from pathlib import Path

DISTRIBUTION = "capture-jax"
#: By top-level module.
EXTRA_OF = {
    "flax": "models",
    "ray": "ray",
    "matplotlib": "benchmarks",
    "equinox": "examples",
    "transformers": "examples",
    "jax_cuda12_plugin": "cuda-targets",
    "jax_cuda13_plugin": "cuda-targets",
    "libtpu": "tpu-targets",
    "flatbuffers": "tpu-targets",
}


def install_command(extra: str) -> str:
    """Return the command that installs an extra of this package: from its checkout where it is one,
    else by the name of the distribution."""
    checkout = Path(__file__).resolve().parent.parent
    if not (checkout / "pyproject.toml").is_file():
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    here = "." if checkout == Path.cwd() else str(checkout)
    return f"pip install -e {shlex.quote(f'{here}[{extra}]')}"


def compilers_of(platform: str) -> tuple[str, ...]:
    """Return the modules that compile for a platform, one of which suffices; none for CPU devices.

    Example:
        >>> compilers_of("tpu"), compilers_of("cpu")
        (('libtpu',), ())
    """
    return tuple(
        module
        for module, extra in EXTRA_OF.items()
        if extra == f"{platform}-targets" and module != "flatbuffers"
    )


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Return what to type to get a missing module that an extra brings; None for any other module.

    Example:
        >>> error = ModuleNotFoundError("No module named 'flax.linen'", name="flax.linen")
        >>> missing_extra(error).split(":")[0]
        "'flax' is not installed; it comes with an extra"
        >>> missing_extra(ModuleNotFoundError("No module named 'mine'", name="mine")) is None
        True
    """
    module = (error.name or "").partition(".")[0]
    return (
        f"{module!r} is not installed; it comes with an extra: {install_command(EXTRA_OF[module])}"
        if module in EXTRA_OF
        else None
    )
