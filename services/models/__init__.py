"""Files of models and the facts in them: what `--model` names, what it needs, and whether it is served.

Commands and services call `model_files.resolve` first, which refuses a model by its files. Then they call
`prepare`, which converts it once. Nothing here loads weights or the tensor library. It imports only `runtime`
and the core's limits of requests.
"""
