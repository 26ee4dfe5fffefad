"""Lets transformers decode with the draft heads of this repository, losslessly; README.md says where headstart is from.

model.generate(**inputs, custom_generate="USER/HEADS", trust_remote_code=True)
"""

try:
    from headstart.hf_generate.call import generate
except ModuleNotFoundError as error:
    if error.name != "headstart":
        raise
    raise ImportError(
        "These heads decode with headstart, which is not installed here: README.md beside them says where it is from."
    ) from None

__all__ = ["generate"]
