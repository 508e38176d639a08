"""Training with parameters that are sharded operator by operator: ``shard``."""

from capture.runtime.sharded.training import Sharded, shard

__all__ = ["Sharded", "shard"]
