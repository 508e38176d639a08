"""A stage of a pipeline: which layers, on which devices, split how."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, Literal, Self, cast, get_args

from capture import documents
from capture.errors import PlanError
from capture.plan.choices import ChoiceRow, StageChoice

#: Activations that a micro-batch keeps for its backward pass, or the state of the optimizer.
Offload = Literal["activations", "optimizer"]


@dataclass(frozen=True)
class Stage:
    """Layers [first, stop) on one submesh, forward and backward.

    Attributes:
        first, stop: Layers, from ``first`` to before ``stop``; files have ``"layers": [first,
            last]``.
        devices: Ids of the submesh in node-major order; device ``devices[r * tensor_parallel + c]``
            is replica r, shard c.
        choice: How the devices share the work.
        offload: Groups that rest in the memory of the host between their uses (offloading).

    Raises:
        PlanError: ``plan-layers`` or ``plan-devices`` if those are no whole numbers,
            ``plan-offload`` if what rests is nothing that can.

    Example:
        >>> Stage(0, 2, [0, 1], StageChoice(data_parallel=2)).to_json()["layers"]
        [0, 1]
    """

    first: int
    stop: int
    devices: tuple[int, ...]
    choice: StageChoice = StageChoice()
    offload: tuple[Offload, ...] = field(default=(), kw_only=True)

    def __post_init__(self):
        object.__setattr__(self, "offload", tuple(dict.fromkeys(self.offload)))
        if unknown := {*self.offload}.difference(get_args(Offload)):
            raise PlanError.of(
                f"a stage has offload={list(self.offload)}, of which {', '.join(sorted(unknown))} "
                f"cannot rest on a host; give some of {', '.join(get_args(Offload))}.",
                "plan-offload",
            )
        # Lists and ranges are welcome; what is kept can be hashed and written as JSON.
        _whole_numbers((self.first, self.stop), "(first, stop)", "plan-layers")
        object.__setattr__(self, "devices", _whole_numbers(self.devices, "devices", "plan-devices"))

    @classmethod
    def at(cls, device: int, first: int, stop: int, choice: StageChoice) -> Self:
        """Return a stage of layers [first, stop) on the choice's devices, from ``device`` on."""
        return cls(first, stop, tuple(range(device, device + choice.num_devices)), choice)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def num_layers(self) -> int:
        return self.stop - self.first

    @property
    def remat_text(self) -> str:
        """The stage's rematerialisation, and what it offloads to the host, for people.

        Example:
            >>> Stage(0, 2, (0,), offload=("activations",)).remat_text
            'none; activations on the host'
        """
        rests = f"; {' and '.join(self.offload)} on the host" if self.offload else ""
        return f"{self.choice.remat}{rests}"

    def to_json(self) -> dict[str, Any]:
        return {
            "layers": [self.first, self.stop - 1],
            "num_devices": self.num_devices,
            "devices": list(self.devices),
            **self.choice.to_json(),
            **({"offload": list(self.offload)} if self.offload else {}),
        }

    @classmethod
    def from_json(cls, data: object) -> Stage:
        """Read the stage that ``to_json`` wrote; ``num_devices`` need not be there.

        Raises:
            FieldError: naming the field that is missing or wrong.
        """
        return documents.read(data, StageRow, strict=True).stage


@dataclass(frozen=True, kw_only=True)
class StageRow(ChoiceRow):
    """A stage as files have it.

    Attributes:
        layers: The first and the last layer.
        offload: Groups that rest in the memory of the host between their uses (offloading).
    """

    layers: tuple[int, int]
    devices: tuple[int, ...]
    num_devices: int = 0
    offload: tuple[str, ...] = ()

    @property
    def stage(self) -> Stage:
        first, last = self.layers
        offload = cast(tuple[Offload, ...], self.offload)  # a stage looks at it
        return Stage(first, last + 1, self.devices, self.choice, offload=offload)


def _whole_numbers(given: Any, name: str, code: str) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, given))
    except TypeError:
        raise PlanError.of(
            f"a stage has {name}={given!r}; give a sequence of whole numbers.", code
        ) from None
