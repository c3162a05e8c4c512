"""Tests of `headrace.checkpoint`."""
