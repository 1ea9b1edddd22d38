"""What is the committed dashboard made of? `python -m deploy.grafana.generate` writes baton.json.

The questions and their panels are in `rows.py`; this lays them out. A test compares.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from deploy.grafana.queries import HERE
from deploy.grafana.rows import ROWS, Panel

TARGET: Final = Path(__file__).resolve().parent / "baton.json"
SCHEMA_VERSION: Final = 41
COLUMNS: Final = 24
HEIGHT: Final = 8
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


def rendered() -> str:
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for question, row in ROWS.items():
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": question,
                "collapsed": False,
                "gridPos": place,
                "panels": [],
            }
        )
        top += 1
        left = 0
        for panel in row:
            if left + panel.width > COLUMNS:
                left, top = 0, top + HEIGHT
            place = {"x": left, "y": top, "w": panel.width, "h": HEIGHT}
            panels.append(_panel(panel, len(panels) + 1, place))
            left += panel.width
        top += HEIGHT
    return {
        "uid": "baton",
        "title": "Baton",
        "description": "Which side is the bottleneck, where does time go, what failed and why?",
        "tags": ["baton", "llm"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [_alerts()]},
        "templating": {"list": _variables()},
        "links": [],
        "panels": panels,
    }


def _panel(panel: Panel, number: int, place: Mapping[str, int]) -> dict[str, Any]:
    drawn: dict[str, Any] = {"fillOpacity": 10, "lineWidth": 1, "showPoints": "never"}
    if panel.stacked:
        drawn |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": drawn}
    if panel.most is not None:
        defaults["max"] = panel.most
    options: dict[str, Any] = {
        "legend": {
            "displayMode": "table",
            "placement": "bottom",
            "calcs": ["lastNotNull", "max"],
            "sortBy": "Max",
            "sortDesc": True,
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    if panel.kind == "stat":
        red, green = {"color": "red", "value": None}, {"color": "green", "value": 1}
        defaults = {
            "unit": panel.unit,
            "color": {"mode": "thresholds"},
            "thresholds": {"mode": "absolute", "steps": [red, green]},
        }
        options = {
            "reduceOptions": {"calcs": ["lastNotNull"]},
            "colorMode": "background",
            "textMode": "value_and_name",
        }
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": SOURCE,
            "expr": query,
            "legendFormat": legend,
            "range": True,
        }
        for index, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": dict(place),
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": targets,
    }


def _alerts() -> dict[str, Any]:
    """Lines through all panels where an alert fires."""
    return {
        "name": "Alerts",
        "enable": True,
        "datasource": SOURCE,
        "expr": f'ALERTS{{alertname=~"Baton.*", alertstate="firing", {HERE}}}',
        "titleFormat": "{{alertname}}",
        "iconColor": "red",
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}

    def values(name: str, label: str, query: str) -> dict[str, Any]:
        return {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }

    return [
        source,
        values("namespace", "Namespace", "label_values(baton_build_info, namespace)"),
        values("worker", "Worker", f"label_values(baton_build_info{{{HERE}}}, worker)"),
    ]


if __name__ == "__main__":
    TARGET.write_text(rendered(), encoding="utf-8")
