"""Lines of XLA's texts that several readers take apart. They are no stable interface:
``tests/golden`` has a dump of every supported version."""

from __future__ import annotations

import re

#: A line of ``*-buffer-assignment.txt``: size, colour of the memory space if it is named, what it
#: is. jax 0.12 adds ``page``.
ALLOCATION = re.compile(
    r"^allocation \d+:(?: 0x\w+,)? size (\d+)(?:, color (\d+))?(?:, page \d+)?, (.*)$", re.M
)
#: An instruction of an optimised program: ``%name = shape op(operands), attributes``; ``text`` is
#: all after the name.
INSTRUCTION = re.compile(
    r"^  (?:ROOT )?%?(?P<name>[\w.\-]+) = "
    r"(?P<text>(?P<shape>.*?) (?P<op>[\w\-]+)\((?P<operands>[^)]*)\)(?P<rest>.*))$",
    re.M,
)
#: The name of an instruction where another one names it.
OPERAND = re.compile(r"%([\w.\-]+)")
#: The names of the dimensions of a convolution: of its input, filter and output.
DIM_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_GROUPS = re.compile(r"feature_group_count=(\d+)")


def feature_groups(attributes: str) -> int:
    """Return the number of groups that a convolution splits its features into."""
    found = _GROUPS.search(attributes)
    return int(found[1]) if found else 1
