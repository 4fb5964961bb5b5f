"""Hugging Face's side: makes models with random weights, or loads models and compares what they compute.

    transformers_model.py make FOLDER FAMILY...    writes each model, tokens and logits to FOLDER/FAMILY
    transformers_model.py check FOLDER FAMILY...   loads FOLDER/FAMILY-back and compares its logits with those written
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(
    vocab_size=160,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
)


ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
EXPERTS = dict(
    mixtral=dict(num_local_experts=4, num_experts_per_tok=2),
    qwen3_moe=dict(
        num_experts=6, num_experts_per_tok=3, moe_intermediate_size=40, head_dim=16, norm_topk_prob=True, mlp_only_layers=[0]
    ),
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=0.8)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    n_shared_experts=2,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
)
OLMO3_ROPE = dict(
    full_attention=dict(YARN, attention_factor=1.2, rope_theta=20000.0), sliding_attention=dict(rope_type="default", rope_theta=20000.0)
)
# What a family has and others do not, in sizes at which it matters.
DETAILS = dict(
    qwen3=dict(head_dim=16),
    # Stretched as Llama 3.1 has it; some rotations are slow, some fast, some between at these lengths.
    llama=dict(rope_parameters=ROPE),
    gemma3_text=dict(
        head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"], query_pre_attn_scalar=24
    ),
    olmo3=dict(sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"], rope_parameters=OLMO3_ROPE),
    phi3=dict(pad_token_id=None, bos_token_id=None, eos_token_id=None),
    deepseek_v2=dict(LATENT, topk_method="group_limited_greedy"),
    deepseek_v3=dict(LATENT, norm_topk_prob=True, rope_parameters=YARN),
)
TIED = ("qwen3", "gpt2", "gemma3_text")
GPT2_SIZES = dict(vocab_size=157, n_embd=64, n_layer=3, n_head=4, n_positions=64)


def logits(model, tokens):
    with torch.no_grad():
        return model.eval()(tokens).logits.float().contiguous()


def make(root, family):
    folder = root / family
    torch.manual_seed(7)
    sizes = SIZES | EXPERTS.get(family, {}) | DETAILS.get(family, {})
    # A vocabulary that two ranks cannot share evenly, as the published one is.
    sizes = GPT2_SIZES if family == "gpt2" else sizes
    config = AutoConfig.for_model(family, tie_word_embeddings=family in TIED, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            # Tokens that differ in where they go.
            torch.nn.init.normal_(parameter, std=0.5)
        if name.endswith("bias") or "norm" in name or ".ln_" in name:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name or ".ln_" in name and name.endswith("weight") else 0.0, std=0.1)
    # In several files, as large models come.
    model.save_pretrained(folder, max_shard_size="100KB")
    tokens = torch.randint(0, config.vocab_size, (2, 32))
    save_file({"tokens": tokens, "logits": logits(model, tokens)}, folder / "expected.st")


def check(root, family):
    expected = load_file(root / family / "expected.st")
    model = AutoModelForCausalLM.from_pretrained(root / f"{family}-back", dtype=torch.float32)
    difference = (logits(model, expected["tokens"]) - expected["logits"]).abs().max().item()
    print(f"{family}: logits differ by {difference:e}")
    assert difference < 1e-4, (family, difference)


if __name__ == "__main__":
    action, root, *families = sys.argv[1:]
    for family in families:
        {"make": make, "check": check}[action](Path(root), family)
