"""Trained models: loaded, run on streamed data, measured layer by layer, with layers removed and weights cast."""
