"""A function, compiled for devices that are there: what it needs while it runs, and on request what
it computes and whose bytes it holds."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.experimental.compilation_cache import compilation_cache

from capture.compiler.buffers import read_buffers
from capture.compiler.scratch import Scratch, scratch_of
from capture.compiler.work import NO_LOCAL_FLOPS, LocalFlops, work_of
from capture.measured.work import ProgramWork
from capture.step.attribution import Buffer
from capture.tracing.flops import kernel_flops

#: Of JAX: from which devices copy directly.
HOST_MEMORY = "pinned_host"
#: Leave out optimisations of machine code: half the compile time, byte-identical buffer assignment.
_MEASURING_OPTIONS: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


@dataclass(frozen=True, eq=False)
class Executable:
    """A compiled program with the bytes and work that it needs.

    Attributes:
        call: Runs it on arrays of the shardings it was compiled for; refuses others.
        outputs: Structure of its results, with shardings.
        transient_bytes: Bytes per device of temporaries + outputs - aliased inputs.
        work: What it computes, reads and sends, if asked for.
        output_bytes: Bytes per device of all results as they are allocated, where that is more than
            their elements (padded tiles of a TPU).
        buffers: Temporaries and results at the program's peak, if asked for.
    """

    call: Callable[..., Any]
    outputs: Any
    transient_bytes: int
    work: ProgramWork | None = None
    output_bytes: int | None = None
    buffers: tuple[Buffer, ...] = ()

    @cached_property
    def scratch(self) -> Scratch:
        """The bytes that the program's kernels allocate on CPU beside ``transient_bytes``, read
        from its text."""
        return scratch_of(self.call.as_text())  # type: ignore[attr-defined]  # of ``jax.stages``


#: The layer that the name of an operation or an argument in a compiled program tells of.
LayerOf = Callable[[str], "int | None"]


class AnyCompiler(Protocol):
    """The interface of compilers: they compile a function for abstract arguments; nothing is
    allocated."""

    def __call__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        *,
        donate: Sequence[int] = (),
        out_shardings: Any = None,
        layer_of: LayerOf | None = None,
        local_flops: LocalFlops = NO_LOCAL_FLOPS,
    ) -> Executable:
        """Compile a function for arguments of these shapes and shardings.

        Args:
            function: Pure.
            args: ``ShapeDtypeStruct`` pytrees with shardings.
            donate: Positions of donated arguments.
            out_shardings: As for ``jax.jit``; None lets the compiler choose.
            layer_of: Gives the layer of a buffer by its name, where buffers are named.
            local_flops: FLOPs of the operations that run on each device's part; by default those of
                the kernels of Pallas that the function holds.
        """
        ...


@dataclass(frozen=True)
class Compiler:
    """The compiler XLA, for devices that are there or that stand for others.

    Attributes:
        fast_compile: Skip what takes the compiler long and changes no buffer: the program runs, but
            slowly.
        count_work: Also find out what a program computes, reads and sends.
        name_buffers: Also find out what buffers a program holds at its peak.
        options: XLA's compile options, by name.
        folder: Has the files that the options name, and is there as long as the compiler.
    """

    fast_compile: bool = False
    count_work: bool = False
    name_buffers: bool = False
    options: Mapping[str, Any] | None = None
    folder: tempfile.TemporaryDirectory[str] | None = None

    def __call__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        *,
        donate: Sequence[int] = (),
        out_shardings: Any = None,
        layer_of: LayerOf | None = None,
        local_flops: LocalFlops = NO_LOCAL_FLOPS,
    ) -> Executable:
        """Compile a function for abstract arguments (see ``AnyCompiler``)."""
        names = layer_of if self.name_buffers else None
        in_shardings, structs = _untyped_memory(args)
        jitted = jax.jit(
            function,
            donate_argnums=tuple(donate),
            **in_shardings,
            **({} if out_shardings is None else {"out_shardings": out_shardings}),
        )
        with warnings.catch_warnings():
            # Residuals are donated to be freed, whether or not an output fits into them.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            traced = jitted.trace(*structs)
            lowered = traced.lower()
            chosen = {**(_MEASURING_OPTIONS if self.fast_compile else {}), **(self.options or {})}
            with (
                nullcontext() if names is None and not self.options else not_kept(),
                tempfile.TemporaryDirectory(prefix="capture-dump-")
                if names
                else nullcontext("") as folder,
            ):
                if names is not None:
                    chosen |= {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
                compiled = lowered.compile(compiler_options=chosen or None)
                buffers = () if names is None else read_buffers(Path(folder), names)
        memory = compiled.memory_analysis()
        assert memory is not None, "XLA reports the memory of a program on CPU, GPU and TPU"
        transient = (
            memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        )
        outputs = jax.tree.map(
            lambda info, sharding: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding),
            lowered.out_info,
            compiled.output_shardings,
        )
        # A layer without parameters has nothing to update: such a program has neither arguments nor
        # results, and computes nothing.
        num_devices = max(
            (len(leaf.sharding.device_set) for leaf in jax.tree.leaves((tuple(args), outputs))),
            default=1,
        )
        work = None
        if self.count_work:
            if local_flops == NO_LOCAL_FLOPS:
                local_flops = LocalFlops(kernels=kernel_flops(traced.jaxpr.jaxpr, num_devices))
            work = work_of(compiled, lowered, num_devices, local_flops)
        return Executable(compiled, outputs, int(transient), work, buffers=buffers)


@contextmanager
def not_kept() -> Iterator[None]:
    """Compile without JAX's persistent compilation cache. Its keys leave out the options of dumps:
    a program that is found there writes none. They have the temporary paths of other options,
    with which no program is found again."""
    is_used: bool = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    if not is_used:
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX asks once whether it is enabled
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


def _untyped_memory(args: Sequence[object]) -> tuple[dict[str, Any], Sequence[Any]]:
    """Return the memory kinds of host arguments as shardings of the program, and plain arguments.
    The program is then traced as if they were on the device: typed by their memory, they may not
    meet a constant."""
    leaves = jax.tree.leaves(tuple(args))
    if all(leaf.sharding is None or leaf.sharding.memory_kind != HOST_MEMORY for leaf in leaves):
        return {}, args
    shardings = jax.tree.map(lambda leaf: leaf.sharding, tuple(args))
    plain = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tuple(args))
    return {"in_shardings": shardings}, plain
