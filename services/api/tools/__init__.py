"""Reading and constraining what a model writes: content, reasoning, tool calls and structured output.

`formats` is the table of the formats in which models write reasoning and tool calls. `parsing` takes an
answer apart by a format. `constraints` makes the grammar that an answer has to follow. A chat first picks its
formats (`format_detection`), then has its constraint compiled, and last parses each choice of its answer.
`parsing` and `formats` are pure. Routes and renderings import from here, and nothing here imports them.
"""
