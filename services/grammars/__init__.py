"""Grammars that constrain a model's output (structured output), compiled with llguidance.

The bootstrap checks a client's grammar (`grammar_check`). A worker compiles it again (`grammar_cache`). Its
state gives the mask of allowed tokens at each position (`grammar_state`). Imports `rooms`, `runtime` and
`models`, and no torch.
"""
