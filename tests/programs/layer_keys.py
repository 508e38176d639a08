"""The key of the middle layer of models, one a line: ``layer_keys.py FILE...``."""

import sys

from capture.model.workload import WorkloadSpec
from capture.tracing import trace

for file in sys.argv[1:]:
    print(trace(WorkloadSpec.parse(f"{file}:model").load(), 4).slice(1, 2).key)
