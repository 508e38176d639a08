"""When the search for changes of a plan ends."""

from __future__ import annotations

from types import SimpleNamespace

from capture.report.documents import ExplainReport
from profiling_runs import explain as module


def test_it_ends_by_the_time_of_the_processor(monkeypatch):
    known = SimpleNamespace(
        peak_bytes_per_device=(3,), host_peak_bytes=None, program=None, stages=()
    )
    spent = iter([0.0, 5.0, 11.0])
    for name, planted in {
        "verify": lambda plan, measurements: known,
        "attribute": lambda *given: (),
        "explained": lambda *given: ExplainReport(kind="stages", needs=None),
        "_changes": lambda plan: [("one", None), ("two", None)],
        "_num_missing": lambda *given: 1,
        "processor_seconds": lambda: next(spent),
    }.items():
        monkeypatch.setattr(module, name, planted)
    plan = SimpleNamespace(
        stages=(), microbatch_size=1, schedule_table=SimpleNamespace(splits_backward=False)
    )
    backend = SimpleNamespace(traced=lambda size: SimpleNamespace(graph=None), provenance={})
    measurements = SimpleNamespace(buffers=lambda *given: [], backend=backend)
    found = module.explain(plan, measurements, seconds=10)
    assert ([change.change for change in found.changes], found.untried) == (["one"], ("two",))
