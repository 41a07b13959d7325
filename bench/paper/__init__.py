"""The paper's evaluation (Section 6 and the measurements of Section 3), figure by figure.

`python -m bench.paper` (`sterna reproduce`) runs the production policy code on the paper's traces,
writes one result file for each figure under bench/results/paper, draws each figure with our points
and the paper's, and writes docs/evaluation.md from the result files alone.

- `experiment`: the type of a figure; `cells`: simulated runs and their rows.
- `figures`: one module for each experiment; `catalog`: all of them by name.
- `claims`: the paper's sentences with numbers, and their verdicts.
- `points`, `tables`, `drawing`, `page`: the paper's points; Markdown; plots; the document.
- `compare`: the same runs with another revision's code.
- `decode_profile`: the real engine's decode steps, for Figures 4 and 16.
"""
