"""A worker of vLLM with its model: loaded, and bound to memory of Baton's."""

import os
from collections.abc import Sequence
from multiprocessing import Lock
from pathlib import Path
from typing import Any, Final

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.worker.worker_base import WorkerWrapperBase

from baton.inference.device import find_device
from baton.inference.kv_memory import check_page_tokens
from baton.inference.rank_startup import STEP_TIMEOUTS
from baton.models.model_facts import ModelFacts, UnsupportedModel
from baton.pages.layout import KvGroup
from baton.runtime.errors import StartupError, describe_error
from baton.runtime.worker_settings import WorkerSettings
from baton.topology import Topology
from baton.vllm.environment import restoring_globals
from baton.vllm.kv_groups import LayerGroup, check_layout, group_layers, kv_group
from baton.vllm.memory import NULL_BLOCKS, VllmKvMemory
from baton.vllm.rotary_embeddings import rotate_by_head

ROWS_MAX: Final = 128
"""Most rows of one call of the worker."""
TOKENS_MIN: Final = 2048
"""Least number of tokens that one call of the worker takes."""
PAGE_SIZES: Final = (16, 32, 64, 128, 256)
"""Tokens per page that are looked at."""
LAYOUTS: Final = {"cpu": "LBHNC", "cuda": "BHLNC"}
"""vLLM's name of the memory order of pages, by device. Attention on CPUs knows no other name, and honours any
stride of blocks and heads."""


class KvConfig(KVCacheConfig):  # type: ignore[misc]
    """vLLM's configuration of KV memory that is zeroed where it has to be, by `VllmKvMemory`."""

    needs_kv_cache_zeroing = False


class ModelWorker:
    """One worker of vLLM, whose layers read and write the memory that is bound. One step at a time."""

    def __init__(self, config: Any, worker: Any, groups: Sequence[LayerGroup]) -> None:
        """`config`: vLLM's. `worker`: with its model loaded, and no memory yet."""
        self.worker = worker
        self.runner = worker.model_runner
        self.groups = list(groups)
        """Layers by KV group, in the order of the layout once `order_groups` was called."""
        self.rows_max = ROWS_MAX
        self.tokens_max: int = config.scheduler_config.max_num_batched_tokens
        self.device: torch.device = worker.device
        self._layers: dict[str, Any] = config.compilation_config.static_forward_context
        self._config = config
        self._bound: list[tuple[VllmKvMemory, int]] = []

    def page_sizes(self, page_tokens: int) -> list[int]:
        """Return the tokens per page that attention can have here, if `page_tokens` were requested."""
        possible = {*PAGE_SIZES, page_tokens}
        for each in self.groups:
            if not each.is_state:
                possible &= self._page_sizes(each, page_tokens)
        return list(possible)

    def order_groups(self, order: Sequence[int]) -> None:
        """Put `groups` into the order of the layout: `order` has the index of each in turn."""
        self.groups = [self.groups[index] for index in order]

    def kv_groups(self, context_length: int) -> list[KvGroup]:
        """Return the KV group of each of `groups`: the layers of this rank, and the heads of all ranks."""
        ranks = self._config.parallel_config.tensor_parallel_size
        return [kv_group(each, self._heads(each, ranks), ranks, context_length) for each in self.groups]

    def encoding(self, number: int) -> str:
        """Return what the form of pages in a group depends on beside its attention. After `take_memory`."""
        isa: str = getattr(self._layers[self.groups[number].names[0]], "isa", "")
        return f"-{isa}" if isa else ""

    def take_memory(self, pages: Sequence[int]) -> None:
        """Make vLLM's runner ready for this number of pages of each group, which `bind` gives it."""
        layout = LAYOUTS[self.device.type]
        tensors = []
        for group, count in zip(self.groups, pages, strict=True):
            if not group.is_state:
                check_layout(group.backend, layout, group.spec.num_kv_heads)
            size, page = (NULL_BLOCKS + count) * group.page_bytes, group.spec.page_size_bytes
            names = list(group.names)
            tensors.append(KVCacheTensor(size, names, layer_stride=page, block_stride=group.page_bytes))
        specs = [KVCacheGroupSpec(list(each.names), each.spec) for each in self.groups]
        config = KvConfig(NULL_BLOCKS + max(pages), tensors, specs, kv_cache_layout=layout)
        self.runner.initialize_kv_cache_tensors = lambda *_, **__: {}
        with set_current_vllm_config(self._config), restoring_globals():
            self.worker.initialize_from_config(config)
        if self._config.parallel_config.pipeline_parallel_size > 1:  # vLLM makes them in a run to profile
            self.runner.intermediate_tensors = self.runner.model.make_empty_intermediate_tensors(
                self.tokens_max, self.runner.model_config.dtype, self.device
            )

    def bind(self, memories: Sequence[VllmKvMemory]) -> None:
        """Let the layers read and write `memories`, one for each group. They do not follow their moves."""
        wanted = [(each, each.address) for each in memories]
        if self._bound != wanted:
            self._bound = wanted
            self._set_views(memories)

    def record(self) -> None:
        """Warm up, and record graphs on a GPU. After the first `bind`."""
        with set_current_vllm_config(self._config), restoring_globals():
            self.worker.compile_or_warm_up_model()

    def _set_views(self, memories: Sequence[VllmKvMemory]) -> None:
        views: dict[str, torch.Tensor] = {}
        for group, memory in zip(self.groups, memories, strict=True):
            views |= zip(group.names, memory.layers, strict=True)
        self.runner.kv_caches[:] = views.values()
        views |= {name: views[target] for name, target in self.runner.shared_kv_cache_layers.items()}
        for name, view in views.items():
            self._layers[name].bind_kv_cache(view)

    def _page_sizes(self, group: LayerGroup, page_tokens: int) -> set[int]:
        """Return the tokens per page that the attention of `group` can have."""
        chosen: int = group.spec.block_size
        if chosen != page_tokens:  # replaced by vLLM
            return {chosen}
        # vLLM would divide a multiple of a kernel's fixed size. Pages are never divided.
        sizes = group.backend.get_supported_kernel_block_sizes(group.spec)
        fixed = {each for each in sizes if isinstance(each, int)}
        bases = [each.base for each in sizes if not isinstance(each, int)]
        multiples = {each for each in {*PAGE_SIZES, page_tokens} for base in bases if each % base == 0}
        return {each for each in fixed | multiples if all(chunk % each == 0 for chunk in group.chunks)}

    def _heads(self, group: LayerGroup, ranks: int) -> int:
        """Return the KV heads of `group` over all tensor ranks, which replicate them if they are fewer."""
        if group.is_state:
            return ranks
        own: int = group.spec.num_kv_heads
        around = self.runner.model.get_submodule(group.names[0].rpartition(".")[0])
        totals = [
            each.total_num_kv_heads for each in around.children() if isinstance(each, QKVParallelLinear)
        ]
        totals.append(self._config.model_config.get_total_num_kv_heads())
        return next((each for each in totals if max(1, each // ranks) == own), own * ranks)


def start_worker(
    settings: WorkerSettings, directory: Path, facts: ModelFacts, topology: Topology, rank: int
) -> ModelWorker:
    """Start vLLM's worker of `rank`, with its part of the model in `directory`. Blocks for seconds.

    The number format is float32 on a CPU by default, since answers in bfloat16 depend on the batch there.
    Torch's default process group is that of the worker's ranks. Raises StartupError, with vLLM's own reason.
    """
    on_cpu, device = current_platform.is_cpu(), find_device(settings.device, rank)
    if device.type != ("cpu" if on_cpu else "cuda"):
        raise StartupError(
            f"--device {settings.device}: this build of vLLM is for {current_platform.device_type}"
        )
    step_timeout_s = STEP_TIMEOUTS * settings.group_timeout_ms // 1000
    dtype = settings.dtype if settings.dtype != "auto" else "float32" if on_cpu else "bfloat16"
    args = EngineArgs(
        model=str(directory),
        dtype=dtype,
        attention_backend="CPU_MLA" if on_cpu and dtype == "float32" else None,
        load_format=settings.load_format,
        max_model_len=facts.context_length,
        block_size=settings.page_tokens,
        max_num_seqs=ROWS_MAX,
        max_num_batched_tokens=max(TOKENS_MIN, facts.context_length),
        tensor_parallel_size=topology.tensor,
        pipeline_parallel_size=topology.pipeline,
        distributed_timeout_seconds=step_timeout_s,
        cpu_distributed_timeout_seconds=step_timeout_s,
        kv_cache_memory_bytes=settings.kv_cache_memory,
        gpu_memory_utilization=0.01,  # asked for at the start, though other workers may share the GPU
        enforce_eager=on_cpu,
        enable_prefix_caching=False,
        async_scheduling=False,
        disable_hybrid_kv_cache_manager=True,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    with restoring_globals():
        try:
            config = args.create_engine_config()
            count = config.model_config.get_total_num_hidden_layers()
            if topology.pipeline > 1:
                _divide_layers(config.model_config, facts.name, topology.pipeline)
            with set_current_vllm_config(config):
                worker = _load(config, rank, rank if device.index is None else device.index)
                if not config.model_config.is_hybrid:  # pages of several groups differ in size
                    current_platform.update_block_size_for_backend(config)
                specs = worker.get_kv_cache_spec()
                if not on_cpu:  # compiles, and makes the buffers that must not grow once graphs are recorded
                    worker.determine_available_memory()
                    torch.cuda.empty_cache()  # what torch caches counts as taken
        except (ValueError, RuntimeError, NotImplementedError, AssertionError, KeyError) as error:
            raise StartupError(f"vLLM refuses the model {facts.name}: {describe_error(error)}") from error
    layers = config.compilation_config.static_forward_context
    backends = {name: layers[name].get_attn_backend() for name in specs}
    model = ModelWorker(config, worker, group_layers(facts.name, count, specs, backends))
    check_page_tokens(settings.page_tokens, model.page_sizes(settings.page_tokens), "vllm")
    return model


def _divide_layers(config: Any, name: str, stages: int) -> None:
    """Let vLLM give layers to stages as Baton does: the first ones have one more if they do not divide.

    `config`: vLLM's, of the model `name`. Raises UnsupportedModel for inputs of each layer (Gemma 4), which
    vLLM leaves out behind the first stage.
    """
    if getattr(config.hf_text_config, "hidden_size_per_layer_input", 0):
        raise UnsupportedModel.needing(name, "--pp with --engine vllm", ["inputs of each layer"])
    each, over = divmod(config.get_total_num_hidden_layers(), stages)
    os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(str(each + (stage < over)) for stage in range(stages))


def _load(config: Any, rank: int, device: int) -> Any:
    """Return vLLM's worker with its model loaded. `device`: number of its GPU.

    Its groups between CPUs use gloo, since each rank gives its meeting another name. In shared memory, which
    vLLM prefers, a rank would wait for ever for one that has died.
    """
    wrapper = WorkerWrapperBase(rpc_rank=0)
    leads = rank % config.parallel_config.tensor_parallel_size == 0
    given = {"vllm_config": config, "local_rank": device, "rank": rank, "is_driver_worker": leads}
    wrapper.init_worker([{**given, "distributed_init_method": f"rank:{rank}", "shared_worker_lock": Lock()}])
    wrapper.init_device()
    wrapper.worker.load_model()
    if current_platform.is_cpu():
        rotate_by_head(wrapper.worker.model_runner.model)
    return wrapper.worker
