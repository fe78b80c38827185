"""The view in which MLflow's run table opens: the columns that a reader of a sweep needs.

MLflow's pages keep a shared view in a tag of the experiment, as base64 of deflated JSON, and open it when the address
names it (mlflow/server/js, `mlflow.sharedViewState.` and `viewStateShareKey`).
"""

import base64
import json
import zlib

VIEW = "brimful"
TAG = f"mlflow.sharedViewState.{VIEW}"
COLUMNS = (
    "tags.`outcome`",
    "metrics.`tokens_per_second`",
    "metrics.`mem/peak_gib`",
    "metrics.`mem/headroom_gib`",
    "metrics.`mfu`",
    "params.`method`",
    "params.`lora_rank`",
    "params.`zero_stage`",
    "params.`offload_optimizer`",
    "params.`gradient_checkpointing`",
    "params.`micro_batch`",
    "tags.`oom.phase`",
)


def view_tag_value() -> str:
    """The tag's value: newest sweeps first, all columns of `COLUMNS`."""
    state = {
        "searchFilter": "",
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": list(COLUMNS),
        "columnOrder": [],
        "columnWidths": {},
        "runsExpanded": {},
        "runsPinned": [],
        "runsHidden": [],
        "runsVisibilityMap": {},
        "runsHiddenMode": "FIRST_10_RUNS",
        "viewMaximized": False,
        "runListHidden": False,
        "isAccordionReordered": False,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "autoRefreshEnabled": True,
        "globalLineChartConfig": {},
    }
    return "deflate;" + base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()


def view_address(server: str, experiment_id: str) -> str:
    """The page of an experiment in this view."""
    return f"{server}/#/experiments/{experiment_id}/runs?viewStateShareKey={VIEW}"
