"""Conversion of a GGUF file to a model directory, in a process of its own.

`services/models/conversion_cache.py` starts `convert` once for each file. A file with properties that the
transformers library would drop or change is refused by their name. May import `loading.capability_probes`,
and nothing else of the engine's other packages.
"""
