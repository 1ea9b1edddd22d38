"""From a validated request to its reply: prompt, choices, answer stream, whole and streamed replies.

Routes call `GenerationService` with a request and a rendering. It encodes the prompt, applies
constraints, builds the requests for the workers, reads their tokens into choices, and replies in the
shape of the rendering. These files may import `http`, `requests`, `text` and `tools`, but no single
API's package.
"""
