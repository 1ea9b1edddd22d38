"""Import of all that an engine on vLLM needs, with its environment set, before workers are forked."""

from importlib import import_module

from baton.vllm.environment import prepare_environment

prepare_environment()
import_module("baton.vllm.loading")
