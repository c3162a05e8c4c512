"""Tensors become a model's parameters, in the engines that people run."""

from headrace.engines.loading import load_model

__all__ = ["load_model"]
