"""What tracing says of a stage against what the compiler does: the lower bound is never above it,
in any field; what one micro-batch keeps is known to the byte."""

import dataclasses
import functools
import itertools

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capture.errors import CaptureError
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.measured.profile import StageConfig
from capture.measured.store import Store
from capture.plan.choices import StageChoice
from capture.predictor import AdditivePredictor
from capture.predictor.formula import kept_bytes
from capture.profiler.bounds import BoundsBackend
from capture.profiler.compile import CompileBackend
from capture.runtime.bounds import Bounder
from capture.runtime.residuals import SavedPass
from profiling_runs.bounds import bounds
from profiling_runs.measurements import open_measurements
from profiling_runs.question import ProfileQuestion
from tests import pipeline_models, tracing_models, zoo_models
from tests.odd_models import LAYERS, Odd, odd_model, parts_of

SIZE = 4
CHOICES = [
    StageChoice(dp, tp, remat=remat, shard_params=shard_params)
    for dp, tp, remat, shard_params in (
        (1, 1, "none", False),
        (1, 1, "cheap", False),
        (1, 1, "full", False),
        (2, 1, "cheap", False),
        (1, 2, "cheap", False),
        (2, 2, "dots", False),
        (2, 1, "none", True),
    )
]
MODELS = {
    "mlp": pipeline_models.mlp,
    "tied": pipeline_models.tied,
    "convnet": tracing_models.convnet,
    "lstm": tracing_models.lstm,
    "unet": tracing_models.unet,
    **{
        name: functools.partial(zoo_models.load, name)
        for name in ("gpt", "llama", "moe", "wide_resnet")
    },
}
#: What the default tests compile of each model.
FEW = {"mlp": CHOICES[1:5], "tied": CHOICES[1:2], "convnet": CHOICES[:1], "lstm": CHOICES[:1]}


@functools.cache
def backend_of(model):
    return CompileBackend(MODELS[model](), store=Store(), num_devices=4)


def held_against(model, config):
    """The bounds of a stage and its compiled cost."""
    backend = backend_of(model)
    return BoundsBackend(backend).measure(config), backend.measure(config)


def violations(model, config, between, cost):
    """Fields of the lower bound that are above the compiled cost, in words."""
    graph = backend_of(model).traced(config.microbatch_size).graph
    kept = [
        kept_bytes(graph, config.first, config.stop, config.choice, each)
        for each in (between.least, cost)
    ]
    for field in dataclasses.fields(cost):
        least, compiled = getattr(between.least, field.name), getattr(cost, field.name)
        if field.name.endswith("_bytes") and field.name != "residual_bytes" and least > compiled:
            yield f"{model} {config}: {field.name} is at least {least:,}; compiled {compiled:,}"
    if kept[0] > kept[1]:
        yield f"{model} {config}: kept is at least {kept[0]:,}; compiled {kept[1]:,}"


def check(model, choices, spans):
    found = [
        said
        for choice, (first, stop) in itertools.product(choices, spans)
        for config in [StageConfig(first, stop, choice, SIZE)]
        for said in violations(model, config, *held_against(model, config))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("model", FEW)
def test_no_stage_needs_less_than_tracing_says(model):
    num_layers = backend_of(model).traced(SIZE).graph.num_layers
    check(model, FEW[model], [(0, 1), (1, num_layers)])


#: What takes longest of these; smaller models have the same operations.
LARGE = ("gpt", "llama", "lstm", "moe", "wide_resnet")


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=pytest.mark.exhaustive if model in LARGE else pytest.mark.slow)
        for model in MODELS
    ],
)
def test_no_stage_of_any_model_needs_less_than_tracing_says(model):
    num_layers = backend_of(model).traced(SIZE).graph.num_layers
    middle = num_layers // 2
    spans = {(0, 1), (middle, middle + 1), (middle - 1, middle + 1), (num_layers - 2, num_layers)}
    check(model, CHOICES, sorted(spans))


@pytest.mark.parametrize("choice", CHOICES[:5], ids=str)
def test_what_is_kept_is_known_to_the_byte(choice):
    between, cost = held_against("mlp", StageConfig(1, 3, choice, SIZE))
    each = between.most
    assert (each.residual_bytes, each.kept_inputs, each.kept_outputs, each.kept_batch) == (
        cost.residual_bytes,
        cost.kept_inputs,
        cost.kept_outputs,
        cost.kept_batch,
    )
    assert between.least.residual_bytes <= cost.residual_bytes
    assert between.least.optimizer_bytes == each.optimizer_bytes == cost.optimizer_bytes


@pytest.mark.slow
def test_inputs_of_layers_that_are_kept_need_no_compiler_to_be_known():
    """They lie as the partition walk says; a compiler might split these with the embedding that they
    come from."""
    config = StageConfig(0, 3, StageChoice(1, 2, remat="full"), SIZE)
    between, cost = held_against("llama", config)
    assert 0 < between.least.residual_bytes == cost.residual_bytes


@pytest.mark.parametrize("model", ["unet", "tied"])
def test_a_stage_is_not_bounded_above_what_its_own_trace_says(model):
    """Put together from windows, across which values skip and leaves of the batch are read again."""
    asked = ProfileQuestion(
        MODELS[model](), Cluster((1,)), SIZE, num_neighbours=1, calibration_plans=0
    )
    measurements = open_measurements(asked, store=Store())
    least, choice = bounds(asked, measurements).least, StageChoice(remat="cheap")
    memory, num_layers = AdditivePredictor(least).memory(choice, SIZE), least.graph.num_layers
    backend = BoundsBackend(measurements.backend)
    for first, stop in [(0, num_layers), (1, num_layers), (2, num_layers - 1)]:
        cost = backend.measure(StageConfig(first, stop, choice, SIZE)).least
        assert memory.kept[first, stop] <= kept_bytes(least.graph, first, stop, choice, cost)
        for part in ("forward", "backward", "update", "optimizer"):
            assert getattr(memory, part)[first, stop] <= getattr(cost, f"{part}_bytes"), part


@pytest.mark.parametrize(
    ("model", "counts"),
    [
        ("mlp", [1]),
        *(
            pytest.param(model, [1, 2, 3], marks=pytest.mark.exhaustive)
            for model in ("mlp", "unet", "tied", "convnet", "gpt", "llama", "moe")
        ),
    ],
)
def test_no_mixture_needs_less_than_the_windows_of_its_parts_say(model, counts):
    asked = ProfileQuestion(
        MODELS[model](), Cluster((2,)), SIZE, remat=("cheap", "full"), calibration_plans=0
    )
    measurements = open_measurements(asked, store=Store())
    least = bounds(asked, measurements).least
    predictor, graph = AdditivePredictor(least), least.graph
    for count, (dp, tp) in itertools.product(counts, [(1, 1), *[(2, 1), (1, 2)] * (counts != [1])]):
        choice = StageChoice(dp, tp, remat=f"full:{count}")
        memory = predictor.memory(choice, SIZE)
        for first, stop in {(0, graph.num_layers), (1, graph.num_layers), (0, count + 1)}:
            cost = measurements.backend.measure(StageConfig(first, stop, choice, SIZE))
            compiled = {
                "kept": kept_bytes(graph, first, stop, choice, cost),
                **{part: getattr(cost, f"{part}_bytes") for part in ("forward", "backward")},
            }
            for part, nbytes in compiled.items():
                said = int(getattr(memory, part)[first, stop])
                assert said <= nbytes, (choice, first, stop, part)
            if model == "mlp":
                assert memory.kept[first, stop] >= compiled["kept"] / 2, "the bound is of use"


#: Kinds of products that compilers compute otherwise, or inside of what reads them.
NAMED = [
    Odd("outer"),
    Odd("rank"),
    Odd("basis", 8),
    Odd("complex"),
    Odd("integer", 2),
    Odd("tiny"),
    Odd("broadcast"),
]


def odd_violations(layers, rows, width, dtype, target, remats):
    """Parts of the cost of an odd model that are below their bound."""
    choices = [StageChoice(remat=remat) for remat in remats]
    model = odd_model(layers, rows, width, dtype)
    return [
        f"{layers} {rows} {width} {dtype} {choice}: {part} {least:,} above {compiled:,}"
        for choice, parts in parts_of(model, Target.load(target), choices)
        if not isinstance(parts, CaptureError)
        for part, (least, compiled) in parts.items()
        if least > compiled
    ]


def test_no_odd_model_needs_less_than_tracing_says():
    """Each kind by itself, large enough that its products would be counted."""
    found = [odd_violations([odd], 256, 64, "float32", "cpu", ["none"]) for odd in NAMED]
    assert not any(found), found


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_no_odd_model_needs_less_for_a_gpu(remat):
    found = [odd_violations([odd], 1024, 128, "float32", "h100", [remat]) for odd in NAMED]
    # Memory that a donated argument lends, convolutions, what is moved only, products that are equal.
    for names in ("cubic", "padded pointwise", "scaled twice", "summed wide", "constant sliced"):
        layers = [Odd(name, 2) for name in names.split()]
        found.append(odd_violations(layers, 64, 128, "float32", "h100", [remat]))
    assert not any(found), found


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    st.lists(
        st.builds(Odd, st.sampled_from([*LAYERS]), st.sampled_from([1, 2, 3, 4, 8, 16, 32])),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([8, 64, 1024]),
    st.sampled_from([32, 64, 128]),
    st.sampled_from(["float32", "bfloat16"]),
    st.sampled_from(["none", "cheap", "dots", "full"]),
    st.sampled_from(["h100", "cpu"]),
)
def test_no_model_of_odd_layers_needs_less(layers, rows, width, dtype, remat, target):
    assert not odd_violations(layers, rows, width, dtype, target, [remat])


@pytest.mark.parametrize(("size", "scratch"), [(32, 100), (16, 0)])
def test_large_products_have_room_to_work_in(size, scratch):
    sharding = jax.sharding.NamedSharding(jax.make_mesh((1,), ("data",)), jax.P())
    square = jax.ShapeDtypeStruct((size, size), "float32", sharding=sharding)
    bounders = Bounder(), Bounder(product_scratch_bytes=100)
    plain, more = (each(lambda x, y: x @ y @ y, (square, square)) for each in bounders)
    assert plain.least_bytes == 2 * 4 * size**2
    assert more.least_bytes == plain.least_bytes + scratch


@pytest.mark.parametrize("remat", ["none", "cheap"])
def test_a_stage_is_traced_once_for_all_its_degrees(remat, monkeypatch):
    """And is bounded as if it were traced for each."""
    passes = []
    monkeypatch.setattr(
        "capture.runtime.traced_stage.SavedPass",
        lambda *given: passes.append(given) or SavedPass(*given),
    )
    backend = CompileBackend(MODELS["mlp"](), store=Store(), num_devices=4)
    together = BoundsBackend(backend)
    choices = [StageChoice(*degrees, remat) for degrees in ((1, 1), (2, 1), (1, 2), (2, 2))]
    choices += [StageChoice(2, 1, remat, shard_params=True), StageChoice(1, 2, remat)]
    configs = [StageConfig(1, 3, choice, SIZE) for choice in choices]
    found = [together.measure(config) for config in configs]
    assert len(passes) == 2, "what names its mesh is traced for itself"
    for config, each in zip(configs, found, strict=True):
        alone = CompileBackend(MODELS["mlp"](), store=Store(), num_devices=4)
        assert BoundsBackend(alone).measure(config) == each, config


def test_replicas_and_modes_of_remat_share_the_bounds_of_the_end_of_a_step(monkeypatch):
    bounded = []
    compute = Bounder.bounds
    monkeypatch.setattr(
        Bounder, "bounds", lambda self, *given: bounded.append(given) or compute(self, *given)
    )
    backend = BoundsBackend(CompileBackend(MODELS["mlp"](), store=Store(), num_devices=4))
    for choice in (StageChoice(1, 1), StageChoice(2, 1), StageChoice(1, 1, "cheap")):
        backend.measure(StageConfig(1, 3, choice, SIZE))
    assert len(bounded) == 3 * 2 + 1, "forward and backward of each, and one update"
    backend.measure(StageConfig(1, 3, StageChoice(1, 2), SIZE))
    assert len(bounded) == 4 * 2 + 2, "its parameters are split"


def test_bounds_are_kept_in_the_store():
    backend = CompileBackend(MODELS["mlp"](), store=Store())
    config = StageConfig(0, 1, StageChoice(), SIZE)
    bounder = BoundsBackend(backend)
    traced = bounder.measure(config)
    assert len(backend.store) == 2  # the passes and the end of the step; nothing was compiled
    assert bounder.measure(config) == traced
    assert traced.least.backward_bytes <= traced.most.backward_bytes
