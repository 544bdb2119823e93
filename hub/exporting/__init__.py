"""Export targets: one module `to_<target>` per choice of `hub.export --to`.

`convert(model, tokenizer, quantization)` returns a function that writes the model to a directory. It raises ValueError
for architectures that the target does not support. `USAGE` explains how to load the result: `{out}` is its directory,
`{source}` and `{target}` are the directories of its tokenizers.
"""

TARGETS = ("transformers", "ctranslate2", "argos", "onnx")
CTRANSLATE2_TYPES = ("int8", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16")
QUANTIZATIONS = {"ctranslate2": CTRANSLATE2_TYPES, "argos": CTRANSLATE2_TYPES, "onnx": ("int8", "fp16")}
