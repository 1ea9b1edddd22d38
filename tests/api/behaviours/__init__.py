"""Behaviours of a text server that vLLM's and SGLang's own test suites assert, one a row, in our words.

`test_behaviours.py` asks each of them; `page.py` counts them for docs/behaviours.md.
"""
