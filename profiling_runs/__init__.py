"""The jobs that collect profiles: what is asked, what to run for it, where to run it."""

from profiling_runs.collect import profile
from profiling_runs.layer_question import LayersQuestion
from profiling_runs.layers import profile_layers
from profiling_runs.pools.where import Where
from profiling_runs.question import ProfileQuestion

__all__ = ["LayersQuestion", "ProfileQuestion", "Where", "profile", "profile_layers"]
