"""What JAX's allocator may take of a GPU, and steps that would need more."""

from types import SimpleNamespace

import pytest

from capture import environment
from capture.errors import ExecutionError
from capture.runtime.layout import check_device_memory


def _gpu(limit: int | None, process: int = 0):
    stats = None if limit is None else {"bytes_limit": limit}
    return SimpleNamespace(platform="gpu", process_index=process, memory_stats=lambda: stats)


def test_a_step_that_needs_more_than_the_allocator_may_take_is_refused():
    with pytest.raises(ExecutionError, match=r"80 GB .* may take 64 GB; set XLA_CLIENT_MEM_FRAC"):
        check_device_memory([_gpu(64 * 10**9), _gpu(64 * 10**9)], [10**9, 80 * 10**9])


@pytest.mark.parametrize(
    "device",
    [
        _gpu(80 * 10**9),
        _gpu(None),  # nothing is known
        _gpu(64 * 10**9, process=1),  # of another process, which asks itself
        SimpleNamespace(platform="cpu", process_index=0),
    ],
)
def test_other_devices_are_not(device):
    check_device_memory([device], [80 * 10**9])


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_what_the_user_set_stands(name, monkeypatch):
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setenv(name, "0.5")
    environment.prepare_device_memory(0.9)
    given = {key: value for key, value in environment.os.environ.items() if "MEM_FRACTION" in key}
    assert given == {name: "0.5"}


def test_by_itself_jax_gets_what_the_target_says(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "")
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    environment.prepare_device_memory(0.9)
    assert environment.os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.9"
