"""The engine on PyTorch: it loads a model, owns its weights and KV pages, and computes steps.

A worker calls `engine_startup`, and from then on knows the engine only by `services/engine_interface.py`.
`loading` makes a model from a directory and chooses how steps run. `quantization` and `gguf` read weights
with fewer bits. `execution` computes logits. The engine may import `inference`, which has the common part of
all engines, and everything below. Only the command line imports the engine.
"""
