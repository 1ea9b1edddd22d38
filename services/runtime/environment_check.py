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
    """Baton removes the variable from the environment at the start, with one line on stderr."""
    SET = "set"
    """Baton sets the variable to a value of its own, whatever the user or platform has set."""
    BY_OTHERS = "default"
    """Baton sets the variable to a value of its own, unless the user or platform has set it."""
    IGNORED = "ignored"
    """The variable is left alone, because it has no effect on how Baton uses its library."""
    HONOURED = "honoured"
    """Baton leaves the variable alone, and it has the effect that its library documents."""


@dataclass(frozen=True, slots=True)
class Family:
    """Group of environment variables that Baton treats in the same way at the start of a process."""

    names: tuple[str, ...]
    verdict: VariableVerdict
    why: str
    value: str = ""
    """Value to which Baton sets these variables. Empty for families whose variables it does not set."""


FAMILIES: Final = (
    Family(
        (
            *("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "no_proxy"),
            *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
        ),
        VariableVerdict.IGNORED,
        "for connections between Baton's processes, from `baton bench serve`, and to loopback addresses."
        " `baton chat`, `top`, `explain` and the export of traces use them to reach another host",
    ),
    Family(
        ("GRPC_ADDRESS_HTTP_PROXY", "GRPC_ADDRESS_HTTP_PROXY_ENABLED_ADDRESSES"),
        VariableVerdict.DROPPED,
        "they would send the connections between Baton's processes through a proxy",
    ),
    Family(
        ("GRPC_ENABLE_FORK_SUPPORT",),
        VariableVerdict.DROPPED,
        "gRPC's fork handlers can stop a process that starts others while it has connections",
    ),
    Family(
        ("GRPC_VERBOSITY",),
        VariableVerdict.BY_OTHERS,
        "Baton logs the errors of gRPC itself, once each",
        "NONE",
    ),
    Family(
        ("GRPC_TRACE",),
        VariableVerdict.HONOURED,
        "with GRPC_VERBOSITY=debug; its output contains all that is sent, including secrets and prompts",
    ),
    Family(
        ("GRPC_DNS_RESOLVER", "GRPC_POLL_STRATEGY", "GRPC_EXPERIMENTS", "GRPC_SSL_CIPHER_SUITES"),
        VariableVerdict.HONOURED,
        "how gRPC resolves names, polls and encrypts",
    ),
    Family(
        ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"),
        VariableVerdict.DROPPED,
        "each process exports its own metrics; the variable would write them to files that other programs"
        " share",
    ),
    Family(
        ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"),
        VariableVerdict.DROPPED,
        "they would put the threads of all workers on the same cores; `--cpus` sets the cores of each",
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
        "how many of its cores a process uses, and how its threads wait",
    ),
    Family(
        (
            *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
            *("NVIDIA_TF32_OVERRIDE", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"),
        ),
        VariableVerdict.DROPPED,
        "they would compute float32 with fewer bits, or load weight files that can run code; `--dtype` sets"
        " the number format",
    ),
    Family(
        (
            *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"),
            *("MKL_CBWR", "CUBLAS_WORKSPACE_CONFIG"),
        ),
        VariableVerdict.HONOURED,
        "which CPU instructions are used; sums may then round differently, so set them alike on all workers",
    ),
    Family(
        ("TORCH_*", "PYTORCH_*", "CUDA_*", "NVIDIA_*"),
        VariableVerdict.HONOURED,
        "except those above: which devices are visible, how their memory is allocated, what is logged",
    ),
    Family(
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*"),
        VariableVerdict.IGNORED,
        "`--rank`, `--world` and `--rendezvous` are used instead",
    ),
    Family(
        ("HF_HUB_OFFLINE",),
        VariableVerdict.SET,
        "models are local files, and no library may contact the Hugging Face Hub",
        "1",
    ),
    Family(
        ("HF_TOKEN", "HF_HOME", "HF_ENDPOINT", "HF_HUB_*", "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE"),
        VariableVerdict.IGNORED,
        "the Hugging Face Hub is never contacted",
    ),
    Family(
        ("TRANSFORMERS_VERBOSITY", "TRANSFORMERS_NO_ADVISORY_WARNINGS"),
        VariableVerdict.HONOURED,
        "what transformers logs",
    ),
    Family(
        ("UCX_*", "NIXL_*"),
        VariableVerdict.HONOURED,
        "network devices and transports of the KV transfer, which depend on the platform. If unset, these"
        " libraries log only fatal errors",
    ),
    Family(
        ("GLOO_SOCKET_IFNAME", "GLOO_*"),
        VariableVerdict.HONOURED,
        "the network interface between a worker's ranks; if unset, the one that leads to `--rendezvous`",
    ),
    Family(
        ("OTEL_*",),
        VariableVerdict.HONOURED,
        "where traces are sent, unless `--otlp-endpoint` is set, and with which headers and certificates",
    ),
    Family(
        ("SSL_CERT_FILE", "SSL_CERT_DIR", "OPENAI_API_KEY"),
        VariableVerdict.HONOURED,
        "by the commands that are clients of a server; between Baton's processes only `--tls-ca` is trusted",
    ),
    Family(
        ("SSLKEYLOGFILE",),
        VariableVerdict.HONOURED,
        "by the commands that are clients of a server: the file allows their connections to be decrypted."
        " Baton's services write no such file",
    ),
    Family(
        ("FORWARDED_ALLOW_IPS",),
        VariableVerdict.HONOURED,
        "which proxies are trusted to report a client's address ([security.md](security.md))",
    ),
    Family(
        ("XDG_CACHE_HOME", "HOME", "TMPDIR", "PATH", "CPATH", "LIBRARY_PATH"),
        VariableVerdict.HONOURED,
        "where converted models and the compiled kernel are stored, and where a C compiler is found. A"
        " compiled kernel is checked against reference results before it is used",
    ),
    Family(
        (WARNINGS,),
        VariableVerdict.DROPPED,
        "with `error`, any warning of a library would fail a request",
    ),
    Family(
        ("PYTHONOPTIMIZE",),
        VariableVerdict.DROPPED,
        "2 removes docstrings that the transformers library needs, so a process that is started with it exits"
        " at once. 1 affects only that process, not those that it starts",
    ),
    Family(
        ("LD_PRELOAD", "LD_LIBRARY_PATH", "GLIBC_TUNABLES", "MALLOC_*", "PYTHON*"),
        VariableVerdict.HONOURED,
        "they take effect before Baton runs, and can run code as Baton's user. `baton serve` puts its own"
        " code before PYTHONPATH, and sets PYTHONSAFEPATH and PYTHONUNBUFFERED for the processes that it"
        " starts",
    ),
)
"""All groups of environment variables. The first one that contains a name decides. `*` stands for
any ending."""


def check_interpreter() -> None:
    """Raise StartupError if Python runs without docstrings (-OO), which the transformers library needs. Also
    undo the warning filters of PYTHONWARNINGS."""
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
