"""Alpa as the paper CAPTURE compares itself with it: its search on our cost model (``autostage``),
and profiling runs in real Alpa (``backend``), each a process of its own Python (``worker``).

Source: Zheng et al. 2022 (Alpa); READINGS.md, CAPTURE.
"""
