"""HTTP API: OpenAI's chat completions, completions and responses, and Anthropic's messages.

The bootstrap process calls `create_app` once, with a `Backend` that turns one resolved request into a stream
of tokens. Each request passes through these packages, in this order: `http` (exchange, authentication, body),
`requests` (fields, checks, meaning), `text` (template, tokens), `tools` (output format, constraints) and
`generation` (answer, reply). `chat`, `completions`, `messages` and `responses` hold what is specific to one
API. This package imports `wire`, `grammars`, `runtime` and the core's values. It imports no worker, no engine
and no torch.
"""
