"""The commands that README.md, docs/scaling.md and docs/serving.md print, run at toy size: see `rehearse`."""
