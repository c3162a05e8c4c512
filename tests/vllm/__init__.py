"""Tests in vLLM's own environment (``make test-vllm``): the plug-in, the loader, and engines that run on the CPU."""
