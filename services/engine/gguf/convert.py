"""Conversion of a GGUF file to a directory of safetensors, with its tokenizer and chat template.

    python -m baton.engine.gguf.convert SOURCE TARGET [NAME]

It runs in a process of its own, once for each file, because the transformers loader takes seconds to minutes.
Weights are written in bfloat16 if every number of the file is exact in it, else in float32, which represents
every GGUF format exactly. They are narrowed when they are loaded. Memory is about the size of the written
files. A file of which the library would make another model is refused.
"""

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from baton.runtime.errors import StartupError
from baton.runtime.memory_trimming import trimming_memory

if TYPE_CHECKING:
    from baton.engine.gguf.conversion_checks import Header

PLAIN: Final = "TokenizersBackend"
"""Name of the transformers tokenizer class that follows tokenizer.json and adds no rules of its own."""
NAMED: Final = 3
"""Most names of weights that an error message lists."""


class ConversionRefused(Exception):
    """The transformers library would convert the GGUF file to a model that differs from the file's. The text
    names the parts that would be lost."""


def convert(source: Path, target: Path, name: str) -> None:
    """Write the model in the GGUF file `source` to the new directory `target`.

    Raises ConversionRefused or UnsupportedModel. Also raises the errors of transformers for a file that it
    cannot read or an architecture that it does not know.
    """
    from baton.engine.gguf.gguf_file import replacing_library_reader

    with replacing_library_reader():
        _convert(source, target, name)


def _convert(source: Path, target: Path, name: str) -> None:
    from transformers import AutoConfig
    from transformers.utils import logging

    from baton.engine.execution.row_cache import stores_states
    from baton.engine.gguf.conversion_checks import (
        Header,
        lost_of_tokenizer,
        lost_settings,
        write_positions,
    )
    from baton.engine.gguf.gguf_file import read
    from baton.engine.gguf.gguf_settings import write_settings
    from baton.engine.loading.capability_probes import refuse_by_configuration

    logging.disable_progress_bar()
    _print("reading the header")
    folder, file = str(source.parent), source.name
    header = Header(read(source))
    config = AutoConfig.from_pretrained(
        folder, gguf_file=file, local_files_only=True, trust_remote_code=False
    )
    states = ["states of layers, which are not read from a GGUF file"] if stores_states(config) else []
    refuse_by_configuration(name, config, states)
    write_settings(header, config)
    write_positions(header, config)
    lost = [*lost_settings(header, config), *lost_of_tokenizer(header)]
    if lost:
        raise ConversionRefused(
            f"the model library's GGUF reader passes over what the model needs: {', '.join(lost)}"
        )
    _print("reading the tokenizer")
    tokenizer = read_tokenizer(source, header, config)
    _print("reading the weights")
    model = read_weights(source, header, config)
    _print("writing safetensors")
    target.mkdir()
    model.save_pretrained(target)
    write_tokenizer(tokenizer, target)
    (target / "baton.json").write_text(json.dumps({"name": name, "source": file}), "utf-8")
    for path in target.iterdir():
        path.chmod(0o644)
        _flush(path)


def read_weights(source: Path, header: "Header", config: Any) -> Any:
    """Return the transformers model with the dequantized weights of the GGUF file, ready to be saved.

    Raises ConversionRefused if a weight is missing, has another shape, or does not belong to the model.
    """
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    from baton.engine.gguf.conversion_checks import lost_weights

    model: Any
    model, info = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        config=config,
        dtype=torch.bfloat16 if header.narrow else torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below
    )
    for weight, found, wanted in sorted(info["mismatched_keys"], key=str):
        raise ConversionRefused(f"the weight {weight} has the shape {list(found)}, not {list(wanted)}")
    _refuse(sorted(info["missing_keys"]), f"which {type(model).__name__} has and the file lacks")
    _refuse(lost_weights(header, model), f"for which {type(model).__name__} has no place")
    if header.ends and model.generation_config is not None:
        model.generation_config.eos_token_id = header.ends
    # The weights are plain numbers by now, which the library refuses to save while these are set.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    return model


def read_tokenizer(source: Path, header: "Header", config: Any) -> Any:
    """Return the transformers tokenizer for the GGUF file, which splits text as the file states.

    Raises ConversionRefused if the tokenizer, once loaded from the written files, would split text in another
    way.
    """
    from transformers import AutoTokenizer

    from baton.engine.gguf.text_splitting import (
        BEGUN,
        BYTE_LEVEL,
        alike,
        begin_with_a_space,
        spaced,
        split_by,
        split_of,
    )

    tokenizer: Any = AutoTokenizer.from_pretrained(
        str(source.parent), gguf_file=source.name, local_files_only=True, trust_remote_code=False
    )
    if spaced(header):
        begin_with_a_space(tokenizer)
    split = split_of(header) if header.of_tokenizer("model") == BYTE_LEVEL else None
    if split is None:
        return tokenizer
    split_by(tokenizer, split)
    if split in BEGUN and header.of_tokenizer("add_bos_token") is None and tokenizer.bos_token:
        tokenizer.add_bos_token = True
        tokenizer.update_post_processor()
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        write_tokenizer(tokenizer, Path(folder))
        served: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not alike(tokenizer, served):
        raise ConversionRefused(
            f"the library's {type(served).__name__} would split text otherwise than {split}"
        )
    return tokenizer


def write_tokenizer(tokenizer: Any, target: Path) -> None:
    """Write the tokenizer into the directory `target`, so that it is loaded exactly as written.

    For some model types the transformers library would otherwise load a tokenizer class with a split of its
    own.
    """
    tokenizer.save_pretrained(target)
    path = target / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8")) | {"tokenizer_class": PLAIN}
    path.write_text(json.dumps(settings, indent=2), "utf-8")


def _refuse(weights: list[str], which: str) -> None:
    if weights:
        more = f" and {len(weights) - NAMED} more" if len(weights) > NAMED else ""
        raise ConversionRefused(f"there are weights {which}: {', '.join(weights[:NAMED])}{more}")


def _print(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def _flush(path: Path) -> None:
    """Write the file to disk. It must be complete there before its directory is renamed to its final name."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def main(arguments: list[str]) -> int:
    """Convert the file in the command line's `arguments`, and return the exit code.

    If the conversion fails, the last line of stderr gives the reason.
    """
    if len(arguments) not in (2, 3):
        print("usage: python -m baton.engine.gguf.convert SOURCE TARGET [NAME]", file=sys.stderr)  # noqa: T201
        return 2
    source, target = Path(arguments[0]).resolve(), Path(arguments[1])
    try:
        with trimming_memory():
            convert(source, target, arguments[2] if len(arguments) == 3 else source.stem)
    except (ConversionRefused, StartupError) as refused:
        print(refused, file=sys.stderr)  # noqa: T201
        return 1
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
