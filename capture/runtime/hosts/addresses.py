"""Which hosts a plan can be on, and their addresses, tried before JAX uses them: on a port in use
its service crashes without a word, and on an address that nobody answers it waits for a minute, its
transfers without end."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from capture.errors import ExecutionError, PlanError, Violation
from capture.plan.files import PlanFile

#: Most that is waited for an answer of another host's system.
ANSWER_SECONDS = 10.0
_PAUSE_SECONDS = 0.5


def check_nodes(plan: PlanFile) -> None:
    """Refuse stages, or other groups of devices that compute together, on parts of several nodes.

    Raises:
        PlanError: ``run-hosts-span``.
    """
    node_of, sizes = plan.known_cluster.node_of_device, plan.known_cluster.nodes
    groups = plan.device_groups
    nodes_of = [{node_of[device] for device in group} for group in groups]
    PlanError.check(
        Violation(
            f"stage {number} has {len(group)} devices of nodes "
            f"{', '.join(map(str, sorted(nodes)))}, which have {sum(sizes[n] for n in nodes)}; "
            "over several hosts a stage runs within a node or on whole nodes: plan with "
            "--whole-nodes.",
            "run-hosts-span",
        )
        for number, (group, nodes) in enumerate(zip(groups, nodes_of, strict=True))
        if len(nodes) > 1 and len(group) < sum(sizes[n] for n in nodes)
    )


def check_coordinator(coordinator: str, host: int) -> None:
    """Refuse an address that host 0 cannot listen at, or another host does not reach. That host 0
    does not listen yet is no error.

    Args:
        coordinator: ``address:port``.

    Raises:
        ExecutionError: ``run-hosts-start``.
    """
    why = _why_not_reached(coordinator, listens=False) if host else _why_not_bound(coordinator)
    if why is not None:
        does = "does not reach host 0" if host else "cannot listen"
        raise ExecutionError.of(
            f"host {host} {does} at {coordinator}: {why}; give an address and a free port of "
            "host 0 that every host reaches.",
            "run-hosts-start",
        )


def check_reached(
    addresses: Sequence[str], process: int, exchange: Callable[[list[Any]], Iterable[list[Any]]]
) -> None:
    """Refuse addresses at which the hosts do not reach each other.

    Args:
        addresses: Where each listens, by process.
        exchange: Gives what every process says for what this one does.

    Raises:
        ExecutionError: ``run-hosts-start`` in every process, with all that was not reached.
    """
    others = [other for other in range(len(addresses)) if other != process]
    mine = [
        [other, why]
        for other in others
        if (why := _why_not_reached(addresses[other], listens=True))
    ]
    ExecutionError.check(
        Violation(
            f"host {number} does not reach host {other} at {addresses[other]}: {why}; let the "
            "hosts reach each other at all ports of these addresses.",
            "run-hosts-start",
        )
        for number, found in enumerate(exchange(mine))
        for other, why in found
    )


def parted(address: str) -> tuple[str, int]:
    """Split ``address:port`` into its two parts, also where IPv6 has brackets.

    Example:
        >>> parted("[::1]:4321")
        ('::1', 4321)
    """
    name, _, port = address.rpartition(":")
    return name.strip("[]"), int(port)


def _why_not_bound(address: str) -> str | None:
    try:
        found = socket.getaddrinfo(*parted(address), type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # One that has ended leaves its connections behind for a minute.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _why_not_reached(address: str, *, listens: bool) -> str | None:
    """Return why an address is not reached, or None. Attempts go on until the time is over: a name
    may be known only once its host has started.

    Args:
        listens: Whether a process must be there; else the answer of its system is enough.
    """
    end = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            left = max(end - time.monotonic(), _PAUSE_SECONDS)
            socket.create_connection(parted(address), left).close()
            return None
        except (OSError, ValueError) as error:
            if isinstance(error, ConnectionRefusedError) and not listens:
                return None
            if time.monotonic() + _PAUSE_SECONDS > end:
                return str(error)
        time.sleep(_PAUSE_SECONDS)


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port of an address of this machine that is free now."""
    name = address.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET) as probe:
        probe.bind((name, 0))
        return probe.getsockname()[1]


def own_address(coordinator: str) -> str:
    """Return the address of this host from which the coordinator is reached; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(parted(coordinator))
        return probe.getsockname()[0]
