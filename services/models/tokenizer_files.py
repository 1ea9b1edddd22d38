"""Loading of a model directory's tokenizer by the transformers library."""

import logging
from pathlib import Path
from typing import Any

from baton.runtime.errors import StartupError, describe_error


class TokenizerUnusable(StartupError):
    """The model directory has no tokenizer that can be used. The text names the problem."""


def reference_tokenizer(model_dir: Path) -> Any:
    """Return the tokenizer of a model directory, loaded by transformers, with a `tokenizers` backend.

    Raises TokenizerUnusable.
    """
    from transformers import AutoTokenizer

    quiet = logging.getLogger("transformers.tokenization_utils_base")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        reference = AutoTokenizer.from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # any error that the library raises for a file
        raise TokenizerUnusable(_why(model_dir, error)) from error
    finally:
        quiet.setLevel(level)
    if not reference.is_fast:
        raise TokenizerUnusable(f"{model_dir}: the tokenizer has no tokenizer.json, which is needed here")
    return reference


def _why(model_dir: Path, error: Exception) -> str:
    """Return the reason why a tokenizer cannot be loaded, which names the file rather than transformers'
    error."""
    file = model_dir / "tokenizer.json"
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: it cannot be read: {error.strerror}"
    if not file.is_file():
        return f"{model_dir}: no usable tokenizer: there is no file {file.name}"
    return f"{file}: damaged, or of an unknown form ({describe_error(error)})"
