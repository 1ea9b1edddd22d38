"""OpenAI's chat completions: the format of responses and of stream chunks."""
