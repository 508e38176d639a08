"""What packs of a layer profile take, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from capture.errors import ProfileError
from capture.measured.layer_passes import PassProfile
from capture.measured.layer_profile import LayerProfile
from capture.step.holds import Leaves, Params, State, Summary, Values
from capture.step.pack_sizes import ProfileSizes

WEIGHTS, INPUTS = (10, 30, 0), (5, 7, 2)
FORWARD, BACKWARD = (100, 200, 50), (1000, 2000, 500)


def profile(**change) -> LayerProfile:
    """Of three layers at two examples: a layer's peak is its weights, its input and what more is
    said."""

    def of(seconds: float, more: tuple[int, ...]) -> PassProfile:
        memory = tuple(w + 2 * x + m for w, x, m in zip(WEIGHTS, INPUTS, more, strict=True))
        return PassProfile((2,), ((seconds,) * 3,), (memory,))

    given = LayerProfile(
        "by hand",
        3,
        of(1.0, FORWARD),
        of(3.0, BACKWARD),
        INPUTS,
        WEIGHTS,
        (0, 0, 0),
        (20, 60, 0),
        (1e-3,) * 3,
    )
    return replace(given, **change)


def batch_bytes(sizes: ProfileSizes, span: tuple[int, int]) -> int:
    return sizes.nbytes(Leaves(sizes.layers.leaves(span), (0, 4)))


def test_what_enters_grows_with_the_examples_and_the_batch_enters_the_first_layer():
    sizes = ProfileSizes(profile())
    layers = sizes.layers
    entering = [Values(values, (3, 7)) for values in layers.values]
    assert list(map(sizes.nbytes, entering)) == [20, 28, 8, 0]
    assert sizes.nbytes(Values((1,), (0, 4), gradients=True)) == 28
    assert [layers.leaves(span) for span in [(0, 2), (1, 3)]] == [(0,), ()]
    assert [batch_bytes(sizes, span) for span in [(0, 2), (1, 3)]] == [20, 0]
    assert sizes.nbytes(Params(layers.owned((0, 2)))) == 40
    assert sizes.nbytes(State(layers.owned((1, 3)))) == 60
    assert layers.shared((1, 3)) == () and sizes.nbytes(Summary(layers.owned((0, 3)))) == 0


@pytest.mark.parametrize("hashes", [{}, {2: "a"}], ids=["released", "compiled"])
def test_temporaries_of_a_pack_are_what_its_layers_hold_beside_weights_and_inputs(hashes):
    sizes = ProfileSizes(profile(model_hashes=hashes))
    for pack in [(0, 1), (0, 2), (1, 3)]:
        layers, weights = slice(*pack), sum(WEIGHTS[slice(*pack)])
        forward, own = sum(FORWARD[layers]), sum(BACKWARD[layers])
        if hashes and pack != (0, 1):  # compilers keep a little more of several layers
            forward, own = (nbytes + nbytes // 512 for nbytes in (forward, own))
        assert sizes.transient_bytes("forward", pack, 2, 1) == forward
        assert sizes.transient_bytes("backward", pack, 2, 1) == own
        # Gradients are added where they are; in a compiled program, layer by layer.
        largest = max(WEIGHTS[layers]) if hashes else 0
        assert sizes.transient_bytes("accumulate", pack, 2, 1) == own - weights + largest
        # Results are never left out.
        assert sizes.transient_bytes("accumulate", pack, 2, 10**6) == 10**6
        assert sizes.transient_bytes("backward", pack, 2, 10**6) == 10**6 + weights


def test_a_layer_that_reads_of_the_batch_gets_that_alone():
    sizes = ProfileSizes(profile(batch=((3, 0), (2, 0, 2), (1, 2))))
    assert [sizes.layers.leaves(span) for span in [(0, 1), (1, 2), (1, 3), (0, 3)]] == [
        (0, 1), (), (1, 2), (0, 1, 2)]  # fmt: skip
    assert [batch_bytes(sizes, span) for span in [(0, 1), (1, 3), (0, 3)]] == [20, 12, 24]
    # It is there before, and the peak of the layer holds it.
    assert sizes.transient_bytes("backward", (2, 3), 2, 1) == BACKWARD[2] - 2 * (2 + 1)
    assert sizes.transient_bytes("backward", (0, 1), 2, 1) == BACKWARD[0]
    with pytest.raises(ProfileError) as error:
        profile(batch=((3, 0), (-1, 0), (2, 1, 1), (4, 3)))
    assert error.value.codes == ("layers-batch",) * 3


def test_a_pass_makes_what_leaves_it():
    """Also where the profile says that its layers take less than their weights."""
    small = PassProfile((2,), ((1.0,) * 3,), ((0, 0, 0),))
    sizes = ProfileSizes(profile(fwd=small))
    assert sizes.transient_bytes("forward", (0, 2), 2, 1) == 2 * INPUTS[2]
    assert sizes.transient_bytes("forward", (0, 3), 2, 1) == 0
