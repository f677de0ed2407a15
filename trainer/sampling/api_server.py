"""vLLM's server of a model, which sees the images of requests as training sees those of rows:
`python -m trainer.sampling.api_server`, with vLLM's own options.

vLLM's decoder makes 16-bit gray white and floating point black, and opens formats that no row may have.
"""

from __future__ import annotations

import runpy
from typing import Any

from trainer.images.decoding import ImageLimits, open_image, shown_image

PROGRAM = "vllm.entrypoints.launchers.api_server.entry"
LIMITS = ImageLimits(min_side=4)
"""A small image is enlarged by the processor; with sides of 1 or 3 it cannot tell pixels from channels."""


def decode_as_training() -> None:
    """Gives vLLM the trainer's decoder."""
    from vllm.multimodal.media.base import MediaWithBytes
    from vllm.multimodal.media.image import ImageMediaIO

    def load_bytes(self: Any, data: bytes) -> Any:
        """Raises ValueError, which a caller reads with status 400."""
        try:
            with open_image(data) as image:
                return MediaWithBytes(shown_image(image, LIMITS), data)
        except Exception as error:  # decoders raise anything
            raise ValueError(f"the image cannot be shown: {type(error).__name__}: {error}") from None

    ImageMediaIO.load_bytes = load_bytes


if __name__ == "__main__":
    decode_as_training()
    runpy.run_module(PROGRAM, run_name="__main__")
