"""Fixed functions of images that can precede a network. They do not depend on statistics of the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from coterie.fields.plugins import PluginError, load_function, provided, unknown
from coterie.models.errors import ModelError
from coterie.models.rows import DRAWN, Rows, batch, find_mixing

Images = npt.NDArray[np.float32]
Features = Callable[[Images], Images]

# Of `hog`: cells per side, orientations, the contrast below which a cell counts as flat, and the constants that centre
# its values and scale an image to a norm near 4, where a linear model learns well from clipped steps. They were chosen
# on Fashion-MNIST's training images, and are fixed.
_CELLS, _ORIENTATIONS, _FLAT, _CENTRE, _SCALE = 7, 8, 0.1, 0.25, 0.7
# Of `hog2`: orientations of both orders modulo 180 degrees, width of the blur between them in pixels, constants that
# centre and weigh the second order, the pixels, and all features. They are fixed, as those of `hog`.
_AXES, _BLUR, _CENTRE_2, _SCALE_2, _CENTRE_OF_PIXELS, _SCALE_OF_ALL = 4, 1.0, 0.2, 0.6, 0.4, 0.75
# Of `random-conv`: number of filters, their width, the weight of the image relative to them, and the total norm.
_FILTERS, _WIDTH, _PIXELS, _LENGTH = 16, 5, 0.7, 4.0
# Images per chunk, which bounds the memory.
_CHUNK = 256


@dataclass(frozen=True)
class FeatureInfo:
    """A fixed function of single images, from float32 (n, C, H, W) to float32 (n, C', H', W')."""

    name: str
    title: str
    apply: Features


def features(name: str) -> Features:
    """Return a feature function by name; repeated calls return the same object.

    Args:
        name: a key of `FEATURES`, a custom `module:function`, or an entry point of the group `coterie.features`.

    Raises:
        ModelError: unknown name, or a custom function that cannot be imported.
    """
    if name in FEATURES:
        return FEATURES[name].apply
    if not provided("features", name):
        raise ModelError(f"{unknown('features', name, FEATURES)}, or a custom module:function")
    return _custom(name)


@lru_cache(maxsize=4)
def _custom(name: str) -> CustomFeatures:
    try:
        return CustomFeatures(name, load_function("features", name, ["images"]))
    except PluginError as error:
        raise ModelError(str(error)) from error


class CustomFeatures:
    """A user's function of images, checked on the first images of every shape, before any data.

    It receives float32 images (n, C, H, W) in [-1, 1] and returns finite float32 features (n, C', H', W'). Every image
    is transformed by itself: `f(x)[i]` equals `f(x[i:i+1])[0]` up to rounding. The check compares random batches: it
    finds mistakes and proves nothing. The function is deterministic, also across processes: constants that are drawn at
    random need a fixed seed.

    Raises:
        ModelError: on a call, if the function breaks this contract or raises an error.
    """

    def __init__(self, name: str, function: Features) -> None:
        self._name, self._function = name, function
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # of features, by shape of an image

    def __call__(self, x: Images) -> Images:
        """Return the features (n, C', H', W') of images (n, C, H, W)."""
        _need_images(self._name, x, 1)
        if x.shape[1:] not in self._shapes:
            self._shapes[x.shape[1:]] = self._checked(x.shape[1:])
        features = self._call(x)
        if features.shape[1:] != self._shapes[x.shape[1:]]:
            raise self._error(f"returns features of shapes {self._shapes[x.shape[1:]]} and {features.shape[1:]}")
        return features.copy()  # of a view; PyTorch supports no negative strides

    def _checked(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Check the function on random images, in float32 and if possible in float64; return its features' shape."""
        rng = np.random.RandomState(0)
        x = batch(rng.uniform(-1, 1, (DRAWN, *shape)).astype(np.float32))
        wide = x.astype(np.float64)
        signs = np.sign(rng.uniform(-1, 1, (1, *shape)))  # of the changes that imitate rounding
        others = np.concatenate([np.ones((3, *shape)) * np.reshape([1, 0, -1], (3, 1, 1, 1)), signs])
        features = self._call(x)
        self._call(x[1::2])
        if not np.array_equal(self._call(x), features):
            raise self._error(
                "returns different values for equal images: make it deterministic, with a fixed seed and no state "
                "between calls"
            )
        try:
            self._call(wide)
        except ModelError:  # a function of float32 only
            batches = [x]
        else:
            batches = [x, wide]

        def evaluate(changed: Rows, shake: float) -> Rows:
            with np.errstate(all="ignore"):
                outputs = self._call((changed * (1 + shake * signs)).astype(changed.dtype), finite=False)
            if outputs.shape[1:] != features.shape[1:]:
                raise self._error(f"returns features of shapes {features.shape[1:]} and {outputs.shape[1:]}")
            return outputs

        for images in batches:
            mixing = find_mixing(evaluate, images, others.astype(images.dtype), "image")
            if mixing:
                feature = tuple(map(int, np.unravel_index(mixing[0], features.shape[1:])))
                raise self._error(
                    f"is not row-wise: feature {feature} of an image changes with {mixing[1]}: use constants instead "
                    "of statistics of the batch"
                )
        return features.shape[1:]

    def _call(self, x: Rows, finite: bool = True) -> Images:
        try:
            features = self._function(x.copy())
        except Exception as error:
            raise self._error(f"fails with images {x.shape}: {type(error).__name__}: {error}") from error
        if not isinstance(features, np.ndarray) or features.dtype != x.dtype:
            returned_type = f"{features.dtype} array" if isinstance(features, np.ndarray) else type(features).__name__
            raise self._error(f"returns a {returned_type}, not a float32 array: use .astype(np.float32)")
        if features.ndim != 4 or len(features) != len(x) or min(features.shape[1:]) < 1:
            raise self._error(f"returns shape {features.shape} for images {x.shape}; expected ({len(x)}, C', H', W')")
        if finite and not np.isfinite(features).all():
            raise self._error("returns NaN or Inf")
        return features

    def _error(self, problem: str) -> ModelError:
        return ModelError(f"features '{self._name}': the function {problem}")


def identity(x: Images) -> Images:
    """Return the examples unchanged."""
    return x


def pool2(x: Images) -> Images:
    """2×2 average pooling, (n, C, H, W) to (n, C, H//2, W//2); an odd last row or column is dropped.

    Raises:
        ModelError: images of a single row or column, or no images.
    """
    _need_images("pool2", x, 2)
    height, width = x.shape[2] // 2 * 2, x.shape[3] // 2 * 2
    rows = x[:, :, 0:height:2] + x[:, :, 1:height:2]
    return (rows[..., 0:width:2] + rows[..., 1:width:2]) * np.float32(0.25)


def deskew(x: Images) -> Images:
    """Deskew and centre every image, (n, C, H, W) to (n, C, H, W).

    Rows are shifted horizontally, by a slant of up to 45 degrees in square images, until the horizontal and vertical
    pixel coordinates are uncorrelated. Pixels are weighted by their brightness above the darkest one (Y. LeCun et al.:
    Gradient-Based Learning Applied to Document Recognition, Proceedings of the IEEE 86(11), 1998). Values outside the
    image are those of the nearest edge pixels.

    Raises:
        ModelError: no images.
    """
    import torch
    from torch.nn.functional import affine_grid, grid_sample

    _need_images("deskew", x, 1)
    upright = np.empty(x.shape, np.float32)
    across, down = (np.linspace(1 / n - 1, 1 - 1 / n, n, dtype=np.float32) for n in (x.shape[3], x.shape[2]))
    for start in range(0, len(x), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        weight = (x[chunk] - x[chunk].min(axis=(1, 2, 3), keepdims=True)).sum(axis=1)
        weight /= weight.sum(axis=(1, 2), keepdims=True) + np.float32(1e-6)
        middle_x, middle_y = weight.sum(axis=1) @ across, weight.sum(axis=2) @ down
        dx, dy = across - middle_x[:, None], down - middle_y[:, None]
        spread = (weight.sum(axis=2) * dy**2).sum(axis=1) + np.float32(1e-6)
        slant = np.einsum("nyx,ny,nx->n", weight, dy, dx) / spread
        back = np.zeros((len(weight), 2, 3), np.float32)  # from output to input coordinates
        back[:, 0, 0] = back[:, 1, 1] = 1
        back[:, 0, 1], back[:, 0, 2], back[:, 1, 2] = slant.clip(-1, 1), middle_x, middle_y
        grid = affine_grid(torch.as_tensor(back), list(x[chunk].shape), align_corners=False)
        images = torch.as_tensor(np.ascontiguousarray(x[chunk]))
        upright[chunk] = grid_sample(images, grid, padding_mode="border", align_corners=False).numpy()
    return upright


def hog(x: Images) -> Images:
    """Histograms of oriented gradients, (n, C, H, W) to (n, 8, 7, 7), for images of at least 7×7 in [-1, 1].

    The gradient is the Sobel gradient of the channel in which it is strongest. Its norm is divided between the two
    nearest of 8 directions (dark to bright, 45 degrees apart), and distributed over the 7×7 cells with linearly
    decreasing weights (Dalal & Triggs, CVPR 2005). Each cell is divided by the contrast of its neighbourhood, followed
    by a square root, because noise has the smallest effect on features of similar size.

    Raises:
        ModelError: images of less than 7 rows or columns, or no images.
    """
    _need_images("hog", x, _CELLS)
    rows, columns = _spread(x.shape[2]), _spread(x.shape[3])
    features = np.empty((len(x), _ORIENTATIONS, _CELLS, _CELLS), np.float32)
    for start in range(0, len(x), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        features[chunk] = _hog(x[chunk], rows, columns)
    return features


def hog2(x: Images) -> Images:
    """Oriented gradients of two orders, and pixels: (n, C, H, W) to (n, 25, 7, 7), for images as in :func:`hog`.

    The channels are the 8 of :func:`hog`, 16 of second order, and the root of the mean brightness of each cell. One of
    second order is the oriented gradient of a blurred map of oriented gradients, for each of 4 by 4 orientations
    modulo 180 degrees, as in the second order of a scattering transform (J. Bruna, S. Mallat: Invariant Scattering
    Convolution Networks, IEEE TPAMI 35(8), 2013). It is summed over cells and normalised as in :func:`hog`.

    Raises:
        ModelError: images of less than 7 rows or columns, or no images.
    """
    _need_images("hog2", x, _CELLS)
    rows, columns = _spread(x.shape[2]), _spread(x.shape[3])
    features = np.empty((len(x), _ORIENTATIONS + _AXES**2 + 1, _CELLS, _CELLS), np.float32)
    for start in range(0, len(x), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        first = _blurred(_oriented(*_gradient(x[chunk]), _AXES, np.pi))
        maps = [_oriented(*_gradient(first[:, k : k + 1]), _AXES, np.pi) for k in range(_AXES)]
        second = np.asarray(rows @ np.concatenate(maps, axis=1) @ columns.T, np.float32)
        bright = rows @ ((x[chunk].mean(axis=1, keepdims=True) + 1) / 2) @ columns.T
        features[chunk, :_ORIENTATIONS] = _hog(x[chunk], rows, columns)
        features[chunk, _ORIENTATIONS:-1] = (_relative(second) - np.float32(_CENTRE_2)) * np.float32(_SCALE_2)
        features[chunk, -1:] = np.sqrt(bright.clip(0, 1)) - np.float32(_CENTRE_OF_PIXELS)
    return features * np.float32(_SCALE_OF_ALL)


def _hog(x: Images, rows: Images, columns: Images) -> Images:
    """:func:`hog` of a chunk of images."""
    cells = np.asarray(rows @ _oriented(*_gradient(x), _ORIENTATIONS, 2 * np.pi) @ columns.T, np.float32)
    return np.asarray((_relative(cells) - np.float32(_CENTRE)) * np.float32(_SCALE))


def _gradient(x: Images) -> tuple[Images, Images]:
    """Horizontal and vertical Sobel gradient (n, H, W) of the channel with the largest norm; edges are repeated."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
    across, down = padded[..., 2:] - padded[..., :-2], padded[:, :, 2:] - padded[:, :, :-2]
    dx = (across[:, :, :-2] + 2 * across[:, :, 1:-1] + across[:, :, 2:]) / 4
    dy = (down[..., :-2] + 2 * down[..., 1:-1] + down[..., 2:]) / 4
    if x.shape[1] == 1:
        return dx[:, 0], dy[:, 0]
    strongest = (dx**2 + dy**2).argmax(axis=1)[:, None]
    return np.take_along_axis(dx, strongest, axis=1)[:, 0], np.take_along_axis(dy, strongest, axis=1)[:, 0]


def _oriented(dx: Images, dy: Images, count: int, period: float) -> Images:
    """(n, count, H, W) norm of the gradient, divided between the two nearest of ``count`` directions in a period."""
    length = np.hypot(dx, dy)
    angle = np.arctan2(dy, dx) * np.float32(count / period) % count  # in steps between directions
    channels = np.empty((len(dx), count, *dx.shape[1:]), np.float32)
    for k in range(count):
        apart = np.abs(angle - k)
        channels[:, k] = length * np.maximum(1 - np.minimum(apart, count - apart), 0)
    return channels


def _blurred(x: Images) -> Images:
    """(n, C, H, W) channels after a Gaussian blur; edges are repeated."""
    radius = int(3 * _BLUR + 1)
    kernel = np.exp(-0.5 * (np.arange(-radius, radius + 1) / _BLUR) ** 2).astype(np.float32)
    kernel /= kernel.sum()
    padded = np.pad(x, ((0, 0), (0, 0), (radius, radius), (radius, radius)), mode="edge")
    height, width = x.shape[2:]
    rows = sum(weight * padded[:, :, i : i + height] for i, weight in enumerate(kernel))
    return np.asarray(sum(weight * rows[..., i : i + width] for i, weight in enumerate(kernel)), np.float32)


@lru_cache(maxsize=8)
def _spread(size: int) -> Images:
    """(7, size) weights of the pixels of a row or column in each cell: a triangle two cells wide, with sum 1."""
    width = size / _CELLS
    centres = (np.arange(_CELLS) + 0.5) * width - 0.5
    weights = np.maximum(1 - np.abs(np.arange(size) - centres[:, None]) / width, 0)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float32)


def _relative(cells: Images) -> Images:
    """Roots of cells over the contrast of their neighbourhood (weights 1-2-1 in both directions)."""
    energy = np.pad((cells**2).sum(axis=1), ((0, 0), (1, 1), (1, 1)))
    energy = (energy[:, :-2] + 2 * energy[:, 1:-1] + energy[:, 2:]) / 4
    energy = (energy[..., :-2] + 2 * energy[..., 1:-1] + energy[..., 2:]) / 4
    return np.asarray(np.sqrt(cells / np.sqrt(energy + np.float32(_FLAT**2))[:, None]))


def random_conv(x: Images) -> Images:
    """Random untrained filters, (n, C, H, W) to (n, 17, 7, 7), for images of at least 7×7 in [-1, 1].

    The rectified responses of sixteen 5×5 filters and the image itself are averaged over 7×7 cells. Each part is
    centred and normalised per image (A. Saxe et al.: On Random Weights and Unsupervised Feature Learning, ICML 2011).
    The filters are public: they are drawn from NumPy's legacy generator, whose stream is frozen.

    Raises:
        ModelError: images of less than 7 rows or columns, or no images.
    """
    import torch
    from torch.nn.functional import conv2d

    _need_images("random-conv", x, _CELLS)
    rows, columns = _spread(x.shape[2]), _spread(x.shape[3])
    filters = torch.as_tensor(_filters(x.shape[1]))
    features = np.empty((len(x), _FILTERS + 1, _CELLS, _CELLS), np.float32)
    for start in range(0, len(x), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        bright = np.ascontiguousarray((x[chunk] + 1) / 2, dtype=np.float32)
        responses = conv2d(torch.as_tensor(bright), filters, padding=_WIDTH // 2).relu().numpy()
        features[chunk, :_FILTERS] = _unit(rows @ responses @ columns.T)
        features[chunk, _FILTERS:] = _PIXELS * _unit(rows @ bright.mean(axis=1, keepdims=True) @ columns.T)
    return features * np.float32(_LENGTH / np.sqrt(1 + _PIXELS**2))


@lru_cache(maxsize=4)
def _filters(channels: int) -> Images:
    """(16, C, 5, 5) Gaussian filters that decrease towards their edges, with sum 0 and norm 1."""
    fading = np.hanning(_WIDTH + 2)[1:-1]
    drawn = np.random.RandomState(0).standard_normal((_FILTERS, channels, _WIDTH, _WIDTH))
    drawn *= np.sqrt(np.outer(fading, fading))
    drawn -= drawn.mean(axis=(1, 2, 3), keepdims=True)
    return np.asarray(drawn / np.sqrt((drawn**2).sum(axis=(1, 2, 3), keepdims=True)), np.float32)


def _unit(x: Images) -> Images:
    """Centre each image and scale it to norm 1; constant images become 0."""
    centred = x - x.mean(axis=(1, 2, 3), keepdims=True)
    return np.asarray(centred / (np.sqrt((centred**2).sum(axis=(1, 2, 3), keepdims=True)) + np.float32(1e-3)))


def _need_images(name: str, x: npt.NDArray[np.generic], side: int) -> None:
    if x.ndim != 4:
        raise ModelError(f"features '{name}' require images, not examples of shape {x.shape[1:]}; use 'none'")
    if min(x.shape[2:]) < side:
        raise ModelError(
            f"features '{name}' require images of at least {side}×{side}, not {x.shape[2]}×{x.shape[3]}; use 'none'"
        )


#: All features.
FEATURES: dict[str, FeatureInfo] = {
    info.name: info
    for info in (
        FeatureInfo("none", "unchanged images", identity),
        FeatureInfo("pool2", "2×2 average pooling", pool2),
        FeatureInfo("deskew", "images deskewed and centred by their moments", deskew),
        FeatureInfo("hog", "oriented gradients: 8 directions in 7×7 cells", hog),
        FeatureInfo("hog2", "hog, second-order gradients and pixels in 7×7 cells", hog2),
        FeatureInfo("random-conv", "16 fixed random filters and the image, in 7×7 cells", random_conv),
    )
}
