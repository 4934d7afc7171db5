"""Bounds that a run's settings (:mod:`coterie.fields.settings`) and the requests to its clients share.

No setting passes the server's check and fails the client's.
"""

from coterie.fields.declarations import Bounds

#: Record-level plans in one request.
MAX_PLANS = 10_000
MAX_CLUSTERS = 10_000
#: Clusters among which clients redraw their labels, whose matrix of probabilities is part of a request.
MAX_REDRAWN = 100
#: Clients of a masked round: each of them masks with all others.
MAX_COHORT = 1000

#: Held-out records of a test set that an evaluation of a sample reads.
MAX_SAMPLED_TESTS = 2_000

COUNT, SIZE = Bounds(1, 1_000_000_000), Bounds(0, 1_000_000_000)
AT_LEAST_0, AT_LEAST_1 = Bounds(0), Bounds(1)
#: A rate that is not 0, a share that is not the whole, and a probability that is neither.
RATE, SHARE, BETWEEN = Bounds(0, 1, above=True), Bounds(0, 1, below=True), Bounds(0, 1, above=True, below=True)
ROUNDS = Bounds(1, 10_000_000)
SEED = Bounds(0, 2**63 - 1)
CLUSTERS = Bounds(1, MAX_CLUSTERS)
LOCAL_EPOCHS = Bounds(1, 10_000)
LEARNING_RATE = Bounds(0, 1e3, above=True)
CLIP_NORM = Bounds(1e-6, 1e6)
LOSS_BOUND = Bounds(1e-6, 1e6)
EPSILON = Bounds(0, 1e12, above=True)
PENALTY_WEIGHT = Bounds(0, 1e6)
GAN_SAMPLES = Bounds(0, 10_000_000)
EMA_DECAY = Bounds(0, 0.9999)
FEATURE_RANGE = Bounds(1e-6, 1e6)
FUZZIFIER = Bounds(1, 100, above=True)

GAN_PRECISIONS = ("float32", "bfloat16")
#: Model that a client trains after rebalancing changed its label.
REBALANCE_TRAIN = ("own", "assigned")
#: Shares into which the one count of a unit of privacy divides among its records: a multiple of 1 to 10.
UNIT_SHARES = 5040
#: How a client personalises a released model (client/personal.py).
PERSONAL_METHODS = ("last-layer", "all", "prior", "mixture")
#: What a client gives to a server at all, as its owner declares (wire/guarantees.py).
GUARANTEES = MASKED_SUMS, RECORD_LEVEL, TRUSTED_SERVER = "masked-sums", "record-level", "trusted-server"
