"""HTTP API: OpenAI's chats, completions and responses, and Anthropic's messages.

The bootstrap calls `create_app` once, with a `Backend` that turns one resolved request into a stream of
tokens. Each request passes `http` (exchange, authentication, body), `requests` (fields, checks,
meaning), `text` (template, tokens), `tools` (output format, constraints) and `generation` (answer,
reply), in this order. `chat`, `completions`, `messages` and `responses` hold what one API has of its
own. The package imports `wire`, `grammars`, `runtime` and the core's values. It imports no worker, no
engine and no torch.
"""
