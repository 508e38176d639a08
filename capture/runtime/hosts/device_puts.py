"""Arrays between processes by ``jax.device_put``: NCCL on GPUs, the interconnect of TPUs, sockets
on CPUs.

JAX numbers these copies by counting them, so every process makes all of them in one order, also
those between others, for which it holds arrays without shards; else values are swapped in silence,
or all hang.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from capture.runtime.hosts.addresses import free_port
from capture.runtime.hosts.transport import Buffer, Shipment, Silence, buffers, touch

#: Sockets to each peer.
_SOCKETS = 2


def prepare(address: str, patience_seconds: float) -> None:
    """Say where CPU devices listen, before anything asks JAX for devices. It takes no port 0.

    Args:
        patience_seconds: For what the others say of themselves.
    """
    for name, value in (
        ("socket_address", f"{address}:{free_port(address)}"),
        ("timeout_seconds", int(patience_seconds)),
    ):
        jax.config.update(f"jax_cross_host_transfer_{name}", value)
    jax.config.update("jax_cross_host_transport_addresses", ",".join([f"{address}:0"] * _SOCKETS))


class DevicePuts:
    """A ``Transport`` by ``jax.device_put``: every process makes all copies."""

    takes_all = True

    def __init__(self, process: int, silence: Silence):
        self._process, self._silence = process, silence
        self._acknowledgements: dict[tuple[int, int], list[jax.Array]] = {}
        self.waiting: dict[tuple[int, int], dict[Buffer, int]] | None = None

    @property
    def held(self) -> list[jax.Array]:
        return [array for arrays in self._acknowledgements.values() for array in arrays]

    def carry(
        self, shipment: Shipment, number: int, arrays: Sequence[jax.Array]
    ) -> Sequence[jax.Array]:
        sends, receives = (self._process == p for p in (shipment.sender, shipment.receiver))
        if not sends:
            arrays = [
                _elsewhere(struct.shape, struct.dtype, device)
                for struct, device in zip(shipment.structs, shipment.sources, strict=True)
            ]
        got = _put(arrays, shipment.sources, shipment.targets)
        if receives:
            self._silence.expect(got[-1], shipment.sender, shipment.label)
        if shipment.is_acknowledged:
            if sends and self.waiting is not None:
                self.waiting[number, shipment.receiver] = buffers(arrays)
            arrived = self._acknowledge(shipment, got if receives else ())
            if sends:
                self._acknowledgements[number, shipment.receiver] = arrived
        return got if receives else ()

    def wait(self, shipment: Shipment, number: int) -> None:
        for array in self._acknowledgements.pop((number, shipment.receiver)):
            array.block_until_ready()
        if self.waiting is not None:
            self.waiting.pop((number, shipment.receiver), None)

    def _acknowledge(self, shipment: Shipment, got: Sequence[jax.Array]) -> list[jax.Array]:
        """Return values that the sender has as soon as the receiver has the arrays."""
        devices = tuple(shipment.of_targets)
        back = tuple(shipment.sources[numbers[0]] for numbers in shipment.of_targets.values())
        arrived = [
            touch([got[n] for n in numbers])
            if got
            else _elsewhere((len(numbers),), jnp.dtype(jnp.float32), device)
            for device, numbers in shipment.of_targets.items()
        ]
        found = _put(arrived, devices, back)
        if self._process == shipment.sender:
            self._silence.expect(
                found[-1], shipment.receiver, f"the acknowledgement of {shipment.label!r}"
            )
        return found


def _elsewhere(shape: tuple[int, ...], dtype: jnp.dtype, device: jax.Device) -> jax.Array:
    """Return an array on a device of another process, without shards here."""
    sharding = SingleDeviceSharding(device)
    return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)


def _put(
    arrays: Sequence[jax.Array], sources: Sequence[jax.Device], targets: Sequence[jax.Device]
) -> list[jax.Array]:
    """Copy arrays with one call per pair of devices. Within a call, jaxlib goes through the pairs
    in an order that is not the same in all processes (jax 0.10.2, four pairs: values swapped in 10
    of 12)."""
    pairs = list(zip(sources, targets, strict=True))
    found: dict[int, jax.Array] = {}
    for pair in dict.fromkeys(pairs):
        numbers = [number for number, each in enumerate(pairs) if each == pair]
        sharding = SingleDeviceSharding(pair[1])
        moved = jax.device_put([arrays[n] for n in numbers], [sharding] * len(numbers))
        found |= zip(numbers, moved, strict=True)
    return [found[number] for number in range(len(pairs))]
