"""Whisper: two convolutions over frames before an encoder-decoder with fairseq's names.

Its sines (tensor2tensor's) are read as those of Vaswani et al.: their slowest wave differs, and with it the table's
mean by 0.004 and its token correlation by 0.005 or less (256 to 768 features, 448 to 1500 tokens).
"""

from signalprop.families import bart
from signalprop.families.base import Config, Family, Fields, ModelPaths, normal


def fields(c: Config) -> Fields:
    """`scale_embedding` is read by transformers and then not used."""
    return bart.encoder_decoder(c) | {
        "positions": "sinusoidal", "decoder_positions": "learned", "input": "frames", "frame_dim": c["num_mel_bins"],
        "conv_kernels": (3, 3), "conv_strides": (1, 2), "conv_activation": "gelu",
        "seq_len": c["max_source_positions"], "target_len": c["max_target_positions"],
    }  # fmt: skip


PATHS = ModelPaths(
    stacks=(bart.stack("encoder", final_norm=True), bart.stack("decoder", final_norm=True, cross=True)),
    token="decoder.embed_tokens",
    position="encoder.embed_positions",
    decoder_position="decoder.embed_positions",
    convolutions=("encoder.conv1", "encoder.conv2"),
    features_first=True,
    classifiers=("classifier",),
    padding="",  # the model ignores its mask: silence is heard
    inputs={"frames": "input_features", "decoder_tokens": "decoder_input_ids"},
)
FAMILY = Family(
    model_type="whisper",
    hears=("WhisperFeatureExtractor", 160),  # samples
    defaults={
        "vocab_size": 51865, "d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6,
        "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536, "activation_function": "gelu",
        "max_source_positions": 1500, "max_target_positions": 448, "num_mel_bins": 80, "dropout": 0.0,
        "attention_dropout": 0.0, "tie_word_embeddings": True,
    },
    fields=fields,
    paths=(PATHS,),
    initialisation=normal(setting="init_std"),
    key_bias=False,
)  # fmt: skip
