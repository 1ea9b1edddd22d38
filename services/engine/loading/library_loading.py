"""Calls of the transformers library that read a configuration and load a model, with errors in one line."""

import inspect
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig
from transformers import __version__ as installed_version

from baton.engine.execution.attention_span import ATTENTION_NAME
from baton.engine.loading.library_report import first_line, load_report
from baton.engine.loading.single_experts import joining_single_experts
from baton.engine.loading.text_model import attention_of, drop_encoders
from baton.engine.loading.weight_files import empty_module
from baton.engine_interface import RankGroupBroken
from baton.inference.kv_memory import DTYPES
from baton.models.model_facts import CONFIG_FILE, ModelUnreadable, UnsupportedModel, json_object, reading
from baton.models.model_requirements import ALIASES, canonical
from baton.runtime.errors import StartupError, describe_error
from baton.runtime.logging import Log

log = Log(__name__)

LIBRARY: Final[str] = installed_version
"""Installed version of the transformers library."""
LIBRARY_NEEDED: Final = "5.24"
"""First version of transformers with which this engine is tested. Other parts of Baton run with 5.19."""
LINE_CHARACTERS: Final = 300
"""Most characters of a library error that a message quotes."""


def check_library_version(version: str = LIBRARY) -> None:
    """Raise StartupError if `version` of transformers is too old for this engine."""
    if is_old_library(version):
        raise StartupError(
            f"the torch engine needs transformers {LIBRARY_NEEDED} or newer, and {version} is installed:"
            f" pip install 'transformers>={LIBRARY_NEEDED}'"
        )


def is_old_library(version: str = LIBRARY) -> bool:
    """Return whether `version` of transformers is older than this engine needs."""
    return _release(version) < _release(LIBRARY_NEEDED)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


@contextmanager
def library_errors_in_a_line(directory: Path) -> Iterator[None]:
    """Turn errors of the transformers library within the context into an UnsupportedModel of one line.

    It names the model. The place where the library failed is logged at level debug.
    """
    try:
        with reading(directory):
            yield
    except (StartupError, RankGroupBroken, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        log.debug("the model library failed", error=describe_error(error), where=_where(frames))
        raise UnsupportedModel(
            f"the model {directory} cannot be served: the transformers library fails with it, in "
            f"{frames[-1].name}: {describe_error(error)}"
        ) from error


def read_configuration(directory: Path, name: str) -> Any:
    """Return the transformers configuration object of the model, without its quantization.

    Raises ModelUnreadable, or UnsupportedModel for a type that the library does not know.
    """
    fields = json_object(directory / CONFIG_FILE, required=True)
    if not fields.get("model_type"):
        raise ModelUnreadable(f"{directory / CONFIG_FILE}: no model_type in it, which names its definition")
    try:
        if fields.get("model_type") in ALIASES:
            config = AutoConfig.for_model(**canonical(fields))
        else:
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except (KeyError, ValueError, TypeError, AttributeError, StrictDataclassError) as error:
        raise UnsupportedModel(
            f"the model {name} cannot be served: the transformers library does not know its configuration: "
            f"{_all_lines(error)}"
        ) from error
    for each in (config, config.get_text_config()):  # the library gets plain numbers
        vars(each).pop("quantization_config", None)
    return config


def load_definition(
    directory: Path,
    name: str,
    config: Any,
    dtype: torch.dtype,
    maker: Any,
    pending: Mapping[str, Any] | None = None,
    *,
    ours: bool,
) -> Any:
    """Load the transformers implementation of a model with its weights, and return it.

    `maker`: class that makes an implementation of `config`; with `pending` it is the implementation's own
    class. `pending`: weights, if they are not the plain contents of the files. `ours`: use our attention.
    Raises UnsupportedModel or ModelUnreadable.
    """
    with load_report() as report:
        try:
            with joining_single_experts():
                module, info = maker.from_pretrained(
                    directory if pending is None else None,
                    state_dict=pending,
                    config=config,
                    dtype=dtype,
                    attn_implementation=attention_of(config, ours=ours),
                    trust_remote_code=False,
                    local_files_only=True,
                    use_safetensors=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are refused below
                )
        except StartupError:  # raised by pending weights
            raise
        except (KeyError, ValueError, TypeError, AttributeError, ImportError) as error:
            raise UnsupportedModel(
                f"the model {name} ({config.model_type}) cannot be served: {_explanation(error, 'load')}"
            ) from error
        except (OSError, RuntimeError, SafetensorError) as error:
            reason = report.explain(first_line(error))
            raise ModelUnreadable(f"{directory}: the weights cannot be loaded: {reason}") from error
    for weight, found, wanted in sorted(info["mismatched_keys"], key=str):
        raise ModelUnreadable(
            f"{directory}: the weight {weight} has the shape {list(found)}, not {list(wanted)}"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelUnreadable(
            f"{directory}: the files lack {len(missing)} of the model's weights, {missing[0]} among them"
        )
    drop_encoders(name, module)
    return module


def make_definition(name: str, config: Any, dtype: str, *, ours: bool = True) -> Any:
    """Return the transformers implementation of a model without memory for its weights.

    `ours`: use our attention. Raises UnsupportedModel.
    """
    try:
        module = empty_module(config, DTYPES[dtype], ours=ours)
    except (KeyError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise UnsupportedModel(
            f"the model {name} ({config.model_type}) cannot be served: {_explanation(error, 'make')}"
        ) from error
    drop_encoders(name, module)
    return module


def check_logits(name: str, module: Any) -> None:
    """Raise UnsupportedModel if the transformers implementation can only compute the logits of all positions
    at once."""
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise UnsupportedModel(
            f"the model {name} ({module.config.model_type}) cannot be served: its definition computes the "
            "logits of all positions at once"
        )


def _where(frames: traceback.StackSummary) -> str:
    return " < ".join(f"{Path(each.filename).name}:{each.lineno}" for each in reversed(frames))


def _explanation(error: Exception, act: str) -> str:
    """Return the reason why the transformers library cannot `act`, "load" or "make", a model.

    An implementation that supports only its own attention functions looks ours up among them, and fails with
    its name.
    """
    cannot = f"the transformers library cannot {act} it"
    if error.args == (ATTENTION_NAME,):
        return f"{cannot} with an attention of ours: its definition takes none"
    if isinstance(error, KeyError):
        return f"{cannot}: its config.json names {first_line(error)}, which the library does not have"
    return f"{cannot}: {first_line(error)}"


def _all_lines(error: Exception) -> str:
    """Return an error's text in one line. The transformers library names a wrong value only behind the first
    line."""
    text = " ".join(str(error).split())
    return text if len(text) <= LINE_CHARACTERS else f"{text[:LINE_CHARACTERS]}…"
