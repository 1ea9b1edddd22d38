"""Text splitting and normalization of a GGUF file's tokenizer.

A file names the split into pieces with which its byte-level vocabulary was trained. The key is
`tokenizer.ggml.pre`, the names are llama.cpp's. The transformers library knows some of the names, and uses
GPT-2's split for any other, which gives other tokens than in training. The rules here follow llama.cpp.
"""

from typing import Any, Final

BYTE_LEVEL: Final = "gpt2"
"""Value of `tokenizer.ggml.model` for byte-level vocabularies, whose texts are split into pieces first."""
SENTENCES: Final = "llama"
"""Value of `tokenizer.ggml.model` for vocabularies without splits, in which a special character replaces
spaces."""
SPACE: Final = "\u2581"
OF_OLD: Final = {"gpt2": "gpt-2", "qwen2": "qwen2"}
"""Name of the text split for older GGUF files, which do not state it, by architecture."""
AS_GPT2: Final = frozenset(
    {"gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "mellum", "gigachat", "a.x-4.0", "modern-bert"}
    | {"exaone4", "granite-docling"}
)
"""Names of splits that are GPT-2's split, the default of the transformers reader."""
DIGITS_APART: Final = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"}
)
"""Names of splits that separate every digit, and then split as GPT-2 does."""
OTHER_NAMES: Final = {
    **dict.fromkeys(("stablelm2", "grok-2", "hunyuan", "solar-open"), "qwen2"),
    **dict.fromkeys(("chatglm-bpe", "glm4", "glm5"), "llama3"),
}
"""Name that the transformers library uses for a text split, by the llama.cpp name, where the two differ."""
LLAMA3: Final = frozenset({"llama3", "llama-v3", "llama-bpe", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"})
BEGUN: Final = LLAMA3 | {"falcon3", "falcon-h1", "tekken"}
"""Names of the text splits of models whose inputs begin with a start token, unless the GGUF file says
otherwise."""
WHOLE_FIRST: Final = BEGUN | {"glm4", "glm5"}
"""Names of the text splits with which a piece that is a token as a whole becomes this token, without
byte-pair merges."""
PROBE: Final = "It's 3  o'clock:\n\t x = [1, 22,   345];\r\n\n 汉字 Ünï-çødé, naïve!!  \n"


def split_of(header: Any) -> str | None:
    """Return the llama.cpp name of the text split that a GGUF `Header` states. None if no implementation of
    that split is known."""
    name: str | None = header.of_tokenizer("pre") or OF_OLD.get(header.architecture)
    known = AS_GPT2 | DIGITS_APART | _of_the_library().keys()
    return name if OTHER_NAMES.get(name or "", name) in known else None


def split_by(tokenizer: Any, name: str) -> None:
    """Make the transformers `tokenizer` split text and look up pieces as the split `name` requires."""
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
    """Return whether texts of this vocabulary begin with a space, unless the file says otherwise.

    `header`: a GGUF `Header`.
    """
    return header.of_tokenizer("model") == SENTENCES and not header.architecture.startswith("gemma")


def begin_with_a_space(tokenizer: Any) -> None:
    """Make the transformers `tokenizer` put a space before every text and after every special token in it.

    llama.cpp does so even if there is a space already. The library does not add another one.
    """
    from tokenizers import normalizers

    backend = tokenizer.backend_tokenizer
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    backend.pre_tokenizer = None


def alike(one: Any, other: Any) -> bool:
    """Return whether two tokenizers of the transformers library split a test text with many kinds of
    characters in the same way."""
    pieces = [each.backend_tokenizer.pre_tokenizer.pre_tokenize_str(PROBE) for each in (one, other)]
    return [each for each, _ in pieces[0]] == [each for each, _ in pieces[1]]


def _of_the_library() -> dict[str, str]:
    try:
        from transformers.integrations.gguf import gguf_tokenizer_mapping as mapping
    except ImportError:  # a private module, which may disappear
        return {}
    return dict(mapping.GGUF_PRE_TOKENIZER_SPLITS)
