"""The same model with plain numbers: what llama.cpp computes beside systems that keep no codes of weights.

    gguf_plain.py SOURCE.gguf TARGET.gguf float16|float32

Matrices are written as that (of two bytes llama.cpp computes float16 sooner than bfloat16 on a CPU); what a
file of llama.cpp's own converter has in float32 (norms) stays so. All that the file says of the model and its
tokenizer is copied.
"""

import sys
from pathlib import Path

import gguf
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, LlamaFileType

TYPES = {
    "float16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "float32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
}
WRITTEN_ANEW = ("general.architecture", "general.file_type", "general.quantization_version")


def main(source: str, target: str, dtype: str) -> None:
    kind, file_type = TYPES[dtype]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(None, reader.fields["general.architecture"].contents())
    writer.add_file_type(file_type)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in WRITTEN_ANEW:
            continue
        of = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], of)
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        whole = numbers.ndim > 1 and numbers.shape[-1] % GGML_QUANT_SIZES[kind][0] == 0
        as_kind = kind if whole else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(numbers, as_kind), raw_dtype=as_kind)
    made = Path(target + ".part")
    writer.write_header_to_file(made)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made.rename(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
