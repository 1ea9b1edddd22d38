"""Generation of the reply to a validated request: its prompt, its choices, and the whole or streamed reply.

The routes of every API call `GenerationService` with a request and a rendering, which knows the API's
response format. The service encodes the prompt, compiles constraints, and builds the requests for the
workers. It reads their output tokens into choices, and replies in the rendering's format. These files may
import `http`, `requests`, `text` and `tools`, but no single API's package.
"""
