"""Quantized weights: checkpoints that are quantized, and weights that are quantized as they are loaded.

`loading` reads quantized checkpoints here as plain numbers, and quantizes weights for `--quantize`. The
compiled step of `execution` multiplies quantized weights without dequantizing them first. Of the engine's
other packages it may import `gguf.gguf_file` alone.
"""
