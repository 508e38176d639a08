"""What ``capture run --json`` says of a training, alike for every kind of plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from capture.documents import fields_of

Peaks = Sequence[int] | None


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """A training under the meters; None is what its kind of plan does not say, or nobody asked for.

    Attributes:
        kind: Kind of the plan.
        target, platform: Kind of device of the plan, and of JAX's devices here.
        is_target: Whether measured bytes may be compared with predicted ones: what one compiler
            reports says little about another's.
        num_devices: Devices of all processes.
        predicted_peak_bytes_per_device: Peaks that the plan predicts.
        replayed_peak_bytes_per_device: Peaks of the ledger of the step.
        replayed_parts_bytes: What the first device's consists of, by category.
        measured_peak_bytes_per_device: Peaks of the steps that were measured.
        offered_peak_bytes_per_device: What waits until another host pulls it.
        waiting_peak_bytes_per_device: What ``--check`` saw of that.
        meter: How bytes were measured.
        ledger_checks: Instructions before which the ledger was compared with live arrays.
        host: ``predicted_``, ``replayed_`` and ``measured_peak_bytes`` of the host's memory.
        moved_bytes: Copied ``to_host`` and ``to_device`` in an update, if a host holds anything.
        allocator: What an ordinary step added to malloc's bytes (``step_bytes``), and the most that
            it may (``bound_bytes``), with its parts (``booked_``, ``scratch_``, ``unreturned_``,
            ``fed_`` and ``object_bytes``), what is ``unbounded``, and the ``source``.
        resident_set_peak_bytes, resident_set_before_bytes: Of this process.
        losses: Of each step; of several models, a list of theirs.
        step_seconds: Of each step.
        dispatch_seconds: Median of the steps without a meter: one core's for its instructions.
        reference_losses: The same losses on one device, and of each model alone (``--check``).
        max_relative_loss_error: The largest error of a loss beside that.
        max_relative_gradient_error, worst_gradient: The same of gradients of the first step, and
            the leaf.
        gradient_rounding_error: Errors of gradients up to this one are taken to be of roundings.
        max_relative_param_error, worst_param: The same of trained parameters: ``model``, ``leaf``,
            and what one rounding of its gradients makes of it (``rounding_error``).
        max_param_error_in_roundings: The largest error of a leaf, over that of a rounding.
        num_steps: Updates since the beginning of the training.
        saved: The folder in which the state is.
        hosts: What each process says of itself.
        restarts: What broke, and when it went on.
        written: Files by what is in them.
        warnings: What of the loss is not as on one device.
        versions: Of JAX and of this library.
        trace: Events of the last step, which are written to a file.
    """

    kind: str
    target: str
    platform: str
    is_target: bool
    num_devices: int
    predicted_peak_bytes_per_device: Peaks
    replayed_peak_bytes_per_device: Peaks
    replayed_parts_bytes: Mapping[str, int] | None = None
    measured_peak_bytes_per_device: Peaks
    offered_peak_bytes_per_device: Peaks = None
    waiting_peak_bytes_per_device: Peaks = None
    meter: str | None
    ledger_checks: int
    host: Mapping[str, int | None] | None = None
    moved_bytes: Mapping[str, int] | None = None
    allocator: Mapping[str, Any] | None = None
    resident_set_peak_bytes: int | None = None
    resident_set_before_bytes: int | None = None
    losses: Sequence[Any]
    step_seconds: Sequence[float] | None = None
    dispatch_seconds: float | None = None
    reference_losses: Sequence[Any] | None = None
    max_relative_loss_error: float | None = None
    max_relative_gradient_error: float | None = None
    worst_gradient: str | None = None
    gradient_rounding_error: float | None = None
    max_relative_param_error: float | None = None
    worst_param: Mapping[str, Any] | None = None
    max_param_error_in_roundings: float | None = None
    num_steps: int | None = None
    saved: str | None = None
    hosts: Sequence[Mapping[str, Any]] | None = None
    restarts: Sequence[Mapping[str, Any]] | None = None
    written: Mapping[str, str] | None = None
    warnings: Sequence[str] = ()
    versions: Mapping[str, Any] = field(default_factory=dict)
    trace: Any = None

    def document(self) -> dict[str, Any]:
        """Return what is printed as JSON."""
        return fields_of(self)
