"""Files of models and the facts in them: where a model is, what it needs, and whether it can be served.

Commands and services call `model_files.resolve` first, which refuses a model by its files. Then they call
`prepare`, which converts the model once if it is a GGUF file. Nothing here loads weights or the tensor
library. It imports only `runtime` and the core's limits of requests.
"""
