"""How is text split before a GGUF file's byte-level vocabulary is looked up?

A file names the split that its vocabulary was learned with (`tokenizer.ggml.pre`, llama.cpp's names), and the
model library knows some of the names; of any other it keeps GPT-2's split. Text is then cut into other tokens
than the model has seen. What is known here beside the library's is what llama.cpp does by that name.
"""

from typing import Any, Final

BYTE_LEVEL: Final = "gpt2"
"""The kind of vocabulary (`tokenizer.ggml.model`) that has such splits."""
AS_GPT2: Final = frozenset(
    {"gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "mellum", "gigachat", "a.x-4.0", "modern-bert"}
)
"""GPT-2's own, which the library's reader begins with."""
DIGITS_APART: Final = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
"""Every digit by itself, and then as GPT-2."""
OTHER_NAMES: Final = {"stablelm2": "qwen2"}
"""The same split under a name that the library knows."""


def knows_split(name: str | None, architecture: str) -> bool:
    """Whether text is split as the file means it. A file of an old date names none, which is right for GPT-2
    itself."""
    if name is None:
        return architecture == "gpt2"
    return name in AS_GPT2 | DIGITS_APART | OTHER_NAMES.keys() | _of_the_library().keys()


def split_by(tokenizer: Any, name: str | None) -> None:
    """Have the library's `tokenizer` of the file split as `name` says, where the library does not know it."""
    from tokenizers import Regex, pre_tokenizers

    if name in DIGITS_APART:
        parts = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    elif name in OTHER_NAMES:
        split = Regex(_of_the_library()[OTHER_NAMES[name]])
        parts = [
            pre_tokenizers.Split(split, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        return
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)


def _of_the_library() -> dict[str, str]:
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping
    except ImportError:  # it is private, and may go
        return {}
    return dict(mapping.GGUF_PRE_TOKENIZER_SPLITS)
