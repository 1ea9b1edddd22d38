"""Fields of the Responses API that are ignored, or refused by name."""

from collections.abc import Mapping
from typing import Any, Final

from baton.api.requests.schemas import ChatRequest
from baton.api.requests.unsupported_fields import OPENAI_UNSUPPORTED, UnsupportedFields

IGNORED: Final = frozenset(
    ("client_metadata", "guided_decoding_backend", "prompt_cache_options", "prompt_cache_retention")
)
"""Request fields that Baton accepts and ignores, because they concern the platform around a model."""
HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "extra_body": ({},),
    "moderation": (),
    "n": (1,),
    "prompt": (),
}
"""Request fields that are not supported, with the values that are accepted because they change nothing."""
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
"""Request fields that are refused by name, by path of the object that has them, such as `tools.[]`. They are
fields of the Responses API, or of other APIs."""
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
"""Supported request field to use instead, by name of a field that is refused. Error messages suggest it."""
RESPONSES_UNSUPPORTED: Final = UnsupportedFields(IGNORED, HARMLESS, KNOWN, INSTEAD)
