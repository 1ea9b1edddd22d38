"""How does each kind of model mark its thoughts and its calls?

As its chat template writes them, which it was trained on; else as models of its type do. The names are those
that other servers know (`--tool-call-parser`, `--reasoning-parser`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from baton.openai import call_bodies, call_forms
from baton.openai.gemma_calls import GEMMA_BODY
from baton.openai.harmony_heads import HEAD_END, head_begins
from baton.openai.output_regions import (
    Dialect,
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
class Form:
    """One way of marking calls, or thoughts."""

    names: tuple[str, ...]
    """The first is its own, the others are other servers'."""
    written: tuple[str, ...]
    """A chat template that holds one of these writes it."""
    types: tuple[str, ...]
    """Of models."""
    dialect: Dialect


def _calls(*opens: str, **rest: object) -> TextRegion:
    return TextRegion(RegionKind.CALLS, opens, **rest)  # type: ignore[arg-type]


def _thoughts(opens: str, closes: str, *until: str) -> Dialect:
    return Dialect((TextRegion(RegionKind.THOUGHT, (opens,), (closes,), until),))


def _harmony_kind(head: str) -> RegionKind:
    if call_forms.RECIPIENT.search(head):
        return RegionKind.CALLS
    return RegionKind.THOUGHT if "analysis" in head else RegionKind.SAID


HARMONY: Final = Dialect(
    (
        TextRegion(
            RegionKind.SAID,
            opens=("<|start|>", "<|channel|>"),
            closes=("<|end|>", "<|call|>", "<|return|>"),
            until=("<|start|>", "<|channel|>"),
            head=HEAD_END,
            head_begins=head_begins,
            sort=_harmony_kind,
            read=call_forms.harmony,
        ),
        TextRegion(  # the prompt has begun the head
            RegionKind.SAID,
            opens=("to=functions.",),
            closes=("<|end|>", "<|call|>", "<|return|>"),
            until=("<|start|>", "<|channel|>"),
            head=HEAD_END,
            sort=_harmony_kind,
            bare=True,
            read=call_forms.harmony,
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

CALL_FORMS: Final = (
    Form(("harmony", "openai", "gpt-oss"), ("<|channel|>",), ("gpt_oss",), HARMONY),
    Form(
        ("mistral",),
        ("[TOOL_CALLS]",),
        ("mistral", "mistral3", "mixtral", "ministral"),
        Dialect(
            (_calls("[TOOL_CALLS]", until=("[TOOL_CALLS]",), read=call_forms.mistral),),
            inner=("[ARGS]", "[CALL_ID]"),
        ),
    ),
    Form(
        ("deepseek", "deepseek_v3", "deepseek_v31", "deepseekv3", "deepseekv31"),
        ("<｜tool▁call▁begin｜>",),
        ("deepseek_v3",),
        Dialect(
            (
                _calls(
                    "<｜tool▁call▁begin｜>",
                    closes=("<｜tool▁call▁end｜>",),
                    until=("<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>"),
                    read=call_forms.deepseek,
                ),
            ),
            sections=section_marks("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            inner=(call_forms.DEEPSEEK_SEP,),
        ),
    ),
    Form(
        ("invoke", "deepseek_v32", "deepseek_v4", "deepseek_v41", "minimax_m2", "minimax-m2"),
        ("<minimax:tool_call>", *DSML_OPENS),
        ("deepseek_v32", "deepseek_v4", "deepseek_v41", "minimax_m2"),
        Dialect(
            (
                _calls("<minimax:tool_call>", closes=("</minimax:tool_call>",), bodies=call_bodies.INVOKED),
                _calls(
                    *DSML_OPENS,
                    closes=tuple(mark.replace("<", "</", 1) for mark in DSML_OPENS),
                    bodies=call_bodies.DSML,
                ),
            ),
            inner=("｜DSML｜",),
        ),
    ),
    Form(
        ("kimi_k3",),
        ("<|open|>",),
        ("kimi_k3",),
        Dialect(
            (_calls("<|open|>tools<|sep|>", closes=("<|close|>tools<|sep|>",), bodies=call_bodies.KIMI_K3),),
            sections=KIMI_K3_SECTIONS,
            inner=("<|open|>", "<|close|>", "<|sep|>"),
        ),
    ),
    Form(
        ("kimi", "kimi_k2"),
        ("<|tool_call_begin|>",),
        ("kimi_k2",),
        Dialect(
            (_calls("<|tool_call_begin|>", closes=("<|tool_call_end|>",), read=call_forms.kimi),),
            sections=section_marks("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            inner=(call_forms.KIMI_SEP,),
        ),
    ),
    Form(
        ("gemma", "gemma4", "functiongemma"),
        ("<|tool_call>", "<start_function_call>"),
        ("gemma4", "gemma4_text"),
        Dialect(
            (
                _calls("<|tool_call>", closes=("<tool_call|>",), bodies=(GEMMA_BODY,)),
                _calls("<start_function_call>", closes=("<end_function_call>",), bodies=(GEMMA_BODY,)),
            ),
            inner=('<|"|>', "<escape>"),
        ),
    ),
    Form(
        (HERMES, "qwen", "qwen25", "qwen3_coder", "qwen3_xml", "glm45", "glm47"),
        ("<tool_call>",),
        ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "glm4_moe", "glm4_moe_lite"),
        Dialect(
            (
                _calls(
                    "<tool_call>",
                    closes=("</tool_call>",),
                    read=call_forms.objects,
                    bodies=call_bodies.TAGGED,
                ),
                _calls("<function=", closes=("</function>",), in_body=True, bodies=call_bodies.BARE),
            )
        ),
    ),
    Form(
        ("pythonic", "llama4_pythonic"),
        (),
        ("llama4", "llama4_text"),
        Dialect(
            (
                _calls("<|python_start|>", closes=("<|python_end|>",), bodies=call_bodies.PYTHONIC),
                _calls("[", bare=True, read=call_forms.pythonic),
            )
        ),
    ),
    Form(
        ("llama3", "llama3_json", "llama4_json"),
        ("<|python_tag|>",),
        ("llama", "mllama_text_model"),
        Dialect(
            (_calls("<|python_tag|>", read=call_forms.bare), _calls("{", bare=True, read=call_forms.bare))
        ),
    ),
)
"""In the order in which a template is searched: the more telling marks first."""

THOUGHT_FORMS: Final = (
    Form(("harmony", "openai_gptoss", "gpt-oss"), ("<|channel|>",), ("gpt_oss",), HARMONY),
    Form(("gemma", "gemma4"), ("<|channel>",), ("gemma4",), _thoughts("<|channel>thought", "<channel|>")),
    Form(
        ("mistral",),
        ("[THINK]",),
        (),
        _thoughts("[THINK]", "[/THINK]") | _thoughts("<think>", "</think>"),
    ),
    Form(
        ("kimi_k3",),
        ("<|open|>think<|sep|>", "<|open|>"),
        ("kimi_k3",),
        _thoughts("<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|open|>response<|sep|>")
        | Dialect(sections=KIMI_K3_SECTIONS, inner=("<|open|>", "<|close|>", "<|sep|>")),
    ),
    Form(("seed", "seed_oss"), ("<seed:think>",), ("seed_oss",), _thoughts("<seed:think>", "</seed:think>")),
    Form(
        ("think", "deepseek_r1", "deepseek-r1", "deepseek_v3", "qwen3", "glm45", "minimax_m2", "step3"),
        ("<think>", "</think>"),
        ("qwen3", "qwen3_moe", "qwen3_next", "glm4_moe"),
        _thoughts("<think>", "</think>"),
    ),
)


def names_of(forms: Sequence[Form]) -> tuple[str, ...]:
    """All that a setting may say."""
    return tuple(name for form in forms for name in form.names)


def named(name: str, forms: Sequence[Form]) -> Form | None:
    return next((form for form in forms if name in form.names), None)


def form_of(template: str, model_type: str, forms: Sequence[Form]) -> Form | None:
    """By what the chat template writes; else by the model's type."""
    for form in forms:
        if any(mark in template for mark in form.written):
            return form
    return next((form for form in forms if model_type in form.types), None)
