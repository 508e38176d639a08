"""The process's environment: the one place that reads and sets environment variables.

XLA reads ``XLA_FLAGS`` once, when JAX first uses it. The CLI, the tests and the workers therefore
call ``prepare`` before they import JAX; in a user's own process, which has usually imported it
already, the library only checks and warns. What the user set always stands.

This module imports nothing but the standard library.
"""

from __future__ import annotations

import gc
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from capture.errors import ExecutionError, TargetError, Violation

#: For the memory of the host that JAX pins, on GPUs.
HOST_MEMORY_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
#: Of a GPU's memory, what JAX's allocator may take; 0.75 where nothing is set.
DEVICE_MEMORY_FRACTION = "XLA_CLIENT_MEM_FRACTION"
_DEVICE_COUNT = "--xla_force_host_platform_device_count"
#: What libtpu reads its flags from.
_LIBTPU_FLAGS = "LIBTPU_INIT_ARGS"
#: The flags that a process of this command, or the one that started it, has asked XLA about.
_KNOWN_FLAGS = "CAPTURE_KNOWN_FLAGS"
#: What makes XLA and libtpu read their flags, and nothing more.
_READ_FLAGS = {
    "XLA_FLAGS": "from jaxlib import xla_client; xla_client.make_cpu_client()",
    _LIBTPU_FLAGS: "from jax.experimental.topologies import get_topology_desc; "
    "get_topology_desc(platform='tpu', topology_name='v5e:2x2')",
}
#: The last words of XLA and libtpu on flags, before they end the process.
_REFUSED_FLAGS = {
    r"Unknown flags? in XLA_FLAGS: (?P<flag>.*)": "XLA_FLAGS",
    r"Couldn't interpret value (?P<value>.*) for flag (?P<flag>.*)\.": "XLA_FLAGS",
    r'Could not open file "(?P<file>.*)" to read flags for environment': "XLA_FLAGS",
    r"Unknown command line flag '(?P<flag>.*)'": _LIBTPU_FLAGS,
    r"Illegal value '(?P<value>.*)' specified for flag '(?P<flag>.*)'": _LIBTPU_FLAGS,
}

#: JAX must not look for devices, several workers may load libtpu at once, and no metadata server of
#: a cloud is asked.
_WITHOUT_DEVICES = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

#: Packages that compile for a platform, beside those that every profile names.
_COMPILERS = {
    "cuda": ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt"),
    "tpu": ("libtpu",),
}


def jax_release() -> tuple[int, ...]:
    """Return the numbers of the installed jax's version, such as (0, 10, 2); (0,) without any."""
    return tuple(int(part) for part in (_version("jax") or "0").split(".")[:3] if part.isdecimal())


def required_xla_flags(jax_version: str) -> tuple[str, ...]:
    """Return the XLA flags without which a JAX version would be measured wrongly.

    On CPU, jax 0.10's concurrency-optimized scheduler undoes ``jax.checkpoint`` inside one jit: 8
    transformer layers took 831 MB of temporaries with remat and 810 MB without it (jax 0.12: 126
    and 810 MB). With the sequential scheduler remat saves again. XLA ends the process on a flag
    that it does not know, so a flag is named only for versions where it was tried.

    Example:
        >>> required_xla_flags("0.10.2")
        ('--xla_cpu_enable_concurrency_optimized_scheduler=false',)
        >>> required_xla_flags("0.12.0.1")
        ()
    """
    if jax_version.split(".")[:2] == ["0", "10"]:
        return ("--xla_cpu_enable_concurrency_optimized_scheduler=false",)
    return ()


def kernel_cache_options(file: Path) -> dict[str, Any]:
    """Return the compiler options with which XLA keeps the kernels of a GPU's program in a file,
    for programs that have some in common.

    XLA of jax 0.10 reads the file only with the second option; XLA of jax 0.12 does not know that
    any more.
    """
    parallel = (
        {"xla_gpu_enable_llvm_module_compilation_parallelism": True}
        if (_version("jax") or "").startswith("0.10.")
        else {}
    )
    return {"xla_gpu_kernel_cache_file": str(file), **parallel}


def patience(seconds: float) -> float:
    """Return how long to wait on this machine for what takes no longer than ``seconds`` on an idle
    one: as much more as processes queue for its processors. Ask again while waiting, because load
    comes and goes."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def num_cores() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def prepare(num_devices: int | None = None, platform: str = "cpu") -> list[Violation]:
    """Add the flags that the installed JAX needs to ``XLA_FLAGS``; call it before JAX is imported.

    A flag that the user gave keeps its value. If JAX is already imported nothing is changed, and
    only ``check`` speaks.

    Args:
        num_devices: Virtual CPU devices of this process, at least 1; None leaves their number
            alone.
        platform: The target's that this process compiles for. For ``"cuda"`` and ``"tpu"`` JAX
            itself is told to use the CPU, because it would look for devices that need not be there,
            and several processes may load libtpu.

    Returns:
        What is still not as it should be, as ``check`` does; empty if all is well.

    Raises:
        TargetError: those of ``check_flags``.
    """
    if "jax" not in sys.modules:
        check_flags(platform)
        wanted = [
            *_required(),
            *([f"{_DEVICE_COUNT}={num_devices}"] if num_devices is not None else []),
        ]
        given = _given_text()
        missing = [flag for flag in wanted if _name(flag) not in _parse(given)]
        if missing:
            os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()
        if platform == "cpu" and _has_compilers_only():
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
        if platform != "cpu":
            os.environ.update(_WITHOUT_DEVICES)
    return check()


def prepare_worker(num_devices: int | None, platform: str, flags: Sequence[str]) -> list[Violation]:
    """Prepare a process that measures for another one: set that one's XLA flags, which are part of
    every key, and then do what ``prepare`` does.

    Args:
        num_devices, platform: As for ``prepare``.
        flags: ``active_flags`` of the other process.
    """
    for name, found in _by_variable(flags).items():
        os.environ[name] = " ".join(found)
    return prepare(num_devices, platform)


def _by_variable(flags: Sequence[str]) -> dict[str, list[str]]:
    """Return ``active_flags`` by the environment variable that each stands in."""
    found: dict[str, list[str]] = {"XLA_FLAGS": []}
    for flag in flags:
        name, _, rest = flag.rpartition(" ")
        found.setdefault(name or "XLA_FLAGS", []).append(rest)
    return found


@contextmanager
def without_collecting() -> Iterator[None]:
    """Turn off the search for cycles of garbage while the block runs: tracing makes hundreds of
    thousands of objects that stay, and looking through them takes a fifth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def prepare_host_memory(nbytes: int) -> None:
    """Let GPUs use so much of the host's memory, where JAX by itself stops at 64 GB; call it before
    JAX is imported. What the user set stands."""
    os.environ.setdefault(HOST_MEMORY_LIMIT, str(-(-nbytes // 10**9)))


def prepare_device_memory(fraction: float) -> None:
    """Let JAX take so much of a GPU's memory as plans count on; call it before JAX is imported.
    What the user set stands, also by the variable's earlier name."""
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault(DEVICE_MEMORY_FRACTION, f"{fraction:g}")


def prepare_tpu(options: Mapping[str, object]) -> None:
    """Let libtpu compile with options that plans count on (``Target.run_options``); call it before
    JAX is imported.

    Args:
        options: Values by name, of which the user gave none.
    """
    texts = (str(value).lower() if isinstance(value, bool) else value for value in options.values())
    flags = (f"--{name}={text}" for name, text in zip(options, texts, strict=True))
    if options:
        os.environ[_LIBTPU_FLAGS] = " ".join([os.environ.get(_LIBTPU_FLAGS, ""), *flags]).strip()


def prepare_ray(local: bool) -> None:
    """Have Ray report nothing to anybody; call it before Ray is imported. What the user set stands.

    Args:
        local: Whether the cluster will be this process's own, which needs no tokens to keep others
            out.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if local:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")


def host_of_run() -> tuple[str, int, int] | None:
    """Return the address (``host:port``) of host 0 of a run over several hosts, the number of
    hosts, and which of them this is: ``CAPTURE_COORDINATOR``, ``CAPTURE_NUM_HOSTS``,
    ``CAPTURE_HOST``. None if the first is not set: JAX then asks the scheduler.

    Raises:
        ExecutionError: ``run-hosts-environment``.
    """
    names = ("CAPTURE_COORDINATOR", "CAPTURE_NUM_HOSTS", "CAPTURE_HOST")
    coordinator, *numbers = [os.environ.get(name, "") for name in names]
    if not coordinator:
        return None
    if not all(number.isdecimal() for number in numbers) or int(numbers[1]) >= int(numbers[0]):
        raise ExecutionError.of(
            f"{', '.join(f'{name}={os.environ.get(name)}' for name in names)}: set the address and "
            "port of host 0, the number of hosts, and which this is, from 0.",
            "run-hosts-environment",
        )
    return coordinator, int(numbers[0]), int(numbers[1])


def secret_of_run() -> str | None:
    """Return the secret by which the hosts of a run know each other, ``CAPTURE_SECRET``; None if it
    is not set."""
    return os.environ.get("CAPTURE_SECRET") or None


def _has_compilers_only() -> bool:
    """Return whether a plugin of accelerators is installed, to compile for them, and no accelerator
    is there: JAX would complain at length."""
    installed = any(
        find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin", "libtpu")
    )
    return installed and not any(
        path
        for pattern in ("nvidia[0-9]*", "accel[0-9]*", "vfio/[0-9]*")
        for path in Path("/dev").glob(pattern)
    )


def of_child(platform: str) -> dict[str, str]:
    """Return the environment of a child process that compiles for a platform: this one's, its
    import path, and no search for devices."""
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return found if platform == "cpu" else {**found, **_WITHOUT_DEVICES}


def shield_children() -> None:
    """Let processes that this one starts find no modules in the working directory, unless this one
    does, as with ``python -m``: whose folder it is, a ``socket.py`` in it would be run.

    Source: Python's documentation of ``PYTHONSAFEPATH``; ``multiprocessing`` starts its processes
    with ``python -c``, which puts the working directory first.
    """
    if not {"", os.getcwd()} & set(sys.path[:1]):
        os.environ["PYTHONSAFEPATH"] = "1"


def check() -> list[Violation]:
    """Return a violation for each flag that the installed JAX needs and this process lacks, with
    what to do about it."""
    given = _parse(_given_text())
    return [
        Violation(
            f"XLA_FLAGS has {_name(flag)}={given.get(_name(flag), 'unset')}, but jax "
            f"{_version('jax')} needs {flag} for jax.checkpoint to "
            "save memory on CPU; set it, or call capture.environment.prepare(), before jax is "
            "imported.",
            "environment-xla-flags",
        )
        for flag in _required()
        if given.get(_name(flag)) != _value(flag)
    ]


def warn() -> None:
    """Warn of what ``check`` finds: what measures and runs in a user's own process calls it, where
    nobody may have called ``prepare``."""
    for violation in check():
        warnings.warn(str(violation), stacklevel=3)


def check_flags(platform: str = "cpu") -> None:
    """Refuse flags of the user's that XLA, or libtpu for a TPU, does not know or cannot read.

    Both end the process over such a flag, so a child process is asked: about 0.1 s for XLA and
    0.6 s for libtpu, only where flags are set, and once for a command and its workers.

    Raises:
        TargetError: ``target-flags``, naming the variable and every flag.
    """
    for variable, flags in _by_variable(active_flags(platform)).items():
        if variable == "XLA_FLAGS" and not _given_text():  # perhaps a file that is not there
            flags = os.environ.get(variable, "").split()
        asked = " ".join([variable, *(flag for flag in flags if flag not in _required())])
        known = os.environ.get(_KNOWN_FLAGS, "").splitlines()
        if asked == variable or asked in known:
            continue
        said = subprocess.run(
            [sys.executable, "-c", _READ_FLAGS[variable]],
            env=of_child(platform),
            capture_output=True,
            check=False,
        ).stderr.decode(errors="replace")
        TargetError.check(refused_flags(said))
        os.environ[_KNOWN_FLAGS] = "\n".join([*known, asked])


def refused_flags(said: str) -> list[Violation]:
    """Return a violation for each flag that XLA or libtpu refused, from what it wrote before it
    ended the process.

    Example:
        >>> said = "ERROR: Unknown command line flag 'xla_tpu_no'"
        >>> print(*refused_flags(said))  # doctest: +ELLIPSIS
        LIBTPU_INIT_ARGS has xla_tpu_no, which libtpu... does not know; correct the flag or take...
    """
    found = []
    for pattern, variable in _REFUSED_FLAGS.items():
        package = "jaxlib" if variable == "XLA_FLAGS" else "libtpu"
        reader = " ".join(filter(None, [package, _version(package)]))
        for match in re.finditer(pattern, said):
            given = match.groupdict()
            wrong = f"{given.get('flag')}, which {reader} does not know; correct the flag or"
            if "value" in given:
                wrong = (
                    f"the value {given['value']!r} of {given['flag']}, which {reader} cannot read; "
                    "correct the value or"
                )
            elif "file" in given:
                wrong = (
                    f"{given['file']!r}, which begins with no dashes and is no file of flags; "
                    "write --flag=value or"
                )
            found.append(
                Violation(f"{variable} has {wrong} take it out of {variable}.", "target-flags")
            )
    return found


def active_flags(platform: str = "cpu") -> tuple[str, ...]:
    """Return the compiler's flags that belong in the key of every profile: those of ``XLA_FLAGS``,
    sorted, the last of each name, without the number of virtual devices; for TPUs also those of
    ``LIBTPU_INIT_ARGS``, each behind this name.

    The number of devices is left out because a plan for fewer devices runs on a part of the mesh
    with the same executables.

    Args:
        platform: The target's.
    """
    given = {"": _parse(_given_text())}
    if platform == "tpu":
        given[f"{_LIBTPU_FLAGS} "] = _parse(os.environ.get(_LIBTPU_FLAGS, ""))
    return tuple(
        f"{variable}{name}={value}"
        for variable, flags in given.items()
        for name, value in sorted(flags.items())
        if name != _DEVICE_COUNT
    )


def flag_names() -> set[str]:
    """Return the names of the flags that the user gave XLA or libtpu, without dashes."""
    libtpu = os.environ.get(_LIBTPU_FLAGS, "")
    return {name.lstrip("-") for text in (_given_text(), libtpu) for name in _parse(text)}


def versions(platform: str = "cpu") -> dict[str, str]:
    """Return the versions that belong in the provenance of a profile, by package; those that are
    not installed are left out. Loads none of them.

    Args:
        platform: The target's; its compiler is named too.

    Example:
        >>> sorted(versions())
        ['jax', 'jaxlib', 'numpy', 'optax', 'python']
    """
    found = {
        name: _version(name)
        for name in ("jax", "jaxlib", "numpy", "optax", *_COMPILERS.get(platform, ()))
    }
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        **{name: version for name, version in found.items() if version is not None},
    }


def _required() -> tuple[str, ...]:
    jax_version = _version("jax")
    return required_xla_flags(jax_version) if jax_version is not None else ()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _given_text() -> str:
    """Return the XLA flags as the user gave them; ``XLA_FLAGS`` may also name a file that holds
    them (XLA tells by the first character)."""
    text = os.environ.get("XLA_FLAGS", "").strip()
    if text and not text.startswith("-"):
        path = Path(text)
        return " ".join(path.read_text().split()) if path.is_file() else ""
    return text


def _parse(text: str) -> dict[str, str]:
    """Return the value of each XLA flag by its name; the last of a name counts, and a bare
    ``--flag`` means true, as XLA reads them."""
    return {_name(flag): _value(flag) for flag in shlex.split(text)}


def _name(flag: str) -> str:
    return flag.partition("=")[0]


def _value(flag: str) -> str:
    _, equals, value = flag.partition("=")
    return value if equals else "true"


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "capture"


def default_store_path() -> Path:
    """Return the file of measurements that is used unless another is named, in the user's cache
    folder (``XDG_CACHE_HOME``)."""
    return _cache_folder() / "store.sqlite"


def named_workloads_path() -> Path:
    """Return the file that lists the workloads which the user has named (``capture.model.trust``):
    in the user's cache folder, whatever store a command uses."""
    return _cache_folder() / "workloads.jsonl"


def log_folder() -> Path:
    """Return the folder of the messages that compiled libraries print while commands run
    (``capture.cli.library_log``)."""
    return _cache_folder() / "logs"


def now() -> str:
    """Return the date of a result: UTC, to the second. ``SOURCE_DATE_EPOCH`` sets it, so that equal
    results are equal files.

    Source: reproducible-builds.org, the specification of SOURCE_DATE_EPOCH.
    """
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    return (datetime.fromtimestamp(int(seconds), UTC) if seconds else datetime.now(UTC)).isoformat(
        timespec="seconds"
    )
