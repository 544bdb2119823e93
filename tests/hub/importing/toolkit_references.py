"""Reference implementations of fairseq and OpenNMT-py models, and files in their formats."""

import argparse
import math
import sys
import types
from contextlib import contextmanager

import torch
from references import Container, Table, attend, causal, randomize, sinusoids
from torch import nn

F = nn.functional
ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "gelu_accurate": lambda x: F.gelu(x, approximate="tanh")}


def concatenated_sinusoids(length, d):
    """Return the position table (length, d) with sines in the first half and cosines in the second."""
    angle = torch.arange(length)[:, None] / 10000 ** (torch.arange(d // 2) / (d // 2 - 1))
    return torch.cat([angle.sin(), angle.cos()], 1)


class Attention(nn.Module):
    def __init__(self, d, heads, names, bias=True):
        super().__init__()
        self.heads, self.names = heads, names
        for name in names:
            setattr(self, name, nn.Linear(d, d, bias=bias))

    def forward(self, x, memory, visible):
        q, k, v, out = (getattr(self, name) for name in self.names)
        return out(attend(q(x), k(memory), v(memory), self.heads, visible))


class Fairseq(nn.Module):
    """`model(source, lengths, target)` returns (logits, None); the pad id is 1, also on the left of sources."""

    def __init__(self, d=16, heads=4, layers=2, ff=24, sizes=(31, 37), **arguments):
        super().__init__()
        self.arguments = {
            **{"arch": "transformer", "encoder_attention_heads": heads, "decoder_attention_heads": heads},
            **{"encoder_normalize_before": False, "decoder_normalize_before": False, "encoder_embed_dim": d},
            **{"decoder_embed_dim": d, "max_source_positions": 40, "max_target_positions": 40, "dropout": 0.3},
            **{"activation_fn": "relu", "source_lang": "de", "target_lang": "en", "adaptive_softmax_cutoff": None},
            **{"share_all_embeddings": False, "share_decoder_input_output_embed": False},
            **arguments,
        }
        self.namespace = namespace = types.SimpleNamespace(**self.arguments)
        self.pre, self.learned = namespace.encoder_normalize_before, self.arguments.get("encoder_learned_pos", False)
        dims = {name: self.arguments.get(f"decoder_{name}_dim", d) for name in ("input", "output")}
        names = ("q_proj", "k_proj", "v_proj", "out_proj")

        def layer(attentions, num_heads):
            parts = {name: Attention(d, num_heads, names) for name in attentions}
            norms = {f"{name}_layer_norm": nn.LayerNorm(d) for name in (*attentions, "final")}
            return Container(**parts, **norms, fc1=nn.Linear(d, ff), fc2=nn.Linear(ff, d))

        def stack(size, embedding_dim, stack_layers):
            parts = {
                "embed_tokens": nn.Embedding(size, embedding_dim, padding_idx=1),
                "layers": nn.ModuleList(stack_layers),
            }
            parts |= {"layer_norm": nn.LayerNorm(d)} if self.pre else {}
            parts |= {"layernorm_embedding": nn.LayerNorm(d)} if self.arguments.get("layernorm_embedding") else {}
            parts |= {"embed_positions": nn.Embedding(42, d) if self.learned else Table("_float_tensor", torch.ones(1))}
            module = Container(**parts)
            module.register_buffer("version", torch.tensor([3.0]))
            return module

        self.encoder = stack(sizes[0], d, [layer(["self_attn"], heads) for _ in range(layers)])
        decoder_layers = [
            layer(["self_attn", "encoder_attn"], namespace.decoder_attention_heads) for _ in range(layers)
        ]
        self.decoder = stack(sizes[1], dims["input"], decoder_layers)
        self.decoder.output_projection = nn.Linear(dims["output"], sizes[1], bias=False)
        for name, shape in (("in", (dims["input"], d)), ("out", (d, dims["output"]))):
            if shape[0] != shape[1]:
                setattr(self.decoder, f"project_{name}_dim", nn.Linear(*shape, bias=False))
        if namespace.share_all_embeddings:
            self.decoder.embed_tokens = self.encoder.embed_tokens
        if namespace.share_all_embeddings or namespace.share_decoder_input_output_embed:
            self.decoder.output_projection.weight = self.decoder.embed_tokens.weight
        self.scale = 1 if self.arguments.get("no_scale_embedding") else math.sqrt(d)
        self.table = concatenated_sinusoids(200, d)
        self.activation = ACTIVATIONS[namespace.activation_fn]

    def embed(self, stack, ids):
        x = self.scale * stack.embed_tokens(ids)
        x = stack.project_in_dim(x) if hasattr(stack, "project_in_dim") else x
        positions = (ids != 1).cumsum(1) * (ids != 1) + 1
        x = x + (stack.embed_positions(positions) if self.learned else self.table[positions])
        return stack.layernorm_embedding(x) if hasattr(stack, "layernorm_embedding") else x

    def residual(self, norm, x, sublayer):
        return x + sublayer(norm(x)) if self.pre else norm(x + sublayer(x))

    def feed_forward(self, layer, x):
        return self.residual(layer.final_layer_norm, x, lambda y: layer.fc2(self.activation(layer.fc1(y))))

    def forward(self, source, lengths, target):
        visible = (source != 1)[:, None, None]
        x = self.embed(self.encoder, source)
        for layer in self.encoder.layers:
            x = self.residual(layer.self_attn_layer_norm, x, lambda y, a=layer.self_attn: a(y, y, visible))
            x = self.feed_forward(layer, x)
        memory = self.encoder.layer_norm(x) if self.pre else x
        x, earlier = self.embed(self.decoder, target), causal(target.shape[1]) & (target != 1)[:, None, None]
        for layer in self.decoder.layers:
            x = self.residual(layer.self_attn_layer_norm, x, lambda y, a=layer.self_attn: a(y, y, earlier))
            x = self.residual(layer.encoder_attn_layer_norm, x, lambda y, a=layer.encoder_attn: a(y, memory, visible))
            x = self.feed_forward(layer, x)
        x = self.decoder.layer_norm(x) if self.pre else x
        x = self.decoder.project_out_dim(x) if hasattr(self.decoder, "project_out_dim") else x
        return self.decoder.output_projection(x), None

    def content(self, how="args"):
        """Return the content of a fairseq file, with settings in a namespace or (since 0.10) in a configuration."""
        content = {"model": dict(self.state_dict()), "last_optimizer_state": {"state": {}}, "best_loss": 3.5}
        if how == "args":
            return content | {"args": argparse.Namespace(task="translation", **self.arguments)}
        rest = {"bpe": {"_name": "subword_nmt"}, "task": {"source_lang": "de", "target_lang": "en"}}
        if how == "cfg":
            return content | {"args": None, "cfg": rest | {"model": argparse.Namespace(**self.arguments)}}
        nested = {name: value for name, value in self.arguments.items() if name != "arch"} | {"_name": "transformer"}
        for side in ("encoder", "decoder"):
            inner = {name: nested.pop(name) for name in list(nested) if name.startswith(f"{side}_")}
            nested[side] = {name.removeprefix(f"{side}_"): value for name, value in inner.items()}
        return content | {"args": None, "cfg": as_omegaconf(rest | {"model": nested})}


class OpenNMT(nn.Module):
    """`model(source, source mask, target)` returns logits; pre-norm, and the pad id is 1.

    In version 2, a separate source vocabulary has no <s> and </s>. The source ids are those of the file.
    """

    def __init__(self, d=16, heads=4, layers=2, ff=24, sizes=(31, 37), version=3, bias=False, **options):
        super().__init__()
        self.version, self.heads, self.d = version, heads, d
        self.options = {
            **{"heads": heads, "position_encoding": True, "encoder_type": "transformer", "dropout": [0.1]},
            **{"decoder_type": "transformer", "model_type": "text", "self_attn_type": "scaled-dot", "copy_attn": False},
            **{"share_embeddings": False, "share_decoder_embeddings": False, "max_relative_positions": 0},
            **{"pos_ffn_activation_fn": "relu", **({"norm_eps": 1e-5} if version == 3 else {}), **options},
        }
        self.eps = self.options.get("norm_eps", 1e-6)
        concat = self.options.get("position_encoding_type") == "SinusoidalConcat"
        table = (concatenated_sinusoids if concat else sinusoids)(60, d)[:, None]
        names = ("linear_query", "linear_keys", "linear_values", "final_linear")
        bias = bias or version == 2
        self.activation = ACTIVATIONS[self.options["pos_ffn_activation_fn"]]

        def norm():
            return nn.LayerNorm(d, eps=self.eps)

        def feed_forward():
            return Container(w_1=nn.Linear(d, ff, bias=bias), w_2=nn.Linear(ff, d, bias=bias), layer_norm=norm())

        def embeddings(size):
            luts = nn.ModuleList([nn.Embedding(size, d, padding_idx=1)])
            return Container(make_embedding=Container(emb_luts=luts, pe=Table("pe", table.clone())))

        def encoder_layer():
            attention = Attention(d, heads, names, bias)
            return Container(self_attn=attention, feed_forward=feed_forward(), layer_norm=norm())

        def decoder_layer():
            both = {name: Attention(d, heads, names, bias) for name in ("self_attn", "context_attn")}
            return Container(**both, feed_forward=feed_forward(), layer_norm_1=norm(), layer_norm_2=norm())

        self.encoder = Container(
            embeddings=embeddings(sizes[0]),
            transformer=nn.ModuleList(encoder_layer() for _ in range(layers)),
            layer_norm=norm(),
        )
        self.decoder = Container(
            embeddings=embeddings(sizes[1]),
            transformer_layers=nn.ModuleList(decoder_layer() for _ in range(layers)),
            layer_norm=norm(),
        )
        self.generator = nn.Linear(d, sizes[1])
        if self.options["share_embeddings"]:
            self.lut(self.decoder).weight = self.lut(self.encoder).weight
        if self.options["share_decoder_embeddings"]:
            self.generator.weight = self.lut(self.decoder).weight
        self.sizes = sizes

    @staticmethod
    def lut(stack):
        return stack.embeddings.make_embedding.emb_luts[0]

    def embed(self, stack, ids):
        table = stack.embeddings.make_embedding.pe()
        return self.lut(stack)(ids) * math.sqrt(self.d) + table[: ids.shape[1]]

    def feed_forward(self, block, x):
        return x + block.w_2(self.activation(block.w_1(block.layer_norm(x))))

    def forward(self, source, visible, target):
        visible = visible.bool()[:, None, None]
        x = self.embed(self.encoder, source)
        for layer in self.encoder.transformer:
            y = layer.layer_norm(x)
            x = self.feed_forward(layer.feed_forward, x + layer.self_attn(y, y, visible))
        memory = self.encoder.layer_norm(x)
        x = self.embed(self.decoder, target)
        for layer in self.decoder.transformer_layers:
            y = layer.layer_norm_1(x)
            x = x + layer.self_attn(y, y, causal(target.shape[1]))
            x = x + layer.context_attn(layer.layer_norm_2(x), memory, visible)
            x = self.feed_forward(layer.feed_forward, x)
        return self.generator(self.decoder.layer_norm(x))

    def tokens(self):
        """Return the source and target tokens, ordered by id."""
        special = ["<unk>", "<blank>", "<s>", "</s>"]
        if self.options["share_embeddings"]:
            return [[*special, *(f"w{i}" for i in range(self.sizes[0] - 4))]] * 2
        first = special[:2] if self.version == 2 else special
        source = [*first, *(f"a{i}" for i in range(self.sizes[0] - len(first)))]
        return [source, [*special, *(f"b{i}" for i in range(self.sizes[1] - 4))]]

    def content(self):
        """Return the content of an OpenNMT-py file."""
        state = dict(self.state_dict())
        generator = {name.split(".", 1)[1]: state.pop(name) for name in list(state) if name.startswith("generator.")}
        source, target = self.tokens()
        vocab = {"src": source, "tgt": target, "data_task": "seq2seq", "decoder_start_token": "<s>"}
        if self.version == 2:
            generator = {f"0.{name}": value for name, value in generator.items()}
            vocab = {"src": as_field("src", source), "tgt": as_field("tgt", target), "indices": None}
        options = argparse.Namespace(**self.options)
        return {"model": state, "generator": generator, "vocab": vocab, "opt": options, "optim": {"step": 3}}


CLASSES = {
    **{"omegaconf.dictconfig": ["DictConfig"], "omegaconf.base": ["ContainerMetadata"]},
    **{"omegaconf.nodes": ["AnyNode"], "torchtext.vocab": ["Vocab"], "torchtext.data.field": ["Field"]},
    "onmt.inputters.text_dataset": ["TextMultiField"],
}
PICKLED_CLASSES = {name: type(name, (), {"__module__": module}) for module, names in CLASSES.items() for name in names}


@contextmanager
def importable():
    """Context manager that makes the classes of the toolkits importable, so that they can be pickled."""
    parts = {module.rsplit(".", i)[0] for module in CLASSES for i in range(module.count(".") + 1)}
    modules = {module: types.ModuleType(module) for module in parts}
    for each in PICKLED_CLASSES.values():
        setattr(modules[each.__module__], each.__name__, each)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for module in modules:
            del sys.modules[module]


def create_object(name, **state):
    instance = PICKLED_CLASSES[name]()
    instance.__dict__.update(state)
    return instance


def as_omegaconf(value):
    """Convert a value to OmegaConf containers and nodes with the attributes that OmegaConf pickles."""
    if isinstance(value, dict):
        content = {key: as_omegaconf(each) for key, each in value.items()}
        return create_object(
            "DictConfig", _metadata=create_object("ContainerMetadata", optional=True), _content=content
        )
    return create_object("AnyNode", _metadata=None, _parent=None, _val=value)


def as_field(name, tokens):
    """Return a torchtext field with its vocabulary."""
    vocab = create_object("Vocab", itos=tokens, stoi={token: i for i, token in enumerate(tokens)}, unk_index=0)
    return create_object("TextMultiField", fields=[(name, create_object("Field", vocab=vocab, pad_token="<blank>"))])


def save(content, path):
    with importable():
        torch.save(content, path)
    return path


PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
CASES = {  # name: (class, arguments)
    "fairseq base": (Fairseq, {}),
    "fairseq iwslt_de_en": (Fairseq, {"arch": "transformer_iwslt_de_en", "share_decoder_input_output_embed": True}),
    "fairseq wmt_en_de": (
        Fairseq,
        {
            "arch": "transformer_wmt_en_de",
            "share_all_embeddings": True,
            "sizes": (37, 37),
            "decoder_attention_heads": 2,
        },
    ),
    "fairseq vaswani big": (Fairseq, {"arch": "transformer_vaswani_wmt_en_de_big", "layers": 3}),
    "fairseq t2t": (Fairseq, {"arch": "transformer_wmt_en_de_big_t2t", **PRE_NORM}),
    "fairseq embedding LayerNorm": (
        Fairseq,
        {"layernorm_embedding": True, "no_scale_embedding": True, "activation_fn": "gelu"},
    ),
    "fairseq learned": (
        Fairseq,
        {"encoder_learned_pos": True, "decoder_learned_pos": True, "activation_fn": "gelu_accurate"},
    ),
    "fairseq output dimension": (Fairseq, {"decoder_output_dim": 12}),
    "fairseq input and output dimensions": (
        Fairseq,
        {"decoder_input_dim": 12, "decoder_output_dim": 12, "share_decoder_input_output_embed": True},
    ),
    "opennmt 2": (OpenNMT, {"version": 2}),
    "opennmt 2 joint": (
        OpenNMT,
        {"version": 2, "share_embeddings": True, "share_decoder_embeddings": True, "sizes": (37, 37)},
    ),
    "opennmt 3": (OpenNMT, {"share_decoder_embeddings": True, "pos_ffn_activation_fn": "gelu"}),
    "opennmt 3 biases": (OpenNMT, {"bias": True, "layers": 3}),
    "opennmt 3 halves": (OpenNMT, {"position_encoding_type": "SinusoidalConcat"}),
}


def make(name, **more):
    """Create the model of a case with weights as in a trained model."""
    model_class, arguments = CASES[name]
    torch.manual_seed(0)
    return randomize(model_class(**(arguments | more)))
