"""Which kernels what is stored is made together with."""

from hypothesis import given
from hypothesis import strategies as st

from capture.machine.target import Target
from capture.measured.profile import StageConfig
from capture.measured.store import Store
from capture.plan.choices import StageChoice
from capture.profiler.bounds import BoundsBackend
from capture.profiler.compile import CompileBackend
from capture.runtime import traced_traffic
from capture.runtime.traced_traffic import _most_of
from tests import zoo_models


@given(st.dictionaries(st.integers(0, 30), st.integers(0, 9), min_size=1), st.data())
def test_what_has_half_of_the_bytes_has_one_of_the_largest_values(read, data):
    """So kernels that read none of these are not asked whether they read alike."""
    common = data.draw(st.sets(st.sampled_from(sorted(read))))
    if 0 < sum(read.values()) <= 2 * sum(map(read.__getitem__, common)):
        assert common.intersection(_most_of(read))


def test_kernels_are_those_that_asking_every_kernel_finds(monkeypatch):
    def measured():
        model, target = zoo_models.small("moe"), Target.load("h100")
        backend = CompileBackend(model, store=Store(), target=target, num_devices=4)
        choice = StageChoice(2, 2, "cheap", shard_optimizer=True)
        return BoundsBackend(backend).measure(StageConfig(0, 2, choice, 8))

    found = measured()
    monkeypatch.setattr(traced_traffic, "_most_of", list)
    assert found == measured()
