"""A host's gate: the one port that other machines reach, and what goes through it.

It is a program of its own, started by ``capture.runtime.hosts.gate``. A stranger's bytes so never
get into the process that trains, and forwarding waits for nobody's interpreter. JAX's services
listen on 127.0.0.1 alone; the gate forwards to them what comes from hosts that prove that they know
the secret of the run, and closes every other connection.

The proof, in messages of fixed length, before anything else is read:

    gate -> host   32 random bytes
    host -> gate   "capture1", the port of 127.0.0.1 that it asks for, 32 random bytes,
                   HMAC-SHA256(key, "host" and all of these)
    gate -> host   HMAC-SHA256(key, "gate" and all of these)

Random bytes of both sides are in both proofs, so a recorded conversation proves nothing later. What
follows is neither encrypted nor signed. The parent writes one JSON document a line on standard
input and reads the answer from standard output; the program ends when its input does.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Address = tuple[str, int]

#: The most connections that may be without a proof at a time; a new one then closes the oldest.
MOST_UNPROVEN = 64
#: The seconds in which a connection must prove that it knows the secret.
PROOF_SECONDS = 5.0
#: The port that a host asks for when it wants nothing but the proof.
NO_PORT = 0
_MAGIC, _RANDOM_BYTES, _MAC_BYTES = b"capture1", 32, 32
_HELLO_BYTES = len(_MAGIC) + 2 + _RANDOM_BYTES
_PIECE_BYTES = 2**18
_LOOPBACK = "127.0.0.1"


class NotProvenError(Exception):
    """The other side of a connection does not know the secret."""


class Forwarder:
    """The gate's connections.

    Args:
        secret: Known to all hosts of the run and to nobody else.
        address: Where it listens, with a port or 0.
    """

    def __init__(self, secret: str, address: Address):
        self._key = hashlib.sha256(secret.encode()).digest()
        self._ports: dict[int, int] = {}
        self._unproven: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self.num_refused = 0
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self._server = socket.create_server(address, family=family, backlog=1024)
        _in_thread(self._accept)

    @property
    def place(self) -> Address:
        """The address and port at which it listens."""
        return self._server.getsockname()[:2]

    def allow(self, ports: Mapping[int, int]) -> None:
        """Forward what asks for these numbers, once proven, to these ports of 127.0.0.1."""
        self._ports |= ports

    def dial(self, gate: Address, port: int, num_digits: int, renamed: Mapping[str, str]) -> int:
        """Listen on a free port of 127.0.0.1, and forward what the parent sends to another host.

        Args:
            num_digits: Of the port that is made; the parent's first connection to it is the only
                one. 0 for a port of any length that takes connections until the end.
            renamed: Addresses in the first message that comes back, and of equal length what the
                parent reads instead.
        """
        server = _listen(num_digits)
        words = {old.encode(): new.encode() for old, new in renamed.items()}

        def serve() -> None:
            for near in _connections(server):
                if not is_of_process(os.getppid(), near.getpeername(), near.getsockname()):
                    near.close()
                    continue
                if num_digits:
                    server.close()
                _in_thread(self._dialled, near, gate, port, words)
                if num_digits:
                    return

        _in_thread(serve)
        return server.getsockname()[1]

    def _dialled(
        self, near: socket.socket, gate: Address, port: int, renamed: Mapping[bytes, bytes]
    ) -> None:
        try:
            far = self.prove(gate, port)
        except (OSError, NotProvenError):
            near.close()
            return
        _join(near, far, renamed)

    def prove(self, gate: Address, port: int) -> socket.socket:
        """Return a connection to a port of another host, once both have proven to know the secret.

        Raises:
            OSError: If the gate is not reached.
            NotProvenError: If it closes the connection, or does not know the secret.
        """
        far = socket.create_connection(gate, PROOF_SECONDS)
        try:
            end = time.monotonic() + PROOF_SECONDS
            challenge = _exactly(far, _RANDOM_BYTES, end)
            hello = self.hello(challenge, port)
            far.sendall(hello)
            proof = _exactly(far, _MAC_BYTES, end)
            expected = self._mac(b"gate", challenge + hello[:_HELLO_BYTES])
            if not hmac.compare_digest(proof, expected):
                raise NotProvenError
        except BaseException:
            far.close()
            raise
        return far

    def hello(self, challenge: bytes, port: int) -> bytes:
        """Return what a host answers to a gate's random bytes."""
        hello = _MAGIC + port.to_bytes(2, "big") + os.urandom(_RANDOM_BYTES)
        return hello + self._mac(b"host", challenge + hello)

    def _mac(self, role: bytes, said: bytes) -> bytes:
        return hmac.digest(self._key, role + said, "sha256")

    def _accept(self) -> None:
        for far in _connections(self._server):
            with self._lock:
                self._unproven[far] = None
                oldest = next(iter(self._unproven)) if len(self._unproven) > MOST_UNPROVEN else None
            if oldest is not None:
                _shut(oldest)
            _in_thread(self._greet, far)

    def _greet(self, far: socket.socket) -> None:
        port = None
        try:
            port = self._proven_port(far)
        except (OSError, NotProvenError):
            pass
        finally:
            with self._lock:
                del self._unproven[far]
                self.num_refused += port is None
        if port is None or port == NO_PORT:
            far.close()
            return
        try:
            near = socket.create_connection((_LOOPBACK, self._ports[port]), PROOF_SECONDS)
        except OSError:  # JAX does not listen yet, or has ended
            far.close()
            return
        _join(near, far, {})

    def _proven_port(self, far: socket.socket) -> int:
        end = time.monotonic() + PROOF_SECONDS
        challenge = os.urandom(_RANDOM_BYTES)
        far.settimeout(PROOF_SECONDS)
        far.sendall(challenge)
        hello = _exactly(far, len(_MAGIC), end)
        if hello != _MAGIC:
            raise NotProvenError
        hello += _exactly(far, _HELLO_BYTES - len(_MAGIC), end)
        proof = _exactly(far, _MAC_BYTES, end)
        if not hmac.compare_digest(proof, self._mac(b"host", challenge + hello)):
            raise NotProvenError
        port = int.from_bytes(hello[len(_MAGIC) :][:2], "big")
        if port not in self._ports and port != NO_PORT:
            raise NotProvenError
        far.sendall(self._mac(b"gate", challenge + hello))
        return port


def is_of_process(process: int, theirs: Address, ours: Address) -> bool:
    """Return whether the far end of a connection of 127.0.0.1 is the process's; True if unknown.

    Args:
        theirs, ours: Address and port of the far and the near end.
    """
    try:
        # A socket of IPv6 may speak IPv4; its addresses then end with those.
        tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
        ends = [_in_hexadecimal(theirs), _in_hexadecimal(ours)]
        entries = [line.split() for table in tables for line in table.splitlines()[1:]]
        inodes = {each[9] for each in entries if all(map(str.endswith, each[1:3], ends))}
        links = {str(link.readlink()) for link in Path(f"/proc/{process}/fd").iterdir()}
    except OSError:
        return not sys.platform.startswith("linux")
    return bool({f"socket:[{inode}]" for inode in inodes} & links)


def _in_hexadecimal(place: Address) -> str:
    """Return an address and port as ``/proc/net/tcp`` has them, in this machine's byte order."""
    number = int.from_bytes(socket.inet_aton(place[0]), sys.byteorder)
    return f"{number:08X}:{place[1]:04X}"


def _exactly(connection: socket.socket, count: int, end: float) -> bytes:
    """Return so many bytes, read before a time of ``time.monotonic``."""
    got = b""
    while len(got) < count:
        left = end - time.monotonic()
        if left <= 0:
            raise NotProvenError
        connection.settimeout(left)
        more = connection.recv(count - len(got))
        if not more:
            raise NotProvenError
        got += more
    return got


def _join(near: socket.socket, far: socket.socket, renamed: Mapping[bytes, bytes]) -> None:
    """Forward in both directions until both have ended."""
    for each in (near, far):
        each.settimeout(None)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    there = _in_thread(_forward, near, far, {})
    _forward(far, near, renamed)
    there.join()
    near.close()
    far.close()


def _forward(source: socket.socket, sink: socket.socket, renamed: Mapping[bytes, bytes]) -> None:
    piece = memoryview(bytearray(_PIECE_BYTES))
    try:
        if renamed:
            sink.sendall(_first_message(source, renamed))
        while count := source.recv_into(piece):
            sink.sendall(piece[:count])
        sink.shutdown(socket.SHUT_WR)
    except (OSError, NotProvenError):  # what broke on one side breaks on the other
        _shut(source)
        _shut(sink)


def _first_message(source: socket.socket, renamed: Mapping[bytes, bytes]) -> bytes:
    """Read the first message of JAX's transfer server, its length in 4 bytes before it: the
    addresses at which it listens for arrays. Return it with the addresses renamed."""
    end = time.monotonic() + PROOF_SECONDS
    length = _exactly(source, 4, end)
    body = _exactly(source, min(int.from_bytes(length, "little"), _PIECE_BYTES), end)
    source.settimeout(None)
    for old, new in renamed.items():
        if old not in body:
            print(f"capture: the transfer server does not name {old!r}", file=sys.stderr)
            raise NotProvenError
        body = body.replace(old, new)
    return length + body


def _listen(num_digits: int) -> socket.socket:
    """Listen on 127.0.0.1 at a free port of so many digits; of any number for 0."""
    others = []
    try:
        while True:
            server = socket.create_server((_LOOPBACK, 0))
            if num_digits in (0, len(str(server.getsockname()[1]))):
                return server
            others.append(server)
    finally:
        for other in others:
            other.close()


def _connections(server: socket.socket) -> Iterator[socket.socket]:
    """Accept and yield connections without end."""
    while True:
        try:
            yield server.accept()[0]
        except OSError:  # no descriptors left, or it broke before it was taken
            time.sleep(0.01)


def _shut(connection: socket.socket) -> None:
    """End a connection; the thread that reads it closes it."""
    with contextlib.suppress(OSError):  # it has ended by itself
        connection.shutdown(socket.SHUT_RDWR)


def _in_thread(function: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def _answer(forwarder: Forwarder, asked: Mapping[str, Any]) -> dict[str, Any]:
    match asked:
        case {"allow": pairs}:
            forwarder.allow(dict(pairs))
            return {}
        case {"dial": gate, "port": port, "digits": num_digits, "renamed": renamed}:
            return {"port": forwarder.dial(tuple(gate), port, num_digits, renamed)}
        case {"prove": gate}:
            forwarder.prove(tuple(gate), NO_PORT).close()
            return {}
        case {"count": _}:
            return {"count": forwarder.num_refused}
    raise ValueError(f"{asked!r} is not known.")


def main() -> None:
    """Serve the parent until it has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.stack_size(2**18)
    forwarder: Forwarder | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if forwarder is None:
                forwarder = Forwarder(asked["secret"], tuple(asked["listen"]))
                answer: dict[str, Any] = {"place": forwarder.place}
            else:
                answer = _answer(forwarder, asked)
        except NotProvenError:
            answer = {"refused": True}
        except OSError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
