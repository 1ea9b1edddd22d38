"""The language model inside a multimodal model.

A `…ForConditionalGeneration` model holds a language model beside encoders of images or sound. It is served as
its language model, and everything else is dropped once it is loaded.
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
"""Classes that make a definition, by the kinds of configuration they know. The first match is used."""


def text_of(config: Any) -> Any:
    """Return the language model's part of `config`, all of it in a text model."""
    return config.get_text_config()


def is_container(config: Any) -> bool:
    return text_of(config) is not config


def maker_of(config: Any) -> Any:
    """Return the library's class that loads a definition of `config`. None if it has none that draws text."""
    return next((maker for known, maker in MAKERS if type(config) in known), None)


def attention_of(config: Any, *, ours: bool = True) -> str | dict[str, str] | None:
    """Return the attention names for a definition of `config`: ours, for its text. None for its own
    attention."""
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
    """Return the part of `module` that holds the layers of its text, with its path. `name`: of the model.

    Raises UnsupportedModel.
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
    """Drop everything of a multimodal model but its language model. `name`: of the model. Raises
    UnsupportedModel."""
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
