"""Export targets: one module `to_<target>` per choice of `hub.export --to`.

`convert(model, tokenizer, quantization)` returns a function that writes the model to a directory. It raises ValueError
for architectures that the target does not support. `USAGE` explains how to load the result: `{out}` is its directory,
`{source}` and `{target}` are the directories of its tokenizers.
"""
