"""Access to the language model inside a multimodal model.

A `…ForConditionalGeneration` model contains a language model and encoders of images or sound. Only its
language model is served, and everything else is dropped once it is loaded.
"""

from typing import Any, Final

from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from baton.engine.execution.attention_span import ATTENTION_NAME
from baton.models.model_facts import UnsupportedModel

MAKERS: Final = (
    (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
    (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
)
"""Pairs of a table of configuration classes and the transformers class that loads models of these. The first
match is used."""


def text_of(config: Any) -> Any:
    """Return the language model's part of `config`, which is all of it in a text model."""
    return config.get_text_config()


def is_container(config: Any) -> bool:
    return text_of(config) is not config


def maker_of(config: Any) -> Any:
    """Return the class of transformers that loads a model of `config`, or None if none generates text."""
    return next((maker for known, maker in MAKERS if type(config) in known), None)


def attention_of(config: Any, *, ours: bool = True) -> str | dict[str, str] | None:
    """Return the setting by which transformers chooses the attention of an implementation of `config`.

    It is the name of our attention function, or for a multimodal model a dictionary that gives the name to
    its text part alone. If `ours` is false it is None, for the implementation's own attention.
    """
    if not ours:
        return None
    if not is_container(config):
        return ATTENTION_NAME
    text = text_of(config)
    return {
        "": ATTENTION_NAME,
        **{key: ATTENTION_NAME for key in config.sub_configs if getattr(config, key, None) is text},
    }


def base_of(name: str, module: Any) -> tuple[str, Any]:
    """Return the path and the module of the part of `module` that contains the language model's layers.

    `name`: name of the model. Raises UnsupportedModel.
    """
    prefix = module.base_model_prefix
    if not is_container(module.config) and hasattr(module, prefix):
        return prefix, getattr(module, prefix)
    kind = type(text_of(module.config))
    for path, child in module.named_modules():
        if path and isinstance(getattr(child, "config", None), kind) and hasattr(child, "layers"):
            return path, child
    need = "a language model of its own, which its definition does not hold"
    raise UnsupportedModel.needing(name, module.config.model_type, [need])


def drop_encoders(name: str, module: Any) -> None:
    """Drop all parts of a multimodal model except its language model. `name`: name of the model.

    Raises UnsupportedModel if it contains none.
    """
    if not is_container(module.config):
        return
    path, _ = base_of(name, module)
    steps = path.split(".")
    parents = {".".join(steps[:count]) for count in range(len(steps))}
    head = module.get_output_embeddings()
    for parent in parents:
        holder = module.get_submodule(parent)
        for part, child in list(holder.named_children()):
            whole = f"{parent}.{part}" if parent else part
            if whole != path and whole not in parents and child is not head and _has_weights(child):
                setattr(holder, part, None)


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
