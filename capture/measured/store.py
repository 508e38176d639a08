"""The one store of measurements: SQLite, content-addressed, written once per finished measurement.

A key is the hash of everything that can change the result (program, degrees, versions, flags), so
nothing is ever edited, a measurement that is there is never made again, and an interrupted profile
resumes where it stopped, also after ``kill -9``.

Beside the measurements stand the jobs that make them, which do change:

    pending ──→ running ──→ done
                   │  ↖
                   ↓    ╲
                failed ──→ running ...  ──→ set aside   (failed again and again; until ``retry``)

One process owns the connection and writes: workers hand their results to it and never open the
store. Others may read at any time, and several owners may share a file (write-ahead log); a
measurement that two of them make is kept once. The log needs a local disk.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from capture.errors import ProfileError
from capture.measured.claims import is_gone

STORE_SCHEMA_VERSION = 2
#: ``interrupted`` is ``running`` of a process that is no more: the next command takes it again.
STATES = ("pending", "running", "interrupted", "done", "failed", "set aside")

#: That a writer waits for others; each holds the database for milliseconds, if the machine lets it.
_SECONDS_TO_LOCK = 600.0

_NOW = "strftime('%Y-%m-%dT%H:%M:%SZ', 'now')"
#: Statements that bring a store from a schema version to the next; the first makes a new one.
_MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        f"""CREATE TABLE IF NOT EXISTS measurements (
            key TEXT PRIMARY KEY,
            value TEXT NOT NULL,       -- JSON
            provenance TEXT NOT NULL,  -- JSON: backend, target, versions, flags
            seconds REAL NOT NULL,     -- what the measurement took
            created TEXT NOT NULL DEFAULT ({_NOW})
        )""",
    ),
    (
        f"""CREATE TABLE jobs (
            key TEXT PRIMARY KEY,
            job TEXT NOT NULL,                    -- JSON: workload, kind, layers, degrees, batch
            state TEXT NOT NULL DEFAULT 'pending',
            attempts INTEGER NOT NULL DEFAULT 0,  -- that ended, well or not
            error TEXT NOT NULL DEFAULT '',       -- of the last attempt that failed
            traceback TEXT NOT NULL DEFAULT '',
            worker TEXT NOT NULL DEFAULT '',      -- host and process of the last attempt
            updated TEXT NOT NULL DEFAULT ({_NOW})
        )""",
        "CREATE INDEX jobs_by_state ON jobs (state)",
    ),
)


@dataclass(frozen=True)
class Row:
    """One row of the store: a job, its measurement, or both.

    Attributes:
        key: Content hash, of both.
        state: The job's, one of ``STATES``; ``"done"`` for a measurement without one.
        job: What is, or was, to be measured; empty if that is not known.
        value: What was measured; None if there is none.
        provenance: Backend, target, versions and flags of the measurement.
        seconds: What the measurement took.
        created: When the measurement was kept; None if there is none.
        attempts, error, traceback, worker: How often the job ended, why it failed last, and where.
    """

    key: str
    state: str
    job: Mapping[str, Any]
    value: Any
    provenance: Mapping[str, Any]
    seconds: float
    created: str | None
    attempts: int
    error: str
    traceback: str
    worker: str


class Store:
    """The database of measurements by key, and of the state of the jobs that make them.

    Args:
        path: The database file; its folder is made. None keeps it in memory.

    Raises:
        ProfileError: ``store-corrupt`` if the file is no SQLite database, ``store-schema`` if a
            newer version wrote it, ``store-file`` if its folder cannot be made. Every method that
            writes raises ``store-write`` where the disk does not take it.
    """

    def __init__(self, path: Path | None = None):
        self.path = path
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ProfileError.of(
                    f"the folder of store {str(path)!r} cannot be made: {error}. Name another "
                    "file with --store.",
                    "store-file",
                ) from error
        try:
            self._database = sqlite3.connect(
                ":memory:" if path is None else path,
                timeout=_SECONDS_TO_LOCK,
                isolation_level=None,
                check_same_thread=False,
            )
            self._log_ahead()
            self._migrate()
        except sqlite3.DatabaseError as error:
            raise ProfileError.of(
                f"store {str(path)!r} is no database of measurements: {error}. Move it away, or "
                "name another file with --store.",
                "store-corrupt",
            ) from error

    def _log_ahead(self) -> None:
        """Switch the file to a write-ahead log. SQLite does not wait here, as it does elsewhere,
        for a process that does the same at the same time."""
        deadline = time.monotonic() + _SECONDS_TO_LOCK
        while True:
            try:
                self._database.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(0.01)

    def _migrate(self) -> None:
        """Bring the schema up to date. Another process may do so at the same time: whoever comes
        second finds it done."""
        if self._version() == STORE_SCHEMA_VERSION:
            return
        self._database.execute("BEGIN IMMEDIATE")
        version = self._version()
        if version > STORE_SCHEMA_VERSION:
            self._database.execute("ROLLBACK")
            raise ProfileError.of(
                f"store {str(self.path)!r} has schema version {version}; this version of capture "
                f"reads up to {STORE_SCHEMA_VERSION}. "
                "Name another file with --store.",
                "store-schema",
            )
        for statement in chain(*_MIGRATIONS[version:]):
            self._database.execute(statement)
        self._database.execute(f"PRAGMA user_version={STORE_SCHEMA_VERSION}")
        self._database.execute("COMMIT")

    def _version(self) -> int:
        return int(self._database.execute("PRAGMA user_version").fetchone()[0])

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Run one transaction: all of it is kept, or nothing."""
        try:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:  # SQLite itself rolls back when the disk is full
                    self._database.execute("ROLLBACK")
                raise
        except sqlite3.OperationalError as error:
            raise ProfileError.of(
                f"store {str(self.path)!r} cannot be written: {error}. What was kept before "
                "stands: make room, or let the file be written, "
                "and run the same command again.",
                "store-write",
            ) from error

    # ---- measurements ----------------------------------------------------------------------------

    def get(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return the values of those keys that are in the store."""
        found = {}
        with closing(self._database.cursor()) as cursor:
            for key in keys:
                row = cursor.execute(
                    "SELECT value FROM measurements WHERE key = ?", (key,)
                ).fetchone()
                if row is not None:
                    found[key] = json.loads(row[0])
        return found

    def put(
        self, key: str, value: object, *, provenance: Mapping[str, object], seconds: float
    ) -> None:
        """Keep a measurement; committed when this returns. The first one of a key stays."""
        with self._writing() as database:
            _insert(database, key, value, provenance, seconds)

    def kept(self, key: str, make: Callable[[], object], provenance: Mapping[str, object]) -> Any:
        """Return a measurement that is in the store, or make it now and keep it."""
        found = self.get([key])
        if key not in found:
            start = time.perf_counter()
            found[key] = make()
            self.put(key, found[key], provenance=provenance, seconds=time.perf_counter() - start)
        return found[key]

    def __len__(self) -> int:
        (count,) = self._database.execute("SELECT COUNT(*) FROM measurements").fetchone()
        return int(count)

    def typical_seconds(self) -> dict[tuple[str, str], float]:
        """Return the average seconds of a measurement, by (backend, kind of job)."""
        query = (
            "SELECT json_extract(m.provenance, '$.backend'), json_extract(j.job, '$.part'), "
            "AVG(m.seconds) "
            "FROM measurements m JOIN jobs j USING (key) GROUP BY 1, 2"
        )
        return {
            (backend, part): seconds for backend, part, seconds in self._database.execute(query)
        }

    # ---- jobs ------------------------------------------------------------------------------------

    def enqueue(self, jobs: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
        """Note jobs that are to be done, by key. Jobs that a killed owner left running wait again.

        Returns:
            Those that were set aside, which are not to be done, with their last error.
        """
        with self._writing() as database:
            database.executemany(
                "INSERT INTO jobs (key, job) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET state "
                f"= 'pending', updated = {_NOW} "
                "WHERE state != 'set aside'",
                [(key, json.dumps(job)) for key, job in jobs.items()],
            )
        rows = self._database.execute("SELECT key, error FROM jobs WHERE state = 'set aside'")
        return {key: error for key, error in rows if key in jobs}

    def start(self, key: str, worker: str) -> None:
        """Note that a worker has taken a job."""
        self._update(key, "state = 'running', worker = ?", worker)

    def finish(
        self,
        key: str,
        value: object,
        *,
        provenance: Mapping[str, object],
        seconds: float,
        worker: str = "",
        stored_key: str = "",
    ) -> None:
        """Keep the measurement of a job and mark it done, in one transaction.

        Args:
            key: The job's.
            value, provenance, seconds: Measurement and its facts, as for ``put``.
            worker: Which made it.
            stored_key: The measurement's, where it is another than the job's.
        """
        with self._writing() as database:
            _insert(database, stored_key or key, value, provenance, seconds)
            database.execute(
                "UPDATE jobs SET state = 'done', attempts = attempts + 1, worker = ?, updated = "
                f"{_NOW} WHERE key = ?",
                (worker, key),
            )

    def fail(self, key: str, error: str, traceback: str = "", *, set_aside: bool) -> None:
        """Note that an attempt has failed: the job is tried again, or set aside."""
        state = "set aside" if set_aside else "failed"
        self._update(
            key,
            "state = ?, attempts = attempts + 1, error = ?, traceback = ?",
            state,
            error,
            traceback,
        )

    def release(self, keys: Iterable[str]) -> None:
        """Let jobs wait again that were taken and not done, through no fault of theirs."""
        with self._writing() as database:
            database.executemany(
                f"UPDATE jobs SET state = 'pending', updated = {_NOW} WHERE key = ?",
                [(key,) for key in keys],
            )

    def retry(self, keys: Iterable[str] | None = None) -> int:
        """Let jobs that were set aside be tried again: those of some keys, or all. Returns how
        many."""
        wanted = [row.key for row in self.rows("set aside")] if keys is None else list(keys)
        with self._writing() as database:
            return sum(
                database.execute(
                    f"UPDATE jobs SET state = 'pending', updated = {_NOW} WHERE key = ? AND state "
                    "= 'set aside'",
                    (k,),
                ).rowcount
                for k in wanted
            )

    def _update(self, key: str, changes: str, *values: str) -> None:
        with self._writing() as database:
            database.execute(
                f"UPDATE jobs SET {changes}, updated = {_NOW} WHERE key = ?", (*values, key)
            )

    # ---- everything ------------------------------------------------------------------------------

    def rows(self, state: str | None = None, key_prefix: str = "") -> Iterator[Row]:
        """Yield jobs and measurements, ascending by key: those in a state, those whose key begins
        as given."""
        query = (
            "SELECT key, COALESCE(j.state, 'done') AS state, COALESCE(j.job, '{}'), m.value, "
            "COALESCE(m.provenance, '{}'), "
            "COALESCE(m.seconds, 0), m.created, COALESCE(j.attempts, 1), COALESCE(j.error, ''), "
            "COALESCE(j.traceback, ''), "
            "COALESCE(j.worker, ''), j.updated "
            "FROM (SELECT key FROM measurements UNION SELECT key FROM jobs) "
            "LEFT JOIN measurements m USING (key) LEFT JOIN jobs j USING (key) "
            "WHERE (?1 IS NULL OR COALESCE(j.state, 'done') = ?1) AND substr(key, 1, length(?2)) "
            "= ?2 ORDER BY key"
        )
        kept = "running" if state == "interrupted" else state
        for key, found, job, value, provenance, *rest, updated in self._database.execute(
            query, (kept, key_prefix)
        ).fetchall():
            if found == "running" and is_gone(rest[-1], updated):
                found = "interrupted"
            if state not in (None, found):
                continue
            yield Row(
                key,
                found,
                json.loads(job),
                None if value is None else json.loads(value),
                json.loads(provenance),
                *rest,
            )

    def add(self, rows: Iterable[Row]) -> tuple[int, list[str]]:
        """Add rows of another store. What is here stays; a job that was done there is done here
        too.

        Returns:
            How many measurements were added, and the keys of those that are here with another
            value.
        """
        added, different = 0, list[str]()
        with self._writing() as database:
            for row in rows:
                if row.value is not None:
                    known = database.execute(
                        "SELECT value FROM measurements WHERE key = ?", (row.key,)
                    ).fetchone()
                    if known is None:
                        _insert(
                            database, row.key, row.value, row.provenance, row.seconds, row.created
                        )
                        added += 1
                    elif json.loads(known[0]) != row.value:
                        different.append(row.key)
                if row.job:
                    state = row.state if row.state in ("done", "set aside") else "pending"
                    database.execute(
                        "INSERT INTO jobs (key, job, state, attempts, error, traceback, worker) "
                        "VALUES (?, ?, ?, ?, ?, ?, ?) "
                        "ON CONFLICT (key) DO UPDATE SET state = 'done' WHERE excluded.state = "
                        "'done'",
                        (
                            row.key,
                            json.dumps(row.job),
                            state,
                            row.attempts,
                            row.error,
                            row.traceback,
                            row.worker,
                        ),
                    )
        return added, different

    def remove(self, unwanted: Callable[[Row], bool]) -> int:
        """Remove rows, and give their space back to the disk. Returns how many."""
        keys = [(row.key,) for row in self.rows() if unwanted(row)]
        with self._writing() as database:
            database.executemany("DELETE FROM measurements WHERE key = ?", keys)
            database.executemany("DELETE FROM jobs WHERE key = ?", keys)
        self._database.execute("VACUUM")
        return len(keys)

    def close(self) -> None:
        self._database.close()


def _insert(
    database: sqlite3.Connection,
    key: str,
    value: object,
    provenance: Mapping[str, object],
    seconds: float,
    created: str | None = None,
) -> None:
    database.execute(
        "INSERT OR IGNORE INTO measurements (key, value, provenance, seconds, created) VALUES "
        f"(?, ?, ?, ?, COALESCE(?, {_NOW}))",
        (key, json.dumps(value), json.dumps(provenance, sort_keys=True), seconds, created),
    )
