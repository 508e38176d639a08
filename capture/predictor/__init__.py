"""Predicted peak memory of any plan, from measured statistics; framework-free."""

from capture.plan.prediction import Prediction, StagePrediction
from capture.predictor.additive import AdditivePredictor
from capture.predictor.formula import StageMemory, peak_parts

__all__ = [
    "AdditivePredictor",
    "Prediction",
    "StageMemory",
    "StagePrediction",
    "peak_parts",
]
