"""The space of a search in words, as a proof names it: what was fixed, by the user or by a default,
and what was not searched."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from capture.plan.choices import StageChoice
from capture.plan.schedule import SCHEDULES
from recommender.question import PlanQuestion


def searched(questions: Sequence[PlanQuestion], choices: Collection[StageChoice]) -> str:
    """Return the space that a proof holds for, as the end of its sentence.

    Args:
        questions: What was asked, for several numbers of micro-batches and schedules; ``chosen``
            names what of them is no default.
        choices: Those that stages could have.

    Example:
        >>> from capture.machine.cluster import Cluster
        >>> asked = PlanQuestion(Cluster((4,)), 32, 8, chosen=("microbatches",))
        >>> searched([asked], [StageChoice(2, remat="cheap")])
        'for remat=cheap (default), 8 micro-batches, 1F1B (default); not searched: other remat,
        other micro-batches, other schedules, sharded optimizer state or parameters, sequence
        parallelism'
    """
    chosen, policies = set(questions[0].chosen), sorted({choice.remat for choice in choices})

    def by(name: str) -> str:
        return "" if name in chosen else " (default)"

    fixed, left_out = [], []
    if len(policies) == 1:
        fixed.append(f"remat={policies[0]}{by('remat')}")
        left_out.append("other remat")
    else:
        fixed.append(f"remat {_either(policies)}")
    counts = sorted({question.num_microbatches for question in questions})
    schedules = sorted({question.schedule for question in questions})
    tried = "try_microbatches" in chosen
    one = " of those tried" if tried else by("microbatches")
    fixed.append(f"{_either(map(str, counts))} micro-batches{one * (len(counts) == 1)}")
    batch = questions[0].global_batch_size
    has_every = counts == [m for m in range(1, batch + 1) if batch % m == 0]
    left_out += ["other micro-batches"] * (not has_every and (len(counts) > 1 or not tried))
    one = by("schedule") * (len(schedules) == 1)
    names = _either(map(str.upper, schedules))
    fixed.append("all schedules" if _has_all(schedules) else f"{names}{one}")
    left_out += ["other schedules"] * (not _has_all(schedules))
    sharded = [
        name
        for name, is_known in (
            ("optimizer state", any(choice.shard_optimizer for choice in choices)),
            ("parameters", any(choice.shard_params for choice in choices)),
        )
        if not is_known
    ]
    if sharded:
        left_out.append(f"sharded {' or '.join(sharded)}")
    if not any(choice.sequence_parallel for choice in choices):
        left_out.append("sequence parallelism")
    if (kept := questions[0].fixed) is not None and kept.decisions:
        fixed.append(f"{', '.join(kept.decisions)} as in the plan that is fixed")
    not_searched = f"; not searched: {', '.join(left_out)}" if left_out else ""
    # What has several values has commas of its own.
    return f"for {('; ' if len(policies) > 1 else ', ').join(fixed)}{not_searched}"


def _has_all(schedules: Collection[str]) -> bool:
    """Return whether no other schedule can be faster: GPipe is never faster than 1F1B."""
    return {*SCHEDULES} - {"gpipe"} <= {*schedules}


def _either(names: Iterable[str]) -> str:
    """Join names with commas and "or", such as ``2, 4 or 8``."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
