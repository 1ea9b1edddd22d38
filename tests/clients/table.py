"""Clients that are tried against a running stack, their versions and scripts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

SCRIPTS: Final = Path(__file__).with_name("scripts")
LINES_MAX: Final = 60
"""Most lines of a script, which is what a user would write."""


@dataclass(frozen=True, slots=True)
class Client:
    """A client as users install it, and the script that uses it."""

    name: str
    script: str
    """File name in `scripts`. A name with `.mjs` runs in Node, others in Python."""
    packages: tuple[str, ...]
    """Packages from PyPI or npm that the script needs, each with its version."""
    asks: str
    """What the script does with the client, as the page prints it."""
    arguments: tuple[str, ...] = ()
    has_long_prompts: bool = False
    """Whether its prompts exceed the demo model's context. It is tried with `long_model` then."""

    @property
    def is_node(self) -> bool:
        return self.script.endswith(".mjs")


OPENAI: Final = "openai==3.57.0"
OPENAI_NODE: Final = ("openai@7.57.0", "zod@4.6.7")
CLIENTS: Final = (
    Client(
        "openai",
        "openai_python.py",
        (OPENAI,),
        "chat, stream, `.parse`, tools and their results, the stream helper",
    ),
    Client(
        "openai-responses",
        "openai_python_responses.py",
        (OPENAI,),
        "responses, their stream, `.parse`, tools and their results",
    ),
    Client(
        "openai-node",
        "openai_node.mjs",
        OPENAI_NODE,
        "chat, stream, `.parse`, `.runTools`",
        ("chat",),
    ),
    Client(
        "openai-node-responses",
        "openai_node.mjs",
        OPENAI_NODE,
        "responses, `.parse`, a tool in their stream",
        ("responses",),
    ),
    Client(
        "langchain",
        "langchain_chat.py",
        ("langchain-openai==1.7.4", "langchain==1.5.2", OPENAI),
        "invoke, stream, `bind_tools`, structured output by `json_schema`, `function_calling`, `json_mode`",
    ),
    Client(
        "llama-index",
        "llama_index_llm.py",
        ("llama-index-llms-openai-like==0.8.1", "llama-index-core==0.14.25"),
        "chat, stream, `chat_with_tools`, `predict_and_call`, `structured_predict`, `as_structured_llm`",
    ),
    Client(
        "pydantic-ai",
        "pydantic_ai_agent.py",
        ("pydantic-ai-slim[openai]==2.68.0", OPENAI),
        "`ToolOutput`, `NativeOutput`, `PromptedOutput`, a tool that it may call, a function that it has to",
    ),
    Client(
        "instructor",
        "instructor_modes.py",
        ("instructor==1.17.0",),
        "`TOOLS`, `JSON_SCHEMA`, `JSON`, `create_partial`",
    ),
    Client(
        "openai-agents",
        "openai_agents_sdk.py",
        ("openai-agents==0.24.0", OPENAI),
        "`OpenAIChatCompletionsModel`: an output type, a tool, a tool and an answer",
        ("chat",),
    ),
    Client(
        "openai-agents-responses",
        "openai_agents_sdk.py",
        ("openai-agents==0.24.0", OPENAI),
        "the same by `OpenAIResponsesModel`",
        ("responses",),
    ),
    Client(
        "smolagents",
        "smolagents_agent.py",
        ("smolagents[openai]==1.26.0", OPENAI),
        "a tool, a form of output, `ToolCallingAgent`",
    ),
    Client(
        "inspect-ai",
        "inspect_task.py",
        ("inspect-ai==0.3.285", OPENAI),
        "a task with a tool that has to be called, and one without",
    ),
    Client("llm", "llm_command.py", ("llm==0.36", OPENAI), "a prompt, `--schema`, `-T`"),
    Client(
        "vercel-ai",
        "vercel_ai.mjs",
        ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"),
        "`generateText`, `streamText`, `Output.object`, tools, two steps in a stream",
        ("chat",),
    ),
    Client(
        "vercel-ai-anthropic",
        "vercel_ai.mjs",
        ("ai@7.0.173", "@ai-sdk/anthropic@4.0.105", "zod@4.6.7"),
        "the same by Anthropic's API",
        ("messages",),
    ),
    Client(
        "claude-code",
        "claude_code.mjs",
        ("@anthropic-ai/claude-code@2.1.197",),
        "an answer, its stream, and what it says of a prompt that is too long",
    ),
    Client(
        "claude-code-tools",
        "claude_code_tools.mjs",
        ("@anthropic-ai/claude-code@2.1.197",),
        "its own 24 tools: a forced call, its result and the answer; `tool_choice` `any` of all of them,"
        " whole, strict and streamed",
        has_long_prompts=True,
    ),
    Client(
        "codex",
        "codex.mjs",
        ("@openai/codex@0.171.0",),
        "an answer with its own tools, without `web_search`, by the Responses API",
        has_long_prompts=True,
    ),
    Client(
        "opencode",
        "opencode.mjs",
        ("opencode-ai@1.18.33",),
        "an answer with its own 10 tools, by `@ai-sdk/openai-compatible`",
        has_long_prompts=True,
    ),
    Client(
        "qwen-code",
        "qwen_code.mjs",
        ("@qwen-code/qwen-code@0.24.4",),
        "an answer with its own 10 tools",
        has_long_prompts=True,
    ),
    Client(
        "continue",
        "continue_cli.mjs",
        ("@continuedev/cli@1.5.47",),
        "an answer of its command line with its own 9 tools",
        has_long_prompts=True,
    ),
    Client(
        "anthropic",
        "anthropic_python.py",
        ("anthropic==2.14.0",),
        "messages, their stream, tools whole and streamed, their results, `count_tokens`",
    ),
)
