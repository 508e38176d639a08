"""Facts of distinct layers against traces of the windows themselves."""

import itertools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

from capture.documents import write
from capture.machine.cluster import Cluster
from capture.machine.target import Target
from capture.measured.profile import StageConfig
from capture.measured.stage_cost import StageBounds
from capture.measured.store import Store
from capture.model.workload import Workload
from capture.plan.choices import REMAT_POLICIES, StageChoice
from capture.predictor.additive import AdditivePredictor
from capture.predictor.formula import kept_bytes
from capture.profiler.bounds import NO_END, BoundsBackend, bounded
from capture.profiler.compile import CompileBackend
from capture.profiler.facts import LayerFacts
from capture.profiler.other_splits import among_replicas
from profiling_runs.bounds import ModelBounds
from profiling_runs.measurements import open_measurements
from profiling_runs.question import ProfileQuestion
from tests import pipeline_models, zoo_models
from tests.pipeline_models import mark

NUM_DEVICES = 4
MODELS = {
    "tied": pipeline_models.tied,
    "gpt": lambda: zoo_models.load("gpt", "size=tiny&num_layers=4"),
    "moe": lambda: zoo_models.load("moe"),
    "wide_resnet": lambda: zoo_models.load("wide_resnet"),
}
PLAIN = [StageChoice(2, 1, "cheap"), StageChoice(1, 2, "full"), StageChoice(2, 2, "none")]
SIZES = (4, 8)


#: The others take a minute.
QUICK = ("tied", "gpt")


def _slow_together(model):
    """What several tests read is made by one worker."""
    return pytest.mark.slow, pytest.mark.xdist_group(f"facts of {model}")


@pytest.fixture(
    scope="module",
    params=[pytest.param(m, marks=() if m in QUICK else _slow_together(m)) for m in MODELS],
)
def known(request):
    """The facts of a model, and what traces every window by itself."""
    backend = CompileBackend(MODELS[request.param](), store=Store(), num_devices=NUM_DEVICES)
    examples = {size // choice.data_parallel for size in SIZES for choice in PLAIN}
    facts = LayerFacts(backend, examples, NUM_DEVICES)
    return facts, BoundsBackend(backend, for_devices=NUM_DEVICES)


def windows_of(facts):
    num_layers = facts.graph.num_layers
    return [(0, 1), (num_layers - 2, num_layers - 1), (0, 2), (num_layers - 2, num_layers)]


def sized_windows_of(facts):
    """Windows at one size of the micro-batch each, which takes turns: each size has a window of one
    layer and one of two, each end of the model has both sizes."""
    return list(zip((*SIZES, *reversed(SIZES)), windows_of(facts), strict=True))


def agree(found, traced):
    """What is kept is the same, and what is expected; the least may be less, for the products of
    these tiny layers are small on many devices."""
    of_least = {f"{part}_{what}": getattr(found.least, f"{part}_{what}") for part, what in LOOSER}
    for name, value in of_least.items():
        assert value is None or name.endswith("work") or value <= getattr(traced.least, name), name
    assert replace(traced.least, **of_least) == found.least
    works = {
        f"{part}_work": getattr(traced.most, f"{part}_work") for part in ("forward", "backward")
    }
    assert replace(found.most, **works) == traced.most


#: Models whose lines are held against their traces, and the policies of which slow tests do so.
SLOW = {"gpt": ("none", "full"), "wide_resnet": ("cheap", "dots")}

#: Fields that depend on which products are large.
LOOSER = list(itertools.product(("forward", "backward"), ("bytes", "work")))


def test_windows_with_as_many_examples_on_each_device_are_the_same(known):
    facts, alone = known
    for number, choice in enumerate(PLAIN):
        # In turn those of the first layers and of the last: one of one layer and one of two.
        for size, window in sized_windows_of(facts)[number % 2 :: 2]:
            traced = alone.measure(StageConfig(*window, choice, size))
            agree(facts.bounds(window, choice, size), traced)


@pytest.mark.parametrize(
    "choice",
    [
        StageChoice(2, 1, "cheap", shard_optimizer=True),
        StageChoice(2, 2, "full", shard_optimizer=True, shard_params=True),
        StageChoice(1, 2, "none", sequence_parallel=True),
        StageChoice(2, 2, "full", True, True, True),
    ],
    ids=str,
)
def test_what_follows_by_rules_is_not_above_what_its_own_trace_says(known, choice):
    facts, alone = known
    for size, window in sized_windows_of(facts):
        found = facts.bounds(window, choice, size).least
        traced = alone.measure(StageConfig(*window, choice, size)).least
        graph = replace(facts.graph_at(size), value_dims=facts.graph_of([choice]).value_dims)
        kept = [kept_bytes(graph, *window, choice, each) for each in (found, traced)]
        assert kept[0] <= kept[1], window
        for part in ("forward", "backward", "update", "optimizer"):
            name = f"{part}_bytes"
            assert getattr(found, name) <= getattr(traced, name), (part, window)


@pytest.mark.parametrize(
    "name",
    [
        "tied",
        pytest.param("gpt", marks=pytest.mark.slow),
        pytest.param("moe", marks=pytest.mark.exhaustive),
    ],
)
def test_passes_that_are_bounded_elsewhere_or_side_by_side_are_the_same(name):
    """In batches that share a trace, by a process with a backend of its own, whose documents are
    taken; and each with a trace of its own."""

    def backend():
        target = Target.load("h100")
        return CompileBackend(MODELS[name](), store=Store(), target=target, num_devices=NUM_DEVICES)

    sizes = []

    def elsewhere(batches, here):
        for batch in batches:
            sizes.append(len(batch.configs))
            found, configs = bounded(backend(), batch), batch.configs
            assert len(found) == len(configs)
            for n in {0, len(configs) - 1}:  # of which the last follows the most others
                assert [found[n]] == bounded(backend(), replace(batch, configs=(configs[n],)))
            yield batch, json.loads(json.dumps(write(found)))

    degrees = [(1, 1), (1, 4), (2, 1), (2, 2)]
    asked = [(StageChoice(*each, "none"), 8) for each in degrees]
    examples = {size // choice.data_parallel for choice, size in asked}
    ours = LayerFacts(backend(), examples, NUM_DEVICES)
    others = LayerFacts(backend(), examples, NUM_DEVICES, elsewhere)
    others.learn(asked, longest=1)
    assert max(sizes) > 2
    for (choice, size), window in itertools.product(asked, windows_of(ours)[:2]):
        assert others.bounds(window, choice, size) == ours.bounds(window, choice, size)


@pytest.mark.parametrize(
    ("name", "remat", "degrees"),
    [
        ("gpt", "cheap", [1]),  # no pass of several devices is on a line
        # Each model with two policies, each policy with one model; the other pairs apart.
        *(
            pytest.param(
                name,
                remat,
                [1, 2],
                marks=pytest.mark.slow if remat in SLOW[name] else pytest.mark.exhaustive,
            )
            for name in SLOW
            for remat in REMAT_POLICIES
        ),
    ],
)
def test_what_follows_from_other_numbers_of_examples_is_what_their_traces_say(name, remat, degrees):
    """Of few examples most products are small."""
    target, examples = Target.load("h100"), [1, 2, 4, 16, 32, 48, 64, 96, 192, 256, 512]
    backend = CompileBackend(MODELS[name](), store=Store(), target=target, num_devices=NUM_DEVICES)
    facts, alone = (LayerFacts(backend, examples, NUM_DEVICES) for _ in range(2))
    asked = [(StageChoice(2, degree, remat), 2 * n) for degree in degrees for n in examples]
    facts.learn(asked, longest=1)
    follow = [config for config in facts._lines if config not in facts._passes]
    assert follow, "some are on lines"
    for config, window in itertools.product(follow, [(0, 1), (1, 2)]):
        if (config.first, config.stop) == window:
            line, n = facts._lines[config]
            found, traced = line.at(n), alone._traced(config)
            found, traced = (among_two(each, config.choice) for each in (found, traced))
            assert found.least == traced.least, config
            peaks = {f"{p}_bytes": getattr(traced.most, f"{p}_bytes") for p in PASSES}
            for name, nbytes in peaks.items():
                assert nbytes - 1 <= getattr(found.most, name) <= 1.2 * nbytes + 1, config
            assert replace(found.most, **peaks) == traced.most, config


PASSES = ("forward", "backward")


def among_two(bounds, choice):
    """As of two replicas."""
    works = [f"{each}_work" for each in PASSES]
    costs = (bounds.least, bounds.most)
    return StageBounds(
        *(replace(c, **{w: among_replicas(getattr(c, w), choice) for w in works}) for c in costs)
    )


def test_equal_layers_are_traced_once():
    backend = CompileBackend(zoo_models.load("gpt"), store=Store(), num_devices=NUM_DEVICES)
    facts = LayerFacts(backend, [4], NUM_DEVICES)
    assert facts.graph.num_layers > 3
    assert set(facts.windows.values()) <= {
        (first, first + n) for n in (1, 2) for first in (0, 1, *range(facts.graph.num_layers)[-2:])
    }


def test_a_model_whose_examples_meet_is_traced_at_every_size():
    """The products grow with the square of the micro-batch, whatever the replicas."""

    def loss(params, x):
        for weights in params:
            x = mark(jax.nn.softmax(x @ x.T) @ jnp.tanh(x @ weights))
        return jnp.mean(x**2)

    def init(key):
        return [jax.random.normal(each, (64, 64)) for each in jax.random.split(key, 4)]

    model = Workload(loss, init, lambda key, n: jax.random.normal(key, (n, 64)), optax.sgd(0.1))
    backend = CompileBackend(model, store=Store(), num_devices=NUM_DEVICES)
    facts = LayerFacts(backend, [2, 4], NUM_DEVICES)
    assert not facts.is_by_example
    alone, choice = BoundsBackend(backend, for_devices=NUM_DEVICES), StageChoice(2, 1, "none")
    for size in SIZES:
        found = facts.bounds((1, 2), choice, size)
        traced = alone.measure(StageConfig(1, 2, choice, size))
        assert (found.least, found.most) == (traced.least, traced.most)


def normalized(params, x):
    """Two layers whose examples have their mean and variance in common."""
    for weights in params:
        x = x @ weights
        x = mark(jax.nn.relu((x - x.mean(0)) * jax.lax.rsqrt(x.var(0) + 1)))
    return jnp.mean(x**2)


def wide(loss, width, target, optimizer=None, init=None):
    """The facts of two layers of one width, and what traces them by themselves."""

    def squares(key):
        return [jax.random.normal(each, (width, width)) for each in jax.random.split(key)]

    model = Workload(
        loss,
        init or squares,
        lambda key, n: jax.random.normal(key, (n, width)),
        optimizer or optax.sgd(0.1),
    )
    backend = CompileBackend(
        model, store=Store(), target=Target.load(target), num_devices=NUM_DEVICES
    )
    facts = LayerFacts(backend, [1, 2, 128, 256], NUM_DEVICES)
    return facts, BoundsBackend(backend, for_devices=NUM_DEVICES)


def test_one_replica_reads_and_writes_no_gradients_beside_its_products():
    """Several sum them up first; a product may add them to those of other micro-batches."""

    def loss(params, x):
        for weights in params:
            x = mark(jnp.tanh(x @ weights))
        return jnp.mean(x**2)

    facts, alone = wide(loss, 1024, "h100")
    assert facts.is_by_example
    for choice, size in ((StageChoice(1, 1, "none"), 256), (StageChoice(1, 2, "full"), 128)):
        found, traced = (
            sum(k.nbytes for k in each.least.backward_work.kernels if not k.dtype)
            for each in (
                facts.bounds((1, 2), choice, size),
                alone.measure(StageConfig(1, 2, choice, size)),
            )
        )
        assert 0 < found <= traced


def test_split_parameters_are_expected_to_be_gathered_whole():
    """Also where a device has so few examples that the products of these alone are small, or that
    what it has of them is less than the parameters."""

    def loss(params, x):
        for weights in params:
            x = mark(jnp.tanh(x @ weights))
        return jnp.mean(x**2)

    facts, _ = wide(loss, 1024, "h100")
    for size in (4, 64, 512):
        choice = StageChoice(2, 1, "none", shard_optimizer=True, shard_params=True)
        found = facts.bounds((1, 2), choice, size)
        for work in (found.most.forward_work, found.most.backward_work):
            sent = [each.nbytes for each in work.collectives if each.kind == "all-gather"]
            assert sent == [4 * 1024**2], (size, work.collectives)
        least = found.least.forward_work.collectives
        assert sum(each.nbytes for each in least) <= 4 * 1024**2


@pytest.mark.parametrize(("target", "alone"), [("h100", False), ("v6e", True)])
def test_the_latency_of_collectives_is_expected_as_compilers_put_them_together(target, alone):
    """Of TPUs every large parameter is gathered alone; elsewhere those of a layer are one. Bounds
    count no latency."""
    width = 256

    def init(key):
        square = jnp.ones((width, width))
        return [{"one": square, "other": square, "scale": jnp.ones((32, 8))} for _ in range(2)]

    def loss(params, x):
        for each in params:
            low = x[:, :32] @ each["scale"]
            x = mark(jnp.tanh(x @ each["one"]) @ each["other"] + low.mean())
        return jnp.mean(x**2)

    facts, _ = wide(loss, width, target, init=init)
    choice = StageChoice(2, 1, "none", shard_optimizer=True, shard_params=True)
    found = facts.bounds((1, 2), choice, 64)
    for name in ("forward_work", "backward_work"):
        least, most = getattr(found.least, name), getattr(found.most, name)
        assert all(each.is_part for each in least.collectives)
        assert not any(each.is_part for each in most.collectives)
        (gathers,) = [each for each in most.collectives if each.kind == "all-gather"]
        assert gathers.count == (2 if alone else 1), most.collectives
        assert gathers.count * gathers.nbytes >= 2 * 4 * width**2


def test_whole_updates_of_split_states_are_expected_to_be_gathered():
    """Also where the state is sums over rows and columns, which is what might be sent instead."""

    def loss(params, x):
        for weights in params:
            x = mark(jnp.tanh(x @ weights))
        return jnp.mean(x**2)

    facts, _ = wide(loss, 1024, "h100", optax.adafactor(0.1))
    found = facts.bounds((1, 2), StageChoice(2, 1, "none", shard_optimizer=True), 256)
    least, most = (
        sum(each.nbytes for each in of.update_work.collectives if each.kind == "all-gather")
        for of in (found.least, found.most)
    )
    assert least < 2**16 and most >= 4 * 1024**2


def test_few_examples_keep_no_more_than_a_cut_of_their_own():
    facts, alone = wide(normalized, 64, "cpu")
    assert facts.is_by_example
    for remat, size in itertools.product(("cheap", "full"), (1, 2)):
        choice = StageChoice(1, 1, remat)
        found = facts.bounds((0, 1), choice, size)
        traced = alone.measure(StageConfig(0, 1, choice, size))
        kept = [
            kept_bytes(facts.graph_at(size), 0, 1, choice, each.least) for each in (found, traced)
        ]
        assert kept[0] <= kept[1], (remat, size)


class Following:
    """A line that all numbers of examples are on, or none."""

    def __init__(self, follows):
        self._follows = follows

    def follows(self, examples):
        return self._follows


@pytest.mark.parametrize("follows", [True, False])
def test_numbers_of_examples_that_nobody_asked_for_are_traced_only_where_lines_pay(follows):
    batches = []

    def share(asked, here):
        batches.extend(asked)
        return iter(())

    backend = CompileBackend(MODELS["gpt"](), store=Store(), num_devices=NUM_DEVICES)
    facts = LayerFacts(backend, {1, 2, 4, 8}, NUM_DEVICES, share)
    facts.is_by_example = True
    facts._lines[StageConfig(0, 1, StageChoice(), 1)] = Following(follows), 1
    facts.learn([(StageChoice(2, 1, "none"), 8)])
    examples = {c.microbatch_size // c.choice.data_parallel for b in batches for c in b.configs}
    assert examples == ({1, 2, 4, 8} if follows else {4})


def wide_result(width=16, wide=4096):
    """A narrow layer, one that makes as many numbers as the batch has, and a loss of the numbers
    that the batch knows."""

    def init(key):
        narrow, out = jax.random.split(key)
        return {
            "narrow": jax.random.normal(narrow, (wide, width)),
            "wide": jax.random.normal(out, (width, wide)),
        }

    def loss(params, batch):
        made = mark(mark(jnp.tanh(batch @ params["narrow"])) @ params["wide"])
        known = batch > 0
        return jnp.sum(jnp.where(known, made - batch, 0) ** 2) / jnp.sum(known)

    return Workload(loss, init, lambda key, n: jax.random.normal(key, (n, wide)), optax.sgd(0.1))


def test_a_stage_needs_no_less_than_sums_over_windows_say_on_a_gpu():
    """The loss alone is given the whole of what is split within a longer stage, and keeps as much."""
    question = ProfileQuestion(
        wide_result(), Cluster((2,), "h100"), 8, choices=tuple(TAUGHT), calibration_plans=0
    )
    measurements = open_measurements(question, store=Store())
    least = ModelBounds(measurements, (4, 8), num_devices=2).at(TAUGHT, 8).least
    alone = BoundsBackend(measurements.backend, for_devices=2)
    for choice in TAUGHT:
        memory = AdditivePredictor(least).memory(choice, 8)
        traced = alone.of_passes(StageConfig(0, 3, choice, 8), NO_END).least
        assert memory.forward[0, 3] <= traced.forward_bytes, choice
        assert memory.backward[0, 3] <= traced.backward_bytes, choice


@pytest.mark.parametrize("stops", ["parameters", "output", "choice"])
def test_stages_keep_no_less_of_a_teacher_than_sums_over_windows_say(stops):
    """Whether a teacher's layers keep anything depends on the last layer, which stops its gradient."""
    question = ProfileQuestion(
        pipeline_models.taught(stops), Cluster((2,)), 4, choices=tuple(TAUGHT), calibration_plans=0
    )
    measurements = open_measurements(question, store=Store())
    known = ModelBounds(measurements, (2, 4), num_devices=2).at(TAUGHT, 4).least
    predictor, graph = AdditivePredictor(known), known.graph
    alone = BoundsBackend(measurements.backend, for_devices=2)
    assert [value.differentiable for value in graph.values].count(True) == graph.num_layers
    for choice in TAUGHT:
        kept = predictor.memory(choice, 4).kept
        for window in itertools.combinations(range(graph.num_layers + 1), 2):
            traced = alone.of_passes(StageConfig(*window, choice, 4), NO_END).least
            assert kept[window] <= kept_bytes(graph, *window, choice, traced), (choice, window)


#: Both ways to split, and to keep nearly all or nearly nothing.
TAUGHT = [StageChoice(1, 1, "none"), StageChoice(2, 1, "cheap"), StageChoice(1, 2, "full")]
