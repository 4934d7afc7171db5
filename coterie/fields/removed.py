"""Names of earlier versions that are refused, and what to use instead."""

_TIMES = (
    "predict a class, such as an event within 90 days, or write a `loss` of your own for one number for each record "
    "(docs/extending.md, Times until an event)"
)
_TABLES = "`coterie bench rr-table1` reproduces the tables of the paper"

#: What to use instead of each: a setting by the last part of its name, a value as ``setting = value``, or an option.
REMOVED = {
    "[survival]": _TIMES,
    "accountant = theorem-4.2": f"use pld or rdp; {_TABLES}",
    "accountant = theorem-4.2-canonne": f"use pld or rdp; {_TABLES}",
    "authority": "ca.crt beside the roster has the authority",
    "classes-per-client": "use label-skew = classes:NUMBER",
    "choose": "clients choose by the loss, which `loss` changes, also beside a trainer of your own",
    "client-cpus": "use coterie run --engine ray --client-cpus",
    "clip-factor": "adaptive clipping is to half of the median of norms",
    "clip-quantile": "adaptive clipping is to half of the median of norms",
    "coterie report --csv": "--json prints the comparison, and runs.csv of coterie sweep has a line per run",
    "dirichlet-alpha": "use label-skew = dirichlet:ALPHA",
    "identifier-noise": f"use identifier-share with mechanism = rr-slot; {_TABLES}",
    "mechanism = paper": f"use rr-slot; {_TABLES}",
    "metrics-host": "set COTERIE_METRICS=HOST:PORT in the environment of the ServerApp",
    "metrics-port": "set COTERIE_METRICS=HOST:PORT in the environment of the ServerApp",
    "mlflow-experiment": "set MLFLOW_EXPERIMENT_NAME in the environment",
    "mlflow-uri": "set MLFLOW_TRACKING_URI in the environment",
    "non-iid-level": "use label-skew = non-iid:SHARE",
    "ray-address": "set RAY_ADDRESS in the environment",
    "roster": "set COTERIE_ROSTER in the environment of the ServerApp",
    "scheduler": "a trainer changes the step size from step to step (docs/extending.md)",
    "server-momentum": "the server's optimizers have 0.9 with momentum, and 0 with adam",
    "task = survival": _TIMES,
    "time-bins": _TIMES,
}


def removal(name: str) -> str:
    """Return in one line what to use instead of a removed name; empty for other names."""
    return f"{name} was removed: {REMOVED[name]}" if name in REMOVED else ""
