"""OpenAI's text completions: the format of responses and of stream chunks."""
