"""Bounds of the windows of a model from a few traces of its distinct layers: 32 equal layers are
one layer, at any degrees and any number of micro-batches.

A window of one or two layers is traced once for all that are the same but for their position. It is
traced at a micro-batch size that stands for several: programs with as many examples on each device
are the same, however many replicas there are, where examples go their own way through the layers.
``LayerFacts`` looks whether they do, and else traces every micro-batch size by itself.

What splits parameters over replicas (ZeRO) or activations along the sequence follows by rules:

    ZeRO 3      passes need no less than those of whole parameters: accumulators that are split have
                less memory to lend. They are expected to need the parameters and the gradients of a
                layer beside it. Traffic of parameters and gradients is no part of the least
                seconds. What replicas send each other is known of one trace without tensor
                parallelism: the same for any examples, and an even part of it where tensors are
                split. Where hardly a parameter is gathered for few examples, as for experts, one
                with more says what is expected
    sequence    an even part of what the layer needs on one device, and of the traffic of those that
                do not split the sequence
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil
from typing import Any

from capture.environment import jax_release, without_collecting
from capture.measured.profile import StageConfig, rescaled
from capture.measured.stage_cost import StageBounds, StageCost
from capture.memo import memo
from capture.model.graph import LayerGraph
from capture.partition.sharding import ModelSharding
from capture.plan.choices import ParamSplit, StageChoice, is_cut
from capture.predictor.formula import kept_bytes
from capture.profiler.bounded_passes import BoundedPasses, Share, alone
from capture.profiler.bounds import NO_END, BoundsBackend, EndBounds
from capture.profiler.compile import CompileBackend
from capture.profiler.lines import Line, lines_of
from capture.profiler.other_splits import (
    gathering_again,
    of_split_params,
    put_together,
    sending,
    splitting,
    together,
)
from capture.runtime.least_traffic import along_sequence, of_examples
from capture.runtime.traced_stage import StageTraces
from capture.step.interface import stage_values

Window = tuple[int, int]
"""Layers [first, stop)."""

#: Layers of a window, at most: sums over longer stages are built from those of one and two.
LONGEST = 2
#: Replicas of a traced program stand for others with as many examples on each; with many more,
#: fewer of its products would be large on every device.
_MOST_REPLICAS = 32
#: That send each other parameters and gradients, to know what they send.
_FEW_REPLICAS = 2


@dataclass(frozen=True, order=True)
class _Traced:
    """The passes of a window as they are traced; they sort in the order in which traces are
    shared."""

    window: Window
    size: int
    remat: str
    tensor_parallel: int
    data_parallel: int

    @property
    def config(self) -> StageConfig:
        choice = StageChoice(self.data_parallel, self.tensor_parallel, self.remat)
        return StageConfig(*self.window, choice, self.size)


class LayerFacts:
    """The bounds of windows of one and two layers, whatever their degrees and micro-batch size.

    Args:
        backend: Knows the model and the target.
        examples: Numbers of examples on a device that are asked about.
        num_devices: Most of a stage.
        share: Has passes bounded, in this process or elsewhere.

    Attributes:
        graph: The model's layers, at the largest micro-batch size that is traced.
    """

    def __init__(
        self,
        backend: CompileBackend,
        examples: Iterable[int],
        num_devices: int,
        share: Share = alone,
    ):
        self._backend, self._num_devices, self._share = backend, num_devices, share
        self._bounds = BoundsBackend(backend, for_devices=num_devices)
        self._sizes = traced_sizes(examples)
        self.graph: LayerGraph = backend.traced(max(self._sizes.values())).graph
        self._passes: dict[StageConfig, StageBounds] = {}
        self._lines: dict[StageConfig, tuple[Line, int]] = {}
        self._traces = defaultdict[Any, StageTraces](StageTraces)
        self._ends: dict[tuple[Window, StageChoice], EndBounds] = {}
        self._together: dict[Hashable, StageBounds] = {}

    @cached_property
    def windows(self) -> dict[Window, Window]:
        """The window that stands for each window; windows that are alike have the same one."""
        size, num_layers = self.graph.microbatch_size, self.graph.num_layers
        found: dict[Window, Window] = {}
        first_of: dict[Any, Window] = {}
        for n in range(1, LONGEST + 1):
            for first in range(num_layers - n + 1):
                window = (first, first + n)
                key = tuple(
                    self._backend.key(StageConfig(*window, StageChoice(1, tp), size))
                    for tp in (1, 2)
                )
                found[window] = first_of.setdefault(key, window)
        return found

    def _distinct(self, longest: int) -> set[Window]:
        """Return the windows of at most so many layers that stand for all others."""
        return {w for w in self.windows.values() if w[1] - w[0] <= longest}

    @cached_property
    def is_by_example(self) -> bool:
        """Whether the bytes that a device needs depend on its own examples alone, and not on how
        many the micro-batch has."""
        size = self.graph.microbatch_size
        if size % 4 or not self._backend.takes(size // 2):
            return False

        def facts(window: Window, size: int, replicas: int) -> tuple[int, ...]:
            found = self._trace(_Traced(window, size, "none", 1, replicas)).most
            return found.residual_bytes, found.forward_bytes, found.backward_bytes

        return all(facts(w, size, 4) == facts(w, size // 2, 2) for w in self._distinct(1))

    @cached_property
    def _sharding(self) -> ModelSharding:
        return self._backend.sharding(self.graph.microbatch_size)

    @memo
    def param_bytes(self, split: ParamSplit) -> tuple[int, ...]:
        """Return the bytes per device of every parameter under a split."""
        return self._sharding.param_bytes(split)

    @memo
    def graph_at(self, microbatch_size: int) -> LayerGraph:
        """Return the layer graph at another micro-batch size."""
        return rescaled(self.graph, microbatch_size)

    def graph_of(self, choices: Iterable[StageChoice]) -> LayerGraph:
        """Return the layer graph that knows how stages with these choices split the values between
        them."""
        return self._sharding.graph(choices)

    @without_collecting()
    def learn(
        self,
        asked: Iterable[tuple[StageChoice, int]],
        progress: Callable[[int, int], None] = lambda done, total: None,
        longest: int = LONGEST,
    ) -> None:
        """Trace everything that ``bounds`` of stages needs and that is not known yet.

        Args:
            asked: Their choices, no mixtures, and micro-batch sizes over all replicas.
            progress: Told (programs that are known, all of them).
            longest: Most layers of a window.
        """
        if self.is_by_example and self._lines_pay:  # all numbers of examples follow from a few
            asked = [*asked]
            examples = {*self._sizes, *(size // choice.data_parallel for choice, size in asked)}
            ones = {
                replace(choice, data_parallel=1, shard_optimizer=False, shard_params=False)
                for choice, _ in asked
            }
            asked = list(product(ones, examples))
        wanted = {
            each
            for choice, size in asked
            for window in self._distinct(longest)
            for passes in self._needed(window, choice, size)
            for each in (passes, *self._alone(passes))
        }
        together: dict[Hashable, list[StageConfig]] = {}
        for passes in sorted(wanted):
            if passes.config not in self._lines and passes.config not in self._passes:
                size = None if self.is_by_example else passes.size
                key = passes.window, size, passes.remat
                together.setdefault(key, []).append(passes.config)
        batches = [
            BoundedPasses(tuple(configs), self._num_devices, self.is_by_example)
            for configs in together.values()
        ]
        done, total = 0, sum(map(len, together.values()))
        for batch, found in self._share(batches, self._take):
            for config, document in zip(batch.configs, found or (), strict=False):
                if document is not None:
                    self._passes[config] = self._bounds.keep_passes(config, document)
            self._take(batch)
            done += len(batch.configs)
            progress(done, total)

    @property
    def _lines_pay(self) -> bool:
        """Whether passes of many numbers of examples follow from others, or none is known. Where
        sizes are powers of two, bytes of examples often equal those of weights; each size is then
        traced when it is asked for."""
        follow = [line.follows(examples) for line, examples in self._lines.values()]
        return 4 * sum(follow) >= len(follow)

    def _take(self, batch: BoundedPasses) -> None:
        """Learn the bounds of a batch of passes; trace those that are not known and do not follow
        from others."""
        if batch.by_example:
            unknown = [config for config in batch.configs if config not in self._lines]
            for line, configs in lines_of(unknown, self._traced):
                self._lines |= {config: (line, n) for n, config in configs.items()}
        else:
            for config in batch.configs:
                self._traced(config)

    def _needed(self, window: Window, choice: StageChoice, microbatch_size: int) -> list[_Traced]:
        """Return the traces that the bounds of a window need: its passes, and with sequence
        parallelism also those of one device per replica."""
        examples, size = microbatch_size // choice.data_parallel, microbatch_size
        replicas = choice.data_parallel
        if self.is_by_example:
            size = self._size(examples)
            replicas = size // examples
        plain = _Traced(window, size, choice.remat, choice.tensor_parallel, replicas)
        return [plain, *[replace(plain, tensor_parallel=1)] * choice.sequence_parallel]

    def _size(self, examples: int) -> int:
        """Return the micro-batch size at which programs of ``examples`` examples per device are
        traced: one that the workload takes."""
        size = self._sizes.get(examples, 2 * examples)
        while not self._backend.takes(size) and size < self.graph.microbatch_size:
            size *= 2
        self._sizes[examples] = size
        return size

    def _trace(self, passes: _Traced) -> StageBounds:
        """Return the bounds of passes, traced or computed from a line through those of others."""
        config = passes.config
        if config not in self._passes and config in self._lines:
            line, examples = self._lines[config]
            self._passes[config] = line.at(examples)
        return self._traced(config)

    def _traced(self, config: StageConfig) -> StageBounds:
        if config not in self._passes:
            shared = (config.first, config.stop, config.microbatch_size, config.choice.remat)
            self._passes[config] = self._bounds.of_passes(config, NO_END, self._traces[shared])
        return self._passes[config]

    def bounds(self, window: Window, choice: StageChoice, microbatch_size: int) -> StageBounds:
        """Return the bounds of a window of one or two layers. Windows that are alike get the same
        object.

        Args:
            window: Layers [first, stop).
            choice: No mixture.
            microbatch_size: Over all replicas.
        """
        return self._combined(self.windows[window], choice, microbatch_size)

    def least_held(self, window: Window, choice: StageChoice, microbatch_size: int) -> int:
        """Return a lower bound of the bytes per device that a one-layer window adds to what a stage
        holds after the forward pass of a micro-batch. It counts parameters and optimizer state that
        the layer owns, and what is kept; values that pass between layers count with the layer that
        reads them."""
        graph, (layer, _) = self.graph_at(microbatch_size), window
        owned = [p for p in graph.layers[layer].params if graph.param_owner(p) == layer]
        sizes = self.param_bytes(choice.param_split)
        kept = self.least_added(window, lambda w: self._least_kept(w, choice, microbatch_size))
        optimizer = self._end(window, choice).least.optimizer_bytes
        return sum(sizes[p] for p in owned) + optimizer + int(kept) // choice.tensor_parallel

    def least_added(self, window: Window, of: Callable[[Window], float]) -> float:
        """Return a lower bound of what a one-layer window adds to a stage: what it has alone, but
        not more than it adds to the layer behind it.

        Since jax 0.11 derivatives of some operations (tanh, for one) keep a number of their own
        beside their output. Of the layer alone that is counted, and in a stage whose next layer
        keeps the output it need not be.

        Args:
            window: A window of one layer.
            of: A number of a window of one or two layers.
        """
        added = [of(pair) - of(behind) for pair, behind in self._behind(window)]
        return max(0, min([of(window), *added]))

    def _behind(self, window: Window) -> list[tuple[Window, Window]]:
        """Return the different pairs of layers that begin with one like this, each with its second
        layer; empty where sums over layers hold."""
        if not self.needs_pairs:
            return []
        pairs: dict[tuple[Window, Window], tuple[Window, Window]] = {}
        for first in range(self.graph.num_layers - 1):
            pair, behind = (first, first + 2), (first + 1, first + 2)
            if self.windows[first, first + 1] == self.windows[window]:
                pairs.setdefault((self.windows[pair], self.windows[behind]), (pair, behind))
        return list(pairs.values())

    @cached_property
    def needs_pairs(self) -> bool:
        """Whether a layer alone may have more than it adds to a stage."""
        return jax_release() >= (0, 11)

    def _least_kept(self, window: Window, choice: StageChoice, microbatch_size: int) -> int:
        """Return a lower bound of the bytes that a stage keeps of a window and of what it reads,
        over all devices that share a replica."""
        graph = self.graph_at(microbatch_size)
        # Values of a window may be split where their maker is in the stage.
        whole = replace(choice, tensor_parallel=1, sequence_parallel=False)
        cost = self.bounds(window, whole, microbatch_size).least
        used, _ = stage_values(graph, *window)
        read = [used[i] for i in cost.kept_inputs if graph.producer(used[i]) == window[0] - 1]
        return cost.residual_bytes + sum(graph.value_bytes(v, whole.value_split) for v in read)

    @memo
    def _combined(self, window: Window, choice: StageChoice, size: int) -> StageBounds:
        examples, of_one = size // choice.data_parallel, choice.data_parallel == 1
        kind = choice.tensor_parallel, choice.remat, choice.sequence_parallel, choice.shard_params
        count = (of_one, examples) if self.is_by_example else (choice.data_parallel, size)
        if (key := (window, kind, count)) not in self._together:
            self._together[key] = self._passes_together(window, choice, size)
        passes, ends = self._together[key], self._end(window, choice)
        return StageBounds(
            put_together(passes.least, ends.least, choice),
            put_together(passes.most, ends.most, choice),
        )

    def _passes_together(self, window: Window, choice: StageChoice, size: int) -> StageBounds:
        """Return the bounds of passes with as many examples on a device, for any number of replicas
        but one. Kernels are shared by several choices."""
        plain, *whole = map(self._passes_of, self._needed(window, choice, size))
        if whole:
            plain = self._along_sequence(window, choice, size, plain, whole[0])
        if choice.data_parallel == 1 and self.is_by_example:
            # What products add to gradients need not be read and written once more.
            work = of_examples(plain.least.backward_work)
            plain = replace(plain, least=replace(plain.least, backward_work=work))
        if choice.shard_params:
            plain = self._of_split_params(window, choice, plain)
        return replace(plain, least=together(plain.least))

    def _of_split_params(
        self, window: Window, choice: StageChoice, plain: StageBounds
    ) -> StageBounds:
        """Return the bounds of passes whose parameters are split over replicas (ZeRO-3), computed
        from those of whole parameters."""
        sent, gathered = self._split_params(window), self._largest_layer(window, choice)

        def works(cost: StageCost, own: StageCost, of: Callable[..., object]) -> dict[str, Any]:
            names, degree = ("forward_work", "backward_work"), choice.tensor_parallel
            return {name: of(getattr(cost, name), getattr(own, name), degree) for name in names}

        plain = of_split_params(plain, choice)
        return StageBounds(
            replace(plain.least, **works(plain.least, sent.least, splitting)),
            replace(
                plain.most,
                forward_bytes=plain.most.forward_bytes + gathered,
                backward_bytes=plain.most.backward_bytes + 2 * gathered,
                **works(plain.most, sent.most, sending),
            ),
        )

    def _passes_of(self, passes: _Traced) -> StageBounds:
        """Return the bounds of passes with as many examples on a device, for any number of
        replicas. Where a minimum cut depends on the replicas, they are not above those of one
        replica."""
        found = self._trace(passes)
        for one in self._alone(passes):
            alone, least = self._trace(one), found.least
            fewer = alone if self._kept(one) < self._kept(passes) else found
            least = replace(
                fewer.least,
                forward_bytes=min(least.forward_bytes, alone.least.forward_bytes),
                backward_bytes=min(least.backward_bytes, alone.least.backward_bytes),
                forward_work=least.forward_work,
                backward_work=least.backward_work,
            )
            return replace(found, least=least, common_bytes=fewer.common_bytes)
        return found

    def _alone(self, passes: _Traced) -> list[_Traced]:
        """Return the passes of one replica alone where its minimum cut may be another; else
        nothing."""
        examples = passes.size // passes.data_parallel
        if not (is_cut(passes.remat) and self._cuts_vary and self._backend.takes(examples)):
            return []
        return [replace(passes, size=examples, data_parallel=1)]

    def _kept(self, passes: _Traced) -> int:
        """Return the bytes per device that forward passes keep for the backward pass."""
        graph, config = self.graph_at(passes.size), passes.config
        return kept_bytes(graph, *passes.window, config.choice, self._trace(passes).least)

    @cached_property
    def _cuts_vary(self) -> bool:
        """Whether a minimum cut differs between one replica with few examples and several. It
        weighs what each example has against what all have in common, such as their mean."""
        fewest = next(filter(self._backend.takes, sorted(self._sizes)), 0)
        if not fewest or not self.is_by_example:
            return False
        size = self._size(fewest)

        def kept(window: Window, size: int) -> int:
            return self._kept(_Traced(window, size, "cheap", 1, size // fewest))

        return any(kept(window, fewest) != kept(window, size) for window in self._distinct(1))

    @memo
    def _split_params(self, window: Window) -> StageBounds:
        """Return the bounds of a window's passes with parameters split over replicas, traced with
        the fewest examples. Where hardly any parameter is gathered for so few, because their
        products are small, the expected bounds are traced with the most examples."""

        def passes(examples: int) -> StageBounds:
            choice = StageChoice(_FEW_REPLICAS, 1, "none", True, True)
            return self._bounds.of_passes(
                StageConfig(*window, choice, self._size(examples)), NO_END
            )

        few = passes(min(self._sizes))
        work = few.most.forward_work
        sent = work.collectives if work is not None else ()
        gathered = sum(one.nbytes for one in sent if one.kind == "all-gather")
        if 4 * gathered >= self._largest_layer(window, StageChoice()):
            return few
        return replace(few, most=passes(max(self._sizes)).most)

    def _end(self, window: Window, choice: StageChoice) -> EndBounds:
        """Return the bounds of the end of a step, the same for replicas that share nothing."""
        replicas = choice.data_parallel if choice.shard_optimizer else 1
        same = replace(choice, data_parallel=replicas, remat="none", sequence_parallel=False)
        if (window, same) not in self._ends:
            config = StageConfig(*window, same, self.graph.microbatch_size)
            self._ends[window, same] = self._bounds.of_ends(config, self._traces[window])
        return self._ends[window, same]

    def _largest_layer(self, window: Window, choice: StageChoice) -> int:
        """Return the bytes per device of the gathered parameters of the window's largest layer."""
        sizes = self.param_bytes((choice.tensor_parallel, 1))
        layers = self.graph.layers[window[0] : window[1]]
        return max(sum(sizes[p] for p in layer.params) for layer in layers)

    def _along_sequence(
        self, window: Window, choice: StageChoice, size: int, plain: StageBounds, whole: StageBounds
    ) -> StageBounds:
        """Return the bounds of passes split along the sequence: at least an even part of what one
        device needs, expected to be as without the split."""
        one = replace(choice, tensor_parallel=1, sequence_parallel=False)
        graph, degree = self.graph_at(size), choice.tensor_parallel
        kept = ceil(kept_bytes(graph, *window, one, whole.least) / degree)
        least = replace(
            plain.least.keeping(kept),
            forward_bytes=min(plain.least.forward_bytes, whole.least.forward_bytes // degree),
            backward_bytes=min(plain.least.backward_bytes, whole.least.backward_bytes // degree),
            forward_work=along_sequence(plain.least.forward_work, degree),
            backward_work=along_sequence(plain.least.backward_work, degree),
        )
        most = replace(
            plain.most.keeping(kept), backward_work=gathering_again(plain.most.backward_work)
        )
        common = max(plain.common_bytes, ceil(whole.common_bytes / degree))
        return replace(plain, least=least, most=most, common_bytes=common)


def traced_sizes(examples: Iterable[int]) -> dict[int, int]:
    """Return, per number of examples on a device, the micro-batch size at which programs are
    traced: as few different ones as have from 2 to ``_MOST_REPLICAS`` replicas.

    Example:
        >>> traced_sizes([1, 2, 4, 8, 16, 32])
        {32: 64, 16: 64, 8: 64, 4: 64, 2: 64, 1: 2}
    """
    found: dict[int, int] = {}
    for each in sorted(set(examples), reverse=True):
        sizes = (s for s in found.values() if s % each == 0 and s <= _MOST_REPLICAS * each)
        found[each] = next(sizes, 2 * each)
    return found
