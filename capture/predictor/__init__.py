"""Predicted peak memory of any plan, from measured statistics; framework-free."""

from capture.predictor.additive import AdditivePredictor
from capture.predictor.formula import StageMemory, peak_of, peak_parts
from capture.predictor.prediction import Prediction, StagePrediction

__all__ = ["AdditivePredictor", "Prediction", "StageMemory", "StagePrediction", "peak_of", "peak_parts"]
