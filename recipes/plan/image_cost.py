"""What the images of a step cost besides tokens: the host's work on their pixels, and the vision tower of the
engine's prefill."""

from __future__ import annotations

from recipes.plan.passes import Passes
from trainer.config import RunConfig
from trainer.config.budget import image_token_cost
from trainer.hardware.model_shapes import Shape

PIXEL_S = 40e-9
"""Host seconds per pixel of an image that is decoded, resized and cut into patches on one core: 23 to 34
measured for JPEG files of 0.3 to 4.2 megapixels, 31 to 41 for PNG."""
IMAGE_S = 5e-3
"""Host seconds per image whatever its size: chat template, tokenizer, hash, placeholders (assumption)."""


def host_seconds(config: RunConfig, shape: Shape, step: Passes) -> float:
    """Seconds of one step in which images are made ready and GPUs wait.

    An engine's ranks read all images of its prompts before it decodes the first token, and each rank reads
    those of its share of the samples again for the policy.
    """
    if not shape.vision:
        return 0.0
    token_pixels = (shape.vision.patch * shape.vision.merge) ** 2
    all_images_s = 0.0
    for tokens in _image_tokens(step):
        all_images_s += tokens * token_pixels * PIXEL_S + IMAGE_S
    world = config.placement.world_size
    engines = world / config.rollout.tensor_parallel
    return all_images_s / engines + all_images_s / world


def tower_flops(shape: Shape, step: Passes) -> float:
    """Operations of the vision tower in the engines' prefill, once for each image: completions share it."""
    return sum(_image_tokens(step)) * image_token_cost(shape) * 2 * shape.matmul_parameters


def _image_tokens(step: Passes) -> list[int]:
    """Tokens of each prompt's image; a prompt's samples share it."""
    by_prompt = {length.prompt: length.image_tokens for length in step.lengths}
    return list(by_prompt.values())
