"""The one store of measurements: SQLite, content-addressed, written once per finished measurement.

A key is the hash of everything that can change the result (program, degrees, versions, flags), so nothing is ever edited, a
measurement that is there is never made again, and an interrupted profile resumes where it stopped, also after ``kill -9``.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from capture.errors import ProfileError

STORE_SCHEMA_VERSION = 1

_TABLE = """
CREATE TABLE IF NOT EXISTS measurements (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL,       -- JSON
    provenance TEXT NOT NULL,  -- JSON: backend, target, versions, flags
    seconds REAL NOT NULL,     -- what the measurement took
    created TEXT NOT NULL DEFAULT (strftime('%Y-%m-%dT%H:%M:%SZ', 'now'))
)
"""


class Store:
    """Measurements by key.

    Args:
        path: Of the database; its folder is made. None keeps it in memory.

    Raises:
        ProfileError: ``store-corrupt`` if the file is no SQLite database, ``store-schema`` if another version wrote it, ``store-file`` if
            its folder cannot be made.
    """

    def __init__(self, path: Path | None = None):
        self.path = path
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ProfileError.of(
                    f"the folder of store {str(path)!r} cannot be made: {error}. Name another file with --store.", "store-file"
                ) from error
        try:
            self._database = sqlite3.connect(
                ":memory:" if path is None else path, timeout=60, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode=WAL")
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version not in (0, STORE_SCHEMA_VERSION):
                raise ProfileError.of(
                    f"store {str(path)!r} has schema version {version}; this version of capture reads {STORE_SCHEMA_VERSION}. "
                    "Name another file with --store.",
                    "store-schema",
                )
            if version != STORE_SCHEMA_VERSION:
                self._database.execute(_TABLE)
                self._database.execute(f"PRAGMA user_version={STORE_SCHEMA_VERSION}")
        except sqlite3.DatabaseError as error:
            raise ProfileError.of(
                f"store {str(path)!r} is no database of measurements: {error}. Move it away, or name another file with --store.",
                "store-corrupt",
            ) from error

    def get(self, keys: Iterable[str]) -> dict[str, Any]:
        """The values of those keys that are there."""
        found = {}
        with closing(self._database.cursor()) as cursor:
            for key in keys:
                row = cursor.execute("SELECT value FROM measurements WHERE key = ?", (key,)).fetchone()
                if row is not None:
                    found[key] = json.loads(row[0])
        return found

    def put(self, key: str, value: Any, *, provenance: Mapping[str, Any], seconds: float) -> None:
        """Keep a measurement; committed when this returns. The first one of a key stays."""
        self._database.execute(
            "INSERT OR IGNORE INTO measurements (key, value, provenance, seconds) VALUES (?, ?, ?, ?)",
            (key, json.dumps(value), json.dumps(provenance, sort_keys=True), seconds),
        )

    def __len__(self) -> int:
        (count,) = self._database.execute("SELECT COUNT(*) FROM measurements").fetchone()
        return int(count)

    def close(self) -> None:
        self._database.close()
