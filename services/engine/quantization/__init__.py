"""Weights in fewer bits: checkpoints that are quantized, and weights that are quantized when loaded.

`loading` reads quantized checkpoints here as plain numbers, and quantizes weights for `--quantize`. The
compiled step of `execution` multiplies the codes. May import `gguf.gguf_file` alone of the other wings.
"""
