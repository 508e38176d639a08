"""What every kind of plan can do: of each column of the table in ``ARCHITECTURE.md`` a check of one
kind's cell, which its record (``capture.plan.kinds``) says to be there or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from commands import run_here, run_json
from processes import user_model

from capture.machine.target import TARGETS_FOLDER
from capture.measured.store import Store
from capture.plan.kinds import COLUMNS, Kind, load_plan
from capture.step.ledger import Ledger
from capture.step.program import Run, replay
from capture.step.timeline import Seconds, simulate_step

if TYPE_CHECKING:  # a process that imports a kind of plan sets its flags before it loads JAX
    from capture.runtime.train_step import Metered

#: What ``capture plan`` is asked of every kind, as far as it reads it.
ASKED = {
    "cluster": "2x1",
    "target": "slow.json",
    "global_batch": "4",
    "memory": "100kB",
    "host_memory": "1MB",
    "models": "2",
    "compiles": "3",
}
WORKLOAD = "tiny.py:model?layers=4"
STORE = {"store": "store.sqlite", "workers": "0"}


def written(folder: Path) -> None:
    """Write a model, and a target of this machine's platform that has rates: an H200's, slowed."""
    (folder / "tiny.py").write_text(user_model("tiny"))
    document = json.loads((TARGETS_FOLDER / "h200.json").read_text())
    document |= {"name": "slow", "platform": "cpu", "compiler": {}}
    for rate in document["compute"]["flops_per_second"].values():
        rate["value"] *= 1e-5
    (folder / "slow.json").write_text(json.dumps(document))


def installed(folder: Path, patch: pytest.MonkeyPatch, group: str, entry: str) -> None:
    """Install a package that adds an entry, and work in a folder with a model and a target."""
    info = folder / "installed" / "added-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: added\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[capture.{group}]\n{entry}\n")
    patch.syspath_prepend(info.parent)
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.chdir(folder)
    written(folder)


@dataclass
class Case:
    """A kind of plan with a plan of its own, in the working directory.

    Attributes:
        kind: Its record.
        capsys: Of the test that asks.
    """

    kind: Kind
    capsys: Any

    def __call__(self, verb: str, *arguments: str) -> Any:
        """The document of a verb, which ends well."""
        code, document, said = run_json(self.capsys, verb, *arguments, "--quiet")
        assert code == 0, said
        return document

    @cached_property
    def reads(self) -> set[str]:
        """The options of ``capture plan`` that it reads."""
        return {option.name for option in self.kind.asks.load().options}

    def given(self, options: Mapping[str, str]) -> list[str]:
        pairs = ((f"--{n.replace('_', '-')}", v) for n, v in options.items() if n in self.reads)
        return [word for pair in pairs for word in pair]

    @property
    def file(self) -> str:
        return f"{self.kind.name}.json"

    @property
    def path(self) -> str:
        """The file of its plan, which is searched where it is not there yet."""
        path = self.file
        if not Path(path).exists():
            asked = (
                ASKED | STORE | ({"cluster": "1x2"} if "several hosts" in self.kind.lacks else {})
            )
            named = [WORKLOAD, "--system", self.kind.system, "-o", path]
            self("plan", *named, *self.given(asked))
        return path

    def run(self, *arguments: str, steps: int = 2) -> Any:
        return self("run", self.path, "--steps", str(steps), *arguments)

    @property
    def checked(self) -> Any:
        """The document of two steps under the meters."""
        path = Path(f"{self.kind.name}.run")
        if not path.exists():
            path.write_text(json.dumps(self.run("--check")))
        return json.loads(path.read_text())

    @property
    def lists(self) -> Sequence[Metered]:
        plan = load_plan(self.path)
        assert plan.workload is not None
        return self.kind.train(plan.workload.load(), plan).executions(2)

    @property
    def ledgers(self) -> list[Ledger]:
        return [replay(each.program) for each in self.lists]

    def refused(self, column: str, *arguments: str) -> None:
        """The command is refused, and says what the record does."""
        code, _, said = run_here(self.capsys, *arguments)
        assert code == 2 and self.kind.lacks[column] in said and "[plan-kind]" in said


def step_list(case: Case) -> None:
    for each in case.lists:
        runs = each.program.all_of(Run)
        assert runs and all(each.executable(run) for run in runs)


def replayed(case: Case) -> None:
    peaks = zip(*(ledger.peak_bytes_per_device for ledger in case.ledgers), strict=True)
    assert [*map(max, peaks)] == case.checked["replayed_peak_bytes_per_device"]


def simulated(case: Case) -> None:
    for each in case.lists:
        step = each.program
        timeline = simulate_step(step, Seconds(dict.fromkeys(step.programs, 1), lambda *copy: 1))
        at = [sum(d in step.programs[run.program].place.devices for run in step.runs) for d in (0,)]
        assert timeline.step_seconds >= max(at) > 0


def ledger_checked(case: Case) -> None:
    least = sum(len(each.program.runs) for each in {id(e.program): e for e in case.lists}.values())
    assert case.checked["ledger_checks"] >= least
    errors = ("loss", "gradient", "param")
    found = [error for name in errors if (error := case.checked[f"max_relative_{name}_error"])]
    assert case.checked["reference_losses"] and all(error < 1e-4 for error in found)


def metered(case: Case) -> None:
    found = case.checked
    assert found["measured_peak_bytes_per_device"] == found["replayed_peak_bytes_per_device"]
    assert found["allocator"]["step_bytes"] <= found["allocator"]["bound_bytes"]


def over_hosts(case: Case) -> None:
    """With a save, a restart from it, and the bits of one process."""
    if "several hosts" in case.kind.lacks:
        return case.refused("several hosts", "run", case.path, "--hosts", "local")
    folder = f"{case.kind.name}.hosts"
    begun = case.run("--hosts", "local", "--save", folder, steps=1)
    ended = case.run("--hosts", "local", "--restore", folder, steps=1)
    assert len(begun["hosts"]) == 2 and begun["losses"] + ended["losses"] == case.checked["losses"]
    return None


def goes_on(case: Case) -> None:
    folder = f"{case.kind.name}.saved"
    losses = case.run("--save", folder, steps=1)["losses"]
    losses += case.run("--restore", folder, steps=1)["losses"]
    assert losses == case.checked["losses"]


def traced(case: Case) -> None:
    path = f"{case.kind.name}.trace.json"
    case.run("--trace", path, steps=3)
    events = json.loads(Path(path).read_text())["traceEvents"]
    assert sum(event["ph"] == "X" and event["dur"] > 0 for event in events) > 1


def page(case: Case) -> None:
    path, room = f"{case.kind.name}.html", load_plan(case.path).headroom()
    found = case("report", case.path, "-o", path)
    text = Path(path).read_text()
    assert found["written"] == {"page": path} and "</table>" in text and WORKLOAD in text
    # Without a file it is a text: the title, a table, and what is left of the memory.
    code, said, _ = run_here(case.capsys, "report", case.path)
    assert code == 0 and said.splitlines()[0] == found["title"]
    assert len(said.splitlines()) > 3 and str(room) in said


def verified(case: Case) -> None:
    found = case("verify", case.path, *case.given(STORE), "-o", f"{case.kind.name}.verified")
    devices = len(found["peak_bytes_per_device"])
    replayed = case.checked["replayed_peak_bytes_per_device"][:devices]
    assert found["peak_bytes_per_device"] == replayed
    assert found["kind"] == case.kind.name and found["headroom"]["verdict"] == "fits"
    again = load_plan(f"{case.kind.name}.verified")
    assert again == load_plan(case.path) and again.known_peak_bytes == max(replayed)


def explained(case: Case) -> None:
    beside = [*case.given(STORE), "--seconds", "0"] if case.kind.name == "stages" else []
    found = case("explain", case.path, *beside)
    assert found["kind"] == case.kind.name and found["needs"]["peak_bytes"] > 0
    if case.kind.name == "array":  # whose report draws no step
        found = case("explain", case.path, "-o", "step.html", *case.given(STORE))
        assert found["written"] == {"page": "step.html"}
        assert 'id="step"' in Path("step.html").read_text()


def compared(case: Case) -> None:
    found = case("diff", case.path, case.path)
    assert found["kind"] == case.kind.name and found["same_decision"]
    one, other = found["plans"]
    assert one == other and one["peak_bytes"] == load_plan(case.path).known_peak_bytes


def evaluated(case: Case) -> None:
    """Where estimates decide, plans that are drawn say how good they are."""
    if "evaluate" not in case.kind.lacks:
        asked = ("--cluster", "1x2", "--global-batch", "4", "--microbatches", "2", "--plans", "2")
        found = case("evaluate", WORKLOAD, *asked, "--default-only", *case.given(STORE))
        assert (
            found["num_plans"] == 2 and found["default"]["all_devices"]["num_above_interval"] == 0
        )


def kept(case: Case) -> None:
    """What workers measured is in the store, or neither is asked for."""
    assert ("store, workers" in case.kind.lacks) is not ({"store", "workers", "ray"} <= case.reads)
    if "store, workers" not in case.kind.lacks:
        assert Path(case.path).exists() and len(Store(Path("store.sqlite")))


#: By column, the check of a cell.
CELLS: Mapping[str, Callable[[Case], None]] = dict(
    zip(
        COLUMNS,
        (
            *(step_list, replayed, simulated, ledger_checked, metered, over_hosts, goes_on, traced),
            *(page, verified, explained, compared, evaluated, kept),
        ),
        strict=True,
    )
)
