"""One file a target of `hub.export`, named as `--to` names it, with two names in each.

`convert(model, tokenizer, quantization)` gives what writes the model into a folder, or raises ValueError for an
architecture that the target cannot express. `USAGE` tells how to load what was written: `{out}` is its folder,
`{source}` and `{target}` are those of its tokenizers.
"""
