"""OpenAI's text completions: the shape of answers and of stream chunks."""
