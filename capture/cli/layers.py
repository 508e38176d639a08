"""Layer profiles (``--system harmony``): what is asked by options, and how what was found is
said."""

from __future__ import annotations

from pathlib import Path

from capture.cli import asked
from capture.cli.asked import Values
from capture.machine.target import resolved_target
from capture.options import Option, options_of, taken
from capture.quantities import counted, format_bytes
from profiling_runs.layer_question import LayersQuestion
from profiling_runs.layers import PASSES
from profiling_runs.profile_report import LayersReport

SYSTEM = "harmony"
SYSTEM_OPTION = Option(
    "system",
    "capture: stages on submeshes; harmony: packs of layers, streamed from the host's memory "
    "(default: %(default)s)",
    "capture",
    choices=("capture", SYSTEM),
)
#: Those of a layer profile.
OPTIONS = options_of(LayersQuestion)


def layers_question(values: Values) -> LayersQuestion:
    """Return the question of a layer profile from options.

    Raises:
        ProfileError: ``layers-question`` for a batch below 1, and the codes of
            ``LayersQuestion``.
    """
    return LayersQuestion(
        asked.spec_of(values),
        resolved_target(values["target"], Path()),
        **taken(LayersQuestion, values),
    )


def as_text(report: LayersReport) -> list[str]:
    """Return the report of a layer profile in lines for people."""
    lines = [
        f"{counted(report.num_layers, 'layer')}, {format_bytes(report.weight_bytes)} of weights "
        f"and {format_bytes(report.state_bytes)} of optimizer state; {report.source}"
    ]
    profiled = {"forward": report.forward_sizes, "backward": report.backward_sizes}
    for which in PASSES:
        trials, largest = report.trials[which], report.largest[which]
        sizes = ", ".join(map(str, profiled[which]))
        if not largest:
            lines.append(f"{which}: one example is too much for a device; profiled all the same")
            continue
        lines.append(
            f"{which}: {counted(largest, 'example')} at most, found in "
            f"{counted(len(trials), 'trial')} ({', '.join(map(str, trials))}); profiled at {sizes}"
        )
        if found := report.held_out_errors.get(which):
            said = "; ".join(
                f"{quantity} {error['mean']:.1%} (at most {error['largest']:.1%})"
                for quantity, error in found.items()
            )
            lines.append(f"  every other size from those beside it is off by: {said}")
    for dtype, nbytes in report.casts.items():
        lines.append(
            f"read only as {dtype}: parameters of {format_bytes(nbytes)} as that (--stream {dtype})"
        )
    if report.coupled:
        lines.append(f"both directions need micro-batches of one size: {report.coupled}")
    return lines
