"""Hashes of traced models, of their layers and of a stage, one model a line: ``model_keys.py
NAME...``."""

import sys

from traced_models import traced

for name in sys.argv[1:]:
    m = traced(name)
    print(m.graph.model_hash, *[layer.key for layer in m.graph.layers], m.slice(1, 3).key)
