"""A GGUF of random weights in the shape of a catalog model: ``dummy_gguf.py MODEL TARGET``. Runs in this project's environment.

Peers without a switch for random weights load this. The benchmark sends token ids only, but peers want a vocabulary that makes
sense: SmolLM2's is borrowed, and numbered tokens fill it up to the size of the model's own.
"""

import os
import sys

import gguf
import numpy as np

from minivllm_plugin.models.catalog import resolve
from minivllm_plugin.models.config import ModelConfig
from minivllm_plugin.models.pull import ensure_local

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
STD = 0.02
VOCABULARY_OF = "smollm2-135m"


def main(model: str, target: str) -> None:
    config = ModelConfig.from_hf(dict(resolve(model).architecture or {}))
    partial = f"{target}.partial"
    writer = gguf.GGUFWriter(partial, ARCHITECTURES[config.architecture])
    _describe(writer, config)
    rng = np.random.default_rng(0)
    for name, shape in _shapes(config):
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, dtype=np.float32))
        else:
            writer.add_tensor(name, (rng.standard_normal(shape, dtype=np.float32) * STD).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, target)


def _describe(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    _borrow_vocabulary(writer, config.vocab_size)


def _borrow_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    fields = gguf.GGUFReader(ensure_local(resolve(VOCABULARY_OF))).fields
    tokens, types, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges"))
    if len(tokens) > size:
        raise SystemExit(f"a vocabulary of {size} is smaller than that of {VOCABULARY_OF}, which is borrowed")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, *(f"token{index}" for index in range(len(tokens), size))])
    writer.add_token_types([*types, *[gguf.TokenType.NORMAL] * (size - len(tokens))])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _shapes(config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """GGUF's tensor names, in numpy's order of dimensions."""
    hidden, head, inner = config.hidden_size, config.head_dim, config.intermediate_size
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (config.vocab_size, hidden)),
        ("output_norm.weight", (hidden,)),
    ]
    if not config.tie_word_embeddings:
        shapes.append(("output.weight", (config.vocab_size, hidden)))
    for index in range(config.num_layers):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "attn_q": (config.num_heads * head, hidden),
            "attn_k": (config.num_kv_heads * head, hidden),
            "attn_v": (config.num_kv_heads * head, hidden),
            "attn_output": (hidden, config.num_heads * head),
            "ffn_norm": (hidden,),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }
        if config.architecture == "Qwen3ForCausalLM":
            layer |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
        shapes += [(f"blk.{index}.{name}.weight", shape) for name, shape in layer.items()]
    return shapes


if __name__ == "__main__":
    main(*sys.argv[1:])
