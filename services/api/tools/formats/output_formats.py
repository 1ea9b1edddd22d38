"""Table of the formats in which models write reasoning and tool calls.

A model writes in the format of its chat template, on which it was trained. If the table does not know the
template, the model's type decides. The names of a format are those that other servers take for
`--tool-call-parser` and `--reasoning-parser`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from baton.api.tools.formats import call_syntaxes, json_calls
from baton.api.tools.formats.call_layouts import (
    ARGUMENTS,
    NAME,
    ArgumentLayout,
    CallLayouts,
    JsonCallLayout,
)
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


ID_CHARS: Final = 24
MISTRAL_ID_CHARS: Final = 9


def random_call_id(_: str, __: int, digits: str) -> str:
    """Return a random id for a tool call, in formats whose models write no ids."""
    return f"call_{digits[:ID_CHARS]}"


def _mistral_id(_: str, __: int, digits: str) -> str:
    return digits[:MISTRAL_ID_CHARS]


def _kimi_id(name: str, index: int, _: str) -> str:
    return f"functions.{name}:{index}"


@dataclass(frozen=True, slots=True)
class NamedFormat:
    """A model's format for tool calls or for reasoning: its names in settings, and the texts by which a chat
    template is recognised."""

    names: tuple[str, ...]
    """Names of the format in settings. The first is Baton's own, the others are those of other servers."""
    written: tuple[str, ...]
    """Texts that identify the format: a model whose chat template holds one of them writes it."""
    types: tuple[str, ...]
    """Model types that write the format. They decide if the chat template identifies no format."""
    markup: OutputMarkup
    """Marks of the format, and the parsers of its tool calls."""
    layouts: CallLayouts = None
    """Layout in which a grammar writes the format's tool calls. None if they cannot be constrained."""
    new_call_id: Callable[[str, int, str], str] = random_call_id
    """Function that returns the id of a tool call. It takes the tool's name, the call's index in the answer,
    and 32 hexadecimal digits that were drawn for it."""
    in_messages: bool = False
    """Whether all of an answer is messages with heads (gpt-oss)."""


def _calls(*opens: str, **rest: object) -> TextRegion:
    return TextRegion(RegionKind.CALLS, opens, **rest)  # type: ignore[arg-type]


def _reasoning(opens: str, closes: str, *until: str) -> OutputMarkup:
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
            classify=_harmony_kind,
            read=json_calls.harmony,
        ),
        TextRegion(  # for a prompt that has begun the head
            RegionKind.CONTENT,
            opens=("to=functions.",),
            closes=("<|end|>", "<|call|>", "<|return|>"),
            until=("<|start|>", "<|channel|>"),
            head=HEAD_END,
            classify=_harmony_kind,
            bare=True,
            read=json_calls.harmony,
        ),
    ),
    inner=("<|constrain|>",),
)

DSML_OPENS: Final = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<｜DSML｜ calls>")
"""Opening marks of the tool calls of DeepSeek V3.2, V4 and V4.1."""
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
"""Section marks of Kimi K3's format, around the content of an answer and around the whole answer. They are
left out of the content."""

GEMMA_4: Final = ArgumentLayout(
    "<|tool_call>",
    before="call:",
    behind="{",
    key=("", ":"),
    between=",",
    after=("}", "<tool_call|>"),
    text=('<|"|>', '<|"|>'),
)

TOOL_CALL_FORMATS: Final = (
    NamedFormat(
        ("harmony", "openai", "gpt-oss"),
        ("<|channel|>",),
        ("gpt_oss",),
        HARMONY,
        JsonCallLayout(
            (
                *("<|channel|>", "commentary to=functions.", NAME, " ", "<|constrain|>", "json"),
                *("<|message|>", ARGUMENTS),
            ),
            in_messages=True,
        ),
        in_messages=True,
    ),
    NamedFormat(
        ("mistral",),
        ("[TOOL_CALLS]",),
        ("mistral", "mistral3", "mixtral", "ministral"),
        OutputMarkup(
            (_calls("[TOOL_CALLS]", until=("[TOOL_CALLS]",), read=json_calls.mistral),),
            inner=("[ARGS]", "[CALL_ID]"),
        ),
        JsonCallLayout(("[TOOL_CALLS]", NAME, "[ARGS]", ARGUMENTS)),
        _mistral_id,
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
        JsonCallLayout(
            ("<｜tool▁call▁begin｜>", NAME, json_calls.DEEPSEEK_SEP, ARGUMENTS, "<｜tool▁call▁end｜>")
        ),
    ),
    NamedFormat(
        ("invoke", "deepseek_v32", "deepseek_v4", "deepseek_v41", "minimax_m2", "minimax-m2"),
        ("<minimax:tool_call>", *DSML_OPENS),
        ("deepseek_v32", "deepseek_v4", "deepseek_v41", "minimax_m2"),
        OutputMarkup(
            (
                _calls(
                    "<minimax:tool_call>", closes=("</minimax:tool_call>",), syntaxes=call_syntaxes.INVOKED
                ),
                _calls(
                    *DSML_OPENS,
                    closes=tuple(mark.replace("<", "</", 1) for mark in DSML_OPENS),
                    syntaxes=call_syntaxes.DSML,
                ),
            ),
            inner=("｜DSML｜",),
        ),
        (
            ArgumentLayout(
                "<minimax:tool_call>",
                before='\n<invoke name="',
                behind='">\n',
                key=('<parameter name="', '">'),
                ends="\n",
                after=("</invoke>\n", "</minimax:tool_call>"),
                text=("", "</parameter>"),
                quotes=False,
            ),
        ),
    ),
    NamedFormat(
        ("kimi_k3",),
        ("<|open|>",),
        ("kimi_k3",),
        OutputMarkup(
            (
                _calls(
                    "<|open|>tools<|sep|>", closes=("<|close|>tools<|sep|>",), syntaxes=call_syntaxes.KIMI_K3
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
        JsonCallLayout(
            (
                *("<|tool_call_begin|>", "functions.", NAME, ":0"),
                *(json_calls.KIMI_SEP, ARGUMENTS, "<|tool_call_end|>"),
            )
        ),
        _kimi_id,
    ),
    NamedFormat(
        ("gemma", "gemma4", "functiongemma"),
        ("<|tool_call>", "<start_function_call>"),
        ("gemma4", "gemma4_text"),
        OutputMarkup(
            (
                _calls("<|tool_call>", closes=("<tool_call|>",), syntaxes=(GEMMA_SYNTAX,)),
                _calls("<start_function_call>", closes=("<end_function_call>",), syntaxes=(GEMMA_SYNTAX,)),
            ),
            inner=('<|"|>', "<escape>"),
        ),
        (
            GEMMA_4,
            replace(
                GEMMA_4,
                mark="<start_function_call>",
                after=("}", "<end_function_call>"),
                text=("<escape>", "<escape>"),
            ),
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
                    syntaxes=call_syntaxes.TAGGED,
                ),
                _calls("<function=", closes=("</function>",), in_body=True, syntaxes=call_syntaxes.BARE),
            )
        ),
        JsonCallLayout(
            ("<tool_call>", '\n{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}\n", "</tool_call>")
        ),
    ),
    NamedFormat(
        ("pythonic", "llama4_pythonic"),
        (),
        ("llama4", "llama4_text"),
        OutputMarkup(
            (
                _calls("<|python_start|>", closes=("<|python_end|>",), syntaxes=call_syntaxes.PYTHONIC),
                _calls("[", bare=True, read=json_calls.pythonic),
            )
        ),
        (
            ArgumentLayout(
                "[", before="", behind="(", key=("", "="), between=", ", after=(")",), list_end="]"
            ),
        ),
    ),
    NamedFormat(
        ("llama3", "llama3_json", "llama4_json"),
        ("<|python_tag|>",),
        ("llama", "mllama_text_model"),
        OutputMarkup(
            (_calls("<|python_tag|>", read=json_calls.bare), _calls("{", bare=True, read=json_calls.bare))
        ),
        JsonCallLayout(('{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}"), is_unmarked=True),
    ),
)
"""Formats of tool calls. A chat template is searched for them in this order, those with rare marks first."""

REASONING_FORMATS: Final = (
    NamedFormat(
        ("harmony", "openai_gptoss", "gpt-oss"), ("<|channel|>",), ("gpt_oss",), HARMONY, in_messages=True
    ),
    NamedFormat(
        ("gemma", "gemma4"), ("<|channel>",), ("gemma4",), _reasoning("<|channel>thought", "<channel|>")
    ),
    NamedFormat(
        ("mistral",),
        ("[THINK]",),
        (),
        _reasoning("[THINK]", "[/THINK]") | _reasoning("<think>", "</think>"),
    ),
    NamedFormat(
        ("kimi_k3",),
        ("<|open|>think<|sep|>", "<|open|>"),
        ("kimi_k3",),
        _reasoning("<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|open|>response<|sep|>")
        | OutputMarkup(sections=KIMI_K3_SECTIONS, inner=("<|open|>", "<|close|>", "<|sep|>")),
    ),
    NamedFormat(
        ("seed", "seed_oss"), ("<seed:think>",), ("seed_oss",), _reasoning("<seed:think>", "</seed:think>")
    ),
    NamedFormat(
        ("think", "deepseek_r1", "deepseek-r1", "deepseek_v3", "qwen3", "glm45", "minimax_m2", "step3"),
        ("<think>", "</think>"),
        ("qwen3", "qwen3_moe", "qwen3_next", "glm4_moe"),
        _reasoning("<think>", "</think>"),
    ),
)


def format_names(formats: Sequence[NamedFormat]) -> tuple[str, ...]:
    """Return all names under which a setting may choose one of these formats."""
    return tuple(name for each in formats for name in each.names)


def find_format(name: str, formats: Sequence[NamedFormat]) -> NamedFormat | None:
    return next((each for each in formats if name in each.names), None)


def detect_format(template: str, model_type: str, formats: Sequence[NamedFormat]) -> NamedFormat | None:
    """Return the format that the chat template writes, or else that of the model's type, or None."""
    for each in formats:
        if any(mark in template for mark in each.written):
            return each
    return next((each for each in formats if model_type in each.types), None)
