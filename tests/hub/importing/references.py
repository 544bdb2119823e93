"""Reference implementations of the supported tutorial models, with their parameter names.

They are written for the tests and take ids and masks as the original code does. All weights are random, including
biases and norms, so that no error is masked by a zero or a one.
"""

import math

import torch
from torch import nn

F = nn.functional


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Set random weights as in a trained model: no bias is zero, and no norm weight is one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1 and "emb" not in name and "lut" not in name:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
            elif parameter.ndim > 1:
                parameter.copy_(noise * 0.5)
            else:
                parameter.add_(0.2 * noise)
    return model.eval()


def attend(q, k, v, heads, visible, divisor=None):
    """Return softmax(q k^T / divisor) v per head; q (B, T, H * K); visible broadcasts to (B, H, T, S)."""
    q, k, v = (x.view(*x.shape[:2], heads, -1).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / (divisor or math.sqrt(q.shape[-1]))
    weights = scores.masked_fill(~visible, -1e9).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def sinusoids(length, d):
    """Return the position table (length, d) with sines in even and cosines in odd columns."""
    angle = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, d, 2) / d)
    table = torch.zeros(length, d)
    table[:, 0::2], table[:, 1::2] = angle.sin(), angle.cos()
    return table


class Container(nn.Module):
    """Module with the given submodules."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Table(nn.Module):
    def __init__(self, name, table):
        super().__init__()
        self.register_buffer(name, table)
        self.name = name

    def forward(self):
        table = getattr(self, self.name)
        return table.view(-1, table.shape[-1])


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


# --- hkproj and a variant of it ---


class StdNorm(nn.Module):
    def __init__(self, size, names=("alpha", "bias")):
        super().__init__()
        self.names = names
        setattr(self, names[0], nn.Parameter(torch.ones(size)))
        setattr(self, names[1], nn.Parameter(torch.zeros(size)))

    def forward(self, x):
        scale, shift = (getattr(self, name) for name in self.names)
        return scale * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + shift


class WAttention(nn.Module):
    def __init__(self, d, heads, bias, names=("w_q", "w_k", "w_v", "w_o")):
        super().__init__()
        self.heads, self.names = heads, names
        for name in names:
            setattr(self, name, nn.Linear(d, d, bias=bias))

    def forward(self, q, k, v, mask):
        wq, wk, wv, wo = (getattr(self, name) for name in self.names)
        return wo(attend(wq(q), wk(k), wv(v), self.heads, mask))


class Hkproj(nn.Module):
    """`version`: "A" has biases and scalar alphas, "B" has no biases, "C" has no biases and vector alphas."""

    residual_encoder = residual_decoder = "residual_connections"
    source_name, cross_name = "src_embed", "cross_attention_block"
    cross_used = "cross_attention_block"

    def __init__(self, version="C", sizes=(31, 37), d=16, heads=4, layers=2, ff=24, length=20):
        super().__init__()
        bias, norm = version == "A", (d if version == "C" else 1)

        def block(residual, attentions):
            parts = {name: WAttention(d, heads, bias) for name in attentions}
            connections = [Container(norm=StdNorm(norm)) for _ in range(len(attentions) + 1)]
            ffn = Container(linear_1=nn.Linear(d, ff), linear_2=nn.Linear(ff, d))
            return Container(**parts, feed_forward_block=ffn, **{residual: nn.ModuleList(connections)})

        encoder = [block(self.residual_encoder, ["self_attention_block"]) for _ in range(layers)]
        attentions = ["self_attention_block", self.cross_name]
        decoder = [block(self.residual_decoder, attentions) for _ in range(layers)]
        self.encoder = Container(layers=nn.ModuleList(encoder), norm=StdNorm(norm))
        self.decoder = Container(layers=nn.ModuleList(decoder), norm=StdNorm(norm))
        setattr(self, self.source_name, Container(embedding=nn.Embedding(sizes[0], d)))
        self.tgt_embed = Container(embedding=nn.Embedding(sizes[1], d))
        self.src_pos, self.tgt_pos = (Table("pe", sinusoids(length, d)[None]) for _ in range(2))
        self.projection_layer = Container(proj=nn.Linear(d, sizes[1]))
        self.d = d

    @staticmethod
    def feed_forward(layer, x):
        return layer.feed_forward_block.linear_2(layer.feed_forward_block.linear_1(x).relu())

    def encode(self, source, mask):
        embedding = getattr(self, self.source_name).embedding
        x = embedding(source) * self.d**0.5 + self.src_pos()[: source.shape[1]]
        for layer in self.encoder.layers:
            norms = [connection.norm for connection in getattr(layer, self.residual_encoder)]
            y = norms[0](x)
            x = x + layer.self_attention_block(y, y, y, mask)
            x = x + self.feed_forward(layer, norms[1](x))
        return self.encoder.norm(x)

    def decode(self, memory, source_mask, target, target_mask):
        x = self.tgt_embed.embedding(target) * self.d**0.5 + self.tgt_pos()[: target.shape[1]]
        for layer in self.decoder.layers:
            norms = [connection.norm for connection in getattr(layer, self.residual_decoder)]
            y = norms[0](x)
            x = x + layer.self_attention_block(y, y, y, target_mask)
            x = x + getattr(layer, self.cross_used)(norms[1](x), memory, memory, source_mask)
            x = x + self.feed_forward(layer, norms[2](x))
        return self.decoder.norm(x)

    def project(self, x):
        return self.projection_layer.proj(x)


class BuildTransformer(Hkproj):
    """Published version, whose decoder uses the self-attention block also as cross-attention."""

    residual_encoder = "residual_connection"
    source_name, cross_name, cross_used = "src_emded", "cross_attention_Block", "self_attention_block"

    def __init__(self, **sizes):
        super().__init__(version="A", **sizes)


class BuildTransformerRepaired(BuildTransformer):
    cross_used = "cross_attention_Block"


# --- The notebook ---


class Notebook(nn.Module):
    def __init__(self, sizes=(31, 37), d=16, heads=4, layers=2, ff=24, length=20):
        super().__init__()
        names = ("W_q", "W_k", "W_v", "W_o")

        def layer(attentions):
            parts = {name: WAttention(d, heads, True, names) for name in attentions}
            norms = {f"norm{i + 1}": nn.LayerNorm(d) for i in range(len(attentions) + 1)}
            return Container(**parts, feed_forward=Container(fc1=nn.Linear(d, ff), fc2=nn.Linear(ff, d)), **norms)

        self.encoder_embedding, self.decoder_embedding = (nn.Embedding(size, d) for size in sizes)
        self.positional_encoding = Table("pe", sinusoids(length, d)[None])
        self.encoder_layers = nn.ModuleList(layer(["self_attn"]) for _ in range(layers))
        self.decoder_layers = nn.ModuleList(layer(["self_attn", "cross_attn"]) for _ in range(layers))
        self.fc = nn.Linear(d, sizes[1])

    def forward(self, source, target):
        visible = (source != 0)[:, None, None]
        x = self.encoder_embedding(source) + self.positional_encoding()[: source.shape[1]]
        for layer in self.encoder_layers:
            x = layer.norm1(x + layer.self_attn(x, x, x, visible))
            x = layer.norm2(x + layer.feed_forward.fc2(layer.feed_forward.fc1(x).relu()))
        y = self.decoder_embedding(target) + self.positional_encoding()[: target.shape[1]]
        earlier = (target != 0)[:, None, :, None] & causal(target.shape[1])  # masks rows of padding, not columns
        for layer in self.decoder_layers:
            y = layer.norm1(y + layer.self_attn(y, y, y, earlier))
            y = layer.norm2(y + layer.cross_attn(y, x, x, visible))
            y = layer.norm3(y + layer.feed_forward.fc2(layer.feed_forward.fc1(y).relu()))
        return self.fc(y)


# --- dm, dk, dv, nhead ---


class VarianceNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x):
        variance = x.var(-1, unbiased=True, keepdim=True)
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(variance + 1e-6) * self.gamma + self.beta


class SeparateHeads(nn.Module):
    def __init__(self, sizes=(31, 37), d=16, dk=6, heads=2, layers=2, ff=24, length=20, bias=False):
        super().__init__()
        self.heads = heads

        def attention():
            maps = {name: nn.Linear(d, dk * heads, bias=bias) for name in ("wq", "wk")}
            return Container(
                **maps, wv=nn.Linear(d, d // heads * heads, bias=bias), wo=nn.Linear(d // heads * heads, d)
            )

        def layer(attentions):
            norms = {f"norm{i + 1}": VarianceNorm(d) for i in range(len(attentions) + 1)}
            ffn = Container(w1=nn.Linear(d, ff), w2=nn.Linear(ff, d))
            return Container(**{name: attention() for name in attentions}, feedforward=ffn, **norms)

        def side(size, attentions):
            return Container(
                embeddings=Container(embedding=nn.Embedding(size, d)),
                pos_encodings=Table("pos_encodings", sinusoids(length, d)[None]),
                stack=nn.ModuleList(layer(attentions) for _ in range(layers)),
            )

        self.encoder = side(sizes[0], ["multihead"])
        self.decoder = side(sizes[1], ["maskmultihead", "multihead"])
        self.linear = nn.Linear(d, sizes[1])
        self.d = d

    def attention(self, part, q, kv, mask):
        return part.wo(attend(part.wq(q), part.wk(kv), part.wv(kv), self.heads, mask.unsqueeze(1)))

    def embed(self, side, ids):
        return side.embeddings.embedding(ids) * self.d**0.5 + side.pos_encodings()[: ids.shape[1]]

    def forward(self, src, trg, src_mask, trg_mask):
        x = self.embed(self.encoder, src)
        for layer in self.encoder.stack:
            x = layer.norm1(x + self.attention(layer.multihead, x, x, src_mask))
            x = layer.norm2(x + layer.feedforward.w2(layer.feedforward.w1(x).relu()))
        y = self.embed(self.decoder, trg)
        for layer in self.decoder.stack:
            y = layer.norm1(y + self.attention(layer.maskmultihead, y, y, trg_mask))
            y = layer.norm2(y + self.attention(layer.multihead, y, x, src_mask))
            y = layer.norm3(y + layer.feedforward.w2(layer.feedforward.w1(y).relu()))
        return self.linear(y)


# --- The Annotated Transformer ---


class Annotated(nn.Module):
    def __init__(self, sizes=(31, 37), d=16, heads=4, layers=2, ff=24, length=20):
        super().__init__()
        names = ("a_2", "b_2")

        def layer(attentions):
            parts = {n: Container(linears=nn.ModuleList(nn.Linear(d, d) for _ in range(4))) for n in attentions}
            norms = nn.ModuleList(Container(norm=StdNorm(d, names)) for _ in range(len(attentions) + 1))
            return Container(
                **parts, feed_forward=Container(w_1=nn.Linear(d, ff), w_2=nn.Linear(ff, d)), sublayer=norms
            )

        def stack(attentions):
            return Container(layers=nn.ModuleList(layer(attentions) for _ in range(layers)), norm=StdNorm(d, names))

        self.encoder, self.decoder = stack(["self_attn"]), stack(["self_attn", "src_attn"])
        self.src_embed, self.tgt_embed = (
            nn.ModuleList([Container(lut=nn.Embedding(size, d)), Table("pe", sinusoids(length, d)[None])])
            for size in sizes
        )
        self.generator = nn.Module()
        self.generator.proj = nn.Linear(d, sizes[1])
        self.generator.forward = lambda x: self.generator.proj(x).log_softmax(-1)
        self.d, self.heads = d, heads

    def attention(self, part, q, kv, mask):
        wq, wk, wv, wo = part.linears
        return wo(attend(wq(q), wk(kv), wv(kv), self.heads, mask.unsqueeze(1)))

    def forward(self, source, target, source_mask, target_mask):
        x = self.src_embed[0].lut(source) * self.d**0.5 + self.src_embed[1]()[: source.shape[1]]
        for layer in self.encoder.layers:
            y = layer.sublayer[0].norm(x)
            x = x + self.attention(layer.self_attn, y, y, source_mask)
            x = x + layer.feed_forward.w_2(layer.feed_forward.w_1(layer.sublayer[1].norm(x)).relu())
        memory = self.encoder.norm(x)
        x = self.tgt_embed[0].lut(target) * self.d**0.5 + self.tgt_embed[1]()[: target.shape[1]]
        for layer in self.decoder.layers:
            y = layer.sublayer[0].norm(x)
            x = x + self.attention(layer.self_attn, y, y, target_mask)
            x = x + self.attention(layer.src_attn, layer.sublayer[1].norm(x), memory, source_mask)
            x = x + layer.feed_forward.w_2(layer.feed_forward.w_1(layer.sublayer[2].norm(x)).relu())
        return self.decoder.norm(x)


# --- jadore801120 ---


class Jadore(nn.Module):
    """`scale` is "emb", "prj" or "none", and has an effect if the LM head shares the target embeddings."""

    def __init__(
        self, sizes=(31, 37), d=16, heads=4, dk=4, layers=2, ff=24, length=20, pad=1, shared=True, scale="prj"
    ):
        super().__init__()

        def attention():
            maps = {name: nn.Linear(d, heads * dk, bias=False) for name in ("w_qs", "w_ks", "w_vs")}
            return Container(**maps, fc=nn.Linear(heads * dk, d, bias=False), layer_norm=nn.LayerNorm(d, eps=1e-6))

        def layer(attentions):
            ffn = Container(w_1=nn.Linear(d, ff), w_2=nn.Linear(ff, d), layer_norm=nn.LayerNorm(d, eps=1e-6))
            return Container(**{name: attention() for name in attentions}, pos_ffn=ffn)

        def side(size, name, attentions):
            return Container(
                **{name: nn.Embedding(size, d)},
                position_enc=Table("pos_table", sinusoids(length, d)[None]),
                layer_stack=nn.ModuleList(layer(attentions) for _ in range(layers)),
                layer_norm=nn.LayerNorm(d, eps=1e-6),
            )

        self.encoder = side(sizes[0], "src_word_emb", ["slf_attn"])
        self.decoder = side(sizes[1], "trg_word_emb", ["slf_attn", "enc_attn"])
        self.trg_word_prj = nn.Linear(d, sizes[1], bias=False)
        if shared:
            self.trg_word_prj.weight = self.decoder.trg_word_emb.weight
        self.d, self.heads, self.pad = d, heads, pad
        self.scale_emb, self.scale_prj = (shared and scale == name for name in ("emb", "prj"))

    def attention(self, part, q, kv, mask):
        output = attend(part.w_qs(q), part.w_ks(kv), part.w_vs(kv), self.heads, mask)
        return part.layer_norm(q + part.fc(output))

    def feed_forward(self, part, x):
        return part.layer_norm(x + part.w_2(part.w_1(x).relu()))

    def embed(self, side, embedding, ids):
        x = embedding(ids) * (self.d**0.5 if self.scale_emb else 1)
        return side.layer_norm(x + side.position_enc()[: ids.shape[1]])

    def forward(self, source, target):
        visible = (source != self.pad)[:, None, None]
        earlier = (target != self.pad)[:, None, None] & causal(target.shape[1])
        x = self.embed(self.encoder, self.encoder.src_word_emb, source)
        for layer in self.encoder.layer_stack:
            x = self.feed_forward(layer.pos_ffn, self.attention(layer.slf_attn, x, x, visible))
        y = self.embed(self.decoder, self.decoder.trg_word_emb, target)
        for layer in self.decoder.layer_stack:
            y = self.attention(layer.slf_attn, y, y, earlier)
            y = self.feed_forward(layer.pos_ffn, self.attention(layer.enc_attn, y, x, visible))
        logits = self.trg_word_prj(y) * (self.d**-0.5 if self.scale_prj else 1)
        return logits.view(-1, logits.shape[-1])


# --- gordicaleksa ---


class Gordic(nn.Module):
    def __init__(self, sizes=(31, 37), d=16, heads=4, layers=2, length=20):
        super().__init__()

        def attention():
            nets = nn.ModuleList(nn.Linear(d, d) for _ in range(3))
            return Container(qkv_nets=nets, out_projection_net=nn.Linear(d, d))

        def layer(attentions):
            net = Container(linear1=nn.Linear(d, 4 * d), linear2=nn.Linear(4 * d, d))
            norms = nn.ModuleList(Container(norm=nn.LayerNorm(d)) for _ in range(len(attentions) + 1))
            return Container(**{name: attention() for name in attentions}, pointwise_net=net, sublayers=norms)

        self.src_embedding, self.trg_embedding = (Container(embeddings_table=nn.Embedding(size, d)) for size in sizes)
        self.src_pos_embedding, self.trg_pos_embedding = (
            Table("positional_encodings_table", sinusoids(length, d)) for _ in range(2)
        )
        encoder_layers = [layer(["multi_headed_attention"]) for _ in range(layers)]
        self.encoder = Container(encoder_layers=nn.ModuleList(encoder_layers), norm=nn.LayerNorm(d))
        decoder_layers = [layer(["trg_multi_headed_attention", "src_multi_headed_attention"]) for _ in range(layers)]
        self.decoder = Container(decoder_layers=nn.ModuleList(decoder_layers), norm=nn.LayerNorm(d))
        self.decoder_generator = Container(linear=nn.Linear(d, sizes[1]))
        self.d, self.heads = d, heads

    def attention(self, part, q, kv, mask):
        wq, wk, wv = part.qkv_nets
        return part.out_projection_net(attend(wq(q), wk(kv), wv(kv), self.heads, mask))

    def forward(self, source, target, source_mask, target_mask):
        x = self.src_embedding.embeddings_table(source) * self.d**0.5 + self.src_pos_embedding()[: source.shape[1]]
        for layer in self.encoder.encoder_layers:
            y = layer.sublayers[0].norm(x)
            x = x + self.attention(layer.multi_headed_attention, y, y, source_mask)
            x = x + layer.pointwise_net.linear2(layer.pointwise_net.linear1(layer.sublayers[1].norm(x)).relu())
        memory = self.encoder.norm(x)
        x = self.trg_embedding.embeddings_table(target) * self.d**0.5 + self.trg_pos_embedding()[: target.shape[1]]
        for layer in self.decoder.decoder_layers:
            y = layer.sublayers[0].norm(x)
            x = x + self.attention(layer.trg_multi_headed_attention, y, y, target_mask)
            y = layer.sublayers[1].norm(x)
            x = x + self.attention(layer.src_multi_headed_attention, y, memory, source_mask)
            x = x + layer.pointwise_net.linear2(layer.pointwise_net.linear1(layer.sublayers[2].norm(x)).relu())
        logits = self.decoder_generator.linear(self.decoder.norm(x))
        return logits.log_softmax(-1).view(-1, logits.shape[-1])


# --- hyunwoongko ---


class GammaNorm(nn.Module):
    """`unbiased`: whether to use the norm of the code before December 2022."""

    def __init__(self, d, unbiased=False):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))
        self.unbiased = unbiased

    def forward(self, x):
        variance = x.var(-1, unbiased=self.unbiased, keepdim=True)
        deviation = variance.sqrt() + 1e-12 if self.unbiased else torch.sqrt(variance + 1e-12)
        return self.gamma * (x - x.mean(-1, keepdim=True)) / deviation + self.beta


class Hyunwoongko(nn.Module):
    def __init__(self, sizes=(31, 37), d=16, heads=4, layers=2, ff=24, pad=1, unbiased=False):
        super().__init__()
        names = ("w_q", "w_k", "w_v", "w_concat")

        def layer(attentions):
            norms = {f"norm{i + 1}": GammaNorm(d, unbiased) for i in range(len(attentions) + 1)}
            ffn = Container(linear1=nn.Linear(d, ff), linear2=nn.Linear(ff, d))
            return Container(**{name: WAttention(d, heads, True, names) for name in attentions}, ffn=ffn, **norms)

        def side(size, attentions):
            emb = Container(tok_emb=nn.Embedding(size, d))
            return Container(emb=emb, layers=nn.ModuleList(layer(attentions) for _ in range(layers)))

        self.encoder, self.decoder = (
            side(sizes[0], ["attention"]),
            side(sizes[1], ["self_attention", "enc_dec_attention"]),
        )
        self.decoder.linear = nn.Linear(d, sizes[1])
        self.pad, self.d = pad, d

    def forward(self, source, target):
        visible = (source != self.pad)[:, None, None]
        earlier = (target != self.pad)[:, None, :, None] & causal(target.shape[1])
        x = self.encoder.emb.tok_emb(source) + sinusoids(source.shape[1], self.d)
        for layer in self.encoder.layers:
            x = layer.norm1(x + layer.attention(x, x, x, visible))
            x = layer.norm2(x + layer.ffn.linear2(layer.ffn.linear1(x).relu()))
        y = self.decoder.emb.tok_emb(target) + sinusoids(target.shape[1], self.d)
        for layer in self.decoder.layers:
            y = layer.norm1(y + layer.self_attention(y, y, y, earlier))
            y = layer.norm2(y + layer.enc_dec_attention(y, x, x, visible))
            y = layer.norm3(y + layer.ffn.linear2(layer.ffn.linear1(y).relu()))
        return self.decoder.linear(y)


# --- bentrevett ---


class Bentrevett(nn.Module):
    """`separate`: whether each sublayer has its own norm; older code has one norm per layer."""

    def __init__(self, sizes=(31, 37), d=16, heads=4, layers=2, ff=24, length=20, pad=1, separate=True):
        super().__init__()
        names = ("fc_q", "fc_k", "fc_v", "fc_o")

        def layer(attentions, norm_names):
            norms = {name: nn.LayerNorm(d) for name in (norm_names if separate else ["layer_norm"])}
            ffn = Container(fc_1=nn.Linear(d, ff), fc_2=nn.Linear(ff, d))
            parts = {name: WAttention(d, heads, True, names) for name in attentions}
            return Container(**parts, positionwise_feedforward=ffn, **norms)

        def side(size, attentions, norm_names):
            return Container(
                tok_embedding=nn.Embedding(size, d),
                pos_embedding=nn.Embedding(length, d),
                layers=nn.ModuleList(layer(attentions, norm_names) for _ in range(layers)),
            )

        self.norms = ["self_attn_layer_norm", "enc_attn_layer_norm", "ff_layer_norm"]
        self.encoder = side(sizes[0], ["self_attention"], self.norms[::2])
        self.decoder = side(sizes[1], ["self_attention", "encoder_attention"], self.norms)
        self.decoder.fc_out = nn.Linear(d, sizes[1])
        self.pad, self.d, self.separate = pad, d, separate

    def norm(self, layer, i):
        return getattr(layer, self.norms[i] if self.separate else "layer_norm")

    def embed(self, side, ids):
        return side.tok_embedding(ids) * self.d**0.5 + side.pos_embedding(torch.arange(ids.shape[1]))

    def forward(self, source, target):
        visible = (source != self.pad)[:, None, None]
        earlier = (target != self.pad)[:, None, None] & causal(target.shape[1])
        x = self.embed(self.encoder, source)
        for layer in self.encoder.layers:
            x = self.norm(layer, 0)(x + layer.self_attention(x, x, x, visible))
            ffn = layer.positionwise_feedforward
            x = self.norm(layer, 2)(x + ffn.fc_2(ffn.fc_1(x).relu()))
        y = self.embed(self.decoder, target)
        for layer in self.decoder.layers:
            y = self.norm(layer, 0)(y + layer.self_attention(y, y, y, earlier))
            y = self.norm(layer, 1)(y + layer.encoder_attention(y, x, x, visible))
            ffn = layer.positionwise_feedforward
            y = self.norm(layer, 2)(y + ffn.fc_2(ffn.fc_1(y).relu()))
        return self.decoder.fc_out(y), None


# --- Aladdin Persson ---


class AladdinPersson(nn.Module):
    """`full`: whether a matrix covers all heads, instead of a matrix that all heads share."""

    def __init__(self, sizes=(31, 37), d=16, heads=4, layers=2, length=20, pad=0, full=False, bias=False):
        super().__init__()
        k = d if full else d // heads

        def attention():
            maps = {name: nn.Linear(k, k, bias=bias) for name in ("values", "keys", "queries")}
            return Container(**maps, fc_out=nn.Linear(d, d))

        def block():
            ffn = nn.Sequential(nn.Linear(d, 3 * d), nn.ReLU(), nn.Linear(3 * d, d))
            return Container(attention=attention(), norm1=nn.LayerNorm(d), norm2=nn.LayerNorm(d), feed_forward=ffn)

        def side(size, layer):
            return Container(
                word_embedding=nn.Embedding(size, d),
                position_embedding=nn.Embedding(length, d),
                layers=nn.ModuleList(layer() for _ in range(layers)),
            )

        self.encoder = side(sizes[0], block)
        self.decoder = side(
            sizes[1], lambda: Container(norm=nn.LayerNorm(d), attention=attention(), transformer_block=block())
        )
        self.decoder.fc_out = nn.Linear(d, sizes[1])
        self.d, self.k, self.heads, self.pad = d, k, heads, pad

    def attention(self, part, value, key, query, mask):
        """Apply the matrices, which all heads share unless they are full."""
        parts = []
        for x, linear in ((query, part.queries), (key, part.keys), (value, part.values)):
            parts.append(linear(x.view(*x.shape[:2], -1, self.k)).flatten(2))
        return part.fc_out(attend(*parts, self.heads, mask, divisor=math.sqrt(self.d)))

    def block(self, part, value, key, query, mask):
        x = part.norm1(self.attention(part.attention, value, key, query, mask) + query)
        return part.norm2(part.feed_forward(x) + x)

    def embed(self, side, ids):
        return side.word_embedding(ids) + side.position_embedding(torch.arange(ids.shape[1]))

    def forward(self, source, target):
        visible = (source != self.pad)[:, None, None]
        x = self.embed(self.encoder, source)
        for layer in self.encoder.layers:
            x = self.block(layer, x, x, x, visible)
        y = self.embed(self.decoder, target)
        for layer in self.decoder.layers:
            attention = self.attention(layer.attention, y, y, y, causal(target.shape[1]))
            y = self.block(layer.transformer_block, x, x, layer.norm(attention + y), visible)
        return self.decoder.fc_out(y)


class AladdinPerssonSeq2Seq(nn.Module):
    """`nn.Transformer` with learned positions and sequence-first tensors."""

    def __init__(self, sizes=(31, 37), d=16, heads=4, layers=2, ff=4, length=20, pad=0):
        super().__init__()
        self.src_word_embedding, self.trg_word_embedding = (nn.Embedding(size, d) for size in sizes)
        self.src_position_embedding, self.trg_position_embedding = (nn.Embedding(length, d) for _ in range(2))
        self.transformer = nn.Transformer(d, heads, layers, layers, ff, dropout=0.0)
        self.fc_out = nn.Linear(d, sizes[1])
        self.pad = pad

    def forward(self, source, target):
        x = self.src_word_embedding(source) + self.src_position_embedding(torch.arange(len(source)))[:, None]
        y = self.trg_word_embedding(target) + self.trg_position_embedding(torch.arange(len(target)))[:, None]
        padding, later = (source == self.pad).T, ~causal(len(target))
        return self.fc_out(self.transformer(x, y, src_key_padding_mask=padding, tgt_mask=later))


class TorchTutorial(nn.Module):
    def __init__(self, sizes=(31, 37), d=16, heads=4, layers=2, ff=24, length=20):
        super().__init__()
        self.transformer = nn.Transformer(d, heads, layers, layers, ff, dropout=0.0)
        self.generator = nn.Linear(d, sizes[1])
        self.src_tok_emb, self.tgt_tok_emb = (Container(embedding=nn.Embedding(size, d)) for size in sizes)
        self.positional_encoding = Table("pos_embedding", sinusoids(length, d)[:, None])
        self.d = d

    def embed(self, embedding, ids):
        return embedding(ids) * self.d**0.5 + self.positional_encoding()[: len(ids), None]

    def forward(self, source, target, source_mask, target_mask, source_padding, target_padding, memory_padding):
        x, y = self.embed(self.src_tok_emb.embedding, source), self.embed(self.tgt_tok_emb.embedding, target)
        out = self.transformer(x, y, source_mask, target_mask, None, source_padding, target_padding, memory_padding)
        return self.generator(out)


# --- JoeyNMT ---


class JoeyNMT(nn.Module):
    def __init__(self, sizes=(31, 37), d=16, heads=4, layers=2, ff=24, length=20, pre=True, scale=True, tied=False):
        super().__init__()
        names = ("q_layer", "k_layer", "v_layer", "output_layer")

        def layer(attentions, norm_names):
            norms = {name: nn.LayerNorm(d, eps=1e-6) for name in norm_names}
            pwff = nn.Sequential(nn.Linear(d, ff), nn.ReLU(), nn.Dropout(0.1), nn.Linear(ff, d), nn.Dropout(0.1))
            ffn = Container(layer_norm=nn.LayerNorm(d, eps=1e-6), pwff_layer=pwff)
            parts = {name: WAttention(d, heads, True, names) for name in attentions}
            return Container(**parts, feed_forward=ffn, **norms)

        def stack(attentions, norm_names):
            final = {"layer_norm": nn.LayerNorm(d, eps=1e-6)} if pre else {}
            layers_ = nn.ModuleList(layer(attentions, norm_names) for _ in range(layers))
            return Container(layers=layers_, pe=Table("pe", sinusoids(length, d)[None]), **final)

        self.src_embed, self.trg_embed = (Container(lut=nn.Embedding(size, d)) for size in sizes)
        self.encoder = stack(["src_src_att"], ["layer_norm"])
        self.decoder = stack(["trg_trg_att", "src_trg_att"], ["x_layer_norm", "dec_layer_norm"])
        self.decoder.output_layer = nn.Linear(d, sizes[1], bias=False)
        if tied:
            self.decoder.output_layer.weight = self.trg_embed.lut.weight
        self.scale, self.pre = d**0.5 if scale else 1.0, pre

    def residual(self, norm, x, sublayer):
        return x + sublayer(norm(x)) if self.pre else norm(x + sublayer(x))

    def _encode_decode(self, src, trg_input, src_mask, src_length, trg_mask):
        visible, earlier = src_mask[:, None], trg_mask[:, None] & causal(trg_input.shape[1])
        x = self.src_embed.lut(src) * self.scale + self.encoder.pe()[: src.shape[1]]
        for layer in self.encoder.layers:
            x = self.residual(layer.layer_norm, x, lambda y, a=layer.src_src_att: a(y, y, y, visible))
            x = self.residual(layer.feed_forward.layer_norm, x, layer.feed_forward.pwff_layer)
        memory = self.encoder.layer_norm(x) if self.pre else x
        x = self.trg_embed.lut(trg_input) * self.scale + self.decoder.pe()[: trg_input.shape[1]]
        for layer in self.decoder.layers:
            x = self.residual(layer.x_layer_norm, x, lambda y, a=layer.trg_trg_att: a(y, y, y, earlier))
            x = self.residual(layer.dec_layer_norm, x, lambda y, a=layer.src_trg_att: a(y, memory, memory, visible))
            x = self.residual(layer.feed_forward.layer_norm, x, layer.feed_forward.pwff_layer)
        x = self.decoder.layer_norm(x) if self.pre else x
        return self.decoder.output_layer(x), None


SHARED = {"proj_share_weight": True}
CASES = {  # name: (class of the reference, arguments, layout, settings of the file or the user)
    "hkproj A": ("Hkproj", {"version": "A"}, "hkproj", {}),
    "hkproj B": ("Hkproj", {"version": "B"}, "hkproj", {}),
    "hkproj C": ("Hkproj", {"version": "C"}, "hkproj", {}),
    "article": ("BuildTransformer", {}, "build_transformer", {}),
    "article repaired": ("BuildTransformerRepaired", {}, "build_transformer_repaired", {}),
    "notebook": ("Notebook", {}, "notebook", {}),
    "separate heads": ("SeparateHeads", {}, "separate_heads", {}),
    "separate heads, biases": ("SeparateHeads", {"bias": True}, "separate_heads", {}),
    "annotated": ("Annotated", {}, "annotated", {}),
    "jadore, logits scaled": ("Jadore", {}, "jadore801120", SHARED),
    "jadore, embeddings scaled": ("Jadore", {"scale": "emb"}, "jadore801120", SHARED | {"scale_emb_or_prj": "emb"}),
    "jadore, shared without settings": ("Jadore", {}, "jadore801120", {}),
    "jadore, not shared": ("Jadore", {"shared": False, "dk": 6}, "jadore801120", {}),
    "gordicaleksa": ("Gordic", {}, "gordicaleksa", {}),
    "hyunwoongko": ("Hyunwoongko", {}, "hyunwoongko", {}),
    "hyunwoongko, unbiased": ("Hyunwoongko", {"unbiased": True}, "hyunwoongko", {"unbiased_norm": True}),
    "bentrevett": ("Bentrevett", {}, "bentrevett", {}),
    "bentrevett, older": ("Bentrevett", {"separate": False}, "bentrevett_2019", {}),
    "aladdin": ("AladdinPersson", {}, "aladdin_persson", {}),
    "aladdin, biases": ("AladdinPersson", {"bias": True}, "aladdin_persson", {}),
    "aladdin, full": ("AladdinPersson", {"full": True}, "aladdin_persson", {}),
    "aladdin, full, biases": ("AladdinPersson", {"full": True, "bias": True}, "aladdin_persson", {}),
    "aladdin, nn.Transformer": ("AladdinPerssonSeq2Seq", {}, "aladdin_persson_seq2seq", {}),
    "torch tutorial": ("TorchTutorial", {}, "torch_tutorial", {}),
    "joeynmt, pre": ("JoeyNMT", {}, "joeynmt", {"scale_embedding": True}),
    "joeynmt, post": ("JoeyNMT", {"pre": False, "scale": False}, "joeynmt", {"scale_embedding": False}),
    "joeynmt, tied": ("JoeyNMT", {"tied": True}, "joeynmt", {"scale_embedding": True}),
}
