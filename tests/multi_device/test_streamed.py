"""A step written by hand, as another system than a pipeline would: packs of weights live in host
memory and stream through two devices; the ledger is what both memories hold."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capture.compiler.executable import Compiler
from capture.errors import ExecutionError
from capture.runtime.dispatch import BoundStep
from capture.runtime.meter import LiveArrayMeter
from capture.step.program import Copy, Feed, Free, Host, Place, Program, Run, Step, Wait, replay

WIDTH, ROWS, RATE = 8, 4, 0.1
DEVICES = Place("devices", (0, 1))
#: Replicated weights: the host holds those of each device.
HOST = Place("host", (0, 1), Host("host", 8 * WIDTH * WIDTH * 4))


def mesh_sharding(*spec: str, memory: str = "device") -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=memory)


WEIGHTS = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=mesh_sharding())
ROW = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=mesh_sharding("data"))


def apply(x, w):
    return jnp.tanh(x @ w)


def backward(x, w, gradient):
    _, vjp = jax.vjp(apply, x, w)
    of_input, of_weights = vjp(gradient)
    return of_input, w - RATE * of_weights


def programs():
    """Of any pack: equal packs are one program."""
    of = {
        "forward": (apply, (ROW, WEIGHTS), (), ROW.sharding),
        "loss": (lambda y: (jnp.sum(y**2), 2 * y), (ROW,), (), (WEIGHTS.sharding, ROW.sharding)),
        "backward": (backward, (ROW, WEIGHTS, ROW), (2,), (ROW.sharding, WEIGHTS.sharding)),
    }
    return {
        name: Compiler()(function, args, donate=donate, out_shardings=out)
        for name, (function, args, donate, out) in of.items()
    }


def streamed(executables) -> Step:
    """Two packs: the second comes in while the first computes; backwards each is updated on the
    devices and its new value replaces the one on the host."""
    step = Step((DEVICES, HOST))
    for name, executable in executables.items():
        step.programs[name] = Program(name, DEVICES, executable.transient_bytes)
    size, rows = WIDTH * WIDTH * 4, ROWS * WIDTH * 4 // 2

    def slot(name: str, what: str) -> int:
        return step.slot(name, DEVICES, what, size if what == "weights" else rows, what)

    state = [step.keep(f"pack {i}", HOST, "weights", size, "weights") for i in range(2)]
    x = [slot("batch", "rows"), slot("between", "rows"), slot("made", "rows")]
    here = [slot(f"pack {i} here", "weights") for i in range(2)]
    loss = step.slot("loss", DEVICES, "loss", 4, "loss")
    step.reported.append(loss)
    gradient = slot("gradient of the loss", "rows")

    def fetch(i: int, into: int) -> Copy:
        return Copy(state[i], into, size, f"pack {i} in")

    step.instructions += [
        fetch(0, here[0]),
        Feed(x[0], 0, (0,), "feed"),
        fetch(1, here[1]),
        Run("forward", ((x[0],), (here[0],)), (x[1],), (), "forward 0"),
        Wait(here[0]),
        Free((here[0],)),
        Run("forward", ((x[1],), (here[1],)), (x[2],), (), "forward 1"),
        Run("loss", ((x[2],),), (loss, gradient), (), "loss"),
        Free((x[2],)),
    ]
    for i in (1, 0):
        if i == 0:
            here[0] = slot("pack 0 again", "weights")
            step.instructions.append(fetch(0, here[0]))
        of_input, new = slot(f"gradient of {i}", "rows"), slot(f"pack {i} new", "weights")
        step.instructions += [
            Run(
                "backward",
                ((x[i],), (here[i],), (gradient,)),
                (of_input, new),
                (gradient,),
                f"backward {i}",
            ),
            Wait(here[i]),
            Free((x[i], here[i], state[i])),
            Copy(new, state[i], size, f"pack {i} out"),
            Wait(state[i]),
            Free((new,)),
        ]
        gradient = of_input
    step.instructions.append(Free((gradient, loss)))
    return step


def layout(slot):
    struct = WEIGHTS if slot.what == "weights" else ROW
    if slot.place == HOST:
        return [struct.update(sharding=struct.sharding.with_memory_kind("pinned_host"))]
    return [struct]


@pytest.fixture(scope="module")
def executables():
    return programs()


def bound(step: Step, executables) -> BoundStep:
    return BoundStep(step, lambda run: executables[run.program], layout)


def start(step: Step):
    packs = np.random.default_rng(0).normal(size=(2, WIDTH, WIDTH)).astype(np.float32)
    sharding = mesh_sharding(memory="pinned_host")
    state = {f"pack {i}": [jax.device_put(packs[i], sharding)] for i in range(2)}
    return packs, state, np.linspace(-1, 1, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)


@pytest.mark.parametrize("bound_run_ahead", [False, True])
def test_packs_of_weights_stream_from_host_memory(executables, bound_run_ahead):
    step = streamed(executables)
    packs, state, batch = start(step)
    run, ledger = bound(step, executables), replay(step)
    meter = LiveArrayMeter(
        step,
        jax.devices()[:2],
        lambda run: executables[run.program].transient_bytes,
        strict=True,
    )
    state, reported = run(state, [[batch]], bound_run_ahead=bound_run_ahead, observer=meter)
    loss = float(reported.pop())
    meter.finish()
    expected = jax.value_and_grad(
        lambda packs: jnp.sum(apply(apply(batch, packs[0]), packs[1]) ** 2)
    )(list(packs))
    assert meter.num_checks == len(step.instructions) + 1
    assert meter.peak_bytes_per_device == ledger.peak_bytes_per_device
    assert meter.peak_bytes_of("host") == ledger.peak_of("host").peak_bytes == 4 * 4 * WIDTH**2
    assert loss == pytest.approx(float(expected[0]), rel=1e-6)
    for i in range(2):
        (new,) = state[f"pack {i}"]
        assert new.sharding.memory_kind == "pinned_host"
        np.testing.assert_allclose(new, packs[i] - RATE * expected[1][i], rtol=1e-5, atol=1e-6)


def test_a_wait_waits_for_every_array_of_its_slot():
    class Late:
        def __init__(self):
            self.waited = 0

        def block_until_ready(self):
            self.waited += 1

    step = Step((HOST,))
    came = step.keep("came", HOST, "weights", 8)
    step.keep("others", HOST, "weights", 8)
    step.instructions.append(Wait(came))
    state = {name: [Late(), Late()] for name in step.persistent}
    run = BoundStep(step, {}.get, layout)
    assert run(state, []) == (state, [])
    assert [late.waited for late in state["came"]] == [1, 1]
    assert [late.waited for late in state["others"]] == [0, 0]


def test_a_program_on_the_host_is_metered_for_each_device_of_its_place():
    step = Step((HOST,), {"work": Program("work", HOST, 50)})
    step.instructions.append(Run("work", (), (), (), "work"))
    meter = LiveArrayMeter(step, jax.devices()[:2], lambda run: 50)
    meter(step.instructions[0], [])
    meter.finish()
    assert meter.peak_bytes_of("host") == replay(step).peak_of("host").peak_bytes == 100


def test_an_array_left_on_the_host_is_noticed(executables):
    step = streamed(executables)
    _, state, batch = start(step)
    meter = LiveArrayMeter(step, jax.devices()[:2], lambda run: 0, strict=True)
    kept = []

    def observer(instruction, slots):
        if isinstance(instruction, Run) and instruction.label == "backward 1":
            kept.append(jax.device_put(np.ones(3, np.float32), mesh_sharding(memory="pinned_host")))
        meter(instruction, slots)

    with pytest.raises(ExecutionError, match=r"before 'backward 1' host holds \d+ bytes") as error:
        bound(step, executables)(state, [[batch]], observer=observer)
    assert error.value.codes == ("run-ledger-mismatch",)
