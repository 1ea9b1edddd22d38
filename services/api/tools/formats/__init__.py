"""Formats in which families of models write reasoning and tool calls, and the parsers of their calls.

`output_formats` is the table: a row has the format's names, its markup and the syntaxes of its calls.
"""
