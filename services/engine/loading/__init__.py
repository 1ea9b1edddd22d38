"""From a model directory to an engine: configuration, weights, checks, and the choice of a runner.

`engine_startup` calls `engine_loading.load_engine`, which loads the library's definition of the model, checks
what its attention needs, lets `runner_selection` verify faster ways to compute, and builds the engine. May
import every other wing.
"""
