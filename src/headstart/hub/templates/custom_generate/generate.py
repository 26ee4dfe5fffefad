"""Decode with the draft heads of this repository in transformers, losslessly; README.md has the installation.

model.generate(**inputs, custom_generate="USER/HEADS", trust_remote_code=True)
"""

try:
    from headstart.hf_generate.call import generate
except ModuleNotFoundError as error:
    if error.name != "headstart":
        raise
    raise ImportError("These heads need headstart, which is not installed: see README.md beside them.") from None

__all__ = ["generate"]
