"""The stages of a model between two bounds."""

from __future__ import annotations

from dataclasses import dataclass

from capture.measured.profile import Profile


@dataclass(frozen=True)
class Bounds:
    """The stages of a model between two bounds, at one micro-batch size.

    Attributes:
        least: No stage of a plan needs less, once it is compiled.
        most: As much as compilers were seen to need.
    """

    least: Profile
    most: Profile
