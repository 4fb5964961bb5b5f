"""The models of the GPU scripts: Llama 3 8B, and what others change of it."""

from programs import ROOT

CONFIG = ROOT / "configs" / "llama3-8b.toml"
# What the presets of bench/peers/model.py change of it.
MODELS = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 16,
    },
    "8b": {},
}
