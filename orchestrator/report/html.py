"""A summary as one self-contained HTML page."""

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.io import to_html

from orchestrator.report.plots import figures
from orchestrator.report.summary import Summary
from orchestrator.report.tables import headline, notes, tables


def render_html(summary: Summary) -> str:
    """The whole report as one page that needs no network: plotly's script is inside, all texts are escaped."""
    environment = Environment(
        loader=PackageLoader("orchestrator.report", "."), autoescape=True, undefined=StrictUndefined
    )
    plots = []
    for index, (title, figure) in enumerate(figures(summary).items()):
        figure.update_layout(template="plotly_white", height=420, margin={"t": 30})
        page_part = to_html(figure, full_html=False, include_plotlyjs=index == 0, div_id=f"plot-{index}")
        plots.append((title, Markup(page_part)))
    return environment.get_template("report.html.j2").render(
        name=summary.sweep.name,
        headline=headline(summary),
        tables=tables(summary),
        plots=plots,
        notes=notes(summary),
    )
