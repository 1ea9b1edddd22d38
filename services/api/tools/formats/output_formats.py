"""How does each kind of model mark its thoughts and its calls?

As its chat template writes them, which it was trained on; else as models of its type do. The names are those
that other servers know (`--tool-call-parser`, `--reasoning-parser`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.api.tools.formats import call_syntaxes, json_calls
from baton.api.tools.formats.gemma_calls import GEMMA_SYNTAX
from baton.api.tools.formats.harmony_headers import HEAD_END, head_begins
from baton.api.tools.parsing.output_markup import (
    OutputMarkup,
    Previous,
    RegionKind,
    SectionMark,
    TextRegion,
    section_marks,
)

NONE: Final = "none"
AUTO: Final = "auto"
HERMES: Final = "hermes"


@dataclass(frozen=True, slots=True)
class NamedFormat:
    """One way of marking calls, or thoughts."""

    names: tuple[str, ...]
    """The first is its own, the others are other servers'."""
    written: tuple[str, ...]
    """A chat template that holds one of these writes it."""
    types: tuple[str, ...]
    """Of models."""
    markup: OutputMarkup


def _calls(*opens: str, **rest: object) -> TextRegion:
    return TextRegion(RegionKind.CALLS, opens, **rest)  # type: ignore[arg-type]


def _thoughts(opens: str, closes: str, *until: str) -> OutputMarkup:
    return OutputMarkup((TextRegion(RegionKind.REASONING, (opens,), (closes,), until),))


def _harmony_kind(head: str) -> RegionKind:
    if json_calls.RECIPIENT.search(head):
        return RegionKind.CALLS
    return RegionKind.REASONING if "analysis" in head else RegionKind.CONTENT


HARMONY: Final = OutputMarkup(
    (
        TextRegion(
            RegionKind.CONTENT,
            opens=("<|start|>", "<|channel|>"),
            closes=("<|end|>", "<|call|>", "<|return|>"),
            until=("<|start|>", "<|channel|>"),
            head=HEAD_END,
            head_begins=head_begins,
            sort=_harmony_kind,
            read=json_calls.harmony,
        ),
        TextRegion(  # the prompt has begun the head
            RegionKind.CONTENT,
            opens=("to=functions.",),
            closes=("<|end|>", "<|call|>", "<|return|>"),
            until=("<|start|>", "<|channel|>"),
            head=HEAD_END,
            sort=_harmony_kind,
            bare=True,
            read=json_calls.harmony,
        ),
    ),
    inner=("<|constrain|>",),
)

DSML_OPENS: Final = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<｜DSML｜ calls>")
"""DeepSeek's from V3.2, V4 and V4.1 on."""
KIMI_K3_SECTIONS: Final = (
    *(
        SectionMark(text, frozenset({Previous.START, Previous.REASONING, Previous.CALL}))
        for text in ('<|open|>message role="assistant"<|sep|>', "<|open|>response<|sep|>")
    ),
    *(
        SectionMark(text, frozenset(Previous) - {Previous.CONTENT}, before_calls=True, at_end=True)
        for text in ("<|close|>response<|sep|>", "<|close|>message<|sep|>")
    ),
)
"""Marks around the content of an answer, and around all of it."""

TOOL_CALL_FORMATS: Final = (
    NamedFormat(("harmony", "openai", "gpt-oss"), ("<|channel|>",), ("gpt_oss",), HARMONY),
    NamedFormat(
        ("mistral",),
        ("[TOOL_CALLS]",),
        ("mistral", "mistral3", "mixtral", "ministral"),
        OutputMarkup(
            (_calls("[TOOL_CALLS]", until=("[TOOL_CALLS]",), read=json_calls.mistral),),
            inner=("[ARGS]", "[CALL_ID]"),
        ),
    ),
    NamedFormat(
        ("deepseek", "deepseek_v3", "deepseek_v31", "deepseekv3", "deepseekv31"),
        ("<｜tool▁call▁begin｜>",),
        ("deepseek_v3",),
        OutputMarkup(
            (
                _calls(
                    "<｜tool▁call▁begin｜>",
                    closes=("<｜tool▁call▁end｜>",),
                    until=("<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"),
                    read=json_calls.deepseek,
                ),
            ),
            sections=section_marks("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            inner=(json_calls.DEEPSEEK_SEP,),
        ),
    ),
    NamedFormat(
        ("invoke", "deepseek_v32", "deepseek_v4", "deepseek_v41", "minimax_m2", "minimax-m2"),
        ("<minimax:tool_call>", *DSML_OPENS),
        ("deepseek_v32", "deepseek_v4", "deepseek_v41", "minimax_m2"),
        OutputMarkup(
            (
                _calls("<minimax:tool_call>", closes=("</minimax:tool_call>",), bodies=call_syntaxes.INVOKED),
                _calls(
                    *DSML_OPENS,
                    closes=tuple(mark.replace("<", "</", 1) for mark in DSML_OPENS),
                    bodies=call_syntaxes.DSML,
                ),
            ),
            inner=("｜DSML｜",),
        ),
    ),
    NamedFormat(
        ("kimi_k3",),
        ("<|open|>",),
        ("kimi_k3",),
        OutputMarkup(
            (
                _calls(
                    "<|open|>tools<|sep|>", closes=("<|close|>tools<|sep|>",), bodies=call_syntaxes.KIMI_K3
                ),
            ),
            sections=KIMI_K3_SECTIONS,
            inner=("<|open|>", "<|close|>", "<|sep|>"),
        ),
    ),
    NamedFormat(
        ("kimi", "kimi_k2"),
        ("<|tool_call_begin|>",),
        ("kimi_k2",),
        OutputMarkup(
            (_calls("<|tool_call_begin|>", closes=("<|tool_call_end|>",), read=json_calls.kimi),),
            sections=section_marks("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            inner=(json_calls.KIMI_SEP,),
        ),
    ),
    NamedFormat(
        ("gemma", "gemma4", "functiongemma"),
        ("<|tool_call>", "<start_function_call>"),
        ("gemma4", "gemma4_text"),
        OutputMarkup(
            (
                _calls("<|tool_call>", closes=("<tool_call|>",), bodies=(GEMMA_SYNTAX,)),
                _calls("<start_function_call>", closes=("<end_function_call>",), bodies=(GEMMA_SYNTAX,)),
            ),
            inner=('<|"|>', "<escape>"),
        ),
    ),
    NamedFormat(
        (HERMES, "qwen", "qwen25", "qwen3_coder", "qwen3_xml", "glm45", "glm47"),
        ("<tool_call>",),
        ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "glm4_moe", "glm4_moe_lite"),
        OutputMarkup(
            (
                _calls(
                    "<tool_call>",
                    closes=("</tool_call>",),
                    read=json_calls.objects,
                    bodies=call_syntaxes.TAGGED,
                ),
                _calls("<function=", closes=("</function>",), in_body=True, bodies=call_syntaxes.BARE),
            )
        ),
    ),
    NamedFormat(
        ("pythonic", "llama4_pythonic"),
        (),
        ("llama4", "llama4_text"),
        OutputMarkup(
            (
                _calls("<|python_start|>", closes=("<|python_end|>",), bodies=call_syntaxes.PYTHONIC),
                _calls("[", bare=True, read=json_calls.pythonic),
            )
        ),
    ),
    NamedFormat(
        ("llama3", "llama3_json", "llama4_json"),
        ("<|python_tag|>",),
        ("llama", "mllama_text_model"),
        OutputMarkup(
            (_calls("<|python_tag|>", read=json_calls.bare), _calls("{", bare=True, read=json_calls.bare))
        ),
    ),
)
"""In the order in which a template is searched: the more telling marks first."""

REASONING_FORMATS: Final = (
    NamedFormat(("harmony", "openai_gptoss", "gpt-oss"), ("<|channel|>",), ("gpt_oss",), HARMONY),
    NamedFormat(
        ("gemma", "gemma4"), ("<|channel>",), ("gemma4",), _thoughts("<|channel>thought", "<channel|>")
    ),
    NamedFormat(
        ("mistral",),
        ("[THINK]",),
        (),
        _thoughts("[THINK]", "[/THINK]") | _thoughts("<think>", "</think>"),
    ),
    NamedFormat(
        ("kimi_k3",),
        ("<|open|>think<|sep|>", "<|open|>"),
        ("kimi_k3",),
        _thoughts("<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|open|>response<|sep|>")
        | OutputMarkup(sections=KIMI_K3_SECTIONS, inner=("<|open|>", "<|close|>", "<|sep|>")),
    ),
    NamedFormat(
        ("seed", "seed_oss"), ("<seed:think>",), ("seed_oss",), _thoughts("<seed:think>", "</seed:think>")
    ),
    NamedFormat(
        ("think", "deepseek_r1", "deepseek-r1", "deepseek_v3", "qwen3", "glm45", "minimax_m2", "step3"),
        ("<think>", "</think>"),
        ("qwen3", "qwen3_moe", "qwen3_next", "glm4_moe"),
        _thoughts("<think>", "</think>"),
    ),
)


def format_names(forms: Sequence[NamedFormat]) -> tuple[str, ...]:
    """All that a setting may say."""
    return tuple(name for form in forms for name in form.names)


def find_format(name: str, forms: Sequence[NamedFormat]) -> NamedFormat | None:
    return next((form for form in forms if name in form.names), None)


def detect_format(template: str, model_type: str, forms: Sequence[NamedFormat]) -> NamedFormat | None:
    """By what the chat template writes; else by the model's type."""
    for form in forms:
        if any(mark in template for mark in form.written):
            return form
    return next((form for form in forms if model_type in form.types), None)
