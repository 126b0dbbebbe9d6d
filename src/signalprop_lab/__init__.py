"""The laboratory: training, sweeps, reproductions, verification, explorer. signalprop never imports it."""
