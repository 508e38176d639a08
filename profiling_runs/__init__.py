"""The jobs that collect profiles: what to run, where to run it."""

from profiling_runs.profile import profile
from profiling_runs.where import Where

__all__ = ["Where", "profile"]
