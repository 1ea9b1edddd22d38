"""OpenAI's chat completions: the shape of answers and of stream chunks."""
