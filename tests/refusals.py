"""The codes of what a call refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from capture.errors import CaptureError


def codes_of(call: Callable[[], Any]) -> tuple[str, ...]:
    """Of all violations that the call names."""
    with pytest.raises(CaptureError) as caught:
        call()
    return caught.value.codes


def code_of(call: Callable[[], Any]) -> str:
    """Of the only one."""
    (code,) = codes_of(call)
    return code
