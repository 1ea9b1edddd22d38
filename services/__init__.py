"""Baton: serving of large language models with prefill and decode in separate processes.

The import name is `baton`. In a checkout `baton` is a link to the folder `services`.
"""

if __name__ != "baton":
    raise ImportError(f"import this package as `baton`, not as `{__name__}`", name=__name__)
