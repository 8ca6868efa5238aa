# Give the image that fits your driver, with Python 3.11 or newer and a torch that you trust (2.6 or newer):
#   docker build --build-arg BASE=<image with torch> -t domino-lm .
# The torch of that image stays: nothing here installs another.
ARG BASE
# hadolint ignore=DL3006
FROM ${BASE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/domino-lm
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY domino_lm ./domino_lm
COPY examples/data ./examples/data
COPY tools ./tools

# Versions that the image holds win over the pinned ones.
RUN python3 -m pip freeze --all | sed -E 's/[ =@].*//' | tr 'A-Z_' 'a-z-' > held.txt \
    && awk -F'==' 'NR == FNR { held[$1]; next } { name = tolower($1); gsub("_", "-", name); if (!(name in held)) print }' \
        held.txt constraints.txt > free.txt \
    && python3 -m pip install --no-cache-dir -c free.txt '.[plot,fast,inputs]' \
    && python3 -c "import torch, domino_lm.pretrain" \
    && rm held.txt free.txt

WORKDIR /workspace
ENTRYPOINT ["domino-lm-pretrain"]
CMD ["--help"]
