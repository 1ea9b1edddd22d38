"""Parser of a model's text into content, reasoning and tool calls. No I/O, clock or threads."""
