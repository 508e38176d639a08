"""The jobs that collect profiles: what to run, where to run it."""

from profiling_runs.collect import profile
from profiling_runs.pools.where import Where

__all__ = ["Where", "profile"]
