"""A worker of vLLM with its model: loaded, and bound to memory of Baton's."""

import os
from multiprocessing import Lock
from pathlib import Path
from typing import Any, Final

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.worker.worker_base import WorkerWrapperBase

from baton.inference.device import find_device
from baton.inference.kv_memory import check_page_tokens
from baton.inference.rank_startup import STEP_TIMEOUTS
from baton.models.model_facts import ModelFacts
from baton.runtime.errors import StartupError, describe_error
from baton.runtime.worker_settings import WorkerSettings
from baton.topology import Topology
from baton.vllm.environment import restoring_globals
from baton.vllm.kv_groups import LayerSpecs, check_layout, read_specs
from baton.vllm.memory import VllmKvMemory
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


class ModelWorker:
    """One worker of vLLM, whose layers read and write the memory that is bound. One step at a time."""

    def __init__(self, config: Any, worker: Any, layers: LayerSpecs) -> None:
        """`config`: vLLM's. `worker`: with its model loaded, and no memory yet."""
        self.worker = worker
        self.runner = worker.model_runner
        self.layers = layers
        self.rows_max = ROWS_MAX
        self.tokens_max: int = config.scheduler_config.max_num_batched_tokens
        self.device: torch.device = worker.device
        self.hidden_layers: int = config.model_config.get_total_num_hidden_layers()
        """Layers of the whole model."""
        self.kv_heads: int = config.model_config.get_total_num_kv_heads()
        """KV heads of the whole model."""
        self._layers: dict[str, Any] = config.compilation_config.static_forward_context
        self._attention = self._layers[layers.names[0]]
        self._config = config
        self._bound: tuple[VllmKvMemory, int] | None = None

    def page_sizes(self, page_tokens: int) -> list[int]:
        """Return the tokens per page that attention can have here, if `page_tokens` were requested."""
        chosen: int = self.layers.spec.block_size
        if chosen != page_tokens:  # replaced by vLLM
            return [chosen]
        # vLLM would divide a multiple of a kernel's fixed size. Pages are never divided.
        sizes = self._attention.attn_backend.get_supported_kernel_block_sizes(self.layers.spec)
        fixed = {each for each in sizes if isinstance(each, int)}
        bases = [each.base for each in sizes if not isinstance(each, int)]
        multiples = {each for each in {*PAGE_SIZES, page_tokens} for base in bases if each % base == 0}
        return list(fixed | multiples)

    @property
    def encoding(self) -> str:
        """Name of the form in which the attention back end writes a page. After `take_memory`."""
        parts = ("vllm", self._attention.attn_backend.get_name(), getattr(self._attention, "isa", ""))
        return "-".join(part.lower().replace("_", "-") for part in parts if part)

    def take_memory(self, blocks: int) -> None:
        """Make vLLM's runner ready for `blocks` blocks of KV memory, which `bind` gives it."""
        names, spec, page = list(self.layers.names), self.layers.spec, self.layers.page_bytes
        check_layout(self._attention.attn_backend, LAYOUTS[self.device.type], spec.num_kv_heads)
        config = KVCacheConfig(
            blocks,
            [KVCacheTensor(blocks * page, names, layer_stride=spec.page_size_bytes, block_stride=page)],
            [KVCacheGroupSpec(names, _as_full(spec))],
            kv_cache_layout=LAYOUTS[self.device.type],
        )
        self.runner.initialize_kv_cache_tensors = lambda *_, **__: {}
        with set_current_vllm_config(self._config), restoring_globals():
            self.worker.initialize_from_config(config)
        if self._config.parallel_config.pipeline_parallel_size > 1:  # vLLM makes them in a run to profile
            self.runner.intermediate_tensors = self.runner.model.make_empty_intermediate_tensors(
                self.tokens_max, self.runner.model_config.dtype, self.device
            )

    def bind(self, memory: VllmKvMemory) -> None:
        """Let the layers read and write `memory`. They do not follow its moves."""
        if self._bound != (memory, memory.address):
            self._bound = (memory, memory.address)
            self._set_views(memory)

    def record(self) -> None:
        """Warm up, and record graphs on a GPU. After the first `bind`."""
        with set_current_vllm_config(self._config), restoring_globals():
            self.worker.compile_or_warm_up_model()

    def _set_views(self, memory: VllmKvMemory) -> None:
        views = dict(zip(self.layers.names, memory.layers, strict=True))
        views |= {name: views[target] for name, target in self.runner.shared_kv_cache_layers.items()}
        self.runner.kv_caches[:] = memory.layers
        for name, view in views.items():
            self._layers[name].bind_kv_cache(view)


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
            if topology.pipeline > 1:
                _divide_layers(config.model_config.get_total_num_hidden_layers(), topology.pipeline)
            with set_current_vllm_config(config):
                worker = _load(config, rank, rank if device.index is None else device.index)
                current_platform.update_block_size_for_backend(config)
                specs = worker.get_kv_cache_spec()
                if not on_cpu:  # compiles, and makes the buffers that must not grow once graphs are recorded
                    worker.determine_available_memory()
                    torch.cuda.empty_cache()  # what torch caches counts as taken
        except (ValueError, RuntimeError, NotImplementedError, AssertionError, KeyError) as error:
            raise StartupError(f"vLLM refuses the model {facts.name}: {describe_error(error)}") from error
    model = ModelWorker(config, worker, read_specs(facts.name, specs))
    check_page_tokens(settings.page_tokens, model.page_sizes(settings.page_tokens), "vllm")
    return model


def _divide_layers(layers: int, stages: int) -> None:
    """Let vLLM give layers to stages as Baton does: the first ones have one more if they do not divide."""
    each, over = divmod(layers, stages)
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


def _as_full(spec: Any) -> Any:
    """Return the specification of a group over all tokens: a window is a matter of the layer's attention."""
    if isinstance(spec, FullAttentionSpec):
        return spec
    given = {name: getattr(spec, name) for name in ("block_size", "num_kv_heads", "head_size", "dtype")}
    return FullAttentionSpec(**given, head_size_v=getattr(spec, "head_size_v", None))
