"""What a training is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from capture.errors import PlanError
from capture.options import Asked


@dataclass(frozen=True)
class Training:
    """The options with which a plan is executed.

    Attributes:
        num_steps: Updates.
        seed: What parameters and data are drawn with.
        check: Compare loss and gradients with one device, and the ledger with live arrays.
        save: Folder in which the state is saved with Orbax at the end.
        save_every: Save it after every so many steps, too; of several processes the next steps do
            not wait for the disk.
        restore: Folder of a saved state to continue from, also of another plan of the model.
        until: The step after which it ends, of the whole training; None: after ``num_steps`` more.
        log_every: Report a line for each of so many steps.
        metrics: Append the record of every step to this file, a line of JSON each.
        trace: Note what the devices do when in the last step, instead of malloc's bytes.
        fast_compile: See ``Compiler``.
        transport: With --hosts or --ray: how arrays get from host to host; device_put: by JAX, NCCL
            on GPUs, unprotected from strangers (default: sockets on CPU, else device_put).

    Raises:
        PlanError: ``run-check-restored`` for both of ``check`` and ``restore``,
            ``run-save-every`` for ``save_every`` without ``save``, ``run-trace`` for ``trace`` of
            the first step.
    """

    num_steps: Annotated[int, Asked("steps", "N", least=1)] = 3
    seed: Annotated[int, Asked()] = 0
    check: Annotated[bool, Asked()] = False
    save: Annotated[Path | None, Asked(metavar="DIR")] = None
    restore: Annotated[Path | None, Asked(metavar="DIR")] = None
    save_every: Annotated[int | None, Asked(metavar="K", least=1)] = None
    log_every: Annotated[int, Asked(metavar="K", least=1)] = 1
    metrics: Annotated[Path | None, Asked(metavar="FILE")] = None
    until: int | None = None
    trace: bool = False
    fast_compile: bool = False
    transport: Annotated[str | None, Asked(choices=("sockets", "device_put"))] = None

    def __post_init__(self) -> None:
        if self.check and self.restore is not None:
            raise PlanError.of(
                "--check compares a training from its beginning with one device, and --restore "
                "continues one; give one of them.",
                "run-check-restored",
            )
        if self.save_every is not None and self.save is None:
            raise PlanError.of(
                f"--save-every {self.save_every} has no directory to save in; add --save DIR.",
                "run-save-every",
            )
        if self.trace and self.num_steps < 2:
            raise PlanError.of(
                "--trace draws an ordinary step, and the first is under the meters; run at least "
                "--steps 2.",
                "run-trace",
            )
