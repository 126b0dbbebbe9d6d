"""Fidelity `moments`: every token stands for all. One stream by its scalars, several on token kernels of one node."""

from __future__ import annotations

from dataclasses import replace

from signalprop.errors import InputError
from signalprop.network.inputs import InputStatistics
from signalprop.network.parametrization import Parametrization
from signalprop.results.profile import Profile
from signalprop.theory.network import check_averages, predict_moments


def predict_averages(p: Parametrization, inputs: InputStatistics, *, backward: bool = True) -> Profile:
    """As `predict_moments`, of any number of residual streams.

    Raises:
        InputError: as `predict_moments`, or a sweep of several streams.
    """
    a = p.architecture
    if not a.several_streams:
        return predict_moments(p, inputs, backward=backward)
    from signalprop.kernels.position_grid import Averages
    from signalprop.kernels.predicting import predict_token_kernels

    check_averages(p)
    if p.skip.ndim > 1:
        raise InputError("networks of several residual streams are predicted one by one; give a member of this sweep")
    profile = predict_token_kernels(p, inputs, backward=backward, grid=Averages(a.seq_len), bands=False)
    return replace(profile, fidelity="moments", notes=())
