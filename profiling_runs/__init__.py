"""The jobs that collect profiles: what to run, where to run it."""

from profiling_runs.profile import profile

__all__ = ["profile"]
