"""How is text split before a GGUF file's byte-level vocabulary is looked up, and how is it looked up? What is
done to it before another kind of vocabulary is?

A file names the split that its vocabulary was learned with (`tokenizer.ggml.pre`, llama.cpp's names), and the
model library knows some of the names; of any other it keeps GPT-2's split. Text is then cut into other tokens
than the model has seen. What is known here beside the library's is what llama.cpp does by that name.
"""

from typing import Any, Final

BYTE_LEVEL: Final = "gpt2"
"""The kind of vocabulary (`tokenizer.ggml.model`) that has such splits."""
SENTENCES: Final = "llama"
"""The kind that has none, but spaces of its own."""
SPACE: Final = "\u2581"
OF_OLD: Final = {"gpt2": "gpt-2", "qwen2": "qwen2"}
"""What files of these architectures mean that are from before the split was named."""
AS_GPT2: Final = frozenset(
    {"gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "mellum", "gigachat", "a.x-4.0", "modern-bert"}
    | {"exaone4", "granite-docling"}
)
"""GPT-2's own, which the library's reader begins with."""
DIGITS_APART: Final = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"}
)
"""Every digit by itself, and then as GPT-2."""
OTHER_NAMES: Final = {
    **dict.fromkeys(("stablelm2", "grok-2", "hunyuan", "solar-open"), "qwen2"),
    **dict.fromkeys(("chatglm-bpe", "glm4", "glm5"), "llama3"),
}
"""The same split under a name that the library knows."""
LLAMA3: Final = frozenset({"llama3", "llama-v3", "llama-bpe", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"})
BEGUN: Final = LLAMA3 | {"falcon3", "falcon-h1", "tekken"}
"""A text begins with the token for that, where the file does not say."""
WHOLE_FIRST: Final = BEGUN | {"glm4", "glm5"}
"""A piece that is a token is that token, whatever merges would make of it."""
PROBE: Final = "It's 3  o'clock:\n\t x = [1, 22,   345];\r\n\n 汉字 Ünï-çødé, naïve!!  \n"


def split_of(header: Any) -> str | None:
    """The split's name, of a `Header`; None where it is not known which is meant."""
    name: str | None = header.of_tokenizer("pre") or OF_OLD.get(header.architecture)
    known = AS_GPT2 | DIGITS_APART | _of_the_library().keys()
    return name if OTHER_NAMES.get(name or "", name) in known else None


def split_by(tokenizer: Any, name: str) -> None:
    """Have the library's `tokenizer` of a file split text, and look up what it finds, as `name` says."""
    from tokenizers import Regex, pre_tokenizers

    backend, known = tokenizer.backend_tokenizer, _of_the_library().get(OTHER_NAMES.get(name, name))
    backend.model.ignore_merges = name in WHOLE_FIRST
    if name in DIGITS_APART:
        parts = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    elif known is not None:
        parts = [
            pre_tokenizers.Split(Regex(known), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        return
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)


def spaced(header: Any) -> bool:
    """The texts of a `Header`'s vocabulary begin with a space, where the file does not say otherwise."""
    return header.of_tokenizer("model") == SENTENCES and not header.architecture.startswith("gemma")


def begin_with_a_space(tokenizer: Any) -> None:
    """Have the library's `tokenizer` of a file put a space before every text and before what follows a token
    that is named in it, as llama.cpp does, also where there is one: the library leaves it out there."""
    from tokenizers import normalizers

    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    backend.pre_tokenizer = None


def alike(one: Any, other: Any) -> bool:
    """Two of the library's tokenizers split a text of many kinds in the same way."""
    pieces = [each.backend_tokenizer.pre_tokenizer.pre_tokenize_str(PROBE) for each in (one, other)]
    return [each for each, _ in pieces[0]] == [each for each, _ in pieces[1]]


def _of_the_library() -> dict[str, str]:
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping
    except ImportError:  # it is private, and may go
        return {}
    return dict(mapping.GGUF_PRE_TOKENIZER_SPLITS)
