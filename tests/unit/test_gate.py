"""The gate of a host lets hosts of the run through, and nobody else."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from strangers import Strangers, resident_bytes
from timeouts import TIMEOUT_SECONDS

from capture import environment
from capture.errors import ExecutionError
from capture.runtime.hosts import forwarder, gate
from capture.runtime.hosts.addresses import parted
from capture.runtime.hosts.gate import Gate
from capture.runtime.multihost import initialize

SECRET = "sixteen or more characters"
HOW = (
    "set CAPTURE_SECRET to the same text on all hosts, such as what `openssl rand -hex 32` prints."
)


@pytest.fixture
def gates() -> Iterator[list[Gate]]:
    """Of two hosts."""
    made = [Gate(SECRET, "127.0.0.1:0", host) for host in (0, 1)]
    yield made
    for each in made:
        each.end()


@pytest.fixture
def service() -> Iterator[int]:
    """The port of a service that says again what is said to it, in capitals."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_answer, args=(server,), daemon=True).start()
        yield server.getsockname()[1]


def _answer(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    with connection:
        while said := connection.recv(2**16):
            connection.sendall(said.upper())


def exchanged(address: str, said: bytes) -> bytes:
    """All that is answered, until the other side ends."""
    got = b""
    connection = socket.create_connection(parted(address), 10.0)
    sender = threading.Thread(target=_say, args=(connection, said))
    sender.start()
    with connection, contextlib.suppress(ConnectionError):
        while more := connection.recv(2**16):
            got += more
    sender.join()
    return got


def _say(connection: socket.socket, said: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)


def test_a_gate_forwards_what_hosts_of_the_run_say(gates, service):
    first, second = gates
    second.meet(first.address, 5.0)
    first.allow({7: service})
    said = b"a" * 3_000_001
    assert exchanged(second.dial(first.address, 7), said) == said.upper()
    assert exchanged(second.dial(first.address, service), b"a") == b"", "only what is allowed"
    assert exchanged(second.dial(first.address, 7), b"a") == b"A"
    assert first.num_refused == 1


def test_strangers_are_refused_while_hosts_get_through(gates, service):
    first, second = gates
    first.allow({7: service})
    address, strangers = second.dial(first.address, 7), Strangers(SECRET)
    _, port = parted(first.address)
    before = resident_bytes([first._process.pid])
    for _ in range(3):
        strangers.come([port], 100, time.monotonic() + environment.patience(60))
        assert exchanged(address, b"a") == b"A"
    # Of those that stay silent or slow more have come than may be without a proof.
    assert strangers.done["half-open"] + strangers.done["slow"] == 60
    strangers.come_silent(port, 3 * forwarder.MOST_UNPROVEN)
    assert exchanged(address, b"a") == b"A"
    assert resident_bytes([first._process.pid]) - before < 16_000_000
    assert strangers.unreached == 0 and strangers.answered == 60
    strangers.go()
    assert first.num_refused >= 300


def test_who_does_not_prove_is_cut_off_in_time(monkeypatch):
    monkeypatch.setattr(forwarder, "PROOF_SECONDS", 0.1)
    own = forwarder.Forwarder(SECRET, ("127.0.0.1", 0))
    with socket.create_connection(own.place, 10.0) as slow:
        assert len(slow.recv(64)) == 32
        slow.sendall(forwarder._MAGIC)
        assert slow.recv(64) == b""
    assert own.num_refused == 1


def test_the_oldest_of_too_many_without_a_proof_is_cut_off(monkeypatch):
    monkeypatch.setattr(forwarder, "MOST_UNPROVEN", 2)
    place = forwarder.Forwarder(SECRET, ("127.0.0.1", 0)).place
    with contextlib.ExitStack() as stack:

        def come() -> socket.socket:
            """Return a connection that was asked for its proof."""
            connection = stack.enter_context(socket.create_connection(place, 10.0))
            assert len(connection.recv(64)) == 32
            return connection

        first, second, third = come(), come(), come()
        assert first.recv(64) == b""
        for each in (second, third):
            each.setblocking(False)
            with pytest.raises(BlockingIOError):
                each.recv(64)


def test_hosts_with_two_secrets_are_told(gates):
    other = Gate(f"not {SECRET}", "127.0.0.1:0", 2)
    with pytest.raises(ExecutionError) as refused:
        other.meet(gates[0].address, 5.0)
    other.end()
    assert str(refused.value) == (
        f"host 2 and what listens at {gates[0].address} have not one secret; {HOW} "
        "[run-hosts-secret]"
    )


def test_what_listens_there_must_know_the_secret_too(gates):
    """A service that takes everybody for a host is none of the run's."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def believe() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(bytes(64))
                connection.recv(2**16)

        threading.Thread(target=believe, daemon=True).start()
        with pytest.raises(ExecutionError) as refused:
            gates[0].meet(f"127.0.0.1:{server.getsockname()[1]}", 5.0)
    assert refused.value.codes == ("run-hosts-secret",)


def test_a_gate_that_is_not_there_is_said(gates):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(ExecutionError) as refused:
            gates[1].meet(address, 0.0)
    assert str(refused.value) == (
        f"host 1 does not reach host 0 at {address}: [Errno 111] Connection refused; give an "
        "address and a free port of host 0 that every host reaches. [run-hosts-start]"
    )


def test_another_process_of_the_machine_does_not_pass(gates, service):
    first, second = gates
    first.allow({7: service})
    address = second.dial(first.address, 7)
    program = (
        f"import socket; s = socket.create_connection({parted(address)}, 10); s.sendall(b'a'); "
        "s.shutdown(1); print(s.recv(9))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "b'A'" not in done.stdout
    assert exchanged(address, b"a") == b"A"


def test_the_first_message_names_ports_of_this_machine(gates):
    first, second = gates
    said = b"\x04at 127.0.0.1:23456 and 127.0.0.1:34567"
    message = len(said).to_bytes(4, "little") + said
    renamed = {"127.0.0.1:23456": "127.0.0.1:65432", "127.0.0.1:34567": "127.0.0.1:45678"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        first.allow({port: port})
        address = second.dial(first.address, port, num_digits=5, renamed=renamed)
        assert len(address) == len("127.0.0.1:12345")
        with socket.create_connection(parted(address), 10.0) as near:
            far, _ = server.accept()
            with far:
                for byte in message + b"then 127.0.0.1:23456":
                    far.send(bytes([byte]))
            got = b"".join(iter(lambda: near.recv(2**16), b""))
        assert got[4:] == b"\x04at 127.0.0.1:65432 and 127.0.0.1:45678then 127.0.0.1:23456"
        with pytest.raises(OSError, match="refused"):  # one connection, and the port is closed
            socket.create_connection(parted(address), 10.0)
        # A library that says something else is not believed.
        address = second.dial(first.address, port, num_digits=5, renamed=renamed)
        with socket.create_connection(parted(address), 10.0) as near:
            far, _ = server.accept()
            with far:
                far.sendall(b"\x02\0\0\0no")
                assert near.recv(64) == b""


def test_a_gate_that_was_killed_is_said(gates):
    os.kill(gates[1]._process.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(ExecutionError) as refused:
            gates[1].meet(gates[0].address, 5.0)
        assert refused.value.codes == ("run-hosts-cut",)


def test_a_gate_ends_with_its_host():
    program = (
        "import os; from capture.runtime.hosts.gate import Gate; "
        f"print(Gate({SECRET!r}, '127.0.0.1:0', 0)._process.pid, flush=True); "
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    gone, end = Path(f"/proc/{int(done.stdout)}/fd"), time.monotonic() + TIMEOUT_SECONDS
    while gone.exists() and list(gone.iterdir()):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_doors_are_shut_and_what_came_in_stays():
    server, other = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    place = server.getsockname()
    assert gate.listening()[server.fileno()] == place[1]
    near = socket.create_connection(place)
    far, _ = server.accept()
    gate.shut([server.fileno()])
    gc.collect()
    assert server.fileno() not in gate.listening() and other.fileno() in gate.listening()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(place)
    assert select.select([server], [], [], 0.0) == ([], [], []), "who polls it has nothing to do"
    near.sendall(b"a")
    assert far.recv(1) == b"a"


def test_a_run_over_machines_needs_a_secret(monkeypatch):
    monkeypatch.delenv("CAPTURE_SECRET", raising=False)
    with pytest.raises(ExecutionError) as refused:
        initialize("10.0.0.1:4321", 2, 0)
    assert str(refused.value) == (
        "host 0 listens at 10.0.0.1:4321, which other machines reach, and the run has no secret by "
        f"which hosts know each other; {HOW} Or name --transport device_put, which nothing protects "
        "from strangers. [run-hosts-secret]"
    )
    monkeypatch.setenv("CAPTURE_SECRET", "short")
    assert environment.secret_of_run() == "short"
    with pytest.raises(ExecutionError) as refused:
        initialize("127.0.0.1:4321", 2, 0)
    assert str(refused.value) == (
        "the secret of the run has 5 characters and must have 16 at least; "
        f"{HOW} [run-hosts-secret]"
    )
