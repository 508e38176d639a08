"""Connections of strangers: what port scanners and worse send to each port at which processes
listen, all on 127.0.0.1."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from capture.runtime.hosts.forwarder import NO_PORT, Forwarder
from capture.runtime.hosts.gate import COORDINATOR

#: The most that are held open.
_MOST_OPEN = 200


def with_children(processes: Iterable[int]) -> list[int]:
    """Ids of processes and of all that they have started."""
    found = list(processes)
    for process in found:
        for task in Path(f"/proc/{process}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def ports_of(processes: Iterable[int]) -> list[int]:
    """The ports at which the processes listen."""
    inodes = set()
    for process in processes:
        for link in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    listening = "0A"
    return sorted(
        int(line[1].rpartition(":")[2], 16)
        for line in lines
        if line[3] == listening and line[9] in inodes
    )


def resident_bytes(processes: Iterable[int]) -> int:
    """Of all together, with what their parents share with them."""
    total = 0
    for process in processes:
        fields = Path(f"/proc/{process}/statm").read_text().split()
        total += int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


@dataclass
class Strangers:
    """Who connects to ports and does not belong there.

    Attributes:
        secret: Of the run; they know only what was said in one conversation.
        seed: Of what they do.
        done: How often which of them has connected.
        unreached: How often the system did not let one connect.
        answered: How often a gate closed a connection whose conversation was wrong.
    """

    secret: str
    seed: int = 0
    done: Counter[str] = field(default_factory=Counter)
    unreached: int = 0
    answered: int = 0

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._open: list[socket.socket] = []
        self._trickling: list[socket.socket] = []
        self._wrong = Forwarder(f"not {self.secret}", ("127.0.0.1", 0))
        self._own = Forwarder(self.secret, ("127.0.0.1", 0))
        noise = self._chance.randbytes
        self.kinds: dict[str, Callable[[int], None]] = {
            "noise": lambda port: self._send(port, noise(4096)),
            "http": lambda port: self._send(port, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"),
            "tls": lambda port: self._send(port, b"\x16\x03\x01\x02\x00\x01\x00" + noise(300)),
            "lengths": lambda port: self._send(port, struct.pack("<Q", 2**40) + bytes(64)),
            "zeros": lambda port: self._send(port, bytes(64)),
            "half-open": self._hold,
            "slow": self._trickle,
            "wrong secret": self._lie,
            "replay": self._replay,
            "closed at once": lambda port: self._send(port, b""),
        }
        self._said: dict[int, bytes] = {}

    def come(self, ports: Iterable[int], count: int, until: float) -> None:
        """So many connections, in a random order of ports and kinds, until a time of
        ``time.monotonic`` at most."""
        ports = list(ports)
        names = [name for name in self.kinds for _ in range(-(-count // len(self.kinds)))][:count]
        self._chance.shuffle(names)
        for number, name in enumerate(names):
            if time.monotonic() > until:
                return
            try:
                self.kinds[name](ports[number % len(ports)])
            except OSError:
                self.unreached += 1
            self.done[name] += 1
            for each in self._trickling:
                with contextlib.suppress(OSError):
                    each.send(b"c")

    def come_silent(self, port: int, count: int) -> None:
        """So many connections that stay and say nothing."""
        for _ in range(count):
            self._hold(port)

    def go(self) -> None:
        for each in (*self._open, *self._trickling):
            each.close()

    def _connect(self, port: int) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", port), 5.0)
        made.setblocking(False)
        return made

    def _send(self, port: int, said: bytes) -> None:
        with self._connect(port) as made:
            made.send(said)

    def _hold(self, port: int) -> None:
        self._open.append(self._connect(port))
        if len(self._open) > _MOST_OPEN:
            self._open.pop(0).close()

    def _trickle(self, port: int) -> None:
        """A byte of what a host would say, with every other stranger that comes."""
        self._trickling.append(self._connect(port))
        if len(self._trickling) > _MOST_OPEN:
            self._trickling.pop(0).close()

    def _lie(self, port: int) -> None:
        """The whole conversation, with a secret that is wrong."""
        self._converse(port, lambda challenge: self._wrong.hello(challenge, COORDINATOR))

    def _replay(self, port: int) -> None:
        """What a host of the run has said to this port before."""
        if port not in self._said:
            self._said[port] = b"nobody has said anything"
            self._converse(port, lambda challenge: self._record(port, challenge), believed=True)
        self._converse(port, lambda challenge: self._said[port])

    def _record(self, port: int, challenge: bytes) -> bytes:
        self._said[port] = self._own.hello(challenge, NO_PORT)
        return self._said[port]

    def _converse(
        self, port: int, answer: Callable[[bytes], bytes], *, believed: bool = False
    ) -> None:
        """Wait for random bytes, which not every port sends, and answer them. A gate then says 32
        bytes, to a host of the run only."""
        with self._connect(port) as made:
            made.settimeout(0.2)
            try:
                challenge = made.recv(64)  # gRPC says more
                made.send(answer(challenge))
                proof = made.recv(32) if len(challenge) == 32 else b""
            except TimeoutError:
                return
            except ConnectionError:
                proof = b""
            if len(challenge) == 32:
                assert bool(proof) == believed, "a stranger was believed, or a host was not"
                self.answered += not believed
