"""The interactive report: one HTML file that opens offline, made of profiles, diagnoses, kernels and training runs.

Reading (`reading`, `runs`, `kernels`), what to show (one module per section, plain dictionaries) and how it is drawn
(`assets/`, JavaScript) are apart: the page draws whatever charts, heat maps and tables its sections hold.
"""

from signalprop.report.html.contents import Item, document
from signalprop.report.html.page import render, write_report
from signalprop.report.html.reading import read

__all__ = ["Item", "document", "read", "render", "write_report"]
