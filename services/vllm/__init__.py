"""The engine on vLLM: its worker and model runner compute steps over Baton's pages.

vLLM's scheduler, block pool, connectors and sampler are not used. Inside this package `import vllm` means the
third-party package.
"""
