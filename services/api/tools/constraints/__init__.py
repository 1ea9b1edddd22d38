"""Grammars for structured output and for tool calls, and the JSON schemas in them.

A request's constraint is compiled before the request is placed, so that one that cannot be followed is a 400.
`schema_*` rewrite schemas into what the grammar library reads. `baton.grammars` compiles the result.
"""
