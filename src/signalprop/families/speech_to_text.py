"""Speech2Text: convolutions with gated linear units over frames before an encoder-decoder with fairseq's names.

Its sines (tensor2tensor's) are read as those of Vaswani et al.; see Whisper for how much they differ.
"""

from dataclasses import replace

from signalprop.families import bart, whisper
from signalprop.families.base import SINUSOIDS, Config, Family, Fields, normal


def fields(c: Config) -> Fields:
    kernels = tuple(c["conv_kernel_sizes"])
    return bart.encoder_decoder(c) | {
        "positions": "sinusoidal", "input": "frames",
        "frame_dim": c["input_feat_per_channel"] * c["input_channels"],
        "conv_kernels": kernels, "conv_strides": (2,) * len(kernels), "conv_channels": c["conv_channels"] // 2,
        "conv_activation": "glu", "embedding_scale": c["d_model"] ** 0.5 if c["scale_embedding"] else 1.0,
        "seq_len": -(-c["max_source_positions"] // 2 ** len(kernels)), "target_len": c["max_target_positions"],
    }  # fmt: skip


FAMILY = Family(
    model_type="speech_to_text",
    hears=("Speech2TextFeatureExtractor", 1),
    defaults={
        "vocab_size": 10000, "d_model": 256, "encoder_layers": 12, "decoder_layers": 6, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "activation_function": "relu",
        "max_source_positions": 6000, "max_target_positions": 1024, "conv_kernel_sizes": [5, 5], "conv_channels": 1024,
        "input_feat_per_channel": 80, "input_channels": 1, "dropout": 0.1, "attention_dropout": 0.0,
        "scale_embedding": True, "tie_word_embeddings": True,
    },
    fields=fields,
    paths=(
        replace(
            whisper.PATHS,
            position=SINUSOIDS,
            decoder_position=SINUSOIDS,
            convolutions=("encoder.conv.conv_layers",),
            features_first=False,
            padding="attention_mask",
        ),
    ),
    initialisation=normal(setting="init_std"),
)  # fmt: skip
