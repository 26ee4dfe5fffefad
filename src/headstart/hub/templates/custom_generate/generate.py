"""Lossless decoding in transformers with the draft heads of this repository; to install headstart see README.md.

model.generate(**inputs, custom_generate="USER/HEADS", trust_remote_code=True)
"""

try:
    from headstart.hf_generate.call import generate
except ModuleNotFoundError as error:
    if error.name != "headstart":
        raise
    raise ImportError("These heads need headstart, which is not installed: see README.md in their folder.") from None

__all__ = ["generate"]
