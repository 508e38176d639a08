"""A model as layers, tensors and bytes: framework-free, so planning never loads JAX.

The *loss* is traced for one micro-batch and cut into L layers (``capture.tracing``). What is left
here is what every planner needs: which parameters, batch leaves and tensors of earlier layers a
layer reads, which tensors it hands to later layers, how large they are at any micro-batch size, and
how much it computes.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from capture import documents
from capture.errors import ProfileError

GRAPH = documents.Format("layer graph", ProfileError, "graph", "profile the model again")

#: Bytes per element by dtype name, for dtypes that NumPy does not know or that JAX stores
#: differently.
_ITEM_BYTES = {
    "bfloat16": 2,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int4": 1,
    "uint4": 1,
    "key<fry>": 8,
    "key<rbg>": 16,
    "key<urbg>": 16,
}


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element of a dtype given by name.

    Example:
        >>> item_bytes("float32"), item_bytes("bfloat16"), item_bytes("bool")
        (4, 2, 1)
    """
    if dtype in _ITEM_BYTES:
        return _ITEM_BYTES[dtype]
    # The first number: float8_e4m3fnuz has 8 bits.
    return max(1, int(re.findall(r"\d+", dtype)[0]) // 8)


@dataclass(frozen=True)
class Tensor:
    """A parameter, a batch leaf, or a value that crosses a layer boundary.

    Attributes:
        name: Path of a parameter or batch leaf; the producing equation of a value.
        shape: Dimensions at the micro-batch size of the graph.
        dtype: JAX's name of the dtype, such as ``"float32"``.
        batch_dim: The dimension that grows with the micro-batch; None if none does.
        differentiable: Whether a gradient flows back through it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    batch_dim: int | None = None
    differentiable: bool = True

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes at the micro-batch size of the graph, unsharded."""
        return self.size * item_bytes(self.dtype)

    def shard_bytes(self, data_parallel: int) -> int:
        """Return the bytes per device when the batch dimension is split; all where it cannot be
        split evenly."""
        if self.batch_dim is None or self.shape[self.batch_dim] % data_parallel:
            return self.nbytes
        return self.nbytes // data_parallel


@dataclass(frozen=True)
class Layer:
    """The smallest unit that a plan may place.

    Attributes:
        layer_id: Position in program order, from 0.
        name: For people: the scope of its first equation, or ``layer_3``.
        params: Indices into ``LayerGraph.params``; a shared parameter stands in several layers.
        inputs: Indices into ``LayerGraph.values`` of what earlier layers made and this layer reads.
        outputs: Indices into ``LayerGraph.values`` of what this layer makes and later layers (or
            the caller: the loss) read.
        batch: Indices into ``LayerGraph.batch`` of the batch leaves it reads.
        flops: Forward floating-point operations for one micro-batch (2 per multiply-add).
        key: Content hash: equal keys mean the same program on other parameters.
    """

    layer_id: int
    name: str
    params: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    batch: tuple[int, ...]
    flops: int
    key: str


@dataclass(frozen=True)
class LayerGraph:
    """L layers in program order, and the tensors between them, for one micro-batch size.

    Attributes:
        model_hash: Content hash of the traced program, its shapes and its layer boundaries.
        microbatch_size: Examples in the traced micro-batch (over all data-parallel replicas).
        layers: Layers in program order.
        params: Trainable parameters. A parameter stacked over scanned layers appears once per
            layer.
        values: Tensors that cross at least one layer boundary, and the loss.
        batch: Batch leaves, then the random key if the loss takes one.
        value_dims: The dimension of each value that stages cut along the sequence, by the number of
            ways; None where it stays whole.
    """

    model_hash: str
    microbatch_size: int
    layers: tuple[Layer, ...]
    params: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    batch: tuple[Tensor, ...]
    value_dims: Mapping[int, tuple[int | None, ...]] = field(default_factory=dict, hash=False)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def _producer(self) -> dict[int, int]:
        return {value: layer.layer_id for layer in self.layers for value in layer.outputs}

    @cached_property
    def _last_reader(self) -> dict[int, int]:
        return {value: layer.layer_id for layer in self.layers for value in layer.inputs}

    def producer(self, value: int) -> int:
        """Return the id of the layer that makes a value."""
        return self._producer[value]

    def crossing(self, cut: int) -> tuple[int, ...]:
        """Return the values made by layers before ``cut`` and read by others from it on, ascending.

        A skip connection over several layers crosses every cut in between: it passes through the
        stages there.
        """
        return self._crossings[cut]

    @cached_property
    def _crossings(self) -> tuple[tuple[int, ...], ...]:
        spans = sorted((v, self._producer[v], reader) for v, reader in self._last_reader.items())
        return tuple(
            tuple(v for v, made, read in spans if made < cut <= read)
            for cut in range(self.num_layers + 1)
        )

    def value_dim(self, value: int, split: tuple[int, int]) -> int | None:
        """Return the dimension of a value that is cut along the sequence; None if none is.

        Args:
            value: Index into ``values``.
            split: Ways in which it is split, as ``StageChoice.value_split``.
        """
        dims = self.value_dims.get(split[1])
        return None if dims is None else dims[value]

    def value_bytes(self, value: int, split: tuple[int, int]) -> int:
        """Return the bytes per device of a value between stages; arguments as of ``value_dim``."""
        nbytes = self.values[value].shard_bytes(split[0])
        return nbytes if self.value_dim(value, split) is None else nbytes // split[1]

    def stage_params(self, first: int, stop: int) -> tuple[int, ...]:
        """Return the parameters of layers [first, stop), each once, in the order in which the
        layers first read them.

        Not by index: a tree sorts ``block_10`` before ``block_9``, and equal stages should see
        equal orders.
        """
        return tuple(dict.fromkeys(p for layer in self.layers[first:stop] for p in layer.params))

    def stage_batch(self, first: int, stop: int) -> tuple[int, ...]:
        """Return the batch leaves that layers [first, stop) read, each once, ascending."""
        return tuple(sorted({b for layer in self.layers[first:stop] for b in layer.batch}))

    def param_owner(self, param: int) -> int:
        """Return the first layer that reads a parameter: its stage updates it."""
        return self._owners[param]

    @cached_property
    def _owners(self) -> dict[int, int]:
        return {p: layer.layer_id for layer in reversed(self.layers) for p in layer.params}

    @cached_property
    def unread_params(self) -> tuple[int, ...]:
        """The parameters that no layer reads."""
        return tuple(p for p in range(len(self.params)) if p not in self._owners)

    def param_readers(self, param: int) -> tuple[int, ...]:
        """Return the layers that read a parameter, ascending; several share it."""
        return self._param_readers.get(param, ())

    @cached_property
    def _param_readers(self) -> dict[int, tuple[int, ...]]:
        readers: dict[int, list[int]] = {}
        for layer in self.layers:
            for p in dict.fromkeys(layer.params):
                readers.setdefault(p, []).append(layer.layer_id)
        return {p: tuple(found) for p, found in readers.items()}

    @cached_property
    def num_parameters(self) -> int:
        return sum(p.size for p in self.params)

    def to_json(self) -> dict[str, Any]:
        # Models that know no sequence parallelism have no ``value_dims``.
        return GRAPH.write(documents.but_empty(self, "value_dims"))

    @classmethod
    def from_json(cls, data: object) -> LayerGraph:
        """Read the graph that ``to_json`` wrote.

        Raises:
            ProfileError: ``graph-schema`` if the schema version is unknown, ``graph-corrupt`` for a
                missing or wrong field.
        """
        return GRAPH.read(data, cls)


def agreed_value_dims(graphs: Iterable[LayerGraph]) -> dict[int, tuple[int | None, ...]]:
    """Return, by number of ways, the dimension that each value is cut along (``value_dims``); None
    where graphs of one model differ. Graphs without that number of ways do not count."""
    found: dict[int, tuple[int | None, ...]] = {}
    for graph in graphs:
        for ways, dims in graph.value_dims.items():
            known = found.get(ways, dims)
            found[ways] = tuple(a if a == b else None for a, b in zip(known, dims, strict=True))
    return found


def content_hash(data: object) -> str:
    """Return a short hash of a JSON-serialisable value, stable over processes and versions."""
    return hashlib.sha256(
        json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()[:16]
