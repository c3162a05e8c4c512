"""Tensors become a model's parameters, in the engines that people run."""

from headrace.engines.loading import load_model, register_quantizers

__all__ = ["load_model", "register_quantizers"]
