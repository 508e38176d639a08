"""Look after the store of measurements: list it, show one, copy, merge and clean it.

ls                         counts by state and kind of job; --state lists those jobs
show KEY                   one measurement or job, also by the beginning of its key
retry [KEY ...]            let jobs that were set aside be tried again (all, if none is named)
export FILE, import FILE   one JSON document per line, with all that is known of a measurement
merge FILE                 take what another store has; what is here stays
gc                         forget jobs that were not done, and with options also measurements
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from capture import environment
from capture.cli.output import emit, table
from capture.documents import FieldError, read
from capture.errors import ProfileError
from capture.measured.store import STATES, Row, Store
from capture.options import at_least
from capture.quantities import counted

#: Of the rows of an exported file.
_STORE_BEGINS = "SQLite format 3"


@dataclass(frozen=True)
class Jobs:
    """The number of measurements and jobs of a state, a kind and a target."""

    state: str
    kind: str
    target: str
    count: int


@dataclass(frozen=True, kw_only=True)
class StoreReport:
    """The document of ``capture store``: what an action found or did. A field of another action is
    None.

    Attributes:
        num_measurements: Number of measurements in the store (``ls``).
        jobs: Number of jobs by state, kind and target (``ls``).
        keys: Jobs of the state that was asked for, by key (``ls --state``).
        row: All that is known of one measurement or job (``show``).
        num_retried: Jobs that wait again (``retry``).
        num_exported: Rows that were written (``export``).
        num_added: Measurements that are new here (``import``, ``merge``).
        different: Keys that are here with another value, which stays (``import``, ``merge``).
        num_removed, dry_run: Rows that were removed, or would be (``gc``).
        written: Files that were written, by what they are.
    """

    num_measurements: int | None = None
    jobs: Sequence[Jobs] | None = None
    keys: Mapping[str, Mapping[str, Any]] | None = None
    row: Row | None = None
    num_retried: int | None = None
    num_exported: int | None = None
    num_added: int | None = None
    different: Sequence[str] | None = None
    num_removed: int | None = None
    dry_run: bool | None = None
    written: Mapping[str, str] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store", type=Path, metavar="FILE", help="default: ~/.cache/capture/store.sqlite"
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def add(
        name: str, action: Callable[[argparse.Namespace, Store], None], text: str
    ) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=text, description=text)
        for option in ("--json", "--quiet"):  # as before the action
            sub.add_argument(
                option, action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )
        sub.set_defaults(action=action)
        return sub

    add("ls", _ls, "count jobs, or list those in a state").add_argument(
        "--state", choices=STATES, help="list the jobs in this state"
    )
    add("show", _show, "show one measurement or job").add_argument(
        "key", metavar="KEY", help="or its beginning"
    )
    add("retry", _retry, "let jobs that were set aside be tried again").add_argument(
        "keys", nargs="*", metavar="KEY", help="default: all"
    )
    for name, action, text in (
        ("export", _export, "write everything, one JSON document per line"),
        ("import", _import, "read what export wrote"),
        ("merge", _merge, "take what another store has"),
    ):
        add(name, action, text).add_argument("file", type=Path, metavar="FILE")
    gc = add("gc", _gc, "forget jobs that were not done, and with options also measurements")
    gc.add_argument(
        "--older-than",
        type=at_least(0),
        metavar="DAYS",
        help="also measurements that were made before",
    )
    gc.add_argument(
        "--other-versions",
        action="store_true",
        help="also measurements of other versions of JAX or capture's programs",
    )
    gc.add_argument("--dry-run", action="store_true", help="only say how much that would be")


def main(options: argparse.Namespace) -> int:
    path = options.store or environment.default_store_path()
    if options.action in (_import, _merge):
        if not options.file.exists():  # before the store is made
            raise ProfileError.of(
                f"{str(options.file)!r} does not exist; name what to read.", "store-file"
            )
    elif not path.exists():
        raise ProfileError.of(
            f"store {str(path)!r} does not exist; name one with --store, or make it with capture "
            "profile.",
            "store-file",
        )
    options.action(options, Store(path))
    return 0


def _ls(options: argparse.Namespace, store: Store) -> None:
    rows = list(store.rows(options.state))
    counts = Counter(
        (
            row.state,
            # Versions before this one did not say what a measurement of no job is.
            row.job.get("kind", row.provenance.get("kind", "measurement")),
            row.provenance.get("target", row.job.get("backend", "")),
        )
        for row in rows
    )
    jobs = tuple(Jobs(*about, count) for about, count in sorted(counts.items()))
    text = table(
        ["kind", "state", "target", "jobs"], [[j.kind, j.state, j.target, j.count] for j in jobs]
    )
    if options.state:
        text = table(
            ["key", "kind", "attempts", "workload", "error"],
            [
                [r.key, r.job.get("kind", ""), r.attempts, r.job.get("workload"), cause[:60]]
                for r in rows
                for cause, *_ in [r.error.partition("\n")]
            ],
        )
    keys = {row.key: {**row.job, "attempts": row.attempts, "error": row.error} for row in rows}
    listed = keys if options.state else None
    report = StoreReport(num_measurements=len(store), jobs=jobs, keys=listed)
    emit(options, report, text if rows else "nothing")


def _show(options: argparse.Namespace, store: Store) -> None:
    rows = list(store.rows(key_prefix=options.key))
    if len(rows) != 1:
        raise ProfileError.of(
            f"{len(rows)} keys of store {str(store.path)!r} begin with {options.key!r}; name one.",
            "store-key",
        )
    (row,) = rows
    text = json.dumps({**asdict(row), "traceback": bool(row.traceback)}, indent=2)
    text += f"\n{row.traceback}" if row.traceback else ""
    emit(options, StoreReport(row=row), text)


def _retry(options: argparse.Namespace, store: Store) -> None:
    keys = []
    for prefix in options.keys:
        found = [row.key for row in store.rows("set aside", prefix)]
        if not found:
            raise ProfileError.of(
                f"no job that was set aside in store {str(store.path)!r} has a key that begins "
                f"with {prefix!r}.",
                "store-key",
            )
        keys += found
    count = store.retry(keys or None)
    emit(
        options, StoreReport(num_retried=count), f"{counted(count, 'job waits', 'jobs wait')} again"
    )


def _export(options: argparse.Namespace, store: Store) -> None:
    with options.file.open("w") as file:
        count = sum(bool(file.write(json.dumps(asdict(row)) + "\n")) for row in store.rows())
    report = StoreReport(num_exported=count, written={"rows": str(options.file)})
    emit(options, report, f"{counted(count, 'row')} written")


def _import(options: argparse.Namespace, store: Store) -> None:
    _say_added(options, *store.add(_read(options.file)))


def _read(path: Path) -> Iterator[Row]:
    with path.open(errors="replace") as file:
        if file.read(len(_STORE_BEGINS)) == _STORE_BEGINS:
            raise ProfileError.of(
                f"{str(path)!r} is a store; take what it has with capture store merge.",
                "store-import",
            )
        file.seek(0)
        for number, line in enumerate(file, start=1):
            try:
                yield _row(json.loads(line))
            except ValueError as error:
                raise ProfileError.of(
                    f"{str(path)!r}, line {number}, is not what capture store export writes: "
                    f"{error}. Nothing was imported.",
                    "store-import",
                ) from None


def _row(data: object) -> Row:
    """Return a row of the store, if every field of it is of its type."""
    row = read(data, Row, strict=True)
    if row.state not in STATES:
        raise FieldError(f"state is {row.state!r} and must be one of {', '.join(STATES)}")
    return row


def _merge(options: argparse.Namespace, store: Store) -> None:
    _say_added(options, *store.add(Store(options.file).rows()))


def _say_added(options: argparse.Namespace, added: int, different: list[str]) -> None:
    text = f"{counted(added, 'measurement')} added"
    if different:
        text += (
            f"; {len(different)} are here with another value, which stays: "
            f"{', '.join(different[:5])}"
        )
    emit(options, StoreReport(num_added=added, different=different), text)


def _gc(options: argparse.Namespace, store: Store) -> None:
    limit = None
    if options.older_than is not None:
        begin = datetime.now(UTC) - timedelta(days=options.older_than)
        limit = begin.strftime("%Y-%m-%dT%H:%M:%SZ")

    def unwanted(row: Row) -> bool:
        if row.created is None:
            return True
        if options.other_versions:
            given = row.provenance.get("versions", {})
            here = environment.versions("cuda") | environment.versions("tpu")
            if any(here.get(name) != version for name, version in given.items()):
                return True
        return limit is not None and row.created < limit

    count = sum(map(unwanted, store.rows())) if options.dry_run else store.remove(unwanted)
    report = StoreReport(num_removed=count, dry_run=options.dry_run)
    emit(options, report, f"{count} rows {'would be ' if options.dry_run else ''}removed")
