"""Loading of an engine from a model directory: configuration, weights, checks, and the choice of a runner.

`engine_startup` calls `engine_loading.load_engine`. That loads the transformers implementation of the model,
and checks what its attention needs. `runner_selection` verifies faster executions and chooses one. May import
every other package of the engine.
"""
