"""The networks of the papers, by name, and fixed features that can precede them."""

from coterie.models.adapters import merged, with_lora
from coterie.models.checks import check_network
from coterie.models.errors import ModelError
from coterie.models.fixed import (
    FEATURES,
    FeatureInfo,
    Features,
    deskew,
    features,
    hog,
    hog2,
    identity,
    pool2,
    random_conv,
)
from coterie.models.gans import GANS, GANInfo, build_gan, check_gan, gan_for
from coterie.models.networks import (
    MODELS,
    ModelInfo,
    build,
    check_kind,
    constants_of,
    drawn,
    initialise,
    is_tested,
    sizes_of,
)
from coterie.models.personalization import check_personal, last_layer
from coterie.models.pretrained import file_hash
from coterie.models.several_inputs import Part, with_inputs
from coterie.models.spec import NetworkSpec
from coterie.models.trainable import (
    CONSTANT,
    call,
    constants,
    differing,
    fingerprint,
    float32_arrays,
    is_plain,
    num_parameters,
    set_trainable,
    set_training,
    sizes,
    trainable,
    without_batch_norm,
)

__all__ = [
    "CONSTANT",
    "FEATURES",
    "GANS",
    "MODELS",
    "FeatureInfo",
    "Features",
    "GANInfo",
    "ModelError",
    "ModelInfo",
    "NetworkSpec",
    "Part",
    "build",
    "build_gan",
    "call",
    "check_gan",
    "check_kind",
    "check_network",
    "check_personal",
    "constants",
    "constants_of",
    "deskew",
    "differing",
    "drawn",
    "features",
    "file_hash",
    "fingerprint",
    "float32_arrays",
    "gan_for",
    "hog",
    "hog2",
    "identity",
    "initialise",
    "is_plain",
    "is_tested",
    "last_layer",
    "merged",
    "num_parameters",
    "pool2",
    "random_conv",
    "set_trainable",
    "set_training",
    "sizes",
    "sizes_of",
    "trainable",
    "with_inputs",
    "with_lora",
    "without_batch_norm",
]
