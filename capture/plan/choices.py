"""The ways in which a stage may use its devices, and the sets of them that searches and profiles go
through."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from capture.documents import but_empty
from capture.errors import Violation
from capture.registered import installed

Remat = str
"""A name of ``REMAT_POLICIES``; a mixture such as ``"full:3"``: the first three layers of the stage
as with ``"full"``, the others as with ``"cheap"``; or the name of a policy of an installed package:
an entry point of the group ``capture.remats`` that names a policy of ``jax.checkpoint``, which the
store knows by its code."""
#: From what keeps most to what keeps least; a search goes through these.
REMAT_POLICIES: tuple[Remat, ...] = ("none", "cheap", "dots", "full")

#: Ways in which parameters are split by tensor parallelism, and each part over replicas.
ParamSplit = tuple[int, int]


def num_full_layers(remat: Remat) -> int:
    """Return how many layers of a mixture are as with ``"full"``; 0 for anything else.

    They are the first ones: a backward pass runs them again when the others are done with.

    Example:
        >>> num_full_layers("full:3"), num_full_layers("full")
        (3, 0)
    """
    found = re.fullmatch(r"full:([1-9][0-9]*)", remat)
    return 0 if found is None else int(found[1])


def remat_of_layers(remat: Remat, num_layers: int) -> Remat:
    """Return what a stage of so many layers recomputes: a mixture of no more layers is ``"full"``.

    Example:
        >>> remat_of_layers("full:3", 4), remat_of_layers("full:3", 3), remat_of_layers("dots", 1)
        ('full:3', 'full', 'dots')
    """
    return "full" if num_full_layers(remat) >= num_layers else remat


def is_remat(remat: Remat) -> bool:
    """Return whether ``remat`` is a name, or a mixture of 1 or more layers."""
    return is_cut(remat) or is_of_each_layer(remat)


def is_of_each_layer(remat: Remat) -> bool:
    """Return whether every layer keeps by itself what ``remat`` says, as packs and models of an
    array can; not what a cut through a whole stage chooses."""
    return (remat in REMAT_POLICIES and not is_cut(remat)) or remat in installed("remats")


def layer_remat_violations(remat: Remat | None, code: str) -> Iterator[Violation]:
    """Yield a violation for what no policy of single layers is; None is no recomputation."""
    if remat is not None and not is_of_each_layer(remat):
        known = [name for name in REMAT_POLICIES if not is_cut(name)]
        yield Violation(
            f"remat={remat!r} is no policy of single layers; choose one of "
            f"{', '.join([*known, *installed('remats')])}.",
            code,
        )


def is_cut(remat: Remat) -> bool:
    """Return whether what is kept is a minimum cut, and not what ``jax.checkpoint`` leaves."""
    return remat == "cheap" or num_full_layers(remat) > 0


REMAT_TEXT = f"{', '.join(REMAT_POLICIES)}, or full:K for K layers"


@dataclass(frozen=True, order=True)
class StageChoice:
    """The way in which the devices of one stage share its work.

    Attributes:
        data_parallel: Replicas of the stage.
        tensor_parallel: Devices over which each replica's tensors are split.
        remat: What the backward pass recomputes: ``"none"`` keeps all activations, ``"cheap"``
            the fewest bytes from which the others follow without another product, ``"dots"`` keeps
            the results of matrix products with parameters, ``"full"`` keeps the inputs of the
            layers, ``"full:3"`` does so for the first three layers of the stage and for the others
            as ``"cheap"``, ``"2%"`` the fewest bytes for so much more time, products among what is
            recomputed.
        shard_optimizer: Whether the replicas split the optimizer state (ZeRO stage 1).
        shard_params: Whether they split parameters and accumulated gradients as well (ZeRO stage
            3): gathered where they are used, gradients scattered.
        sequence_parallel: Whether activations that tensor parallelism leaves whole are split over
            its devices, too, along the sequence or another dimension that operations keep apart;
            what passes between stages among them.
    """

    data_parallel: int = 1
    tensor_parallel: int = 1
    remat: Remat = "none"
    shard_optimizer: bool = False
    shard_params: bool = False
    sequence_parallel: bool = False

    def __str__(self) -> str:
        said = [f"data parallel {self.data_parallel}", f"tensor parallel {self.tensor_parallel}"]
        said += [f"remat {self.remat}"] * (self.remat != "none")
        said += ["activations split along the sequence"] * self.sequence_parallel
        what = "parameters" if self.shard_params else "optimizer"
        said += [f"{what} split over replicas"] * (self.shard_optimizer or self.shard_params)
        return ", ".join(said)

    def to_json(self) -> dict[str, Any]:
        """Return the fields; without sequence parallelism, as files from before it have them."""
        return but_empty(self, "sequence_parallel")

    @property
    def num_devices(self) -> int:
        return self.data_parallel * self.tensor_parallel

    @property
    def measured(self) -> tuple[StageChoice, ...]:
        """The choices whose measurements tell the cost of this one: itself; for a mixture, the
        choice of its first layers and that of the others."""
        if not num_full_layers(self.remat):
            return (self,)
        return replace(self, remat="full"), replace(self, remat="cheap")

    @property
    def param_split(self) -> ParamSplit:
        """The numbers of ways in which parameters are split: by tensor parallelism, and beyond that
        over replicas."""
        return self.tensor_parallel, self.data_parallel if self.shard_params else 1

    @property
    def value_split(self) -> tuple[int, int]:
        """The numbers of ways in which values between stages are split: over replicas, and beyond
        that along the sequence, where they can be."""
        return self.data_parallel, self.tensor_parallel if self.sequence_parallel else 1

    @property
    def replicas_text(self) -> str:
        """The number of replicas, for people: ``4``, or ``4 (ZeRO-3)`` if they split parameters."""
        return f"{self.data_parallel}{' (ZeRO-3)' * self.shard_params}"


def by_degree(choices: Iterable[StageChoice]) -> dict[int, tuple[StageChoice, ...]]:
    """Group choices by their number of devices."""
    found: dict[int, tuple[StageChoice, ...]] = {}
    for choice in choices:
        found[choice.num_devices] = (*found.get(choice.num_devices, ()), choice)
    return found


def measured_choices(choices: Iterable[StageChoice]) -> tuple[StageChoice, ...]:
    """Return the choices to measure, each once, to know stages of all the given ones.

    Example:
        >>> [c.remat for c in measured_choices([StageChoice(), StageChoice(remat="full:2")])]
        ['none', 'full', 'cheap']
    """
    return tuple(dict.fromkeys(one for choice in choices for one in choice.measured))


def with_mixtures(choices: Sequence[StageChoice], num_layers: int) -> list[StageChoice]:
    """Return the choices, and mixtures of those that are there with both ``"full"`` and
    ``"cheap"``, for stages of a model of so many layers: 1, 2, 3, 4, 6, 8, 12, ... layers as with
    ``"full"``, so that there is at most a third more than are needed.

    Example:
        >>> known = [StageChoice(remat=remat) for remat in ("cheap", "full")]
        >>> [choice.remat for choice in with_mixtures(known, 7)]
        ['cheap', 'full', 'full:1', 'full:2', 'full:3', 'full:4', 'full:6']
    """
    counts = sorted({n << bit for bit in range(num_layers.bit_length()) for n in (1, 3)})
    names = [f"full:{count}" for count in counts if count < num_layers]
    full = (choice for choice in choices if choice.remat == "full")
    both = [choice for choice in full if replace(choice, remat="cheap") in choices]
    return [*choices, *(replace(choice, remat=name) for choice in both for name in names)]


@dataclass(frozen=True, kw_only=True)
class ChoiceRow(StageChoice):
    """A row of a document that has the fields of a choice among its own."""

    @property
    def choice(self) -> StageChoice:
        return StageChoice(*(getattr(self, field.name) for field in fields(StageChoice)))


def with_sharded_params(choices: Sequence[StageChoice]) -> list[StageChoice]:
    """Return the choices, and those with replicas also with the parameters split over them: whoever
    chooses among these is never worse off.

    Example:
        >>> choices = with_sharded_params([StageChoice(1, 2), StageChoice(2, 1)])
        >>> [choice.shard_params for choice in choices]
        [False, False, True]
    """
    split = (choice for choice in choices if choice.data_parallel > 1)
    return [*choices, *(replace(c, shard_optimizer=True, shard_params=True) for c in split)]


def with_sequence_parallel(choices: Sequence[StageChoice]) -> list[StageChoice]:
    """Return the choices, and those with tensor parallelism also with sequence parallelism: whoever
    chooses among these is never worse off.

    Example:
        >>> choices = with_sequence_parallel([StageChoice(1, 2), StageChoice(2, 1)])
        >>> [choice.sequence_parallel for choice in choices]
        [False, False, True]
    """
    split = (choice for choice in choices if choice.tensor_parallel > 1)
    return [*choices, *(replace(choice, sequence_parallel=True) for choice in split)]
