"""Tokenizers and a model small enough to be made in a moment, of the two kinds that models have."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from baton.api.requests.schemas import GenerationRequest
from baton.api.served_model import ServedModel
from baton.api.text.detokenizer import Detokenizer
from baton.api.text.tokenizer import Tokenizer as BatonTokenizer
from baton.api.tools.format_detection import model_formats

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['content'] == 'REFUSE' %}{{ raise_exception('no such thing') }}{% endif %}"
    "<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ("<|end|>", "<|start|>", "<pad>")
CORPUS = (
    "The quick brown fox jumps over the lazy dog. The capital of France is Paris.",
    "Zürich, naïve, façade, 東京 こんにちは 你好世界 😀😃 👩‍👩‍👧 🇫🇷 مرحبا שלום नमस्ते",
    "def main() -> None:\n    print('hello world')\n",
)
MODEL = "tiny"
END_ID = 0


@cache
def byte_level() -> Any:
    """GPT-2's and Llama 3's kind: every byte is a letter, a token can hold parts of two characters."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[AddedToken(each, special=True) for each in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    reference = _of(backend, pad_token="<pad>")
    reference.chat_template = CHAT_TEMPLATE
    return reference


@cache
def byte_fallback() -> Any:
    """Llama 2's kind: spaces are ▁, the first one is dropped, unknown characters are bytes <0x00>…"""
    words = ["▁", "▁the", "▁fox", "▁Hello", "Hello", "a", "b", "é", "▁é", "你", ".", "\n"]
    pieces = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {piece: id_ for id_, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(each, special=True) for each in (*SPECIAL, "<unk>")])
    return _of(backend, unk_token="<unk>")


def _of(backend: Tokenizer, **tokens: str) -> Any:
    from transformers import PreTrainedTokenizerFast  # takes two seconds to import

    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", **tokens)


@cache
def model() -> ServedModel:
    """A model with the byte-level tokenizer, whose end of sequence is END_ID."""
    reference = byte_level()
    assert reference.eos_token_id == END_ID
    tokenizer = BatonTokenizer(reference)
    return ServedModel(MODEL, tokenizer, (END_ID,), len(reference), formats=model_formats(tokenizer, "llama"))


def ids(text: str) -> list[int]:
    return model().tokenizer.encode(text, add_special_tokens=False)


def detokenizer(prompt: Sequence[int], body: GenerationRequest) -> Detokenizer:
    """Return a detokenizer behind a prompt, as `body` has its text."""
    tokenizer = model().tokenizer
    return Detokenizer(
        tokenizer.codec,
        prompt,
        skip_special_tokens=body.skip_special_tokens,
        whole_texts=tokenizer.whole_texts,
    )
