"""Treatment of environment variables of libraries and platforms that would change what a process does.

Libraries read the environment themselves. A variable that would misdirect the stack's own connections, change
its numbers or take its cores is dropped before any library is loaded. A variable that a platform sets with
good reason stays. Each family of variables has its entry here, and docs/settings.md is made from it.
"""

import os
import sys
import warnings
from collections.abc import MutableMapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from baton.runtime.errors import StartupError

WARNINGS: Final = "PYTHONWARNINGS"


class VariableVerdict(StrEnum):
    """What Baton does with an environment variable of a library or platform at the start of a process."""

    DROPPED = "dropped"
    """The variable is removed at the start, with one line on stderr."""
    SET = "set"
    """The variable is set to this project's value, whatever it was before."""
    BY_OTHERS = "default"
    """The variable is set to this project's value if it is not set."""
    IGNORED = "ignored"
    """The variable has no effect on how this project uses its library."""
    HONOURED = "honoured"
    """The variable has the effect that its library documents."""


@dataclass(frozen=True, slots=True)
class Family:
    """Group of environment variables that get the same treatment."""

    names: tuple[str, ...]
    verdict: VariableVerdict
    why: str
    value: str = ""
    """Value to which these variables are set, if their treatment is SET or BY_OTHERS."""


FAMILIES: Final = (
    Family(
        (
            *("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "no_proxy"),
            *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
        ),
        VariableVerdict.IGNORED,
        "between the parts, by `baton bench serve`, and by what asks a loopback address; `baton chat`, `top`"
        " and `explain` that ask another host, and traces for one, go through them",
    ),
    Family(
        ("GRPC_ADDRESS_HTTP_PROXY", "GRPC_ADDRESS_HTTP_PROXY_ENABLED_ADDRESSES"),
        VariableVerdict.DROPPED,
        "they would lead the parts' connections through a proxy",
    ),
    Family(
        ("GRPC_ENABLE_FORK_SUPPORT",),
        VariableVerdict.DROPPED,
        "its handlers stop a process that starts others while it has connections",
    ),
    Family(
        ("GRPC_VERBOSITY",),
        VariableVerdict.BY_OTHERS,
        "errors come to Baton and are told once, in its own words",
        "NONE",
    ),
    Family(
        ("GRPC_TRACE",),
        VariableVerdict.HONOURED,
        "with GRPC_VERBOSITY=debug; what it writes holds what is sent, secrets and prompts included",
    ),
    Family(
        ("GRPC_DNS_RESOLVER", "GRPC_POLL_STRATEGY", "GRPC_EXPERIMENTS", "GRPC_SSL_CIPHER_SUITES"),
        VariableVerdict.HONOURED,
        "how gRPC finds names, waits, and encrypts",
    ),
    Family(
        ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"),
        VariableVerdict.DROPPED,
        "each process tells its own metrics; they would go to another program's files",
    ),
    Family(
        ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"),
        VariableVerdict.DROPPED,
        "they would put the threads of all workers on the same cores; `--cpus` says which",
    ),
    Family(
        ("OMP_NUM_THREADS",),
        VariableVerdict.HONOURED,
        "where `--threads` is 0; `baton serve` gives each worker `--threads`",
    ),
    Family(
        (
            *("OMP_THREAD_LIMIT", "OMP_WAIT_POLICY", "OMP_DYNAMIC", "KMP_BLOCKTIME", "MKL_NUM_THREADS"),
            *("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
        ),
        VariableVerdict.HONOURED,
        "how much of its cores a process takes, and how it waits",
    ),
    Family(
        (
            *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
            *("NVIDIA_TF32_OVERRIDE", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"),
        ),
        VariableVerdict.DROPPED,
        "they would compute float32 with fewer bits, or read weights that run code; `--dtype` says which"
        " numbers are meant",
    ),
    Family(
        (
            *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"),
            *("MKL_CBWR", "CUBLAS_WORKSPACE_CONFIG"),
        ),
        VariableVerdict.HONOURED,
        "which instructions compute: sums may round otherwise, so give all workers the same",
    ),
    Family(
        ("TORCH_*", "PYTORCH_*", "CUDA_*", "NVIDIA_*"),
        VariableVerdict.HONOURED,
        "but for those above: which devices there are, how their memory is had, what is logged",
    ),
    Family(
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*"),
        VariableVerdict.IGNORED,
        "`--rank`, `--world` and `--rendezvous` say it",
    ),
    Family(
        ("HF_HUB_OFFLINE",),
        VariableVerdict.SET,
        "models are not downloaded, and no library asks the hub for anything",
        "1",
    ),
    Family(
        ("HF_TOKEN", "HF_HOME", "HF_ENDPOINT", "HF_HUB_*", "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE"),
        VariableVerdict.IGNORED,
        "there is nothing to ask the hub for",
    ),
    Family(
        ("TRANSFORMERS_VERBOSITY", "TRANSFORMERS_NO_ADVISORY_WARNINGS"),
        VariableVerdict.HONOURED,
        "what transformers logs",
    ),
    Family(
        ("UCX_*", "NIXL_*"),
        VariableVerdict.HONOURED,
        "the data path's devices and transports, which the platform knows; unset, their logs tell fatal"
        " errors alone",
    ),
    Family(
        ("GLOO_SOCKET_IFNAME", "GLOO_*"),
        VariableVerdict.HONOURED,
        "the interface between a worker's ranks; unset, the one toward `--rendezvous`",
    ),
    Family(
        ("OTEL_*",),
        VariableVerdict.HONOURED,
        "where traces go, unless `--otlp-endpoint` says it, and with which headers and certificates",
    ),
    Family(
        ("SSL_CERT_FILE", "SSL_CERT_DIR", "OPENAI_API_KEY"),
        VariableVerdict.HONOURED,
        "by the commands that ask a server; between the parts `--tls-ca` alone says who is believed",
    ),
    Family(
        ("SSLKEYLOGFILE",),
        VariableVerdict.HONOURED,
        "by the commands that ask a server: whoever reads that file reads their connections; the parts write"
        " none",
    ),
    Family(
        ("FORWARDED_ALLOW_IPS",),
        VariableVerdict.HONOURED,
        "which proxies may say a client's address ([security.md](security.md))",
    ),
    Family(
        ("XDG_CACHE_HOME", "HOME", "TMPDIR", "PATH", "CPATH", "LIBRARY_PATH"),
        VariableVerdict.HONOURED,
        "where converted models and the compiled kernel lie, and where a C compiler is; what was compiled is"
        " compared with what it has to compute before it is used",
    ),
    Family(
        (WARNINGS,),
        VariableVerdict.DROPPED,
        "`error` would end a request with any warning of a library",
    ),
    Family(
        ("PYTHONOPTIMIZE",),
        VariableVerdict.DROPPED,
        "at 2 it takes away the docstrings that transformers reads: a process that was started so does not"
        " start; at 1 it holds for the process that was started, and not for its parts",
    ),
    Family(
        ("LD_PRELOAD", "LD_LIBRARY_PATH", "GLIBC_TUNABLES", "MALLOC_*", "PYTHON*"),
        VariableVerdict.HONOURED,
        "they have worked before Baton's first line; whoever sets them runs code as Baton's user. `baton"
        " serve` puts its own code before PYTHONPATH, and sets PYTHONSAFEPATH and PYTHONUNBUFFERED for its"
        " parts",
    ),
)
"""All groups of environment variables. The first one that contains a name decides. `*` stands for
any ending."""


def check_interpreter() -> None:
    """Raise StartupError if this Python runs without docstrings (-OO), which the transformers library needs.

    It also undoes warning filters that PYTHONWARNINGS has set.
    """
    if sys.flags.optimize > 1:
        raise StartupError(
            "this Python runs without docstrings (PYTHONOPTIMIZE=2 or -OO), which the transformers library"
            " reads: unset it"
        )
    if os.environ.get(WARNINGS):
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)


def clean_environment(environ: MutableMapping[str, str]) -> list[str]:
    """Apply FAMILIES to the variables in `environ`, before any library is loaded.

    Return the names of the variables that were dropped.
    """
    dropped = []
    for family in FAMILIES:
        for name in family.names:
            match family.verdict:
                case VariableVerdict.DROPPED if name in environ:
                    del environ[name]
                    dropped.append(name)
                case VariableVerdict.SET:
                    environ[name] = family.value
                case VariableVerdict.BY_OTHERS:
                    environ.setdefault(name, family.value)
                case _:
                    pass
    return dropped
