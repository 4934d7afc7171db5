"""Optimizers of the server: how a cluster's model moves by the released mean of its updates, as post-processing.

In every round, a cluster's model theta moves by the step size eta of the server times a direction that follows from
the released means u_1, ..., u_t of its updates:

    sgd        u_t
    momentum   m_t = beta m_(t-1) + (1 - beta) u_t,  m_0 = 0
    adam       m_t / (1 - beta^t) / d_t,  v_t = beta_2 v_(t-1) + (1 - beta_2) u_t^2,
               d_t = max( sqrt(max(v_t / (1 - beta_2^t) - sigma_t^2, 0)), sigma_t, eta / 4 )

for every coordinate. The mean has the noise sigma_t, a public number, which is 0 without privacy and at record level,
where clients add noise before they train on. Q. Tang, F. Shpilevskiy, M. Lecuyer: DP-AdamBC: Your DP-Adam Is Actually
DP-SGD (Unless You Apply Bias Correction), AAAI 2024, arXiv:2312.14334, subtract sigma^2 from the second moment, which
otherwise is that of the noise. d_t is a floor of their denominator:

- sigma_t: a coordinate without signal has the direction m_t / sigma_t, which is that of momentum in units of the noise,
  so that the noise of all rounds moves it as far as by momentum with the step size eta / sigma. Smaller denominators
  would amplify noise in just these coordinates.
- eta / 4: no coordinate moves by more than four times its mean update, as with the other optimizers.

Noise moves a model no further by momentum than by sgd with the same eta: a mean of one round moves a model by
(1 - beta) (1 + beta + beta^2 + ...) <= 1 times itself. PyTorch's SGD with dampening = beta differs in its first step
alone, which has the full weight of u_1, and thus 1 / (1 - beta) times its noise in all.

The moments are functions of released values. They are part of checkpoints. A re-seeded model starts with none, and
models that are moved, split or shrunk take them along (:meth:`ServerOptimizer.rearranged`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from coterie.fields import SHARE, Bounded, OneOf
from coterie.rounds.run_state import FloatArray

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

#: Names of optimizers in configurations.
SERVER_OPTIMIZERS = ("sgd", "momentum", "adam")
#: Largest factor between a released mean and the step that it causes, unless the step size is set.
LARGEST_STEP = 4.0
# beta_2.
_SECOND_DECAY = 0.99
# Arrays of a run: m (k, d) and sqrt(v) (k, d) float32, and numbers of steps (k, 2) of own and of shared coordinates.
_PREFIX = "optimizer-"
_MEAN, _ROOT, _STEPS = _PREFIX + "mean", _PREFIX + "root", _PREFIX + "steps"


@dataclass(frozen=True)
class ServerOptimizer(Bounded):
    """Optimizer of the server; see the module.

    Attributes:
        name: one of :data:`SERVER_OPTIMIZERS`.
        momentum: beta of momentum and Adam, in [0, 1).
    """

    name: Annotated[str, OneOf(SERVER_OPTIMIZERS)] = "sgd"
    momentum: Annotated[float, SHARE] = 0.9

    def __call__(
        self, kept: Mapping[str, npt.NDArray[Any]], means: FloatArray, noise: FloatArray, step_size: float, shared: int
    ) -> tuple[FloatArray, Arrays]:
        """Return the (k, d) steps of all models, and the arrays for the next call.

        Args:
            kept: arrays that the last call returned; the optimizer starts anew if their shape is another one.
            means: (k, d) released means of updates.
            noise: (k, 2) standard deviation of their noise in own and in shared coordinates, 0 if unknown.
            step_size: eta.
            shared: number of leading coordinates that all models share.
        """
        if self.name == "sgd":
            return step_size * means, {}
        if _MEAN not in kept or kept[_MEAN].shape != means.shape:
            kept = _started(means.shape)
        steps = kept[_STEPS] + 1
        mean = self.momentum * kept[_MEAN] + (1 - self.momentum) * means
        arrays: Arrays = {_MEAN: mean.astype(np.float32), _STEPS: steps}
        if self.name == "momentum":
            return step_size * mean, arrays
        square = _SECOND_DECAY * kept[_ROOT].astype(np.float64) ** 2 + (1 - _SECOND_DECAY) * means**2
        arrays[_ROOT] = np.sqrt(square).astype(np.float32)
        square /= _spread(1 - _SECOND_DECAY**steps, square, shared)
        mean /= _spread(1 - self.momentum**steps, mean, shared)
        signal = np.sqrt(np.maximum(square - _spread(noise**2, square, shared), 0))
        least = _spread(np.maximum(noise, step_size / LARGEST_STEP), signal, shared)
        return step_size * mean / np.maximum(signal, least), arrays

    def gain(self, rounds: int) -> float:
        """Root mean square over rounds of the weights of their means, in units of eta / d, in the model of the last.

        It is at most 1, and slightly more with Adam, whose first means weigh more: m_t / (1 - beta^t) is their mean.
        """
        weights, weight = np.zeros(rounds), 0.0
        for number in range(rounds, 0, -1):
            corrected = 1 - self.momentum**number if self.name == "adam" else 1.0
            weight = (1 - self.momentum) / corrected + self.momentum * weight
            weights[number - 1] = weight if self.name != "sgd" else 1.0
        return float(np.sqrt(np.mean(weights**2)))

    @staticmethod
    def kept(arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
        """Return those of the arrays of a run that belong to the optimizer."""
        return {name: values for name, values in arrays.items() if name.startswith(_PREFIX)}

    @staticmethod
    def rearranged(
        arrays: Mapping[str, npt.NDArray[Any]], origins: npt.NDArray[np.int64], factors: FloatArray, shared: int = 0
    ) -> Arrays:
        """Return the arrays of a run after models were replaced, added, removed or scaled.

        Args:
            arrays: of the run.
            origins: (k',) index of the model that each model continues; -1: none, its optimizer starts anew.
            factors: (k',) by which each model was scaled, and its momentum is.
            shared: number of leading coordinates that all models share, whose state stays.
        """
        arrays, own = dict(arrays), origins >= 0
        for name, weights in {_MEAN: np.where(own, factors, 0.0), _ROOT: own}.items():
            if name in arrays:
                moved = arrays[name][origins].copy()
                moved[:, shared:] *= weights[:, None].astype(np.float32)
                arrays[name] = moved
        if _STEPS in arrays:
            steps = arrays[_STEPS][origins].copy()
            steps[~own, 0] = 0
            arrays[_STEPS] = steps
        return arrays


def _started(shape: tuple[int, ...]) -> Arrays:
    return {
        _MEAN: np.zeros(shape, np.float32),
        _ROOT: np.zeros(shape, np.float32),
        _STEPS: np.zeros((shape[0], 2), np.int64),
    }


def _spread(values: FloatArray, like: FloatArray, shared: int) -> FloatArray:
    """(k, d) values of all coordinates, from (k, 2) of own and of shared ones; (k, 1) if none are shared."""
    if not shared:
        return values[:, :1]
    spread = np.empty_like(like)
    spread[:, shared:], spread[:, :shared] = values[:, :1], values[:, 1:]
    return spread
