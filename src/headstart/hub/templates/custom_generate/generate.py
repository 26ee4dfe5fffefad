"""Lets transformers decode with the draft heads of this repository, losslessly; needs `pip install headstart`.

model.generate(**inputs, custom_generate="USER/HEADS", trust_remote_code=True)
"""

from headstart.hf_generate.call import generate

__all__ = ["generate"]
