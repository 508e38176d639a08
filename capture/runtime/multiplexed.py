"""Train an array of models on one device of this process:

    train = train_array(workload, plan)
    state = train.init()
    for state, losses in train(state, batches): ...    # losses[model]
    params = train.params(state, 3)

Where the order is multiplexed, sub-array 0 is one forward pass ahead of sub-array 1: a batch is
taken from ``batches`` before the update before it is complete. When they end, the last update is
completed without another; a loop that stops earlier leaves a state that is ahead, with which
``train`` goes on, or ``finish`` ends the update that was begun.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import count
from types import MappingProxyType
from typing import Any

import jax

from capture import environment
from capture.compiler.executable import Compiler
from capture.errors import ExecutionError, PlanError, Violation
from capture.model.workload import PyTree, WorkloadProtocol, named_workload
from capture.plan.array import ArrayPlan, ArrayTask, Member, member_violations
from capture.runtime.array_batches import drawn, stacked
from capture.runtime.array_change import joined, without
from capture.runtime.array_check import compared
from capture.runtime.array_list import ArrayList
from capture.runtime.array_programs import ArrayPrograms
from capture.runtime.array_state import (
    ArrayState,
    Leaves,
    Losses,
    StateRows,
    check_array_state,
    check_count,
    check_models,
)
from capture.runtime.array_tasks import as_planned, unlike_shared, wrong_hyperparameters
from capture.runtime.frame import Observer
from capture.runtime.fused import Fuser
from capture.runtime.layout import check_hosts, check_memory, first_devices
from capture.runtime.state import joined_params, made_by_host, optimizer_leaves, param_leaves
from capture.runtime.train_step import Fed, Metered
from capture.step.ledger import Ledger
from capture.step.multiplexed import ArraySteps, build_array, lifetimes
from capture.step.program import Step


def train_array(
    workload: WorkloadProtocol,
    plan: ArrayPlan,
    devices: Sequence[jax.Device] | None = None,
    *,
    workloads: Mapping[str, WorkloadProtocol] = MappingProxyType({}),
    fast_compile: bool = False,
    trust: bool = False,
) -> ArrayTraining:
    """Compile a plan's programs and return its training.

    Args:
        workload: The task of the plan; its optimizer is made with ``optax.inject_hyperparams``
            where the models' hyperparameters differ.
        plan: What is fused, in which order.
        workloads: Those that models of the plan name; what is not there is loaded by its name.
        devices: The first is used; by default that of ``jax.devices()``.
        fast_compile: As for ``pipeshard``.
        trust: Whether to load what the file of the plan names and the user never did
            (``WorkloadSpec.admitted``).

    Raises:
        PlanError: ``plan-other-model``, ``array-hyperparameter`` for one that the optimizer does
            not inject, ``array-bundle`` for a decision about what the model has not,
            ``array-tasks`` where several programs cannot share what they are to.
        WorkloadError: ``array-key``, ``array-shared-updated``, ``workload-name`` and what else
            loading a workload has.
        ExecutionError: ``run-devices``, ``run-host-memory``.
    """
    environment.warn()
    (device,) = first_devices(devices, 1)
    if any(decision.choice == "swap" for own in plan.decisions for decision in own):
        check_hosts([device])
    given = {**workloads, "": workload}
    fusers = dict[ArrayTask, Fuser]()
    for task in dict.fromkeys(plan.trained):
        own = named_workload(task.workload, given, plan.named_by, trust=trust)
        made = partial(
            Fuser,
            own,
            task.batch_size,
            task.num_layers,
            shared=plan.shared,
            shared_batches=plan.shared_batches,
            bundle_bytes=plan.bundle_bytes,
            remat=plan.remat,
        )
        fusers[task] = as_planned(plan, task, own, made)
    if plan.shared or plan.shared_batches:
        PlanError.check(unlike_shared({task: one.of(1) for task, one in fusers.items()}))
    programs = ArrayPrograms(device, Compiler(fast_compile=fast_compile))
    return ArrayTraining(fusers, programs, plan, device)


class ArrayTraining:
    """The training of an array of models. Made by ``train_array``.

    Attributes:
        devices, workload, optimizer: The device; those of the first model.
        models: The loss of each model, with its examples in an update.
        microbatch_sizes: The examples of a batch of the first model, which is not cut.
        updates_last: Updates come with the backward passes.
        fusers: By what models train.
        arrays: By sub-array, its models as one program.
    """

    updates_last = False

    def __init__(
        self,
        fusers: Mapping[ArrayTask, Fuser],
        programs: ArrayPrograms,
        plan: ArrayPlan,
        device: jax.Device,
        family: list[ArrayTraining] | None = None,
    ):
        self.fusers, self.programs, self.plan, self.device = fusers, programs, plan, device
        PlanError.check(self._wrong(plan.trained, plan.models))
        self.arrays = [self.fuser(group[0]).of(len(group)) for group in plan.partition]
        self.models = [(self.fusers[task].traced, task.batch_size) for task in plan.trained]
        self.devices, self.microbatch_sizes = [device], (plan.batch_size,)
        self.workload, self.optimizer = self.fuser(0).workload, self.fuser(0).optimizer
        #: This one, and those of states whose models came and went.
        self._family = [] if family is None else family
        self._family.append(self)

    def fuser(self, model: int) -> Fuser:
        """Return the maker of a model's programs, with its workload, loss and optimizer."""
        return self.fusers[self.plan.trained[model]]

    def _wrong(self, tasks: Sequence[ArrayTask], models: Sequence[Member]) -> Iterator[Violation]:
        optimizers = {task: fuser.optimizer for task, fuser in self.fusers.items()}
        return wrong_hyperparameters(optimizers, tasks, models)

    def of(self, plan: ArrayPlan) -> ArrayTraining:
        """Return the training of another plan of these models and batches: what is compiled, is."""
        same = ("batch_size", "shared", "shared_batches", "bundle_bytes", "num_layers")
        other = [name for name in same if getattr(plan, name) != getattr(self.plan, name)]
        assert not other, f"plans that share programs differ in {other}"
        for task in dict.fromkeys(plan.trained):
            as_planned(
                plan, task, self.fusers[task].workload, partial(self.fusers.__getitem__, task)
            )
        return ArrayTraining(self.fusers, self.programs, plan, self.device)

    @cached_property
    def steps(self) -> ArraySteps:
        """The instructions; all programs are compiled when they are made."""
        decided = [
            lifetimes(array, chosen)
            for array, chosen in zip(self.arrays, self.plan.decisions, strict=True)
        ]
        limit = self.plan.memory_limit_bytes
        return build_array(decided, self.plan.order, self.programs, limit)

    @property
    def program(self) -> Step:
        """The instructions of an update."""
        return self.steps.body

    def replay(self) -> tuple[Ledger, ...]:
        """Return the ledgers of all steps, without running them."""
        return self.steps.replay()

    # ---- state -----------------------------------------------------------------------------------

    def init(self) -> ArrayState:
        """Return the state of a training that begins at ``first_params``."""
        return self.init_from(self.first_params())

    def first_params(self, seed: int = 0) -> list[PyTree]:
        """Return each model's first parameters, by its own seed; what they share by the first's."""
        first, found = dict[int, Any](), list[PyTree]()
        for fuser, member in zip(self._each, self.plan.models, strict=True):
            params = made_by_host(fuser.workload.init, jax.random.key(member.seed))
            own = param_leaves(fuser.traced, params)
            first = first or dict(enumerate(own))
            shared = dict(enumerate(fuser.sharing(own, first)))
            found.append(joined_params(fuser.traced, shared))
        return found

    def init_from(self, params: Sequence[PyTree]) -> ArrayState:
        """Return the state of trainings that begin at the given parameters.

        Raises:
            ExecutionError: ``run-params`` naming every parameter that the model does not have so,
                ``array-count`` unless there is one tree per model, ``array-shared-values`` where
                what they share differs.
        """
        check_count("params", params, len(self.plan.models))
        each = zip(self._each, self.plan.models, params, strict=True)
        return self._placed(
            [fuser.begun(one, param_leaves(fuser.traced, tree)) for fuser, one, tree in each]
        )

    def restore(
        self, params: Sequence[PyTree], optimizer_states: Sequence[PyTree], num_steps: int = 0
    ) -> ArrayState:
        """Return the state with the given parameters and optimizer states, of any array or of
        models that were trained alone.

        Raises:
            ExecutionError: ``run-optimizer``, and those of ``init_from``.
        """
        check_count("params", params, len(self.plan.models))
        check_count("optimizer_states", optimizer_states, len(self.plan.models))
        found = list[Leaves]()
        for fuser, own, state in zip(self._each, params, optimizer_states, strict=True):
            given = param_leaves(fuser.traced, own)
            leaves = optimizer_leaves(fuser.optimizer.sliced.state_structs, state)
            found.append((dict(enumerate(given)), dict(enumerate(leaves))))
        return self._placed(found, num_steps)

    def _placed(self, leaves: Sequence[Leaves], num_steps: int = 0) -> ArrayState:
        return ArrayState(self._rows.placed(leaves), self.plan, num_steps)

    @cached_property
    def _rows(self) -> StateRows:
        body, sharding = self.steps.body, self.programs.sharding
        optimizers = [self.fuser(group[0]).optimizer for group in self.plan.partition]
        return StateRows(self.plan.partition, self.arrays, optimizers, body, sharding)

    def params(self, state: ArrayState, model: int) -> PyTree:
        """Return one model's parameters, as the workload's ``init`` returns them."""
        ((found, _),) = self._read(state, [model])
        return joined_params(self.of_state(state).fuser(model).traced, found)

    def optimizer_state(self, state: ArrayState, model: int) -> PyTree:
        """Return one model's optimizer state, as optax has it over ``TracedModel.split_struct``."""
        ((_, found),) = self._read(state, [model])
        optimizer = self.of_state(state).fuser(model).optimizer
        return optimizer.sliced.unflatten_state([found[n] for n in sorted(found)])

    def _read(self, state: ArrayState, models: Sequence[int]) -> list[Any]:
        train = self.of_state(state)
        check_models(models, len(train.plan.models))
        return train._rows.read(state.slots, models)

    # ---- models that come and go -----------------------------------------------------------------

    def drop(self, state: ArrayState, models: Collection[int]) -> ArrayState:
        """Drop some models, such as those that do not learn. The others keep their order and their
        sub-arrays, and are numbered from 0 on again; ``state.plan`` says who they are.

        Args:
            state: Is taken over; not ahead.
            models: Their numbers.

        Raises:
            ExecutionError: ``array-ahead``, ``array-count`` for models that are not there;
                PlanError: ``array-models`` where none is left.
        """
        train, count = self._settled(state), len(state.plan.models)
        check_models(sorted(models), count)
        kept = [model for model in range(count) if model not in models]
        plan = without(train.plan, kept, self.fusers)
        return train._changed(state, plan, self._read(state, kept))

    def add(
        self,
        state: ArrayState,
        models: Sequence[Member | Mapping[str, object]],
        params: Sequence[PyTree] | None = None,
    ) -> ArrayState:
        """Add models, which get the next numbers and begin now, each in the sub-array that is
        smallest then of those that are its program.

        Args:
            state: Is taken over; not ahead.
            models: Of each its seed and its hyperparameters, and its batch_size and workload where
                they are not the plan's.
            params: With which they begin; None to draw them. What all share stays what it is.

        Raises:
            ExecutionError: ``array-ahead``, ``run-params``, ``array-count``, ``array-tasks`` for a
                model that no other one is a program with; PlanError: ``array-hyperparameter``,
                ``array-size``, ``array-models``.
        """
        train = self._settled(state)
        members = [one if isinstance(one, Member) else Member.of(one) for one in models]
        PlanError.check(member_violations(members))
        plan = joined(train.plan, members, self.fusers)
        tasks = plan.trained[len(train.plan.models) :]
        PlanError.check(self._wrong(tasks, members))
        fusers = [self.fusers[task] for task in tasks]
        if params is None:
            pairs = zip(fusers, members, strict=True)
            params = [fuser.workload.init(jax.random.key(one.seed)) for fuser, one in pairs]
        check_count("params", params, len(members))
        found = self._read(state, range(len(train.plan.models)))
        given = []
        for fuser, member, tree in zip(fusers, members, params, strict=True):
            own = fuser.sharing(param_leaves(fuser.traced, tree), found[0][0])
            given.append(fuser.begun(member, own))
        return train._changed(state, plan, [*found, *given])

    def of_state(self, state: ArrayState) -> ArrayTraining:
        """Return the training of the models of a state: this one, or that of what ``drop`` and
        ``add`` left.

        Raises:
            ExecutionError: ``array-state``.
        """
        for train in self._family:
            if state.plan is train.plan or state.plan == train.plan:
                return train
        raise ExecutionError.of(
            "the state is of another plan; carry it over with train.restore(params, "
            "optimizer_states, state.num_steps).",
            "array-state",
        )

    def _settled(self, state: ArrayState) -> ArrayTraining:
        """Return the training of a state whose models may change."""
        train = self.of_state(state)
        check_array_state(state, train.step_of(state))
        if state.ahead is not None:
            raise ExecutionError.of(
                "the state is ahead by the forward pass of an update that was begun; complete it "
                "with state, losses = train.finish(state), and change the models then.",
                "array-ahead",
            )
        return train

    def _changed(self, state: ArrayState, plan: ArrayPlan, leaves: Sequence[Leaves]) -> ArrayState:
        """Return the state of another plan, from what was read of this one, which ends."""
        train = next((one for one in self._family if one.plan == plan), None)
        if train is None:
            train = ArrayTraining(self.fusers, self.programs, plan, self.device, self._family)
        for arrays in state.slots.values():
            for array in arrays:
                array.delete()
        return train._placed(leaves, state.num_steps)

    # ---- execution -------------------------------------------------------------------------------

    def __call__(
        self, state: ArrayState, batches: Iterable[Any]
    ) -> Iterator[tuple[ArrayState, Losses]]:
        """Make one update of every model per batch.

        Args:
            state: Consumed by the first update, as each one's by the next.
            batches: Of every update a sequence of one batch per model, or one for all where the
                plan shares them; on the host or a device. A multiplexed order takes one more than
                it has completed updates.

        Yields:
            The state after the update, and the losses, which need not be ready yet.

        Raises:
            ExecutionError: ``run-batch``, ``array-count``, ``array-state``.
        """
        for batch in batches:
            state, losses = self.advance(state, batch)
            if losses is not None:
                yield state, losses
        if state.ahead is not None:
            yield self.finish(state)

    def step_of(self, state: ArrayState) -> Step:
        """Return the instructions that ``advance`` executes."""
        steps = self.of_state(state).steps
        return steps.body if state.ahead is not None or not steps.prologue else steps.prologue

    def advance(
        self, state: ArrayState, batch: object, *, observer: Observer | None = None
    ) -> tuple[ArrayState, Losses | None]:
        """Take one batch.

        Args:
            state, batch: As for the training itself.
            observer: Called before every instruction.

        Returns:
            The state, and the losses of the update that is complete; None if it was only begun.
        """
        train = self.of_state(state)
        update = state.num_steps + (state.ahead is not None)
        given = train._stacked(batch, update)
        state, metrics = train._lists[id(train.step_of(state))](state, given, observer=observer)
        return state, metrics.losses

    def _stacked(self, batch: object, update: int) -> list[Any]:
        return stacked(self.plan, [one.traced for one in self._each], batch, update)

    @property
    def _each(self) -> list[Fuser]:
        """The maker of the programs of each model."""
        return [self.fuser(model) for model in range(len(self.plan.models))]

    def finish(
        self, state: ArrayState, *, observer: Observer | None = None
    ) -> tuple[ArrayState, Losses]:
        """Complete the update that a state is ahead by.

        Raises:
            ExecutionError: ``array-state`` if it is not.
        """
        train = self.of_state(state)
        epilogue = train.steps.epilogue
        if state.ahead is None or epilogue is None:
            raise ExecutionError.of(
                "the state is not ahead: no update was begun that is not complete.", "array-state"
            )
        state, metrics = train._lists[id(epilogue)](state, None, observer=observer)
        assert metrics.losses is not None, "an epilogue completes an update"
        return state, metrics.losses

    def executions(self, num_steps: int) -> list[Metered]:
        """Return the lists of instructions that a training of some updates executes."""
        steps = self.steps
        lists = [steps.prologue or steps.body, *[steps.body] * (num_steps - 1)]
        ends = [] if steps.epilogue is None else [steps.epilogue]
        return [self._lists[id(step)] for step in (*lists, *ends)]

    def drawn(self, seed: int, first: int) -> Iterator[Any]:
        """Yield the batches that the models draw, each by its own seed, without an end."""
        workloads = [one.workload for one in self._each]
        return (drawn(self.plan, workloads, n) for n in count(first))

    def fed(self, batches: Iterable[object], seed: int, first: int) -> Iterator[Fed]:
        """Yield what each update is fed with, from the batches of the models."""
        return (Fed(self._stacked(batch, n)) for n, batch in enumerate(batches, first))

    def comparison(
        self, params: Sequence[PyTree], batches: Sequence[object], seed: int
    ) -> Callable[[ArrayState], dict[str, Any]]:
        """Return what compares a training with each model alone when it has ended."""
        plan, each = self.plan, self._each
        return lambda state: compared(plan, each, params, partial(self.params, state), batches)

    @cached_property
    def _lists(self) -> dict[int, ArrayList]:
        """The lists of instructions, by their id.

        Raises:
            ExecutionError: ``array-device-memory``, and those of ``check_memory``.
        """
        peak, limit = check_memory(self.devices, *self.steps.all), self.plan.memory_limit_bytes
        if limit is not None and peak.peak_bytes > limit:
            raise ExecutionError.of(
                f"the device needs {peak}, and the plan's limit is memory_limit_bytes={limit}; "
                "plan it again for this machine, or raise the limit.",
                "array-device-memory",
            )
        of = self.plan, self.arrays, self.programs, self.steps
        return {id(step): ArrayList(*of, step) for step in self.steps.all}
