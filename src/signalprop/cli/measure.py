"""`signalprop measure`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from signalprop.cli import options as opt
from signalprop.cli import output, sources
from signalprop.data.batches import LONGEST

if TYPE_CHECKING:
    from torch import nn

    from signalprop.attachment.anatomy import Anatomy
    from signalprop.network.architecture import Architecture

_SEQUENCES = 4  # per batch


def measure(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A Hugging Face directory or .gguf file; or an ARCH, built with --scheme."
        ),
    ],
    layers: opt.Layers = None,
    seq_len: opt.Shortened = None,
    norm: opt.Norm = None,
    assignments: opt.Set = None,
    scheme: Annotated[
        str | None,
        typer.Option("--scheme", metavar=opt.SCHEME, help="Initialisation of an ARCH (default: as predict)."),
    ] = None,
    random_init: Annotated[
        bool, typer.Option("--random-init", help="Initialise the directory's model freshly instead of loading weights.")
    ] = False,
    data: opt.Data = None,
    no_gradient: opt.NoGradient = False,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Networks (or batches, of a directory's weights).")] = 1,
    seed: opt.Seed = 0,
    device: opt.Device = "cpu",
    inside: opt.Inside = None,
    all_rows: opt.All = False,
    fail_on: opt.FailOn = None,
    json_file: opt.Json = None,
    plot: opt.Plot = None,
) -> None:
    """Measure every layer's signal with hooks, on real text.

    One forward and one backward pass per seed. A directory keeps its weights unless --random-init is given.

    \b
    Example: signalprop measure ./my-checkpoint --data book.txt --plot signal.png
    """
    from signalprop.cli.loading import announce_model, arrays_in, live_model
    from signalprop.data.model_batches import model_batch
    from signalprop.prediction import cost_of_runs
    from signalprop.results.profile import average
    from signalprop.studies import with_gradient

    output.check_outputs(json_file, plot=plot)
    output.check_severity(fail_on)
    changed = opt.changes(assignments, n_layers=layers, seq_len=seq_len, norm_placement=norm)
    arrays = arrays_in(data, seq_len)
    directory = Path(model) if sources.is_model(model) else None
    if directory is not None:
        sources.check_as_it_is(changed, scheme)
    else:
        sources.check_built(random_init=random_init, inside=inside, data=arrays)
    p = None if directory else sources.parametrization(model, changed, scheme, longest=LONGEST)
    place = opt.usable(device)
    if p is not None:
        output.announce([cost_of_runs(p, _SEQUENCES, seeds)])
    else:
        tokens = seeds * _SEQUENCES * changed.get("seq_len", LONGEST)
        announce_model(model, tokens, less="fewer seeds (--seeds) or tokens (--seq-len)")
    import torch

    from signalprop.measurement import measure as measured
    from signalprop.models import build

    def subject(k: int) -> tuple[nn.Module | Anatomy, Architecture | None, str, Any]:
        """The k-th model, the architecture of its batch, how it was initialised, its inputs."""
        if p is not None:
            return build(p, seed=seed + k).to(place), p.architecture, p.scheme, None
        live, a, arguments = live_model(model, arrays, inside, place, changed, random_init=random_init, seed=seed + k)
        return live, a, "random init" if random_init else "as is", arguments

    profiles = []
    with output.progress("measuring") as step:
        for k in range(seeds):
            if k == 0 or p is not None or random_init:  # saved weights are loaded once
                live, architecture, label, batch = subject(k)
            notes: tuple[str, ...] = ()
            backward, read = not no_gradient, str(data)
            if architecture is not None:
                batch, read = model_batch(architecture, directory, data, _SEQUENCES, seed + k)
                backward, notes = with_gradient(architecture, backward)
            torch.manual_seed((seed + k) % 2**63)  # of the dropout masks
            profiles.append(measured(live, batch, backward=backward, scheme=label))
            step(k + 1, seeds)
    profile = average(profiles)
    profile = replace(profile, reads=read, notes=(*profile.notes, *notes))
    output.deliver_profile(profile, json_file, plot, all_rows=all_rows)
    output.fail_on(profile.findings, fail_on)
