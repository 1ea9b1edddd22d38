"""Completions and chats: what is asked, what comes back, whole and streamed."""

from functools import partial
from typing import Any, Final

from baton.api.requests.schemas import COMPLETION_TOKENS_DEFAULT
from tests.api import tiny
from tests.api.behaviours.asking import CHAT, COMPLETIONS, USER, Answer, Behaviour, Refused, behaviours
from tests.api.scripted import LENGTH

VC, VP = "vLLM chat_completion/test_chat.py", "vLLM completion/test_completion.py"
VV = "vLLM completion/test_prompt_validation.py"
SG, SP = "SGLang basic/test_openai_server.py", "SGLang basic/test_protocol.py"
SC, SX = "SGLang basic/test_serving_completions.py", "SGLang basic/test_serving_chat.py"
chat = partial(Behaviour, path=CHAT)
text = partial(Behaviour, path=COMPLETIONS)
LONG: Final = "The quick brown fox jumps over the lazy dog."
SPECIAL: Final = ("system", "developer")


def said(role: str, content: Any = "hello", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def streams(*rows: Behaviour) -> list[Behaviour]:
    """The same, and the same in a stream."""
    from dataclasses import replace

    return [
        *rows,
        *(
            replace(row, says=f"{row.says}, in a stream", fields={**row.fields, "stream": True})
            for row in rows
        ),
    ]


COMPLETION: Final = behaviours(
    *streams(
        text("a text is completed", VP, lambda a: a.text == "Hello world"),
        text("token ids are a prompt", VP, lambda a: a.request.prompt == (5, 6), fields={"prompt": [5, 6]}),
        text(
            "finish_reason is length at max_tokens",
            VP,
            lambda a: a.choice["finish_reason"] == "length",
            fields={"max_tokens": 2},
            said=LONG,
        ),
        text("finish_reason is stop at an end", VP, lambda a: a.choice["finish_reason"] == "stop"),
        text(
            "two texts have two answers, each with its index",
            VP,
            lambda a: [c["text"] for c in a.choices] == ["Hello world"] * 2,
            fields={"prompt": ["a", "b"]},
        ),
        text(
            "two lists of token ids have two answers",
            VP,
            lambda a: len(a.choices) == 2,
            fields={"prompt": [[5], [6]]},
        ),
        text("no log-probabilities where none are asked for", VP, lambda a: a.choice.get("logprobs") is None),
    ),
    text(
        "usage adds up",
        VP,
        lambda a: a.usage["total_tokens"] == a.usage["prompt_tokens"] + a.usage["completion_tokens"] > 0,
    ),
    text(
        "usage counts completion tokens to max_tokens",
        VP,
        lambda a: a.usage["completion_tokens"] == 5,
        fields={"max_tokens": 5},
        said=LONG,
    ),
    text("usage says what was cached", VP, lambda a: "cached_tokens" in a.usage["prompt_tokens_details"]),
    text(
        "of several prompts, usage is the sum",
        SG,
        lambda a: a.usage["prompt_tokens"] == 3,
        fields={"prompt": [[5], [6, 7]]},
    ),
    text(
        "an id, a time, an object, the model",
        VP,
        lambda a: (
            a.body["id"].startswith("cmpl-")
            and a.body["created"]
            and a.body["object"] == "text_completion"
            and a.body["model"] == tiny.MODEL
        ),
    ),
    text(
        "max_tokens is 16 where it is not said",
        SP,
        lambda a: a.request.max_tokens == COMPLETION_TOKENS_DEFAULT,
    ),
    text("temperature is 1 where it is not said", SP, lambda a: a.request.sampling.temperature == 1.0),
    text("echo false and n 1 are taken", SP, lambda a: a.status == 200, fields={"echo": False, "n": 1}),
    text(
        "without a prompt it is refused",
        SP,
        Refused("prompt", why="a fault of the request"),
        fields={"prompt": ...},
    ),
    text(
        "an empty prompt list is refused",
        "vLLM completion/test_empty_prompt_list.py",
        Refused("prompt", why="a fault of the request"),
        fields={"prompt": []},
    ),
    text(
        "a token that the vocabulary lacks is refused",
        VV,
        Refused("prompt[0]", why="a fault of the request"),
        fields={"prompt": [999999]},
    ),
    text(
        "prompt_embeds are refused by name",
        VV,
        Refused("prompt_embeds", why="embeddings as prompts"),
        fields={"prompt_embeds": "AAAA"},
    ),
    text(
        "a negative max_tokens is refused",
        SP,
        Refused("max_tokens", why="a fault of the request"),
        fields={"max_tokens": -1},
    ),
    text(
        "a text and token ids in one list are refused",
        VV,
        Refused("prompt", why="a fault of the request"),
        fields={"prompt": ["a", 5]},
    ),
    text(
        "a suffix is refused by name",
        "vLLM completion/test_completion_error.py",
        Refused("suffix", why="filling in the middle"),
        fields={"suffix": "x"},
    ),
    text(
        "beam search is refused by name",
        VP,
        Refused("use_beam_search", why="beam search"),
        fields={"use_beam_search": True},
    ),
    text(
        "a lora_path is refused by name", SP, Refused("lora_path", why="adapters"), fields={"lora_path": "x"}
    ),
    text(
        "response_format holds a completion, too",
        SC,
        lambda a: a.text.startswith("{"),
        fields={"response_format": {"type": "json_object"}, "max_tokens": 200},
        said='{"a": 1}',
    ),
)
CONTINUES: Final = {"continue_final_message": True, "add_generation_prompt": False}
CHATS: Final = behaviours(
    *streams(
        chat(
            "a chat is answered by the assistant",
            VC,
            lambda a: (a.message["role"], a.text) == ("assistant", "Hello world"),
        ),
        chat(
            "finish_reason is length at max_completion_tokens",
            VC,
            lambda a: a.choice["finish_reason"] == "length",
            fields={"max_completion_tokens": 2},
            said=LONG,
        ),
        chat("max_tokens means the same", SX, lambda a: a.request.max_tokens == 3, fields={"max_tokens": 3}),
        chat(
            "text parts are read",
            VC,
            lambda a: "one two" in a.prompt,
            fields={
                "messages": [
                    said("user", [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}])
                ]
            },
        ),
        chat(
            "a conversation of several turns is read",
            VC,
            lambda a: a.prompt.count("<|start|>") == 4,
            fields={"messages": [USER, said("assistant"), USER]},
        ),
    ),
    *(
        chat(
            f"a message of the {role}'s is read",
            "vLLM chat_completion/test_chat_error.py",
            lambda a: "Be brief" in a.prompt,
            fields={"messages": [said(role, "Be brief."), USER]},
        )
        for role in SPECIAL
    ),
    *(
        chat(
            f"text parts of the {role}'s are read",
            "vLLM chat_completion/test_chat_error.py",
            lambda a: "Be brief" in a.prompt,
            fields={"messages": [said(role, [{"type": "text", "text": "Be brief."}]), USER]},
        )
        for role in SPECIAL
    ),
    *(
        chat(
            f"{kind} of a {role} is refused by name",
            "vLLM chat_completion/test_chat_error.py",
            Refused("messages[0].content", why="images, audio, video"),
            fields={"messages": [said(role, [{"type": kind, kind: {"url": "http://x/y"}}])]},
        )
        for role in ("user", "system")
        for kind in ("image_url", "input_audio", "video_url")
    ),
    chat(
        "a role of one's own is refused by name",
        VC,
        Refused("messages[0].role", why="no template knows it"),
        fields={"messages": [said("my-custom-role")]},
    ),
    chat(
        "a field of a message that nobody knows is refused by name",
        VC,
        Refused("messages[0].extra_field", why="no answer is as if it had been understood"),
        fields={"messages": [said("user", extra_field="0")]},
    ),
    chat(
        "an id, a time, an object, the model",
        VC,
        lambda a: (
            a.body["id"].startswith("chatcmpl-")
            and a.body["created"]
            and a.body["object"] == "chat.completion"
            and a.body["model"] == tiny.MODEL
        ),
    ),
    chat(
        "system_fingerprint is null",
        "vLLM chat_completion/test_system_fingerprint_none.py",
        lambda a: a.body["system_fingerprint"] is None,
    ),
    chat(
        "usage adds up",
        VC,
        lambda a: a.usage["total_tokens"] == a.usage["prompt_tokens"] + a.usage["completion_tokens"] > 0,
    ),
    chat(
        "usage says what was cached",
        "SGLang features/test_cache_report.py",
        lambda a: "cached_tokens" in a.usage["prompt_tokens_details"],
    ),
    chat(
        "no messages are refused",
        SP,
        Refused("messages", why="a fault of the request"),
        fields={"messages": []},
    ),
    chat(
        "absent messages are refused",
        SP,
        Refused("messages", why="a fault of the request"),
        fields={"messages": ...},
    ),
    chat(
        "the model need not be named",
        "vLLM chat_completion/test_serving_chat.py",
        lambda a: a.status == 200,
        fields={"model": ...},
    ),
    chat(
        "another model is not found",
        "SGLang validation/test_strict_model_validation.py",
        Refused("model", 404, "one model is served"),
        fields={"model": "other"},
    ),
    chat(
        "the answer goes on with the assistant's message",
        SG,
        lambda a: a.prompt.endswith("assistant\n{"),
        fields={"messages": [USER, said("assistant", "{")], "continue_final_message": True},
    ),
    *(
        chat(
            f"echo{where} gives the assistant's message before what goes on with it",
            "vLLM chat_completion/test_chat_echo.py",
            lambda a: a.text == "Once upon a time",
            fields={"messages": [USER, said("assistant", "Once")], "echo": True, **CONTINUES, **fields},
            said=" upon a time",
        )
        for where, fields in (("", {}), (" in a stream", {"stream": True}))
    ),
    chat(
        "add_generation_prompt false adds nothing",
        "vLLM chat_completion/test_chat_echo.py",
        lambda a: a.prompt.endswith("hi<|end|>\n"),
        fields={"add_generation_prompt": False},
    ),
    chat(
        "both at once are refused",
        "vLLM basic/test_chat_template.py",
        Refused("continue_final_message", why="a fault of the request"),
        fields={
            "messages": [USER, said("assistant")],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
    ),
    chat(
        "chat_template_kwargs are given to the template",
        SP,
        lambda a: a.status == 200,
        fields={"chat_template_kwargs": {"custom_param": "value"}},
    ),
    chat(
        "a template of the request's is refused unless it is allowed",
        "vLLM basic/test_chat_template.py",
        Refused("chat_template", why="a program; a flag takes it"),
        fields={"chat_template": "x"},
    ),
    chat(
        "a template of the request's is taken where a flag allows it",
        "vLLM basic/test_chat_template.py",
        lambda a: a.prompt == "just this",
        fields={"chat_template": "just this"},
        settings={"trust_request_chat_template": True},
    ),
    chat(
        "a message has a name",
        "vLLM chat_completion/test_extra_content_fields.py",
        lambda a: a.status == 200,
        fields={"messages": [said("user", name="Ann")]},
    ),
    chat(
        "an assistant's content may be null beside calls",
        "vLLM chat_completion/test_serving_chat.py",
        lambda a: "weather" in a.prompt,
        fields={
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "content": "warm"},
            ]
        },
    ),
    chat(
        "a body that is no object is refused",
        "vLLM chat_completion/test_non_object_body_validation.py",
        Refused(None, why="a fault of the request"),
        raw=b"[1]",
        headers={"content-type": "application/json"},
    ),
    chat(
        "a body that is no JSON is refused",
        "SGLang validation/test_request_body_validation.py",
        Refused(None, why="a fault of the request"),
        raw=b"{",
        headers={"content-type": "application/json"},
    ),
    chat(
        "a form instead of JSON is refused",
        "vLLM instrumentator/test_basic.py",
        Refused(None, 415, "a fault of the request"),
        raw=b"a=b",
        headers={"content-type": "application/x-www-form-urlencoded"},
    ),
    chat("a user is taken", SP, lambda a: a.status == 200, fields={"user": "u"}),
    chat("metadata are taken", SX, lambda a: a.status == 200, fields={"metadata": {"a": "b"}}),
    chat("extra_body that is empty is taken", SX, lambda a: a.status == 200, fields={"extra_body": {}}),
    chat(
        "a refused chat template is the request's fault",
        "vLLM chat_completion/test_serving_chat.py",
        Refused("messages", why="a fault of the request"),
        fields={"messages": [said("user", "REFUSE")]},
    ),
    chat(
        "documents are refused where the template knows none",
        "vLLM chat_completion/test_serving_chat.py",
        Refused("documents", why="this template knows none"),
        fields={"documents": [{"title": "x"}]},
    ),
)


def grows(answer: Answer) -> bool:
    """What each event says of the tokens that came: none yet, or more than the one before it, until the one
    without choices says how many there were."""
    *counts, whole = [event["usage"]["completion_tokens"] for event in answer.events]
    told = [count for count in counts if count]
    return counts[-len(told) :] == sorted({*told}) and whole == counts[-1] > 0


OPTIONS: Final = {"include_usage": True}
STREAMS: Final = behaviours(
    chat(
        "the first event has the role",
        SG,
        lambda a: a.events[0]["choices"][0]["delta"]["role"] == "assistant",
        fields={"stream": True},
    ),
    chat(
        "one event of a choice has a finish_reason, the last one",
        VC,
        lambda a: (
            [bool(e["choices"][0].get("finish_reason")) for e in a.events].index(True) == len(a.events) - 1
        ),
        fields={"stream": True},
    ),
    chat(
        "what was not asked for is there and null",
        VC,
        lambda a: (
            a.body["prompt_logprobs"] is a.body["prompt_token_ids"] is a.choice["token_ids"] is None
            and a.choice["logprobs"] is None
        ),
    ),
    text(
        "what was not asked for is there and null",
        VP,
        lambda a: all(
            a.choice[name] is None
            for name in ("logprobs", "prompt_logprobs", "prompt_token_ids", "token_ids")
        ),
    ),
    chat(
        "the last event of an answer that is cut off has its last text",
        VC,
        lambda a: (
            a.events[-1]["choices"][0]["delta"]["content"]
            and a.events[-1]["choices"][0]["finish_reason"] == "length"
        ),
        fields={"stream": True, "max_tokens": 3},
    ),
    chat(
        "a stream's text is the whole answer's",
        VC,
        lambda a: a.text == LONG,
        fields={"stream": True},
        said=LONG,
    ),
    text(
        "a stream's text is the whole completion's",
        VP,
        lambda a: a.text == LONG,
        fields={"stream": True, "max_tokens": 64},
        said=LONG,
    ),
    *(
        row
        for path, source in ((CHAT, VC), (COMPLETIONS, VP))
        for row in (
            Behaviour("a stream ends with [DONE]", source, lambda a: a.done, path, {"stream": True}),
            Behaviour(
                "no event has usage where it is not asked for",
                source,
                lambda a: all(e.get("usage") is None for e in a.events),
                path,
                {"stream": True},
            ),
            Behaviour(
                "include_usage false means the same",
                source,
                lambda a: all(e.get("usage") is None for e in a.events),
                path,
                {"stream": True, "stream_options": {"include_usage": False}},
            ),
            Behaviour(
                "empty stream_options are taken",
                source,
                lambda a: a.done,
                path,
                {"stream": True, "stream_options": {}},
            ),
            Behaviour(
                "include_usage adds an event without choices",
                source,
                lambda a: (
                    a.events[-1]["choices"] == []
                    and a.events[-1]["usage"]["total_tokens"] > 0
                    and all(e.get("usage") is None for e in a.events[:-1])
                ),
                path,
                {"stream": True, "stream_options": OPTIONS},
            ),
            Behaviour(
                "continuous_usage_stats false means the same",
                source,
                lambda a: all(e.get("usage") is None for e in a.events[:-1]),
                path,
                {"stream": True, "stream_options": {**OPTIONS, "continuous_usage_stats": False}},
            ),
            Behaviour(
                "continuous_usage_stats gives every event its own, which grow",
                "SGLang features/test_continuous_usage_stats.py",
                grows,
                path,
                {"stream": True, "stream_options": {**OPTIONS, "continuous_usage_stats": True}},
            ),
            Behaviour(
                "continuous_usage_stats alone gives none",
                source,
                lambda a: all(e.get("usage") is None for e in a.events),
                path,
                {"stream": True, "stream_options": {"include_usage": False, "continuous_usage_stats": True}},
            ),
            Behaviour(
                "stream_options without a stream are refused",
                source,
                Refused("stream_options", why="a fault of the request"),
                path,
                {"stream_options": OPTIONS},
            ),
            Behaviour(
                "all events have one id and one time",
                "SGLang basic/test_openai_server.py",
                lambda a: len({(e["id"], e["created"], e["model"]) for e in a.events}) == 1,
                path,
                {"stream": True},
            ),
            Behaviour(
                "a stream is an event stream",
                "SGLang basic/test_openai_server.py",
                lambda a: a.headers["content-type"].startswith("text/event-stream"),
                path,
                {"stream": True},
            ),
        )
    ),
    chat(
        "usage of a stream counts what came",
        "SGLang features/test_usage_tokens.py",
        lambda a: a.usage["completion_tokens"] == len(tiny.ids(LONG)) + 1,
        fields={"stream": True, "stream_options": OPTIONS},
        said=LONG,
    ),
    text(
        "usage of several prompts in a stream is the sum",
        "SGLang features/test_usage_tokens.py",
        lambda a: a.usage["prompt_tokens"] == 3,
        fields={"stream": True, "stream_options": OPTIONS, "prompt": [[5], [6, 7]]},
    ),
    text(
        "what was cut off by length says so in a stream",
        VP,
        lambda a: a.choice["finish_reason"] == "length",
        fields={"stream": True, "max_tokens": 16},
        ends=LENGTH,
    ),
)
