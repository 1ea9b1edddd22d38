"""Request fields that are ignored, and known request fields that are refused.

A field is ignored only if the client would miss nothing in the answer. A field that would change the answer
and is not supported is refused by name, unless its value asks for the default.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from baton.api.errors import ApiError, invalid

IGNORED: Final = frozenset(
    (
        "guided_decoding_backend",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    )
)
"""Ignored fields of OpenAI's bodies. They concern the platform around a model, or the library that compiles
constraints."""

HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "cache_prompt": (True,),
    "custom_params": ({},),
    "details": (False,),
    "do_sample": (True,),
    "early_stopping": (False,),
    "extra_body": ({},),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "kv_transfer_params": ({},),
    "length_penalty": (1, 1.0, 0, 0.0),
    "logits_processors": ([],),
    "mirostat": (0,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "no_stop_trim": (False,),
    "prediction": (),
    "return_full_text": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "safe_prompt": (False,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "typical_p": (1, 1.0),
    "tfs_z": (1, 1.0),
    "use_beam_search": (False,),
    "verbosity": (),
    "vllm_xargs": ({},),
    "watermark": (False,),
    "web_search_options": (),
}
"""Fields that are not supported, with the values that are accepted because they ask for the default."""


_OF_A_BODY: Final = """
    bootstrap_host bootstrap_port bootstrap_room custom_labels custom_logit_processor
    data_parallel_rank decoder_input_details disagg_prefill_dp_rank dry_allowed_length dry_base
    dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range
    ec_transfer_params enable_thinking extra_key format grammar id_slot images_config input
    input_ids instructions keep_alive logprob_start_len lora_path max_new_tokens max_output_tokens
    media_io_kwargs min_keep min_new_tokens mirostat_eta mirostat_tau models n_keep n_predict
    n_probs ngram_corpus_id options plugins previous_response_id prompt_embeds provider random_seed
    repeat_last_n repeat_penalty repetition_context_size repetition_detection
    response_format_schema return_cached_tokens_details return_logprob return_prompt_text
    return_prompt_token_ids return_text_in_logprobs route routed_dp_rank routed_experts_start_len
    samplers sampling_params sampling_seed session_id session_params stop_regex stop_sequences
    structural_tag system template text think thinking thinking_budget thinking_token_budget
    token_ids_logprob top_a top_logprobs_num top_n_sigma top_n_tokens transforms truncate truncation
    watermarking xtc_probability xtc_threshold
"""
_OF_A_MESSAGE: Final = """
    cache_control images partial prefix reasoning_details thinking
    thinking_blocks tool_name tools
"""
_OF_STRUCTURED_OUTPUTS: Final = "backend structural_tag"
NOT_SERVED: Final[Mapping[str, frozenset[str]]] = {
    "": frozenset(_OF_A_BODY.split()),
    "messages.[]": frozenset(_OF_A_MESSAGE.split()),
    "reasoning": frozenset({"max_tokens"}),
    "response_format": frozenset({"structural_tag", "structures", "triggers"}),
    "structured_outputs": frozenset(_OF_STRUCTURED_OUTPUTS.split()),
}
"""Known fields of OpenAI's other routes and of other servers (vLLM, SGLang, llama.cpp, Ollama, TGI and hosted
ones), by path of their object, as in `validation_errors`. The error for such a field says that it is not
supported, not that it is unknown."""
INSTEAD: Final[Mapping[str, str]] = {
    "extra_key": "cache_salt",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "random_seed": "seed",
    "return_prompt_token_ids": "return_token_ids",
    "logprob_start_len": "prompt_logprobs",
    "return_logprob": "logprobs",
    "token_ids_logprob": "logprob_token_ids",
    "top_logprobs_num": "top_logprobs",
    "repeat_penalty": "repetition_penalty",
    "sampling_seed": "seed",
    "stop_sequences": "stop",
}
"""Supported request field to use instead, by name of an unsupported field. Error messages suggest it."""


@dataclass(frozen=True, slots=True)
class UnsupportedFields:
    """Request fields that one API's bodies may have and that Baton ignores or refuses. The defaults of this
    class hold none."""

    ignored: frozenset[str] = frozenset()
    harmless: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    known: Mapping[str, frozenset[str]] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)

    def without_ignored(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return `body` without nulls and without ignored fields. Raises ApiError for a field that is not
        supported."""
        kept: dict[str, Any] = {}
        for name, value in body.items():
            if value is None or name in self.ignored:
                continue
            if name not in self.harmless:
                kept[name] = value
            elif not any(type(value) is type(each) and value == each for each in self.harmless[name]):
                raise self._refused(name)
        return kept

    def not_supported(self, param: str) -> ApiError:
        """Return the error for a known field that is not supported. It names the field to use instead, if
        there is one."""
        instead = f"; use '{self.instead[param]}'" if param in self.instead else ""
        return invalid(param, f"'{param}' is not supported{instead}.", "unsupported_parameter")

    def _refused(self, name: str) -> ApiError:
        choices = self.harmless[name]
        if not choices:
            return self.not_supported(name)
        allowed = " or ".join(json.dumps(each) for each in choices)
        return invalid(name, f"'{name}' is not supported, except as {allowed}.", "unsupported_value")


OPENAI_UNSUPPORTED: Final = UnsupportedFields(IGNORED, HARMLESS, NOT_SERVED, INSTEAD)
