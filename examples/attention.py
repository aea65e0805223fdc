"""Attention that stays within documents, in three ways, each compared with a dense mask.

    fmsdata demo --folder demo-data
    python examples/attention.py --data demo-data

A line holds several documents. Without a mask, each token also attends to the documents before its own.
The batch says where documents lie in three forms, and each kind of attention takes one of them:
`document_ids` for flex_attention, `cu_seqlens` and `max_seqlen` for varlen attention, and `position_ids`
for models of Hugging Face. On the CPU there is no fused kernel: flex_attention runs uncompiled, and varlen
attention is a loop over the segments.
"""

import argparse
import warnings
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

import fmsdata

OUTPUTS = ["document_ids", "position_ids", "cu_seqlens", "max_seqlen"]


def dense_mask(document_ids: Tensor) -> Tensor:
    """What each token may see, as a tensor (batch, 1, length, length): the tokens before it, of its document.

    The other ways need no tensor of this size.
    """
    return (document_ids[:, :, None] == document_ids[:, None, :]).tril()[:, None]


def block_mask(document_ids: Tensor) -> BlockMask:
    """The same for flex_attention, which skips blocks of tokens that see nothing of each other."""

    def visible(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_ids[batch, query] == document_ids[batch, key])

    rows, length = document_ids.shape
    return create_block_mask(visible, rows, None, length, length, device=str(document_ids.device))


def flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    """Attention over (batch, heads, length, width). Make the mask once per batch, for all layers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        attended = flex_attention(query, key, value, block_mask=mask)  # on a GPU: torch.compile(flex_attention)
    return attended if isinstance(attended, Tensor) else attended[0]


def varlen(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Attention over the flattened batch (tokens, heads, width). The model gets `input_ids.flatten()`."""
    if query.is_cuda:
        causal = (-1, 0)  # how far a token sees to the left and to the right
        return torch.as_tensor(
            varlen_attn(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, window_size=causal)
        )
    attended = torch.empty_like(query)
    for start, stop in pairwise(cu_seqlens.tolist()):
        q, k, v = (tensor[start:stop].transpose(0, 1) for tensor in (query, key, value))
        attended[start:stop] = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
    return attended


def hugging_face(model: Any, batch: dict[str, Any]) -> Tensor:
    """The logits of a model of transformers, which finds the documents where positions start again.

    It looks for them only without `attention_mask` and without a cache, which models create by default.
    """
    logits: Tensor = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return logits


def differences(batch: dict[str, Any], vocabulary: int) -> dict[str, float]:
    """How far each way is from a dense mask, at the most, over the tokens that are not padding."""
    ids, learned = batch["document_ids"], batch["document_ids"] >= 0
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, vocabulary, 2, 16, generator=generator)[:, batch["input_ids"]].transpose(2, 3)
    dense = scaled_dot_product_attention(query, key, value, attn_mask=dense_mask(ids)).transpose(1, 2)
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    found = {
        "flex_attention": (flex(query, key, value, block_mask(ids)).transpose(1, 2), dense),
        "varlen": (varlen(q, k, v, batch["cu_seqlens"], batch["max_seqlen"]).view_as(dense), dense),
        "no mask": (scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2), dense),
    }
    model = small_llama(vocabulary)
    with torch.no_grad():
        inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]}
        expected = model(**inputs, attention_mask=dense_mask(ids)).logits
        found["hugging face"] = hugging_face(model, batch), expected
        found["hugging face, with a cache"] = model(**inputs).logits, expected
    return {name: float((ours - theirs)[learned].abs().max()) for name, (ours, theirs) in found.items()}


def small_llama(vocabulary: int) -> Any:
    """A model of two layers with random weights."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=vocabulary, **sizes))


def main() -> None:
    options = argparse.ArgumentParser(description="Compare three kinds of document attention with a dense mask.")
    options.add_argument("--config", default="configs/demo.yaml", help="a YAML file")
    options.add_argument("--data", help="folder of the corpus; overrides the configuration")
    arguments = options.parse_args()
    overrides: dict[str, Any] = {"path": arguments.data} if arguments.data else {}
    loader = fmsdata.build_loader(arguments.config, {**overrides, "loader.outputs": OUTPUTS}, rank=0, world_size=1)
    batch = next(loader)
    loader.close()
    for name, difference in differences(batch, int(batch["input_ids"].max()) + 1).items():
        print(f"{name}: {difference:.2g}")


if __name__ == "__main__":
    main()
