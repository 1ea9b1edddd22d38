"""Grammars for structured output and for tool calls, and rewriting of the JSON schemas in them.

A request's constraint is compiled before the request is placed on workers. So a constraint that no answer can
follow is refused with status 400. The `schema_*` modules rewrite schemas into keywords that the grammar
library (llguidance) supports. `baton.grammars` compiles the result.
"""
