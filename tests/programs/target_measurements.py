"""What the compiler of a target says of stages of a small GPT:
``target_measurements.py TARGET [sequence | parts | all parts]``, with ``sequence`` of sequence
parallelism alone, with ``parts`` of few and of many layers whose parameters replicas split: either
remat with one of the degrees, or, with ``all parts``, with all of them."""

import json
import sys

from capture import environment
from capture.documents import write
from capture.machine.target import Target

target = Target.load(sys.argv[1])
environment.prepare(num_devices=4, platform=target.platform)
from capture.measured.profile import StageConfig
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from capture.profiler.compile import CompileBackend

backend = CompileBackend(
    WorkloadSpec.parse("models/gpt.py:gpt?size=tiny&num_layers=4").load(), target=target
)
if sys.argv[2:] == ["sequence"]:
    asked = (StageChoice(1, 4, "cheap", sequence_parallel=on) for on in (False, True))
    print(json.dumps([write(backend.measure(StageConfig(2, 3, choice, 8))) for choice in asked]))
    sys.exit()
if sys.argv[-1] == "parts":
    longer = CompileBackend(
        WorkloadSpec.parse("models/gpt.py:gpt?size=tiny&num_layers=6").load(), target=target
    )
    choices = [
        StageChoice(dp, tp, remat, True, True, sequence)
        for dp, tp, sequence in ((4, 1, False), (2, 2, False), (2, 2, True))
        for remat in ("cheap", "full")
    ]
    if sys.argv[2] != "all":
        choices = [choices[0], choices[-1]]
    costs = [
        [longer.measure(StageConfig(1, stop, choice, 4 * choice.data_parallel)) for stop in (3, 5)]
        for choice in choices
    ]
    print(json.dumps([[write(cost) for cost in pair] for pair in costs]))
    sys.exit()
graph = backend.traced(8).graph
rows = {}
choices = {"one": StageChoice(1, 1), "split": StageChoice(2, 2)}
if target.platform == "cuda":
    choices["replicas"] = StageChoice(4, 1)
configs = {name: StageConfig(2, 3, choice, 8) for name, choice in choices.items()}
for name, config in configs.items():
    rows[name] = write(backend.measure(config))
buffers = write(backend.measure_buffers(StageConfig(0, 2, StageChoice(2, 1), 8)))
cost = write(backend.measure(StageConfig(0, 2, StageChoice(2, 1), 8)))
print(
    json.dumps(
        {
            "flops": graph.layers[2].flops,
            "rows": rows,
            "provenance": backend.provenance,
            "buffers": buffers,
            "cost": cost,
        }
    )
)
