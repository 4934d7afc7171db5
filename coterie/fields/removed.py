"""Names of earlier versions that are refused, and what to use instead."""

_TIMES = (
    "predict a class, such as an event within 90 days, or write a `loss` of your own for one number for each record "
    "(docs/networks.md, Times until an event)"
)
_TABLES = "`coterie bench rr-table1` reproduces the tables of the paper"

#: What to use instead of each: a setting by the last part of its name, a value as ``setting = value``, or an option.
REMOVED = {
    "[survival]": _TIMES,
    "accountant = theorem-4.2": f"use pld or rdp; {_TABLES}",
    "accountant = theorem-4.2-canonne": f"use pld or rdp; {_TABLES}",
    "authority": "ca.crt beside the roster has the authority",
    "autoencoder": "the autoencoder has a linear code, which clusters best (docs/results.md)",
    "byzantine-share": "use aggregator = NAME:SHARE, such as krum:0.3",
    "choose": "clients choose by the loss, which `loss` changes, also beside a trainer of your own",
    "classes-per-client": "use label-skew = classes:NUMBER",
    "client-cpus": "use coterie run --engine ray --client-cpus",
    "client-names": "sites are numbered in results; --site takes the number",
    "clip-factor": "adaptive clipping is to half of the median of norms",
    "clip-quantile": "adaptive clipping is to half of the median of norms",
    "clipping": "use clip-norm = adaptive for adaptive clipping",
    "cluster-optimizer": "the clusters of lcfl train by FedAvg",
    "coterie data scales": "take mean, scale and range of every column from publications (docs/tables.md)",
    "coterie masking-keys": "coterie client makes and signs these keys",
    "coterie privacy budget": "use coterie budget create, and coterie budget show",
    "coterie privacy curve": "use coterie privacy epsilon with --rounds",
    "coterie privacy spent": "use coterie budget show",
    "coterie report --csv": "--json prints the comparison, and runs.csv of coterie sweep has a line per run",
    "coterie supernode": "use coterie client",
    "dcn-weight": "the weight of the clustering loss is 4",
    "dirichlet-alpha": "use label-skew = dirichlet:ALPHA",
    "fuzzifier": "ffcm has m = 1.1",
    "gpu-precision": "use precision",
    "identifier-noise": f"use identifier-share with mechanism = rr-slot; {_TABLES}",
    "initial-clients": "charges of the run in start-from count; for other clients, set pretrained to a model of it",
    "lcfl.proximal-mu": "the clusters of lcfl train by FedAvg",
    "local-centroids": "clients of kfed and ffcm send as many centroids as there are clusters",
    "mechanism = paper": f"use rr-slot; {_TABLES}",
    "metrics-host": "set COTERIE_METRICS=HOST:PORT in the environment of the ServerApp",
    "metrics-port": "set COTERIE_METRICS=HOST:PORT in the environment of the ServerApp",
    "min-separation": "set sampling-rate, of which it is the inverse, or leave it to secret participation",
    "mlflow-experiment": "set MLFLOW_EXPERIMENT_NAME in the environment",
    "mlflow-uri": "set MLFLOW_TRACKING_URI in the environment",
    "non-iid-level": "use label-skew = non-iid:SHARE",
    "personal-layers": "fedper keeps the last layer at the clients",
    "pos-weight": "use class-weights: 1,W for two classes, the same number or numbers for several labels",
    "ray-address": "set RAY_ADDRESS in the environment",
    "record-diagnostics": "exact scores of private runs are in diagnostics.jsonl and the report",
    "recorders": "use coterie run --recorders, or COTERIE_RECORDERS in the environment of the ServerApp",
    "roster": "set COTERIE_ROSTER in the environment of the ServerApp",
    "scheduler": "a trainer changes the step size from step to step (docs/networks.md)",
    "selection-epsilon": "a choice of a cluster has epsilon 0.02",
    "server-momentum": "the server's optimizers have 0.9 with momentum, and 0 with adam",
    "task = survival": _TIMES,
    "time-bins": _TIMES,
    "upload-limit": "a client sends at most 256 MB of points",
}


def removal(name: str) -> str:
    """Return in one line what to use instead of a removed name; empty for other names."""
    return f"{name} was removed: {REMOVED[name]}" if name in REMOVED else ""
