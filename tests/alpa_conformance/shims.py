"""Let alpa 0.2.3 run on a machine without GPUs: jax 0.3.22 on a jaxlib from the package index, and
no Ray.

Importing this module before jax puts back what jaxlib lost between 0.3.22 and 0.4.13, and what only
Alpa's own jaxlib has. All of Alpa's Python then runs as published, but for two passes of its
compiler (auto-sharding, SPMD partitioning), for which ``harness`` has a rule.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import types
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_CPP_JIT", "0")  # the C++ path is that of another jaxlib

import jaxlib.version
import jaxlib.xla_client as xla_client

_EXTENSION = xla_client._xla
#: Helper modules whose functions were renamed, or are called at import and never here.
_HELPERS = ("lapack", "ducc_fft", "gpu_solver", "gpu_sparse", "gpu_prng", "gpu_linalg", "gpu_rnn")


def _identity() -> None:
    jaxlib.version.__version__ = "0.3.22"
    xla_client._version = 89  # jax then takes its array and sharding classes in Python
    xla_client.Executable = _EXTENSION.LoadedExecutable
    _EXTENSION.get_alpa_jaxlib_version = lambda: "0.2.2"


class _JitState:
    """The settings that jax keeps in C++, once per thread and once for all."""

    def __init__(self) -> None:
        self.jax_array = self.enable_x64 = self.default_device = None
        self.disable_jit = self.post_hook = self.extra_jit_context = None


class _NoCache:
    """A cache of compiled functions that is always empty."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def size(self) -> int:
        return 0

    capacity = size

    def clear(self) -> None:
        pass

    @staticmethod
    def clear_all() -> None:
        pass


def _jit_state() -> None:
    real, local, everywhere = _EXTENSION.jax_jit, threading.local(), _JitState()
    callbacks: list[Any] = []
    module: Any = types.ModuleType("jaxlib.xla_extension.jax_jit")
    for name in dir(real):
        if not name.startswith("__"):
            setattr(module, name, getattr(real, name))

    def of_thread() -> _JitState:
        if not hasattr(local, "state"):
            local.state = _JitState()
            for callback in callbacks:
                callback()
        return local.state

    module.JitState, module.CompiledFunctionCache = _JitState, _NoCache
    module.global_state, module.thread_local_state = lambda: everywhere, of_thread
    module.set_thread_local_state_initialization_callback = lambda callback: callbacks.__setitem__(
        slice(None), [callback]
    )
    _EXTENSION.jax_jit = module


class _DeviceArrayBase:
    __slots__ = ()  # jax gives it other bases


class _Buffer(_DeviceArrayBase):
    pass


class _Slotless:
    __slots__ = ()


# A class that stands directly below object can be given no other bases.
class _ShardedArrayBase(_Slotless):
    __slots__ = ()


class _ShardedArray(_ShardedArrayBase):
    pass


def _arrays() -> None:
    """Classes that jax registers and nothing here is an instance of; and the old methods of the
    class that arrays have now."""
    for module in (_EXTENSION, xla_client):
        module.Buffer = module.DeviceArray = _Buffer
        module.DeviceArrayBase = _DeviceArrayBase
        module.ShardedBuffer = type("ShardedBuffer", (), {})
    _EXTENSION.pmap_lib.ShardedDeviceArrayBase = _ShardedArrayBase
    _EXTENSION.pmap_lib.ShardedDeviceArray = _ShardedArray
    array = _EXTENSION.ArrayImpl

    def as_numpy(self, dtype=None):
        values = self._single_device_array_to_np_array()
        return values if dtype is None else values.astype(dtype)

    array.__array__ = as_numpy
    array.to_py = lambda self: as_numpy(self)
    array.device = lambda self: self._sharding._device
    array.copy_to_host_async = lambda self: self._copy_single_device_array_to_host_async()
    array.block_host_until_ready = lambda self: self.block_until_ready()
    array.shape, array.dtype = (
        property(lambda self: self.aval.shape),
        property(lambda self: self.aval.dtype),
    )


def _lowering() -> None:
    for helper in _HELPERS:
        module = importlib.import_module(f"jaxlib.{helper}")
        for name in [name for name in vars(module) if "_hlo" in name]:
            setattr(module, name.replace("_hlo", "_mhlo"), getattr(module, name))
        module.__getattr__ = _absent_from(module)
    # jaxlib hands out StableHLO; jax 0.3.22 speaks MHLO.
    convert = _EXTENSION.mlir.xla_computation_to_mlir_module
    _EXTENSION.mlir.xla_computation_to_mlir_module = lambda computation: convert(
        computation, emit_stable_hlo=False
    )
    _EXTENSION.hlo_module_count_flop_dot_conv_only = _count_flops


def _absent_from(module: Any) -> Any:
    def absent(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*args: Any, **options: Any) -> Any:
            raise NotImplementedError(f"{module.__name__}.{name} is not in this jaxlib")

        return refuse

    return absent


def _count_flops(module: Any) -> float:
    """By XLA's own cost analysis, which counts a little more than the products that Alpa's jaxlib
    counts."""
    from jax.lib import xla_bridge

    return _EXTENSION.hlo_module_cost_analysis(xla_bridge.get_backend("cpu"), module).get(
        "flops", 0.0
    )


class _Inert:
    """Any attribute of Ray: may be called, subclassed by decoration, and does nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Inert()


def _ray() -> None:
    """Ray is never asked for anything here: no worker is started."""

    def module(name: str, **attributes: Any) -> Any:
        made: Any = types.ModuleType(name)
        made.__dict__.update(attributes, __path__=[], __getattr__=_Inert().__getattr__)
        sys.modules[name] = made
        return made

    class RayError(Exception):
        pass

    errors = module(
        "ray.exceptions", RayError=RayError, RayActorError=type("RayActorError", (RayError,), {})
    )
    group, queue = module("ray.util.placement_group"), module("ray.util.queue")
    util = module("ray.util", placement_group=group, queue=queue, ActorPool=_Inert)

    def remote(*args: Any, **options: Any) -> Any:
        return args[0] if args else lambda function: function

    module(
        "ray",
        __version__="2.1.0",
        exceptions=errors,
        util=util,
        remote=remote,
        get=lambda x, *args, **options: x,
        is_initialized=bool,
    )


_identity()
_jit_state()
_arrays()
_lowering()
_ray()
