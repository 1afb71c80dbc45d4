"""What Residua must know about a transformer, and the registry of model families."""

import copy
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from ....errors import IntegrationError
from ....registry import Registry
from ... import Grid, Preset, around
from ...site import Ranges

WAN_PRESET = Preset(0.22, 0.20, 0.03, "not in the paper; taken over from Wan2.2")
IMAGE_PRESET = Preset(0.22, 0.20, 0.03, "not in the paper; an image model, settings as for Wan2.2")


class Family:
    """One model family. Subclass it, set the class constants, override what does not fit, and decorate with
    `register`."""

    name: ClassVar[str]
    models: tuple[str, ...]  # class names of the transformers
    attention: str  # regular expression: names of the self-attention modules
    preset = WAN_PRESET
    # Supported attention processors of diffusers. None: it passes its backend to the dispatcher, so a tagged
    # copy is enough. A class: Residua's own version of the processor, which does so.
    processors: Mapping[str, Any]
    generic = False  # knows nothing about the model except what its calls show
    # Dense calls gather the valid tokens of each sample instead of masking the others.
    dense_per_sample = False
    text_first = False  # whether the text precedes the video
    context_parallel = False  # whether Ulysses leaves the tokens in the order that `video_start` expects

    def grid(self, model: Any, inputs: Mapping[str, Any]) -> Grid:
        """The token grid of the video.

        Args:
            model: The transformer.
            inputs: Arguments of its forward pass, by name.

        Returns:
            Frames, height and width in tokens: by default those of `hidden_states` in patches of the model.
        """
        return patched_grid(inputs["hidden_states"], patch_of(model))

    def tokens(self, model: Any, inputs: Mapping[str, Any]) -> int:
        """How many tokens are video.

        Args:
            model: The transformer.
            inputs: Arguments of its forward pass, by name.

        Returns:
            Those of the grid, unless a family knows better.
        """
        return math.prod(self.grid(model, inputs))

    def video_start(self, queries: int, keys: int, video: int) -> tuple[int, int]:
        """Where the video begins in one call; everything else is pinned.

        Args:
            queries: Query rows of the call.
            keys: Keys of the call.
            video: How many of each are video.

        Returns:
            The first video row, and the first video key.
        """
        return (queries - video, keys - video) if self.text_first else (0, 0)

    def layout(self, model: Any, inputs: Mapping[str, Any]) -> Any:
        """What `text` must know about the forward pass in addition to the number of video tokens.

        Args:
            model: The transformer.
            inputs: Arguments of its forward pass, by name.

        Returns:
            Anything; it is handed to `text`.
        """
        return None

    def text(self, queries: int, keys: int, video: int, layout: Any) -> tuple[Ranges, Ranges]:
        """The query rows and keys of one call that are not video; IntegrationError if the call does not fit.

        Args:
            queries: Query rows of the call.
            keys: Keys of the call.
            video: How many of each are video.
            layout: From `layout`.

        Returns:
            Ranges of query rows, and ranges of keys.
        """
        start_q, start_k = self.video_start(queries, keys, video)
        if min(start_q, start_k) < 0 or start_q + video > queries or start_k + video > keys:
            raise IntegrationError(
                f"{video} video tokens do not fit {queries} queries and {keys} keys at {start_q}, {start_k}; "
                f"the {self.name} entry does not know this input: remove() Residua"
            )
        return around(start_q, start_q + video, queries), around(start_k, start_k + video, keys)

    def why_dense(self, queries: int, keys: int) -> str | None:
        """A reason to leave a call dense whatever the settings are.

        Args:
            queries: Query rows of the call.
            keys: Keys of the call.

        Returns:
            The reason, or None.
        """
        return None

    def processor(self, name: str, original: Any) -> Any:
        """The replacement for an attention processor.

        Args:
            name: Its class name.
            original: The processor.

        Returns:
            A copy of it or one of our own; None if it is not supported.
        """
        if name not in self.processors:
            return None
        own = self.processors[name]
        return taggable(original) if own is None else own(original)

    def timestep(self, inputs: Mapping[str, Any]) -> Any:
        """The timestep of a forward pass.

        Args:
            inputs: Arguments of the transformer's forward pass, by name.

        Returns:
            As the transformer gets it; None if it gets none.
        """
        return inputs.get("timestep")

    def depth(self, model: Any, name: str, index: int) -> int:
        """The position of a layer from the input, for `dense_layers`.

        Args:
            model: The transformer.
            name: Of the layer's module.
            index: Its position in module order.

        Returns:
            `index`, unless blocks are parallel.
        """
        return index

    def layers(self, model: Any) -> Iterator[tuple[str, Any]]:
        """The self-attention layers.

        Args:
            model: The transformer.

        Returns:
            Names and modules, in module order.
        """
        pattern = re.compile(self.attention)
        return ((name, module) for name, module in model.named_modules() if pattern.fullmatch(name))


def taggable(processor: Any) -> Any:
    """A processor that may be marked as that of one layer: a copy, because layers may share one. One with weights (an
    IP-Adapter) belongs to its layer, and torch would take a copy for another part of the model."""
    return processor if isinstance(processor, torch.nn.Module) else copy.copy(processor)


FAMILIES: Registry[Family] = Registry("model family")
register = FAMILIES.register


def supported() -> dict[str, Family]:
    """Every known transformer class name with its family; if two families name a class, the later one."""
    return {model: family for family in FAMILIES.values() for model in family.models}


def find_family(model: Any) -> Family | None:
    """The family of a transformer, by its class or its nearest known parent; None if there is none."""
    known = supported()
    return next((known[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in known), None)


def family_of(model: Any) -> Family:
    """The family of a transformer, by its class or its nearest known parent.

    Args:
        model: The transformer.

    Returns:
        The family; IntegrationError if there is none.
    """
    family = find_family(model)
    if family is None:
        raise IntegrationError(
            f"{type(model).__name__} is not a transformer that Residua knows; supported: "
            f"{', '.join(sorted(supported()))}. docs/add-a-model.md shows how to add one in 30 lines"
        )
    return family


def patch_of(model: Any) -> Grid:
    """The size of a patch in frames, height and width of the latents.

    Args:
        model: The transformer; its config has one size per axis, or one for both axes of a frame.

    Returns:
        Frames, height and width.
    """
    size = model.config.patch_size
    if isinstance(size, int):
        return getattr(model.config, "patch_size_t", None) or 1, size, size
    frames, height, width = size
    return frames, height, width


def patched_grid(latents: Any, patch: Grid) -> Grid:
    """The grid of latents that are divided into patches.

    Args:
        latents: [B, C, frames, height, width].
        patch: Frames, height and width of a patch.

    Returns:
        Frames, height and width in patches.
    """
    frames, height, width = (int(size) // step for size, step in zip(latents.shape[2:], patch, strict=True))
    return frames, height, width


def patches(latents: Any, patch: tuple[int, ...]) -> int:
    """How many patches latents [B, C, frames, height, width] are divided into, the last ones padded."""
    return math.prod(math.ceil(size / step) for size, step in zip(latents.shape[2:], patch, strict=True))
