"""Tokens that become one, as a moving picture: the token kernels of the gallery's seven designs at depths 0 to 100.

`python -m benchmarks.kernel_animation` writes docs/pictures/kernels.gif.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from signalprop.kernels.gallery import figure_7
from signalprop.kernels.trace import Trace, trace

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "kernels.gif"
DEPTHS = (*range(10), *range(10, 30, 4), *range(30, 101, 10))
_LENGTH = 48  # tokens
_SECOND = 6  # pictures


def traces() -> dict[str, Trace]:
    """The gallery's networks, followed from the input to layer 100."""
    networks = figure_7(100, _LENGTH)
    return {name: trace(p, at=DEPTHS, backward=False, rank=False) for name, p in networks.items()}


def animated(found: dict[str, Trace], depths: Sequence[int]) -> Any:
    """A matplotlib animation: a panel per design, cosines of all pairs of tokens, and their mean under it."""
    from matplotlib.animation import FuncAnimation
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.2, 2.15), dpi=80)
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.13, top=0.72, wspace=0.08)
    panels = figure.subplots(1, len(found))
    title = figure.suptitle("", fontsize=11)
    images = []
    for panel, (name, item) in zip(panels, found.items(), strict=True):
        images.append(panel.imshow(item.cosines(0), vmin=0, vmax=1, cmap="viridis", interpolation="nearest"))
        panel.set_title(name.replace(", ", ",\n", 1), fontsize=8)
        panel.set_xticks([])
        panel.set_yticks([])

    def draw(depth: int) -> list[Any]:
        title.set_text(f"Cosine of every pair of tokens after {depth} layers (yellow: one vector)")
        for panel, image, item in zip(panels, images, found.values(), strict=True):
            image.set_data(item.cosines(depth))
            panel.set_xlabel(f"mean {item.forward.mean_cosine[depth]:.3f}", fontsize=8)
        return [title, *images]

    return FuncAnimation(figure, draw, frames=[*depths, *[depths[-1]] * _SECOND], blit=False)


def main() -> None:
    """Write the animation."""
    from matplotlib.animation import PillowWriter
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    made = animated(traces(), DEPTHS)
    FigureCanvasAgg(made._fig)
    made.save(PICTURE, writer=PillowWriter(fps=_SECOND))
    print(f"{PICTURE.name}: {PICTURE.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
