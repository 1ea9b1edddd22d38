"""Tokens, models, what a server says of itself, newer routes of OpenAI's and Anthropic's, other kinds."""

import json
from functools import partial
from typing import Any, Final

from tests.api import tiny
from tests.api.behaviours.asking import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    USER,
    Answer,
    Behaviour,
    Refused,
    behaviours,
)
from tests.api.behaviours.forms import ANN, CALL, CITY, PERSON, THOUGHT
from tests.api.behaviours.texts import LONG, SG, VC, VP, said, streams

chat = partial(Behaviour, path=CHAT)
text = partial(Behaviour, path=COMPLETIONS)
FAULT: Final = "a fault of the request"
VK = "vLLM tokenize/test_tokenization.py"
VB, VI = "vLLM instrumentator/test_basic.py", "vLLM basic/test_return_token_ids.py"
SI = "SGLang basic/test_return_token_ids.py"
tokenize = partial(Behaviour, path="/tokenize")
IDS: Final = tiny.ids("The fox")
TURNS: Final = [USER, said("assistant", "Nice"), said("user", "Why?")]
TOOL: Final = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
TOKENS: Final = behaviours(
    tokenize(
        "a text has its tokens, their count and the context's length",
        VK,
        lambda a: (
            (a.body["tokens"], a.body["count"], a.body["max_model_len"], a.body["token_strs"])
            == (IDS, len(IDS), 2048, None)
        ),
        fields={"prompt": "The fox"},
    ),
    tokenize(
        "add_special_tokens false adds none",
        VK,
        lambda a: a.body["tokens"] == IDS,
        fields={"prompt": "The fox", "add_special_tokens": False},
    ),
    tokenize(
        "return_token_strs spells them",
        VK,
        lambda a: a.body["token_strs"] == tiny.byte_level().convert_ids_to_tokens(IDS),
        fields={"prompt": "The fox", "return_token_strs": True},
    ),
    tokenize(
        "a chat is rendered",
        VK,
        lambda a: a.body["count"] == len(a.body["tokens"]) > 10,
        fields={"messages": TURNS},
    ),
    tokenize(
        "a chat goes on with its last message",
        VK,
        lambda a: a.body["tokens"][-1] == tiny.ids("Sure,")[-1],
        fields={
            "messages": [*TURNS, said("assistant", "Sure,")],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    tokenize(
        "a chat without a generation prompt",
        VK,
        lambda a: a.body["tokens"] == tiny.ids("<|start|>user\nhi<|end|>\n"),
        fields={"messages": [USER], "add_generation_prompt": False},
    ),
    tokenize(
        "a chat's special tokens may be added",
        VK,
        lambda a: a.status == 200,
        fields={"messages": [USER], "add_special_tokens": True},
    ),
    tokenize(
        "a chat with tools", VK, lambda a: a.body["count"] > 50, fields={"messages": [USER], "tools": [TOOL]}
    ),
    Behaviour(
        "tokens are a text again",
        VK,
        lambda a: a.body == {"prompt": "The fox"},
        "/detokenize",
        {"tokens": IDS},
    ),
    Behaviour(
        "the tokenizer's class is told",
        VK,
        lambda a: a.body["tokenizer_class"],
        "/tokenizer_info",
        method="GET",
    ),
    Behaviour(
        "the tokenizer's chat template is told",
        VK,
        lambda a: a.body["chat_template"] == tiny.CHAT_TEMPLATE,
        "/tokenizer_info",
        method="GET",
    ),
    Behaviour(
        "the tokenizer's special tokens are texts",
        VK,
        lambda a: isinstance(a.body["eos_token"], str),
        "/tokenizer_info",
        method="GET",
    ),
    chat(
        "return_token_ids gives the prompt's",
        VI,
        lambda a: a.body["prompt_token_ids"] == [*a.request.prompt],
        fields={"return_token_ids": True},
    ),
    chat(
        "return_token_ids gives the answer's",
        VI,
        lambda a: a.choice["token_ids"] == [*tiny.ids("Hello world"), tiny.END_ID],
        fields={"return_token_ids": True},
    ),
    text(
        "return_token_ids gives a completion's prompt",
        VI,
        lambda a: a.choice["prompt_token_ids"] == [*a.request.prompt],
        fields={"return_token_ids": True},
    ),
    text(
        "return_token_ids gives a completion's",
        VI,
        lambda a: a.choice["token_ids"] == [*tiny.ids("Hello world"), tiny.END_ID],
        fields={"return_token_ids": True},
    ),
    chat(
        "a stream gives them, too",
        VI,
        lambda a: a.choice["token_ids"] == [*tiny.ids("Hello world"), tiny.END_ID],
        fields={"return_token_ids": True, "stream": True},
    ),
    text(
        "a completion's stream gives them, too",
        VI,
        lambda a: a.choice["token_ids"] == [*tiny.ids("Hello world"), tiny.END_ID],
        fields={"return_token_ids": True, "stream": True},
    ),
    chat(
        "no token ids where none are asked for",
        SI,
        lambda a: "token_ids" not in a.choice or a.choice["token_ids"] is None,
    ),
    text(
        "truncate_prompt_tokens keeps the end",
        VP,
        lambda a: a.request.prompt == (4, 5, 6, 7),
        fields={"prompt": [*range(8)], "truncate_prompt_tokens": 4},
    ),
    text(
        "truncation_side left keeps the end",
        VP,
        lambda a: a.request.prompt == (4, 5, 6, 7),
        fields={"prompt": [*range(8)], "truncate_prompt_tokens": 4, "truncation_side": "left"},
    ),
    text(
        "truncation_side right keeps the beginning",
        VP,
        lambda a: a.request.prompt == (0, 1, 2, 3),
        fields={"prompt": [*range(8)], "truncate_prompt_tokens": 4, "truncation_side": "right"},
    ),
    chat(
        "truncation_side right keeps a chat's beginning",
        "vLLM chat_completion/test_chat_completion.py",
        lambda a: a.prompt.startswith("<|start|>user") and len(a.request.prompt) == 6,
        fields={"truncate_prompt_tokens": 6, "truncation_side": "right"},
    ),
    chat(
        "truncation_side left keeps a chat's end",
        "vLLM chat_completion/test_chat_completion.py",
        lambda a: a.prompt.endswith("\n") and len(a.request.prompt) == 6,
        fields={"truncate_prompt_tokens": 6, "truncation_side": "left"},
    ),
    text(
        "a truncation that is negative is refused",
        VP,
        Refused("truncate_prompt_tokens", why=FAULT),
        fields={"truncate_prompt_tokens": -2},
    ),
)
get = partial(Behaviour, method="GET")
SERVER: Final = behaviours(
    get(
        "the models are listed", SG, lambda a: [m["id"] for m in a.body["data"]] == [tiny.MODEL], "/v1/models"
    ),
    get(
        "a model has its context's length",
        SG,
        lambda a: a.body["data"][0]["max_model_len"] == 2048,
        "/v1/models",
    ),
    get(
        "the list is a list, its entries are models",
        "SGLang basic/test_protocol.py",
        lambda a: (a.body["object"], a.body["data"][0]["object"]) == ("list", "model"),
        "/v1/models",
    ),
    get("a model is told by its name", SG, lambda a: a.body["id"] == tiny.MODEL, f"/v1/models/{tiny.MODEL}"),
    get("another model is not found", SG, Refused("model", 404, FAULT), "/v1/models/other"),
    get("a model's root is its name", SG, lambda a: a.body["root"] == tiny.MODEL, f"/v1/models/{tiny.MODEL}"),
    get("the version is told", VB, lambda a: set(a.body) == {"version"}, "/version"),
    get("/openapi.json describes the routes", VB, lambda a: CHAT in a.body["paths"], "/openapi.json"),
    get("a route that is not there is a 404", VB, Refused(None, 404, FAULT), "/nothing"),
    get("GET of a route for POST is a 405", VB, Refused(None, 405, FAULT), CHAT),
    chat(
        "an id of the caller's comes back",
        "vLLM middleware/test_x_request_id.py",
        lambda a: a.headers["x-request-id"] == "mine",
        headers={"X-Request-Id": "mine"},
    ),
    chat(
        "an answer has an id by itself",
        "vLLM middleware/test_x_request_id.py",
        lambda a: a.headers["x-request-id"],
    ),
    chat(
        "an error has message, type, param and code",
        "vLLM exception_handling/test_validation_exception_handler.py",
        Refused("temperature", why=FAULT),
        fields={"temperature": "hot"},
    ),
    chat(
        "a field that nobody knows is refused by name",
        "vLLM chat_completion/test_chat.py",
        Refused("min_characters", why="no answer is as if it had been understood"),
        fields={"min_characters": 10},
    ),
    Behaviour(
        "SageMaker's /invocations answers a chat",
        VC,
        lambda a: a.text == "Hello world",
        "/invocations",
        {"messages": [USER]},
    ),
    get("/load is not there", VB, Refused(None, 404, "metrics tell it"), "/load"),
)
KINDS: Final = behaviours(
    *(
        Behaviour(
            f"{kind} are refused by name",
            source,
            Refused(None, 404, "another kind of service"),
            path,
            {"x": 1},
        )
        for kind, source, path in (
            ("embeddings", "SGLang basic/test_openai_embedding.py", "/v1/embeddings"),
            ("reranking", "SGLang basic/test_serving_rerank.py", "/v1/rerank"),
            ("scores", "vLLM correctness/test_mteb_score.py", "/score"),
            ("pooling", "vLLM correctness/test_mteb.py", "/pooling"),
            ("classification", "vLLM correctness/test_mteb.py", "/classify"),
            ("transcriptions", "SGLang basic/test_serving_transcription.py", "/v1/audio/transcriptions"),
            (
                "translations",
                "vLLM correctness/test_transcription_api_correctness.py",
                "/v1/audio/translations",
            ),
            ("speech", "vLLM chat_completion/test_audio.py", "/v1/audio/speech"),
            ("images", "vLLM chat_completion/test_vision.py", "/v1/images/generations"),
            ("batches", "vLLM chat_completion/test_batched_chat_completions.py", "/v1/batches"),
            ("files", "vLLM files/test_api_router.py", "/v1/files"),
            ("adapters", "vLLM lora/test_lora_adapters.py", "/v1/load_lora_adapter"),
            ("SGLang's own /generate", "SGLang features/test_openai_server_hidden_states.py", "/generate"),
            ("sleeping workers", "vLLM dev/test_sleep.py", "/sleep"),
            ("new weights while it runs", "vLLM dev/rlhf/test_weight_update.py", "/update_weights"),
        )
    ),
)
VS, VY, VZ = (
    "vLLM responses/test_simple.py",
    "vLLM responses/test_function_call.py",
    "vLLM responses/test_errors.py",
)
SV = "SGLang basic/test_openai_server.py"
respond = partial(Behaviour, path=RESPONSES)
FUNCTION: Final = {"type": "function", "name": "weather", "parameters": CITY}
TYPED: Final = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}


def output(answer: Answer, kind: str) -> list[Any]:
    body = answer.events[-1]["response"] if answer.events else answer.body
    return [each for each in body["output"] if each["type"] == kind]


def output_text(answer: Answer) -> str:
    return "".join(part["text"] for item in output(answer, "message") for part in item["content"])


def final(answer: Answer) -> Any:
    return answer.events[-1]["response"] if answer.events else answer.body


OPENS: Final = {
    "response.completed": "response.created",
    "response.output_item.done": "response.output_item.added",
    "response.output_text.done": "response.output_text.delta",
    "response.content_part.done": "response.content_part.added",
    "response.reasoning_text.done": "response.reasoning_text.delta",
    "response.reasoning_part.done": "response.reasoning_part.added",
    "response.function_call_arguments.done": "response.function_call_arguments.delta",
}


def nests(answer: Answer) -> bool:
    """Whether what the stream opened last is closed first, and all of it."""
    opened: list[str] = []
    for kind in answer.types:
        if kind in OPENS:
            if opened.pop() != OPENS[kind]:
                return False
        elif kind.endswith(("created", "added")) or (kind.endswith("delta") and opened[-1] != kind):
            opened.append(kind)
    return not opened


def grown(answer: Answer) -> bool:
    """Whether a function's arguments are what their deltas join to."""
    deltas = [e["delta"] for e in answer.events if e["type"] == "response.function_call_arguments.delta"]
    (call,) = output(answer, "function_call")
    return "".join(deltas) == str(call["arguments"]) != ""


VH = "vLLM responses/test_sampling_params.py"
SB = "SGLang function_call/test_responses_function_calling.py"
RESPONDED: Final = behaviours(
    respond(
        "a stop string ends it",
        VH,
        lambda a: output_text(a) == "The quick ",
        fields={"stop": "brown"},
        said=LONG,
    ),
    respond(
        "several stop strings are taken",
        VH,
        lambda a: output_text(a) == "The quick ",
        said=LONG,
        fields={"stop": ["lazy", "brown"]},
    ),
    respond("ignore_eos is taken", VH, lambda a: a.request.ignore_eos, fields={"ignore_eos": True}),
    respond(
        "temperature, top_p and top_k reach the draw",
        VH,
        lambda a: (
            (a.request.sampling.temperature, a.request.sampling.top_p, a.request.sampling.top_k)
            == (0.8, 0.95, 50)
        ),
        fields={"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    ),
    respond(
        "a seed and a repetition_penalty reach the draw",
        VH,
        lambda a: (a.request.sampling.seed, a.request.sampling.repetition_penalty) == (42, 1.2),
        fields={"seed": 42, "repetition_penalty": 1.2},
    ),
    *(
        respond(f"a seed of {seed} is refused", VH, Refused("seed", why=FAULT), fields={"seed": seed})
        for seed in (2**63, -(2**63) - 1)
    ),
    *(
        respond(f"a seed of {seed} is taken", VH, lambda a: a.status == 200, fields={"seed": seed})
        for seed in (2**63 - 1, -(2**63))
    ),
    respond(
        "json_object holds the text",
        VH,
        lambda a: isinstance(json.loads(output_text(a)), dict),
        said="{}",
        fields={"text": {"format": {"type": "json_object"}}},
    ),
    respond(
        "structured_outputs hold the text",
        VH,
        lambda a: output_text(a) == "hello",
        said="hello",
        fields={"structured_outputs": {"grammar": 'root ::= "hello"'}},
    ),
    respond(
        "structured_outputs and a format are refused",
        VH,
        Refused("structured_outputs.grammar", why=FAULT),
        fields={"structured_outputs": {"grammar": 'root ::= "hello"'}, "text": TYPED},
    ),
    respond(
        "vllm_xargs are refused by name",
        VH,
        Refused("vllm_xargs", why="no engine has other arguments"),
        fields={"vllm_xargs": {"custom": "value"}},
    ),
    respond(
        "tool_choice none calls nothing",
        SB,
        lambda a: not output(a, "function_call"),
        said=CALL,
        fields={"tools": [FUNCTION], "tool_choice": "none"},
    ),
    respond(
        "a strict function is called by its schema",
        SB,
        lambda a: set(json.loads(output(a, "function_call")[0]["arguments"])) == {"city", "days"},
        said=CALL,
        fields={"tools": [{**FUNCTION, "strict": True}]},
    ),
    respond(
        "several functions are told",
        SB,
        lambda a: "weather" in a.prompt and "clock" in a.prompt,
        fields={"tools": [FUNCTION, {"type": "function", "name": "clock", "parameters": {"type": "object"}}]},
    ),
    respond(
        "an answer without a call is completed",
        SB,
        lambda a: final(a)["status"] == "completed",
        fields={"tools": [FUNCTION]},
    ),
    respond("the events of a text nest", VS, nests, fields={"stream": True}),
    respond(
        "the events of a function's call nest",
        VY,
        nests,
        fields={"tools": [FUNCTION], "stream": True},
        said=CALL,
    ),
    respond(
        "the events of thoughts and a text nest",
        VS,
        nests,
        fields={"stream": True},
        model="thinks",
        said=THOUGHT,
    ),
    respond(
        "deltas of arguments join to the call's",
        VY,
        grown,
        fields={"tools": [FUNCTION], "stream": True},
        said=CALL,
    ),
    *streams(
        respond(
            "a required call that is cut off is none",
            VY,
            lambda a: (
                not output(a, "function_call")
                and final(a)["incomplete_details"]["reason"] == "max_output_tokens"
            ),
            said="No.",
            fields={"tools": [FUNCTION], "tool_choice": "required", "max_output_tokens": 5},
        ),
        respond(
            "a named function is called",
            VY,
            lambda a: output(a, "function_call")[0]["name"] == "weather",
            fields={"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "weather"}},
            said="No.",
        ),
    ),
    respond(
        "a developer's message is the system's",
        "vLLM responses/test_protocol.py",
        lambda a: a.prompt.startswith("<|start|>system\nBe brief."),
        fields={
            "input": [
                {
                    "type": "message",
                    "role": "developer",
                    "content": [{"type": "input_text", "text": "Be brief."}],
                },
                {"role": "user", "content": "hi"},
            ]
        },
    ),
    respond(
        "a penalty is taken",
        SV,
        lambda a: a.request.sampling.frequency_penalty == 1.0,
        fields={"frequency_penalty": 1.0},
    ),
    Behaviour(
        "tokens of an input are counted",
        "vLLM responses/test_count_tokens.py",
        lambda a: a.body["input_tokens"] > 5,
        "/v1/responses/input_tokens",
        {"model": tiny.MODEL, "input": "hi"},
    ),
    *streams(
        respond("a text is answered", VS, lambda a: output_text(a) == "Hello world"),
        respond("its status is completed", VS, lambda a: final(a)["status"] == "completed"),
        respond(
            "what is cut off is incomplete, by max_output_tokens",
            VS,
            lambda a: (
                (final(a)["status"], final(a)["incomplete_details"]["reason"])
                == ("incomplete", "max_output_tokens")
            ),
            fields={"max_output_tokens": 2},
            said=LONG,
        ),
        respond(
            "usage has input, output and total tokens",
            SV,
            lambda a: (u := final(a)["usage"])["input_tokens"] + u["output_tokens"] == u["total_tokens"] > 0,
        ),
        respond(
            "instructions come before the input",
            SV,
            lambda a: a.prompt.index("Be brief") < a.prompt.index("hi"),
            fields={"instructions": "Be brief."},
        ),
        respond(
            "messages are an input",
            VS,
            lambda a: "Say it" in a.prompt,
            fields={
                "input": [
                    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Say it"}]}
                ]
            },
        ),
        respond(
            "a function is called",
            VY,
            lambda a: json.loads(output(a, "function_call")[0]["arguments"])["city"],
            fields={"tools": [FUNCTION]},
            said=CALL,
        ),
        respond(
            "a function that is required is called",
            VY,
            lambda a: output(a, "function_call")[0]["name"] == "weather",
            fields={"tools": [FUNCTION], "tool_choice": "required"},
            said="No.",
        ),
        respond(
            "a schema holds the text",
            "vLLM responses/test_structured_output.py",
            lambda a: set(json.loads(output_text(a))) == {"name", "age"},
            fields={"text": TYPED},
            said=ANN,
        ),
        respond(
            "thoughts are an item of their own",
            VS,
            lambda a: output(a, "reasoning") and output_text(a) == "Hello",
            model="thinks",
            said=THOUGHT,
        ),
    ),
    respond(
        "an id, a time, an object",
        SV,
        lambda a: (
            a.body["id"].startswith("resp_") and a.body["created_at"] and a.body["object"] == "response"
        ),
    ),
    respond(
        "error and incomplete_details are null",
        SV,
        lambda a: a.body["error"] is None and a.body["incomplete_details"] is None,
    ),
    respond(
        "a result of a function goes back",
        VY,
        lambda a: "warm" in a.prompt,
        fields={
            "input": [
                {"role": "user", "content": "hi"},
                {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "It is warm."},
            ]
        },
    ),
    respond(
        "history without ids is taken",
        VS,
        lambda a: "Fine" in a.prompt,
        fields={
            "input": [
                {"role": "user", "content": "hi"},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "Fine"}],
                },
                {"role": "user", "content": "why"},
            ]
        },
    ),
    respond(
        "history with ids and a status is taken",
        VS,
        lambda a: "Fine" in a.prompt,
        fields={
            "input": [
                {"role": "user", "content": "hi"},
                {
                    "type": "message",
                    "id": "msg_1",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "Fine", "annotations": []}],
                },
                {"role": "user", "content": "why"},
            ]
        },
    ),
    respond(
        "thoughts of history are taken",
        VS,
        lambda a: a.status == 200,
        fields={
            "input": [
                {"role": "user", "content": "hi"},
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "Hm."}],
                },
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "Fine"}],
                },
                {"role": "user", "content": "why"},
            ]
        },
    ),
    respond(
        "a stream begins with response.created and response.in_progress",
        SV,
        lambda a: a.types[:2] == ["response.created", "response.in_progress"],
        fields={"stream": True},
    ),
    respond(
        "include_usage of a stream is taken",
        SV,
        lambda a: final(a)["usage"]["total_tokens"] > 0,
        fields={"stream": True, "stream_options": {"include_usage": True}},
    ),
    respond(
        "a stream ends with response.completed",
        VS,
        lambda a: a.types[-1] == "response.completed",
        fields={"stream": True},
    ),
    respond(
        "its deltas join to the text",
        VS,
        lambda a: "".join(e["delta"] for e in a.events if e["type"] == "response.output_text.delta") == LONG,
        fields={"stream": True},
        said=LONG,
    ),
    respond(
        "what a stream opens it closes",
        VS,
        lambda a: all(
            a.types.count(f"response.{x}.added") == a.types.count(f"response.{x}.done")
            for x in ("output_item", "content_part")
        ),
        fields={"stream": True},
    ),
    respond(
        "its sequence numbers grow",
        "vLLM responses/test_streaming_events.py",
        lambda a: (n := [e["sequence_number"] for e in a.events]) == sorted(set(n)),
        fields={"stream": True},
    ),
    respond(
        "a function's arguments come in deltas and whole",
        VY,
        lambda a: (
            {"response.function_call_arguments.delta", "response.function_call_arguments.done"}
            <= set(a.types)
        ),
        fields={"tools": [FUNCTION], "stream": True},
        said=CALL,
    ),
    respond(
        "temperature and top_p come back",
        "vLLM responses/test_sampling_params.py",
        lambda a: (a.body["temperature"], a.body["top_p"]) == (0.5, 0.9),
        fields={"temperature": 0.5, "top_p": 0.9},
    ),
    respond(
        "top_k, repetition_penalty and a seed are taken",
        "vLLM responses/test_sampling_params.py",
        lambda a: a.request.sampling.top_k == 40,
        fields={"top_k": 40, "repetition_penalty": 1.2, "seed": 42},
    ),
    respond(
        "metadata come back", SV, lambda a: a.body["metadata"] == {"a": "b"}, fields={"metadata": {"a": "b"}}
    ),
    respond(
        "store false is taken",
        "vLLM responses/test_store_field.py",
        lambda a: a.status == 200,
        fields={"store": False},
    ),
    respond(
        "a previous_response_id that is not kept is refused",
        SV,
        Refused("previous_response_id", why=FAULT),
        fields={"previous_response_id": "bad"},
    ),
    respond(
        "background is refused by name",
        "vLLM responses/test_stateful.py",
        Refused("background", why="no queue"),
        fields={"background": True},
    ),
    respond(
        "a tool of another type is refused by name",
        SV,
        Refused("tools[0].type", why="functions are served"),
        fields={"tools": [{"type": "some_invalid_tool_type"}]},
    ),
    respond(
        "web_search is refused by name",
        "vLLM responses/test_mcp_tools.py",
        Refused("tools[0].type", why="functions are served"),
        fields={"tools": [{"type": "web_search"}]},
    ),
    respond("an input is needed", VZ, Refused("input", why=FAULT), fields={"input": ...}),
    respond(
        "an image is refused by name",
        "vLLM responses/test_image.py",
        Refused("input[0].content", why="images, audio, video"),
        fields={"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y"}]}]},
    ),
)
VM, SA = "vLLM anthropic/test_messages.py", "SGLang basic/test_anthropic_server.py"
SN = "SGLang function_call/test_anthropic_tool_use.py"
VX = "vLLM anthropic/test_anthropic_messages_conversion.py"
ask = partial(Behaviour, path=MESSAGES)
CLAUDE_TOOL: Final = {"name": "weather", "description": "It.", "input_schema": CITY}


def blocks(answer: Answer, kind: str) -> list[Any]:
    """Whole, of a stream, too."""
    if not answer.events:
        return [each for each in answer.body["content"] if each["type"] == kind]
    found = {
        e["index"]: dict(e["content_block"]) for e in answer.events if e["type"] == "content_block_start"
    }
    for event in answer.events:
        if event["type"] == "content_block_delta":
            for name, piece in event["delta"].items():
                if name != "type":
                    block = found[event["index"]]
                    block[name] = (block.get(name) or "") + piece
    return [block for block in found.values() if block["type"] == kind]


def arguments(block: Any) -> Any:
    return json.loads(block["partial_json"]) if "partial_json" in block else block["input"]


def stop_reason(answer: Answer) -> Any:
    return (
        next(e for e in answer.events if e["type"] == "message_delta")["delta"]["stop_reason"]
        if answer.events
        else answer.body["stop_reason"]
    )


NO_BLOCK: Final[dict[str, tuple[str, dict[str, Any], str]]] = {
    "a tool_use without an id": ("assistant", {"type": "tool_use", "name": "f", "input": {}}, "id"),
    "a tool_use with an empty id": (
        "assistant",
        {"type": "tool_use", "id": "", "name": "f", "input": {}},
        "id",
    ),
    "a tool_use without a name": ("assistant", {"type": "tool_use", "id": "t", "input": {}}, "name"),
    "a tool_use with an empty name": (
        "assistant",
        {"type": "tool_use", "id": "t", "name": "", "input": {}},
        "name",
    ),
    "a tool_use without an input": ("assistant", {"type": "tool_use", "id": "t", "name": "f"}, "input"),
    "a tool_result without a tool_use_id": ("user", {"type": "tool_result", "content": "x"}, "tool_use_id"),
    "a tool_result with an empty tool_use_id": (
        "user",
        {"type": "tool_result", "tool_use_id": ""},
        "tool_use_id",
    ),
    "a text block without a text": ("user", {"type": "text"}, "text"),
    "a thought without its text": ("assistant", {"type": "thinking", "signature": "abc"}, "thinking"),
}
VQ = "vLLM anthropic/test_content_block_validation.py"
MESSAGED: Final = behaviours(
    *(
        ask(
            f"{name} is refused",
            VQ,
            Refused(field, why=FAULT),
            fields={"messages": [USER, said(role, [block])]},
        )
        for name, (role, block, field) in NO_BLOCK.items()
    ),
    ask(
        "a tool_use with an empty input is taken",
        VQ,
        lambda a: a.status == 200,
        fields={
            "messages": [
                USER,
                said("assistant", [{"type": "tool_use", "id": "t1", "name": "ping", "input": {}}]),
                said("user", [{"type": "tool_result", "tool_use_id": "t1"}]),
            ]
        },
    ),
    ask(
        "a text block that is empty is taken",
        VQ,
        lambda a: a.status == 200,
        fields={"messages": [said("user", [{"type": "text", "text": ""}, {"type": "text", "text": "hi"}])]},
    ),
    ask(
        "a thought without a signature is taken",
        VQ,
        lambda a: a.status == 200,
        fields={
            "messages": [
                USER,
                said("assistant", [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "x"}]),
                USER,
            ]
        },
    ),
    Behaviour(
        "tokens are counted with a system text",
        SA,
        lambda a: a.body["input_tokens"] > 25,
        "/v1/messages/count_tokens",
        {"system": "Be brief, be kind, be right, and be as short as can be."},
    ),
    ask(
        "thinking disabled closes thoughts in the prompt",
        SA,
        lambda a: a.prompt.endswith("</think>\n\n"),
        fields={"thinking": {"type": "disabled"}},
        model="thinks",
        said="Hello",
    ),
    ask(
        "thoughts of an earlier turn reach the template",
        SA,
        lambda a: "Two and two." in a.prompt,
        model="thinks",
        fields={
            "messages": [
                USER,
                said(
                    "assistant",
                    [
                        {"type": "thinking", "thinking": "Two and two.", "signature": ""},
                        {"type": "text", "text": "Four"},
                    ],
                ),
                USER,
            ]
        },
    ),
    ask(
        "redacted thoughts of an earlier turn are left out",
        SA,
        lambda a: "<think>\nx" not in a.prompt and "Hi" in a.prompt,
        model="thinks",
        fields={
            "messages": [
                USER,
                said(
                    "assistant", [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Hi"}]
                ),
                USER,
            ]
        },
    ),
    ask(
        "a stream is an event stream",
        SA,
        lambda a: a.headers["content-type"].startswith("text/event-stream"),
        fields={"stream": True},
    ),
    ask(
        "content blocks are read",
        SA,
        lambda a: "What is 2" in a.prompt,
        fields={"messages": [said("user", [{"type": "text", "text": "What is 2+2?"}])]},
    ),
    ask(
        "a schema of output_config holds the answer",
        "vLLM anthropic/test_anthropic_messages_conversion.py",
        lambda a: set(json.loads(blocks(a, "text")[0]["text"])) == {"name", "age"},
        said=ANN,
        fields={"output_config": {"format": {"type": "json_schema", "schema": PERSON}}},
    ),
    ask("a body that is no JSON is refused", SA, Refused(None, why=FAULT), raw=b"not json"),
    *streams(
        ask(
            "a message is answered in a text block",
            SA,
            lambda a: blocks(a, "text")[0]["text"] == "Hello world",
        ),
        ask("stop_reason is end_turn", VM, lambda a: stop_reason(a) == "end_turn"),
        ask(
            "stop_reason is max_tokens at it",
            SA,
            lambda a: stop_reason(a) == "max_tokens",
            fields={"max_tokens": 2},
            said=LONG,
        ),
        ask("a system text is read", SA, lambda a: "Be brief" in a.prompt, fields={"system": "Be brief."}),
        ask(
            "system blocks are read",
            SA,
            lambda a: "Be brief" in a.prompt and "Be kind" in a.prompt,
            fields={"system": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]},
        ),
        ask(
            "several turns are read",
            SA,
            lambda a: a.prompt.count("<|start|>") == 4,
            fields={"messages": [USER, said("assistant"), USER]},
        ),
        ask(
            "a stop sequence ends it",
            SA,
            lambda a: (stop_reason(a), blocks(a, "text")[0]["text"]) == ("stop_sequence", "The quick "),
            fields={"stop_sequences": ["brown"]},
            said=LONG,
        ),
        ask(
            "a tool is used",
            VM,
            lambda a: arguments(blocks(a, "tool_use")[0]) == {"city": "Rome", "days": 3},
            fields={"tools": [CLAUDE_TOOL]},
            said=CALL,
        ),
        ask(
            "stop_reason is tool_use",
            VM,
            lambda a: stop_reason(a) == "tool_use",
            fields={"tools": [CLAUDE_TOOL]},
            said=CALL,
        ),
        ask(
            "tool_choice any uses one",
            SN,
            lambda a: arguments(blocks(a, "tool_use")[0])["city"],
            said="No.",
            fields={"tools": [CLAUDE_TOOL], "tool_choice": {"type": "any"}},
        ),
        ask(
            "tool_choice tool uses that one",
            SN,
            lambda a: blocks(a, "tool_use")[0]["name"] == "weather",
            said="No.",
            fields={"tools": [CLAUDE_TOOL], "tool_choice": {"type": "tool", "name": "weather"}},
        ),
        ask(
            "thoughts are a thinking block",
            VX,
            lambda a: blocks(a, "thinking")[0]["thinking"] == "Hm, they ask.",
            model="thinks",
            said=THOUGHT,
            fields={"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1500},
        ),
        ask(
            "thoughts need no budget",
            "SGLang features/test_enable_thinking.py",
            lambda a: blocks(a, "thinking")[0]["thinking"] == "Hm, they ask.",
            model="thinks",
            said=THOUGHT,
            fields={"thinking": {"type": "enabled"}, "max_tokens": 256},
        ),
    ),
    ask(
        "an id, a type, a role, the model",
        SA,
        lambda a: (
            a.body["id"].startswith("msg_")
            and a.body["model"]
            and (a.body["type"], a.body["role"]) == ("message", "assistant")
        ),
    ),
    ask(
        "usage has input and output tokens",
        SA,
        lambda a: a.body["usage"]["input_tokens"] > 0 and a.body["usage"]["output_tokens"] > 0,
    ),
    ask(
        "usage says what was cached",
        "vLLM anthropic/test_cache_accounting.py",
        lambda a: "cache_read_input_tokens" in a.body["usage"],
    ),
    ask(
        "top_p and top_k reach the draw",
        SA,
        lambda a: a.request.sampling.top_k == 40,
        fields={"top_p": 0.9, "top_k": 40},
    ),
    ask(
        "temperature reaches the draw",
        SA,
        lambda a: a.request.sampling.temperature == 0.0,
        fields={"temperature": 0.0},
    ),
    ask(
        "a result of a tool goes back",
        SN,
        lambda a: "It is warm" in a.prompt,
        fields={
            "messages": [
                USER,
                said(
                    "assistant",
                    [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}],
                ),
                said("user", [{"type": "tool_result", "tool_use_id": "t1", "content": "It is warm."}]),
            ]
        },
    ),
    ask(
        "a result may be text blocks",
        VX,
        lambda a: "It is warm" in a.prompt,
        fields={
            "messages": [
                USER,
                said("assistant", [{"type": "tool_use", "id": "t1", "name": "weather", "input": {}}]),
                said(
                    "user",
                    [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t1",
                            "content": [{"type": "text", "text": "It is warm."}],
                        }
                    ],
                ),
            ]
        },
    ),
    ask(
        "thoughts of an earlier turn are taken",
        VX,
        lambda a: a.status == 200,
        fields={
            "messages": [
                USER,
                said(
                    "assistant",
                    [
                        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                        {"type": "text", "text": "Fine"},
                    ],
                ),
                USER,
            ]
        },
    ),
    ask(
        "a stream begins with message_start and ends with message_stop",
        SA,
        lambda a: (a.types[0], a.types[-1]) == ("message_start", "message_stop"),
        fields={"stream": True},
    ),
    ask(
        "what a stream opens it closes",
        SA,
        lambda a: a.types.count("content_block_start") == a.types.count("content_block_stop") == 1,
        fields={"stream": True},
    ),
    ask(
        "message_delta has usage",
        SA,
        lambda a: next(e for e in a.events if e["type"] == "message_delta")["usage"]["output_tokens"] > 0,
        fields={"stream": True},
    ),
    ask(
        "tool input comes as input_json_delta",
        SN,
        lambda a: any(
            e["type"] == "content_block_delta" and e["delta"]["type"] == "input_json_delta" for e in a.events
        ),
        fields={"stream": True, "tools": [CLAUDE_TOOL]},
        said=CALL,
    ),
    ask(
        "max_tokens has to be there and above 0",
        SA,
        Refused("max_tokens", why=FAULT),
        fields={"max_tokens": -1},
    ),
    ask("no messages are refused", SA, Refused("messages", why=FAULT), fields={"messages": []}),
    ask(
        "an image is refused by name",
        VX,
        Refused("messages[0].content", why="images, audio, video"),
        fields={
            "messages": [said("user", [{"type": "image", "source": {"type": "url", "url": "http://x/y"}}])]
        },
    ),
    ask("anthropic-beta headers are taken", VX, lambda a: a.status == 200, headers={"anthropic-beta": "x"}),
    Behaviour("tokens are counted", SA, lambda a: a.body["input_tokens"] > 5, "/v1/messages/count_tokens"),
    Behaviour(
        "tokens are counted with tools",
        SA,
        lambda a: a.body["input_tokens"] > 50,
        "/v1/messages/count_tokens",
        {"tools": [CLAUDE_TOOL]},
    ),
)
