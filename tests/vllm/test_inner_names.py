"""Tests that vLLM has every inner name that the engine uses, so that a new version fails by a name."""

from dataclasses import fields
from importlib import import_module
from typing import Any

import pytest

MODULES = {
    "vllm.config": ["set_current_vllm_config"],
    "vllm.engine.arg_utils": ["EngineArgs.create_engine_config"],
    "vllm.model_executor.models.utils": ["extract_layer_index"],
    "vllm.platforms": ["current_platform.is_cpu", "current_platform.update_block_size_for_backend"],
    "vllm.sampling_params": ["SamplingParams"],
    "vllm.v1.attention.backend": [
        "AttentionBackend.get_supported_kernel_block_sizes",
        "AttentionBackend.supported_kv_cache_layouts",
        "AttentionBackend.get_name",
    ],
    "vllm.model_executor.layers.attention_layer_base": [
        "AttentionLayerBase.bind_kv_cache",
        "AttentionLayerBase.get_attn_backend",
    ],
    "vllm.model_executor.layers.linear": ["QKVParallelLinear"],
    "vllm.model_executor.layers.mamba.abstract": ["MambaBase.bind_kv_cache"],
    "vllm.v1.kv_cache_interface": [
        "ChunkedLocalAttentionSpec",
        "FullAttentionSpec",
        "KVCacheConfig.needs_kv_cache_zeroing",
        "MambaSpec",
        "MLAAttentionSpec",
        "SlidingWindowSpec",
    ],
    "vllm.v1.worker.worker_base": ["WorkerWrapperBase.init_worker", "WorkerWrapperBase.init_device"],
    "vllm.v1.worker.gpu_worker": [
        "Worker.load_model",
        "Worker.get_kv_cache_spec",
        "Worker.determine_available_memory",
        "Worker.initialize_from_config",
        "Worker.compile_or_warm_up_model",
        "Worker.execute_model",
    ],
    "vllm.v1.worker.gpu_model_runner": ["GPUModelRunner.initialize_kv_cache_tensors"],
}
FIELDS = {
    ("vllm.v1.core.sched.output", "SchedulerOutput"): {
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "scheduled_encoder_inputs",
        "finished_req_ids",
        "free_encoder_mm_hashes",
    },
    ("vllm.v1.core.sched.output", "NewRequestData"): {
        "req_id",
        "prompt_token_ids",
        "mm_features",
        "sampling_params",
        "pooling_params",
        "block_ids",
        "num_computed_tokens",
        "lora_request",
    },
    ("vllm.v1.core.sched.output", "CachedRequestData"): {
        "req_ids",
        "new_token_ids",
        "new_block_ids",
        "num_computed_tokens",
        "num_output_tokens",
    },
    ("vllm.v1.kv_cache_interface", "KVCacheConfig"): {"num_blocks", "kv_cache_tensors", "kv_cache_groups"},
    ("vllm.v1.kv_cache_interface", "MambaSpec"): {"shapes", "dtypes", "page_size_padded", "tp_replicated"},
    ("vllm.v1.kv_cache_interface", "KVCacheTensor"): {"size", "layers", "layer_stride", "block_stride"},
}
RUNNER = {"requests", "input_batch", "execute_model_state", "kv_caches", "shared_kv_cache_layers", "model"}
BATCH = {"req_ids", "req_id_to_index", "token_ids_cpu", "is_token_ids", "num_tokens_no_spec"}


@pytest.mark.parametrize("module", MODULES)
def test_names_of_modules(module: str) -> None:
    for path in MODULES[module]:
        found: Any = import_module(module)
        for name in path.split("."):
            assert hasattr(found, name), f"{module} has no {path}"
            found = getattr(found, name)


@pytest.mark.parametrize("place", FIELDS, ids=lambda place: place[1])
def test_fields_of_values(place: tuple[str, str]) -> None:
    module, name = place
    known = {each.name for each in fields(getattr(import_module(module), name))}
    assert known >= FIELDS[place], FIELDS[place] - known


def test_attributes_of_the_runner(engine: Any) -> None:
    runner = engine.runner.model.runner
    assert [each for each in RUNNER if not hasattr(runner, each)] == []
    assert [each for each in BATCH if not hasattr(runner.input_batch, each)] == []
    assert hasattr(runner.model, "compute_logits")


def test_every_variable_is_one_of_vllm() -> None:
    """An unknown variable would be ignored without a warning."""
    from baton.vllm.environment import VARIABLES

    known = import_module("vllm.envs").environment_variables
    assert [name for name in VARIABLES if name.startswith("VLLM") and name not in known] == []
    assert "VLLM_PP_LAYER_PARTITION" in known


def test_globals_are_as_before(engine: Any) -> None:
    import torch

    assert engine is not None
    assert torch.set_num_threads.__module__ != "vllm.v1.worker.cpu_worker"
