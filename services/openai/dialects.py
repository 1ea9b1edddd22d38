"""How does each kind of model mark its thoughts and its calls?

As its chat template writes them, which it was trained on; else as models of its type do. The names are those
that other servers know (`--tool-call-parser`, `--reasoning-parser`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from services.openai import call_forms
from services.openai.speech import Dialect, RegionKind, TextRegion

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


def _thoughts(opens: str, closes: str) -> Dialect:
    return Dialect((TextRegion(RegionKind.THOUGHT, (opens,), (closes,)),))


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
            head="<|message|>",
            sort=_harmony_kind,
            read=call_forms.harmony,
        ),
    ),
    inner=("<|constrain|>",),
)

CALL_FORMS: Final = (
    Form(("harmony", "openai", "gpt-oss"), ("<|channel|>",), ("gpt_oss",), HARMONY),
    Form(
        ("mistral",),
        ("[TOOL_CALLS]",),
        ("mistral", "mistral3", "mixtral", "ministral"),
        Dialect(
            (_calls("[TOOL_CALLS]", read=call_forms.mistral),), inner=("[ARGS]", "[CALL_ID]", "[TOOL_CALLS]")
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
            drops=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            inner=(call_forms.DEEPSEEK_SEP,),
        ),
    ),
    Form(
        ("invoke", "deepseek_v32", "minimax_m2", "minimax-m2"),
        ("<minimax:tool_call>", "<｜DSML｜function_calls>"),
        ("deepseek_v32", "minimax_m2"),
        Dialect(
            (
                _calls("<minimax:tool_call>", closes=("</minimax:tool_call>",), read=call_forms.invoked),
                _calls(
                    "<｜DSML｜function_calls>", closes=("</｜DSML｜function_calls>",), read=call_forms.invoked
                ),
            ),
            inner=("｜DSML｜",),
        ),
    ),
    Form(
        ("kimi", "kimi_k2"),
        ("<|tool_call_begin|>",),
        ("kimi_k2",),
        Dialect(
            (_calls("<|tool_call_begin|>", closes=("<|tool_call_end|>",), read=call_forms.kimi),),
            drops=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            inner=(call_forms.KIMI_SEP,),
        ),
    ),
    Form(
        ("gemma", "gemma4", "functiongemma"),
        ("<|tool_call>", "<start_function_call>"),
        ("gemma4", "gemma4_text"),
        Dialect(
            (
                _calls("<|tool_call>", closes=("<tool_call|>",), read=call_forms.gemma),
                _calls("<start_function_call>", closes=("<end_function_call>",), read=call_forms.gemma),
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
                    read=call_forms.tagged,
                    whole=call_forms.ends_itself,
                ),
            )
        ),
    ),
    Form(
        ("pythonic", "llama4_pythonic"),
        (),
        ("llama4", "llama4_text"),
        Dialect(
            (
                _calls("<|python_start|>", closes=("<|python_end|>",), read=call_forms.pythonic),
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
    Form(("mistral",), ("[THINK]",), (), _thoughts("[THINK]", "[/THINK]")),
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
