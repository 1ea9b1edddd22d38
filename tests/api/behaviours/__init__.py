"""What vLLM's and SGLang's own test suites assert of a server of text, one behaviour a row, in our words.

`test_behaviours.py` asks each of them; `page.py` counts them for docs/behaviours.md.
"""
