"""Rows of ``benchmarks/gpu_truth.py`` for programs of a small model, made on this machine."""

import json

from benchmarks import gpu_truth

gpu_truth.MODELS = {"gpt": ("size=tiny", 4, 2)}
cases = [gpu_truth.Case("gpt", "float32", "full", what) for what in ("forward", "backward", "step")]
print(json.dumps([gpu_truth.in_child(case, "here") for case in cases]))
