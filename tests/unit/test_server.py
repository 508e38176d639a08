"""Servers: the paper's are whole and sourced, a user's file is checked, a target makes one."""

from __future__ import annotations

import json

import pytest

from capture.errors import ClusterError
from capture.machine.cluster import Cluster
from capture.machine.rates import Sourced
from capture.machine.server import SERVERS_FOLDER, Server, server_names
from capture.machine.target import TARGETS_FOLDER


def a_file(tmp_path, leave_out=(), **changes) -> str:
    document = json.loads((SERVERS_FOLDER / "gtx1080ti-x4.json").read_text()) | changes
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps({key: value for key, value in document.items() if key not in leave_out})
    )
    return str(path)


@pytest.mark.parametrize(
    ("name", "devices", "gigabytes", "host_gigabytes"),
    [("gtx1080ti-x4", 4, 11.8, 375), ("gtx1080ti-x8", 8, 11.8, 750), ("dgx-2", 16, 34.4, 1500)],
)
def test_the_papers_servers(name, devices, gigabytes, host_gigabytes):
    server = Server.load(name)
    assert server.devices == devices
    assert round(server.memory_bytes.value / 1e9, 1) == gigabytes
    assert server.host_memory_bytes.value == host_gigabytes * 10**9
    assert server.swap_bytes_per_second.value == 11.5 * 2**30
    assert all(row["source"] for row in server.document().values() if isinstance(row, dict))


def test_every_shipped_server_is_read():
    assert server_names() == ("dgx-2", "gtx1080ti-x4", "gtx1080ti-x8")


def test_a_target_makes_one():
    server = Server.of(Cluster.parse("1x2", "h100")).with_(host_memory_bytes=10**12)
    assert (server.name, server.devices, server.host_memory_bytes.value) == ("h100-x2", 2, 10**12)
    assert server.usable_bytes.value < server.memory_bytes.value
    assert set(server.assumed) == {"message_bytes_per_second", "delete_seconds"}
    assert "host_memory_bytes" in Server.of(Cluster.parse("1x2", "h100")).assumed
    with pytest.raises(ClusterError) as error:
        Server.of(Cluster.parse("2x2", "h100"))
    assert error.value.codes == ("server-nodes",)


def test_a_target_says_what_its_host_has(tmp_path):
    document = json.loads((TARGETS_FOLDER / "h100.json").read_text())
    document["host"] = {"memory_bytes": {"value": 10**11, "source": "its data sheet"}}
    (path := tmp_path / "mine.json").write_text(json.dumps(document))
    server = Server.of(Cluster.parse("1x4", str(path)))
    assert server.host_memory_bytes == Sourced(4 * 10**11, "its data sheet")
    assert set(server.assumed) == {"message_bytes_per_second", "delete_seconds"}
    assert server.with_(host_memory_bytes=7, usable_bytes=None).host_memory_bytes.value == 7


def test_a_file_goes_in_and_out(tmp_path):
    server = Server.load(a_file(tmp_path))
    assert {**server.document(), "name": "gtx1080ti-x4"} == json.loads(
        (SERVERS_FOLDER / "gtx1080ti-x4.json").read_text()
    )
    assert server.with_(num_devices=2, usable_bytes=5).devices == 2


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    name = a_file(
        tmp_path,
        num_devices={"value": 1.5, "source": ""},
        usable_bytes={"value": 0, "source": ""},
        swap_bytes_per_second={"value": 0, "source": ""},
        delete_seconds={"value": -1, "source": ""},
    )
    with pytest.raises(ClusterError) as error:
        Server.load(name)
    assert error.value.codes == ("server-devices", "server-memory", "server-rate", "server-seconds")


def test_a_server_without_bandwidth(tmp_path):
    name = a_file(tmp_path, leave_out=("p2p_bytes_per_second", "swap_bytes_per_second"))
    with pytest.raises(ClusterError) as error:
        Server.load(name)
    assert error.value.codes == ("server-rate", "server-rate")


def test_unknown_servers_are_named():
    with pytest.raises(
        ClusterError, match=r"dgx-2, gtx1080ti-x4, gtx1080ti-x8.*\[server-unknown\]"
    ):
        Server.load("gtx")
