"""Data of three clients for `make deploy-demo`: a third of scikit-learn's digits each, client 1's upside down.

python data.py FOLDER [CLIENTS]
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

digits = load_digits()
clients = int(sys.argv[2]) if len(sys.argv) > 2 else 3
images = (digits.images * 255 / 16).round().astype(np.uint8)
for client in range(clients):
    folder = Path(sys.argv[1]) / f"client-{client}"
    folder.mkdir(parents=True, exist_ok=True)
    own = images[client::clients]
    np.savez(folder / "train.npz", x=own[:, ::-1, ::-1] if client == 1 else own, y=digits.target[client::clients])
