"""Tests in SGLang's own environment (``make test-sglang``): the plug-in, the loader, SGLang's own model classes, and an engine that runs on the CPU."""
