"""The store keeps what was measured: across processes, also when one of them is killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from processes import REPOSITORY, environment_apart
from timeouts import TIMEOUT_SECONDS

from capture.errors import ProfileError
from capture.measured.store import STORE_SCHEMA_VERSION, Store

VALUE = {"residual_bytes": 12, "kept_inputs": [0, 2]}


def put(store: Store, key: str, value=None) -> None:
    store.put(
        key, VALUE if value is None else value, provenance={"backend": "compile:cpu"}, seconds=0.5
    )


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "a folder" / "store.sqlite"


def test_what_is_put_is_there_when_opened_again(path):
    store = Store(path)
    put(store, "a")
    put(store, "b", [1.5, None])
    store.close()
    again = Store(path)
    assert len(again) == 2
    assert again.get(["b", "missing", "a"]) == {"a": VALUE, "b": [1.5, None]}
    assert again.get([]) == {}


def test_without_a_path_it_is_in_memory():
    first, second = Store(), Store()
    put(first, "a")
    assert len(first) == 1 and len(second) == 0


def test_the_first_value_of_a_key_stays(path):
    store = Store(path)
    put(store, "a", 1)
    put(store, "a", 2)
    assert store.get(["a"]) == {"a": 1} and len(store) == 1


def test_provenance_seconds_and_date_are_kept(path):
    put(Store(path), "a")
    (row,) = sqlite3.connect(path).execute("SELECT provenance, seconds, created FROM measurements")
    assert row[:2] == ('{"backend": "compile:cpu"}', 0.5)
    assert row[2].startswith("20") and row[2].endswith("Z")


@pytest.mark.parametrize("content", [b"{}", b"SQLite format 3\0" + bytes(84), b"x" * 5000])
def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "store"
    path.write_bytes(content)
    with pytest.raises(ProfileError) as error:
        Store(path)
    assert str(error.value).startswith(f"store {str(path)!r} is no database of measurements: ")
    assert str(error.value).endswith(
        ". Move it away, or name another file with --store. [store-corrupt]"
    )
    assert path.read_bytes() == content


def test_a_store_of_another_version_is_refused(path):
    Store(path).close()
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA user_version={STORE_SCHEMA_VERSION + 1}")
    database.close()
    with pytest.raises(ProfileError) as error:
        Store(path)
    assert str(error.value) == (
        f"store {str(path)!r} has schema version 3; this version of capture reads up to 2. Name "
        "another file with --store. [store-schema]"
    )


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError) as error:
        Store(tmp_path / "file" / "store")
    assert error.value.codes == ("store-file",)


def test_two_connections_write_and_see_each_other(path):
    first, second = Store(path), Store(path)
    for i in range(20):
        put(first, f"first {i}")
        put(second, f"second {i}")
    put(second, "first 3", "another")
    assert len(first) == len(second) == 40
    assert first.get(["first 3", "second 19"]) == {"first 3": VALUE, "second 19": VALUE}


def start_writer(path: Path, name: str, count: int) -> subprocess.Popen:
    program = REPOSITORY / "tests/programs/store_writer.py"
    command = [sys.executable, str(program), str(path), name, str(count)]
    return subprocess.Popen(command, env=environment_apart(), stdout=subprocess.PIPE, text=True)


def test_processes_that_open_a_new_store_at_once_all_write(path):
    writers = [start_writer(path, str(n), 30) for n in range(3)]
    for writer in writers:
        writer.communicate(timeout=TIMEOUT_SECONDS)
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert len(Store(path)) == 90


def test_a_new_store_waits_for_a_process_that_makes_it_at_the_same_time(path):
    path.parent.mkdir()
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    ends = threading.Timer(0.1, other.execute, ["COMMIT"])
    ends.start()
    put(Store(path), "key")
    ends.join()
    assert len(Store(path)) == 1


def test_what_was_finished_survives_a_killed_writer(path):
    writer = start_writer(path, "key", 10**6)
    seen = [int(writer.stdout.readline()) for _ in range(50)]
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate(timeout=TIMEOUT_SECONDS)
    assert writer.returncode == -signal.SIGKILL
    store = Store(path)
    assert store.get(f"key {i}" for i in seen) == {f"key {i}": i for i in range(50)}
    number = len(store)
    put(store, "after")
    assert len(store) == number + 1 and 50 <= number < 10**6


FIRST_SCHEMA = """
CREATE TABLE measurements (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL,
    provenance TEXT NOT NULL,
    seconds REAL NOT NULL,
    created TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%SZ', 'now'))
);
INSERT INTO measurements (key, value, provenance, seconds)
    VALUES ('a', '{"bytes": 3}', '{"backend": "compile:cpu"}', 0.25);
PRAGMA user_version = 1;
"""


def test_a_store_of_the_first_schema_is_migrated_with_all_that_it_holds(path):
    path.parent.mkdir()
    database = sqlite3.connect(path)
    database.executescript(FIRST_SCHEMA)
    database.close()
    store = Store(path)
    (row,) = store.rows()
    assert (row.key, row.state, row.value, row.seconds, row.job) == (
        "a",
        "done",
        {"bytes": 3},
        0.25,
        {},
    )
    assert store.enqueue({"b": {"part": "stage"}}) == {}
    assert {found.key: found.state for found in Store(path).rows()} == {"a": "done", "b": "pending"}


def test_the_states_of_a_job(path):
    store = Store(path)
    states = []

    def note() -> None:
        states.append(next(store.rows(key_prefix="job")).state)

    store.enqueue({"job": {"part": "stage"}})
    note()
    store.start("job", "here:1")
    note()
    store.fail("job", "no", "Traceback", set_aside=False)
    note()
    store.fail("job", "no again", "Traceback", set_aside=True)
    note()
    assert store.enqueue({"job": {"part": "stage"}}) == {"job": "no again"}
    assert store.retry(["another"]) == 0 and store.retry(["job"]) == 1
    note()
    store.finish("job", 1, provenance={"backend": "compile:cpu"}, seconds=2.0, worker="here:2")
    note()
    assert states == ["pending", "running", "failed", "set aside", "pending", "done"]
    (row,) = store.rows()
    assert (row.attempts, row.worker, row.error) == (3, "here:2", "no again")
    assert store.typical_seconds() == {("compile:cpu", "stage"): 2.0}


def test_what_a_killed_owner_left_running_waits_again(path):
    store = Store(path)
    store.enqueue({"job": {}})
    store.start("job", "here:1")
    store.close()
    store = Store(path)
    store.enqueue({"job": {}})
    assert [row.state for row in store.rows()] == ["pending"]


def test_a_transaction_that_fails_leaves_nothing(path):
    store = Store(path)
    with pytest.raises(TypeError):
        store.finish("job", {1, 2}, provenance={}, seconds=0.0)
    assert len(store) == 0
    store.put("after", 1, provenance={}, seconds=0.0)
    assert store.get(["after"]) == {"after": 1}


def test_a_store_that_cannot_be_written_says_so(path):
    store = Store(path)
    store._database.execute("PRAGMA query_only = ON")
    with pytest.raises(ProfileError) as error:
        put(store, "a")
    assert error.value.codes == ("store-write",)
