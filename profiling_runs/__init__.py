"""The jobs that collect profiles: what is asked, what to run for it, where to run it."""

from profiling_runs.collect import profile
from profiling_runs.pools.where import Where
from profiling_runs.question import ProfileQuestion

__all__ = ["ProfileQuestion", "Where", "profile"]
