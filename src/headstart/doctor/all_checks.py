"""All checks of the doctor: importing this registers them."""

from headstart.doctor import decoding, overfit, rendering, states, weights  # noqa: F401
