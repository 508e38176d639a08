"""Measure stage configs by compiling their programs for a target, which need not be there: nothing
is allocated, nothing is run.

The result of a stage config is content-addressed by its programs, degrees and versions, so
identical layers compile once, and a finished measurement is never made again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import jax

from capture import environment
from capture.compiler.executable import AnyCompiler
from capture.compiler.target_compiler import TargetCompiler
from capture.documents import read, write
from capture.machine.target import Target
from capture.measured.profile import StageConfig
from capture.measured.stage_cost import SplitCost, StageCost, UpdateCost
from capture.measured.store import Store
from capture.memo import memo
from capture.model.graph import LayerGraph, content_hash
from capture.model.workload import WorkloadProtocol
from capture.partition.sharding import ModelSharding
from capture.partition.tensor_parallel import Rule
from capture.plan.choices import StageChoice, is_cut, remat_of_layers
from capture.runtime.leaf_parts import traced_optimizer
from capture.runtime.optimizer import SlicedOptimizer, StageUpdate, TracedOptimizer
from capture.runtime.programs import StagePrograms
from capture.runtime.split_backward import SplitStagePrograms
from capture.step.attribution import StageBuffers
from capture.step.interface import owned_and_borrowed, shared_onwards
from capture.tracing import TracedModel, trace
from capture.tracing.slices import StageSlice, policy_key

Measured = TypeVar("Measured", StageCost, UpdateCost, SplitCost, StageBuffers)

#: Bump when the programs of a stage change for the same model, so that old measurements are not
#: taken for new ones.
PROGRAM_VERSION = 4
#: The same, of the order of the layers of a whole backward pass, and of what passes between them.
LAYERS_VERSION = 4
#: The same, of several layers whose parameters are split over replicas.
PINNED_VERSION = 3
#: The same, of how a backward pass is split.
SPLIT_VERSION = 1
#: Bump when remat "cheap" keeps other values for the same model.
CUT_VERSION = 1
#: Bump when other work is counted of kernels of Pallas that no stage runs on parts.
KERNELS_VERSION = "kernels 1"
#: Bump when other values are split along the sequence for the same model.
SEQUENCE_VERSION = "sequence 3"
#: Bump when something else is counted of what programs compute, which only targets with rates are
#: asked for: 2 counts kernels, 3 knows the shapes of products, 4 sees collectives that are part of
#: a fusion, 5 counts the slices that a fusion reads or updates through views, not whole arrays, 6
#: knows the order, in which collectives hide, and how often loops of TPUs run, 7 the shapes of
#: products on TPUs.
WORK_VERSIONS = {"cuda": 6, "tpu": 7}


class CompileBackend:
    """The backend ``compile:TARGET``: the compiler's memory report per stage config, for a model at
    any micro-batch size.

    Args:
        workload: The task.
        num_layers: None for the model's marks, or the number of layers to cut automatically.
        rule: How parameters are split.
        store: Store of measurements.
        target: What to compile for; virtual CPU devices if None.
        unmarked_layers, num_devices: Into how many layers a model without marks is cut: see
            ``trace``.

    Attributes:
        compiles: Compiler for the target.
        rule: How parameters are split.
    """

    def __init__(
        self,
        workload: WorkloadProtocol,
        num_layers: int | None = None,
        rule: Rule = "auto",
        store: Store | None = None,
        target: Target | None = None,
        *,
        unmarked_layers: int | None = None,
        num_devices: int = 1,
    ):
        environment.warn()
        self.workload, self._num_layers, self.rule = workload, num_layers, rule
        self._unmarked_layers, self._num_devices = unmarked_layers, num_devices
        self.store = Store() if store is None else store
        self.target = Target.load("cpu") if target is None else target
        self.compiles = TargetCompiler(self.target, count_work=self.target.rates is not None)
        self._traced: dict[int, TracedModel] = {}
        self._updates: dict[tuple[tuple[int, ...], bool], StageUpdate] = {}

    def compiler_of(self, config: StageConfig, name_buffers: bool = False) -> AnyCompiler:
        """Return the compiler that measures the programs of a stage config; windows of the same
        layers share kernels."""
        kernels = content_hash([str(config.choice), config.microbatch_size])
        return self.compiles.compiler(kernels, name_buffers=name_buffers)

    def traced(self, microbatch_size: int) -> TracedModel:
        """Return the model traced at a micro-batch size; each size is traced once."""
        if microbatch_size not in self._traced:
            self._traced[microbatch_size] = traced = trace(
                self.workload,
                microbatch_size,
                self._num_layers,
                unmarked_layers=self._unmarked_layers,
                num_devices=self._num_devices,
                others=[each.growth for each in self._traced.values()],
            )
            if traced.auto_layers:
                self._num_layers = traced.graph.num_layers  # at every other size, too
        return self._traced[microbatch_size]

    def takes(self, microbatch_size: int) -> bool:
        """Tell whether the workload takes micro-batches of a size; it is traced to know."""
        try:
            self.traced(microbatch_size)
        except Exception:  # of the user's model, which may refuse a batch with any
            return False
        return True

    def trace_ahead(self, microbatch_size: int) -> None:
        """Trace what measurements at a size begin with. Errors are left to these measurements."""
        with suppress(Exception):
            self.traced(microbatch_size)
            _ = self._optimizer

    @property
    def model_hashes(self) -> dict[int, str]:
        """The hash of the model at every micro-batch size at which it was traced."""
        return {size: traced.graph.model_hash for size, traced in self._traced.items()}

    @property
    def num_layers(self) -> int | None:
        """The number of layers that the model is cut into automatically; None if it is cut at its
        marks. For a model without marks it is known once the model is traced."""
        return self._num_layers

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that make the same backend in another process."""
        return {"num_layers": self._num_layers, "rule": self.rule}

    @memo
    def sharding(self, microbatch_size: int) -> ModelSharding:
        """Return how the parameters of the model are split at a micro-batch size."""
        return ModelSharding(self.traced(microbatch_size), self.rule)

    def _update_of(self, config: StageConfig) -> StageUpdate:
        """Return the optimizer's slice of a stage. Other stages need values of it even where the
        stage owns all parameters."""
        graph = self.traced(config.microbatch_size).graph
        owned, _ = owned_and_borrowed(graph, config.first, config.stop)
        is_alone = config.num_layers == graph.num_layers
        if (owned, is_alone) not in self._updates:
            every = range(len(self._optimizer.params))
            rest = tuple(p for p in every if p not in set(owned))
            parts = [owned] if is_alone and not rest else [owned, rest]
            self._updates[owned, is_alone] = SlicedOptimizer(self._optimizer, parts).stages[0]
        return self._updates[owned, is_alone]

    def _summary_of_all(self, config: StageConfig) -> list[str]:
        """Return, for the key of a stage that owns all parameters, whether stages without any need
        values of it; empty for other stages."""
        graph = self.traced(config.microbatch_size).graph
        owned, _ = owned_and_borrowed(graph, config.first, config.stop)
        if len(owned) < len(self._optimizer.params) or config.num_layers == graph.num_layers:
            return []
        return ["summary"] * bool(self._update_of(config).summary)

    def state_bytes(self, microbatch_size: int) -> tuple[int, ...]:
        """Return the bytes of the whole optimizer state per parameter of the graph, from shapes.
        Leaves that belong to no parameter, such as a count, are left out."""
        params = self.traced(microbatch_size).split_struct
        index = {path: i for i, (path, _) in enumerate(jax.tree.leaves_with_path(params))}
        found = [0] * len(index)
        for path, leaf in jax.tree.leaves_with_path(
            jax.eval_shape(self.workload.optimizer.init, params)
        ):
            # A transformation holds trees of the form of the parameters: their paths end alike.
            param = next((index[path[k:]] for k in range(len(path) + 1) if path[k:] in index), None)
            if param is not None:
                found[param] += math.prod(leaf.shape) * leaf.dtype.itemsize
        return tuple(found)

    def model_bytes(self, microbatch_size: int) -> int:
        """Return the bytes of the model's parameters and of its optimizer's state, each once."""
        params = self.traced(microbatch_size).graph.params
        return sum(each.nbytes for each in params) + sum(self.state_bytes(microbatch_size))

    @cached_property
    def _optimizer(self) -> TracedOptimizer:
        traced = next(iter(self._traced.values()))
        return traced_optimizer(self.workload.optimizer, traced, traced.graph.unread_params)

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """The facts beside the program that decide a measurement: backend, target, versions and
        flags."""
        return {**target_provenance(self.target), "program_version": PROGRAM_VERSION}

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """The ``provenance`` as keys hold it: a target's file counts by what it says to the
        compiler, wherever it lies."""
        name = Path(self.target.name).name
        return {**self.provenance, "target": name, "backend": f"compile:{name}"}

    @memo
    def key(self, config: StageConfig) -> str:
        """Return the content hash of everything that can change the measurement of a stage config;
        equal for stages that differ only in position."""
        traced = self.traced(config.microbatch_size)
        graph, layers = traced.graph, traced.slice(config.first, config.stop)
        specs = self.sharding(config.microbatch_size).specs(config.choice.tensor_parallel)
        owned, borrowed = owned_and_borrowed(graph, config.first, config.stop)
        sent = set(graph.crossing(config.stop))
        choice, remat = config.choice, remat_of_layers(config.choice.remat, config.num_layers)
        # What passes between layers, see StagePrograms.
        several = config.num_layers > 1
        pinned = ["pinned", PINNED_VERSION] if choice.shard_params and several else []
        return content_hash(
            [
                self._facts,
                layers.key,
                [
                    choice.data_parallel,
                    choice.tensor_parallel,
                    remat,
                    choice.shard_optimizer,
                    *_params_split(choice),
                    *pinned,
                    *(["layers", LAYERS_VERSION] if several else []),
                    *self._sequence_split(config),
                    *([CUT_VERSION] if is_cut(remat) else policy_key(remat)),
                    *_bare_kernels(layers),
                ],
                [str(specs[p]) for p in layers.params],
                [
                    [graph.values[v].batch_dim, graph.values[v].differentiable, v in sent]
                    for v in (*layers.inputs, *layers.outputs)
                ],
                [graph.batch[b].batch_dim for b in layers.batch],
                [p in owned for p in layers.params],
                [self._optimizer.param_keys[p] for p in owned] or [self._optimizer.shared_key],
                len(borrowed),
                config.stop == graph.num_layers,
                *_arriving(graph, config),
                *self._summary_of_all(config),
            ]
        )

    def _sequence_split(self, config: StageConfig) -> list[Any]:
        """Return, for keys, along which dimensions values of the stage are split, which layers of
        other stages have a say in; empty where nothing is split along the sequence."""
        choice, size = config.choice, config.microbatch_size
        if not choice.sequence_parallel:
            return []
        splits = self.sharding(size).layer_splits(choice.tensor_parallel)
        if not any(split for _, split in splits[config.first : config.stop]):
            return []
        graph = self.sharding(size).graph([choice])
        layers = self.traced(size).slice(config.first, config.stop)
        values = (*layers.inputs, *layers.outputs)
        return [SEQUENCE_VERSION, [graph.value_dim(v, choice.value_split) for v in values]]

    def update_key(self, config: StageConfig) -> str:
        """Return the content hash of the end of a step alone, which depends on the parameters, not
        on the layers or the micro-batch."""
        config = _of_update(config)
        traced, choice = self.traced(config.microbatch_size), config.choice
        owned, borrowed = owned_and_borrowed(traced.graph, config.first, config.stop)
        specs = self.sharding(config.microbatch_size).specs(choice.tensor_parallel)
        params = [
            [self._optimizer.param_keys[p], str(specs[p]), p in owned] for p in (*owned, *borrowed)
        ]
        degrees = [
            choice.data_parallel,
            choice.tensor_parallel,
            choice.shard_optimizer,
            *_params_split(choice),
        ]
        of_others = [
            len(owned) < len(traced.graph.params),
            degrees,
            *_arriving(traced.graph, config),
            *self._summary_of_all(config),
        ]
        updated = params if owned else [*params, self._optimizer.shared_key]
        return content_hash([self._facts, "update", updated, *of_others])

    def measure(self, config: StageConfig) -> StageCost:
        """Compile a stage config, or take its measurement from the store.

        Raises:
            TargetError: as ``devices_of``; ``target-refused`` if the compiler does not take the
                model.
        """
        return self._stored(
            StageCost,
            self.key(config),
            lambda: self.programs(config).cost_given_update(self.measure_update(config)),
        )

    def measure_update(self, config: StageConfig) -> UpdateCost:
        """Compile the end of a step of a stage alone, or take its measurement from the store."""
        return self._stored(
            UpdateCost,
            self.update_key(config),
            lambda: self.programs(_of_update(config)).update_cost,
        )

    def split_key(self, config: StageConfig) -> str:
        """Return the content hash of a stage config whose backward pass is split into two
        programs."""
        return content_hash([self.key(config), "split", SPLIT_VERSION])

    def measure_split(self, config: StageConfig) -> SplitCost:
        """Compile the two programs of a stage's split backward pass, or take their cost from the
        store."""

        def compile_it() -> SplitCost:
            programs = self.programs(config, kind=SplitStagePrograms)
            assert isinstance(programs, SplitStagePrograms)
            return programs.split_cost

        return self._stored(SplitCost, self.split_key(config), compile_it)

    def buffers_key(self, config: StageConfig) -> str:
        """Return the content hash of the buffers of a stage, which also depend on the names of its
        layers and their position in the model."""
        layers = self.traced(config.microbatch_size).slice(config.first, config.stop)
        return content_hash([self.key(config), "buffers", config.first, layers.sources])

    def measure_buffers(
        self, config: StageConfig, kind: type[StagePrograms] = StagePrograms
    ) -> StageBuffers:
        """Return which buffers make up the bytes of a stage and which layer each belongs to,
        compiled or from the store."""
        key_of = self.buffers_key if kind is StagePrograms else self.split_buffers_key
        compiler = self.compiler_of(config, name_buffers=True)
        return self._stored(
            StageBuffers,
            key_of(config),
            lambda: self.programs(config, compiler=compiler, kind=kind).buffers,
        )

    def split_buffers_key(self, config: StageConfig) -> str:
        """Return the content hash of the buffers of a stage whose backward pass is split."""
        return content_hash([self.buffers_key(config), self.split_key(config)])

    def measure_split_buffers(self, config: StageConfig) -> StageBuffers:
        """Return the buffers of a stage whose backward pass is split."""
        return self.measure_buffers(config, SplitStagePrograms)

    @environment.without_collecting()
    def _stored(
        self, kind: type[Measured], key: str, compile_it: Callable[[], Measured]
    ) -> Measured:
        def compiled() -> Any:
            with self.compiles.refusing("the model"):
                return write(compile_it())

        facts = {**self.provenance, "kind": "compiled in place"}  # of no job
        return read(self.store.kept(key, compiled, facts), kind)

    def programs(
        self,
        config: StageConfig,
        *,
        devices: Sequence[object] | None = None,
        compiler: AnyCompiler | None = None,
        kind: type[StagePrograms] = StagePrograms,
    ) -> StagePrograms:
        """Return the programs of a stage config, each compiled when it is asked for.

        Args:
            config: The stage.
            devices: Devices to compile for, instead of the target's.
            compiler: Instead of the target's, which compiles to measure and not to run.
            kind: Whether its backward pass is whole or split.

        Raises:
            TargetError: as ``devices_of``.
        """
        traced, choice = self.traced(config.microbatch_size), config.choice
        return kind(
            traced,
            config,
            self.compiles.devices(choice.num_devices) if devices is None else devices,
            self.sharding(config.microbatch_size),
            self._update_of(config),
            num_arriving=dict.fromkeys(shared_onwards(traced.graph, config.first, config.stop), 1),
            compiler=compiler or self.compiler_of(config),
        )


def target_provenance(target: Target) -> dict[str, Any]:
    """Return the facts beside programs that decide what compiling them for a target says."""
    facts: dict[str, Any] = {
        "backend": f"compile:{target.name}",
        "target": target.name,
        "versions": environment.versions(target.platform),
        "flags": list(environment.active_flags(target.platform)),
    }
    if target.rates is not None:
        facts["work_version"] = WORK_VERSIONS.get(target.platform, WORK_VERSIONS["cuda"])
    if target.platform != "cpu":
        facts["compiler"] = content_hash([target.key])
    return facts


def _params_split(choice: StageChoice) -> list[str]:
    """Return, for keys, whether parameters are split over replicas (ZeRO-3). Empty where they are
    whole, so that measurements from before there was a choice keep their keys."""
    return ["params"] if choice.shard_params else []


def _bare_kernels(layers: StageSlice) -> list[str]:
    """Return, for keys, that layers hold kernels of Pallas outside ``custom_partitioning``; empty
    where they do not, so that measurements of most models keep their keys."""
    return [KERNELS_VERSION] if any(call.function.num_kernels[1] for call in layers.calls) else []


def _arriving(graph: LayerGraph, config: StageConfig) -> list[list[int]]:
    """Return, for keys, which of the stage's parameters get gradients from later stages; empty
    where none do. A sum over several stages takes no more room in the program than one over two."""
    owned, _ = owned_and_borrowed(graph, config.first, config.stop)
    shared = shared_onwards(graph, config.first, config.stop)
    return [[owned.index(p) for p in shared]] if shared else []


def _of_update(config: StageConfig) -> StageConfig:
    """Return a stage config with the same end of a step, equal for all numbers of replicas unless
    these share the optimizer's state."""
    if config.choice.shard_optimizer:
        return config
    return replace(config, choice=replace(config.choice, data_parallel=1, remat="none"))
