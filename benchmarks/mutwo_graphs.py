"""Made-up arrays of models, on which searches are tried and compared: chains of equal blocks, and
random graphs of a few bundles."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.mutwo_costs import ArrayCosts, Graph
from capture.machine.rates import HostLink, Link, Sourced
from capture.step.sub_array import Bundle


@dataclass(frozen=True)
class Block:
    """A layer of one model.

    Attributes:
        forward_seconds, backward_seconds: Of its passes.
        maps_bytes: Of each bundle that its own passes alone use.
        border_bytes: Of what it hands on to the next, and reads again; 0 for nothing.
        state_bytes: Of what outlives the step.
        temporaries_bytes: Of either pass.
    """

    forward_seconds: float
    backward_seconds: float
    maps_bytes: tuple[int, ...]
    border_bytes: int = 0
    state_bytes: int = 0
    temporaries_bytes: int = 0


def host_link(bytes_per_second: float, *, latency: float = 0.0, duplex: bool = True) -> HostLink:
    """With both directions alike."""
    link = Link(Sourced(latency, "made up"), Sourced(bytes_per_second, "made up"))
    return HostLink(link, link, duplex, "made up")


def array_of(
    blocks: Sequence[Block], sizes: Sequence[int], *, launch_seconds: float = 0.0
) -> ArrayCosts:
    """Sub-arrays of some sizes: bytes grow with the models, and so do seconds but for a launch."""
    return ArrayCosts({size: _graph(blocks, size, launch_seconds) for size in sizes})


def _graph(blocks: Sequence[Block], size: int, launch_seconds: float) -> Graph:
    layers = len(blocks)
    bundles: list[Bundle] = []
    made_from: dict[int, tuple[int, ...]] = {}
    made_seconds: dict[int, float] = {}

    def add(name, nbytes, writer, readers, updater=None, feed=(), category="activations") -> int:
        bundles.append(Bundle(name, category, size * nbytes, writer, readers, updater, feed))
        return len(bundles) - 1

    before = add("batch 0", 1, None, (0, 2 * layers - 1), feed=(0,), category="batch")
    for layer, block in enumerate(blocks):
        back = 2 * layers - 1 - layer
        readers = (layer, back)
        state = add(
            f"layer {layer} parameters 0", block.state_bytes, None, readers, back,
            category="parameters",
        )  # fmt: skip
        inputs, total = (before, state), max(1, sum(block.maps_bytes))
        for n, nbytes in enumerate(block.maps_bytes):
            number = add(f"layer {layer} maps {n}", nbytes, layer, (back,))
            made_from[number] = inputs if n == 0 else (number - 1, *inputs[1:])
            # Of the seconds of the layer as much as of its bytes, and no launch of its own.
            made_seconds[number] = block.forward_seconds * size * nbytes / total
        if layer + 1 < layers and block.border_bytes:
            readers = (layer + 1, back - 1, back)
            before = add(f"layer {layer} border", block.border_bytes, layer, readers)
        if layer + 1 < layers:
            add(
                f"layer {layer} cotangents 0", block.border_bytes, back - 1, (back,),
                category="cotangents",
            )  # fmt: skip
    add("loss", 4, layers - 1, (), category="loss")
    forward = [size * block.forward_seconds + launch_seconds for block in blocks]
    backward = [size * block.backward_seconds + 2 * launch_seconds for block in blocks]
    temporaries = [size * block.temporaries_bytes for block in blocks]
    return Graph(
        size, layers, tuple(bundles), (*forward, *reversed(backward)),
        (*temporaries, *reversed(temporaries)), made_from, made_seconds,
    )  # fmt: skip


def chain(
    num_layers: int = 12, sizes: Sequence[int] = (1, 2), static_bytes: int = 3_000_000
) -> ArrayCosts:
    """Equal blocks of 0.61 and 1.21 ms with two bundles of 5.5 MB."""
    block = Block(0.613e-3, 1.208e-3, (5_500_000,) * 2, 0, static_bytes // num_layers)
    return array_of([block] * num_layers, sizes)


def random_graph(seed: int, num_bundles: int = 8, sizes: Sequence[int] = (1, 2)) -> ArrayCosts:
    """Two to four layers with so many bundles that can be moved, drawn."""
    draw = random.Random(seed)
    layers = draw.randint(2, min(4, num_bundles // 2))
    borders = [draw.random() < 0.6 for _ in range(layers - 1)]
    left = num_bundles - sum(borders)
    counts = [1] * layers
    for _ in range(left - layers):
        counts[draw.randrange(layers)] += 1
    blocks = []
    for layer, count in enumerate(counts):
        forward = draw.uniform(0.3, 1.5) * 1e-3
        border = draw.randint(1, 4) * 1_000_000 if layer + 1 < layers and borders[layer] else 0
        blocks.append(
            Block(
                forward,
                forward * draw.uniform(1.5, 2.5),
                tuple(draw.randint(1, 12) * 500_000 for _ in range(count)),
                border,
                draw.randint(1, 4) * 250_000,
                draw.randint(0, 4) * 500_000,
            )
        )
    return array_of(blocks, sizes, launch_seconds=draw.uniform(0, 1) * 1e-4)


def gpt2(sizes: Sequence[int] = tuple(range(1, 9)), num_layers: int = 12) -> ArrayCosts:
    """Blocks of GPT-2 (124M) at 8 examples of 1,024 tokens in float32: the bytes of their feature
    maps and Adam's state, and the seconds of a block on an H200, alone and per model of a
    sub-array, as ``compile:h200`` has them."""
    token, scores = 8 * 1024 * 768 * 4, 8 * 12 * 1024 * 1024 * 4
    maps = (token, token, 3 * token, scores, scores, token, token, 4 * token, 4 * token, 4 * token)
    block = Block(0.50e-3, 1.01e-3, maps, token, 7_087_872 * 12, 2 * token)
    return array_of([block] * num_layers, sizes, launch_seconds=1e-5)
