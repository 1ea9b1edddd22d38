"""Tests of quantized weights served by a whole stack, with hand-overs between workers.

Float32, several requests at a time of which some hang up, token for token what the library's own `generate`
says of the numbers that the codes stand for, by either decode worker, whose pages either prefill worker
filled.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from baton.engine.quantization.weight_quantization import WeightQuantization, quantize_model
from baton.runtime.model_options import Quantize
from tests.engine import tiny_models
from tests.engine.execution.compiled_kernels import MODELS, needs_kernel
from tests.engine.tiny_models import VOCABULARY
from tests.models.eight_heads import with_tokenizer
from tests.process.load import Load, any_prompts, asked
from tests.process.stack import running_stack
from tests.process.test_groups import PATIENT, STEADY

OUTPUT_TOKENS = 12
PROMPTS = any_prompts((5, 31, 32, 40, 100, 129), VOCABULARY)
PAIRS = {(f"prefill-{prefill}", f"decode-{decode}") for prefill in range(2) for decode in range(2)}


@needs_kernel
async def test_codes_give_the_tokens_of_the_numbers_that_they_stand_for(
    tmp_path: Path, demo_model_dir: Path
) -> None:
    served = with_tokenizer(
        tiny_models.save(MODELS["three queries a head"], tmp_path / "served"), demo_model_dir
    )
    meant = tmp_path / "meant"
    module = AutoModelForCausalLM.from_pretrained(served, dtype=torch.float32)
    with torch.no_grad():
        quantize_model("tiny", module, WeightQuantization(Quantize.INT4))
    module.save_pretrained(meant)
    known = asked(meant, PROMPTS, OUTPUT_TOKENS)
    with running_stack(
        str(served),
        prefill=[{"chunk_tokens": "48"}, {}],
        decode=[PATIENT, PATIENT],
        bootstrap=STEADY,
        dtype="float32",
        quantize="int4",
        kv_cache_memory="4MiB",
    ) as stack:
        start = stack.idle_gauges()
        load = Load(stack, known, at_a_time=4)
        await load.rounds_until(PAIRS, rounds_min=1)
        stack.wait_idle(start)
