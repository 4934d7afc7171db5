"""Processes of Ray.

These tests start a Ray of their own: workers of pytest run the tests of a file in any order, and the tests
of test_ray.py share one.
"""

import numpy as np
import pytest

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def test_ray_workers_do_not_share_random_generators():
    import ray

    class Client:
        def draw(self):
            import random

            import torch

            return random.random(), np.random.random(), torch.rand(()).item()

    ray.init(address="local", num_cpus=2, include_dashboard=False)
    try:
        actors = [ray.remote(num_cpus=1)(Client).remote() for _ in range(2)]
        one, other = ray.get([actor.draw.remote() for actor in actors])
    finally:
        ray.shutdown()
    assert [a == b for a, b in zip(one, other, strict=True)] == [False, False, False]
