"""The models of the GPU scripts: Llama 3 8B, and what others change of it."""

from programs import ROOT

CONFIG = ROOT / "configs" / "llama3-8b.toml"
# The widths of the preset 1b of bench/peers/model.py, and its number of layers.
WIDTHS_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
LAYERS_1B = 16
