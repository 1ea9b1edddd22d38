"""How tokens are drawn, where answers end, log-probabilities, and several answers."""

from functools import partial
from typing import Any, Final

from tests.api import tiny
from tests.api.behaviours.asking import CHAT, COMPLETIONS, Answer, Behaviour, Check, Refused, behaviours
from tests.api.behaviours.texts import LONG, SC, SG, SP, SX, VC, VP, streams
from tests.api.scripted import STOP, batch

chat = partial(Behaviour, path=CHAT)
text = partial(Behaviour, path=COMPLETIONS)
VD = "vLLM chat_completion/test_serving_chat.py"
SM = "SGLang validation/test_matched_stop.py"
FAULT: Final = "a fault of the request"
BIG: Final = 2**63
TAKEN: Final = {
    "temperature": (0.8, "temperature", 0.8),
    "top_p": (0.9, "top_p", 0.9),
    "top_k": (50, "top_k", 50),
    "min_p": (0.1, "min_p", 0.1),
    "repetition_penalty": (1.1, "repetition_penalty", 1.1),
    "frequency_penalty": (1.0, "frequency_penalty", 1.0),
    "presence_penalty": (0.5, "presence_penalty", 0.5),
    "seed": (42, "seed", 42),
}
OUTSIDE: Final = {
    "temperature": -1,
    "top_p": 1.5,
    "min_p": 2,
    "top_k": -2,
    "frequency_penalty": 3,
    "presence_penalty": -3,
    "repetition_penalty": 0,
    "max_tokens": 0,
    "min_tokens": -1,
    "seed": BIG,
}
HARMLESS: Final = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "spaces_between_special_tokens": True,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "min_tokens": 0,
    "priority": 0,
    "return_hidden_states": False,
    "stream_reasoning": True,
    "no_stop_trim": False,
    "top_k": -1,
}
NOT_SERVED: Final = {
    "length_penalty": 2.0,
    "return_hidden_states": True,
    "early_stopping": True,
    "custom_logit_processor": "x",
    "logits_processors": ["x"],
    "kv_transfer_params": {"a": 1},
    "bootstrap_host": "h",
    "bootstrap_room": 1,
    "thinking_token_budget": 5,
    "return_routed_experts": True,
    "mm_processor_kwargs": {"a": 1},
    "no_stop_trim": True,
}


def draws_by(field: str, value: float) -> Check:
    return lambda answer: getattr(answer.request.sampling, field) == value


DRAWING: Final = behaviours(
    *(
        row
        for name, (value, field, told) in TAKEN.items()
        for row in (
            chat(
                f"{name} reaches the draw",
                SX,
                draws_by(field, told),
                fields={name: value},
            ),
            text(
                f"{name} reaches the draw",
                SP,
                draws_by(field, told),
                fields={name: value},
            ),
        )
    ),
    *(
        chat(
            f"{name} {value!r:.12} is refused",
            "vLLM chat_completion/test_chat.py" if name == "seed" else VD,
            Refused(name, why=FAULT),
            fields={name: value},
        )
        for name, value in OUTSIDE.items()
    ),
    *(
        chat(f"{name} {value!r} changes nothing", SX, lambda a: a.text == "Hello world", fields={name: value})
        for name, value in HARMLESS.items()
    ),
    *(
        chat(f"{name} is refused by name", VD, Refused(name, why="not served"), fields={name: value})
        for name, value in NOT_SERVED.items()
    ),
    chat("min_tokens keeps an end off", SP, lambda a: a.request.min_tokens == 5, fields={"min_tokens": 5}),
    chat(
        "ignore_eos goes on to max_tokens",
        "SGLang validation/test_openai_server_ignore_eos.py",
        lambda a: a.request.ignore_eos,
        fields={"ignore_eos": True, "max_tokens": 8},
    ),
    chat(
        "logit_bias reaches the draw",
        "vLLM chat_completion/test_chat_logit_bias_validation.py",
        lambda a: dict(a.request.sampling.logit_bias) == {5: 10.0},
        fields={"logit_bias": {"5": 10}},
    ),
    chat(
        "logit_bias outside the vocabulary is refused",
        "vLLM chat_completion/test_chat_logit_bias_validation.py",
        Refused("logit_bias", why=FAULT),
        fields={"logit_bias": {"999999": 1}},
    ),
    chat(
        "a key of logit_bias that is no token id is refused",
        "vLLM chat_completion/test_chat_logit_bias_validation.py",
        Refused("logit_bias.x", why=FAULT),
        fields={"logit_bias": {"x": 1}},
    ),
    chat(
        "stop_token_ids outside the vocabulary are refused",
        "vLLM chat_completion/test_chat_stop_token_ids_validation.py",
        Refused("stop_token_ids[0]", why=FAULT),
        fields={"stop_token_ids": [999999]},
    ),
    chat(
        "negative stop_token_ids are refused",
        "vLLM chat_completion/test_chat_stop_token_ids_validation.py",
        Refused("stop_token_ids[0]", why=FAULT),
        fields={"stop_token_ids": [-1]},
    ),
    *streams(
        chat(
            "a stop string ends the answer before itself",
            SM,
            lambda a: (a.text, a.choice["finish_reason"]) == ("The quick ", "stop"),
            said=LONG,
            fields={"stop": "brown"},
        ),
        chat(
            "of several the first that comes ends it",
            SM,
            lambda a: a.text == "The quick ",
            said=LONG,
            fields={"stop": ["lazy", "brown"]},
        ),
        chat(
            "stop_reason is the string that matched",
            VD,
            lambda a: a.choice["stop_reason"] == "brown",
            said=LONG,
            fields={"stop": ["brown"]},
        ),
        chat(
            "include_stop_str_in_output keeps it",
            SM,
            lambda a: a.text == "The quick brown",
            said=LONG,
            fields={"stop": ["brown"], "include_stop_str_in_output": True},
        ),
        text(
            "a stop string ends a completion",
            SM,
            lambda a: a.text == "The quick ",
            said=LONG,
            fields={"stop": "brown", "max_tokens": 64},
        ),
        chat(
            "stop_reason is the token that matched",
            VD,
            lambda a: a.choice["stop_reason"] == 60,
            said=[batch([50, 60], STOP)],
            fields={"stop_token_ids": [60]},
        ),
        chat("stop_reason is null at an end of sequence", VD, lambda a: a.choice["stop_reason"] is None),
        chat(
            "matched_stop is the string that matched",
            SM,
            lambda a: a.choice["matched_stop"] == "brown",
            said=LONG,
            fields={"stop": ["brown"]},
        ),
        chat(
            "matched_stop is the token that matched",
            SM,
            lambda a: a.choice["matched_stop"] == 60,
            said=[batch([50, 60], STOP)],
            fields={"stop_token_ids": [60]},
        ),
        chat(
            "matched_stop is the end-of-sequence token that came",
            SM,
            lambda a: a.choice["matched_stop"] == tiny.END_ID,
        ),
        text(
            "matched_stop of a completion is the string that matched",
            SM,
            said=LONG,
            expected=lambda a: a.choice["matched_stop"] == "brown",
            fields={"stop": ["brown"], "max_tokens": 64},
        ),
        chat(
            "matched_stop is null at max_tokens",
            SM,
            lambda a: a.choice["matched_stop"] is None,
            said=LONG,
            fields={"max_tokens": 2},
        ),
    ),
    chat(
        "special tokens are shown on demand",
        VD,
        lambda a: a.text == "Hello<|start|>",
        fields={"skip_special_tokens": False},
        said="Hello<|start|>",
    ),
    chat(
        "bad_words reach the draw", VD, lambda a: a.request.grammar is not None, fields={"bad_words": ["fox"]}
    ),
    chat(
        "allowed_token_ids reach the draw",
        VD,
        lambda a: a.request.grammar is not None,
        fields={"allowed_token_ids": [0, 5]},
    ),
    chat("stop strings of one request are not another's", SX, lambda a: a.text == LONG, said=LONG),
    chat(
        "more tokens than the context are refused",
        "SGLang validation/test_request_length_validation.py",
        Refused("max_tokens", why=FAULT),
        fields={"max_tokens": 10**6},
    ),
    chat(
        "a prompt longer than the context is refused",
        "SGLang validation/test_request_length_validation.py",
        Refused("messages", why=FAULT),
        fields={"messages": [{"role": "user", "content": "a b " * 5000}]},
    ),
    chat(
        "a very large max_tokens is clipped where a flag says so",
        "SGLang validation/test_large_max_new_tokens.py",
        lambda a: a.status == 200,
        fields={"max_tokens": 10**6},
        settings={"clip_max_tokens": True},
    ),
    chat("cache_salt is taken", VD, lambda a: a.request.salt != 0, fields={"cache_salt": "x"}),
    chat("an empty cache_salt is refused", VD, Refused("cache_salt", why=FAULT), fields={"cache_salt": ""}),
    chat(
        "request_id names the answer",
        VD,
        lambda a: a.body["id"] == "chatcmpl-mine",
        fields={"request_id": "mine"},
    ),
    chat("rid names the answer", SX, lambda a: a.body["id"] == "chatcmpl-mine", fields={"rid": "mine"}),
)
TOP: Final = {"logprobs": True, "top_logprobs": 5}
LOGPROBS: Final = behaviours(
    *streams(
        chat(
            "logprobs false gives none",
            VC,
            lambda a: a.choice.get("logprobs") is None,
            fields={"logprobs": False},
        ),
        chat(
            "top_logprobs 0 gives the tokens' own alone",
            VC,
            lambda a: not any(c["top_logprobs"] for c in a.choice["logprobs"]["content"]),
            fields={"logprobs": True, "top_logprobs": 0},
            said=LONG,
        ),
        chat(
            "top_logprobs 5 gives five of each",
            VC,
            lambda a: {len(c["top_logprobs"]) for c in a.choice["logprobs"]["content"]} == {5},
            fields=TOP,
        ),
        chat(
            "each has token, logprob and bytes",
            SG,
            lambda a: all(
                bytes(c["bytes"]).decode() and c["token"] and c["logprob"] <= 0
                for c in a.choice["logprobs"]["content"]
            ),
            fields=TOP,
            said="Hello",
        ),
        text(
            "logprobs 0 gives the chosen token's",
            VP,
            lambda a: {len(each) for each in a.choice["logprobs"]["top_logprobs"]} == {1},
            fields={"logprobs": 0},
        ),
        text(
            "logprobs 5 gives five or six",
            VP,
            lambda a: {len(each) for each in a.choice["logprobs"]["top_logprobs"]} <= {5, 6},
            fields={"logprobs": 5},
        ),
        text(
            "text_offset is where each token begins",
            "vLLM completion/test_completion_text_offset.py",
            lambda a: (
                a.choice["logprobs"]["text_offset"][:3]
                == [
                    0,
                    *(
                        len(tiny.model().tokenizer.decode(tiny.ids(LONG)[:n], skip_special_tokens=True))
                        for n in (1, 2)
                    ),
                ]
            ),
            fields={"logprobs": 1},
            said=LONG,
        ),
        text(
            "tokens and token_logprobs are of one length",
            "vLLM completion/test_completion_logprobs.py",
            lambda a: len(a.choice["logprobs"]["tokens"]) == len(a.choice["logprobs"]["token_logprobs"]) > 0,
            fields={"logprobs": 1},
        ),
        chat(
            "tokens are named by their ids on demand",
            VD,
            lambda a: a.choice["logprobs"]["content"][0]["token"].startswith("token_id:"),
            fields={**TOP, "return_tokens_as_token_ids": True},
        ),
    ),
    text(
        "logprobs false of a completion gives none",
        SC,
        lambda a: a.choice["logprobs"] is None,
        fields={"logprobs": False},
    ),
    chat(
        "top_logprobs 0 needs no logprobs",
        VD,
        lambda a: a.choice["logprobs"] is None,
        fields={"top_logprobs": 0},
    ),
    chat(
        "more than 20 are refused",
        VC,
        Refused("top_logprobs", why=FAULT),
        fields={"logprobs": True, "top_logprobs": 21},
    ),
    chat(
        "more than 20 in a stream are refused",
        VC,
        Refused("top_logprobs", why=FAULT),
        fields={"logprobs": True, "top_logprobs": 30, "stream": True},
    ),
    text(
        "more than 20 of a completion are refused",
        VP,
        Refused("logprobs", why=FAULT),
        fields={"logprobs": 21},
    ),
    text(
        "more than 20 of a completion in a stream are refused",
        VP,
        Refused("logprobs", why=FAULT),
        fields={"logprobs": 30, "stream": True},
    ),
    chat(
        "top_logprobs without logprobs are refused",
        VD,
        Refused("top_logprobs", why=FAULT),
        fields={"top_logprobs": 5},
    ),
)
SEVERAL: Final = behaviours(
    *streams(
        chat(
            "n 3 gives three choices, each with its index",
            VC,
            lambda a: [c["index"] for c in a.choices] == [0, 1, 2],
            fields={"n": 3},
        ),
        chat(
            "each choice has one finish_reason",
            SG,
            lambda a: [c["finish_reason"] for c in a.choices] == ["stop"] * 2,
            fields={"n": 2},
        ),
        chat("a seed goes with n", VC, lambda a: len(a.choices) == 2, fields={"n": 2, "seed": 42}),
        text("n 3 of a completion gives three choices", VP, lambda a: len(a.choices) == 3, fields={"n": 3}),
        text(
            "two prompts with n 2 give four choices",
            SG,
            lambda a: len(a.choices) == 4,
            fields={"n": 2, "prompt": ["a", "b"]},
        ),
        chat(
            "each of n has log-probabilities",
            SG,
            lambda a: all(c["logprobs"]["content"] for c in a.choices),
            fields={"n": 2, **TOP},
        ),
        text(
            "each of n has log-probabilities of a completion",
            VP,
            lambda a: all(c["logprobs"]["tokens"] for c in a.choices),
            fields={"n": 2, "logprobs": 0},
        ),
    ),
    chat(
        "each of n calls a tool, and says so at its end",
        "SGLang function_call/test_openai_function_calling.py",
        lambda a: [c["finish_reason"] for c in a.choices] == ["tool_calls"] * 2,
        said="No.",
        fields={
            "n": 2,
            "stream": True,
            "tool_choice": "required",
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "parameters": {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}},
                    },
                }
            ],
        },
    ),
    chat("n 1 is one choice", VC, lambda a: len(a.choices) == 1, fields={"n": 1}),
    chat("n 0 is refused", VD, Refused("n", why=FAULT), fields={"n": 0}),
    chat(
        "usage of n counts the prompt once",
        "SGLang features/test_usage_tokens.py",
        lambda a: a.usage["prompt_tokens"] == len(a.request.prompt),
        fields={"n": 2},
    ),
    text("best_of keeps the likeliest", VD, lambda a: len(a.choices) == 1, fields={"best_of": 2}),
    chat(
        "n goes with a form of the answer",
        "SGLang features/test_reasoning_json_schema_n.py",
        lambda a: all(c["message"]["content"].startswith("{") for c in a.choices),
        said='{"a": 1}',
        fields={"n": 2, "response_format": {"type": "json_object"}},
    ),
)

ECHO: Final = {"echo": True, "logprobs": 1, "max_tokens": 5}


def of_the_prompt(answer: Answer) -> Any:
    """The log-probabilities of a prompt, of each route in its place."""
    return answer.choice["prompt_logprobs"] if "text" in answer.choice else answer.body["prompt_logprobs"]


SCORED: Final = behaviours(
    *streams(
        text(
            "echo gives the prompt before the answer",
            VP,
            lambda a: a.text == "The foxHello world",
            fields={"echo": True},
        ),
        text(
            "echo spells token ids",
            SC,
            lambda a: a.text.startswith("The"),
            fields={"echo": True, "prompt": tiny.ids("The")},
        ),
        text(
            "echo of two prompts is each one's own",
            SC,
            lambda a: [c["text"] for c in a.choices] == ["aHello world", "bHello world"],
            fields={"echo": True, "prompt": ["a", "b"]},
        ),
        text(
            "echo goes with n",
            SG,
            lambda a: [c["text"] for c in a.choices] == ["The foxHello world"] * 2,
            fields={"echo": True, "n": 2},
        ),
        text(
            "with logprobs, the first token of the prompt has none",
            VP,
            lambda a: a.choice["logprobs"]["token_logprobs"][0] is None,
            fields=ECHO,
        ),
        text(
            "with logprobs, the prompt's tokens come before the answer's",
            VP,
            lambda a: len(a.choice["logprobs"]["tokens"]) == len(a.request.prompt) + 5,
            fields=ECHO,
            said=LONG,
        ),
        text(
            "with logprobs, the first token has no alternatives",
            VP,
            lambda a: a.choice["logprobs"]["top_logprobs"][0] is None,
            fields=ECHO,
        ),
        text(
            "with logprobs 1, each of the others has one or two",
            VP,
            lambda a: {len(each) for each in a.choice["logprobs"]["top_logprobs"][1:]} <= {1, 2},
            fields=ECHO,
        ),
        text(
            "with logprobs 0, each of the others has its own",
            VP,
            lambda a: {len(each) for each in a.choice["logprobs"]["top_logprobs"][1:]} == {1},
            fields={**ECHO, "logprobs": 0},
        ),
        text(
            "with logprobs, token ids are scored, too",
            VP,
            lambda a: a.choice["logprobs"]["token_logprobs"][0] is None,
            fields={**ECHO, "prompt": [5, 6, 7, 8]},
        ),
        text(
            "max_tokens 0 scores the prompt and draws nothing",
            VP,
            lambda a: len(a.choice["logprobs"]["tokens"]) == len(a.request.prompt),
            fields={**ECHO, "max_tokens": 0},
        ),
    ),
    text(
        "max_tokens 0 without echo is refused", VP, Refused("max_tokens", why=FAULT), fields={"max_tokens": 0}
    ),
    text(
        "a negative prompt_logprobs is refused",
        VP,
        Refused("prompt_logprobs", why=FAULT),
        fields={"prompt_logprobs": -2},
    ),
    chat(
        "a negative prompt_logprobs of a chat is refused",
        VC,
        Refused("prompt_logprobs", why=FAULT),
        fields={"prompt_logprobs": -2},
    ),
    text(
        "prompt_logprobs in a stream are refused",
        VP,
        Refused("prompt_logprobs", why=FAULT),
        fields={"prompt_logprobs": 1, "stream": True},
    ),
    *(
        row
        for make, source in ((chat, VC), (text, VP))
        for row in (
            make(
                "prompt_logprobs null gives none",
                source,
                lambda a: a.body.get("prompt_logprobs") is None and a.choice.get("prompt_logprobs") is None,
            ),
            make(
                "prompt_logprobs 0 has every token's own",
                source,
                lambda a: (
                    len(of_the_prompt(a)) == len(a.request.prompt)
                    and of_the_prompt(a)[0] is None
                    and {len(each) for each in of_the_prompt(a)[1:]} == {1}
                ),
                fields={"prompt_logprobs": 0},
            ),
            make(
                "prompt_logprobs 1 has one or two",
                source,
                lambda a: {len(each) for each in of_the_prompt(a)[1:]} <= {1, 2},
                fields={"prompt_logprobs": 1},
            ),
            make(
                "prompt_logprobs 2 has more",
                source,
                lambda a: {len(each) for each in of_the_prompt(a)[1:]} <= {2, 3},
                fields={"prompt_logprobs": 2},
            ),
            make(
                "each is named by its id, with logprob, rank and text",
                source,
                lambda a: all(
                    int(id_) >= 0 and {"logprob", "rank", "decoded_token"} <= told.keys()
                    for each in of_the_prompt(a)[1:]
                    for id_, told in each.items()
                ),
                fields={"prompt_logprobs": 1},
            ),
            make(
                "more prompt_logprobs than 20 are refused",
                source,
                Refused("prompt_logprobs", why=FAULT),
                fields={"prompt_logprobs": 21},
            ),
            make(
                "logprob_token_ids outside the vocabulary are refused",
                "vLLM chat_completion/test_logprob_token_ids_validation.py",
                Refused("logprob_token_ids[0]", why=FAULT),
                fields={"logprob_token_ids": [999999], "logprobs": make is chat or 1},
            ),
        )
    ),
)
