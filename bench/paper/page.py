"""docs/evaluation.md and the plots, written only from the result files and a template.

The template has the prose and marks of the form `{{NAME.PART}}`, where NAME is an experiment and
PART is `claims`, `tables`, `plot` or `source`; `{{summary}}` and `{{rule}}` have no part. For an
experiment without a result file the page has a line that names the command.
"""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.common.results_io import RESULTS as ALL_RESULTS
from bench.common.results_io import ROOT, read
from bench.common.tables import markdown_table
from bench.paper import claims as judging
from bench.paper.catalog import EXPERIMENTS
from bench.paper.claims import Claim
from bench.paper.experiment import Experiment
from bench.paper.tables import claims_table

RESULTS = ALL_RESULTS / "paper"
PAGE = ROOT / "docs" / "evaluation.md"
TEMPLATE = Path(__file__).parent / "evaluation_template.md"

_MARK = re.compile(r"\{\{(\w+)(?:\.(\w+))?\}\}")


def write_all(results: Path = RESULTS) -> None:
    """Draw every experiment that has a result file, and write the page.

    The page is only written from the results of the repository, since it links to its plots.
    """
    documents = load(results)
    for name, document in documents.items():
        draw = EXPERIMENTS[name].draw
        if draw is not None:
            draw(document["rows"], results / f"{name}.png")
    text = page(documents, TEMPLATE.read_text())
    (PAGE if results.resolve() == RESULTS else results / "evaluation.md").write_text(text)


def load(results: Path) -> dict[str, dict[str, Any]]:
    """The existing result files, by experiment."""
    return {
        name: read(name, results) for name in EXPERIMENTS if (results / f"{name}.json").exists()
    }


def page(documents: Mapping[str, Mapping[str, Any]], template: str) -> str:
    """The whole page.

    Raises:
        KeyError: the template has an unknown mark.
    """

    def fill(mark: re.Match[str]) -> str:
        name, part = mark.groups()
        if part is None:
            return {"summary": summary, "rule": rule}[name](documents)
        experiment = EXPERIMENTS[name]
        if name not in documents:
            return f"*Not run: `sterna reproduce {name}`.*" if part == "claims" else ""
        return _PARTS[part](experiment, documents[name])

    return _MARK.sub(fill, template)


def summary(documents: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of verdicts: the number of claims for each figure and verdict."""
    verdicts = (judging.REPRODUCED, judging.PARTLY, judging.NOT, judging.UNTESTED)
    total: Counter[str] = Counter()
    lines = []
    for name, document in documents.items():
        counts = Counter(each.verdict for each in claims_of(document))
        if not counts:
            continue
        total += counts
        cells = [str(counts[each] or "") for each in verdicts]
        anchor = re.sub(r"[^\w\- ]", "", EXPERIMENTS[name].title.lower()).replace(" ", "-")
        lines.append(
            [f"[{EXPERIMENTS[name].title}](#{anchor})", document["config"]["kind"], *cells]
        )
    lines.append(["**together**", "", *(str(total[each]) for each in verdicts)])
    return markdown_table(["figure", "how", *verdicts], lines, 2)


def rule(_: Mapping[str, Mapping[str, Any]]) -> str:
    """The rule of the verdicts, with the numbers that the code uses."""
    return (
        f"An **effect** (a factor, compared by its logarithm, or a reduction) is *reproduced* when "
        f"ours is at least {judging.FULL_SHARE:.0%} of the paper's, *partly* from "
        f"{judging.PART_SHARE:.0%} on, else *not*. An effect larger than the paper's is "
        f"reproduced; a factor below 1/{judging.PART_FACTOR:g} of the paper's is at most partly "
        f"so. A **plain value** is reproduced within a factor of {judging.FULL_FACTOR:g}, partly "
        f"within {judging.PART_FACTOR:g}. A **bound** must be kept (to "
        f"{judging.BOUND_SLACK - 1:.0%}); up to {judging.PART_FACTOR:g} times its value it is "
        f"partly kept. Where there are other seeds, the claim is judged twice, by the number at "
        f"the paper's seed and by the mean over the others (geometric for factors), and the worse "
        f"verdict counts."
    )


def claims_of(document: Mapping[str, Any]) -> list[Claim]:
    """The claims of a result file."""
    return [Claim.from_json(each) for each in document["claims"]]


def _claims(experiment: Experiment, document: Mapping[str, Any]) -> str:
    found = claims_of(document)
    return claims_table(found) if found else ""


def _tables(experiment: Experiment, document: Mapping[str, Any]) -> str:
    return experiment.tables(document["rows"])


def _plot(experiment: Experiment, document: Mapping[str, Any]) -> str:
    return f"![{experiment.title}](../bench/results/paper/{experiment.name}.png)"


def _source(experiment: Experiment, document: Mapping[str, Any]) -> str:
    hardware = document["hardware"]
    config = ", ".join(
        f"{name} {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in document["config"].items()
    )
    return (
        f"<sub>{document['date'][:10]}, commit {document['commit']}, {hardware['cpu']}, "
        f"{hardware['num_cores']} cores; {config}; "
        f"[all rows](../bench/results/paper/{experiment.name}.json)</sub>"
    )


_PARTS = {"claims": _claims, "tables": _tables, "plot": _plot, "source": _source}
