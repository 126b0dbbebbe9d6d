"""What the command-line tests share: running in process, and tiny Hugging Face directories made from configurations."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def hf_directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models: `bert` (with a trained tokenizer.json), `gpt2` and `vit` (without)."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, ViTConfig
    from transformers import ViTForImageClassification as ViT

    from signalprop.data.batches import load_text

    root = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertForMaskedLM(BertConfig(vocab_size=300, max_position_embeddings=24, **size)).save_pretrained(root / "bert")
    gpt2 = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=24, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(gpt2).save_pretrained(root / "gpt2")
    ViT(ViTConfig(image_size=8, patch_size=4, num_labels=10, **size)).save_pretrained(root / "vit")

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[PAD]", "[UNK]", "[MASK]"], show_progress=False
    )
    tokenizer.train_from_iterator([load_text()[:100_000]], trainer)
    tokenizer.save(str(root / "bert" / "tokenizer.json"))
    return root
