"""The kinds of plan, one record each: how its files are called, its class, what it can do, and what
verbs do with it.

A new kind of plan is a row of ``KINDS``; of another package, an entry point of the group
``capture.kinds`` that names such a record and is called as the ``kind`` of its files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capture.errors import CaptureError, PlanError
from capture.plan.array import ArrayPlan
from capture.plan.files import PlanFile
from capture.plan.packs import PacksPlan
from capture.plan.sharding import ShardingPlan
from capture.plan.stages import PLAN, Plan
from capture.registered import Registered, installed

#: What a kind of plan can do, with the code that does it alike for every kind.
COLUMNS: Mapping[str, str] = {
    "step list": "capture/step/program.py",
    "replay": "capture/step/ledger.py",
    "simulator": "capture/step/timeline.py",
    "ledger check": "capture run --check",
    "meters": "capture run",
    "several hosts": "capture run --hosts, --ray",
    "checkpoints": "capture run --save, --restore",
    "trace": "capture run --trace",
    "report page": "capture report -o FILE",
    "verify": "capture verify",
    "explain": "capture explain",
    "diff": "capture diff",
    "evaluate": "capture evaluate",
    "store, workers": "--store, --workers",
}


@dataclass(frozen=True)
class Kind:
    """A kind of plan.

    Attributes:
        name: Name of the kind in its files.
        system: Name of the system in ``capture plan --system``.
        plan: Class of its plans.
        asks: What ``capture plan`` asks for one: a ``capture.cli.options.Asks``.
        verbs: By name, what a verb of the command line does with plans of this kind; loaded when it
            is asked for.
        python: What runs it in Python.
        train: Function that compiles the training step of a workload and a plan; loaded when it is
            called.
        lacks: By name of ``COLUMNS``, why it cannot do that, in at most five words.
    """

    name: str
    system: str
    plan: type[PlanFile]
    asks: Registered
    verbs: Mapping[str, Registered]
    python: str
    train: Registered
    lacks: Mapping[str, str] = field(default_factory=dict)

    def verb(self, name: str) -> Registered:
        """Return what a verb of the command line does with plans of this kind.

        Raises:
            PlanError: ``plan-kind`` if it does not take them.
        """
        self.check(name, f"capture {name}")
        if name not in self.verbs:
            raise self.refused()
        return self.verbs[name]

    def check(self, column: str, given: str) -> None:
        """Refuse what plans of this kind cannot do.

        Args:
            column: A name of ``COLUMNS``.
            given: What asks for it, as the user typed it.

        Raises:
            PlanError: ``plan-kind``.
        """
        if column in self.lacks:
            raise PlanError.of(
                f"{given} is not for plans of kind {self.name!r}: {self.lacks[column]}. Leave it "
                "out.",
                "plan-kind",
            )

    def refused(self) -> CaptureError:
        """Return the error of what takes plans of other kinds alone."""
        *most, last = ("run", *self.verbs)
        return PlanError.of(
            f"the plan is of kind {self.name!r}, which this does not take. capture "
            f"{', '.join(most)} and {last} take it, and in Python {self.python}.",
            "plan-kind",
        )


def _verbs(path: str) -> dict[str, Registered]:
    """Return what verbs do, by name; ``path`` says where that is, with ``{}`` for the verb."""
    names = ("verify", "explain", "report", "diff")
    return {name: Registered(f"capture.cli.{path.format(name)}") for name in names}


_OWN: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "stages",
            "capture",
            Plan,
            Registered("capture.cli.stages:ASKS"),
            _verbs("{}:stages"),
            "capture.pipeshard",
            Registered("capture.runtime.pipeline:pipeshard"),
        ),
        Kind(
            "sharding",
            "osdp",
            ShardingPlan,
            Registered("capture.cli.osdp:ASKS"),
            _verbs("osdp:{}"),
            "capture.shard",
            Registered("capture.runtime.sharded.step:sharded_step"),
            {
                "several hosts": "one program in one process",
                "evaluate": "benchmarks compare its estimates",
                "store, workers": "one program, compiled in place",
            },
        ),
        Kind(
            "packs",
            "harmony",
            PacksPlan,
            Registered("capture.cli.packs:ASKS"),
            _verbs("packs:{}"),
            "capture.streamed",
            Registered("capture.runtime.streamed:streamed"),
            {
                "several hosts": "packs stream from one host",
                "evaluate": "packs are compiled before answering",
            },
        ),
        Kind(
            "array",
            "mutwo",
            ArrayPlan,
            Registered("capture.cli.array:ASKS"),
            _verbs("array:{}"),
            "capture.train_array",
            Registered("capture.runtime.multiplexed:train_array"),
            {
                "several hosts": "an array is one device",
                "evaluate": "predictions are of compiled programs",
            },
        ),
    )
}


class _Kinds(Mapping[str, Kind]):
    """The kinds of plan by name: those of this library first, then those of installed packages,
    which are looked for when a name is none of these."""

    def __getitem__(self, name: str) -> Kind:
        kind: Kind = _OWN[name] if name in _OWN else installed("kinds")[name].load()
        return kind

    def __iter__(self) -> Iterator[str]:
        return iter({**_OWN, **installed("kinds")})

    def __len__(self) -> int:
        return len({**_OWN, **installed("kinds")})


KINDS = _Kinds()


def load_plan(path: Path | str) -> PlanFile:
    """Load a plan of whichever kind, as ``save`` wrote it.

    Args:
        path: Of a file; ``plan.json:knee`` is a plan of its front (``Plan.of_front``).

    Raises:
        PlanError: ``plan-file`` if it cannot be read, ``plan-corrupt`` if it is no JSON,
            ``plan-kind`` for an unknown kind, and those of ``from_json`` of the kind and of
            ``of_front``.
    """
    file, colon, name = str(path).rpartition(":")
    if colon and not Path(path).exists() and Path(file).exists():
        return of_stages(load_plan(file)).of_front(name)
    return PLAN.load(path, _read).resolved(path)


def _read(data: object) -> PlanFile:
    kind: Any = "stages"  # whose reader refuses what is no object
    if isinstance(data, Mapping):  # files of schema 1 do not say their kind, but fields tell
        kind = data.get("kind", "sharding" if "operators" in data else "stages")
    if kind not in KINDS:
        raise PlanError.of(
            f"the plan has kind={kind!r}; this version of capture reads {' and '.join(KINDS)}. "
            "Make the plan again with this version.",
            "plan-kind",
        )
    return KINDS[kind].plan.from_json(data)


def kind_of(plan: PlanFile) -> Kind:
    """Return the kind of a plan."""
    return KINDS[plan.FORMAT.kind]


def of_stages(plan: Any) -> Plan:
    """Return the plan, if it is one of stages; refuse others, for which nothing else has a meaning.

    Raises:
        PlanError: ``plan-kind``.
    """
    if plan.FORMAT is not PLAN:
        raise KINDS[plan.FORMAT.kind].refused()
    return plan  # type: ignore[no-any-return]
