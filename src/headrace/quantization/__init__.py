"""What packed tensors mean. Knows no engine and does no input or output."""

from headrace.quantization.section import QuantizationSection, find_quantization

__all__ = ["QuantizationSection", "find_quantization"]
