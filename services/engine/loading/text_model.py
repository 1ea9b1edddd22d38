"""Which part of a model that reads more than text is its text?

A `…ForConditionalGeneration` model holds a language model beside towers for images or sound. It is served as
its text: the language model is judged and computed, and what it has beside is let go once it is loaded.
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
"""What makes a definition, of which kinds of configurations: the first that knows one."""


def text_of(config: Any) -> Any:
    """The part of `config` that is the language model's: all of it, where there is no other."""
    return config.get_text_config()


def is_container(config: Any) -> bool:
    return text_of(config) is not config


def maker_of(config: Any) -> Any:
    """The library's class that loads a definition of `config`; None where it has none that draws text."""
    return next((maker for known, maker in MAKERS if type(config) in known), None)


def attention_of(config: Any, *, ours: bool = True) -> str | dict[str, str] | None:
    """The names of attentions that a definition of `config` is made with: ours, for text. None where it is to
    have its own."""
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
    """The part of the definition `module` of the model `name` that holds the layers of its text, and by which
    path. Raises UnsupportedModel."""
    prefix = module.base_model_prefix
    if not is_container(module.config) and hasattr(module, prefix):
        return prefix, getattr(module, prefix)
    kind = type(text_of(module.config))
    for path, child in module.named_modules():
        if path and isinstance(getattr(child, "config", None), kind) and hasattr(child, "layers"):
            return path, child
    need = "a language model of its own, which its definition does not hold"
    raise UnsupportedModel.needing(name, module.config.model_type, [need])


def let_go(name: str, module: Any) -> None:
    """Leave of a container, the model `name`, what computes text: the language model, and what it is reached
    by. Raises UnsupportedModel."""
    if not is_container(module.config):
        return
    path, _ = base_of(name, module)
    steps = path.split(".")
    kept = {".".join(steps[:count]) for count in range(len(steps))}
    head = module.get_output_embeddings()
    for parent in kept:
        holder = module.get_submodule(parent)
        for part, child in list(holder.named_children()):
            whole = f"{parent}.{part}" if parent else part
            if whole != path and whole not in kept and child is not head and _has_weights(child):
                setattr(holder, part, None)


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
