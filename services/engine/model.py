"""How does a model directory become a module that computes logits over our pages?

The definition is the model library's own; only its attention is ours.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as library_logging

from services.engine.attention import NAME, Attend, attending
from services.engine.kv_cache import DTYPES
from services.engine.memory import available_bytes
from services.engine.supported import Geometry, Probe, UnsupportedModel, refuse_by_configuration
from services.runtime.errors import StartupError
from services.runtime.model_facts import ModelFacts, ModelUnreadable, read_model, weight_files

AUTO_DTYPE = "bfloat16"
AUTO = "auto"


class DeviceNotFound(StartupError):
    """`--device` names what this machine, or this build of the tensor library, does not have."""


class Model:
    """A loaded model. Used from one thread at a time."""

    def __init__(self, module: Any, facts: ModelFacts, dtype: str, device: torch.device) -> None:
        """Looks at one small forward pass. Raises UnsupportedModel."""
        self.facts = facts
        self.dtype = dtype
        self.device = device
        self._module = module
        probe = Probe()
        where = torch.arange(2, device=device)[None]
        try:
            logits = self.logits(torch.zeros_like(where), where, where[0, 1:], probe)
        except (RuntimeError, AttributeError, TypeError, ValueError, LookupError) as error:
            raise UnsupportedModel(
                f"the model {facts.name} ({module.config.model_type}) cannot be served: its definition does "
                f"not run over pages: {_first_line(error)}"
            ) from error
        self.geometry: Geometry = probe.verdict(facts.name, module.config)
        self.vocab_size: int = logits.shape[1]

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """[N, vocabulary] logits, in the model's dtype, at the places `keep` [N] of the flat batch `tokens`
        [1, T] at `positions` [1, T]."""
        with torch.inference_mode(), attending(attend):
            answer = self._module(
                input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=keep
            )
        logits: torch.Tensor = answer.logits[0]
        return logits

    def weights(self) -> list[torch.Tensor]:
        """Every weight once, tied ones too."""
        return [each.data for each in self._module.parameters()]


def load_model(directory: Path, dtype: str, device: str) -> Model:
    """Load the model in `directory` straight in `dtype` ("auto", "bfloat16" or "float32") on `device`
    ("auto", "cpu" or "cuda[:N]").

    Raises ModelNotFound, ModelUnreadable, UnsupportedModel, DeviceNotFound or StartupError.
    """
    facts = read_model(directory)
    place = find_device(device)
    chosen = AUTO_DTYPE if dtype == AUTO else dtype
    library_logging.disable_progress_bar()
    config = _configuration(directory, facts.name)
    refuse_by_configuration(facts.name, config)
    _check_memory(directory, place, DTYPES[chosen].itemsize)
    module = _load(directory, facts.name, config, DTYPES[chosen]).to(place).eval().requires_grad_(False)
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise UnsupportedModel(
            f"the model {facts.name} ({config.model_type}) cannot be served: its definition computes the "
            "logits of all positions at once"
        )
    return Model(module, facts, chosen, place)


def find_device(device: str) -> torch.device:
    """`device` with its number; auto is CUDA if there is one. Raises DeviceNotFound."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == AUTO:
        device = "cuda" if there else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise DeviceNotFound(f"--device {device}: give auto, cpu or cuda[:N]") from error
    if place.type == "cpu":
        return torch.device("cpu")
    if place.type != "cuda":
        raise DeviceNotFound(f"--device {device}: give auto, cpu or cuda[:N]")
    if not there:
        raise DeviceNotFound(f"--device {device}: this machine has no CUDA device that PyTorch can use")
    number = place.index or 0
    if number >= there:
        raise DeviceNotFound(f"--device {device}: this machine has {there} CUDA devices, cuda:0 the first")
    return torch.device("cuda", number)


def _configuration(directory: Path, name: str) -> Any:
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except (KeyError, ValueError, TypeError, AttributeError, StrictDataclassError) as error:
        raise UnsupportedModel(
            f"the model {name} cannot be served: the transformers library does not know its configuration: "
            f"{_first_line(error)}"
        ) from error


def _load(directory: Path, name: str, config: Any, dtype: torch.dtype) -> Any:
    try:
        module, told = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=NAME,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (KeyError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise UnsupportedModel(
            f"the model {name} ({config.model_type}) cannot be served: the transformers library cannot load "
            f"it with an attention of ours: {_first_line(error)}"
        ) from error
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ModelUnreadable(f"{directory}: the weights cannot be loaded: {_first_line(error)}") from error
    missing = sorted(told["missing_keys"])
    if missing:
        raise ModelUnreadable(
            f"{directory}: the files lack {len(missing)} of the model's weights, {missing[0]} among them"
        )
    return module


def _check_memory(directory: Path, device: torch.device, number_bytes: int) -> None:
    """Raise StartupError if the weights alone cannot fit. The files' own numbers have 1 to 4 bytes, so what
    they take in memory is known only roughly: judged by the least it can be."""
    least = sum(path.stat().st_size for path in weight_files(directory)) * number_bytes // 4
    free = available_bytes(device)
    if free is not None and least > free:
        raise StartupError(
            f"the model {directory} takes at least {least} bytes on {device}, and {free} are available there"
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
