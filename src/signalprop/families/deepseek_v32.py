"""DeepSeek-V3.2: DeepSeek-V3, with an indexer that selects the tokens that a token attends to, as GLM-5's."""

from signalprop.families import deepseek_v3, glm_moe_dsa

FAMILY = glm_moe_dsa.FAMILY.like(
    "deepseek_v32",
    defaults={**deepseek_v3.FAMILY.defaults, "max_position_embeddings": 163840, "index_topk": 2048},
)  # fmt: skip
