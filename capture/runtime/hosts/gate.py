"""The gate of a host, as the process that trains uses it, and the doors of JAX's transfer server.

What listens for other machines is the gate alone (``capture.runtime.hosts.forwarder``); JAX's
services abort on a stranger's bytes or believe them, so they listen on 127.0.0.1. The transfer
server listens no longer than until all hosts have connected.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

from capture.errors import ExecutionError
from capture.runtime.hosts import forwarder
from capture.runtime.hosts.addresses import parted

#: What hosts ask host 0's gate for: the service of ``jax.distributed``.
COORDINATOR = 1
#: The fewest characters of a secret.
_SECRET_CHARACTERS = 16
_PAUSE_SECONDS = 0.2


class Gate:
    """The gate of this host, a process that ends with this one.

    Args:
        secret: Known to all hosts of the run and to nobody else.
        address: ``address:port`` at which it listens; port 0 is a free one.

    Raises:
        ExecutionError: ``run-hosts-start`` if it cannot listen there, ``run-hosts-secret`` for a
            secret that is short.
    """

    def __init__(self, secret: str, address: str, host: int):
        if len(secret) < _SECRET_CHARACTERS:
            raise ExecutionError.of(
                f"the secret of the run has {len(secret)} characters and must have "
                f"{_SECRET_CHARACTERS} at least; {_HOW_TO_GIVE}",
                "run-hosts-secret",
            )
        self._host, self._lock = host, threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", forwarder.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        answer = self._ask(secret=secret, listen=parted(address))
        if "error" in answer:
            raise ExecutionError.of(
                f"host {host} cannot listen at {address}: {answer['error']}; give an address and a "
                "free port of host 0 that every host reaches.",
                "run-hosts-start",
            )
        name, port = answer["place"]
        self.address = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"

    def allow(self, ports: Mapping[int, int]) -> None:
        """Let hosts of the run reach these ports of 127.0.0.1, by the numbers they ask for."""
        self._ask(allow=list(ports.items()))

    def dial(
        self, gate: str, port: int, *, num_digits: int = 0, renamed: Mapping[str, str] | None = None
    ) -> str:
        """Return an address here that leads to a port of another host; see ``Forwarder.dial``."""
        answer = self._ask(dial=parted(gate), port=port, digits=num_digits, renamed=renamed or {})
        return f"127.0.0.1:{answer['port']}"

    def meet(self, gate: str, seconds: float) -> None:
        """Wait until another host's gate answers, and both have proven to know the secret.

        Raises:
            ExecutionError: ``run-hosts-secret`` if they do not, ``run-hosts-start`` if nobody
                answers within the seconds.
        """
        end = time.monotonic() + seconds
        while "error" in (answer := self._ask(prove=parted(gate))):
            if time.monotonic() > end:
                raise ExecutionError.of(
                    f"host {self._host} does not reach host 0 at {gate}: {answer['error']}; give "
                    "an address and a free port of host 0 that every host reaches.",
                    "run-hosts-start",
                )
            time.sleep(_PAUSE_SECONDS)
        if "refused" in answer:
            raise ExecutionError.of(
                f"host {self._host} and what listens at {gate} have not one secret; {_HOW_TO_GIVE}",
                "run-hosts-secret",
            )

    @property
    def num_refused(self) -> int:
        """The connections that were closed because they did not prove that they know the secret."""
        return self._ask(count=True)["count"]

    def end(self) -> None:
        """End the gate and what goes through it, before this process does."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, **asked: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock, contextlib.suppress(OSError):
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            if answer := self._process.stdout.readline():
                return json.loads(answer)
        raise ExecutionError.of(
            f"host {self._host}: its gate has ended (killed, or out of memory?); look at "
            "what it has said.",
            "run-hosts-cut",
        )


_HOW_TO_GIVE = (
    "set CAPTURE_SECRET to the same text on all hosts, such as what `openssl rand -hex 32` prints."
)


def check_secret(coordinator: str, secret: str | None) -> None:
    """Refuse a run over several machines without a secret.

    Args:
        coordinator: ``address:port`` of host 0.

    Raises:
        ExecutionError: ``run-hosts-secret``.
    """
    if secret is None and not is_of_this_machine(coordinator):
        raise ExecutionError.of(
            f"host 0 listens at {coordinator}, which other machines reach, and the run has no "
            f"secret by which hosts know each other; {_HOW_TO_GIVE} Or name --transport "
            "device_put, which nothing protects from strangers.",
            "run-hosts-secret",
        )


def is_of_this_machine(address: str) -> bool:
    """Return whether no other machine reaches an ``address:port``.

    Example:
        >>> [is_of_this_machine(a) for a in ("127.0.0.1:80", "[::1]:80", "10.0.0.1:80", "node:80")]
        [True, True, False, False]
    """
    name, _ = parted(address)
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def listening() -> dict[int, int]:
    """Return the ports at which this process listens, by descriptor."""
    found = {}
    for each in os.listdir("/dev/fd"):
        try:
            # Only sockets: closing a copy of a file's descriptor would give up its locks.
            if stat.S_ISSOCK(os.fstat(int(each)).st_mode):
                with socket.socket(fileno=os.dup(int(each))) as copy:
                    if copy.family != socket.AF_UNIX and copy.getsockopt(
                        socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                    ):
                        found[int(each)] = copy.getsockname()[1]
        except OSError:  # closed in between
            continue
    return found


def shut(descriptors: Collection[int]) -> None:
    """Listen no more at sockets of a library that has no way to close them: put sockets that are
    never ready in their place. Connections that were accepted stay."""
    for descriptor in descriptors:
        ours, theirs = socket.socketpair()
        os.dup2(theirs.fileno(), descriptor, inheritable=False)
        theirs.close()
        ours.detach()  # open until this process ends: were it closed, theirs would be ready
