"""The engine on PyTorch: it loads a model, owns its weights and KV pages, and computes steps.

A worker calls `engine_startup`, and from then on knows the engine only by `services/engine_interface.py`.
Its wings: `loading` makes a model from a directory and chooses how steps run, `quantization` and `gguf` read
weights in fewer bits, `execution` computes logits. The engine may import `inference`, which has what engines
share, and everything below; nothing but the command line imports the engine.
"""
