"""How does a GGUF file become a directory of safetensors, with its tokenizer and chat template?

    python -m services.engine.convert SOURCE TARGET [NAME]

Run in a process of its own, once per file: the library's loader takes seconds to minutes. The weights are
written as float32, which holds every GGUF format exactly; they are narrowed when they are loaded.
"""

import json
import os
import sys
from pathlib import Path


def convert(source: Path, target: Path, name: str) -> None:
    """Write the model in the GGUF file `source` to the new directory `target`.

    Raises what the library raises on a file that it cannot read or an architecture that it does not know.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    _say("reading the weights")
    folder, file = str(source.parent), source.name
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=file,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    _say("reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file, local_files_only=True)
    # The weights are plain numbers by now; with these left in place the library declines to save them.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    _say("writing safetensors")
    target.mkdir()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    (target / "baton.json").write_text(json.dumps({"name": name, "source": file}), "utf-8")
    for path in target.iterdir():
        path.chmod(0o644)
        _flush(path)


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def _flush(path: Path) -> None:
    """Onto the disk: the directory is renamed into place next, and must then be whole."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def main(arguments: list[str]) -> int:
    """Returns the exit code. What went wrong is the last line of stderr."""
    if len(arguments) not in (2, 3):
        print("usage: python -m services.engine.convert SOURCE TARGET [NAME]", file=sys.stderr)  # noqa: T201
        return 2
    source, target = Path(arguments[0]).resolve(), Path(arguments[1])
    try:
        convert(source, target, arguments[2] if len(arguments) == 3 else source.stem)
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
