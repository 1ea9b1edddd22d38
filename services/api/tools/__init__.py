"""Parsing and constraining of a model's output: content, reasoning, tool calls and structured output.

`formats` is the table of the formats in which models write reasoning and tool calls. `parsing` splits an
answer into its parts by a format. `constraints` makes the grammar that an answer has to follow. A model's
formats are detected at the start (`format_detection`). For each chat a constraint is compiled, and then each
choice of its answer is parsed. `parsing` and `formats` use no I/O, clock or threads. Routes and renderings
import this package, and it imports none of them.
"""
