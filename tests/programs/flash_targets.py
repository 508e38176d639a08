"""A stage with each kind of attention, compiled for a target: ``flash_targets.py TARGET KIND...``."""

import json
import sys

from capture import environment
from capture.machine.target import Target

target = Target.load(sys.argv[1])
environment.prepare(num_devices=4, platform=target.platform)
from capture.errors import CaptureError
from capture.measured.profile import StageConfig
from capture.model.workload import WorkloadSpec
from capture.plan.choices import StageChoice
from capture.profiler.asked import LayerPass
from capture.profiler.compile import CompileBackend
from capture.profiler.layers import LayerBackend

found = {}
for attention in sys.argv[2:]:
    size = "size=tiny&num_layers=2&seq_len=512&dtype=bfloat16"
    workload = WorkloadSpec.parse(f"models/gpt.py:gpt?{size}&attention={attention}").load()
    backend = CompileBackend(workload, target=target)
    try:
        found[attention] = backend.measure(StageConfig(0, 1, StageChoice(2, 2), 4)).to_json()
    except CaptureError as error:
        found[attention] = str(error)
        continue
    found[f"{attention} flops"] = backend.traced(4).graph.layers[0].flops
    layers = LayerBackend(workload, target=target)
    found[f"{attention} layer"] = {
        direction: layers.measure(LayerPass(0, direction, 4)).work.flops
        for direction in ("forward", "backward")
    }
print(json.dumps(found))
