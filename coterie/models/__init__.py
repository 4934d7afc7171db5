"""The networks of the papers, by name, and fixed features that can stand in front of them."""

from coterie.models.errors import ModelError
from coterie.models.fixed import FEATURES, FeatureInfo, Features, features, hog, identity, pool2, random_conv
from coterie.models.networks import MODELS, ModelInfo, build, initialise, num_parameters

__all__ = [
    "FEATURES",
    "MODELS",
    "FeatureInfo",
    "Features",
    "ModelError",
    "ModelInfo",
    "build",
    "features",
    "hog",
    "identity",
    "initialise",
    "num_parameters",
    "pool2",
    "random_conv",
]
