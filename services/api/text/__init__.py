"""Text and tokens: chat templates, the tokenizer, its thread pool, the detokenizer and stop strings.

`served_model` loads the tokenizer at the start. `generation` uses it to encode prompts and to decode answers.
These files know neither HTTP nor the schemas of requests, and they load no torch.
"""
