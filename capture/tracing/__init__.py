"""From any JAX loss to a ``LayerGraph`` and executable slices of it."""

from capture.tracing.flatten import LAYER_BOUNDARY
from capture.tracing.model import TracedModel, trace
from capture.tracing.slices import StageSlice

__all__ = ["LAYER_BOUNDARY", "StageSlice", "TracedModel", "trace"]
