"""Fields of the Responses API that are ignored or refused by name."""

from collections.abc import Mapping
from typing import Any, Final

from baton.api.requests.schemas import ChatRequest
from baton.api.requests.unsupported_fields import OPENAI_UNSUPPORTED, UnsupportedFields

IGNORED: Final = frozenset(
    ("client_metadata", "guided_decoding_backend", "prompt_cache_options", "prompt_cache_retention")
)
"""Ignored fields, which concern the platform around a model."""
HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "extra_body": ({},),
    "moderation": (),
    "n": (1,),
    "prompt": (),
}
"""Fields that are not served, with the values that ask for nothing else than the default."""
_OF_A_BODY: Final = {
    *("access_programs", "background_options", "enable_response_messages", "image"),
    *("previous_input_messages", *ChatRequest.model_fields, *OPENAI_UNSUPPORTED.harmless),
}
KNOWN: Final[Mapping[str, frozenset[str]]] = {
    "": OPENAI_UNSUPPORTED.known[""] | _OF_A_BODY,
    "input.[]": frozenset({"async", "caller", "cache_control", "tool_calls", "tool_call_id"}),
    "tools.[]": frozenset({"async", "function", "cache_control", "format"}),
    "tools.[].tools.[]": frozenset({"async", "function", "format"}),
}
"""Fields of this and other APIs that are refused as known, by the path of their object."""
INSTEAD: Final[Mapping[str, str]] = {
    "max_completion_tokens": "max_output_tokens",
    "max_new_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "min_new_tokens": "min_tokens",
    "random_seed": "seed",
    "reasoning_effort": "reasoning.effort",
    "repeat_penalty": "repetition_penalty",
    "response_format": "text.format",
    "sampling_seed": "seed",
    "stop_sequences": "stop",
    "system": "instructions",
    "verbosity": "text.verbosity",
}
"""Field that means the same here."""
RESPONSES_UNSUPPORTED: Final = UnsupportedFields(IGNORED, HARMLESS, KNOWN, INSTEAD)
