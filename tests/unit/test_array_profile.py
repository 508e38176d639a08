"""What is said while the programs of an array are compiled."""

from __future__ import annotations

from types import SimpleNamespace

from array_kit import Kit

from capture.machine.cluster import Cluster
from capture.profiler.array import ArrayProfile
from capture.step.sub_array import Call


class Programs(Kit):
    """That remembers what it was asked for, as if it had compiled it."""

    executables: dict[str, Call]

    def name_of(self, array, call) -> str:
        return f"{call} of {array.num_models}"

    def facts(self, sub_array, call):
        self.executables[self.name_of(sub_array, call)] = call
        return super().facts(sub_array, call)


def test_every_program_is_said_once_and_more_of_them_are_when_they_come():
    said: list[tuple[str, int, int]] = []
    cluster = Cluster((1,), "h200")
    profile = ArrayProfile(None, cluster, 1, progress=lambda *one: said.append(one))
    programs = Programs(2)
    object.__setattr__(programs, "executables", {})
    vars(profile).update(programs=programs, fuser=SimpleNamespace(of=programs.sub_array))
    profile.prepare([2, 1, 2])
    assert said == [("segments", done, 8) for done in range(9)]
    said.clear()
    one, call = programs.sub_array(1), Call("recompute", 0, (0,), (), (1,))
    for _ in range(2):
        profile.facts(one, call)
    assert said == [("more programs", 1, 2)]
    profile.end()
    assert said[1:] == [("more programs", 1, 1)]
