"""Text and tokens: chat templates, the tokenizer, its thread pool, the detokenizer and stop strings.

`served_model` loads the tokenizer at start. `generation` encodes prompts and decodes answers by it.
These files know no HTTP and no request, and load no torch.
"""
