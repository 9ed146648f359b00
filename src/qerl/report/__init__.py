"""A finished or running run, looked at afterwards.

| file | what it is |
|---|---|
| `panels.py` | what is drawn: panels, curves, colours; one table for the page and the picture |
| `runs.py` | a run read from its folder, its headline figures, its series |
| `html.py`, `page.html` | `qerl report`: one self-contained page, with plotly.js in it |
| `plot.py` | `qerl plot`: the most important panels as one PNG |
| `weights.py` | `qerl export`: what rounding did to the weights, as a table |
| `inspection.py` | `qerl inspect`: its tables, JSON and plot |

Everything comes from the files that `rl/log.py` describes; nothing here needs a model or a GPU.
"""
