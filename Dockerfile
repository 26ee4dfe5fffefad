# The quickstart on a laptop, in a container. Written for Docker, but never built or run by its authors, whose machines have none:
# the commands inside are those of README, which are tested.
#
#   docker build -t headstart .
#   docker run --rm -it -v headstart-runs:/headstart/runs -v headstart-cache:/home/user/.cache headstart
FROM python:3.12-slim-bookworm

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends git make gcc g++ libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 user \
 && install --directory --owner=user /headstart /headstart/runs /home/user/.cache

USER 1000
WORKDIR /headstart
COPY --chown=user . .
# The build of torch for CPUs is a tenth of the size of the usual one.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN make .venv/.quickstart
ENV PATH=/headstart/.venv/bin:$PATH

CMD ["headstart", "run", "quickstart"]
