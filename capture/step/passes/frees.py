"""Frees: what nothing uses any more ends.

**Guarantee.** No slot outlives the last instruction that uses it, but for what outlives the step,
what another pass frees, and what the step reports, which ends with it. A slot of a host counts as
used by the program that reads its copy, so that nobody waits for the copy before. So there is no
other list of the same programs and copies by which a device holds less at any of them.
"""

from __future__ import annotations

from capture.step.program import Copy, Free, Run, Step


def free(step: Step) -> None:
    """Insert the frees into a step.

    Args:
        step: Complete but for them, of any kind of plan.
    """
    before, stay = step.instructions, {*step.persistent.values(), *step.made.values()}
    stay.update(slot for each in step.all_of(Free) for slot in each.slots)
    reported = tuple(slot for slot in step.reported if slot not in stay)
    stay.update(reported)
    ends, uses = list[tuple[int, ...]](), list[tuple[int, ...]]()
    sources = dict[int, int]()
    for each in before:
        uses.append(each.used)
        match each:
            case Copy(source=source, target=target) if step.slots[source].place.host:
                sources[target] = source
            case Run() if sources:
                read = (sources.pop(slot, None) for slot in each.read)
                uses[-1] += tuple(slot for slot in read if slot is not None)
    for each, used in zip(reversed(before), reversed(uses), strict=True):
        last = tuple(slot for slot in dict.fromkeys(used) if slot not in stay)
        stay.update(last)
        ends.append(tuple(slot for slot in last if slot not in each.consumed))
    ends.reverse()
    step.num_passes += sum(map(bool, ends[: step.num_passes]))
    step.instructions = []
    for each, gone in zip(before, ends, strict=True):
        step.instructions += [each, Free(gone)] if gone else [each]
    if reported:
        step.instructions.append(Free(reported))
