"""Requests that show whether a stack's greedy output is the reference library's, token for token.

Thirty prompts from 1 to 1,500 tokens, of chat, code, non-Latin text and emoji; fp32, where a difference
cannot be a rounding tie.
"""

import asyncio
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import httpx
from transformers import AutoTokenizer

from tests.oracle import reference_behind
from tests.process.stack import Stack

OUTPUT_TOKENS = 16

_CODE = '''def fibonacci(n: int) -> int:
    """Return the n-th Fibonacci number."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a

'''
_STORY = (
    "The old lighthouse keeper climbed the stairs every evening, counting each step under his breath. "
    "There were two hundred and seventeen of them, and he knew the sound of every single one. "
)
_TEXTS = (
    "Hello",
    "The capital of France is",
    "1, 2, 3, 5, 8, 13,",
    "Once upon a time, in a village by the sea,",
    _CODE + "print(fibonacci(",
    "SELECT name, count(*) FROM rooms WHERE phase = 'failed' GROUP BY",
    '{"model": "demo", "messages": [{"role": "user", "content": "hi"}], "stream":',
    "Привет, как дела? Сегодня",
    "今日はとても良い天気ですね。",
    "مرحبا بالعالم، كيف",
    "Γειά σου Κόσμε, πώς",
    "नमस्ते दुनिया",
    "🎉🎈🥳 Party time! 🚀🌙",
    "family: 👨‍👩‍👧‍👦 flags: 🇫🇷🇯🇵 and",
    "   \n\n\t  indented\n\t\tmore\n",
    "a" * 40,
    "Translate to German: The weather is nice today.\nGerman:",
    "Q: What is 12 times 12?\nA:",
)
_CHATS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in one sentence why the sky is blue.",
    "Schreibe einen kurzen Satz über Katzen. 🐈",
)
_LENGTHS = (1, 63, 64, 65, 200, 511, 900, 1500)


def short_prompts(model: str) -> list[list[int]]:
    """Return the prompts of one or two sentences."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [list(tokenizer(text)["input_ids"]) for text in _TEXTS]
    for question in _CHATS:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompts.append(list(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return prompts


@cache
def _prompts(model: str) -> list[list[int]]:
    prompts = short_prompts(model)
    story = list(AutoTokenizer.from_pretrained(model)(_STORY * 60)["input_ids"])
    prompts += [story[:length] for length in _LENGTHS]
    assert len(prompts) == 30
    return prompts


async def check_greedy(stack: Stack, model: Path, at_a_time: int) -> None:
    """Check the answers to all thirty prompts, `at_a_time` of them in flight, and that every gauge is back
    afterwards."""
    prompts = _prompts(str(model))
    start = stack.idle_gauges()
    outputs = await complete_all(stack.url, prompts, at_a_time)
    expected = reference_behind(model, prompts, outputs, OUTPUT_TOKENS)
    wrong = [
        f"prompt {index} ({len(prompts[index])} tokens): {output} expected {want}"
        for index, (output, want) in enumerate(zip(outputs, expected, strict=True))
        if output != want
    ]
    assert not wrong, "\n".join(wrong)
    stack.wait_idle(start)


async def complete_all(url: str, prompts: Sequence[Sequence[int]], at_a_time: int) -> list[list[int]]:
    """Return the greedy token ids of every prompt, with `at_a_time` requests in flight."""
    places = asyncio.Semaphore(at_a_time)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def one(prompt: Sequence[int]) -> list[int]:
            body = {
                "model": model,
                "prompt": list(prompt),
                "max_tokens": OUTPUT_TOKENS,
                "temperature": 0,
                "return_token_ids": True,
            }
            async with places:
                reply = await client.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            ids: list[int] = reply.json()["choices"][0]["token_ids"]
            return ids

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))
