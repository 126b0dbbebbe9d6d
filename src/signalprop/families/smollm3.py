"""SmolLM3: Llama. Every fourth layer rotates nothing, and has the window, if there is one."""

from signalprop.families import llama
from signalprop.families.base import Config, Fields, rotary, seeing


def fields(c: Config) -> Fields:
    rotates = c.get("no_rope_layers") or [
        (i + 1) % c["no_rope_layer_interval"] != 0 for i in range(c["num_hidden_layers"])
    ]
    sliding = c.get("use_sliding_window") and c.get("sliding_window")
    plain = ["full_attention" if one or not sliding else "sliding_attention" for one in rotates]
    seen = seeing(c, c.get("layer_types") or plain, rotates=[bool(one) for one in rotates])
    return llama.fields(c) | {"rotary_base": rotary(c, "rope_theta", 2e6)} | seen


FAMILY = llama.FAMILY.like(
    "smollm3", fields,
    {
        "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
)  # fmt: skip
