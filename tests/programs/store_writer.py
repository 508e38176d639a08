"""Puts measurements into a store, and says so: ``store_writer.py STORE NAME COUNT``."""

import sys
from pathlib import Path

from capture.measured.store import Store

store = Store(Path(sys.argv[1]))
for i in range(int(sys.argv[3])):
    store.put(f"{sys.argv[2]} {i}", i, provenance={}, seconds=0.0)
    print(i, flush=True)
